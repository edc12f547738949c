"""What the routes share: the engine client, the door (who may come in now), and generation for several prompts.

The service knows nothing of HTTP or of OpenAI's shapes. A restart of the engine puts a new client in its place.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from prometheus_client import CollectorRegistry, Counter

from octavo.errors import ConfigError, EngineAsleepError, EngineDeadError, RequestError, RequestTooLargeError
from octavo.metrics_alias import exposition
from octavo.metrics_merge import Snapshot, freeze, merged
from octavo.outputs import RequestOutput
from octavo.sampling.params import SamplingParams
from octavo.server.access import KeyRing
from octavo.server.access_log import log_exchange, log_request
from octavo.server.beam_search import check_beams, search_beams
from octavo.server.errors import ApiError, queue_full, shutting_down, unknown_model
from octavo.server.exchange import Exchange, current
from octavo.server.formats import model_format, plain_format
from octavo.server.options import ServerOptions
from octavo.server.parsers.registry import Format
from octavo.server.responses.store import ResponseStore
from octavo.server.stream_interval import spaced

if TYPE_CHECKING:
    from octavo.engine.client import EngineClient
    from octavo.engine.info import ModelInfo
    from octavo.server.api_processes import Peers
    from octavo.server.responses.background import Run
    from octavo.tokenizer import Tokenizer

T = TypeVar("T")
Prompt = str | list[int]
Outputs = AsyncGenerator[tuple[int, RequestOutput], None]
"""(index of the prompt, its delta), as they come."""

INLINE_CHARACTERS = 8192
"""Text up to this long is tokenized at once (about a millisecond); longer text goes to a thread, so that the event
loop goes on serving the other streams and /health."""

REJECTIONS = ("queue_full", "rate_limit", "asleep", "shutting_down", "engine_dead")
"""Why requests are turned away."""

MAX_SEQUENCES = 16384
"""Prompts times answers of one request: every sequence costs memory here before the engine sees it."""


class Service:
    """The server's state: its client, its options, how many sequences live, whether it is shutting down."""

    def __init__(self, client: EngineClient, options: ServerOptions, *, store: ResponseStore | None = None) -> None:
        self.client = client
        self.options = options
        self.response_store = store or open_store(options)
        self.background: dict[str, Run] = {}
        """Responses that run without a client, by id."""
        self.draining = False
        self.num_live = 0
        self.grpc_address: str | None = None
        self.started = int(time.time())
        self.keys = open_keys(options)
        self.config: dict[str, Any] = {}
        """The engine's configuration by dotted name, to be shown."""
        self.on_close: list[Callable[[], None]] = []
        """Called on a thread when the service closes: they may wait."""
        self.peers: Peers | None = None
        """The other API processes over the same engine."""
        self.reloads: list[Callable[[], None]] = [self.keys.reload]
        """What `reload` reads again. Each raises ConfigError, and then leaves what it had."""
        self.observers: list[Callable[[Exchange], None]] = [log_exchange] if options.access_log else []
        """Called with every request whose response has ended."""
        self.registry = CollectorRegistry()
        self.http_requests = Counter(
            "octavo:http_requests", "HTTP responses by method and status.", ("method", "status"), registry=self.registry
        )
        self.rejections = Counter(
            "octavo:admission_rejections", "Requests turned away at the door.", ("reason",), registry=self.registry
        )
        for reason in REJECTIONS:  # from 0: the first rejection is an increase already
            self.rejections.labels(reason)
        self._serial = itertools.count()
        self._longest_token: int | None = None

    async def close(self) -> None:
        """End what runs in the background, and free the response store. The engine client is not ours to end."""
        for run in list(self.background.values()):
            await run.stop(shutting_down())
        self.response_store.close()
        for end in self.on_close:
            await asyncio.to_thread(end)

    @property
    def info(self) -> ModelInfo:
        return self.client.info

    @property
    def is_ready(self) -> bool:
        return self.client.is_alive and not self.draining

    @property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer. Raises RequestError if the server runs without one."""
        if self.client.tokenizer is None:
            raise RequestError("this server has no tokenizer (--skip-tokenizer-init): send and take token ids")
        return self.client.tokenizer

    def model_name(self, asked: str | None) -> str:
        """The served name to answer with; no name means the first.

        Raises ApiError: 404 for another, 403 for one that the request's key may not use.
        """
        names = self.info.served_names
        if asked and asked not in names:
            raise unknown_model(asked, names)
        name = asked or names[0]
        if (exchange := current.get()) is not None:
            exchange.model = name
            if exchange.key is not None:
                exchange.key.check_model(name)
        return name

    def admit(self) -> None:
        """Raise unless a request may come in now: the engine lives, no shutdown is under way, the queue has room, and
        the request's key is within its limits."""
        if self.draining:
            self.rejections.labels("shutting_down").inc()
            raise shutting_down()
        if not self.client.is_alive:
            self.rejections.labels("engine_dead").inc()
            raise EngineDeadError("the engine is not running")
        if self.client.stats().sleep_level:
            self.rejections.labels("asleep").inc()
            raise EngineAsleepError("the engine is asleep: wake it up (POST /wake_up), or try again later")
        limit = self.options.max_queue
        if limit is not None and self.num_live >= self.info.max_num_seqs + limit:
            self.rejections.labels("queue_full").inc()
            raise queue_full(limit, status=self.options.queue_full_status)
        if (exchange := current.get()) is not None:
            try:
                exchange.enter()
            except ApiError:
                self.rejections.labels("rate_limit").inc()
                raise

    def reload(self) -> None:
        """Read keys, certificates and the chat template's file again. Raises ConfigError; the others are read all the
        same, and what cannot be used changes nothing."""
        errors = []
        for again in self.reloads:
            try:
                again()
            except ConfigError as error:
                errors.append(str(error))
        if errors:
            raise ConfigError("; ".join(errors))

    def snapshot(self) -> Snapshot:
        """This process' metrics, the engine's and the door's."""
        metrics = self.client.metrics
        own = [*metrics.own_families(), *self.registry.collect()]
        return Snapshot(metrics.stats.steps, self.client.num_live, freeze(metrics.engine_families()), freeze(own))

    async def snapshots(self) -> list[Snapshot]:
        """The metrics of all API processes. Raises EngineError if one does not tell."""
        return [self.snapshot()] if self.peers is None else await self.peers.snapshots()

    async def metrics_text(self) -> bytes:
        """All metrics of all API processes in Prometheus' text format."""
        return exposition(merged(await self.snapshots()), alias=self.options.metrics_alias)

    async def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Token ids of a text, of any length, without holding up the event loop."""
        work = partial(self.tokenizer.encode, text, add_special_tokens=add_special_tokens)
        return work() if len(text) <= INLINE_CHARACTERS else await asyncio.to_thread(work)

    async def render_chat(self, messages: list[dict[str, Any]], *, num_characters: int, **how: Any) -> Rendered:
        """A conversation as text and as token ids; `how` goes to `Tokenizer.render_chat`, except for
        `add_special_tokens`. Raises RequestError."""
        work = partial(render, self.tokenizer, messages, **how)
        if num_characters <= INLINE_CHARACTERS:
            return work()
        # Templates may drop text (old reasoning), so a margin is left: this only spares hopeless work.
        limit = 2 * self.info.max_model_len * await asyncio.to_thread(self._longest_token_bytes)
        if num_characters > limit:
            raise RequestTooLargeError(
                f"the messages have {num_characters} characters; a context of {self.info.max_model_len} tokens "
                "cannot hold them",
                field="messages",
            )
        return await asyncio.to_thread(work)

    def template_source(self, asked: str | None) -> str:
        """The source of the chat template that a request with tools uses. asked: its own, or the name of one of the
        model's. Empty if there is none, which rendering will refuse."""
        template = self.tokenizer.chat_template
        if template is None:
            return asked or ""
        return template.source(tools=True) if asked is None else template.templates.get(asked, asked)

    @cached_property
    def format(self) -> Format:
        """How the model writes tool calls and reasoning. Raises ConfigError for a parser that does not exist."""
        return model_format(self.client.tokenizer, self.options)

    @cached_property
    def plain_format(self) -> Format:
        """Tool calls as plain JSON: for a model that can be held to no format of its own."""
        return plain_format()

    @cached_property
    def special_texts(self) -> frozenset[str]:
        """The texts of the special tokens."""
        tokenizer = self.tokenizer
        return frozenset(filter(None, (tokenizer.token_text(token) for token in tokenizer.special_ids)))

    def _longest_token_bytes(self) -> int:
        if self._longest_token is None:
            tokenizer = self.tokenizer
            self._longest_token = max(len(tokenizer.token_bytes(token)) for token in range(tokenizer.vocab_size))
        return self._longest_token

    def generate(
        self,
        prompts: Sequence[Prompt],
        params: SamplingParams,
        *,
        request_id: str,
        priority: int = 0,
        cache_salt: str = "",
        add_special_tokens: bool = True,
        default_max_tokens: int | None = None,
        stream_interval: int = 1,
    ) -> Outputs:
        """Answers to all prompts, merged as they come; closing it aborts what still runs. Raises as `admit`.

        default_max_tokens: used where params.max_tokens is None, cut to the room that is left.
        stream_interval: at least that many tokens in a delta, but for the first and the last ones.
        """
        self.admit()
        self.check_limits(prompts, params, priority)
        num_sequences = len(prompts) * (params.best_of or params.n)
        if num_sequences > MAX_SEQUENCES:
            raise RequestError(
                f"{len(prompts)} prompts with {params.n} answers each are {num_sequences} sequences; at most "
                f"{MAX_SEQUENCES} are allowed in one request",
                field="n",
            )
        if params.use_beam_search:
            check_beams(len(prompts), params)
        generate = partial(search_beams, self.client) if params.use_beam_search else self.client.generate
        # A request id may be in use twice at a time, so the engine sees it with a serial number.
        streams = [
            generate(
                prompt,
                params,
                request_id=f"{request_id}-{next(self._serial)}",
                priority=priority,
                cache_salt=cache_salt,
                add_special_tokens=add_special_tokens,
                default_max_tokens=default_max_tokens,
                max_prompt_tokens=self.options.max_prompt_tokens,
            )
            for prompt in prompts
        ]
        if stream_interval > 1:
            streams = [spaced(stream, stream_interval) for stream in streams]
        exchange = current.get()
        if exchange is not None:
            exchange.params, exchange.num_sequences = params, exchange.num_sequences + num_sequences
        if self.options.log_requests:
            log_request(request_id, prompts, params, limit=self.options.max_log_len)
        return self._counted(merge(streams), exchange, num_sequences=num_sequences)

    def check_limits(self, prompts: Sequence[Prompt], params: SamplingParams, priority: int) -> None:
        """Raise RequestError or ApiError for what this server, or the request's key, does not allow."""
        options, exchange = self.options, current.get()
        if options.max_n is not None and params.n > options.max_n:
            raise RequestError(f"n is {params.n}; this server gives at most {options.max_n} answers", field="n")
        if options.max_stop_strings is not None and len(params.stop) > options.max_stop_strings:
            raise RequestError(
                f"stop has {len(params.stop)} strings; this server takes at most {options.max_stop_strings}",
                field="stop",
            )
        if exchange is not None and exchange.key is not None:
            exchange.key.check_priority(priority)

    async def _counted(self, outputs: Outputs, exchange: Exchange | None, *, num_sequences: int) -> Outputs:
        self.num_live += num_sequences
        known: set[int] = set()
        try:
            async with aclosing(outputs):
                async for index, output in outputs:
                    if exchange is not None:
                        if index not in known:
                            known.add(index)
                            exchange.on_prompt(output)
                        exchange.on_output(output)
                    yield index, output
        finally:
            self.num_live -= num_sequences


def open_keys(options: ServerOptions) -> KeyRing:
    """The keys that the operator chose. Raises ConfigError if their file cannot be used."""
    file = options.api_keys_file
    return KeyRing(options.api_keys, file=None if file is None else Path(file))


def open_store(options: ServerOptions) -> ResponseStore:
    """The response store that the operator chose. Raises ConfigError if its file cannot be used."""
    return ResponseStore(
        options.response_store, max_bytes=options.response_store_max_bytes, max_age=options.response_store_max_age
    )


class Rendered(NamedTuple):
    """A prompt as text and as token ids."""

    text: str
    token_ids: list[int]


def render(
    tokenizer: Tokenizer, messages: list[dict[str, Any]], *, add_special_tokens: bool = False, **how: Any
) -> Rendered:
    """The prompt of a conversation; `how` goes to `Tokenizer.render_chat`. Raises RequestError."""
    text = tokenizer.render_chat(messages, **how)
    return Rendered(text, tokenizer.encode_rendered(text, add_special_tokens=add_special_tokens))


async def merge(streams: Sequence[AsyncGenerator[T, None]]) -> AsyncGenerator[tuple[int, T], None]:
    """Items of all streams with the stream's index, as they come. The first error ends them all."""
    if len(streams) == 1:
        async with aclosing(streams[0]) as only:
            async for output in only:
                yield 0, output
        return
    queue: asyncio.Queue[tuple[int, T | Exception | None]] = asyncio.Queue()

    async def pump(index: int, stream: AsyncGenerator[T, None]) -> None:
        try:
            async with aclosing(stream):
                async for output in stream:
                    queue.put_nowait((index, output))
            queue.put_nowait((index, None))
        except Exception as error:
            queue.put_nowait((index, error))

    tasks = [asyncio.create_task(pump(index, stream)) for index, stream in enumerate(streams)]
    try:
        running = len(tasks)
        while running:
            index, item = await queue.get()
            if isinstance(item, Exception):
                raise item
            if item is None:
                running -= 1
            else:
                yield index, item
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
