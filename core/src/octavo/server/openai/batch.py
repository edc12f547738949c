"""POST /v1/chat/completions/batch: many conversations in one request, answered side by side.

The answer has the choices of all of them: choice j of conversation i has index i * n + j.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import replace

import msgspec

from octavo.errors import RequestError
from octavo.server.conversation import Conversation, answer
from octavo.server.decode import decode_body
from octavo.server.endpoint import Call
from octavo.server.errors import unsupported
from octavo.server.openai.answers import ChatChunk, ChatCompletion, UsageCount
from octavo.server.openai.chat import Pieces, make_pieces, read_conversation
from octavo.server.openai.chat_pieces import join_pieces
from octavo.server.openai.protocol import BatchBody, ChatBody
from octavo.server.service import MAX_SEQUENCES, Service, merge

MAX_CONVERSATIONS = 1024


async def create_batch(service: Service, call: Call[BatchBody]) -> ChatCompletion:
    """Answer several conversations. Raises as `create_chat`; the first error ends them all."""
    batch = decode_body(call.body, BatchBody)
    model = service.model_name(batch.model)
    bodies = split(batch)
    request_id = batch.request_id or call.request_id
    conversations = [read_one(body, service, index, request_id=request_id) for index, body in enumerate(bodies)]
    num_answers = conversations[0].params.n
    if len(bodies) * num_answers > MAX_SEQUENCES:
        raise RequestError(f"{len(bodies)} conversations with {num_answers} answers each are too many", field="n")
    head = ChatChunk(id=f"chatcmpl-{request_id}", created=int(time.time()), model=model, choices=[])
    count = UsageCount()
    pieces: list[ChatChunk] = []
    streams: Sequence[Pieces] = [
        make_pieces(answer(service, conversation), body, service, head, count=count, prompt=index)
        for index, (body, conversation) in enumerate(zip(bodies, conversations, strict=True))
    ]
    async with aclosing(merge(streams)) as merged:
        async for index, piece in merged:
            for choice in piece.choices:
                choice.index += index * num_answers
            pieces.append(piece)
    whole = join_pieces(pieces)
    whole.usage = count.usage()
    return whole


def split(batch: BatchBody) -> list[ChatBody]:
    """The body of each conversation alone. Raises RequestError for what belongs to one prompt, or is no batch."""
    for name in ("stream", "return_token_ids", "prompt_logprobs", "echo"):
        if getattr(batch, name) not in (None, False):
            raise unsupported(name, "in a batch")
    if not 0 < len(batch.messages) <= MAX_CONVERSATIONS:
        message = f"messages must hold 1 to {MAX_CONVERSATIONS} conversations, not {len(batch.messages)}"
        raise RequestError(message, field="messages")
    shared = msgspec.structs.asdict(batch)
    return [ChatBody(**shared | {"messages": messages}) for messages in batch.messages]


def read_one(body: ChatBody, service: Service, index: int, *, request_id: str) -> Conversation:
    """One of the conversations; errors name its place."""
    try:
        conversation = read_conversation(body, service, request_id=f"{request_id}-{index}")
    except RequestError as error:
        error.field = _placed(error.field, index)
        raise
    names = {name: _placed(field, index) for name, field in conversation.field_names.items()}
    return replace(conversation, field_names=names | {"messages": _placed("messages", index)})


def _placed(field: str, index: int) -> str:
    return f"messages[{index}]{field.removeprefix('messages')}" if field.startswith("messages") else field
