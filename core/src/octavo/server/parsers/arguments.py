"""Arguments that a model writes as text, one by one, as JSON typed by the tool's JSON schema."""

from __future__ import annotations

import ast
import json
import warnings
from collections.abc import Mapping
from typing import Any

from octavo.server.parsers.json_text import as_json, quoted, word_value

Schema = Mapping[str, Any]
KINDS = {dict: "object", list: "array", tuple: "array", str: "string", bool: "boolean", int: "integer", float: "number"}
MAX_DEPTH = 16
"""Of references and alternatives that are followed to learn a type."""


class Parameters:
    """The types of a tool's parameters. schema: the JSON schema of its arguments; None knows of no types."""

    def __init__(self, schema: Schema | None) -> None:
        self._schema = schema if isinstance(schema, Mapping) else {}
        properties = self._schema.get("properties")
        self._properties = properties if isinstance(properties, Mapping) else {}

    def types(self, key: str) -> frozenset[str]:
        """The JSON types that the schema allows for a parameter; empty if it does not say."""
        return frozenset(self._types(self._properties.get(key), MAX_DEPTH))

    def listed(self, key: str) -> frozenset[str]:
        """The strings that the schema lists for a parameter; empty if it lists none."""
        schema = self._properties.get(key)
        for _ in range(MAX_DEPTH):
            if not isinstance(schema, Mapping) or not isinstance(reference := schema.get("$ref"), str):
                break
            schema = self._resolve(reference)
        if not isinstance(schema, Mapping):
            return frozenset()
        values = schema["enum"] if isinstance(schema.get("enum"), list) else [schema.get("const")]
        return frozenset(value for value in values if isinstance(value, str))

    def _types(self, schema: Any, depth: int) -> set[str]:
        if not isinstance(schema, Mapping) or not depth:
            return set()
        declared = schema.get("type")
        if isinstance(declared, str):
            return {declared} | ({"null"} if schema.get("nullable") is True else set())
        if isinstance(declared, list):
            return {kind for kind in declared if isinstance(kind, str)}
        values = schema["enum"] if isinstance(schema.get("enum"), list) else []
        values = [*values, *([schema["const"]] if "const" in schema else [])]
        if values:
            return {KINDS.get(type(value), "null") for value in values}
        found: set[str] = set()
        if isinstance(reference := schema.get("$ref"), str):
            found |= self._types(self._resolve(reference), depth - 1)
        for union in ("anyOf", "oneOf", "allOf"):
            for choice in schema.get(union) or () if isinstance(schema.get(union), list) else ():
                found |= self._types(choice, depth - 1)
        if not found and "properties" in schema:
            found.add("object")
        return found

    def _resolve(self, reference: str) -> Any:
        """What `#/$defs/Name` stands for; None for a reference to elsewhere."""
        node: Any = self._schema
        for part in reference.removeprefix("#/").split("/"):
            node = node.get(part.replace("~1", "/").replace("~0", "~")) if isinstance(node, Mapping) else None
        return node

    def word(self, key: str, word: str) -> str:
        """JSON of an unquoted word: a number or literal, unless the parameter is a string."""
        value = word_value(word)
        if value is None or (self.types(key) == {"string"} and value != "null"):
            return f'"{quoted(word)}"'
        return value


class ArgumentWriter:
    """Writes `{"key": value, ...}` piece by piece. Each method returns what it adds.

    trim: one line break before and behind a value is the format's, not the value's.
    A parameter that is a string is passed on as it comes; any other is written when it is complete, and so is one whose
    strings are listed: the grammars of some formats allow white space around those.
    """

    def __init__(self, parameters: Parameters, *, trim: bool) -> None:
        self._parameters = parameters
        self._trim = trim
        self._written = False
        self._key: str | None = None
        self._types: frozenset[str] = frozenset()
        self._listed: frozenset[str] = frozenset()
        self._raw = ""
        self._streams = False

    def start(self, key: str, *, is_text: bool | None = None) -> None:
        """A value begins. is_text: the model itself says whether it is text or JSON; None leaves it to the schema."""
        self._key = key.strip()
        self._listed = self._parameters.listed(self._key)
        types = self._parameters.types(self._key)
        self._types = types if is_text is None else frozenset({"string"}) if is_text else types - {"string"}
        self._raw, self._streams = "", False

    def text(self, text: str) -> str:
        """More of the value."""
        if self._streams:
            return quoted(text)
        self._raw += text
        if self._listed or "string" not in self._types or self._types - {"string", "null"} or self._maybe_null():
            return ""
        out = self._begin() + '"' + quoted(self._value_so_far())
        self._streams, self._raw = True, ""
        return out

    def _maybe_null(self) -> bool:
        """Whether it is too early to tell that a string begins: nothing but a line break, or part of a null."""
        value = self._value_so_far()
        return not value or ("null" in self._types and "null".startswith(value.strip().lower()))

    def _value_so_far(self) -> str:
        return self._raw.removeprefix("\n") if self._trim else self._raw

    def end(self, *, cut_off: bool = False) -> str:
        """The value is complete, or `cut_off`: then one that does not parse as its type is left out."""
        if self._key is None:
            return ""
        if self._streams:
            self._key, self._streams = None, False
            return '"'
        value = typed(self._value_so_far(), self._types)
        if isinstance(value, str) and value not in self._listed and value.strip() in self._listed:
            value = value.strip()
        wrong = cut_off and isinstance(value, str) and "string" not in self._types
        out = "" if wrong else self._begin() + as_json(value)
        self._key = None
        return out

    def close(self) -> str:
        """No more values. A value that is still open is cut off."""
        out = self.end(cut_off=True)
        return out + ("}" if self._written else "{}")

    def held(self) -> str:
        """What was read and not given out."""
        return self._raw

    def _begin(self) -> str:
        lead = ", " if self._written else "{"
        self._written = True
        return f'{lead}"{quoted(self._key or "")}": '


def typed(text: str, types: frozenset[str]) -> Any:
    """The value that the text means; without types JSON if it is JSON. What fits no type stays text."""
    if types == {"string"}:
        return text
    stripped = text.strip()
    if (not types or "null" in types) and stripped.lower() in ("null", "none"):
        return None
    if "boolean" in types and stripped.lower() in ("true", "false", "1", "0") and not types & {"integer", "number"}:
        return stripped.lower() in ("true", "1")
    value = parsed(stripped)
    kind = KINDS.get(type(value), "null")
    if isinstance(value, float) and value.is_integer() and "integer" in types and "number" not in types:
        return int(value)
    fits = kind in types or (kind == "integer" and "number" in types) or not types
    return value if fits and kind != "string" else text


def parsed(text: str) -> Any:
    """The value of JSON or of a Python literal; the text itself if it is neither."""
    for read in (json.loads, _python_literal):
        try:
            value = read(text)
            json.dumps(value, allow_nan=False)
        except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
            continue
        return value
    return text


def _python_literal(text: str) -> Any:
    with warnings.catch_warnings():  # of escapes that Python does not know
        warnings.simplefilter("ignore")
        return ast.literal_eval(text)
