"""POST /v1/completions.

A choice is made in pieces, one per delta of the engine. A stream sends the pieces, a plain answer joins them, so the
two cannot differ.
"""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

import msgspec
from msgspec import UNSET

from octavo.errors import RequestError
from octavo.outputs import CompletionOutput, RequestOutput
from octavo.sampling.params import SamplingParams
from octavo.server.conversation import renamed
from octavo.server.decode import decode_body
from octavo.server.endpoint import Call, Stream
from octavo.server.openai.answers import Completion, CompletionChoice, UsageCount
from octavo.server.openai.logprobs import CompletionLogprobsWriter, TokenNames, prompt_logprobs_json
from octavo.server.openai.protocol import CompletionBody
from octavo.server.openai.response_format import field_names
from octavo.server.openai.sampling import (
    check_max_logprobs,
    check_request_fields,
    refuse_unsupported,
    stream_options,
    to_params,
)
from octavo.server.service import Outputs, Prompt, Service

MAX_PROMPTS = 1024
DEFAULT_MAX_TOKENS = 16
"""OpenAI's; cut to the room that the prompt leaves, since nobody asked for it."""

Pieces = AsyncGenerator[CompletionChoice, None]


async def create_completion(service: Service, call: Call[CompletionBody]) -> Completion | Stream[Completion]:
    """Complete prompts. Raises RequestError for a wrong body, ApiError for an unknown model or a full queue."""
    body = decode_body(call.body, CompletionBody)
    model = service.model_name(body.model)
    options = stream_options(body)
    prompts = read_prompts(body.prompt)
    params = read_params(body, service)
    outputs = service.generate(
        prompts,
        params,
        request_id=body.request_id or call.request_id,
        priority=body.priority or 0,
        cache_salt=body.cache_salt or "",
        add_special_tokens=body.add_special_tokens is not False,
        default_max_tokens=DEFAULT_MAX_TOKENS,
        stream_interval=body.stream_interval or 1 if body.stream else 1,
    )
    count = UsageCount()
    pieces = make_pieces(outputs, body, service, count=count, num_answers=params.n)
    head = Completion(
        id=f"cmpl-{body.request_id or call.request_id}", created=int(time.time()), model=model, choices=[]
    )
    if body.stream:
        include_usage, continuous = bool(options.include_usage), bool(options.continuous_usage_stats)
        return Stream(chunks(pieces, head, count, include_usage=include_usage, continuous=continuous))
    async with aclosing(pieces):
        head.choices = join_pieces([piece async for piece in pieces])
    head.usage = count.usage()
    return head


def read_params(body: CompletionBody, service: Service) -> SamplingParams:
    """Sampling parameters of a body, after checking all that is not its prompt. Raises RequestError."""
    refuse_unsupported(body)
    check_request_fields(body)
    limit = service.options.max_logprobs
    check_max_logprobs(body.logprobs, limit=limit, field="logprobs")
    check_max_logprobs(body.prompt_logprobs, limit=limit, field="prompt_logprobs")
    if body.max_tokens == 0 and not body.echo and body.prompt_logprobs is None:
        raise RequestError("max_tokens may be 0 only with echo or prompt_logprobs", field="max_tokens")
    if body.max_tokens is None and (body.min_tokens or 0) > DEFAULT_MAX_TOKENS:
        raise RequestError(
            f"min_tokens is {body.min_tokens} and max_tokens {DEFAULT_MAX_TOKENS} by default: set both",
            field="min_tokens",
        )
    return to_params(
        body,
        defaults=service.info.default_sampling,
        max_tokens=body.max_tokens,
        logprobs=body.logprobs,
        prompt_logprobs=most(body.prompt_logprobs, body.logprobs if body.echo else None),
        detokenize=service.client.tokenizer is not None,
    )


def read_prompts(prompt: Any) -> list[Prompt]:
    """The prompts of a body: text, texts, token ids or lists of them. Raises RequestError."""
    if isinstance(prompt, str):
        return [prompt]
    if not isinstance(prompt, list) or not prompt:
        raise RequestError("prompt must be text, a list of texts, token ids or a list of them", field="prompt")
    kinds = {type(item) for item in prompt}
    if kinds == {int}:
        return [prompt]
    if len(prompt) > MAX_PROMPTS:
        raise RequestError(f"prompt holds {len(prompt)} prompts, at most {MAX_PROMPTS} are allowed", field="prompt")
    if kinds == {str}:
        return prompt
    if kinds == {list}:
        for index, ids in enumerate(prompt):
            if {type(token) for token in ids} - {int}:
                raise RequestError(f"prompt[{index}] holds something that is no integer", field=f"prompt[{index}]")
        return prompt
    wrong = next(item for item in prompt if type(item) not in (int, str, list) or len(kinds) > 1)
    raise RequestError(f"prompt mixes types or holds {str(wrong)[:50]!r}, which is no text or token id", field="prompt")


@dataclass
class PromptFacts:
    """What the first delta of a prompt tells, needed again when its other answers start."""

    text: str
    token_ids: list[int]
    rows: list[Any] | None


class PieceWriter:
    """Turns the deltas of one choice into pieces of it."""

    def __init__(self, body: CompletionBody, facts: PromptFacts, names: TokenNames, *, index: int) -> None:
        self._body = body
        self._facts = facts
        self._index = index
        self._started = False
        self._with_ids = bool(body.return_token_ids) or names.without_text
        self._logprobs = None
        if body.logprobs is not None:
            self._logprobs = CompletionLogprobsWriter(names, num_top=body.logprobs)

    def write(self, new: CompletionOutput) -> CompletionChoice | None:
        """What is new, or None if that is nothing that a client could see."""
        first = not self._started
        worth_sending = new.text or new.finish_reason or (new.token_ids and (self._with_ids or self._logprobs))
        if not worth_sending and not first:
            return None
        self._started = True
        piece = CompletionChoice(
            index=self._index, text=new.text, finish_reason=new.finish_reason, stop_reason=new.stop_reason
        )
        tokens, rows = new.token_ids, list(new.logprobs or ())
        if first:
            self._add_prompt(piece)
            if self._body.echo:
                piece.text = self._facts.text + piece.text
                if self._logprobs is not None:
                    tokens, rows = self._facts.token_ids + tokens, [*(self._facts.rows or ()), *rows]
        if self._logprobs is not None:
            piece.logprobs = self._logprobs.write(tokens, rows)
        if self._with_ids:
            piece.token_ids = new.token_ids
        return piece

    def _add_prompt(self, piece: CompletionChoice) -> None:
        if self._body.return_token_ids:
            piece.prompt_token_ids = self._facts.token_ids
        if self._body.prompt_logprobs is not None and self._facts.rows is not None:
            piece.prompt_logprobs = prompt_logprobs_json(self._facts.rows, num_top=self._body.prompt_logprobs)


async def make_pieces(
    outputs: Outputs, body: CompletionBody, service: Service, *, count: UsageCount, num_answers: int
) -> Pieces:
    """The pieces of all choices as they come. Choice j of prompt i has index i * num_answers + j."""
    names = TokenNames(service.client.tokenizer, as_ids=bool(body.return_tokens_as_token_ids))
    facts: dict[int, PromptFacts] = {}
    writers: dict[int, PieceWriter] = {}
    try:
        async with aclosing(outputs):
            async for prompt, delta in outputs:
                count.add(prompt, delta)
                if prompt not in facts:
                    facts[prompt] = PromptFacts(
                        echoed_text(delta, body, service), delta.prompt_token_ids, delta.prompt_logprobs
                    )
                for new in delta.outputs:
                    index = prompt * num_answers + new.index
                    if index not in writers:
                        writers[index] = PieceWriter(body, facts[prompt], names, index=index)
                    piece = writers[index].write(new)
                    if piece is not None:
                        yield piece
    except RequestError as error:
        error.field = renamed(error.field, field_names(body))
        raise


def echoed_text(delta: RequestOutput, body: CompletionBody, service: Service) -> str:
    """The prompt as text for `echo`: as it was sent, or decoded if it came as ids."""
    if not body.echo:
        return ""
    if delta.prompt is not None:
        return delta.prompt
    return service.tokenizer.decode(delta.prompt_token_ids, skip_special_tokens=body.skip_special_tokens is not False)


async def chunks(
    pieces: Pieces, head: Completion, count: UsageCount, *, include_usage: bool, continuous: bool
) -> AsyncGenerator[Completion, None]:
    """A chunk per piece, and one with the usage at the end if asked for."""
    async with aclosing(pieces):
        async for piece in pieces:
            usage = count.usage() if continuous else None if include_usage else UNSET
            yield msgspec.structs.replace(head, choices=[piece], usage=usage)
    if include_usage:
        yield msgspec.structs.replace(head, usage=count.usage())


def join_pieces(pieces: list[CompletionChoice]) -> list[CompletionChoice]:
    """Whole choices by index."""
    by_index: dict[int, list[CompletionChoice]] = {}
    for piece in pieces:
        by_index.setdefault(piece.index, []).append(piece)
    return [join_choice(by_index[index]) for index in sorted(by_index)]


def join_choice(pieces: list[CompletionChoice]) -> CompletionChoice:
    """One whole choice. What belongs to the prompt is in the first piece, how it ended in the last."""
    first = pieces[0]
    whole = msgspec.structs.replace(
        first,
        token_ids=UNSET if first.token_ids is UNSET else [token for piece in pieces for token in piece.token_ids or ()],
        text="".join(piece.text for piece in pieces),
        finish_reason=pieces[-1].finish_reason,
        stop_reason=pieces[-1].stop_reason,
    )
    for piece in pieces[1:]:
        if whole.logprobs is not None and piece.logprobs is not None:
            whole.logprobs.extend(piece.logprobs)
    return whole


def most(*asked: int | None) -> int | None:
    """The largest number of logprobs asked for; -1 (all) beats any, None is not asking."""
    given = [number for number in asked if number is not None]
    return None if not given else -1 if -1 in given else max(given)
