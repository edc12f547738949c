"""Server-sent events: `data: JSON` per chunk, then `data: [DONE]`.

APIs of typed events have them named instead: `event: TYPE` before each `data: JSON`, and nothing behind the last.
Nothing is sent before the first chunk is there, so that a request refused by the engine gets its proper status. But
proxies and clients end connections that are silent for long: a request that is still without a chunk after the
keep-alive interval waits in the queue, so its 200 goes out with a comment (`: keep-alive`), and each further interval
without a chunk brings another one.
An error after that goes out as an event with the error's body and ends the stream without [DONE]: never a silent cut.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import aclosing

import msgspec
from starlette.types import Send

from octavo.server.errors import ApiError, as_api_error

HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # proxies like nginx would hold events back
]
DONE = b"data: [DONE]\n\n"
COMMENT = b": keep-alive\n\n"
"""What every reader of events skips."""

_encode = msgspec.json.Encoder().encode


LINE_BREAKS = ((b"\xc2\x85", b"\\u0085"), (b"\xe2\x80\xa8", b"\\u2028"), (b"\xe2\x80\xa9", b"\\u2029"))
"""Characters that JSON may hold as they are and that end no line of an event stream, but at which many clients cut
lines all the same (Python's `str.splitlines` does), and their escapes. They can stand in strings only."""


def event(chunk: msgspec.Struct, *, named: bool = False) -> bytes:
    """One event. Its data are one line by anybody's rules. named: its name is the tag of the chunk's type."""
    data = _encode(chunk)
    if not data.isascii():
        for raw, escape in LINE_BREAKS:
            data = data.replace(raw, escape)
    if named and (name := chunk.__struct_config__.tag):
        return b"event: " + str(name).encode() + b"\ndata: " + data + b"\n\n"
    return b"data: " + data + b"\n\n"


class EventStream:
    """The response of one stream. Its head goes out with the first thing written."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self._lock = asyncio.Lock()
        self._written_at = time.monotonic()
        self.started = False

    async def write(self, data: bytes, *, more: bool = True) -> None:
        async with self._lock:
            if not self.started:
                self.started = True
                await self._send({"type": "http.response.start", "status": 200, "headers": HEADERS})
            await self._send({"type": "http.response.body", "body": data, "more_body": more})
            self._written_at = time.monotonic()

    async def stay_alive(self, interval: float) -> None:
        """Write a comment after each `interval` seconds in which nothing was written, for ever."""
        while True:
            quiet = time.monotonic() - self._written_at
            if quiet >= interval:
                await self.write(COMMENT)
                quiet = 0.0
            await asyncio.sleep(interval - quiet)

    @contextlib.asynccontextmanager
    async def kept_alive(self, interval: float) -> AsyncIterator[None]:
        """`stay_alive` meanwhile; 0 is never."""
        if not interval:
            yield
            return
        task = asyncio.create_task(self.stay_alive(interval))
        try:
            yield
        finally:
            async with self._lock:  # never in the middle of a write
                task.cancel()
            await asyncio.gather(task, return_exceptions=True)


async def send_events(
    send: Send,
    chunks: AsyncGenerator[msgspec.Struct, None],
    *,
    named: bool = False,
    error_body: Callable[[ApiError], msgspec.Struct],
    keep_alive: float = 0.0,
) -> None:
    """Send chunks as they come. Raises what comes before anything was sent; later errors become an event."""
    stream = EventStream(send)
    async with aclosing(chunks):
        async with stream.kept_alive(keep_alive):
            try:
                async for chunk in chunks:
                    await stream.write(event(chunk, named=named))
                last = b"" if named else DONE
            except Exception as error:
                if not stream.started:
                    raise
                last = event(error_body(as_api_error(error)), named=named)
        await stream.write(last, more=False)
