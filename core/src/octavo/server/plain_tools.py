"""Tools for models whose chat template knows none: they are told of them in words, and answer in plain JSON.

Only where the model has no format of its own (the parser is `json`): a template that shows tools is never overruled.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

Message = dict[str, Any]

INTRODUCTION = """You can call functions. These are all, one a line, each with the JSON schema of its arguments:
{tools}
To call a function, answer with nothing but JSON: {{"name": FUNCTION, "arguments": {{...}}}}, or a list of such objects.
Call one only if you need it; otherwise answer in words."""


@lru_cache(maxsize=64)
def shows_tools(template: str) -> bool:
    """Whether a chat template has a word for tools."""
    return re.search(r"\btools\b", template) is not None


def in_words(messages: Sequence[Message], tools: Sequence[Message]) -> list[Message]:
    """The messages with the tools told in them, and with past calls and their results as text.

    The tools stand at the end of the system message; without one at the start of the first message of the user, as not
    every template takes a system message. Results are the user's, in one message with what the user says next to them.
    """
    names: dict[str, str] = {}
    told: list[Message] = []
    for message in messages:
        message = dict(message)
        if calls := message.pop("tool_calls", None):
            names |= {call.get("id") or "": call["function"]["name"] for call in calls}
            message["content"] = joined(message.get("content"), json.dumps([call_json(call) for call in calls]))
        if message["role"] == "tool":
            name = names.get(message.get("tool_call_id") or "") or message.get("name") or "the function"
            message = {"role": "user", "content": joined(f"{name} returned:", message.get("content"))}
        if told and told[-1]["role"] == message["role"] == "user":
            told[-1]["content"] = joined(told[-1]["content"], message.get("content"))
        else:
            told.append(message)
    lines = "\n".join(json.dumps(tool["function"], ensure_ascii=False) for tool in tools)
    introduction = INTRODUCTION.format(tools=lines)
    for message in told:
        if message["role"] in ("system", "developer"):
            message["content"] = joined(message.get("content"), introduction)
            return told
    for message in told:
        if message["role"] == "user":
            message["content"] = joined(introduction, message.get("content"))
            return told
    return [{"role": "user", "content": introduction}, *told]


def joined(first: Any, second: Any) -> Any:
    """Two contents as one, with an empty line between texts."""
    if not first or not second:
        return first or second or ""
    if isinstance(first, str) and isinstance(second, str):
        return f"{first}\n\n{second}"
    return [part for content in (first, second) for part in ([content] if isinstance(content, str) else content)]


def call_json(call: Message) -> Message:
    """A past call as the model would have written it."""
    arguments = call["function"].get("arguments") or {}
    if isinstance(arguments, str):
        with contextlib.suppress(ValueError):  # what is no JSON stays text
            arguments = json.loads(arguments)
    return {"name": call["function"]["name"], "arguments": arguments}
