"""Whether a dataclass that a plugin filled in holds what its annotations say: Python itself does not look."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from types import UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints


def wrong_field(value: Any) -> str:
    """What is wrong with the first wrong field of a dataclass instance, its parts included, in one line; else empty."""
    return next(wrong_fields(value), "")


def wrong_fields(value: Any, where: str = "") -> Iterator[str]:
    """One line for each wrong field: "devices[0].name must be str, not 3". where: what stands before their names."""
    hints = get_type_hints(type(value))
    for field in fields(value):
        yield from mismatches(getattr(value, field.name), hints[field.name], f"{where}{field.name}")


def mismatches(value: Any, kind: Any, name: str) -> Iterator[str]:
    """One line for each part of `value` that is not of type `kind`. A list may stand for a tuple of any length."""
    origin, inner = get_origin(kind), get_args(kind)
    if origin in (Union, UnionType):
        fits = any(not [*mismatches(value, one, name)] for one in inner)
    elif origin is tuple:
        fits = isinstance(value, tuple | list)
    elif kind in (int, float):
        fits = isinstance(value, kind) and not isinstance(value, bool)
    else:
        fits = isinstance(value, origin or kind)
    if not fits:
        yield f"{name} must be {getattr(kind, '__name__', kind) if origin is None else kind}, not {value!r}"
    elif origin is tuple:
        for i, item in enumerate(value):
            yield from mismatches(item, inner[0], f"{name}[{i}]")
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from mismatches(key, inner[0], f"a key of {name}")
            yield from mismatches(item, inner[1], f"{name}[{key!r}]")
    elif is_dataclass(value):
        yield from wrong_fields(value, f"{name}.")
