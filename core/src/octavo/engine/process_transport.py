"""The client's end of the sockets to an engine process, and how both ends name and open them."""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import logging
import shutil
import signal
from collections.abc import Awaitable, Callable
from multiprocessing.context import SpawnProcess
from pathlib import Path
from typing import Any

import zmq
import zmq.asyncio

from octavo.engine.messages import Failed, Inbound, Outbound, Ready, Shutdown, decode_outbound, encode
from octavo.errors import EngineDeadError

logger = logging.getLogger("octavo.engine")

GRACE_S = 0.05
"""A dying engine's last words may still be on their way when its exit is seen."""
STOP_S = 10.0
"""An engine told to stop ends its step first; after this it is killed."""


class SocketTransport:
    """The way to an engine that somebody else has started; see `octavo.engine.transport.Transport`.

    Whoever started it says when it is gone (`lose`), and ends it: closing this leaves the engine alone.
    """

    def __init__(self, folder: Path, *, client: int) -> None:
        self.client = client
        self.folder = folder
        self._context = zmq.asyncio.Context()
        # Sends never wait (no high-water mark), so the plain socket does, without a future per message.
        self._inbox = unlimited(zmq.Socket(self._context, zmq.PUSH))
        self._inbox.connect(address(folder, "inbox"))
        self._outbox = unlimited(self._context.socket(zmq.PULL))
        self._outbox.bind(address(folder, f"outbox-{client}"))
        self._closed = False
        self._ready = False
        self._gone: EngineDeadError | None = None

    def send(self, message: Inbound) -> None:
        self._inbox.send(encode(message))

    async def receive(self) -> list[Outbound]:
        if self._gone is not None:
            raise self._gone
        messages = [decode_outbound(await self._outbox.recv())]
        with contextlib.suppress(zmq.Again):  # nothing more waits
            while True:
                messages.append(decode_outbound(await self._outbox.recv(zmq.NOBLOCK)))
        for message in messages:
            if isinstance(message, Failed):
                self._gone = EngineDeadError(message.message)
            self._ready = self._ready or isinstance(message, Ready)
        return messages

    def lose(self, message: str) -> None:
        """The engine is dead: `receive` tells it, as the engine would have."""
        if self._closed:
            return
        with zmq.Socket(self._context, zmq.PUSH) as own:
            own.connect(address(self.folder, f"outbox-{self.client}"))
            own.setsockopt(zmq.LINGER, 1000)
            own.send(encode(Failed(kind="EngineDeadError", message=message)))

    async def close(self) -> None:
        if not self._closed:
            self._closed = True
            self._close_sockets()

    def _close_sockets(self) -> None:
        self._gone = self._gone or EngineDeadError("the engine has been shut down")
        # Not made by the context, so destroy() does not know it and would wait for it for ever.
        self._inbox.close(linger=0)
        self._context.destroy(linger=0)


class ProcessTransport(SocketTransport):
    """The way to an engine of our own.

    before_close: awaited before the engine is told to stop, for other processes that still use it.
    """

    def __init__(self, process: SpawnProcess, folder: Path) -> None:
        super().__init__(folder, client=0)
        self._process = process
        self._watched: asyncio.AbstractEventLoop | None = None
        self.before_close: Callable[[], Awaitable[None]] | None = None

    @property
    def pid(self) -> int | None:
        """The engine's process id."""
        return self._process.pid

    async def receive(self) -> list[Outbound]:
        if self._watched is None and self._gone is None:
            self._watched = asyncio.get_running_loop()
            self._watched.add_reader(self._process.sentinel, self._on_exit)
        return await super().receive()

    async def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        self._unwatch()
        if self.before_close is not None:
            await self.before_close()
        if self._ready:
            self.send(Shutdown())
        elif self._gone is None:
            self._process.kill()  # it still loads, and reads no messages before it has done so
        await asyncio.to_thread(self._process.join, STOP_S)
        if self._process.exitcode is None:
            logger.warning("the engine did not stop within %g s and is killed", STOP_S)
            self._process.kill()
            await asyncio.to_thread(self._process.join)
        atexit.unregister(self._process.kill)
        self._close_sockets()
        shutil.rmtree(self.folder, ignore_errors=True)

    def _unwatch(self) -> None:
        if self._watched is not None and not self._watched.is_closed():
            self._watched.remove_reader(self._process.sentinel)

    def _on_exit(self) -> None:
        assert self._watched is not None
        self._unwatch()
        self._watched.call_later(GRACE_S, self._tell_own_reader)

    def _tell_own_reader(self) -> None:
        """Wake `receive`, and say how the engine has ended."""
        if self._closed:
            return
        self._process.join()
        code = self._process.exitcode or 0
        how = f"killed by signal {-code}" if code < 0 else f"exit code {code}"
        hint = "; it may have run out of memory" if code == -signal.SIGKILL else ""
        self.lose(f"the engine process has ended ({how}){hint}")


def address(folder: Path, name: str) -> str:
    """Of the engine's "inbox" or a client's "outbox-N" in the folder that both know."""
    return f"ipc://{folder / name}"


def unlimited(socket: Any) -> Any:
    """The socket without a high-water mark: nothing is dropped and no send waits. Closing it drops what is unsent."""
    socket.set_hwm(0)
    socket.setsockopt(zmq.LINGER, 0)
    return socket
