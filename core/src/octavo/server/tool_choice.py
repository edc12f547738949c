"""Holds an answer to the tools that it must or may call: `tool_choice` and `strict`, as structured outputs.

| tool_choice | response format | the answer |
|---|---|---|
| required, named | any | calls and nothing else, their arguments by their schemas |
| auto | none, no tool is strict | free |
| auto | none, a tool is strict | free text; where a call begins, it must be one of a tool's |
| auto | given | calls, or what the response format says |

If the model may reason first, all that begins behind its reasoning.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Protocol

import msgspec

from octavo.errors import RequestError
from octavo.sampling.params import SamplingParams
from octavo.server.parsers.registry import Format
from octavo.structured.spec import StructuredOutputs

if TYPE_CHECKING:
    from octavo.server.conversation import Conversation, Tool
    from octavo.tokenizer import Tokenizer

Json = dict[str, Any]

STRICT_LEVELS = ("auto", "function", "parameter")
"""--tool-strict-level, for tools that do not say `strict`: hold a call to nothing, to the tools' names, or to the
arguments' schema as well."""

SPACE: Json = {"type": "regex", "pattern": "[ \\n]{0,4}"}
"""What models put behind their reasoning."""


class Start(Protocol):
    """Where an answer begins, as its parser knows from the prompt. in_reasoning: inside of reasoning;
    expects_reasoning: there, or where it may begin."""

    @property
    def in_reasoning(self) -> bool: ...
    @property
    def expects_reasoning(self) -> bool: ...


def enforce(
    params: SamplingParams,
    format: Format,
    conversation: Conversation,
    *,
    start: Start,
    level: str,
    tokenizer: Tokenizer,
) -> SamplingParams:
    """The parameters with the form that the answer must have. Raises RequestError for what cannot be held."""
    spec = wanted(params.structured_outputs, format, conversation, level=level)
    if spec is None:
        return params
    if start.expects_reasoning:
        end = [tokenizer.encode(mark, add_special_tokens=False) for mark in format.reasoning_end]
        if start.in_reasoning and len(end) == 1 and len(end[0]) == 1:
            return msgspec.structs.replace(params, structured_outputs=spec, structured_after=tuple(end[0]))
        spec = behind_reasoning(spec, format, is_open=start.in_reasoning)
    return msgspec.structs.replace(params, structured_outputs=spec)


def wanted(
    asked: StructuredOutputs | None, format: Format, conversation: Conversation, *, level: str
) -> StructuredOutputs | None:
    """The form of the answer behind its reasoning, with the tools in it. asked: what the client wants of it."""
    tools, choice = conversation.offered_tools, conversation.tool_choice
    if not tools:
        return asked
    forced = choice in ("required", "named")
    if not format.has_tools:
        if forced:
            message = f"tool_choice {choice!r} needs a tool call parser; this server runs with --tool-call-parser none"
            raise RequestError(message, field="tool_choice")
        return asked
    parallel = conversation.parallel_tool_calls
    if forced:
        calls = format.structural_tag(tools, choice=choice, name=conversation.tool_name, parallel=parallel)
        assert calls is not None, "a format that cannot be forced was replaced by one that can"
        return tag(calls["format"])
    if asked is not None:
        calls = format.structural_tag(tools, choice="required", parallel=parallel)
        return asked if calls is None else tag(either([calls["format"], format_of(asked, "tools")]))
    calls = format.structural_tag([strict(tool, level) for tool in tools], choice="auto", parallel=parallel)
    return None if calls is None else tag(calls["format"])


def strict(tool: Tool, level: str) -> Tool:
    """The tool as its own `strict` or the server's level wants it held."""
    if tool.strict is not None or level == "auto":
        return tool
    return replace(tool, strict=True, parameters=tool.parameters if level == "parameter" else None)


def behind_reasoning(spec: StructuredOutputs, format: Format, *, is_open: bool) -> StructuredOutputs:
    """The same form, with reasoning before it that the answer may have (or is in already)."""
    marks = format.reasoning
    ends = list(format.reasoning_end)
    if marks is None or not ends:
        if spec.kind == "structural_tag":
            return spec  # this model's reasoning is a part of its format, which a call goes without
        raise RequestError(
            f"structured outputs and reasoning of the kind {format.reasoning_name!r} do not go together yet",
            field="structured_outputs",
        )
    starts = dict.fromkeys(mark.strip() for mark in marks.start)
    thought: Json = {"type": "any_text"}
    if is_open:
        before: list[Json] = [{"type": "tag", "begin": "", "content": thought, "end": ends}, SPACE]
    else:
        tags = [{"type": "tag", "begin": begin, "content": thought, "end": ends} for begin in starts]
        before = [{"type": "optional", "content": {"type": "sequence", "elements": [either(tags), SPACE]}}]
    return tag({"type": "sequence", "elements": [*before, format_of(spec, "reasoning")]})


def format_of(spec: StructuredOutputs, beside: str) -> Json:
    """A form as a part of a structural tag. Raises RequestError for what can only be the whole of an answer."""
    options = (spec.disable_any_whitespace, spec.disable_additional_properties, spec.whitespace_pattern)
    if any(options) or spec.backend not in ("auto", "xgrammar"):
        message = f"beside {beside}, structured_outputs takes no options and no backend but xgrammar"
        raise RequestError(message, field="structured_outputs")
    match spec.kind:
        case "json":
            return {"type": "json_schema", "json_schema": _parsed(spec.json)}
        case "json_object":
            return {"type": "json_schema", "json_schema": {"type": "object"}}
        case "regex":
            return {"type": "regex", "pattern": spec.regex}
        case "choice":
            return either([{"type": "const_string", "value": text} for text in spec.choice or ()])
        case "grammar":
            return {"type": "grammar", "grammar": spec.grammar}
    given = _parsed(spec.structural_tag)
    return given["format"] if "format" in given else _legacy(given)


def tag(format: Json) -> StructuredOutputs:
    """A format as the form of a whole answer."""
    return StructuredOutputs(structural_tag={"type": "structural_tag", "format": format})


def either(formats: Sequence[Json]) -> Json:
    """One of the formats."""
    return formats[0] if len(formats) == 1 else {"type": "or", "elements": list(formats)}


def _parsed(text: str | Json | None) -> Json:
    parsed: Json = json.loads(text) if isinstance(text, str) else (text or {})
    return parsed


def _legacy(given: Json) -> Json:
    """The older shape of a structural tag: `structures` and `triggers` in free text."""
    try:
        tags = [
            {
                "type": "tag",
                "begin": structure["begin"],
                "content": {"type": "json_schema", "json_schema": structure["schema"]},
                "end": structure["end"],
            }
            for structure in given["structures"]
        ]
        return {"type": "triggered_tags", "triggers": given["triggers"], "tags": tags}
    except (KeyError, TypeError) as error:
        raise RequestError(
            "a structural tag has a format, or structures (begin, schema, end) and triggers",
            field="structured_outputs.structural_tag",
        ) from error
