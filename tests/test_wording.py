"""Numbers and values in messages."""

import pytest

from localspec.wording import counted, shown


@pytest.mark.parametrize(
    ("number", "said"), [(0, "0 tokens"), (1, "1 token"), (2, "2 tokens"), (1000, "1000 tokens")]
)
def test_one_is_not_several(number, said):
    assert counted(number, "token") == said


@pytest.mark.parametrize(
    "value", [10**5000, [10**5000], "x" * 10**6, [["x"] * 99] * 99, {i: i for i in range(999)}], ids=range(5)
)
def test_a_value_is_shown_in_part(value):
    assert 0 < len(shown(value)) < 400


def test_a_value_is_shown_as_python_writes_it():
    for value in ("a'b", 1.5, True, None, [1, "x"], {"a": (1,)}, b"x"):
        assert shown(value) == repr(value)
