"""The lines of a batch file, as OpenAI has them.

in:  {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": {...}}
out: {"id": "batch_req_...", "custom_id": "a", "response": {"status_code": 200, "request_id", "body"}, "error": null}

A request that the server refuses has the status and body of that refusal in `response`. A line that is no request
has `response` null and says in `error` which line it was and which field is wrong.
"""

from __future__ import annotations

import uuid
from typing import Any

import msgspec

from octavo.errors import RequestError
from octavo.server.decode import decode_body

MAX_ID_LENGTH = 512


class BatchLine(msgspec.Struct, kw_only=True):
    """A request of an input file."""

    custom_id: str
    url: str
    body: msgspec.Raw
    method: str = "POST"


class BatchResponse(msgspec.Struct):
    status_code: int
    request_id: str
    body: Any


class BatchError(msgspec.Struct):
    """Why a line was not a request. line counts from 1; param is the field that is wrong."""

    code: str
    message: str
    param: str | None = None
    line: int | None = None


class BatchResult(msgspec.Struct, kw_only=True):
    """A line of an output file."""

    id: str = msgspec.field(default_factory=lambda: f"batch_req_{uuid.uuid4().hex}")
    custom_id: str | None
    response: BatchResponse | None = None
    error: BatchError | None = None


class _Named(msgspec.Struct):
    custom_id: str


class _Asked(msgspec.Struct):
    """What no line of a file can have: there is nobody who reads a stream, or comes back later."""

    stream: bool | None = None
    background: bool | None = None


def read_line(data: bytes) -> BatchLine:
    """A line of an input file. Raises RequestError naming the field."""
    line = decode_body(data, BatchLine)
    if not 0 < len(line.custom_id) <= MAX_ID_LENGTH:
        raise RequestError(f"custom_id must have 1 to {MAX_ID_LENGTH} characters", field="custom_id")
    if line.method != "POST":
        raise RequestError(f"method must be POST, not {line.method!r}", field="method")
    if not bytes(line.body).lstrip().startswith(b"{"):
        raise RequestError("body must be an object", field="body")
    try:
        asked = msgspec.json.decode(line.body, type=_Asked)
    except msgspec.DecodeError:
        return line  # the handler says what is wrong, better
    for field in _Asked.__struct_fields__:
        if getattr(asked, field):
            raise RequestError(f"body.{field} must not be true in a batch file", field=f"body.{field}")
    return line


def custom_id_of(data: bytes) -> str | None:
    """The custom_id of a line that may be wrong in other ways, or None."""
    try:
        return msgspec.json.decode(data, type=_Named).custom_id
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
