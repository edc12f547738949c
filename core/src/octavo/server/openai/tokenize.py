"""POST /tokenize and /detokenize."""

from __future__ import annotations

import asyncio
from functools import partial

import msgspec
from msgspec import UNSET, UnsetType

from octavo.errors import RequestError
from octavo.sampling.params import SamplingParams
from octavo.server.conversation import Conversation, render
from octavo.server.decode import decode_body
from octavo.server.endpoint import Call
from octavo.server.messages import check_messages
from octavo.server.openai.protocol import DetokenizeBody, TokenizeBody
from octavo.server.openai.templates import template_options
from octavo.server.openai.tools import read_tool_use
from octavo.server.service import INLINE_CHARACTERS, Service


class Tokens(msgspec.Struct):
    """token_strs: the text of each token, if asked for."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | UnsetType = UNSET


class Text(msgspec.Struct):
    prompt: str


async def tokenize(service: Service, call: Call[TokenizeBody]) -> Tokens:
    """Token ids of a prompt or of a rendered conversation. Raises RequestError."""
    body = decode_body(call.body, TokenizeBody)
    service.model_name(body.model)
    if (body.prompt is None) == (body.messages is None):
        raise RequestError("send either prompt or messages", field="prompt")
    if body.prompt is not None:
        tokens = await service.encode(body.prompt, add_special_tokens=body.add_special_tokens is not False)
    else:
        messages = body.messages or []
        check_messages(messages)
        conversation = Conversation(
            messages=messages,
            params=SamplingParams(),
            tools=read_tool_use(body.tools, None).tools,
            template=template_options(body, service),
            request_id=call.request_id,
        )
        tokens = await render(service, conversation)
    answer = Tokens(len(tokens), service.info.max_model_len, tokens)
    if body.return_token_strs:
        answer.token_strs = [service.tokenizer.token_text(token) for token in tokens]
    return answer


async def detokenize(service: Service, call: Call[DetokenizeBody]) -> Text:
    """The text of token ids, special tokens included. Raises RequestError for an id that does not exist."""
    body = decode_body(call.body, DetokenizeBody)
    service.model_name(body.model)
    tokenizer = service.tokenizer
    for token in body.tokens:
        if not 0 <= token < tokenizer.vocab_size:
            raise RequestError(f"tokens holds {token}; ids go from 0 to {tokenizer.vocab_size - 1}", field="tokens")
    work = partial(tokenizer.decode, body.tokens, skip_special_tokens=False)
    return Text(work() if len(body.tokens) <= INLINE_CHARACTERS else await asyncio.to_thread(work))
