"""Grammars that hold a model to its own format: xgrammar's structural tags, as JSON.

- "required": one call or more (one, unless parallel); "named": one call of that tool; nothing else beside them.
- "auto": free text; where a call begins, it must be one of a known tool. Only if some tool is strict: then its
  arguments follow its schema, and those of the others are any JSON object.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from octavo.server.parsers.arguments import Parameters
from octavo.server.parsers.events import Tool
from octavo.server.parsers.grammar import CallTag

Json = dict[str, Any]
ANY_OBJECT: Json = {"type": "object"}
ESCAPE = "<escape>"


def structural_tag(
    tag: CallTag, tools: Sequence[Tool], *, choice: str, name: str | None = None, parallel: bool = True
) -> Json | None:
    """The structural tag, or None if there is nothing to force. choice: "auto", "required" or "named" (a `name`)."""
    if choice == "named":
        tools, parallel = [tool for tool in tools if tool.name == name], False
    if not tools or (choice == "auto" and not (tag.trigger and any(tool.strict for tool in tools))):
        return None
    calls = [_call(tag, tool, free=choice == "auto" and not tool.strict) for tool in tools]
    if choice == "auto":
        return _wrapped(_free_text(tag, calls, parallel=parallel))
    listed = {
        "type": "tags_with_separator",
        "tags": calls,
        "separator": tag.between,
        "at_least_one": True,
        "stop_after_first": not parallel,
    }
    return _wrapped(_sequence(_text(tag.before), listed, _text(tag.after)))


def _wrapped(format: Json) -> Json:
    return {"type": "structural_tag", "format": format}


def _free_text(tag: CallTag, calls: list[Json], *, parallel: bool) -> Json:
    """Any text, and calls where the trigger comes."""
    if tag.before:
        listed = {
            "type": "tags_with_separator",
            "tags": calls,
            "separator": tag.between,
            "at_least_one": True,
            "stop_after_first": not parallel,
        }
        calls = [{"type": "tag", "begin": tag.before, "content": listed, "end": tag.after}]
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
    return {"type": "tag", "begin": tag.begin.replace("{name}", tool.name), "content": content, "end": tag.end}


def _arguments(style: str, schema: Json) -> Json:
    match style:
        case "pythonic":
            return _one_by_one(schema, assign="=", between=", ", value=_json_value)
        case "escaped":
            return _sequence(_text("{"), _one_by_one(schema, assign=":", between=",", value=_escaped_value), _text("}"))
        case "json":
            return {"type": "json_schema", "json_schema": schema}
    return {"type": "json_schema", "json_schema": schema, "style": style}


def _json_value(schema: Json, root: Json, key: str) -> Json:
    return {"type": "json_schema", "json_schema": _with_definitions(schema, root)}


def _escaped_value(schema: Json, root: Json, key: str) -> Json:
    """A string between marks, anything else as JSON."""
    if Parameters(root).types(key) != {"string"}:
        return _json_value(schema, root, key)
    choices = schema.get("enum")
    if isinstance(choices, list) and choices:
        return _either([_text(f"{ESCAPE}{choice}{ESCAPE}") for choice in choices])
    return {"type": "tag", "begin": ESCAPE, "content": {"type": "any_text"}, "end": ESCAPE}


def _with_definitions(schema: Json, root: Json) -> Json:
    kept: Json = {key: root[key] for key in ("$defs", "definitions") if key in root}
    return {**kept, **schema}


def _one_by_one(schema: Json, *, assign: str, between: str, value: Any) -> Json:
    """The parameters in the schema's order, the required ones first; a schema that names none allows none."""
    declared = schema.get("properties")
    properties: Mapping[str, Any] = declared if isinstance(declared, Mapping) else {}
    required = [key for key in properties if key in (schema.get("required") or ())]
    optional = [key for key in properties if key not in required]

    def one(key: str, lead: str) -> Json:
        parameter = properties[key] if isinstance(properties[key], dict) else {}
        return _sequence(_text(f"{lead}{key}{assign}"), value(parameter, schema, key))

    def rest(keys: list[str]) -> list[Json]:
        return [{"type": "optional", "content": one(key, between)} for key in keys]

    if required:
        return _sequence(one(required[0], ""), *(one(key, between) for key in required[1:]), *rest(optional))
    starts = [_sequence(one(key, ""), *rest(optional[at + 1 :])) for at, key in enumerate(optional)]
    return {"type": "optional", "content": _either(starts)} if starts else _text("")


def _text(text: str) -> Json:
    return {"type": "const_string", "value": text}


def _either(formats: list[Json]) -> Json:
    return formats[0] if len(formats) == 1 else {"type": "or", "elements": formats}


def _sequence(*formats: Json) -> Json:
    kept = [format for format in formats if format != _text("")]
    return kept[0] if len(kept) == 1 else {"type": "sequence", "elements": kept} if kept else _text("")
