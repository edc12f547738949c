"""How the answers of one conversation will be read, and what the engine must be told for that.

    tools, tool_choice ──┐
    the model's format ──┼─> Reading: a parser per choice; params: the form the answer must have, where it ends
    end of the prompt  ──┘

A conversation without tools, of a model that does not reason, is read as it is: `Reading.make` is None.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

import msgspec

from octavo.engine.door import THINKING
from octavo.outputs import CompletionOutput
from octavo.sampling.params import SamplingParams
from octavo.server.parsers.events import (
    Content,
    Event,
    OutputParser,
    Reasoning,
    ToolCallArguments,
    ToolCallEnd,
    ToolCallStart,
)
from octavo.server.parsers.registry import Format, make_parser
from octavo.server.thinking_budget import in_marks_of
from octavo.server.tool_choice import enforce

if TYPE_CHECKING:
    from octavo.server.conversation import Conversation
    from octavo.server.service import Service

PROMPT_TAIL = 16_384
"""Characters of the prompt's end that may tell whether its last turn has opened reasoning."""

SWITCHES = ("enable_thinking", "thinking")
"""Names by which chat templates know the switch of reasoning."""


class ChoiceReader:
    """Takes the text of one choice apart. num_reasoning_tokens: tokens of reasoning so far, its marks among them."""

    def __init__(self, parser: OutputParser, conversation: Conversation, own_stops: frozenset[int]) -> None:
        self.num_reasoning_tokens = 0
        self._parser = parser
        self._named = conversation.tool_choice == "named"
        self._one_call = not conversation.parallel_tool_calls
        self._shows_reasoning = conversation.include_reasoning
        self._own_stops = own_stops
        self._called = False

    def read(self, new: CompletionOutput) -> list[Event]:
        """What a delta of the engine adds."""
        parser = self._parser
        reasoned = parser.in_reasoning
        events = parser.feed(new.text) if new.text else []
        if new.finish_reason is not None:
            events = events + parser.finish()
        self._count(len(new.token_ids), events, before=reasoned, after=parser.in_reasoning)
        kept = [event for event in events if self._keeps(event)]
        self._called |= any(type(event) is ToolCallStart for event in kept)
        return kept

    def finish_reason(self, reason: str | None) -> str | None:
        """Why the choice ended, as OpenAI says it: a call that was left to the model is a reason by itself."""
        return "tool_calls" if reason == "stop" and self._called and not self._named else reason

    def stop_reason(self, reason: int | str | None) -> int | str | None:
        """What ended it; a token that ends every call is as silent as EOS."""
        return None if reason in self._own_stops else reason

    def _keeps(self, event: Event) -> bool:
        match event:
            case Reasoning():
                return self._shows_reasoning
            case ToolCallStart(index) | ToolCallArguments(index) | ToolCallEnd(index):
                return index == 0 or not self._one_call
        return True

    def _count(self, num_tokens: int, events: list[Event], *, before: bool, after: bool) -> None:
        """Tokens of a delta in which reasoning begins or ends are shared out by their text: they have no seams."""
        if before and after:
            self.num_reasoning_tokens += num_tokens
        elif before or after or any(type(event) is Reasoning for event in events):
            thought = sum(len(event.text) for event in events if isinstance(event, Reasoning))
            said = sum(len(event.text) for event in events if isinstance(event, Content | ToolCallArguments))
            share = thought / (thought + said) if said else 1.0
            self.num_reasoning_tokens += round(num_tokens * share)


@dataclass(frozen=True, kw_only=True)
class Reading:
    """params: for the engine. make: a reader for one choice, or None if the text is all there is."""

    params: SamplingParams
    make: Callable[[], ChoiceReader] | None


def plan(service: Service, conversation: Conversation, prompt: str) -> Reading:
    """How to read the answers to a rendered conversation. Raises RequestError for what they cannot be held to."""
    params = conversation.params
    tools = conversation.offered_tools
    format = service.format
    if tools and conversation.tool_choice in ("required", "named") and format.has_tools and not can_force(format):
        format = replace(format, tools=service.plain_format.tools)
    drop = service.special_texts if params.skip_special_tokens else frozenset[str]()
    make = partial(
        make_parser,
        format,
        tools=tools,
        prompt_tail=prompt[-PROMPT_TAIL:],
        reasoning=wants_reasoning(conversation),
        drop=drop,
    )
    if not (tools or format.has_reasoning or params.structured_outputs):  # most chats of models that do not reason
        return Reading(params=params, make=None)
    start = make()
    if params.thinking_token_budget is not None and THINKING in service.info.logits_processors:
        encode = partial(service.tokenizer.encode, add_special_tokens=False)
        params = in_marks_of(format, params, in_reasoning=start.in_reasoning, encode=encode)
    params = enforce(
        params,
        format,
        conversation,
        start=start,
        level=service.options.tool_strict_level,
        tokenizer=service.tokenizer,
    )
    if not (tools and format.has_tools) and not format.has_reasoning:
        return Reading(params=params, make=None)
    stops = token_ids(service, format.stop_tokens) if tools else ()
    own_stops = frozenset(stops) - set(params.stop_token_ids)
    params = msgspec.structs.replace(
        params, skip_special_tokens=False, stop_token_ids=(*params.stop_token_ids, *sorted(own_stops))
    )
    return Reading(params=params, make=lambda: ChoiceReader(make(), conversation, own_stops))


def can_force(format: Format) -> bool:
    """Whether a grammar can hold a model to its own way to write calls; if not, they are plain JSON."""
    return format.tools is not None and format.tools.tag is not None


def wants_reasoning(conversation: Conversation) -> bool:
    """False if the request has switched reasoning off."""
    given = conversation.template.chat_template_kwargs or {}
    return conversation.reasoning_effort != "none" and all(given.get(name) is not False for name in SWITCHES)


def token_ids(service: Service, texts: tuple[str, ...]) -> tuple[int, ...]:
    """Ids of the texts that are one token."""
    encoded = [service.tokenizer.encode(text, add_special_tokens=False) for text in texts]
    return tuple(ids[0] for ids in encoded if len(ids) == 1)
