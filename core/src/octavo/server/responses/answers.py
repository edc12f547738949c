"""A response, its output items, and the typed events of a stream. The tag of each event is its `type`.

Nothing here is changed once it was given out: what a background run told is told again to whoever asks later.
"""

from __future__ import annotations

from typing import Any

import msgspec

from octavo.server.openai.answers import TokenLogprob


class OutputText(msgspec.Struct, tag_field="type", tag="output_text"):
    text: str
    annotations: list[Any] = msgspec.field(default_factory=list)
    logprobs: list[TokenLogprob] = msgspec.field(default_factory=list)


class ReasoningText(msgspec.Struct, tag_field="type", tag="reasoning_text"):
    text: str


class OutputMessage(msgspec.Struct, tag_field="type", tag="message"):
    id: str
    status: str
    content: list[OutputText]
    role: str = "assistant"


class FunctionCall(msgspec.Struct, tag_field="type", tag="function_call"):
    """id: of the item. call_id: of the call, which its output names."""

    id: str
    call_id: str
    name: str
    arguments: str
    status: str


class Reasoning(msgspec.Struct, tag_field="type", tag="reasoning"):
    """content: what the model thought, in the open. There are no summaries, and nothing is encrypted."""

    id: str
    status: str
    content: list[ReasoningText]
    summary: list[Any] = msgspec.field(default_factory=list)
    encrypted_content: str | None = None


Item = OutputMessage | FunctionCall | Reasoning
Part = OutputText | ReasoningText


class InputTokensDetails(msgspec.Struct):
    cached_tokens: int = 0
    cache_write_tokens: int = 0


class OutputTokensDetails(msgspec.Struct):
    reasoning_tokens: int = 0


class Usage(msgspec.Struct):
    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int


class IncompleteDetails(msgspec.Struct):
    reason: str


class ResponseError(msgspec.Struct):
    code: str
    message: str


class ReasoningOptions(msgspec.Struct):
    effort: str | None = None
    summary: str | None = None


class Response(msgspec.Struct, tag_field="object", tag="response", kw_only=True):
    """status: queued, in_progress, completed, incomplete, failed or cancelled. Times are in seconds."""

    id: str
    created_at: int
    completed_at: int | None = None
    status: str
    background: bool = False
    error: ResponseError | None = None
    incomplete_details: IncompleteDetails | None = None
    instructions: str | list[Any] | None = None
    max_output_tokens: int | None = None
    max_tool_calls: int | None = None
    model: str
    output: list[Item] = msgspec.field(default_factory=list)
    parallel_tool_calls: bool = True
    previous_response_id: str | None = None
    prompt_cache_key: str | None = None
    reasoning: ReasoningOptions
    safety_identifier: str | None = None
    service_tier: str = "default"
    store: bool = True
    temperature: float
    text: dict[str, Any]
    tool_choice: str | dict[str, Any]
    tools: list[dict[str, Any]]
    top_logprobs: int = 0
    top_p: float
    truncation: str = "disabled"
    usage: Usage | None = None
    user: str | None = None
    metadata: dict[str, str]


class Deleted(msgspec.Struct, tag_field="object", tag="response"):
    id: str
    deleted: bool = True


class InputItems(msgspec.Struct, tag_field="object", tag="list"):
    data: list[dict[str, Any]]
    first_id: str | None
    last_id: str | None
    has_more: bool


class InputTokens(msgspec.Struct, tag_field="object", tag="response.input_tokens"):
    input_tokens: int


class _Event(msgspec.Struct, tag_field="type", kw_only=True):
    """sequence_number: 0, 1, ... within a stream."""

    sequence_number: int


class _Status(_Event, kw_only=True):
    """The response as it is now."""

    response: Response


class Created(_Status, tag="response.created"):
    pass


class Queued(_Status, tag="response.queued"):
    pass


class InProgress(_Status, tag="response.in_progress"):
    pass


class Completed(_Status, tag="response.completed"):
    pass


class Incomplete(_Status, tag="response.incomplete"):
    pass


class Failed(_Status, tag="response.failed"):
    pass


class Cancelled(_Status, tag="response.cancelled"):
    pass


class _OfItem(_Event, kw_only=True):
    output_index: int


class ItemAdded(_OfItem, tag="response.output_item.added", kw_only=True):
    item: Item


class ItemDone(_OfItem, tag="response.output_item.done", kw_only=True):
    item: Item


class _Inside(_OfItem, kw_only=True):
    item_id: str


class ArgumentsDelta(_Inside, tag="response.function_call_arguments.delta", kw_only=True):
    delta: str


class ArgumentsDone(_Inside, tag="response.function_call_arguments.done", kw_only=True):
    name: str
    arguments: str


class _OfPart(_Inside, kw_only=True):
    content_index: int = 0


class PartAdded(_OfPart, tag="response.content_part.added", kw_only=True):
    part: Part


class PartDone(_OfPart, tag="response.content_part.done", kw_only=True):
    part: Part


class TextDelta(_OfPart, tag="response.output_text.delta", kw_only=True):
    delta: str
    logprobs: list[TokenLogprob]


class TextDone(_OfPart, tag="response.output_text.done", kw_only=True):
    text: str
    logprobs: list[TokenLogprob]


class ReasoningDelta(_OfPart, tag="response.reasoning_text.delta", kw_only=True):
    delta: str


class ReasoningDone(_OfPart, tag="response.reasoning_text.done", kw_only=True):
    text: str


End = Completed | Incomplete | Failed | Cancelled
StatusEvent = Created | Queued | InProgress | End
Event = (
    StatusEvent
    | ItemAdded
    | ItemDone
    | ArgumentsDelta
    | ArgumentsDone
    | PartAdded
    | PartDone
    | TextDelta
    | TextDone
    | ReasoningDelta
    | ReasoningDone
)
