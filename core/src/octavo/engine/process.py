"""The engine in its own process: start it, talk to it over ZeroMQ, notice at once when it dies.

    API process                                   engine process (spawned)
      ProcessTransport.send    ──> inbox    ──>     pump ─> EngineLoop
      ProcessTransport.receive <── outbox-i <──
                                                    exits when its parent dies; ignores SIGINT and SIGTERM:
      sentinel of the process  <── exit ───         the parent decides when it ends

Each side binds the socket it reads from and connects the one it writes to, so that neither has to wait for the other.
The sockets lie in a folder that only this user can enter.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import gc
import logging
import multiprocessing
import multiprocessing.connection
import os
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from multiprocessing.context import SpawnProcess
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import zmq
import zmq.asyncio

from octavo import errors
from octavo.config import EngineConfig
from octavo.engine.info import ModelInfo
from octavo.engine.loop import EngineLoop
from octavo.engine.messages import (
    Failed,
    Inbound,
    Outbound,
    Ready,
    Shutdown,
    decode_inbound,
    decode_outbound,
    encode,
)
from octavo.engine.pump import describe, pump
from octavo.errors import ConfigError, EngineDeadError, EngineError, OctavoError

if TYPE_CHECKING:
    from octavo.tokenizer import Tokenizer

Build = Callable[[EngineConfig], tuple[EngineLoop, ModelInfo]]

logger = logging.getLogger("octavo.engine")

PROGRESS_S = 10.0
"""How often a start that takes long says that it goes on."""
GRACE_S = 0.05
"""A dying engine's last words may still be on their way when its exit is seen."""
STOP_S = 10.0
"""An engine told to stop ends its step first; after this it is killed."""
MAX_SOCKET_PATH = 100
"""Unix socket paths may have 107 bytes; macOS allows 103."""


@dataclass(frozen=True, kw_only=True)
class EngineHandle:
    """An engine process that serves. tokenizer: of its model, None if the configuration skips it."""

    transport: ProcessTransport
    info: ModelInfo
    tokenizer: Tokenizer | None


async def start_engine(config: EngineConfig, *, build: Build | None = None) -> EngineHandle:
    """Start the engine process and wait until it serves; the tokenizer is loaded meanwhile.

    build: makes the loop inside the process (an importable function; None is `octavo.launch.build_engine`).
    Raises what the engine raised if it is one of `octavo.errors`, EngineError for any other failure, EngineDeadError
    if the process died without a word.
    """
    transport = ProcessTransport.spawn(config, build)
    try:
        async with _progress_log():
            tokenizer_task = asyncio.create_task(asyncio.to_thread(_load_tokenizer, config))
            try:
                info = await _wait_ready(transport)
            except BaseException:
                await asyncio.gather(tokenizer_task, return_exceptions=True)
                raise
            tokenizer = await tokenizer_task
    except BaseException:
        await transport.close()
        raise
    return EngineHandle(transport=transport, info=info, tokenizer=tokenizer)


class ProcessTransport:
    """The way to an engine in another process; see `octavo.engine.transport.Transport`."""

    def __init__(self, process: SpawnProcess, folder: Path, *, client: int = 0) -> None:
        self.client = client
        self._process = process
        self._folder = folder
        self._context = zmq.asyncio.Context()
        # Sends never wait (no high-water mark), so the plain socket does, without a future per message.
        self._inbox = _socket(self._context, zmq.PUSH, socket_class=zmq.Socket)
        self._inbox.connect(_address(folder, "inbox"))
        self._outbox = _socket(self._context, zmq.PULL)
        self._outbox.bind(_address(folder, f"outbox-{client}"))
        self._watched: asyncio.AbstractEventLoop | None = None
        self._closed = False
        self._gone: EngineDeadError | None = None

    @classmethod
    def spawn(cls, config: EngineConfig, build: Build | None) -> ProcessTransport:
        """Start the process; it serves once it has sent Ready."""
        folder = Path(tempfile.mkdtemp(prefix="octavo-"))
        try:
            if len(os.fsencode(folder / "outbox-000")) > MAX_SOCKET_PATH:
                raise ConfigError(
                    f"the temporary folder {folder} has too long a path for sockets; set TMPDIR to a shorter one"
                )
            # Not a daemon: those may have no children, and an engine starts workers for further ranks.
            process = multiprocessing.get_context("spawn").Process(
                target=engine_main,
                args=(config, build, folder, 1, logging.getLogger("octavo").getEffectiveLevel()),
                name="octavo-engine",
            )
            transport = cls(process, folder)
            process.start()
        except BaseException:
            shutil.rmtree(folder, ignore_errors=True)
            raise
        # multiprocessing joins its children when the interpreter exits; without this it would wait for ever.
        atexit.register(process.kill)
        return transport

    @property
    def pid(self) -> int | None:
        """The engine's process id."""
        return self._process.pid

    def send(self, message: Inbound) -> None:
        self._inbox.send(encode(message))

    async def receive(self) -> Outbound:
        if self._gone is not None:
            raise self._gone
        if self._watched is None:
            self._watched = asyncio.get_running_loop()
            self._watched.add_reader(self._process.sentinel, self._on_exit)
        message = decode_outbound(await self._outbox.recv())
        if isinstance(message, Failed):
            self._gone = EngineDeadError(message.message)
        return message

    async def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        self._unwatch()
        self.send(Shutdown())
        await asyncio.to_thread(self._process.join, STOP_S)
        if self._process.exitcode is None:
            logger.warning("the engine did not stop within %g s and is killed", STOP_S)
            self._process.kill()
            await asyncio.to_thread(self._process.join)
        atexit.unregister(self._process.kill)
        self._gone = self._gone or EngineDeadError("the engine has been shut down")
        self._context.destroy(linger=0)
        shutil.rmtree(self._folder, ignore_errors=True)

    def _unwatch(self) -> None:
        if self._watched is not None and not self._watched.is_closed():
            self._watched.remove_reader(self._process.sentinel)

    def _on_exit(self) -> None:
        assert self._watched is not None
        self._unwatch()
        self._watched.call_later(GRACE_S, self._tell_own_reader)

    def _tell_own_reader(self) -> None:
        """Wake `receive` as the dead engine would have: with a message in its outbox."""
        if self._closed:
            return
        self._process.join()
        code = self._process.exitcode or 0
        how = f"killed by signal {-code}" if code < 0 else f"exit code {code}"
        hint = "; it may have run out of memory" if code == -signal.SIGKILL else ""
        with self._context.socket(zmq.PUSH, socket_class=zmq.Socket) as own:
            own.connect(_address(self._folder, f"outbox-{self.client}"))
            own.setsockopt(zmq.LINGER, 1000)
            own.send(encode(Failed(kind="EngineDeadError", message=f"the engine process has ended ({how}){hint}")))


def engine_main(config: EngineConfig, build: Build | None, folder: Path, num_clients: int, log_level: int) -> None:
    """What the engine process runs, from start to exit. Exit code 1 after a failure, which it has reported."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    threading.Thread(target=_exit_with_parent, name="octavo-parent-watch", daemon=True).start()
    logging.basicConfig(level=log_level, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    context = zmq.Context()
    inbox = _socket(context, zmq.PULL)
    inbox.bind(_address(folder, "inbox"))
    outboxes = []
    for client in range(num_clients):
        outboxes.append(_socket(context, zmq.PUSH))
        outboxes[-1].connect(_address(folder, f"outbox-{client}"))

    def receive(block: bool) -> list[Inbound]:
        messages = [decode_inbound(inbox.recv())] if block else []
        while True:
            try:
                messages.append(decode_inbound(inbox.recv(zmq.NOBLOCK)))
            except zmq.Again:
                return messages

    def publish(client: int, message: Outbound) -> None:
        outboxes[client].send(encode(message))

    def publish_all(message: Outbound) -> None:
        for client in range(num_clients):
            publish(client, message)

    code = 0
    try:
        if build is None:
            from octavo.launch import build_engine as build  # imports torch: only the engine's process pays for it
        engine, info = build(config)
        # What start-up made lives as long as the process; the collector need not look at it again.
        gc.collect()
        gc.freeze()
        publish_all(Ready(info=msgspec.json.encode(info)))
        pump(engine, receive=receive, publish=publish)
    except OctavoError as error:
        publish_all(Failed(kind=type(error).__name__, message=str(error)))
        code = 1
    except Exception as error:
        logger.exception("the engine failed")
        publish_all(Failed(kind="EngineError", message=describe(error)))
        code = 1
    context.destroy(linger=2000)
    sys.exit(code)


def _exit_with_parent() -> None:
    """An engine whose parent is gone serves nobody: leave at once, in the middle of a step if need be."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    multiprocessing.connection.wait([parent.sentinel])
    os._exit(1)


async def _wait_ready(transport: ProcessTransport) -> ModelInfo:
    message = await transport.receive()
    if isinstance(message, Failed):
        kind = getattr(errors, message.kind, EngineError)
        raise kind(message.message)
    assert isinstance(message, Ready), f"the engine's first message is {type(message).__name__}"
    return msgspec.json.decode(message.info, type=ModelInfo)


def _load_tokenizer(config: EngineConfig) -> Tokenizer | None:
    if config.model.skip_tokenizer_init:
        return None
    from octavo.launch import load_tokenizer_for

    return load_tokenizer_for(config)


@contextlib.asynccontextmanager
async def _progress_log() -> AsyncIterator[None]:
    """Says every few seconds that the engine is still starting."""

    async def tick() -> None:
        started = time.monotonic()
        while True:
            await asyncio.sleep(PROGRESS_S)
            logger.info("the engine is still starting (%d s)", time.monotonic() - started)

    ticker = asyncio.create_task(tick())
    try:
        yield
    finally:
        ticker.cancel()


def _address(folder: Path, name: str) -> str:
    return f"ipc://{folder / name}"


def _socket(context: zmq.Context, kind: int, **options: type) -> zmq.Socket:
    """A socket without a high-water mark: nothing is dropped and no send waits."""
    socket = context.socket(kind, **options)
    socket.set_hwm(0)
    socket.setsockopt(zmq.LINGER, 0)
    return socket
