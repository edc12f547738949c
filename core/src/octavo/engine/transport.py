"""How a client reaches its engine: one verb each way over the messages of `octavo.engine.messages`."""

from __future__ import annotations

import asyncio
import queue
import threading
from typing import Protocol, TypeVar

from octavo.engine.loop import EngineLoop
from octavo.engine.messages import Failed, Inbound, Outbound, Shutdown
from octavo.engine.pump import describe, pump
from octavo.errors import EngineDeadError

Message = TypeVar("Message")


class Transport(Protocol):
    """The way to one engine. `client` is this side's index, which every message sent carries."""

    client: int

    def send(self, message: Inbound) -> None:
        """Queue a message for the engine; never waits."""

    async def receive(self) -> list[Outbound]:
        """All that the engine has said since the last call, in order; waits for at least one message.

        Raises EngineDeadError once the engine is gone and nothing is left to read.
        """

    async def close(self) -> None:
        """End the engine and free what the transport holds. Safe to call twice."""


class ThreadTransport:
    """Runs an EngineLoop on a thread of this process: no sockets, the same messages. For tests and embedding."""

    def __init__(self, engine: EngineLoop, *, client: int = 0) -> None:
        self.client = client
        self._engine = engine
        self._inbox: queue.SimpleQueue[Inbound] = queue.SimpleQueue()
        self._outbox: queue.SimpleQueue[Outbound] = queue.SimpleQueue()
        self._wake: tuple[asyncio.AbstractEventLoop, asyncio.Event] | None = None
        self._ended = False
        self._thread = threading.Thread(target=self._run, name="octavo-engine", daemon=True)
        self._thread.start()

    def send(self, message: Inbound) -> None:
        self._inbox.put(message)

    async def receive(self) -> list[Outbound]:
        if self._wake is None:
            self._wake = (asyncio.get_running_loop(), asyncio.Event())
        event = self._wake[1]
        while True:
            event.clear()
            ended = self._ended
            if messages := _drain(self._outbox):
                return messages
            if ended:
                raise EngineDeadError("the engine has ended")
            await event.wait()

    async def close(self) -> None:
        self.send(Shutdown())
        await asyncio.to_thread(self._thread.join)

    def _run(self) -> None:
        try:
            pump(self._engine, receive=self._take, publish=self._publish)
            self._engine.close()
        except Exception as error:  # the engine's own failure, told to the client as a process would tell it
            self._publish(self.client, Failed(kind="EngineError", message=describe(error)))
        self._ended = True
        self._notify()

    def _take(self, block: bool) -> list[Inbound]:
        messages = [self._inbox.get()] if block else []
        return messages + _drain(self._inbox)

    def _publish(self, client: int, message: Outbound) -> None:
        self._outbox.put(message)
        self._notify()

    def _notify(self) -> None:
        if self._wake is not None:
            loop, event = self._wake
            if not loop.is_closed():
                loop.call_soon_threadsafe(event.set)


def _drain(source: queue.SimpleQueue[Message]) -> list[Message]:
    """What waits in a queue that nobody else reads."""
    messages = []
    while not source.empty():
        messages.append(source.get())
    return messages
