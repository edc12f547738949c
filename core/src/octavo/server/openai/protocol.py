"""Bodies of the OpenAI routes, with vLLM's extra fields.

Fields that start as `Any` hold unions that the decoder cannot tell apart, or features that are refused by name (see
`openai.sampling`).
"""

from __future__ import annotations

from typing import Annotated, Any

import msgspec

from octavo.server.shared_fields import SharedFields

TOKEN_IDS = {"type": "array", "items": {"type": "integer", "minimum": 0}, "minItems": 1}
PROMPT = {
    "anyOf": [
        {"type": "string"},
        {"type": "array", "items": {"type": "string"}, "minItems": 1},
        TOKEN_IDS,
        {"type": "array", "items": TOKEN_IDS, "minItems": 1},
    ]
}
CONVERSATION = [{"role": "user", "content": "How many pages has an octavo?"}]
Messages = Annotated[list[dict[str, Any]], msgspec.Meta(extra_json_schema={"minItems": 1}, examples=[CONVERSATION])]


class StreamOptions(msgspec.Struct):
    """include_usage: one more chunk at the end with the usage. continuous_usage_stats: usage so far in each chunk."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class SamplingFields(SharedFields, kw_only=True):
    """What completions and chat have in common."""

    n: int | None = None
    best_of: int | None = None
    max_tokens: int | None = None
    logit_bias: dict[str, float] | None = None
    allowed_token_ids: list[int] | None = None
    bad_words: list[str] | None = None
    prompt_logprobs: int | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    add_special_tokens: bool | None = None
    echo: bool | None = None
    stream_options: StreamOptions | None = None
    request_id: str | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    stream_interval: int | None = None
    logprob_token_ids: list[int] | None = None
    repetition_detection: dict[str, Any] | None = None
    thinking_token_budget: int | None = None
    truncate_prompt_tokens: int | None = None
    truncation_side: str | None = None
    spaces_between_special_tokens: bool | None = None
    use_beam_search: bool | None = None
    length_penalty: float | None = None
    early_stopping: bool | str | None = None
    vllm_xargs: dict[str, Any] | None = None
    # The form of the answer; one of them:
    response_format: Annotated[Any, msgspec.Meta(examples=[{"type": "text"}])] = None
    structural_tag: str | dict[str, Any] | None = None
    guided_json: str | dict[str, Any] | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    guided_json_object: bool | None = None
    guided_decoding_backend: str | None = None
    guided_whitespace_pattern: str | None = None
    # Without effect on the answer:
    metadata: Any = None
    session_id: str | None = None
    prediction: Any = None
    # Refused when set:
    kv_transfer_params: Any = None
    ec_transfer_params: Any = None
    mm_processor_kwargs: Any = None
    media_io_kwargs: Any = None


class CompletionBody(SamplingFields, kw_only=True):
    """POST /v1/completions. prompt: text, texts, token ids or lists of them."""

    prompt: Annotated[Any, msgspec.Meta(extra_json_schema=PROMPT, examples=["Once upon a time"])]
    logprobs: int | None = None
    # Refused when set:
    suffix: str | None = None
    prompt_embeds: Any = None


class ChatBody(SamplingFields, kw_only=True):
    """POST /v1/chat/completions. max_completion_tokens wins over max_tokens."""

    messages: Messages
    logprobs: bool | None = None
    top_logprobs: int | None = None
    max_completion_tokens: int | None = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    documents: list[dict[str, Any]] | None = None
    tools: list[Any] | None = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: str | None = None
    include_reasoning: bool | None = None
    # Refused when set:
    functions: Any = None
    function_call: Any = None
    modalities: list[str] | None = None
    audio: Any = None
    web_search_options: Any = None
    return_prompt_text: bool | None = None


class BatchBody(ChatBody, kw_only=True):
    """POST /v1/chat/completions/batch: as a chat, with a list of conversations."""

    messages: Annotated[list[list[dict[str, Any]]], msgspec.Meta(examples=[[CONVERSATION, CONVERSATION]])]  # type: ignore[assignment]


class TokenizeBody(msgspec.Struct, kw_only=True):
    """POST /tokenize: a prompt or messages."""

    model: str | None = None
    prompt: Annotated[str | None, msgspec.Meta(examples=["Once upon a time"])] = None
    messages: list[dict[str, Any]] | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    tools: list[Any] | None = None


class DetokenizeBody(msgspec.Struct, kw_only=True):
    """POST /detokenize."""

    tokens: Annotated[list[int], msgspec.Meta(examples=[[40, 41, 42]])]
    model: str | None = None
