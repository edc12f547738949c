"""A gRPC call as an exchange: its key with the limits, its log line, its trace, as a request has over HTTP."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import grpc

from octavo import logs
from octavo.server.access import Key, KeyRing
from octavo.server.exchange import Exchange, current
from octavo.server.middleware import TRACE_HEADERS
from octavo.server.service import Service

Metadata = Iterable[tuple[str, str | bytes]] | None
SUCCEEDED = 200


@contextmanager
def open_exchange(
    service: Service, context: grpc.aio.ServicerContext, *, method: str, request_id: str
) -> Iterator[Exchange]:
    """The exchange of a call, current in the call's task, which ends with the call."""
    sent = as_bytes(context.invocation_metadata())
    exchange = Exchange(
        request_id=request_id,
        method="gRPC",
        path=method,
        key=find_key(service.keys, sent) if service.keys else None,
        trace={name: sent.get(name, b"").decode("latin-1") for name in TRACE_HEADERS},
    )
    current.set(exchange)
    logs.request_id.set(request_id)
    try:
        yield exchange
        exchange.status = exchange.status or SUCCEEDED
    finally:
        exchange.leave()
        for observe in service.observers:
            observe(exchange)


def find_key(keys: KeyRing, sent: dict[str, bytes]) -> Key | None:
    """The key in the metadata of a call, or None."""
    return keys.find_sent(sent.get("authorization", b""), sent.get("x-api-key", b""))


def as_bytes(metadata: Metadata) -> dict[str, bytes]:
    """Metadata by name. Values are bytes under names that end in "-bin" and text elsewhere."""
    return {name: value if isinstance(value, bytes) else value.encode() for name, value in metadata or ()}
