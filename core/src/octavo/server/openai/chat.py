"""POST /v1/chat/completions. As in `completions`, a plain answer is the stream's pieces joined."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator
from contextlib import aclosing

import msgspec

from octavo.errors import RequestError
from octavo.sampling.params import SamplingParams
from octavo.server.conversation import Answers, Conversation, answer
from octavo.server.decode import decode_body
from octavo.server.endpoint import Call, Stream
from octavo.server.messages import check_messages, text_of
from octavo.server.openai.answers import ChatChunk, ChatCompletion, UsageCount
from octavo.server.openai.chat_pieces import DeltaWriter, add_prompt, join_pieces
from octavo.server.openai.logprobs import TokenNames
from octavo.server.openai.protocol import ChatBody, StreamOptions
from octavo.server.openai.response_format import field_names
from octavo.server.openai.sampling import (
    check_max_logprobs,
    check_request_fields,
    refuse_unsupported,
    stream_options,
    to_params,
)
from octavo.server.openai.templates import template_options
from octavo.server.openai.tools import read_tool_use
from octavo.server.service import Service

Pieces = AsyncGenerator[ChatChunk, None]

EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")
"""What `reasoning_effort` may be. Templates know some of them; "none" switches reasoning off where they can."""


async def create_chat(service: Service, call: Call[ChatBody]) -> ChatCompletion | Stream[ChatChunk]:
    """Answer a conversation. Raises RequestError for a wrong body, ApiError for an unknown model or a full queue."""
    body = decode_body(call.body, ChatBody)
    model = service.model_name(body.model)
    options = stream_options(body)
    conversation = read_conversation(body, service, request_id=body.request_id or call.request_id)
    head = ChatChunk(id=f"chatcmpl-{conversation.request_id}", created=int(time.time()), model=model, choices=[])
    count = UsageCount()
    pieces = make_pieces(answer(service, conversation), body, service, head, count=count)
    if body.stream:
        return Stream(chunks(pieces, head, count, options))
    async with aclosing(pieces):
        whole = join_pieces([piece async for piece in pieces])
    whole.usage = count.usage()
    return whole


def read_conversation(body: ChatBody, service: Service, *, request_id: str) -> Conversation:
    """What a body asks for. Raises RequestError naming the field."""
    refuse_unsupported(body)
    check_request_fields(body)
    check_messages(body.messages)
    default_max_tokens = service.info.default_sampling.get("max_tokens")
    use = read_tool_use(body.tools, body.tool_choice)
    return Conversation(
        messages=body.messages,
        params=read_params(body, service),
        tools=use.tools,
        tool_choice=use.choice,
        tool_name=use.name,
        parallel_tool_calls=body.parallel_tool_calls is not False,
        reasoning_effort=read_effort(body.reasoning_effort),
        include_reasoning=body.include_reasoning is not False,
        template=template_options(body, service),
        request_id=request_id,
        priority=body.priority or 0,
        cache_salt=body.cache_salt or "",
        default_max_tokens=None if default_max_tokens is None else int(default_max_tokens),
        stream_interval=body.stream_interval or 1 if body.stream else 1,
        field_names=field_names(body)
        | {"prompt": "messages", "max_tokens": max_tokens_field(body), "logprobs": "top_logprobs"},
    )


def read_effort(effort: str | None) -> str | None:
    """How much the model should reason. Raises RequestError."""
    if effort is not None and effort not in EFFORTS:
        message = f"reasoning_effort must be one of {', '.join(EFFORTS)}, not {effort!r}"
        raise RequestError(message, field="reasoning_effort")
    return effort


def read_params(body: ChatBody, service: Service) -> SamplingParams:
    """Sampling parameters of a chat. Raises RequestError naming the field that the client used."""
    limit = service.options.max_logprobs
    if body.top_logprobs is not None:
        if not body.logprobs and body.top_logprobs != 0:
            raise RequestError("top_logprobs needs logprobs=true", field="top_logprobs")
        if body.top_logprobs < -1:
            raise RequestError("top_logprobs must be at least 0", field="top_logprobs")
        check_max_logprobs(body.top_logprobs, limit=limit, field="top_logprobs")
    check_max_logprobs(body.prompt_logprobs, limit=limit, field="prompt_logprobs")
    field = max_tokens_field(body)
    max_tokens = getattr(body, field)
    if max_tokens is not None and max_tokens < (0 if body.prompt_logprobs is not None else 1):
        raise RequestError(f"{field} must be at least 1, not {max_tokens}", field=field)
    return to_params(
        body,
        defaults=service.info.default_sampling,
        max_tokens=max_tokens,
        logprobs=(body.top_logprobs or 0) if body.logprobs else None,
        prompt_logprobs=body.prompt_logprobs,
        detokenize=True,
    )


def max_tokens_field(body: ChatBody) -> str:
    """The field that decides the length of the answer."""
    return "max_tokens" if body.max_completion_tokens is None else "max_completion_tokens"


async def make_pieces(
    answers: Answers, body: ChatBody, service: Service, head: ChatChunk, *, count: UsageCount, prompt: int = 0
) -> Pieces:
    """The chunks of all choices as they come; the very first one also carries what belongs to the prompt."""
    names = TokenNames(service.client.tokenizer, as_ids=bool(body.return_tokens_as_token_ids))
    last = body.messages[-1]
    echo = text_of(last) if body.echo and last["role"] == "assistant" else ""
    writers: dict[int, DeltaWriter] = {}
    first = True
    async with aclosing(answers):
        async for new in answers:
            count.add_answer(new, prompt=prompt)
            writer = writers.get(new.index)
            if writer is None:
                writer = writers[new.index] = DeltaWriter(body, names, echo=echo)
            for choice in writer.write(new):
                chunk = msgspec.structs.replace(head, choices=[choice])
                if first:
                    first = False
                    add_prompt(chunk, body, new)
                yield chunk


async def chunks(pieces: Pieces, head: ChatChunk, count: UsageCount, options: StreamOptions) -> Pieces:
    """The pieces with the usage as asked for, and one chunk with the usage alone at the end."""
    async with aclosing(pieces):
        async for piece in pieces:
            if options.continuous_usage_stats:
                piece.usage = count.usage()
            elif options.include_usage:
                piece.usage = None
            yield piece
    if options.include_usage:
        yield msgspec.structs.replace(head, usage=count.usage())
