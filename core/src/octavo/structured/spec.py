"""What shape an answer must have: names as in vLLM, checked when made. Imports no grammar library."""

from __future__ import annotations

import json
from typing import Any, Literal

import msgspec

from octavo.errors import RequestError

KINDS = ("json", "regex", "choice", "grammar", "json_object", "structural_tag")
BACKENDS = ("auto", "xgrammar", "guidance")
Backend = Literal["auto", "xgrammar", "guidance"]

MAX_BYTES = 1 << 20
"""Longest spec, in UTF-8 bytes."""
MAX_CHOICES = 20_000
MAX_SCHEMA_DEPTH = 64
MAX_TAG_DEPTH = 80
"""A structural tag holds schemas a few levels down."""


class StructuredOutputs(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The shape of an answer. Exactly one of the first six is given. Raises RequestError naming the field.

    json: a JSON schema, as text or as an object (kept as text). json_object: True: any JSON object.
    regex: of the whole answer. choice: one of these texts.
    grammar: EBNF (GBNF, root rule `root`), or Lark (start rule `start`).
    structural_tag: JSON of a tag spec: text that is free except where a tag begins.
    disable_any_whitespace: JSON on one line, without optional spaces. whitespace_pattern: regex of what may stand
        between JSON tokens. disable_additional_properties: objects of a schema take no properties beyond its own
        unless it says that they do.
    backend: "auto" takes the one that knows all of the spec's features.
    """

    json: str | dict[str, Any] | None = None
    regex: str | None = None
    choice: tuple[str, ...] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    structural_tag: str | dict[str, Any] | None = None
    disable_any_whitespace: bool = False
    disable_additional_properties: bool = False
    whitespace_pattern: str | None = None
    backend: Backend = "auto"

    def __post_init__(self) -> None:
        # Offline users pass lists and dicts; a frozen Struct takes the canonical form here.
        force = msgspec.structs.force_setattr
        given = [name for name in KINDS if getattr(self, name) is not None]
        if len(given) != 1:
            found = "none of them" if not given else " and ".join(given)
            raise _wrong(f"structured_outputs takes exactly one of {', '.join(KINDS)}; given: {found}")
        if self.choice is not None:
            force(self, "choice", _choices(self.choice))
        if self.json is not None:
            force(self, "json", _json_object(self.json, "json", MAX_SCHEMA_DEPTH))
        if self.structural_tag is not None:
            force(self, "structural_tag", _json_object(self.structural_tag, "structural_tag", MAX_TAG_DEPTH))
        if self.json_object is not None and self.json_object is not True:
            raise _wrong("json_object must be true, or be left out", "json_object")
        for name in ("regex", "grammar", "whitespace_pattern"):
            if getattr(self, name) is not None:
                _text(getattr(self, name), name)
        for name in ("regex", "whitespace_pattern"):
            pattern = getattr(self, name) or ""
            if (len(pattern) - len(pattern.rstrip("\\"))) % 2:
                # A backend that puts slashes around a pattern would take it for an escaped slash.
                raise _wrong(f"{name} ends with a backslash that escapes nothing", name)
        for name in ("disable_any_whitespace", "disable_additional_properties"):
            if not isinstance(getattr(self, name), bool):
                raise _wrong(f"{name} must be true or false", name)
        if self.whitespace_pattern is not None and (self.disable_any_whitespace or self.structural_tag is not None):
            other = "disable_any_whitespace" if self.disable_any_whitespace else "structural_tag"
            raise _wrong(f"whitespace_pattern cannot be used together with {other}", "whitespace_pattern")
        if self.backend not in BACKENDS:
            raise _wrong(f"backend must be one of {', '.join(BACKENDS)}, not {self.backend!r}", "backend")

    @property
    def kind(self) -> str:
        """Which of `KINDS` is given."""
        return next(name for name in KINDS if getattr(self, name) is not None)

    @property
    def size(self) -> int:
        """Characters of what is given."""
        source = getattr(self, self.kind)
        return sum(map(len, source)) if isinstance(source, tuple) else len(str(source))


def field_of(name: str) -> str:
    """How errors name a field of the spec."""
    return f"structured_outputs.{name}" if name else "structured_outputs"


def _wrong(message: str, name: str = "") -> RequestError:
    return RequestError(message, field=field_of(name))


def _text(value: object, name: str) -> str:
    """A text that every backend can take."""
    if not isinstance(value, str) or not value:
        raise _wrong(f"{name} must be a text that is not empty", name)
    if "\0" in value:
        raise _wrong(f"{name} holds a NUL character", name)
    try:
        size = len(value.encode())
    except UnicodeEncodeError as error:
        raise _wrong(f"{name} is not valid Unicode: a lone surrogate at character {error.start}", name) from None
    if size > MAX_BYTES:
        raise _wrong(f"{name} has {size} bytes; at most {MAX_BYTES} are taken", name)
    return value


def _choices(value: object) -> tuple[str, ...]:
    if not isinstance(value, list | tuple) or not value:
        raise _wrong("choice must be a list of texts that is not empty", "choice")
    if len(value) > MAX_CHOICES:
        raise _wrong(f"choice holds {len(value)} texts; at most {MAX_CHOICES} are taken", "choice")
    texts = tuple(dict.fromkeys(_text(each, "choice") for each in value))
    if sum(map(len, texts)) > MAX_BYTES:
        raise _wrong(f"choice has more than {MAX_BYTES} characters", "choice")
    return texts


def _json_object(value: object, name: str, max_depth: int) -> str:
    """A JSON object as text, in the order of its keys."""
    text, parsed = "", value
    try:
        if isinstance(value, str):
            text, parsed = value, json.loads(_text(value, name), parse_constant=_no_constant)
        elif isinstance(value, dict):
            text = _text(json.dumps(value, allow_nan=False, ensure_ascii=False), name)
        if not isinstance(parsed, dict):
            raise _wrong(f"{name} must be a JSON object, or its text", name)
        _check_depth(parsed, name, max_depth)
    except RequestError:
        raise
    except RecursionError:
        raise _wrong(f"{name} is nested more than {max_depth} levels deep", name) from None
    except (TypeError, ValueError) as error:
        raise _wrong(f"{name} is not JSON: {error}", name) from None
    return text


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is no JSON value")


def _check_depth(value: object, name: str, limit: int) -> None:
    level: list[object] = [value]
    for _ in range(limit):
        level = [
            child
            for each in level
            if isinstance(each, dict | list)
            for child in (each.values() if isinstance(each, dict) else each)
        ]
        if not level:
            return
    if any(isinstance(each, dict | list) for each in level):
        raise _wrong(f"{name} is nested more than {limit} levels deep", name)
