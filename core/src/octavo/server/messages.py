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
