"""The listener of --grpc-port: binds before the model is loaded, serves beside HTTP, ends with it."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable

import grpc
from grpc_health.v1 import health_pb2_grpc

from octavo.errors import ConfigError
from octavo.server.errors import unauthorized
from octavo.server.grpc.servicer import HealthServicer, OctavoServicer
from octavo.server.grpc.status import abort
from octavo.server.grpc.v1 import octavo_pb2_grpc
from octavo.server.middleware import KeyRing
from octavo.server.options import ServerOptions
from octavo.server.service import Service

log = logging.getLogger("octavo.server")

OPEN_SERVICE = "/grpc.health.v1.Health/"


class KeyInterceptor(grpc.aio.ServerInterceptor):  # type: ignore[misc]
    """Asks for a key in the metadata of every call but health checks, as the HTTP door does."""

    def __init__(self, keys: KeyRing) -> None:
        self._keys = keys

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler]],
        details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler:
        if details.method.startswith(OPEN_SERVICE):
            return await continuation(details)
        given = {name: as_bytes(value) for name, value in details.invocation_metadata or ()}
        if self._keys.owner(given.get("authorization", b""), given.get("x-api-key", b"")) is not None:
            return await continuation(details)

        async def refuse(request: object, context: grpc.aio.ServicerContext) -> None:
            await abort(context, unauthorized())

        return grpc.unary_unary_rpc_method_handler(refuse)


def as_bytes(value: str | bytes) -> bytes:
    """A metadata value, which is bytes under names that end in "-bin" and text elsewhere."""
    return value if isinstance(value, bytes) else value.encode()


class GrpcListener:
    """A bound gRPC server. `start` serves a service, `stop` ends it; `address` is where it listens."""

    def __init__(self, options: ServerOptions) -> None:
        """Bind. Needs a running event loop. Raises ConfigError naming the flags."""
        assert options.grpc_port is not None
        interceptors = [KeyInterceptor(KeyRing(options.api_keys))] if options.api_keys else []
        self._server = grpc.aio.server(
            interceptors=interceptors,
            options=[
                ("grpc.max_receive_message_length", options.max_body_bytes),
                ("grpc.max_send_message_length", -1),
                ("grpc.so_reuseport", 0),  # a taken port is an error, not half of the calls
            ],
        )
        host = f"[{options.host}]" if ":" in options.host else options.host
        try:
            port = self._server.add_insecure_port(f"{host}:{options.grpc_port}")
        except RuntimeError as error:
            raise ConfigError(
                f"cannot listen on {host}:{options.grpc_port} ({error}); choose another --host or --grpc-port"
            ) from None
        self.address = f"{host}:{port}"

    async def start(self, service: Service) -> None:
        """Take calls."""
        add_octavo = octavo_pb2_grpc.add_OctavoServicer_to_server
        add_octavo(OctavoServicer(service), self._server)  # type: ignore[no-untyped-call]
        health_pb2_grpc.add_HealthServicer_to_server(HealthServicer(service), self._server)
        await self._server.start()
        log.info("gRPC at %s", self.address)

    async def stop(self, grace: float) -> None:
        """Refuse new calls; those that run get `grace` seconds."""
        await self._server.stop(grace)
