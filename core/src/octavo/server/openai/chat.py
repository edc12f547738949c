"""POST /v1/chat/completions. As in `completions`, a plain answer is the stream's pieces joined."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from itertools import chain

import msgspec
from msgspec import UNSET

from octavo.errors import RequestError
from octavo.outputs import CompletionOutput, RequestOutput
from octavo.sampling.params import SamplingParams
from octavo.server.decode import decode_body
from octavo.server.endpoint import Call, Stream
from octavo.server.openai.answers import (
    ChatChoice,
    ChatChunk,
    ChatCompletion,
    ChunkChoice,
    Delta,
    Message,
    UsageCount,
)
from octavo.server.openai.logprobs import TokenNames, chat_logprobs, prompt_logprobs_json
from octavo.server.openai.messages import check_messages, count_characters, text_of
from octavo.server.openai.protocol import ChatBody, StreamOptions
from octavo.server.openai.sampling import (
    check_max_logprobs,
    check_request_fields,
    refuse_unsupported,
    stream_options,
    to_params,
)
from octavo.server.openai.templates import template_options
from octavo.server.service import Outputs, Service

Pieces = AsyncGenerator[ChatChunk, None]


async def create_chat(service: Service, call: Call[ChatBody]) -> ChatCompletion | Stream[ChatChunk]:
    """Answer a conversation. Raises RequestError for a wrong body, ApiError for an unknown model or a full queue."""
    body = decode_body(call.body, ChatBody)
    model = service.model_name(body.model)
    refuse_unsupported(body)
    check_request_fields(body)
    options = stream_options(body)
    params = read_params(body, service)
    service.admit()
    check_messages(body.messages)
    prompt = await service.encode_chat(
        body.messages, num_characters=count_characters(body.messages), **template_options(body, service)
    )
    outputs = service.generate(
        [prompt],
        params,
        request_id=body.request_id or call.request_id,
        priority=body.priority or 0,
        cache_salt=body.cache_salt or "",
        default_max_tokens=read_default_max_tokens(service),
    )
    head = ChatChunk(
        id=f"chatcmpl-{body.request_id or call.request_id}", created=int(time.time()), model=model, choices=[]
    )
    count = UsageCount()
    last = body.messages[-1]
    echo = text_of(last) if body.echo and last["role"] == "assistant" else ""
    pieces = renamed_errors(make_pieces(outputs, body, service, head, count=count, echo=echo), body)
    if body.stream:
        return Stream(chunks(pieces, head, count, options))
    async with aclosing(pieces):
        whole = join_pieces([piece async for piece in pieces])
    whole.usage = count.usage()
    return whole


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


def read_default_max_tokens(service: Service) -> int | None:
    """How long an answer may get where nothing is asked for: the model's generation_config, or all the room."""
    default = service.info.default_sampling.get("max_tokens")
    return None if default is None else int(default)


def max_tokens_field(body: ChatBody) -> str:
    """The field that decides the length of the answer."""
    return "max_tokens" if body.max_completion_tokens is None else "max_completion_tokens"


async def renamed_errors(pieces: Pieces, body: ChatBody) -> Pieces:
    """The same pieces; errors name the fields that a chat has where the engine knows them by another name."""
    names = {"prompt": "messages", "max_tokens": max_tokens_field(body), "logprobs": "top_logprobs"}
    async with aclosing(pieces):
        try:
            async for piece in pieces:
                yield piece
        except RequestError as error:
            error.field = names.get(error.field, error.field)
            raise


class DeltaWriter:
    """Turns the deltas of one choice into the chunks of it: role, text, and at last the finish reason alone."""

    def __init__(self, body: ChatBody, names: TokenNames, *, echo: str) -> None:
        self._num_top = (body.top_logprobs or 0) if body.logprobs else None
        self._with_ids = bool(body.return_token_ids)
        self._names = names
        self._echo = echo
        self._started = False

    def write(self, new: CompletionOutput) -> list[ChunkChoice]:
        """What is new, as chunks of a stream."""
        written = []
        if not self._started:
            self._started = True
            written.append(ChunkChoice(index=new.index, delta=Delta(role="assistant", content=self._echo)))
        if new.text or (new.token_ids and (self._with_ids or self._num_top is not None)):
            written.append(self._content(new))
        if new.finish_reason is not None:
            written.append(
                ChunkChoice(
                    index=new.index, delta=Delta(), finish_reason=new.finish_reason, stop_reason=new.stop_reason
                )
            )
        return written

    def _content(self, new: CompletionOutput) -> ChunkChoice:
        choice = ChunkChoice(index=new.index, delta=Delta(content=new.text))
        if self._num_top is not None:
            choice.logprobs = chat_logprobs(new.token_ids, new.logprobs or (), self._names, num_top=self._num_top)
        if self._with_ids:
            choice.token_ids = new.token_ids
        return choice


async def make_pieces(
    outputs: Outputs, body: ChatBody, service: Service, head: ChatChunk, *, count: UsageCount, echo: str
) -> Pieces:
    """The chunks of all choices as they come; the very first one also carries what belongs to the prompt."""
    names = TokenNames(service.client.tokenizer, as_ids=bool(body.return_tokens_as_token_ids))
    writers: dict[int, DeltaWriter] = {}
    first = True
    async with aclosing(outputs):
        async for _, delta in outputs:
            count.add(0, delta)
            for new in delta.outputs:
                if new.index not in writers:
                    writers[new.index] = DeltaWriter(body, names, echo=echo)
                for choice in writers[new.index].write(new):
                    chunk = msgspec.structs.replace(head, choices=[choice])
                    if first:
                        first = False
                        add_prompt(chunk, body, delta)
                    yield chunk


def add_prompt(chunk: ChatChunk, body: ChatBody, delta: RequestOutput) -> None:
    """Put the prompt's ids and logprobs into a chunk, if they were asked for."""
    if body.return_token_ids:
        chunk.prompt_token_ids = delta.prompt_token_ids
    if body.prompt_logprobs is not None and delta.prompt_logprobs is not None:
        chunk.prompt_logprobs = prompt_logprobs_json(delta.prompt_logprobs, num_top=body.prompt_logprobs)


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


def join_pieces(pieces: list[ChatChunk]) -> ChatCompletion:
    """The whole answer."""
    by_index: dict[int, list[ChunkChoice]] = {}
    for piece in pieces:
        for choice in piece.choices:
            by_index.setdefault(choice.index, []).append(choice)
    first = pieces[0]
    return ChatCompletion(
        id=first.id,
        created=first.created,
        model=first.model,
        choices=[join_choice(by_index[index]) for index in sorted(by_index)],
        prompt_token_ids=first.prompt_token_ids,
        prompt_logprobs=first.prompt_logprobs,
    )


def join_choice(parts: list[ChunkChoice]) -> ChatChoice:
    """One whole choice from its chunks."""
    last = parts[-1]
    with_ids = [part.token_ids for part in parts if part.token_ids is not UNSET]
    whole = ChatChoice(
        index=last.index,
        token_ids=list(chain.from_iterable(with_ids)) if with_ids else UNSET,
        message=Message(content="".join(part.delta.content or "" for part in parts)),
        finish_reason=last.finish_reason,
        stop_reason=None if last.stop_reason is UNSET else last.stop_reason,
    )
    for part in parts:
        if part.logprobs is not None:
            if whole.logprobs is None:
                whole.logprobs = part.logprobs
            else:
                whole.logprobs.content.extend(part.logprobs.content)
    return whole
