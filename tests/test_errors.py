"""The tree of errors is the one its docstring draws."""

from __future__ import annotations

import inspect
import re

import pytest

from localspec import errors
from localspec.errors import InvalidOptionError, LocalspecError

CLASSES = {
    name: value for name, value in vars(errors).items() if inspect.isclass(value) and issubclass(value, BaseException)
}


def drawn() -> dict[str, tuple[str | None, int | None]]:
    """Return from the docstring, by class: its parent, and the exit code written beside it."""
    tree: dict[str, tuple[str | None, int | None]] = {}
    path: list[tuple[int, str]] = []
    for line in (errors.__doc__ or "").splitlines():
        found = re.search(r"(\w+Error)\b(?:\s+(?:exit code )?(\d+))?", line)
        if not found or not re.match(r"^[\s│├└─]*\w+Error", line):
            continue
        while path and path[-1][0] >= found.start():
            path.pop()
        tree[found[1]] = (path[-1][1] if path else None, int(found[2]) if found[2] else None)
        path.append((found.start(), found[1]))
    return tree


def test_the_docstring_draws_the_tree() -> None:
    tree = drawn()
    assert set(tree) == set(CLASSES) == set(errors.__all__)
    for name, (parent, exit_code) in tree.items():
        bases = [base.__name__ for base in CLASSES[name].__bases__ if issubclass(base, LocalspecError)]
        assert bases == ([parent] if parent else [])
        if exit_code is not None:
            assert CLASSES[name].exit_code == exit_code


@pytest.mark.parametrize("name", sorted(CLASSES))
def test_every_error_has_a_description_and_an_exit_code(name: str) -> None:
    error = CLASSES[name]
    assert error.__doc__
    assert error.exit_code == (2 if issubclass(error, InvalidOptionError) else 1)
    assert str(error("what, which, remedy")) == "what, which, remedy"
    assert isinstance(error(""), LocalspecError)


def test_a_bad_option_is_a_value_error_too() -> None:
    assert issubclass(InvalidOptionError, ValueError)


@pytest.mark.parametrize(
    ("message", "shown"),
    [
        ("the seed is " + "9" * 400 + "; use less", "the seed is " + "9" * 60 + "… (401 characters) use less"),
        ("/a" * 149 + " is no file", "/a" * 149 + " is no file"),
        ("no " * 2000, "no " * 833 + "n … " + ("no " * 2000)[-500:]),
    ],
)
def test_a_message_shows_the_beginning_of_a_long_value(message: str, shown: str) -> None:
    assert str(InvalidOptionError(message)) == shown
