"""Grammars that hold a model to its own format: xgrammar's structural tags, as JSON.

- "required": one call or more (one, unless parallel); "named": one call of that tool; nothing else beside them.
- "auto": free text; where a call begins, it must be one of a known tool. Only if some tool is strict: then its
  arguments follow its schema, and those of the others are any JSON object.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from octavo.server.parsers.arguments import Parameters
from octavo.server.parsers.events import Tool
from octavo.server.parsers.grammar import CallTag

Json = dict[str, Any]
ANY_OBJECT: Json = {"type": "object"}
ANY_TEXT: Json = {"type": "any_text"}
ESCAPE = "<escape>"
ANY_ARGUMENTS = {
    "pythonic": r"""
root ::= (argument (", " argument)*)?
argument ::= [A-Za-z_] [A-Za-z0-9_]* "=" value
value ::= string | list | dict | [A-Za-z0-9_.+\-]+
string ::= "\"" ([^"\\\n] | "\\" [^\n])* "\"" | "'" ([^'\\\n] | "\\" [^\n])* "'"
list ::= "[" (value (", " value)*)? "]"
dict ::= "{" (string ": " value (", " string ": " value)*)? "}"
""",
    "escaped": r"""
root ::= object
object ::= "{" (pair ("," pair)*)? "}"
pair ::= [A-Za-z0-9_.\-]+ ":" value
value ::= "<escape>" ([^<] | "<" [^e])* "<escape>" | object | list | [A-Za-z0-9_.+\-]+
list ::= "[" (value ("," value)*)? "]"
""",
}
"""Grammars of arguments that no schema describes, in the styles that xgrammar does not know."""

MAX_DEPTH = 6
"""Of objects in objects that are written with escapes."""

Value = Callable[[Json, Json], Json]
"""(schema, the root it may refer to) -> the format of a value."""


def structural_tag(
    tag: CallTag, tools: Sequence[Tool], *, choice: str, name: str | None = None, parallel: bool = True
) -> Json | None:
    """The structural tag, or None if there is nothing to force. choice: "auto", "required" or "named" (a `name`)."""
    if choice == "named":
        tools, parallel = [tool for tool in tools if tool.name == name], False
    if not tools or (choice == "auto" and not any(tool.strict for tool in tools)):
        return None
    calls = [_call(tag, tool, free=choice == "auto" and not tool.strict) for tool in tools]
    if choice == "auto":
        return _wrapped(_free_text(tag, calls, parallel=parallel))
    thought = [] if tag.thought is None else [_maybe(_tag(tag.thought[0], ANY_TEXT, tag.thought[1]))]
    return _wrapped(_sequence(*thought, _text(tag.before), _listed(tag, calls, parallel=parallel), _text(tag.after)))


def _wrapped(format: Json) -> Json:
    return {"type": "structural_tag", "format": format}


def _listed(tag: CallTag, calls: list[Json], *, parallel: bool) -> Json:
    return {
        "type": "tags_with_separator",
        "tags": calls,
        "separator": tag.between,
        "at_least_one": True,
        "stop_after_first": not parallel,
    }


def _free_text(tag: CallTag, calls: list[Json], *, parallel: bool) -> Json:
    """Any text, and calls where the trigger comes; without one, calls or text that does not begin like them."""
    if not tag.trigger:
        first = re.escape((tag.before or tag.begin)[0])
        listed = _sequence(_text(tag.before), _listed(tag, calls, parallel=parallel), _text(tag.after))
        return _either([listed, {"type": "regex", "pattern": rf"([^{first}\s](.|\n)*)?"}])
    if tag.before:
        calls = [_tag(tag.before, _listed(tag, calls, parallel=parallel), tag.after)]
    return {
        "type": "triggered_tags",
        "triggers": [tag.trigger],
        "tags": calls,
        "at_least_one": False,
        "stop_after_first": not parallel and not tag.before,
    }


def _call(tag: CallTag, tool: Tool, *, free: bool) -> Json:
    schema = dict(tool.parameters) if tool.parameters and not free else ANY_OBJECT
    content = _arguments(tag.style, schema)
    if tag.number:
        content = _sequence({"type": "regex", "pattern": "[0-9]{1,4}"}, _text(tag.number), content)
    return _tag(tag.begin.replace("{name}", tool.name), content, tag.end)


def _arguments(style: str, schema: Json) -> Json:
    if style in ANY_ARGUMENTS and "properties" not in schema:
        return {"type": "grammar", "grammar": ANY_ARGUMENTS[style]}
    match style:
        case "pythonic":
            return _one_by_one(schema, schema, assign="=", between=", ", value=_python_value)
        case "escaped":
            return _escaped_object(schema, schema, MAX_DEPTH)
        case "json":
            return {"type": "json_schema", "json_schema": schema}
    return {"type": "json_schema", "json_schema": schema, "style": style}


def _json_value(schema: Json, root: Json) -> Json:
    kept: Json = {key: root[key] for key in ("$defs", "definitions") if key in root}
    return {"type": "json_schema", "json_schema": {**kept, **schema}}


def _python_value(schema: Json, root: Json) -> Json:
    """JSON, which is Python for numbers, strings and their lists, and which the parser takes for all else."""
    if _types(schema, root) == {"boolean"} and "enum" not in schema:
        return _either([_text("True"), _text("False")])
    return _json_value(schema, root)


def _escaped_object(schema: Json, root: Json, depth: int) -> Json:
    def value(inner: Json, root: Json) -> Json:
        return _escaped_value(inner, root, depth - 1)

    return _sequence(_text("{"), _one_by_one(schema, root, assign=":", between=",", value=value), _text("}"))


def _escaped_value(schema: Json, root: Json, depth: int) -> Json:
    """A string between marks, objects and lists of such, anything else as JSON."""
    types = _types(schema, root) if depth else frozenset()
    if types == {"string"}:
        choices = schema.get("enum")
        if isinstance(choices, list) and choices:
            return _either([_text(f"{ESCAPE}{choice}{ESCAPE}") for choice in choices])
        return _tag(ESCAPE, ANY_TEXT, ESCAPE)
    if types == {"object"} and schema.get("properties"):
        return _escaped_object(schema, root, depth)
    if types == {"array"} and isinstance(items := schema.get("items"), dict):
        item = _escaped_value(items, root, depth - 1)
        more = {"type": "star", "content": _sequence(_text(","), item)}
        return _sequence(_text("["), _maybe(_sequence(item, more)), _text("]"))
    return _json_value(schema, root)


def _types(schema: Json, root: Json) -> frozenset[str]:
    return Parameters({**root, "properties": {"it": schema}}).types("it")


def _one_by_one(schema: Json, root: Json, *, assign: str, between: str, value: Value) -> Json:
    """The parameters in the schema's order, the required ones first; a schema that names none allows none."""
    declared = schema.get("properties")
    properties: Mapping[str, Any] = declared if isinstance(declared, Mapping) else {}
    named = schema.get("required")
    required = [key for key in properties if isinstance(named, list) and key in named]
    optional = [key for key in properties if key not in required]

    def one(key: str, lead: str) -> Json:
        parameter = properties[key] if isinstance(properties[key], dict) else {}
        return _sequence(_text(f"{lead}{key}{assign}"), value(parameter, root))

    def rest(keys: list[str]) -> list[Json]:
        return [_maybe(one(key, between)) for key in keys]

    if required:
        return _sequence(one(required[0], ""), *(one(key, between) for key in required[1:]), *rest(optional))
    starts = [_sequence(one(key, ""), *rest(optional[at + 1 :])) for at, key in enumerate(optional)]
    return _maybe(_either(starts)) if starts else _text("")


def _text(text: str) -> Json:
    return {"type": "const_string", "value": text}


def _tag(begin: str, content: Json, end: str) -> Json:
    return {"type": "tag", "begin": begin, "content": content, "end": end}


def _maybe(format: Json) -> Json:
    return {"type": "optional", "content": format}


def _either(formats: list[Json]) -> Json:
    return formats[0] if len(formats) == 1 else {"type": "or", "elements": formats}


def _sequence(*formats: Json) -> Json:
    kept = [format for format in formats if format != _text("")]
    return kept[0] if len(kept) == 1 else {"type": "sequence", "elements": kept} if kept else _text("")
