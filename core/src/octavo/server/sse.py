"""Server-sent events: `data: JSON` per chunk, then `data: [DONE]`.

Nothing is sent before the first chunk is there, so that a request refused by the engine gets its proper status.
An error after that goes out as `data: {"error": ...}` and ends the stream without [DONE]: never a silent cut.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing

import msgspec
from starlette.types import Send

from octavo.server.errors import as_api_error

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


def event(chunk: msgspec.Struct) -> bytes:
    """One event. Its data are one line by anybody's rules."""
    data = _encode(chunk)
    if not data.isascii():
        for raw, escape in LINE_BREAKS:
            data = data.replace(raw, escape)
    return b"data: " + data + b"\n\n"


async def send_events(send: Send, chunks: AsyncGenerator[msgspec.Struct, None]) -> None:
    """Send chunks as they come. Raises what the first chunk raises; later errors become an event."""
    async with aclosing(chunks):
        first = await anext(chunks)
        await send({"type": "http.response.start", "status": 200, "headers": HEADERS})
        await send({"type": "http.response.body", "body": event(first), "more_body": True})
        try:
            async for chunk in chunks:
                await send({"type": "http.response.body", "body": event(chunk), "more_body": True})
            last = DONE
        except Exception as error:
            last = event(as_api_error(error).body)
        await send({"type": "http.response.body", "body": last, "more_body": False})
