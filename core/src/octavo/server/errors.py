"""Every error a client of the server can get, in the shape of the API that it called:

    {"error": {"message": ..., "type": ..., "param": ..., "code": ...}}                   OpenAI's, everywhere but on
    {"type": "error", "error": {"type": ..., "message": ...}, "request_id": ...}          paths of ANTHROPIC_PATH

`type` says whose fault it is, `param` names the field, `code` is stable and made for programs.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping

import msgspec

from octavo.errors import EngineAsleepError, EngineDeadError, EngineError, RequestError, RequestTooLargeError

log = logging.getLogger("octavo.server")

RETRY_AFTER = {"retry-after": "1"}
ANTHROPIC_PATH = "/v1/messages"
ANTHROPIC_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    529: "overloaded_error",
}
"""Status -> Anthropic's `type`. Other statuses below 500 are an "invalid_request_error", the rest an "api_error"."""


class ErrorFields(msgspec.Struct, frozen=True):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(msgspec.Struct, frozen=True):
    error: ErrorFields


class AnthropicErrorFields(msgspec.Struct, frozen=True):
    type: str
    message: str


class AnthropicErrorBody(msgspec.Struct, frozen=True, tag_field="type", tag="error"):
    """A body, and an event of a stream too."""

    error: AnthropicErrorFields
    request_id: str | None


class ApiError(Exception):
    """An answer other than 2xx. `headers` are added to the response."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        kind: str = "invalid_request_error",
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.headers = dict(headers or {})
        self.body = ErrorBody(ErrorFields(message, kind, param, code))

    def body_for(self, path: str, request_id: str | None) -> ErrorBody | AnthropicErrorBody:
        """The body in the shape of the API that `path` belongs to."""
        if path != ANTHROPIC_PATH and not path.startswith(ANTHROPIC_PATH + "/"):
            return self.body
        kind = ANTHROPIC_TYPES.get(self.status, "invalid_request_error" if self.status < 500 else "api_error")
        message, field = self.body.error.message, self.body.error.param
        if field and field not in message:  # there is no other place for it
            message = f"{field}: {message}"
        return AnthropicErrorBody(AnthropicErrorFields(kind, message), request_id)


def unknown_model(name: str, served: tuple[str, ...]) -> ApiError:
    message = f"the model {name!r} does not exist; this server has: {', '.join(served)}"
    return ApiError(404, message, param="model", code="model_not_found")


def unauthorized() -> ApiError:
    message = "send a valid key as `Authorization: Bearer KEY` or `x-api-key: KEY`"
    headers = {"www-authenticate": "Bearer"}
    return ApiError(401, message, kind="authentication_error", code="invalid_api_key", headers=headers)


def body_too_large(limit: int) -> ApiError:
    # The rest of the body is not read, so the connection cannot be used again.
    message = f"the request body is larger than {limit} bytes (--max-body-bytes)"
    return ApiError(413, message, code="body_too_large", headers={"connection": "close"})


def queue_full(limit: int, *, status: int = 503) -> ApiError:
    message = f"{limit} requests are waiting already (--max-queue); try again later"
    kind = "rate_limit_error" if status == 429 else "server_error"
    return ApiError(status, message, kind=kind, code="queue_full", headers=RETRY_AFTER)


def over_limit(message: str, *, seconds: int) -> ApiError:
    headers = {"retry-after": str(max(seconds, 1))}
    return ApiError(429, message, kind="rate_limit_error", code="rate_limit_exceeded", headers=headers)


def model_not_allowed(name: str) -> ApiError:
    message = f"this key may not use the model {name!r}"
    return ApiError(403, message, kind="permission_error", param="model", code="model_not_allowed")


def priority_not_allowed(asked: int, most: int) -> ApiError:
    message = f"the most urgent priority of this key is {most}, and the request asks for {asked}"
    return ApiError(403, message, kind="permission_error", param="priority", code="priority_not_allowed")


def admin_only() -> ApiError:
    message = "this route takes an admin's key: one of --api-key, or of the keys file with `admin: true`"
    return ApiError(403, message, kind="permission_error", code="admin_only")


def not_ready(reason: str) -> ApiError:
    return ApiError(503, reason, kind="server_error", code="not_ready")


def shutting_down() -> ApiError:
    headers = {**RETRY_AFTER, "connection": "close"}
    return ApiError(503, "the server is shutting down", kind="server_error", code="shutting_down", headers=headers)


def aborted() -> ApiError:
    """For answers in protocols that have no finish reason for it."""
    message = "the answer was aborted before it was complete"
    return ApiError(503, message, kind="server_error", code="aborted", headers=RETRY_AFTER)


def store_failed(reason: str) -> ApiError:
    message = f"the response store failed ({reason}); requests with store=false do not need it"
    return ApiError(500, message, kind="server_error", code="response_store_failed")


def unsupported(field: str, hint: str = "") -> RequestError:
    """The request asks for something that this server does not do (yet)."""
    return RequestError(f"{field} is not supported yet{': ' + hint if hint else ''}", field=field)


def as_api_error(error: Exception) -> ApiError:
    """What the client is told about `error`. An unforeseen one is logged and told without its details."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, RequestTooLargeError):
        return ApiError(400, str(error), param=error.field or None, code="context_length_exceeded")
    if isinstance(error, RequestError):
        return ApiError(400, str(error), param=error.field or None)
    if isinstance(error, EngineDeadError):
        return ApiError(503, str(error), kind="server_error", code="engine_dead", headers=RETRY_AFTER)
    if isinstance(error, EngineAsleepError):
        return ApiError(503, str(error), kind="server_error", code="asleep", headers=RETRY_AFTER)
    if isinstance(error, EngineError):
        return ApiError(500, str(error), kind="server_error", code="engine_error")
    if isinstance(error, RecursionError):  # the decoder takes JSON that is almost too deep for what comes behind it
        log.warning("a request was refused: it is nested too deeply (%s)", error)
        return ApiError(400, "the request is nested too deeply")
    log.error("a request failed unexpectedly", exc_info=error)
    return ApiError(500, "internal error; the server's log has the details", kind="server_error", code="internal")
