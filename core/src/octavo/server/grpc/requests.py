"""gRPC requests in the words of the HTTP API, so that both are checked by the same code."""

from __future__ import annotations

from typing import Any

from octavo.errors import RequestError
from octavo.server.grpc.v1 import octavo_pb2 as pb
from octavo.server.openai.protocol import CompletionBody


def completion_body(request: pb.GenerateRequest) -> CompletionBody:
    """The same request as the body of a completion. Raises RequestError without a prompt."""
    kind = request.WhichOneof("prompt")
    if kind is None:
        raise RequestError("prompt is required: text or token_ids", field="prompt")
    body = CompletionBody(
        prompt=request.text if kind == "text" else list(request.token_ids.ids),
        model=request.model or None,
        request_id=request.request_id or None,
        priority=request.priority,
        cache_salt=request.cache_salt or None,
        add_special_tokens=request.add_special_tokens if request.HasField("add_special_tokens") else None,
    )
    # ListFields has what was set, also where it was set to its default.
    for field, value in request.sampling.ListFields():
        setattr(body, field.name, plain(field.name, value))
    return body


def plain(name: str, value: Any) -> Any:
    """A field of SamplingParams as JSON would hold it."""
    if name == "logit_bias":
        return {str(token): bias for token, bias in value.items()}
    if name == "structured_outputs":
        constraint = value.WhichOneof("constraint")
        if constraint is None:
            raise RequestError("structured_outputs must name a constraint", field="structured_outputs")
        given = getattr(value, constraint)
        return {constraint: list(given.texts) if constraint == "choice" else given}
    return value if isinstance(value, int | float | str) else list(value)
