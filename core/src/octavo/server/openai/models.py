"""GET /v1/models and /v1/models/{id}."""

from __future__ import annotations

import msgspec

from octavo.server.endpoint import Call
from octavo.server.service import Service


class Model(msgspec.Struct, kw_only=True):
    """A name under which the model is served. root: the model itself; max_model_len: its context, in tokens."""

    id: str
    object: str = "model"
    created: int
    owned_by: str = "octavo"
    root: str
    parent: str | None = None
    max_model_len: int


class ModelList(msgspec.Struct, kw_only=True):
    object: str = "list"
    data: list[Model]


async def list_models(service: Service, call: Call[None]) -> ModelList:
    """All names under which the model is served."""
    return ModelList(data=[describe(service, name) for name in service.info.served_names])


async def get_model(service: Service, call: Call[None]) -> Model:
    """One of them. Raises ApiError (404) for another name."""
    return describe(service, service.model_name(call.path["id"]))


def describe(service: Service, name: str) -> Model:
    """What is known of a served name."""
    info = service.info
    return Model(id=name, created=service.started, root=info.model, max_model_len=info.max_model_len)
