"""Errors as gRPC status codes, with the field and the code in trailing metadata."""

from __future__ import annotations

from typing import NoReturn

import grpc

from octavo.server.errors import ApiError

CODES = {
    400: grpc.StatusCode.INVALID_ARGUMENT,
    401: grpc.StatusCode.UNAUTHENTICATED,
    403: grpc.StatusCode.PERMISSION_DENIED,
    404: grpc.StatusCode.NOT_FOUND,
    413: grpc.StatusCode.RESOURCE_EXHAUSTED,
    429: grpc.StatusCode.RESOURCE_EXHAUSTED,
    503: grpc.StatusCode.UNAVAILABLE,
}
"""HTTP status -> code; what is not here is INTERNAL."""


def status_code(error: ApiError) -> grpc.StatusCode:
    """The code of an error. A full queue is a matter of resources, although HTTP calls it 503."""
    if error.body.error.code == "queue_full":
        return grpc.StatusCode.RESOURCE_EXHAUSTED
    return CODES.get(error.status, grpc.StatusCode.INTERNAL)


async def abort(context: grpc.aio.ServicerContext, told: ApiError) -> NoReturn:
    """End the call with the error, told as HTTP clients are told."""
    fields = told.body.error
    named = {"octavo-field": fields.param, "octavo-code": fields.code, "retry-after": told.headers.get("retry-after")}
    # Metadata are ASCII, and a field may hold a key that the client chose.
    metadata = [(name, ascii(value)[1:-1]) for name, value in named.items() if value]
    await context.abort(status_code(told), fields.message, tuple(metadata))
    raise AssertionError("abort does not return")
