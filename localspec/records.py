"""Frozen dataclasses from JSON values, checked against their annotations."""

from __future__ import annotations

from dataclasses import fields, is_dataclass
from math import isfinite
from types import NoneType, UnionType
from typing import Any, Literal, TypeVar, get_args, get_origin, get_type_hints

__all__ = ["read_record"]

_T = TypeVar("_T")


def read_record(kind: type[_T], value: Any, where: str) -> _T:
    """Return the dataclass ``kind`` that ``dataclasses.asdict`` turned into ``value``, by way of JSON.

    Fields may be int, finite float, str, literals, tuples of any length, None, and dataclasses of such. One whose
    default is None may be missing.

    Args:
        kind: the dataclass.
        value: what the JSON parser returned.
        where: its name in messages.

    Raises:
        ValueError: a field is missing, unknown, of another type, or refused by the dataclass; the message says which.
    """
    names = {field.name for field in fields(kind)}  # type: ignore[arg-type]
    if isinstance(value, dict):  # what was written before a field came to be
        value = {f.name: None for f in fields(kind) if f.default is None} | value  # type: ignore[arg-type]
    if not isinstance(value, dict) or value.keys() != names:
        raise ValueError(f"{where} does not have the fields {', '.join(sorted(names))}")
    hints = get_type_hints(kind)
    arguments = {name: _read(hints[name], value[name], f"{where}.{name}") for name in names}
    try:
        return kind(**arguments)
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from None


def _read(kind: Any, value: Any, where: str) -> Any:
    if isinstance(kind, type) and is_dataclass(kind):
        return read_record(kind, value, where)
    origin, arguments = get_origin(kind), get_args(kind)
    if origin is UnionType and NoneType in arguments:
        return None if value is None else _read(next(a for a in arguments if a is not NoneType), value, where)
    if origin is tuple and isinstance(value, list):
        return tuple(_read(arguments[0], item, f"{where}[{i}]") for i, item in enumerate(value))
    if origin is Literal and value in arguments:
        return value
    if kind is float and isinstance(value, int | float) and not isinstance(value, bool) and isfinite(value):
        return float(value)
    if kind in (int, str) and type(value) is kind:
        return value
    raise ValueError(f"{where} is {str(value)[:40]!r}, which is no {getattr(kind, '__name__', kind)}")
