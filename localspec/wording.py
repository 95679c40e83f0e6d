"""Numbers in messages."""

from __future__ import annotations

__all__ = ["counted"]


def counted(number: int, noun: str) -> str:
    """Return a number of things, whose plural has an s.

    >>> counted(1, "token"), counted(2, "drafted token"), counted(0, "row")
    ('1 token', '2 drafted tokens', '0 rows')
    """
    return f"{number} {noun}{'' if number == 1 else 's'}"
