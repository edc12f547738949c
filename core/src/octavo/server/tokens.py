"""POST /inference/v1/generate: token ids in, token ids out, and the render routes, whose answers it takes.

Rendering and generating may then be done by different servers, or by a client that keeps its own tokens (vLLM's shape).
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from typing import Annotated, Any

import msgspec
from msgspec import UNSET, UnsetType

from octavo.errors import RequestError
from octavo.outputs import CompletionOutput, RequestOutput
from octavo.sampling.params import SamplingParams, integer
from octavo.server.answer_reader import plan
from octavo.server.conversation import field_name, render_text
from octavo.server.decode import decode_body, decode_part
from octavo.server.endpoint import Call, Stream
from octavo.server.errors import unsupported
from octavo.server.openai.answers import ChatLogprobs, Usage, UsageCount
from octavo.server.openai.chat import read_conversation
from octavo.server.openai.completions import DEFAULT_MAX_TOKENS, read_params, read_prompts
from octavo.server.openai.logprobs import TokenNames, chat_logprobs, prompt_logprobs_json
from octavo.server.openai.protocol import ChatBody, CompletionBody, StreamOptions
from octavo.server.openai.sampling import MODEL_DEFAULTS, check_max_logprobs, read_logit_bias
from octavo.server.service import Outputs, Service

WITHOUT_EFFECT = frozenset({"output_kind", "detokenize", "flat_logprobs", "skip_clone"})
"""Parameters of vLLM's that say how it gives its answer, not what the answer is."""


class GenerateBody(msgspec.Struct, kw_only=True, omit_defaults=True):
    """token_ids: the prompt. sampling_params: fields of SamplingParams; those left out are the model's defaults."""

    token_ids: Annotated[list[int], msgspec.Meta(examples=[[40, 41, 42]])]
    sampling_params: dict[str, Any] = {}
    model: str | None = None
    request_id: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    cache_salt: str | None = None
    priority: int | None = None
    # Refused when set:
    features: Any = None
    kv_transfer_params: Any = None


class GenerateChoice(msgspec.Struct, kw_only=True):
    index: int
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    token_ids: list[int]


class Generated(msgspec.Struct, kw_only=True):
    """An answer, or in a stream what is new of it."""

    request_id: str
    choices: list[GenerateChoice]
    prompt_logprobs: list[dict[str, Any] | None] | None = None
    usage: Usage | UnsetType | None = UNSET
    kv_transfer_params: None = None


async def generate(service: Service, call: Call[GenerateBody]) -> Generated | Stream[Generated]:
    """Continue token ids. Raises RequestError for a wrong body, ApiError for an unknown model or a full queue."""
    body = decode_body(call.body, GenerateBody)
    service.model_name(body.model)
    for name in ("features", "kv_transfer_params"):
        if getattr(body, name) not in (None, {}, []):
            raise unsupported(name)
    if body.stream_options is not None and not body.stream:
        raise RequestError("stream_options needs stream=true", field="stream_options")
    params = read_sampling_params(body.sampling_params, service)
    if body.priority is not None:
        integer(body.priority, "priority", low=-(2**31), high=2**31 - 1)
    request_id = body.request_id or call.request_id
    outputs = service.generate(
        [body.token_ids],
        params,
        request_id=request_id,
        priority=body.priority or 0,
        cache_salt=body.cache_salt or "",
        add_special_tokens=False,
    )
    count = UsageCount()
    pieces = make_pieces(outputs, params, service, request_id=request_id, count=count)
    if body.stream:
        return Stream(with_usage(pieces, count, body.stream_options or StreamOptions(), request_id=request_id))
    async with aclosing(pieces):
        whole = join([piece async for piece in pieces])
    whole.usage = count.usage()
    return whole


def read_sampling_params(given: Mapping[str, Any], service: Service) -> SamplingParams:
    """Parameters from an object of JSON. Raises RequestError naming the field."""
    place = "sampling_params"
    unknown = given.keys() - set(SamplingParams.__struct_fields__) - WITHOUT_EFFECT
    if unknown:
        field = f"{place}.{min(unknown)}"
        raise RequestError(f"{field} is not known", field=field)
    # A null is what was left out, but for max_tokens: there it is all the room, and 16 is the default.
    values = {name: value for name, value in given.items() if value is not None or name == "max_tokens"}
    values = {name: value for name, value in values.items() if name not in WITHOUT_EFFECT}
    defaults = {
        name: value for name in MODEL_DEFAULTS if (value := service.info.default_sampling.get(name)) is not None
    }
    try:
        # Text is needed only to find stop strings in it.
        with_text = {"detokenize": bool(values.get("stop"))}
        if isinstance(values.get("stop"), str):
            values["stop"] = [values["stop"]]
        if isinstance(values.get("logit_bias"), dict):
            values["logit_bias"] = read_logit_bias(values["logit_bias"])
        params: SamplingParams = decode_part(defaults | values | with_text, SamplingParams, place)
        for name in ("logprobs", "prompt_logprobs"):
            check_max_logprobs(getattr(params, name), limit=service.options.max_logprobs, field=name)
    except RequestError as error:
        if not error.field.startswith(place):
            error.field = f"{place}.{error.field}"
        raise
    return params


async def make_pieces(
    outputs: Outputs, params: SamplingParams, service: Service, *, request_id: str, count: UsageCount
) -> AsyncGenerator[Generated, None]:
    """What is new of all choices as it comes."""
    names = TokenNames(service.client.tokenizer, as_ids=True)
    first = True
    try:
        async with aclosing(outputs):
            async for _, delta in outputs:
                count.add(0, delta)
                choices = [to_choice(new, params, names) for new in delta.outputs if new.token_ids or new.finish_reason]
                if choices or first:
                    piece = Generated(request_id=request_id, choices=choices)
                    if delta.prompt_logprobs is not None and params.prompt_logprobs is not None:
                        piece.prompt_logprobs = prompt_rows(delta, params.prompt_logprobs)
                    first = False
                    yield piece
    except RequestError as error:
        error.field = "token_ids" if error.field == "prompt" else f"sampling_params.{error.field}"
        raise


def prompt_rows(delta: RequestOutput, num_top: int) -> list[dict[str, Any] | None]:
    """The prompt's logprobs as JSON."""
    return prompt_logprobs_json(delta.prompt_logprobs or [], num_top=num_top)


def to_choice(new: CompletionOutput, params: SamplingParams, names: TokenNames) -> GenerateChoice:
    """What is new of one choice."""
    choice = GenerateChoice(
        index=new.index, token_ids=new.token_ids, finish_reason=new.finish_reason, stop_reason=new.stop_reason
    )
    if params.logprobs is not None:
        choice.logprobs = chat_logprobs(new.token_ids, new.logprobs or (), names, num_top=params.logprobs)
    return choice


async def with_usage(
    pieces: AsyncGenerator[Generated, None], count: UsageCount, options: StreamOptions, *, request_id: str
) -> AsyncGenerator[Generated, None]:
    """The pieces, with the usage as asked for."""
    async with aclosing(pieces):
        async for piece in pieces:
            if options.continuous_usage_stats:
                piece.usage = count.usage()
            elif options.include_usage:
                piece.usage = None
            yield piece
    if options.include_usage:
        yield Generated(request_id=request_id, choices=[], usage=count.usage())


def join(pieces: list[Generated]) -> Generated:
    """The whole answer."""
    whole: dict[int, GenerateChoice] = {}
    for new in (choice for piece in pieces for choice in piece.choices):
        old = whole.setdefault(new.index, new)
        if old is not new:
            old.token_ids = old.token_ids + new.token_ids
            old.finish_reason, old.stop_reason = new.finish_reason, new.stop_reason
            if old.logprobs is not None and new.logprobs is not None:
                old.logprobs.content.extend(new.logprobs.content)
    return msgspec.structs.replace(pieces[0], choices=[whole[index] for index in sorted(whole)])


async def render_chat(service: Service, call: Call[ChatBody]) -> GenerateBody:
    """The prompt of a chat as token ids, in the body that /inference/v1/generate takes. Raises as the chat itself."""
    body = decode_body(call.body, ChatBody)
    model = service.model_name(body.model)
    request_id = body.request_id or call.request_id
    conversation = read_conversation(body, service, request_id=request_id)
    try:
        prompt = await render_text(service, conversation)
        params = plan(service, conversation, prompt.text).params
    except RequestError as error:
        error.field = field_name(error.field, conversation)
        raise
    return GenerateBody(
        token_ids=prompt.token_ids,
        sampling_params=params_json(
            params, service, num_prompt=len(prompt.token_ids), default=conversation.default_max_tokens
        ),
        model=model,
        request_id=f"chatcmpl-{request_id}",
        stream=body.stream,
        cache_salt=body.cache_salt,
        priority=body.priority,
    )


async def render_completion(service: Service, call: Call[CompletionBody]) -> list[GenerateBody]:
    """The prompts of a completion as token ids, each in the body that /inference/v1/generate takes."""
    body = decode_body(call.body, CompletionBody)
    model = service.model_name(body.model)
    prompts = read_prompts(body.prompt)
    params = read_params(body, service)
    add_special_tokens = body.add_special_tokens is not False
    request_id = f"cmpl-{body.request_id or call.request_id}"
    bodies = []
    for index, prompt in enumerate(prompts):
        if isinstance(prompt, str):
            prompt = await service.encode(prompt, add_special_tokens=add_special_tokens)
        bodies.append(
            GenerateBody(
                token_ids=prompt,
                sampling_params=params_json(params, service, num_prompt=len(prompt), default=DEFAULT_MAX_TOKENS),
                model=model,
                request_id=f"{request_id}-{index}",
                stream=body.stream,
                cache_salt=body.cache_salt,
                priority=body.priority,
            )
        )
    return bodies


def params_json(params: SamplingParams, service: Service, *, num_prompt: int, default: int | None) -> dict[str, Any]:
    """Parameters as JSON. default: max_tokens where the request has none, cut to the room; None is all the room."""
    if params.max_tokens is None and default is not None:
        room = max(1, service.info.max_model_len - num_prompt)
        params = msgspec.structs.replace(params, max_tokens=min(default, room))
    written: dict[str, Any] = msgspec.to_builtins(params)
    return written
