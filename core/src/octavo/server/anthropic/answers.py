"""The answer of the Messages API, whole and as typed events of a stream. The tag of each type is its `type`."""

from __future__ import annotations

from typing import Any

import msgspec


class OutputTokensDetails(msgspec.Struct):
    """thinking_tokens: part of the output tokens, shown or not."""

    thinking_tokens: int = 0


class Usage(msgspec.Struct, kw_only=True):
    """input_tokens counts what was computed, cache_read_input_tokens what the prefix cache had: the prompt is both."""

    input_tokens: int
    cache_creation_input_tokens: int = 0
    cache_read_input_tokens: int = 0
    output_tokens: int
    output_tokens_details: OutputTokensDetails = msgspec.field(default_factory=OutputTokensDetails)


class Text(msgspec.Struct, tag_field="type", tag="text"):
    text: str
    citations: None = None


class Thinking(msgspec.Struct, tag_field="type", tag="thinking"):
    """signature: a digest of the text. Clients want one, and may send it back."""

    thinking: str
    signature: str


class ToolUse(msgspec.Struct, tag_field="type", tag="tool_use"):
    id: str
    name: str
    input: dict[str, Any]


Block = Text | Thinking | ToolUse


class Message(msgspec.Struct, tag_field="type", tag="message", kw_only=True):
    """stop_reason: end_turn, max_tokens, stop_sequence, tool_use or model_context_window_exceeded."""

    id: str
    role: str = "assistant"
    model: str
    content: list[Block]
    stop_reason: str | None = None
    stop_sequence: str | None = None
    usage: Usage


class TokenCount(msgspec.Struct):
    input_tokens: int


class MessageStart(msgspec.Struct, tag_field="type", tag="message_start"):
    """message: without content; its usage knows the prompt only."""

    message: Message


class Ping(msgspec.Struct, tag_field="type", tag="ping"):
    pass


class BlockStart(msgspec.Struct, tag_field="type", tag="content_block_start"):
    """content_block: still empty."""

    index: int
    content_block: Block


class TextDelta(msgspec.Struct, tag_field="type", tag="text_delta"):
    text: str


class ThinkingDelta(msgspec.Struct, tag_field="type", tag="thinking_delta"):
    thinking: str


class SignatureDelta(msgspec.Struct, tag_field="type", tag="signature_delta"):
    signature: str


class InputJsonDelta(msgspec.Struct, tag_field="type", tag="input_json_delta"):
    """partial_json: joined over the block, the JSON of its input."""

    partial_json: str


BlockChange = TextDelta | ThinkingDelta | SignatureDelta | InputJsonDelta


class BlockDelta(msgspec.Struct, tag_field="type", tag="content_block_delta"):
    index: int
    delta: BlockChange


class BlockStop(msgspec.Struct, tag_field="type", tag="content_block_stop"):
    index: int


class Stop(msgspec.Struct):
    stop_reason: str
    stop_sequence: str | None


class MessageDelta(msgspec.Struct, tag_field="type", tag="message_delta"):
    """Why it ended, and the whole usage."""

    delta: Stop
    usage: Usage


class MessageStop(msgspec.Struct, tag_field="type", tag="message_stop"):
    pass


Event = MessageStart | Ping | BlockStart | BlockDelta | BlockStop | MessageDelta | MessageStop
