"""The listener of --grpc-port: binds before the model is loaded, serves beside HTTP, ends with it."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from pathlib import Path

import grpc
from grpc_health.v1 import health_pb2_grpc

from octavo.errors import ConfigError
from octavo.server.access import KeyRing
from octavo.server.certificates import ssl_context
from octavo.server.errors import unauthorized
from octavo.server.grpc.calls import as_bytes, find_key
from octavo.server.grpc.servicer import HealthServicer, OctavoServicer
from octavo.server.grpc.status import abort
from octavo.server.grpc.v1 import octavo_pb2_grpc
from octavo.server.options import ServerOptions
from octavo.server.service import Service

log = logging.getLogger("octavo.server")

OPEN_SERVICE = "/grpc.health.v1.Health/"


class KeyInterceptor(grpc.aio.ServerInterceptor):  # type: ignore[misc]
    """Asks for a key in the metadata of every call but health checks, as the HTTP door does."""

    keys: KeyRing | None = None
    """Set when there is a service; no call comes before."""

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler]],
        details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler:
        if details.method.startswith(OPEN_SERVICE) or not self.keys:
            return await continuation(details)
        if find_key(self.keys, as_bytes(details.invocation_metadata)) is not None:
            return await continuation(details)

        async def refuse(request: object, context: grpc.aio.ServicerContext) -> None:
            await abort(context, unauthorized())

        return grpc.unary_unary_rpc_method_handler(refuse)


class Certificates:
    """TLS with the files that HTTPS has. Connections made after `reload` are shown what it has read."""

    def __init__(self, options: ServerOptions) -> None:
        """Raises ConfigError for files that cannot be used, and for a key that only a password opens."""
        if options.ssl_keyfile_password is not None:
            raise ConfigError("--grpc-port takes no --ssl-keyfile-password: give it a key that is not encrypted")
        self._options = options
        self.reload()

    def reload(self) -> None:
        """Read the files again. Raises ConfigError, and then keeps what it had."""
        options = self._options
        assert options.ssl_certfile is not None
        ssl_context(options)  # of which gRPC would say nothing until a handshake fails
        certificate = Path(options.ssl_certfile).read_bytes()
        key = Path(options.ssl_keyfile or options.ssl_certfile).read_bytes()
        authorities = Path(options.ssl_ca_certs).read_bytes() if options.ssl_ca_certs is not None else None
        self._configuration = grpc.ssl_server_certificate_configuration([(key, certificate)], authorities)

    def credentials(self) -> grpc.ServerCredentials:
        """For a port; asks before every handshake which certificate to show."""
        return grpc.dynamic_ssl_server_credentials(
            self._configuration,
            lambda: self._configuration,
            require_client_authentication=self._options.ssl_cert_reqs == "required",
        )


class GrpcListener:
    """A bound gRPC server. `start` serves a service, `stop` ends it; `address` is where it listens."""

    def __init__(self, options: ServerOptions) -> None:
        """Bind. Needs a running event loop. Raises ConfigError naming the flags."""
        assert options.grpc_port is not None
        self._certificates = Certificates(options) if options.ssl_certfile is not None else None
        self._door = KeyInterceptor()
        self._server = grpc.aio.server(
            interceptors=[self._door],
            options=[
                ("grpc.max_receive_message_length", options.max_body_bytes),
                ("grpc.max_send_message_length", -1),
                ("grpc.so_reuseport", 0),  # a taken port is an error, not half of the calls
            ],
        )
        host = f"[{options.host}]" if ":" in options.host else options.host
        try:
            if self._certificates is None:
                port = self._server.add_insecure_port(f"{host}:{options.grpc_port}")
            else:
                port = self._server.add_secure_port(f"{host}:{options.grpc_port}", self._certificates.credentials())
        except RuntimeError as error:
            raise ConfigError(
                f"cannot listen on {host}:{options.grpc_port} ({error}); choose another --host or --grpc-port"
            ) from None
        self.address = f"{host}:{port}"

    async def start(self, service: Service) -> None:
        """Take calls."""
        self._door.keys = service.keys
        if self._certificates is not None:
            service.reloads.append(self._certificates.reload)
        add_octavo = octavo_pb2_grpc.add_OctavoServicer_to_server
        add_octavo(OctavoServicer(service), self._server)  # type: ignore[no-untyped-call]
        health_pb2_grpc.add_HealthServicer_to_server(HealthServicer(service), self._server)
        await self._server.start()
        service.grpc_address = self.address
        log.info("gRPC at %s", self.address)

    async def stop(self, grace: float) -> None:
        """Refuse new calls; those that run get `grace` seconds."""
        await self._server.stop(grace)
