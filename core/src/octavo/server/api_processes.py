"""Further API processes (--api-server-count): all accept on one listening socket and share one engine.

                 ┌── main: starts all, is client 0, hears signals ──┐
   listening ────┤                                                  ├──> engine (inbox), and back (outbox-i)
     socket      └── helper i: client i of the engine ──────────────┘
                      ^ pipe: drain, hurry, reload, lost

Helpers ignore signals: main tells them. A helper that ends by itself takes the server with it, as its requests are lost
and nobody else would notice. Metrics: each process answers the others' questions on a socket in the engine's folder.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import multiprocessing
import socket
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess
from pathlib import Path

import msgspec
import zmq
import zmq.asyncio

from octavo.config import EngineConfig
from octavo.engine.child import settle
from octavo.engine.client import EngineClient
from octavo.engine.info import ModelInfo
from octavo.engine.process_transport import SocketTransport, address
from octavo.errors import EngineError
from octavo.metrics_merge import Snapshot
from octavo.server.options import ServerOptions
from octavo.server.service import Service

log = logging.getLogger("octavo.server")

ANSWER_MS = 2000
"""What a process gets to tell another one its metrics."""
KILL_AFTER_S = 10.0
"""Beyond --shutdown-timeout: a helper that has not ended by then is killed."""


class Peers:
    """The API processes as one of them sees them: it tells its metrics to the others and asks for theirs."""

    def __init__(self, folder: Path, index: int, count: int, snapshot: Callable[[], Snapshot]) -> None:
        self._folder, self._index, self._count, self._snapshot = folder, index, count, snapshot
        self._context = zmq.asyncio.Context()
        self._socket = self._context.socket(zmq.REP)
        self._socket.bind(address(folder, f"metrics-{index}"))
        self._task = asyncio.create_task(self._answer())

    async def snapshots(self) -> list[Snapshot]:
        """Everybody's metrics. Raises EngineError if a process does not answer: a sum without it would be wrong."""
        others = [self._ask(index) for index in range(self._count) if index != self._index]
        return [self._snapshot(), *await asyncio.gather(*others)]

    async def _ask(self, index: int) -> Snapshot:
        with self._context.socket(zmq.REQ) as question:
            question.setsockopt(zmq.LINGER, 0)
            question.connect(address(self._folder, f"metrics-{index}"))
            await question.send(b"")
            if not await question.poll(ANSWER_MS):
                raise EngineError(f"API process {index} does not tell its metrics")
            return msgspec.msgpack.decode(await question.recv(), type=Snapshot)

    async def _answer(self) -> None:
        while True:
            await self._socket.recv()
            await self._socket.send(msgspec.msgpack.encode(self._snapshot()))

    async def close(self) -> None:
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        self._context.destroy(linger=0)


class Helpers:
    """The further processes, as main sees them."""

    def __init__(self, config: EngineConfig, options: ServerOptions, sockets: list[socket.socket]) -> None:
        self.sockets = sockets
        self._config, self._options = config, options
        self._running: dict[SpawnProcess, Connection] = {}
        self._ending = False
        self._on_loss: Callable[[str], None] = log.error

    async def start(self, folder: Path, info: ModelInfo, *, on_loss: Callable[[str], None]) -> None:
        """Start all and wait until they serve. Raises EngineError if one cannot. on_loss: told which one has ended by
        itself later, and how."""
        self._on_loss = on_loss
        context = multiprocessing.get_context("spawn")
        level = logging.getLogger("octavo").getEffectiveLevel()
        for index in range(1, self._options.api_server_count):
            ours, theirs = context.Pipe()
            arguments = (index, self._config, self._options, self.sockets, folder, info, theirs, level)
            process = context.Process(target=help_serve, args=arguments, name=f"octavo-api-{index}", daemon=True)
            process.start()
            theirs.close()
            self._running[process] = ours
        for process, pipe in self._running.items():
            if not await asyncio.to_thread(heard_ready, pipe):
                await asyncio.to_thread(process.join)
                raise EngineError(f"{process.name} could not start (exit code {process.exitcode}); its log says why")
        for process in self._running:
            asyncio.get_running_loop().add_reader(process.sentinel, self._on_exit, process)

    def tell(self, word: str) -> None:
        for pipe in self._running.values():
            with contextlib.suppress(OSError):  # it has ended, which is told apart
                pipe.send(word)

    async def end(self) -> None:
        """Wait until all have drained and ended."""
        self._ending = True
        self.tell("drain")
        deadline = asyncio.get_running_loop().time() + self._options.shutdown_timeout + KILL_AFTER_S
        for process, pipe in self._running.items():
            asyncio.get_running_loop().remove_reader(process.sentinel)
            await asyncio.to_thread(process.join, max(deadline - asyncio.get_running_loop().time(), 0.0))
            if process.exitcode is None:
                log.warning("%s did not end in time and is killed", process.name)
                process.kill()
                await asyncio.to_thread(process.join)
            pipe.close()
        self._running.clear()

    def _on_exit(self, process: SpawnProcess) -> None:
        asyncio.get_running_loop().remove_reader(process.sentinel)
        process.join()
        if not self._ending:
            self._on_loss(f"the API process {process.name} has ended by itself (exit code {process.exitcode})")


def heard_ready(pipe: Connection) -> bool:
    """Whether the other end said that it serves; False if it ended instead."""
    try:
        return bool(pipe.recv() == "ready")
    except (EOFError, OSError):
        return False


def help_serve(
    index: int,
    config: EngineConfig,
    options: ServerOptions,
    sockets: list[socket.socket],
    folder: Path,
    info: ModelInfo,
    pipe: Connection,
    log_level: int,
) -> None:
    """What a helper's process runs."""
    import uvloop

    settle(log_level)
    for name, wanted in (("octavo.access", options.access_log), ("octavo.requests", options.log_requests)):
        logging.getLogger(name).setLevel("INFO" if wanted else "WARNING")
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(serve_as_helper(index, config, options, sockets, folder, info, pipe))


async def serve_as_helper(
    index: int,
    config: EngineConfig,
    options: ServerOptions,
    sockets: list[socket.socket],
    folder: Path,
    info: ModelInfo,
    pipe: Connection,
) -> None:
    """Serve until main says to drain."""
    from octavo.server.lifecycle import HttpServer, set_up_service
    from octavo.tokenizer import load_tokenizer_for

    tokenizer = await asyncio.to_thread(load_tokenizer_for, config.model)
    transport = SocketTransport(folder, client=index)
    client = EngineClient(transport, tokenizer, info)
    client.start()
    service = Service(client, options)
    set_up_service(service, config)
    service.peers = Peers(folder, index, options.api_server_count, service.snapshot)

    class HelperServer(HttpServer):
        @contextlib.contextmanager
        def capture_signals(self) -> Iterator[None]:
            yield  # main hears them

    server = HelperServer(service, on_ready=lambda *_: pipe.send("ready"))

    def obey() -> None:
        try:
            word = pipe.recv()
        except (EOFError, OSError):
            word = "hurry"
        if word == "drain":
            server.should_exit = True
        elif word == "hurry":
            server.hurry()
            asyncio.get_running_loop().remove_reader(pipe.fileno())
        elif word == "reload":
            server.reload()
        else:
            transport.lose(word)

    asyncio.get_running_loop().add_reader(pipe.fileno(), obey)
    try:
        await server.serve(sockets=sockets)
    finally:
        await service.client.shutdown()
        await service.peers.close()
        await service.close()
