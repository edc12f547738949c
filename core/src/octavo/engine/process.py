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
import os
import shutil
import tempfile
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import zmq

from octavo import errors
from octavo.config import EngineConfig
from octavo.engine.child import settle
from octavo.engine.info import ModelInfo
from octavo.engine.loop import EngineLoop
from octavo.engine.messages import (
    Failed,
    Inbound,
    Outbound,
    Ready,
    decode_inbound,
    encode,
)
from octavo.engine.process_transport import ProcessTransport, address, unlimited
from octavo.engine.pump import describe, pump
from octavo.errors import ConfigError, EngineError, OctavoError
from octavo.uncollected import uncollected

if TYPE_CHECKING:
    from octavo.tokenizer import Tokenizer

Build = Callable[[EngineConfig], tuple[EngineLoop, ModelInfo]]

logger = logging.getLogger("octavo.engine")

PROGRESS_S = 10.0
"""How often a start that takes long says that it goes on."""
HEALTH_MS = 1000
"""How often an engine without work looks whether it could still do some."""
MAX_SOCKET_PATH = 100
"""Unix socket paths may have 107 bytes; macOS allows 103."""


@dataclass(frozen=True, kw_only=True)
class EngineHandle:
    """An engine process that serves. tokenizer: of its model, None if the configuration skips it."""

    transport: ProcessTransport
    info: ModelInfo
    tokenizer: Tokenizer | None


async def start_engine(config: EngineConfig, *, build: Build | None = None, num_clients: int = 1) -> EngineHandle:
    """Start the engine process and wait until it serves; the tokenizer is loaded meanwhile.

    num_clients: API processes that it will serve; this one is client 0.
    build: makes the loop inside the process (an importable function; None is `octavo.launch.build_engine`).
    Raises what the engine raised if it is one of `octavo.errors`, EngineError for any other failure, EngineDeadError
    if the process died without a word.
    """
    transport = spawn(config, build, num_clients=num_clients)
    ready = asyncio.create_task(_wait_ready(transport))
    tokenizer = asyncio.create_task(asyncio.to_thread(_load_tokenizer, config))
    try:
        async with _progress_log():
            await asyncio.gather(ready, tokenizer)
    except BaseException:
        ready.cancel()
        await transport.close()
        await asyncio.gather(ready, tokenizer, return_exceptions=True)
        raise
    return EngineHandle(transport=transport, info=ready.result(), tokenizer=tokenizer.result())


def spawn(config: EngineConfig, build: Build | None, *, num_clients: int = 1) -> ProcessTransport:
    """Start the process; it serves once it has sent Ready. Raises ConfigError where sockets cannot be made."""
    folder = Path(tempfile.mkdtemp(prefix="octavo-"))
    try:
        if len(os.fsencode(folder / "outbox-000")) > MAX_SOCKET_PATH:
            raise ConfigError(
                f"the path of the temporary folder {folder} is too long for sockets; set TMPDIR to a shorter one"
            )
        log_level = logging.getLogger("octavo").getEffectiveLevel()
        # Not a daemon: those may have no children, and an engine starts workers for further ranks.
        process = multiprocessing.get_context("spawn").Process(
            target=engine_main, args=(config, build, folder, num_clients, log_level), name="octavo-engine"
        )
        process.start()
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    # multiprocessing joins its children when the interpreter exits; without this it would wait for ever.
    atexit.register(process.kill)
    return ProcessTransport(process, folder)


def engine_main(config: EngineConfig, build: Build | None, folder: Path, num_clients: int, log_level: int) -> None:
    """What the engine process runs, from start to exit. Exit code 1 after a failure, which it has reported."""
    settle(log_level)
    context = zmq.Context()
    inbox = unlimited(context.socket(zmq.PULL))
    inbox.bind(address(folder, "inbox"))
    outboxes = []
    for client in range(num_clients):
        outboxes.append(unlimited(context.socket(zmq.PUSH)))
        outboxes[-1].connect(address(folder, f"outbox-{client}"))

    def receive(block: bool) -> list[Inbound]:
        while block and not inbox.poll(HEALTH_MS):
            engine.check()
        messages = []
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
        with uncollected():
            engine, info = (build or _build_here)(config)
        # What start-up made lives as long as the process; the collector need not look at it again.
        gc.collect()
        gc.freeze()
        publish_all(Ready(info=msgspec.json.encode(info)))
        engine.warm()  # now, so that it delays no start
        pump(engine, receive=receive, publish=publish, num_clients=num_clients)
        engine.close()
    except OctavoError as error:
        publish_all(Failed(kind=type(error).__name__, message=str(error)))
        code = 1
    except Exception as error:
        logger.exception("the engine failed")
        publish_all(Failed(kind="EngineError", message=describe(error)))
        code = 1
    context.destroy(linger=2000)
    if code:
        # The device may never answer again, and what waits for it neither: nothing is taken apart.
        logging.shutdown()
        os._exit(code)


def _build_here(config: EngineConfig) -> tuple[EngineLoop, ModelInfo]:
    from octavo.launch import build_engine  # imports torch

    return build_engine(config)


async def _wait_ready(transport: ProcessTransport) -> ModelInfo:
    message, *_ = await transport.receive()  # a death right behind Ready is told by the next call too
    if isinstance(message, Failed):
        kind = getattr(errors, message.kind, EngineError)
        raise kind(message.message)
    assert isinstance(message, Ready), f"the engine's first message is {type(message).__name__}"
    return msgspec.json.decode(message.info, type=ModelInfo)


def _load_tokenizer(config: EngineConfig) -> Tokenizer | None:
    from octavo.tokenizer import load_tokenizer_for

    return load_tokenizer_for(config.model)


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
