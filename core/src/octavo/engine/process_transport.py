"""The client's end of the sockets to an engine process, and how both ends name and open them."""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import logging
import shutil
import signal
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


class ProcessTransport:
    """The way to an engine in another process; see `octavo.engine.transport.Transport`."""

    def __init__(self, process: SpawnProcess, folder: Path, *, client: int = 0) -> None:
        self.client = client
        self._process = process
        self._folder = folder
        self._context = zmq.asyncio.Context()
        # Sends never wait (no high-water mark), so the plain socket does, without a future per message.
        self._inbox = unlimited(zmq.Socket(self._context, zmq.PUSH))
        self._inbox.connect(address(folder, "inbox"))
        self._outbox = unlimited(self._context.socket(zmq.PULL))
        self._outbox.bind(address(folder, f"outbox-{client}"))
        self._watched: asyncio.AbstractEventLoop | None = None
        self._closed = False
        self._ready = False
        self._gone: EngineDeadError | None = None

    @property
    def pid(self) -> int | None:
        """The engine's process id."""
        return self._process.pid

    def send(self, message: Inbound) -> None:
        self._inbox.send(encode(message))

    async def receive(self) -> list[Outbound]:
        if self._gone is not None:
            raise self._gone
        if self._watched is None:
            self._watched = asyncio.get_running_loop()
            self._watched.add_reader(self._process.sentinel, self._on_exit)
        messages = [decode_outbound(await self._outbox.recv())]
        with contextlib.suppress(zmq.Again):  # nothing more waits
            while True:
                messages.append(decode_outbound(await self._outbox.recv(zmq.NOBLOCK)))
        for message in messages:
            if isinstance(message, Failed):
                self._gone = EngineDeadError(message.message)
            self._ready = self._ready or isinstance(message, Ready)
        return messages

    async def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        self._unwatch()
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
        self._gone = self._gone or EngineDeadError("the engine has been shut down")
        # Not made by the context, so destroy() does not know it and would wait for it for ever.
        self._inbox.close(linger=0)
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
        with zmq.Socket(self._context, zmq.PUSH) as own:
            own.connect(address(self._folder, f"outbox-{self.client}"))
            own.setsockopt(zmq.LINGER, 1000)
            own.send(encode(Failed(kind="EngineDeadError", message=f"the engine process has ended ({how}){hint}")))


def address(folder: Path, name: str) -> str:
    """Of the engine's "inbox" or a client's "outbox-N" in the folder that both know."""
    return f"ipc://{folder / name}"


def unlimited(socket: Any) -> Any:
    """The socket without a high-water mark: nothing is dropped and no send waits. Closing it drops what is unsent."""
    socket.set_hwm(0)
    socket.setsockopt(zmq.LINGER, 0)
    return socket
