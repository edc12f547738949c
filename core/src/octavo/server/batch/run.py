"""Answer the lines of a batch file, some at a time, with the handlers that serve the routes over HTTP.

lines ──read_line──> skip what is done ──at most `concurrency` at a time──> handler ──> result file
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncIterator, Callable
from typing import Any

from octavo.errors import EngineDeadError, RequestError
from octavo.server.app import ROUTES
from octavo.server.batch.lines import (
    BatchError,
    BatchLine,
    BatchResponse,
    BatchResult,
    custom_id_of,
    read_line,
)
from octavo.server.batch.results import ResultFile
from octavo.server.endpoint import Call
from octavo.server.errors import as_api_error
from octavo.server.openapi import read_signature
from octavo.server.service import Service

URLS = {
    path: handler
    for (method, path), handler in ROUTES.items()
    if method == "POST" and path.startswith("/v1/") and "{" not in path and read_signature(handler).answer is not None
}
"""What a line may ask for: the routes that answer a body with JSON."""

OnDone = Callable[[BatchResult], None]


class BatchRun:
    """One run over a file. num_answered, num_refused and num_skipped count its lines."""

    def __init__(self, service: Service, results: ResultFile, *, on_done: OnDone) -> None:
        self.service = service
        self.results = results
        self.num_answered = self.num_refused = self.num_skipped = 0
        self._on_done = on_done
        self._seen: dict[str, int] = {}

    async def run(self, lines: AsyncIterator[tuple[int, bytes]], *, concurrency: int) -> None:
        """Answer all lines. Raises EngineDeadError when the engine dies: what is left can be done by another run."""
        running: set[asyncio.Task[None]] = set()
        try:
            async for number, data in lines:
                line = self._accept(number, data)
                if line is None:
                    continue
                running.add(asyncio.create_task(self._answer(line)))
                if len(running) >= concurrency:
                    running = await settle(running, asyncio.FIRST_COMPLETED)
            await settle(running, asyncio.ALL_COMPLETED)
        finally:
            for task in running:
                task.cancel()
            await asyncio.gather(*running, return_exceptions=True)

    def _accept(self, number: int, data: bytes) -> BatchLine | None:
        """The request of a line; None for one that is done already, or is no request, which is told."""
        try:
            line = read_line(data)
            first = self._seen.setdefault(line.custom_id, number)
            if first != number:
                raise RequestError(f"custom_id {line.custom_id!r} was used in line {first} already", field="custom_id")
            if line.url not in URLS:
                raise RequestError(f"url must be one of {', '.join(URLS)}, not {line.url!r}", field="url")
        except RequestError as error:
            if number in self.results.done_lines:
                self.num_skipped += 1
                return None
            told = BatchError("invalid_line", f"line {number}: {error}", error.field or None, number)
            self._write(BatchResult(custom_id=custom_id_of(data), error=told))
            return None
        if line.custom_id in self.results.done_ids:
            self.num_skipped += 1
            return None
        return line

    async def _answer(self, line: BatchLine) -> None:
        request_id = uuid.uuid4().hex
        body: Any
        try:
            body = await URLS[line.url](self.service, Call(bytes(line.body), request_id, {}))
            status = 200
        except EngineDeadError:
            raise
        except Exception as error:
            told = as_api_error(error)
            status, body = told.status, told.body_for(line.url, request_id)
        self._write(BatchResult(custom_id=line.custom_id, response=BatchResponse(status, request_id, body)))

    def _write(self, result: BatchResult) -> None:
        if result.response is not None and result.response.status_code == 200:
            self.num_answered += 1
        else:
            self.num_refused += 1
        self.results.write(result)
        self._on_done(result)


async def settle(running: set[asyncio.Task[None]], when: str) -> set[asyncio.Task[None]]:
    """Wait for one or all tasks; those that still run. Raises what one of them raised."""
    if not running:
        return running
    done, pending = await asyncio.wait(running, return_when=when)
    for task in done:
        task.result()
    return pending


def num_generated(result: BatchResult) -> int:
    """Tokens that an answer says it has, by whatever name its API has for them."""
    usage = getattr(result.response.body, "usage", None) if result.response is not None else None
    return int(getattr(usage, "completion_tokens", None) or getattr(usage, "output_tokens", None) or 0)
