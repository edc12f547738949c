"""Server-sent events: `data: JSON` per chunk, then `data: [DONE]`.

APIs of typed events have them named instead: `event: TYPE` before each `data: JSON`, and nothing behind the last.
Nothing is sent before the first chunk is there, so that a request refused by the engine gets its proper status.
An error after that goes out as an event with the error's body and ends the stream without [DONE]: never a silent cut.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
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


async def send_events(
    send: Send,
    chunks: AsyncGenerator[msgspec.Struct, None],
    *,
    named: bool = False,
    error_body: Callable[[ApiError], msgspec.Struct],
) -> None:
    """Send chunks as they come. Raises what the first chunk raises; later errors become an event."""
    async with aclosing(chunks):
        first = await anext(chunks)
        await send({"type": "http.response.start", "status": 200, "headers": HEADERS})
        await send({"type": "http.response.body", "body": event(first, named=named), "more_body": True})
        try:
            async for chunk in chunks:
                await send({"type": "http.response.body", "body": event(chunk, named=named), "more_body": True})
            last = b"" if named else DONE
        except Exception as error:
            last = event(error_body(as_api_error(error)), named=named)
        await send({"type": "http.response.body", "body": last, "more_body": False})
