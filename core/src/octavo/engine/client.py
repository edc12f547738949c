"""The asyncio side of an engine: prompts in, streams of deltas out. One per API process.

Path of a request: `generate` checks and tokenizes it (engine/door.py), the frontend makes one `Submit` per answer
(engine/frontend.py), the transport carries it. One task reads the engine's messages and lays each request's deltas
in its mailbox; the request's iterator takes them out.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import AsyncGenerator, Callable, Sequence
from typing import TYPE_CHECKING, Any, Literal

from octavo.engine.backlog import coalesce
from octavo.engine.door import Door, Prepared
from octavo.engine.frontend import Frontend, Request
from octavo.engine.info import ModelInfo
from octavo.engine.messages import Control, Deltas, Done, Failed, ResetPrefixCache, Stats
from octavo.engine.pump import describe
from octavo.engine.transport import Transport
from octavo.errors import EngineDeadError, EngineError
from octavo.metrics import EngineMetrics
from octavo.outputs import OutputMerger, RequestOutput
from octavo.sampling.params import SamplingParams

if TYPE_CHECKING:
    from octavo.engine.process import EngineHandle
    from octavo.tokenizer import Tokenizer

__all__ = ["EngineClient", "ModelInfo"]

logger = logging.getLogger("octavo.client")

Action = Literal["pause", "resume", "sleep", "wake_up"]
Mode = Literal["abort", "wait", "keep"]

LONG_PROMPT = 16_384
"""Characters (or ids); longer prompts and schemas are checked on a thread: other streams and /health go on."""


class Mailbox:
    """What has arrived for one request and was not read yet: a slow reader gets fewer, larger deltas."""

    def __init__(self) -> None:
        self._waiting: list[RequestOutput] = []
        self._error: Exception | None = None
        self._ready = asyncio.Event()

    def put(self, item: RequestOutput | Exception) -> None:
        """Add a delta, or the error that ends the request."""
        if isinstance(item, Exception):
            self._error = item
        else:
            self._waiting.append(item)
        self._ready.set()

    async def take(self) -> RequestOutput:
        """Everything new as one delta; waits for some. Raises the request's error once all before it was read."""
        await self._ready.wait()
        waiting, self._waiting = self._waiting, []
        if not waiting:
            assert self._error is not None
            raise self._error
        if self._error is None:
            self._ready.clear()
        if len(waiting) == 1:
            return waiting[0]
        merger = OutputMerger()
        for delta in waiting:
            merger.add(delta)
        merged = merger.result()
        assert merged is not None
        return merged


class EngineClient:
    """Serves requests through one engine.

    transport: the way to the engine. tokenizer: None serves token ids only. Nothing runs until the first use inside
    an event loop; from then on the client belongs to that loop.
    """

    def __init__(self, transport: Transport, tokenizer: Tokenizer | None, info: ModelInfo) -> None:
        self.info = info
        self.tokenizer = tokenizer
        self.metrics = EngineMetrics(info)
        self._transport = transport
        self._frontend = Frontend(tokenizer, info, client=transport.client)
        self._mailboxes: dict[Request, Mailbox] = {}
        self._stats = Stats()
        self._error: EngineDeadError | None = None
        self._closing = False
        self._serial = itertools.count()
        self._answers: dict[int, asyncio.Future[Done]] = {}
        self._idle = asyncio.Event()
        self._idle.set()
        self._reader: asyncio.Task[None] | None = None

    @classmethod
    async def connect(cls, handle: EngineHandle) -> EngineClient:
        """A client of an engine process that `octavo.engine.process.start_engine` started."""
        client = cls(handle.transport, handle.tokenizer, handle.info)
        client.start()
        return client

    def start(self) -> None:
        """Begin to read the engine's messages (needs a running event loop). Later calls do nothing."""
        if self._reader is None:
            self._reader = asyncio.get_running_loop().create_task(self._read(), name="octavo-engine-reader")

    async def generate(
        self,
        prompt: str | Sequence[int],
        params: SamplingParams,
        *,
        request_id: str,
        priority: int = 0,
        lora: int = 0,
        cache_salt: str = "",
        add_special_tokens: bool = True,
        default_max_tokens: int | None = None,
        max_prompt_tokens: int | None = None,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Stream the answers to a prompt (text or token ids) as deltas.

        Every RequestOutput holds only what is new; prompt_logprobs come with the first one, the last one has
        `finished`. With n > 1, `outputs[i].index` tells the answer. Closing the iterator aborts the request.
        request_id is a label: two live requests may share it. default_max_tokens caps an answer whose max_tokens
        is None, within the room left. max_prompt_tokens: a longer prompt is refused.
        Raises RequestError before the first delta when the request is wrong, EngineError when it failed in the
        engine, EngineDeadError when the engine is gone.
        """
        self._check_open()
        self.start()
        prepared = await self.prepare(
            prompt,
            params,
            add_special_tokens=add_special_tokens,
            default_max_tokens=default_max_tokens,
            priority=priority,
            cache_salt=cache_salt,
            max_prompt_tokens=max_prompt_tokens,
        )
        self._check_open()
        request = self._frontend.add(prepared, request_id=request_id, lora=lora)
        mailbox = self._mailboxes[request] = Mailbox()
        self._idle.clear()
        self.metrics.on_arrival(request)
        try:
            for submit in request.submits():
                self._transport.send(submit)
            while True:
                output = await mailbox.take()
                yield output
                if output.finished:
                    return
        finally:
            self._end(request)

    async def abort(self, request_id: str) -> None:
        """End all live requests of that id: their iterators get a last delta with finish_reason "abort"."""
        self.abort_where(lambda known: known == request_id)

    def abort_where(self, chosen: Callable[[str], bool]) -> int:
        """End all live requests whose id is chosen; returns how many."""
        requests = [request for request in self._mailboxes if not request.ended and chosen(request.request_id)]
        for request in requests:
            self._abort(request)
        return len(requests)

    @property
    def is_alive(self) -> bool:
        """Whether the engine can take requests."""
        return self._error is None and not self._closing

    @property
    def transport(self) -> Transport:
        """The way to the engine."""
        return self._transport

    @property
    def error(self) -> EngineDeadError | None:
        """Why the engine is gone, or None."""
        return self._error

    @property
    def num_live(self) -> int:
        """Requests that have not ended."""
        return len(self._mailboxes)

    def stats(self) -> Stats:
        """The engine's gauges and counters after its latest step."""
        return self._stats

    async def control(self, action: Action, *, mode: Mode = "abort", level: int = 1) -> None:
        """Pause, resume, sleep or wake up the engine (see `octavo.engine.standstill`); returns when that is done.

        Raises EngineError if it cannot be done, EngineDeadError if the engine is gone.
        """
        self._check_open()
        self.start()
        ticket = next(self._serial)
        answer = self._answers[ticket] = asyncio.get_running_loop().create_future()
        client = self._transport.client
        self._transport.send(Control(client=client, ticket=ticket, action=action, mode=mode, level=level))
        try:
            done = await answer
        finally:
            del self._answers[ticket]
        if done.error:
            raise EngineError(done.error)

    async def reset_prefix_cache(self) -> None:
        """Forget the cached prompt blocks that no running request uses."""
        self._check_open()
        self._transport.send(ResetPrefixCache(client=self._transport.client))

    async def shutdown(self, drain: bool = False, *, timeout: float | None = None) -> None:
        """Refuse new requests and end the engine. drain: first let the live ones finish, for at most `timeout`
        seconds (None: as long as they take); the rest is aborted. Safe to call twice."""
        self._closing = True
        if drain and self._error is None:
            try:
                await asyncio.wait_for(self._idle.wait(), timeout)
            except TimeoutError:
                logger.warning("aborting %d requests that did not finish in %g s", self.num_live, timeout)
        for request in list(self._mailboxes):
            self._abort(request)
        if self._reader is not None:
            self._reader.cancel()
            await asyncio.gather(self._reader, return_exceptions=True)
        await self._transport.close()

    @property
    def door(self) -> Door:
        """What checks requests before they enter."""
        return self._frontend.door

    async def prepare(self, prompt: str | Sequence[int], params: SamplingParams, **settings: Any) -> Prepared:
        """A prompt and its parameters, checked. `settings` are those of `Door.prepare`. Raises RequestError."""
        spec = params.structured_outputs
        long_spec = spec is not None and spec.size > LONG_PROMPT
        if long_spec or (isinstance(prompt, Sequence) and len(prompt) > LONG_PROMPT):
            return await asyncio.to_thread(self._frontend.door.prepare, prompt, params, **settings)
        return self._frontend.door.prepare(prompt, params, **settings)

    def _check_open(self) -> None:
        if self._error is not None:
            raise EngineDeadError(str(self._error))
        if self._closing:
            raise EngineDeadError("the server is shutting down and takes no new requests")

    def _abort(self, request: Request) -> None:
        if request.ended:
            return
        message, last = self._frontend.abort(request)
        if self._error is None:
            self._transport.send(message)
        self._deliver(request, last)

    def _end(self, request: Request) -> None:
        """The iterator of a request is done: by its last delta, by an error, or because its reader has gone."""
        self._abort(request)
        del self._mailboxes[request]
        if not self._mailboxes:
            self._idle.set()

    def _deliver(self, request: Request, item: RequestOutput | Exception) -> None:
        self.metrics.on_item(request, item)
        self._mailboxes[request].put(item)

    async def _read(self) -> None:
        """Hand out the engine's messages until it is gone."""
        try:
            while True:
                messages = await self._transport.receive()
                for deltas in coalesce(message for message in messages if isinstance(message, Deltas)):
                    self._handle(deltas)
                for message in messages:
                    if isinstance(message, Done) and message.ticket in self._answers:
                        self._answers[message.ticket].set_result(message)
                    if isinstance(message, Failed):  # the last one
                        exited = message.kind == EngineDeadError.__name__
                        raise EngineDeadError(message.message if exited else f"the engine has died: {message.message}")
                # Streams that got something send it before more is read; what comes meanwhile is read at once.
                await asyncio.sleep(0)
        except EngineDeadError as error:
            self._die(error)
        except Exception as error:  # a bug on this side must not leave readers waiting for ever
            logger.exception("the reader of the engine's messages failed")
            self._die(EngineDeadError(f"the engine's messages cannot be read: {describe(error)}"))

    def _handle(self, deltas: Deltas) -> None:
        self._stats = deltas.stats
        self.metrics.stats = deltas.stats
        items, messages = self._frontend.process(deltas)
        for message in messages:
            self._transport.send(message)
        for request, item in items:
            self._deliver(request, item)

    def _die(self, error: EngineDeadError) -> None:
        self._error = error
        if not self._closing:
            logger.error("%s", error)
        self._stats = Stats()
        for answer in self._answers.values():
            if not answer.done():
                answer.set_exception(EngineDeadError(str(error)))
        for request in self._frontend.drop_all():
            self._deliver(request, EngineDeadError(str(error)))
