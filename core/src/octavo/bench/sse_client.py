"""A streaming client for OpenAI-like servers that only notes when tokens arrive.

It must never be the bottleneck, so it is one asyncio protocol over httptools' parser: no task switch, decoding of text
or copy of headers per chunk. Each socket read is stamped once; an event is decoded just far enough to see whether it
brings tokens.
"""

from __future__ import annotations

import asyncio
import ssl
import time
from dataclasses import dataclass, field
from typing import Any, cast
from urllib.parse import urlsplit

import httptools
import msgspec

from octavo.errors import ConfigError

MAX_ERROR_BYTES = 500


class ChatDelta(msgspec.Struct):
    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None


class Choice(msgspec.Struct):
    text: str | None = None
    delta: ChatDelta | None = None
    token_ids: list[int] | None = None
    finish_reason: str | None = None

    def brings_tokens(self) -> bool:
        delta = self.delta
        return bool(
            self.text
            or self.token_ids
            or (delta is not None and (delta.content or delta.reasoning_content or delta.reasoning))
        )


class Usage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int | None = None


class Event(msgspec.Struct):
    """What is read of a chunk; other fields are skipped."""

    choices: list[Choice] = []
    usage: Usage | None = None
    error: Any = None


decode_event = msgspec.json.Decoder(Event).decode


@dataclass(slots=True)
class Answer:
    """One request. Times are of `time.perf_counter`, in seconds.

    arrivals: when each event that brought tokens was read. num_output: by the server's usage, or else the number of
    those events. error: why it failed, "" if it did not.
    """

    started: float
    arrivals: list[float] = field(default_factory=list)
    ended: float = 0.0
    num_prompt: int = 0
    num_output: int = 0
    error: str = ""


class Reply:
    """Fills an Answer from the bytes of a response."""

    def __init__(self, answer: Answer) -> None:
        self.answer = answer
        self.finished: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.started = False
        self._status = 0
        self._rest = b""
        self._done = False
        self._num_reported: int | None = None

    def begin(self, status: int) -> None:
        self.started, self._status = True, status

    def feed(self, body: bytes, now: float) -> None:
        """A piece of the body, cut anywhere."""
        if self._status != 200:
            self._rest = (self._rest + body)[:MAX_ERROR_BYTES]
            return
        *lines, self._rest = (self._rest + body).split(b"\n")
        for line in lines:
            if line.startswith(b"data:"):
                self._event(line[5:].strip(), now)

    def _event(self, data: bytes, now: float) -> None:
        answer = self.answer
        if data == b"[DONE]":
            self._done = True
            return
        try:
            event = decode_event(data)
        except msgspec.MsgspecError as error:
            answer.error = answer.error or f"an event cannot be read: {error}"
            return
        if event.error is not None:
            answer.error = answer.error or f"the server reports {event.error}"
            return
        if event.usage is not None:
            answer.num_prompt = event.usage.prompt_tokens
            self._num_reported = event.usage.completion_tokens
        for choice in event.choices:
            # A token without text of its own (an end, half a character) shows only in how the answer ends.
            if choice.brings_tokens() or (choice.finish_reason and not answer.arrivals):
                answer.arrivals.append(now)
            answer.ended = now

    def end(self, now: float, failure: str = "") -> None:
        """The response is complete, or the connection failed."""
        if self.finished.done():
            return
        answer = self.answer
        if failure and not self._done:  # a server may close the connection right behind [DONE]
            answer.error = answer.error or failure
        elif self._status != 200:
            answer.error = f"HTTP status {self._status}: {self._rest.decode(errors='replace').strip()}"
        elif not self._done:
            answer.error = answer.error or "the stream ended without [DONE]"
        elif not answer.arrivals:
            answer.error = answer.error or "the stream brought no tokens"
        answer.ended = answer.ended or now
        answer.num_output = len(answer.arrivals) if self._num_reported is None else self._num_reported
        self.finished.set_result(None)


class Connection(asyncio.Protocol):
    """One HTTP/1.1 connection with at most one request at a time."""

    def __init__(self) -> None:
        self._transport: asyncio.Transport | None = None
        self._reply: Reply | None = None
        self._now = 0.0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is one by its methods only

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        self._fail(f"the connection was closed{f': {exc}' if exc else ''}")

    @property
    def open(self) -> bool:
        return self._transport is not None and not self._transport.is_closing()

    def send(self, request: bytes, reply: Reply) -> None:
        assert self._transport is not None
        self._reply = reply
        self._parser = httptools.HttpResponseParser(self)
        self._transport.write(request)

    def close(self) -> None:
        if self._transport is not None:
            self._transport.close()

    def data_received(self, data: bytes) -> None:
        self._now = time.perf_counter()
        if self._reply is None:
            self.close()  # bytes nobody asked for
            return
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._fail(f"this is no HTTP response: {error}")
            self.close()

    # What httptools' parser calls.

    def on_headers_complete(self) -> None:
        if self._reply is not None:
            self._reply.begin(self._parser.get_status_code())

    def on_body(self, body: bytes) -> None:
        if self._reply is not None:
            self._reply.feed(body, self._now)

    def on_message_complete(self) -> None:
        reply, self._reply = self._reply, None
        if not self._parser.should_keep_alive():
            self.close()
        if reply is not None:
            reply.end(self._now)

    def _fail(self, why: str) -> None:
        reply, self._reply = self._reply, None
        if reply is not None:
            reply.end(time.perf_counter(), why)


class Client:
    """Posts bodies to one URL over as many connections as there are requests at a time, and keeps them for the next.

    Raises ConfigError for a URL that is not http or https.
    """

    def __init__(self, url: str, *, api_key: str = "") -> None:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ConfigError(f"base_url: {url!r} is no URL such as http://127.0.0.1:8000")
        self._host = parts.hostname
        self._port = parts.port or {"http": 80, "https": 443}[parts.scheme]
        self._tls = ssl.create_default_context() if parts.scheme == "https" else None
        head = f"POST {parts.path or '/'} HTTP/1.1\r\nHost: {parts.netloc}\r\nContent-Type: application/json\r\n"
        head += f"Authorization: Bearer {api_key}\r\n" if api_key else ""
        self._head = (head + "Accept: text/event-stream\r\nContent-Length: ").encode()
        self._idle: list[Connection] = []

    async def post(self, body: bytes) -> Answer:
        """Send a body and read its stream to the end. Failures are in the answer, not raised."""
        request = b"%s%d\r\n\r\n%s" % (self._head, len(body), body)
        answer = Answer(started=time.perf_counter())
        while True:
            connection, reused = self._take(), True
            if connection is None:
                reused = False
                try:
                    connection = await self._connect()
                except OSError as error:
                    answer.error, answer.ended = f"cannot connect: {error}", time.perf_counter()
                    return answer
            reply = Reply(answer)
            connection.send(request, reply)
            try:
                await reply.finished
            except asyncio.CancelledError:
                connection.close()
                raise
            if reused and not reply.started and not connection.open:
                # The server closed an idle connection just as it was taken: no request was lost but by chance.
                answer = Answer(started=answer.started)
                continue
            if connection.open:
                self._idle.append(connection)
            return answer

    async def _connect(self) -> Connection:
        loop = asyncio.get_running_loop()
        _, connection = await loop.create_connection(Connection, self._host, self._port, ssl=self._tls)
        return connection

    def _take(self) -> Connection | None:
        """A connection that is open and free. The one last used is the least likely to be closed for idling."""
        while self._idle:
            connection = self._idle.pop()
            if connection.open:
                return connection
        return None

    def close(self) -> None:
        """Close the idle connections."""
        for connection in self._idle:
            connection.close()
        self._idle.clear()
