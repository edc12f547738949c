"""One HTTP exchange: read the body, run the handler, send JSON or a stream, stop when the client is gone.

Handlers know nothing of ASGI: they take a `Call` and give a reply (a struct or dict, `Raw`, or `Stream`). A handler's
annotations say which: `call: Call[CompletionBody]` (None: no body), `-> Completion | Stream[Completion]`. They are
what `/openapi.json` is made of.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Generic, TypeVar

import msgspec
from starlette.datastructures import QueryParams
from starlette.types import Receive, Scope, Send

from octavo.server.errors import ApiError, as_api_error, body_too_large
from octavo.server.service import Service
from octavo.server.sse import send_events

encode_json = msgspec.json.Encoder().encode

Body = TypeVar("Body")
Chunk = TypeVar("Chunk", bound=msgspec.Struct)


@dataclass(frozen=True)
class Call(Generic[Body]):
    """What a handler sees of the HTTP request, whose body holds a `Body` in JSON.

    owner: stands for the API key that opened the door, without telling it; "" where no keys are asked for.
    """

    body: bytes
    request_id: str
    path: Mapping[str, str]
    query: Mapping[str, str] = field(default_factory=dict)
    owner: str = ""


@dataclass(frozen=True)
class Stream(Generic[Chunk]):
    """Reply with server-sent events, one per chunk. named: typed events instead of `data:` lines alone, see `sse`."""

    chunks: AsyncGenerator[Chunk, None]
    named: bool = False


@dataclass(frozen=True)
class Raw:
    """Reply with bytes as they are."""

    data: bytes
    content_type: str


Reply = msgspec.Struct | dict[str, Any] | list[Any] | Stream[Any] | Raw
Handler = Callable[[Service, Call[Any]], Awaitable[Reply]]


class Endpoint:
    """A handler as an ASGI application. A client that leaves cancels the handler, and so its generation."""

    def __init__(self, service: Service, handler: Handler) -> None:
        self.service = service
        self.handler = handler

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            body = await read_body(scope, receive, limit=self.service.options.max_body_bytes)
        except ApiError as error:
            await send_error(send, error, scope)
            return
        if body is None:
            return
        state = scope["state"]
        query = QueryParams(scope.get("query_string", b""))
        call: Call[Any] = Call(
            body, state["request_id"], scope.get("path_params", {}), query, owner=state.get("owner", "")
        )
        work = asyncio.create_task(self.answer(call, scope, send))
        gone = asyncio.create_task(disconnected(receive))
        try:
            await asyncio.wait((work, gone), return_when=asyncio.FIRST_COMPLETED)
        finally:
            work.cancel()
            gone.cancel()
            await asyncio.gather(work, gone, return_exceptions=True)

    async def answer(self, call: Call[Any], scope: Scope, send: Send) -> None:
        try:
            reply = await self.handler(self.service, call)
            if isinstance(reply, Stream):
                await send_events(
                    send,
                    reply.chunks,
                    named=reply.named,
                    error_body=partial(error_body, scope=scope),
                    keep_alive=self.service.options.sse_keep_alive_interval,
                )
            elif isinstance(reply, Raw):
                await send_bytes(send, 200, reply.data, content_type=reply.content_type)
            else:
                await send_bytes(send, 200, encode_json(reply))
        except Exception as error:
            await send_error(send, as_api_error(error), scope)


async def read_body(scope: Scope, receive: Receive, *, limit: int) -> bytes | None:
    """The whole body, or None if the client left meanwhile. Raises ApiError (413) above `limit` bytes."""
    for name, value in scope["headers"]:
        if name == b"content-length" and value.isdigit() and int(value) > limit:
            raise body_too_large(limit)
    parts = []
    size = 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            return None
        parts.append(message.get("body", b""))
        size += len(parts[-1])
        if size > limit:
            raise body_too_large(limit)
        if not message.get("more_body", False):
            return b"".join(parts)


async def disconnected(receive: Receive) -> None:
    """Return when the client has gone."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def send_bytes(
    send: Send,
    status: int,
    data: bytes,
    *,
    content_type: str = "application/json",
    headers: Mapping[str, str] | None = None,
) -> None:
    """Send a whole response."""
    pairs = [(b"content-type", content_type.encode()), (b"content-length", str(len(data)).encode())]
    pairs += [(name.encode(), value.encode()) for name, value in (headers or {}).items()]
    await send({"type": "http.response.start", "status": status, "headers": pairs})
    await send({"type": "http.response.body", "body": data})


async def send_error(send: Send, error: ApiError, scope: Scope) -> None:
    """Send an error in the shape of the API that was called."""
    await send_bytes(send, error.status, encode_json(error_body(error, scope)), headers=error.headers)


def error_body(error: ApiError, scope: Scope) -> msgspec.Struct:
    """The body of an error of the request."""
    return error.body_for(path_of(scope), scope.get("state", {}).get("request_id"))


def path_of(scope: Scope) -> str:
    """The path of a request, without the prefix that a proxy strips (--root-path)."""
    path: str = scope["path"]
    return path.removeprefix(scope.get("root_path", "").rstrip("/"))
