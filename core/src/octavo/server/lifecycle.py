"""Start the engine, serve HTTP, drain, restart: the life of one server process.

bind ─> start engine ─> listen ──────────────> SIGTERM ─> refuse new ─> running ones finish ─> exit 0
                          │  engine dies                   (after --shutdown-timeout: abort)
                          └─> requests fail, /health 503 ─> exit 1, or with --restart-engine a new engine
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import time
from collections import deque
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

import uvicorn

from octavo.config import EngineConfig, dotted_fields
from octavo.engine.client import EngineClient
from octavo.engine.process import Build, start_engine
from octavo.engine.process_transport import ProcessTransport
from octavo.errors import ConfigError, OctavoError
from octavo.server.api_processes import Helpers, Peers
from octavo.server.app import create_app
from octavo.server.certificates import load_certificates, ssl_context
from octavo.server.formats import check_names
from octavo.server.options import ServerOptions
from octavo.server.service import Service, open_keys, open_store
from octavo.server.tracing import open_tracer, trace_exchanges

if TYPE_CHECKING:
    from octavo.server.grpc.listener import GrpcListener

log = logging.getLogger("octavo.server")

WATCH_S = 0.2
MAX_DEATHS, DEATH_WINDOW_S = 3, 600.0
"""An engine that dies this often within the window is not restarted again: something is wrong with it."""
MAX_SOCKET_PATH = 100
EXIT_TERMINATED = 128 + signal.SIGTERM
KEEP_ALIVE_S = 75
"""How long an idle connection stays open: longer than clients and proxies commonly keep theirs, since a request that
meets the closing of its connection fails at the client."""
FLUSH_S = 5.0
"""What responses get to be written out after the last request has ended."""

OnReady = Callable[[Service, str], None]
"""Called once with the service and its URL when it accepts connections."""


async def serve(
    config: EngineConfig, options: ServerOptions, *, on_ready: OnReady | None = None, build: Build | None = None
) -> int:
    """Serve until a signal or the engine's end.

    Returns the exit code: 0 after a signal, 1 after a dead engine, 143 if SIGTERM came before it served.
    build: what makes the engine inside its process (None: `octavo.launch.build_engine`).
    Raises ConfigError if the address, a file of keys or certificates, or the response store cannot be used, and what
    `start_engine` raises.
    """
    if options.otlp_traces_endpoint is not None:
        open_tracer(options.otlp_traces_endpoint).shutdown()
    # A wrong file is found now, not when the model has been loaded.
    open_keys(options)
    if options.ssl_certfile is not None:
        ssl_context(options)
    check_names(options)
    # Bound before the model is loaded: a port in use is found in milliseconds, not after minutes.
    sockets = None
    if options.uds is None:
        sockets = [bind(options.host, options.port)]
    else:
        check_socket_path(Path(options.uds))
    client = grpc = store = None
    try:
        store = open_store(options)
        grpc = open_grpc(options)
        client = await start_client(config, build, num_clients=options.api_server_count)
    finally:
        if client is None:
            for bound in sockets or ():
                bound.close()
            if grpc is not None:
                await grpc.stop(0)
            if store is not None:
                store.close()
    if client is None:
        return EXIT_TERMINATED
    service = Service(client, options, store=store)
    if grpc is not None:
        await grpc.start(service)
    set_up_service(service, config)
    server = HttpServer(service, on_ready=on_ready)
    watch = asyncio.create_task(watch_engine(service, server, config, build))
    try:
        if options.api_server_count > 1:
            assert sockets is not None, "checked by ServerOptions"
            await server.take_helpers(Helpers(config, options, sockets))
        await server.serve(sockets=sockets)
    finally:
        watch.cancel()
        await asyncio.gather(watch, return_exceptions=True)
        if grpc is not None:
            await grpc.stop(FLUSH_S)
        await service.client.shutdown()
        if service.peers is not None:
            await service.peers.close()
        await service.close()
    return 1 if server.engine_lost else 0


def set_up_service(service: Service, config: EngineConfig) -> None:
    """Let a service know the engine's configuration, and send its traces. Raises ConfigError."""
    endpoint = service.options.otlp_traces_endpoint
    if endpoint is not None:
        provider = open_tracer(endpoint)
        service.observers.append(trace_exchanges(provider))
        service.on_close.append(provider.shutdown)
    service.config = dotted_fields(config)
    if config.model.chat_template is not None:
        service.reloads.append(partial(reload_template, service, config.model.chat_template))


async def start_client(config: EngineConfig, build: Build | None, *, num_clients: int) -> EngineClient | None:
    """A client of a new engine; None if SIGTERM came before that was ready, and nothing is left of it."""
    loop = asyncio.get_running_loop()
    starting = asyncio.create_task(start_engine(config, build=build, num_clients=num_clients))
    loop.add_signal_handler(signal.SIGTERM, starting.cancel)
    try:
        return await EngineClient.connect(await starting)
    except asyncio.CancelledError:
        task = asyncio.current_task()
        if task is not None and task.cancelling():  # Ctrl-C: whoever runs the loop deals with it
            raise
        log.info("stopped before the engine was ready")
        return None
    finally:
        loop.remove_signal_handler(signal.SIGTERM)


class HttpServer(uvicorn.Server):
    """uvicorn with our way to end: the engine drains while connections finish, and the process exits with 0."""

    def __init__(self, service: Service, *, on_ready: OnReady | None = None) -> None:
        options = service.options
        config = uvicorn.Config(
            create_app(service),
            host=options.host,
            port=options.port,
            uds=options.uds,
            root_path=options.root_path,
            log_config=None,
            access_log=False,  # our own says more
            lifespan="off",
            server_header=False,
            timeout_keep_alive=KEEP_ALIVE_S,
            timeout_graceful_shutdown=int(options.shutdown_timeout + FLUSH_S) + 1,
        )
        super().__init__(config)
        if options.ssl_certfile is not None:
            config.load()
            config.ssl = context = ssl_context(options)
            service.reloads.append(partial(load_certificates, context, options))
        self.service = service
        self.engine_lost = False
        self._on_ready = on_ready
        self._hurry = asyncio.Event()
        self._helpers: Helpers | None = None

    async def take_helpers(self, helpers: Helpers) -> None:
        """Start further API processes, which then do what this one does. Raises EngineError if one cannot start."""
        transport = self.service.client.transport
        assert isinstance(transport, ProcessTransport), "only an engine in a process of its own serves several clients"
        transport.before_close = helpers.end
        self._helpers = helpers
        count = self.service.options.api_server_count
        self.service.peers = Peers(transport.folder, 0, count, self.service.snapshot)
        for bound in helpers.sockets:
            bound.listen(self.config.backlog)
        await helpers.start(transport.folder, self.service.info, on_loss=self.end_for)

    def end_for(self, reason: str) -> None:
        """A helper has ended by itself: its requests are lost, and a part of the port's connections."""
        if not self.should_exit:
            log.error("%s: exiting", reason)
            self.engine_lost = True
            self.should_exit = True

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets=sockets)
        if self.started and self._on_ready is not None:
            self._on_ready(self.service, url(self.service.options, sockets))

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self.service.draining = True
        self.tell_helpers("drain")
        drain = asyncio.create_task(self.drain())
        await super().shutdown(sockets=sockets)
        await drain

    async def drain(self) -> None:
        """Let running requests finish within the timeout; a hurry (Ctrl-C, a second signal) aborts them at once."""
        client = self.service.client
        patient = asyncio.create_task(client.shutdown(drain=True, timeout=self.service.options.shutdown_timeout))
        hurry = asyncio.create_task(self._hurry.wait())
        await asyncio.wait((patient, hurry), return_when=asyncio.FIRST_COMPLETED)
        hurry.cancel()
        if not patient.done():
            await client.shutdown()
        await patient

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Handle signals ourselves: uvicorn would raise them again at the end, and so end the process with -15."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self.handle_exit, number, None)
        loop.add_signal_handler(signal.SIGHUP, self.reload)
        try:
            yield
        finally:
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
                loop.remove_signal_handler(number)

    def reload(self) -> None:
        """What SIGHUP asks for."""
        try:
            self.tell_helpers("reload")
            self.service.reload()
        except ConfigError as error:
            log.error("not all could be read again: %s", error)
        else:
            log.info("keys, certificates and chat template were read again")

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if self.should_exit or sig == signal.SIGINT:
            self.hurry()
        else:
            log.info("shutting down: running requests have %g s to finish", self.service.options.shutdown_timeout)
        self.should_exit = True

    def hurry(self) -> None:
        """End now: what still runs is aborted."""
        self.should_exit = True
        self._hurry.set()
        self.tell_helpers("hurry")

    def tell_helpers(self, word: str) -> None:
        if self._helpers is not None:
            self._helpers.tell(word)


async def watch_engine(service: Service, server: HttpServer, config: EngineConfig, build: Build | None) -> None:
    """When the engine dies, restart it if that was asked for and helps, else end the server."""
    deaths: deque[float] = deque(maxlen=MAX_DEATHS)
    while True:
        while service.client.is_alive:
            await asyncio.sleep(WATCH_S)
        if service.draining:
            return
        deaths.append(time.monotonic())
        hopeless = len(deaths) == MAX_DEATHS and deaths[-1] - deaths[0] < DEATH_WINDOW_S
        if not service.options.restart_engine or hopeless:
            log.error("the engine is dead (%s): exiting%s", service.client.error, " after many restarts" * hopeless)
            break
        log.warning("the engine is dead (%s): starting a new one", service.client.error)
        await service.client.shutdown()
        try:
            service.client = await EngineClient.connect(await start_engine(config, build=build))
        except OctavoError as error:
            log.error("the engine cannot be restarted: %s", error)
            break
        log.info("the engine is back")
    server.tell_helpers(f"the engine is dead ({service.client.error})")
    server.engine_lost = True
    server.should_exit = True


def open_grpc(options: ServerOptions) -> GrpcListener | None:
    """A bound listener for --grpc-port, if that was asked for. Raises ConfigError without the extra, or if the
    address cannot be used."""
    if options.grpc_port is None:
        return None
    try:
        from octavo.server.grpc.listener import GrpcListener
    except ModuleNotFoundError as error:
        raise ConfigError(f"--grpc-port needs the package {error.name}: pip install 'octavo[grpc]'") from None
    return GrpcListener(options)


def reload_template(service: Service, chat_template: str) -> None:
    """Read the template of --chat-template again. Raises ConfigError."""
    if service.client.tokenizer is not None:
        service.client.tokenizer.use_template(chat_template)


def bind(host: str, port: int) -> socket.socket:
    """A bound TCP socket (not listening yet). Raises ConfigError naming the flags."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        bound = socket.socket(family, kind, protocol)
        try:
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            bound.bind(address)
        except BaseException:
            bound.close()
            raise
    except (OSError, OverflowError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise ConfigError(f"cannot listen on {host}:{port} ({reason}); choose another --host or --port") from None
    return bound


def check_socket_path(path: Path) -> None:
    """Raise ConfigError where no socket can be made. One that a dead server left behind is replaced later."""
    if path.exists() and not path.is_socket():
        raise ConfigError(f"--uds {path}: there is a file of that name that is no socket")
    if not os.access(path.parent, os.W_OK | os.X_OK):
        raise ConfigError(f"--uds {path}: the folder is missing or cannot be written")
    if len(os.fsencode(path)) > MAX_SOCKET_PATH:
        raise ConfigError(f"--uds {path}: the path is longer than the {MAX_SOCKET_PATH} bytes that sockets may have")


def url(options: ServerOptions, sockets: list[socket.socket] | None) -> str:
    """Where the server is reached; port 0 has become a real one."""
    if not sockets:
        return f"unix:{options.uds}"
    scheme = "http" if options.ssl_certfile is None else "https"
    host = {"0.0.0.0": "127.0.0.1", "::": "::1", "": "127.0.0.1"}.get(options.host, options.host)
    port = sockets[0].getsockname()[1]
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"
