"""Bodies of the Messages API. Optional fields take null as "not given".

Messages, system blocks and tools are decoded one by one (`decode_part`), so that an error names the very block.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec


class TextBlock(msgspec.Struct, tag_field="type", tag="text"):
    text: str


class ImageBlock(msgspec.Struct, tag_field="type", tag="image"):
    """Refused: no model here takes images."""


class DocumentBlock(msgspec.Struct, tag_field="type", tag="document"):
    """Refused, as images are."""


class ThinkingBlock(msgspec.Struct, tag_field="type", tag="thinking"):
    """Reasoning of an earlier answer. The signature is not looked at: a client may tell the model what it likes."""

    thinking: str
    signature: str | None = None


class RedactedThinkingBlock(msgspec.Struct, tag_field="type", tag="redacted_thinking"):
    """Reasoning that only Anthropic could read. It is left out."""

    data: str | None = None


class ToolUseBlock(msgspec.Struct, tag_field="type", tag="tool_use"):
    id: str
    name: str
    input: dict[str, Any]


class ToolReferenceBlock(msgspec.Struct, tag_field="type", tag="tool_reference"):
    """The result of a search for tools. The model sees all tools anyway, so only the name is shown."""

    tool_name: str


class ToolResultBlock(msgspec.Struct, tag_field="type", tag="tool_result"):
    """content: text, or blocks of text, image, document or tool_reference."""

    tool_use_id: str
    content: str | list[Any] | None = None
    is_error: bool | None = None


UserBlock = TextBlock | ImageBlock | DocumentBlock | ToolResultBlock
AssistantBlock = TextBlock | ThinkingBlock | RedactedThinkingBlock | ToolUseBlock
ResultBlock = TextBlock | ImageBlock | DocumentBlock | ToolReferenceBlock


class Turn(msgspec.Struct):
    """One message. content: text or blocks, which depend on the role."""

    role: Literal["user", "assistant", "system"]
    content: str | list[Any]


class ToolFields(msgspec.Struct):
    """A tool. type: None or "custom" for one that the client runs; others are Anthropic's own, and refused."""

    name: str
    type: str | None = None
    description: str | None = None
    input_schema: dict[str, Any] | None = None
    strict: bool | None = None


class ToolChoice(msgspec.Struct):
    """name: for the type "tool"."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class Thinking(msgspec.Struct):
    """budget_tokens: needed by "enabled". display: "omitted" keeps thinking out of the answer."""

    type: Literal["enabled", "disabled", "adaptive", "between_tools"]
    budget_tokens: int | None = None
    display: Literal["summarized", "omitted"] | None = None


class OutputFormat(msgspec.Struct):
    type: Literal["json_schema"]
    schema: dict[str, Any]


class OutputConfig(msgspec.Struct):
    """effort: for the chat template."""

    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: OutputFormat | None = None


class CountTokensBody(msgspec.Struct, kw_only=True):
    """POST /v1/messages/count_tokens: what a prompt is made of."""

    model: str | None = None
    messages: Annotated[list[Any], msgspec.Meta(examples=[[{"role": "user", "content": "Name a colour."}]])]
    system: str | list[Any] | None = None
    tools: list[Any] | None = None
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    output_format: OutputFormat | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    # Ignored: the prefix cache needs no marks, and there is nothing here to manage or to route.
    cache_control: Any = None
    context_management: Any = None
    # Refused when set:
    mcp_servers: list[Any] | None = None


class MessagesBody(CountTokensBody, kw_only=True):
    """POST /v1/messages."""

    max_tokens: Annotated[int, msgspec.Meta(examples=[64])]
    stop_sequences: list[str] | None = None
    stream: bool | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    # Ignored:
    metadata: Any = None
    service_tier: str | None = None
    container: Any = None
    inference_geo: str | None = None
