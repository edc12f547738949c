"""Responses that run on without the client that asked for them: watched, cancelled, and told again from any event.

`Service.background` has the runs by the id of their response. A run keeps its events until it is over; then the store
has them.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from contextlib import aclosing

from octavo.server.errors import ApiError, as_api_error
from octavo.server.exchange import Exchange, current
from octavo.server.responses.answers import End, Event, Response
from octavo.server.responses.events import Events, ResponseWriter

log = logging.getLogger("octavo.server")

Save = Callable[[Response, list[Event]], Awaitable[None]]
"""Writes a finished response and its events to the store."""


class Run:
    """One response on its way. owner: whose it is; writer: has told no event yet."""

    def __init__(self, owner: str, writer: ResponseWriter) -> None:
        self.owner = owner
        self.writer = writer
        self.events: list[Event] = list(writer.queue())
        self._over = False
        self._reason: ApiError | None = None
        self._task: asyncio.Task[None] | None = None
        self._news = asyncio.Event()

    @property
    def response(self) -> Response:
        return self.writer.response

    def start(self, events: Events, save: Save, *, runs: dict[str, Run]) -> None:
        """Let the events come, and stand among the runs until the last one has."""
        runs[self.response.id] = self
        # The key's limits count it until it is over, not until its request is.
        asked = current.get()
        exchange = None if asked is None else asked.hand_over()
        self._task = asyncio.create_task(self._drive(events, save, runs, exchange))

    async def stop(self, reason: ApiError | None = None) -> Response:
        """Cancel it, or let it fail for a reason; and wait until its end is stored. One that is at its end goes on."""
        assert self._task is not None
        if self.response.status in ("queued", "in_progress"):
            self._reason = reason
            self._task.cancel()
        await asyncio.wait((self._task,))
        return self.response

    async def follow(self, start: int = 0) -> Events:
        """All events from that number on, those to come too."""
        while True:
            while start < len(self.events):
                yield self.events[start]
                start += 1
            if self._over:
                return
            await self._news.wait()

    async def _drive(self, events: Events, save: Save, runs: dict[str, Run], exchange: Exchange | None) -> None:
        current.set(exchange)
        try:
            async with aclosing(events):
                async for event in events:
                    if isinstance(event, End):
                        await save(event.response, [*self.events, event])
                    self._publish(event)
        except asyncio.CancelledError:
            await self._break_off(save, self._reason)
        except Exception as error:
            await self._break_off(save, as_api_error(error))
        finally:
            del runs[self.response.id]
            self._over = True
            self._news.set()
            if exchange is not None:
                exchange.leave()

    async def _break_off(self, save: Save, error: ApiError | None) -> None:
        """End before the answer does. error: why it failed; None if it was cancelled."""
        last = list(self.writer.end("cancelled" if error is None else "failed", error=error))
        try:
            await save(self.response, [*self.events, *last])
        except ApiError as failure:
            # Who follows the run is told how it ended; who asks later finds it unfinished, which is shown as failed.
            log.error("a background response could not be stored: %s", failure)
        for event in last:
            self._publish(event)

    def _publish(self, event: Event) -> None:
        self.events.append(event)
        self._news.set()
        self._news = asyncio.Event()
