"""Puts a conversation that a protocol tells piece by piece into the messages that chat templates take (OpenAI's shape).

Pieces of one role in a row become one message: many templates want roles to alternate, and the reasoning, the text and
the calls of one answer belong together.
"""

from __future__ import annotations

from typing import Any

Message = dict[str, Any]


class MessageBuilder:
    """messages: what was added so far."""

    def __init__(self) -> None:
        self.messages: list[Message] = []

    def add_text(self, role: str, text: str) -> None:
        """More content. Several texts in a row stay parts, which the template joins as it likes."""
        message = self._last(role)
        content = message["content"]
        if not content:
            message["content"] = text
        elif text:
            parts = content if isinstance(content, list) else [{"type": "text", "text": content}]
            message["content"] = [*parts, {"type": "text", "text": text}]

    def add_reasoning(self, text: str) -> None:
        """More of what the assistant thought."""
        message = self._last("assistant")
        message["reasoning"] = "\n".join(filter(None, (message.get("reasoning"), text)))

    def add_call(self, id: str, name: str, arguments: str) -> None:
        """A tool call of the assistant. arguments: JSON text."""
        call = {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}
        self._last("assistant").setdefault("tool_calls", []).append(call)

    def add_result(self, id: str, text: str) -> None:
        """What a call gave."""
        self.messages.append({"role": "tool", "tool_call_id": id, "content": text})

    def _last(self, role: str) -> Message:
        """The last message, which is of that role; a new one if it is not."""
        if not self.messages or self.messages[-1]["role"] != role:
            # An assistant's message may have calls only.
            self.messages.append({"role": role, "content": None if role == "assistant" else ""})
        return self.messages[-1]
