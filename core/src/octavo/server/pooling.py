"""Routes of models that pool (embeddings, scores, classes). No model that is served here does, so they answer 400:
nothing is wrong with the server, and a retry never helps."""

from __future__ import annotations

from octavo.server.endpoint import Call, Raw
from octavo.server.errors import ApiError
from octavo.server.service import Service

PATHS = (
    "/v1/embeddings",
    "/v2/embed",
    "/rerank",
    "/v1/rerank",
    "/v2/rerank",
    "/score",
    "/v1/score",
    "/classify",
    "/pooling",
)


async def refuse(service: Service, call: Call[None]) -> Raw:
    """Say that the served model generates text and does not pool. Raises ApiError (400)."""
    message = f"{service.info.model} generates text; embeddings, scores and classes need a model that pools"
    raise ApiError(400, message, param="model", code="not_supported")
