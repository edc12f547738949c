"""Answers of the OpenAI routes. A field that is UNSET is left out of the JSON; None is sent as null, as OpenAI does."""

from __future__ import annotations

from typing import Any

import msgspec
from msgspec import UNSET, UnsetType

from octavo.outputs import RequestOutput
from octavo.server.conversation import AnswerDelta


class PromptTokensDetails(msgspec.Struct):
    cached_tokens: int = 0


class CompletionTokensDetails(msgspec.Struct):
    reasoning_tokens: int = 0


class Usage(msgspec.Struct):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails | UnsetType = UNSET


class UsageCount:
    """Adds up the usage of one request over its prompts and answers."""

    def __init__(self) -> None:
        self._prompts: dict[int, tuple[int, int]] = {}
        self._num_generated = 0
        self._reasoning: dict[tuple[int, int], int] = {}

    def add(self, prompt: int, delta: RequestOutput) -> None:
        """Count one delta of the prompt with that index."""
        if prompt not in self._prompts:
            self._prompts[prompt] = (len(delta.prompt_token_ids), delta.num_cached_tokens)
        self._num_generated += sum(len(answer.token_ids) for answer in delta.outputs)

    def add_answer(self, new: AnswerDelta, *, prompt: int = 0) -> None:
        """Count one delta of a choice of a conversation."""
        if prompt not in self._prompts:
            self._prompts[prompt] = (new.num_prompt_tokens, new.num_cached_tokens)
        self._num_generated += len(new.token_ids)
        if new.num_reasoning_tokens:
            self._reasoning[prompt, new.index] = new.num_reasoning_tokens

    def usage(self) -> Usage:
        """The usage so far. A prompt counts once, however many answers it gets."""
        num_prompt = sum(tokens for tokens, _ in self._prompts.values())
        num_cached = sum(cached for _, cached in self._prompts.values())
        total = num_prompt + self._num_generated
        usage = Usage(num_prompt, self._num_generated, total, PromptTokensDetails(num_cached))
        if self._reasoning:
            usage.completion_tokens_details = CompletionTokensDetails(sum(self._reasoning.values()))
        return usage


class CompletionLogprobs(msgspec.Struct):
    """Parallel lists, one entry a token. text_offset: where the token starts in the join of all tokens."""

    text_offset: list[int] = msgspec.field(default_factory=list)
    token_logprobs: list[float | None] = msgspec.field(default_factory=list)
    tokens: list[str] = msgspec.field(default_factory=list)
    top_logprobs: list[dict[str, float] | None] = msgspec.field(default_factory=list)

    def extend(self, more: CompletionLogprobs) -> None:
        """Append the tokens that follow."""
        self.text_offset += more.text_offset
        self.token_logprobs += more.token_logprobs
        self.tokens += more.tokens
        self.top_logprobs += more.top_logprobs


class CompletionChoice(msgspec.Struct, kw_only=True):
    """A choice, or in a stream what is new of it."""

    index: int
    text: str = ""
    logprobs: CompletionLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    token_ids: list[int] | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET
    prompt_logprobs: list[dict[str, Any] | None] | UnsetType = UNSET


class Completion(msgspec.Struct, kw_only=True):
    """An answer, and also a chunk of a stream: OpenAI gives both the same shape here."""

    id: str
    object: str = "text_completion"
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage | UnsetType | None = UNSET
    system_fingerprint: str | None = None


class TopLogprob(msgspec.Struct):
    """bytes: the token's true bytes, also where they are no whole character."""

    token: str
    logprob: float
    bytes: list[int] | None


class TokenLogprob(msgspec.Struct):
    token: str
    logprob: float
    bytes: list[int] | None
    top_logprobs: list[TopLogprob]


class ChatLogprobs(msgspec.Struct):
    content: list[TokenLogprob]
    refusal: None = None


class FunctionCall(msgspec.Struct, kw_only=True):
    """arguments: JSON text of an object."""

    name: str
    arguments: str


class ToolCall(msgspec.Struct, kw_only=True):
    id: str
    type: str = "function"
    function: FunctionCall


class Message(msgspec.Struct, kw_only=True):
    """reasoning and reasoning_content are the same text: half of the clients look for one name, half for the other."""

    role: str = "assistant"
    content: str | None
    refusal: str | None = None
    reasoning: str | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET
    tool_calls: list[ToolCall] | UnsetType = UNSET


class ChatChoice(msgspec.Struct, kw_only=True):
    index: int
    message: Message
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    token_ids: list[int] | UnsetType = UNSET


class ChatCompletion(msgspec.Struct, kw_only=True):
    id: str
    object: str = "chat.completion"
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage | None = None
    system_fingerprint: str | None = None
    prompt_token_ids: list[int] | UnsetType = UNSET
    prompt_logprobs: list[dict[str, Any] | None] | UnsetType = UNSET


class FunctionDelta(msgspec.Struct, kw_only=True):
    name: str | UnsetType = UNSET
    arguments: str


class ToolCallDelta(msgspec.Struct, kw_only=True):
    """What is new of one call: id, type and name come once, then pieces of the arguments."""

    index: int
    id: str | UnsetType = UNSET
    type: str | UnsetType = UNSET
    function: FunctionDelta


class Delta(msgspec.Struct, kw_only=True):
    role: str | UnsetType = UNSET
    content: str | UnsetType = UNSET
    reasoning: str | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET
    tool_calls: list[ToolCallDelta] | UnsetType = UNSET


class ChunkChoice(msgspec.Struct, kw_only=True):
    index: int
    delta: Delta
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | UnsetType | None = UNSET
    token_ids: list[int] | UnsetType = UNSET


class ChatChunk(msgspec.Struct, kw_only=True):
    id: str
    object: str = "chat.completion.chunk"
    created: int
    model: str
    choices: list[ChunkChoice]
    usage: Usage | UnsetType | None = UNSET
    system_fingerprint: str | None = None
    prompt_token_ids: list[int] | UnsetType = UNSET
    prompt_logprobs: list[dict[str, Any] | None] | UnsetType = UNSET
