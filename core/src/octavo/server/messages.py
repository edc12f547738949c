"""Checks the messages of a conversation at the door, naming the message and the part that is wrong.

How parts, tool calls and missing contents are shown to a template is the template's business
(`octavo.chat_template`); here only what no text model can take is refused.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from octavo.errors import RequestError

TEXT_PARTS = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal"}
"""Types of content parts that are text, and the key that holds it."""


def check_messages(messages: Sequence[dict[str, Any]]) -> None:
    """Raise RequestError for an empty conversation, a message without role, or content that is not text."""
    if not messages:
        raise RequestError("messages must not be empty", field="messages")
    for index, message in enumerate(messages):
        place = f"messages[{index}]"
        if not isinstance(message.get("role"), str) or not message["role"]:
            raise RequestError(f"{place}.role must be a non-empty text", field=f"{place}.role")
        content = message.get("content")
        if isinstance(content, list):
            for number, part in enumerate(content):
                _check_part(part, f"{place}.content[{number}]")
        elif not isinstance(content, str | None):
            raise RequestError(f"{place}.content must be text or a list of parts", field=f"{place}.content")
        for name in ("name", "tool_call_id", "reasoning", "reasoning_content"):
            if not isinstance(message.get(name), str | None):
                raise RequestError(f"{place}.{name} must be text", field=f"{place}.{name}")
        _check_calls(message.get("tool_calls"), f"{place}.tool_calls")


def _check_calls(calls: Any, place: str) -> None:
    """The calls of an earlier answer, as that answer gave them."""
    if not isinstance(calls, list | None):
        raise RequestError(f"{place} must be a list of calls", field=place)
    for index, call in enumerate(calls or ()):
        where = f"{place}[{index}]"
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict):
            raise RequestError(f"{where} must be an object with a function", field=where)
        if not isinstance(call.get("id"), str | None):
            raise RequestError(f"{where}.id must be text", field=f"{where}.id")
        if call.get("type", "function") != "function":
            raise RequestError(f"{where}.type must be function", field=f"{where}.type")
        if not isinstance(function.get("name"), str) or not function["name"]:
            raise RequestError(f"{where}.function.name must be a non-empty text", field=f"{where}.function.name")
        if not isinstance(function.get("arguments"), str | dict | None):
            field = f"{where}.function.arguments"
            raise RequestError(f"{field} must be JSON text of an object, or the object", field=field)


def text_of(message: dict[str, Any]) -> str:
    """All text of a checked message, parts joined as templates that take only strings get them."""
    content = message.get("content") or ""
    if isinstance(content, str):
        return content
    return "\n".join(part if isinstance(part, str) else part[TEXT_PARTS[part["type"]]] for part in content)


def count_characters(messages: Sequence[dict[str, Any]]) -> int:
    """About how much text there is to render and tokenize."""
    return sum(len(text_of(message)) + len(str(message.get("tool_calls") or "")) for message in messages)


def _check_part(part: Any, place: str) -> None:
    if isinstance(part, str):
        return
    if not isinstance(part, dict) or not isinstance(part.get("type"), str):
        raise RequestError(f"{place} must be an object with a type", field=place)
    kind = part["type"]
    if kind not in TEXT_PARTS:
        raise RequestError(f"{place}.type {kind!r} is not supported: this model takes only text", field=f"{place}.type")
    key = TEXT_PARTS[kind]
    if not isinstance(part.get(key), str):
        raise RequestError(f"{place}.{key} must be text", field=f"{place}.{key}")
