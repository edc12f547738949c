"""GET /v1/models and /v1/models/{id}."""

from __future__ import annotations

from typing import Any

from octavo.server.endpoint import Call, Reply
from octavo.server.service import Service


async def list_models(service: Service, call: Call) -> Reply:
    """All names under which the model is served."""
    return {"object": "list", "data": [describe(service, name) for name in service.info.served_names]}


async def get_model(service: Service, call: Call) -> Reply:
    """One of them. Raises ApiError (404) for another name."""
    return describe(service, service.model_name(call.path["id"]))


def describe(service: Service, name: str) -> dict[str, Any]:
    return {
        "id": name,
        "object": "model",
        "created": service.started,
        "owned_by": "octavo",
        "root": service.info.model,
        "parent": None,
        "max_model_len": service.info.max_model_len,
    }
