"""Bodies of the Responses API, with vLLM's extra sampling fields.

Input items, parts and tools are decoded one by one (`decode_part`), so that an error names the very item.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec

from octavo.server.shared_fields import SharedFields


class InputText(msgspec.Struct, tag_field="type", tag="input_text"):
    text: str


class PlainText(msgspec.Struct, tag_field="type", tag="text"):
    text: str


class OutputTextPart(msgspec.Struct, tag_field="type", tag="output_text"):
    text: str


class SummaryText(msgspec.Struct, tag_field="type", tag="summary_text"):
    text: str


class ReasoningTextPart(msgspec.Struct, tag_field="type", tag="reasoning_text"):
    text: str


class Refusal(msgspec.Struct, tag_field="type", tag="refusal"):
    refusal: str


class InputImage(msgspec.Struct, tag_field="type", tag="input_image"):
    """Refused: no model here takes images."""


class InputFile(msgspec.Struct, tag_field="type", tag="input_file"):
    """Refused, as images are."""


class InputAudio(msgspec.Struct, tag_field="type", tag="input_audio"):
    """Refused, as images are."""


TextPart = InputText | PlainText | OutputTextPart | SummaryText | ReasoningTextPart | Refusal
ContentPart = TextPart | InputImage | InputFile | InputAudio


class Message(msgspec.Struct, tag_field="type", tag="message"):
    """content: text or parts. An item without a type is a message."""

    role: Literal["user", "assistant", "system", "developer"]
    content: str | list[Any]


class FunctionCall(msgspec.Struct, tag_field="type", tag="function_call"):
    call_id: str
    name: str
    arguments: str


class FunctionCallOutput(msgspec.Struct, tag_field="type", tag="function_call_output"):
    """output: text or parts."""

    call_id: str
    output: str | list[Any]


class Reasoning(msgspec.Struct, tag_field="type", tag="reasoning"):
    """What an earlier answer was thought to be. content comes before summary; neither: it is left out."""

    summary: list[Any] | None = None
    content: list[Any] | None = None


class ItemReference(msgspec.Struct, tag_field="type", tag="item_reference"):
    """Refused: items are found by their response only."""

    id: str


InputItem = Message | FunctionCall | FunctionCallOutput | Reasoning | ItemReference


class FunctionTool(msgspec.Struct):
    """A tool that the client runs."""

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class AllowedTools(msgspec.Struct, tag_field="type", tag="allowed_tools"):
    """Only these of the tools: each {"type": "function", "name": ...}."""

    mode: Literal["auto", "required"]
    tools: list[dict[str, Any]]


class NamedFunction(msgspec.Struct, tag_field="type", tag="function"):
    name: str


class TextFormat(msgspec.Struct, tag_field="type", tag="text"):
    pass


class JsonObjectFormat(msgspec.Struct, tag_field="type", tag="json_object"):
    pass


class JsonSchemaFormat(msgspec.Struct, tag_field="type", tag="json_schema"):
    schema: dict[str, Any]
    name: str
    description: str | None = None
    strict: bool | None = None


class TextOptions(msgspec.Struct):
    """verbosity is a wish that models here do not know."""

    format: TextFormat | JsonObjectFormat | JsonSchemaFormat | None = None
    verbosity: Literal["low", "medium", "high"] | None = None


class ReasoningFields(msgspec.Struct):
    """effort: for the chat template; "none" switches reasoning off. A summary is never made."""

    effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None
    summary: Literal["auto", "concise", "detailed"] | None = None
    generate_summary: Literal["auto", "concise", "detailed"] | None = None


class ResponsesBody(SharedFields, kw_only=True):
    """POST /v1/responses, and /v1/responses/input_tokens: what only sampling needs does not change the count."""

    input: Annotated[str | list[Any] | None, msgspec.Meta(examples=["Name a colour."])] = None
    instructions: str | None = None
    previous_response_id: str | None = None
    tools: list[Any] | None = None
    tool_choice: str | NamedFunction | AllowedTools | None = None
    parallel_tool_calls: bool | None = None
    reasoning: ReasoningFields | None = None
    text: TextOptions | None = None
    truncation: Literal["auto", "disabled"] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    max_output_tokens: int | None = None
    background: bool | None = None
    include: list[str] | None = None
    metadata: dict[str, str] | None = None
    top_logprobs: int | None = None
    # Told again in the response, and nothing else:
    max_tool_calls: int | None = None
    # Ignored: there is one cache, and nothing to obfuscate.
    prompt_cache_options: Any = None
    stream_options: Any = None
    context_management: Any = None
    # Refused when set:
    conversation: Any = None
    prompt: Any = None
