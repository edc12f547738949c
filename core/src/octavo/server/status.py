"""Routes for operators and load balancers: health, version, metrics."""

from __future__ import annotations

import msgspec

from octavo import __version__
from octavo.server.endpoint import Call, Raw
from octavo.server.errors import not_ready
from octavo.server.service import Service


class Healthy(msgspec.Struct):
    """An empty object."""


class Load(msgspec.Struct):
    """server_load: requests that all API processes serve."""

    server_load: int


class Version(msgspec.Struct):
    version: str


async def health(service: Service, call: Call[None]) -> Healthy:
    """Whether requests are served. Raises ApiError (503) while shutting down or without an engine."""
    if not service.is_ready:
        raise not_ready("shutting down" if service.draining else "the engine is not running")
    return Healthy()


async def load(service: Service, call: Call[None]) -> Load:
    """How many requests are being served, for load balancers."""
    return Load(sum(snapshot.num_live for snapshot in await service.snapshots()))


async def version(service: Service, call: Call[None]) -> Version:
    """The version of Octavo."""
    return Version(__version__)


async def metrics(service: Service, call: Call[None]) -> Raw:
    """Prometheus text format."""
    return Raw(await service.metrics_text(), "text/plain; version=0.0.4; charset=utf-8")
