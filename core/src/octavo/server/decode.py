"""JSON bodies into typed structs, strictly: a wrong type, NaN, Infinity or 1e999 is an error that names the field.

Unknown fields are ignored, as OpenAI's servers do for the sake of newer clients, and logged in one line.
"""

from __future__ import annotations

import json
import logging
import math
import re
from collections.abc import Iterator
from typing import Any, TypeVar

import msgspec

from octavo.errors import RequestError

log = logging.getLogger("octavo.server")

Body = TypeVar("Body", bound=msgspec.Struct)

_PATH = re.compile(r" - at `\$\.?(.*)`$")
_MISSING = re.compile(r"missing required field `([^`]*)`")
_keys = msgspec.json.Decoder(dict[str, msgspec.Raw])


def decode_body(data: bytes, kind: type[Body]) -> Body:
    """Decode a body. Raises RequestError naming the field."""
    try:
        body = msgspec.json.decode(data, type=kind)
        unknown = _keys.decode(data).keys() - set(kind.__struct_fields__)
    except msgspec.ValidationError as error:
        raise _wrong_type(str(error)) from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise _malformed(data, error) from None
    if unknown:
        log.warning("ignored unknown fields: %s", ", ".join(sorted(unknown))[:500])
    return body


def decode_part(value: Any, kind: Any, place: str) -> Any:
    """A `kind` from a part of a body whose JSON was decoded before. place: where it is, such as "messages[2]".

    For lists of things that are told apart by their fields: decoded with the body, an error could not say which item
    is wrong. Raises RequestError naming the field.
    """
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        if isinstance(inner := error.__cause__, RequestError):  # what a struct itself found wrong
            inner.field = f"{place}.{inner.field}" if inner.field else place
            raise inner from None
        raise _wrong_type(str(error), place) from None


def _wrong_type(message: str, place: str = "") -> RequestError:
    missing = _MISSING.search(message)
    path = _PATH.search(message)
    inner = path.group(1) if path else ""
    field = f"{place}.{inner}" if place and inner and not inner.startswith("[") else place + inner
    if missing:
        name = f"{field}.{missing.group(1)}" if field else missing.group(1)
        return RequestError(f"{name} is required", field=name)
    text = _PATH.sub("", message)
    return RequestError(f"{field or 'the body'}: {text[:1].lower()}{text[1:]}", field=field)


def _malformed(data: bytes, error: Exception) -> RequestError:
    """Name the field of what is no JSON but looks like it: NaN, Infinity, half a surrogate pair."""
    if isinstance(error, RecursionError):
        return RequestError("the body is nested too deeply")
    try:
        value = json.loads(data)
    except (ValueError, RecursionError):
        return RequestError(f"the body is not valid JSON: {error}")
    for field, problem in _problems(value, ""):
        return RequestError(f"{field} {problem}", field=field)
    return RequestError(f"the body is not valid JSON: {error}")


def _problems(value: Any, path: str) -> Iterator[tuple[str, str]]:
    if isinstance(value, float) and not math.isfinite(value):
        yield path, "must be a finite number"
    elif isinstance(value, str) and any("\ud800" <= c <= "\udfff" for c in value):
        yield path, "holds half a surrogate pair, which is no character"
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from _problems(item, f"{path}.{key}" if path else key)
    elif isinstance(value, list):
        for index, item in enumerate(value):
            yield from _problems(item, f"{path}[{index}]")
