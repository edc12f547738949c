"""ASGI middleware: request ids and API keys. Plain ASGI, so that streams pass through untouched."""

from __future__ import annotations

import hashlib
import hmac
import uuid
from collections.abc import Sequence

from prometheus_client import Counter
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from octavo.server.endpoint import path_of, send_error
from octavo.server.errors import unauthorized

MAX_ID_LENGTH = 128
KNOWN_METHODS = frozenset({"GET", "HEAD", "POST", "OPTIONS"})
"""Others share one label: a client must not be able to make new time series."""
OPEN_PATHS = frozenset({"/health", "/"})
OPEN_PREFIX = "/page/"
"""The page and its files hold no secret; what its user asks of the API needs a key like any other request."""


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


class KeyRing:
    """The keys that open the door."""

    def __init__(self, keys: Sequence[str]) -> None:
        self.owners = {key.encode(): hashlib.sha256(key.encode()).hexdigest()[:32] for key in keys}

    def owner(self, authorization: bytes, api_key: bytes) -> str | None:
        """Whose request it is, or None if it has no valid key. Either header will do."""
        scheme, _, token = authorization.partition(b" ")
        given = [api_key, token.strip() if scheme.lower() == b"bearer" else b""]
        # All keys are compared, each in constant time: the time tells nothing about any of them.
        matches = [owner for key, owner in self.owners.items() for secret in given if hmac.compare_digest(secret, key)]
        return matches[0] if matches else None


class ApiKeys:
    """Ask for a key on every path but /health and the page's: as a bearer token, or as `x-api-key`, which Anthropic's clients send.

    `state["owner"]` of a request then tells keys apart without holding one.
    """

    def __init__(self, app: ASGIApp, *, keys: Sequence[str]) -> None:
        self.app = app
        self.ring = KeyRing(keys)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and not is_open(path_of(scope)):
            owner = self.ring.owner(header(scope, b"authorization"), header(scope, b"x-api-key"))
            if owner is None:
                await send_error(send, unauthorized(), scope)
                return
            scope.setdefault("state", {})["owner"] = owner
        await self.app(scope, receive, send)


def is_open(path: str) -> bool:
    """Whether a path is served without a key."""
    return path in OPEN_PATHS or path.startswith(OPEN_PREFIX)


def header(scope: Scope, name: bytes) -> bytes:
    """The value of a request header, or b""."""
    return next((value for key, value in scope["headers"] if key == name), b"")
