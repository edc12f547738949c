"""Answers of a model that brings a description of its own: `response_template` in tokenizer_config.json.

Transformers reads it; this turns its regions into our events. Text streams as it comes, a call when it is complete.
A region that its description cannot read is content. Fields: `content`, `tool_calls`, and the reasoning's names below;
text of any other field is content too.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from typing import Any

from octavo.errors import ConfigError
from octavo.server.parsers.events import Content, Event, Reasoning, Tool, ToolCallArguments, ToolCallEnd, ToolCallStart
from octavo.server.parsers.json_text import as_json
from octavo.server.parsers.marks import Marks

NAME = "hf"
"""What the flags call this format."""

REASONING_FIELDS = ("reasoning_content", "reasoning", "thinking")
CALLS_FIELD = "tool_calls"
Template = Mapping[str, Any]


def check_template(template: Template) -> None:
    """Raise ConfigError unless Transformers can read the template."""
    _load(template)


def _load(template: Template) -> Any:
    try:
        from transformers.utils.chat_parsing.response_templates import load_response_template
    except ImportError as error:
        raise ConfigError("response_template needs a newer transformers, or name a parser by flag") from error
    try:
        return load_response_template(dict(template))
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise ConfigError(f"the tokenizer's response_template: {error}") from error


class ResponseTemplateParser:
    """Implements `OutputParser`. prompt: the end of the rendered prompt, from the last turn on at least.

    tools: without any, what stands in a call's region is content. drop: texts to leave out of content and reasoning.
    reads_reasoning: False makes reasoning content.
    """

    def __init__(
        self,
        template: Template,
        *,
        tools: Sequence[Tool],
        prompt: str,
        drop: frozenset[str],
        reads_reasoning: bool = True,
    ) -> None:
        self._template = _load(template)
        for field in self._template.fields.values():
            field.optional = True  # an answer may be cut off before any of them
        self._tools: list[Any] = [
            {"function": {"name": tool.name, "parameters": dict(tool.parameters or {})}} for tool in tools
        ]
        self._reads_reasoning = reads_reasoning
        self._drop = Marks(drop)
        self._held: dict[type[Content] | type[Reasoning], str] = {Content: "", Reasoning: ""}
        self._num_calls = 0
        self._region = ""
        self._body = ""  # of a region whose value is known at its end
        self._parser = self._start(prompt)
        self._regions(self._parser.initial_events)
        self._held = dict.fromkeys(self._held, "")
        self.expects_reasoning = reads_reasoning and any(name in self._template.fields for name in REASONING_FIELDS)

    def _start(self, prompt: str) -> Any:
        from transformers.utils.chat_parsing import ResponseParser

        return ResponseParser(self._template, prefix=prompt, tools=self._tools)

    @property
    def in_reasoning(self) -> bool:
        return self._reads_reasoning and self._region in REASONING_FIELDS

    def feed(self, text: str) -> list[Event]:
        # One character at a time: where a region is refused must not depend on how the text is split.
        return _merged([event for char in text for event in self._guarded(char)])

    def finish(self) -> list[Event]:
        return _merged([*self._guarded(None), *self._released(Reasoning), *self._released(Content)])

    def _guarded(self, char: str | None) -> list[Event]:
        """The events of one character, or (None) of the end."""
        try:
            regions = self._parser.feed(char) if char is not None else self._parser.finalize()[1]
        except (ValueError, KeyError, TypeError, IndexError, AttributeError):
            # The template cannot read what it has found: that is content, and reading starts anew behind it.
            body, self._body, self._region = self._body, "", ""
            self._parser = self._start("")
            return self._text(Content, body)
        return self._regions(regions)

    def _regions(self, regions: Sequence[Mapping[str, Any]]) -> list[Event]:
        events: list[Event] = []
        for region in regions:
            match region["type"]:
                case "region_open":
                    self._region, self._body = region["field"], ""
                case "region_chunk" if region["dirty"] or region["field"] == CALLS_FIELD:
                    self._body += region["text"]
                case "region_chunk":
                    events += self._text(self._kind(region["field"]), region["text"])
                case "region_close":
                    body, self._body, self._region = self._body, "", ""
                    if body and region["field"] != CALLS_FIELD:
                        events += self._text(self._kind(region["field"]), body)
                    elif region["field"] == CALLS_FIELD:
                        events += self._calls(region["value"], body)
                    events += [*self._released(Reasoning), *self._released(Content)]
        return events

    def _kind(self, field: str) -> type[Content] | type[Reasoning]:
        return Reasoning if self._reads_reasoning and field in REASONING_FIELDS else Content

    def _text(self, kind: type[Content] | type[Reasoning], text: str) -> list[Event]:
        """The text without what is to be dropped; a suffix that may become such a token is held back."""
        rest, kept = self._held[kind] + text, ""
        while True:
            start, mark = self._drop.find(rest, final=False)
            kept, rest = kept + rest[:start], rest[start:]
            if mark is None:
                break
            rest = rest[len(mark) :]
        self._held[kind] = rest
        return [kind(kept)] if kept else []

    def _released(self, kind: type[Content] | type[Reasoning]) -> list[Event]:
        rest, self._held[kind] = self._held[kind], ""
        return [kind(rest)] if rest else []

    def _calls(self, value: Any, body: str) -> list[Event]:
        """The calls of a region: one or a list, as {"function": {...}} or without it."""
        found = [_name_and_arguments(call) for call in (value if isinstance(value, list) else [value])]
        calls = [call for call in found if call is not None]
        if not self._tools or not calls or len(calls) < len(found):
            return self._text(Content, body)
        events: list[Event] = []
        for name, arguments in calls:
            index = self._num_calls
            self._num_calls += 1
            events.append(ToolCallStart(index, f"call_{secrets.token_hex(12)}", name))
            events += [ToolCallArguments(index, arguments), ToolCallEnd(index)]
        return events


def _name_and_arguments(call: Any) -> tuple[str, str] | None:
    function = call.get("function", call) if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(name := function.get("name"), str) or not name:
        return None
    arguments = function.get("arguments", function.get("parameters"))
    return name, "{}" if arguments is None else as_json(arguments)


def _merged(events: Sequence[Event]) -> list[Event]:
    """Neighbouring texts of one kind as one."""
    merged: list[Event] = []
    for event in events:
        last = merged[-1] if merged else None
        if isinstance(event, Content) and isinstance(last, Content):
            merged[-1] = Content(last.text + event.text)
        elif isinstance(event, Reasoning) and isinstance(last, Reasoning):
            merged[-1] = Reasoning(last.text + event.text)
        else:
            merged.append(event)
    return merged
