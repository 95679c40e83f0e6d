"""Numbers and values in messages."""

from __future__ import annotations

from reprlib import Repr

__all__ = ["counted", "shown"]

_REPR = Repr()
_REPR.maxstring = _REPR.maxlong = _REPR.maxother = 60
_REPR.maxlevel = 3


def shown(value: object) -> str:
    """Return ``repr(value)``, shortened: whatever somebody wrote into an option must not become the whole message.

    >>> shown("hot"), shown([1, [2, [3, [4]]]]), len(shown(10**400))
    ("'hot'", '[1, [2, [3, [...]]]]', 60)
    """
    try:
        return _REPR.repr(value)
    except (ValueError, RecursionError):  # of a number with more digits than Python writes
        return f"a {type(value).__name__}"


def counted(number: int, noun: str) -> str:
    """Return a number of things, whose plural has an s.

    >>> counted(1, "token"), counted(2, "drafted token"), counted(0, "row")
    ('1 token', '2 drafted tokens', '0 rows')
    """
    return f"{number} {noun}{'' if number == 1 else 's'}"
