"""ASGI middleware: request ids, exchanges, API keys. Plain ASGI, so that streams pass through untouched."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Sequence

from prometheus_client import Counter
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from octavo import logs
from octavo.server.access import KeyRing, digest_of
from octavo.server.endpoint import path_of, send_error
from octavo.server.errors import unauthorized
from octavo.server.exchange import Exchange, current

MAX_ID_LENGTH = 128
KNOWN_METHODS = frozenset({"GET", "HEAD", "POST", "OPTIONS"})
"""Others share one label: a client must not be able to make new time series."""
OPEN_PATHS = frozenset({"/health", "/"})
OPEN_PREFIX = "/page/"
"""The page and its files hold no secret; what its user asks of the API needs a key like any other request."""
TRACE_HEADERS = ("traceparent", "tracestate")


class RequestIds:
    """Give every request an id: the client's X-Request-Id if it is fit for a header and a log, else a new one."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        given = header(scope, b"x-request-id").decode("latin-1")
        fit = 0 < len(given) <= MAX_ID_LENGTH and given.isascii() and given.isprintable()
        request_id = given if fit else uuid.uuid4().hex
        scope.setdefault("state", {})["request_id"] = request_id

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                # OpenAI's clients read the first name, Anthropic's the second.
                ids = [(name, request_id.encode()) for name in (b"x-request-id", b"request-id")]
                message["headers"] = [*message["headers"], *ids]
            await send(message)

        await self.app(scope, receive, send_with_id)


class CountResponses:
    """Count responses by method and status."""

    def __init__(self, app: ASGIApp, *, counter: Counter) -> None:
        self.app = app
        self.counter = counter

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def counting_send(message: Message) -> None:
            if message["type"] == "http.response.start":
                method = scope["method"] if scope["method"] in KNOWN_METHODS else "other"
                self.counter.labels(method, str(message["status"])).inc()
            await send(message)

        await self.app(scope, receive, counting_send if scope["type"] == "http" else send)


class Exchanges:
    """Follow each request from here to the end of its response; then tell the observers what is known of it."""

    def __init__(self, app: ASGIApp, *, observers: Sequence[Callable[[Exchange], None]]) -> None:
        self.app = app
        self.observers = observers

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        exchange = Exchange(
            request_id=scope["state"]["request_id"],
            method=scope["method"],
            path=path_of(scope),
            trace={name: header(scope, name.encode()).decode("latin-1") for name in TRACE_HEADERS},
        )
        scope["state"]["exchange"] = exchange

        async def send_noting(message: Message) -> None:
            if message["type"] == "http.response.start":
                exchange.status = message["status"]
                if exchange.key is not None:
                    left = [(name.encode(), value.encode()) for name, value in exchange.key.headers().items()]
                    message["headers"] = [*message["headers"], *left]
            await send(message)

        marks = current.set(exchange), logs.request_id.set(exchange.request_id)
        try:
            await self.app(scope, receive, send_noting)
        finally:
            exchange.leave()
            for observe in self.observers:
                observe(exchange)
            current.reset(marks[0])
            logs.request_id.reset(marks[1])


class ApiKeys:
    """Ask for a key on every path but /health and the page's: a bearer token, or `x-api-key` as Anthropic's clients do.

    `state["owner"]` of a request then tells keys apart without holding one.
    """

    def __init__(self, app: ASGIApp, *, keys: KeyRing) -> None:
        self.app = app
        self.keys = keys

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and not is_open(path_of(scope)):
            key = self.keys.find_sent(header(scope, b"authorization"), header(scope, b"x-api-key"))
            if key is None:
                await send_error(send, unauthorized(), scope)
                return
            scope["state"]["owner"] = digest_of(key.rules.digest)[:32]
            scope["state"]["exchange"].key = key
        await self.app(scope, receive, send)


def is_open(path: str) -> bool:
    """Whether a path is served without a key."""
    return path in OPEN_PATHS or path.startswith(OPEN_PREFIX)


def header(scope: Scope, name: bytes) -> bytes:
    """The value of a request header, or b""."""
    return next((value for key, value in scope["headers"] if key == name), b"")
