"""The grammar process: compiles grammars, follows answers and makes masks, away from the engine's own Python.

    engine ── Open ──> try it in a forked child ──> compile on a thread ──> Ready | Refused
           ── Fill ──> take tokens, make masks ──> Filled

Libraries hold the interpreter's lock for up to a second when they read a vocabulary, and may crash: neither touches
the engine here. Started by `octavo.structured.client`: as soon as a server is ready, or by the first request that needs
it; ends with the engine.
"""

from __future__ import annotations

import contextlib
import os
import queue
import signal
import sys
import threading
import time
from collections import OrderedDict, deque
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait

import numpy as np

from octavo.errors import OctavoError, RequestError
from octavo.structured.answer import ShapedAnswer, State
from octavo.structured.attempt import Attempt, Verdict
from octavo.structured.compile import Library, compile_spec
from octavo.structured.matcher import Compiled, MatchError
from octavo.structured.messages import (
    Ask,
    Broken,
    Close,
    Fill,
    Filled,
    FromProcess,
    Hello,
    Open,
    Ready,
    Refused,
    Started,
    decode_to_process,
    encode,
)
from octavo.structured.spec import StructuredOutputs

MAX_ATTEMPTS = 2
"""Children that try grammars at once."""
MAX_REFUSALS = 1024
SLOW_S = 0.2
"""CPU time of one mask after which an answer is given up: all others in its step wait for it."""
NUM_THREADS = min(8, os.cpu_count() or 1)


@dataclass
class Job:
    """A spec that is not compiled yet, and the answers that wait for it."""

    spec: StructuredOutputs
    waiting: list[Open] = field(default_factory=list)
    started: float = field(default_factory=time.monotonic)


class GrammarServer:
    """Answers messages. `libraries`: by backend; `num_tokens`: of the model's logits."""

    def __init__(
        self,
        connection: Connection,
        libraries: dict[str, Library],
        *,
        num_tokens: int,
        timeout: float,
        cache_bytes: int,
    ) -> None:
        self._connection = connection
        self._libraries = libraries
        self._num_tokens = num_tokens
        self._timeout = timeout
        self._cache_bytes = cache_bytes
        self._cache: OrderedDict[bytes, Compiled] = OrderedDict()
        self._refused: OrderedDict[bytes, Verdict] = OrderedDict()
        self._jobs: dict[bytes, Job] = {}
        self._todo: deque[bytes] = deque()
        self._attempts: dict[bytes, Attempt] = {}
        self._compiling: bytes | None = None
        self._passed: deque[bytes] = deque()
        self._results: queue.SimpleQueue[Compiled | Verdict] = queue.SimpleQueue()
        self._woken, self._wake = os.pipe()
        self._answers: dict[int, ShapedAnswer] = {}
        self._threads = ThreadPoolExecutor(NUM_THREADS) if NUM_THREADS > 2 else None

    def serve(self) -> None:
        """Until the engine is gone."""
        self._send(Started())
        while True:
            self._begin()
            deadline = min((attempt.deadline for attempt in self._attempts.values()), default=None)
            timeout = None if deadline is None else max(0.0, deadline - time.monotonic())
            ready = wait([self._connection, self._woken, *(each.pipe for each in self._attempts.values())], timeout)
            if self._connection in ready:
                try:
                    self._handle(self._connection.recv_bytes())
                except (EOFError, OSError):
                    return
            if self._woken in ready:
                os.read(self._woken, 1)
                self._compiled()
            now = time.monotonic()
            for key, attempt in list(self._attempts.items()):
                if attempt.pipe in ready or now >= attempt.deadline:
                    del self._attempts[key]
                    self._tried(key, attempt.finish())

    def stop(self) -> None:
        """Kill what still tries grammars."""
        for attempt in self._attempts.values():
            attempt.finish()

    def _send(self, message: FromProcess) -> None:
        self._connection.send_bytes(encode(message))

    def _handle(self, data: bytes) -> None:
        message = decode_to_process(data)
        if isinstance(message, Fill):
            self._fill(message)
        elif isinstance(message, Open):
            self._open(message)
        elif isinstance(message, Close):
            gone = set(message.numbers)
            for number in gone:
                self._answers.pop(number, None)
            for job in self._jobs.values():
                job.waiting = [one for one in job.waiting if one.number not in gone]

    # ---- compiling ---------------------------------------------------------------------------------------------

    def _open(self, message: Open) -> None:
        key = encode(message.spec)
        if (verdict := self._refused.get(key)) is not None:
            self._refuse(message, verdict)
        elif (compiled := self._cache.get(key)) is not None:
            self._cache.move_to_end(key)
            self._ready(message, compiled, 0.0)
        else:
            if key not in self._jobs:
                self._jobs[key] = Job(message.spec)
                self._todo.append(key)
            self._jobs[key].waiting.append(message)

    def _begin(self) -> None:
        """Start what can be started. No fork while a library runs on the thread: the child could inherit its locks."""
        if self._compiling is None and self._passed:
            self._compiling = self._passed.popleft()
            threading.Thread(target=self._compile, args=(self._jobs[self._compiling].spec,), daemon=True).start()
        while self._compiling is None and self._todo and len(self._attempts) < MAX_ATTEMPTS:
            key = self._todo.popleft()
            job = self._jobs[key]
            if not job.waiting:
                del self._jobs[key]  # all who wanted it have gone
                continue
            what = f"structured_outputs.{job.spec.kind}"
            self._attempts[key] = Attempt(lambda spec=job.spec: self._try(spec), self._timeout, what)  # type: ignore[misc]

    def _try(self, spec: StructuredOutputs) -> None:
        """In the child: compile, and make the first mask."""
        answer = ShapedAnswer(compile_spec(spec, self._libraries).matcher(), num_tokens=self._num_tokens, ends=())
        try:
            answer.masks(self._rows(1), may_end=True)
        except MatchError as error:
            raise RequestError(f"{spec.kind}: {error}", field=f"structured_outputs.{spec.kind}") from None

    def _tried(self, key: bytes, verdict: Verdict) -> None:
        if not verdict.message:
            self._passed.append(key)
            return
        self._refused[key] = verdict
        if len(self._refused) > MAX_REFUSALS:
            self._refused.popitem(last=False)
        for message in self._jobs.pop(key).waiting:
            self._refuse(message, verdict)

    def _compile(self, spec: StructuredOutputs) -> None:
        """On the thread; libraries leave the interpreter to others meanwhile."""
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 10)
        try:
            self._results.put(compile_spec(spec, self._libraries))
        except Exception as error:  # it compiled in the child a moment ago
            self._results.put(Verdict(f"the grammar cannot be compiled: {error}"))
        os.write(self._wake, b"\0")

    def _compiled(self) -> None:
        key, self._compiling = self._compiling, None
        assert key is not None
        job, result = self._jobs.pop(key), self._results.get()
        if isinstance(result, Verdict):
            for message in job.waiting:
                self._refuse(message, result)
            return
        self._cache[key] = result
        while len(self._cache) > 1 and sum(each.size for each in self._cache.values()) > self._cache_bytes:
            self._cache.popitem(last=False)
        for message in job.waiting:
            self._ready(message, result, time.monotonic() - job.started)

    def _ready(self, message: Open, compiled: Compiled, seconds: float) -> None:
        self._answers[message.number] = ShapedAnswer(
            compiled.matcher(), num_tokens=self._num_tokens, ends=message.ends, after=message.after
        )
        self._send(Ready(number=message.number, backend=compiled.backend, seconds=seconds))

    def _refuse(self, message: Open, verdict: Verdict) -> None:
        self._send(Refused(number=message.number, message=verdict.message, field=verdict.field))

    # ---- masks -------------------------------------------------------------------------------------------------

    def _rows(self, count: int) -> np.ndarray[tuple[int, ...], np.dtype[np.int32]]:
        return np.empty((count, (self._num_tokens + 31) // 32), np.int32)

    def _fill(self, message: Fill) -> None:
        run = self._threads.map if self._threads is not None and len(message.asks) > 3 else map
        states, words, errors = bytearray(), [], {}
        for ask, result in zip(message.asks, run(self._masks, message.asks), strict=True):
            if isinstance(result, str):
                errors[ask.number] = result
                continue
            states += bytes(result[0])
            words += [row for row, state in zip(result[1], result[0], strict=True) if state is State.MASKED]
        self._send(Filled(states=bytes(states), words=b"".join(row.tobytes() for row in words), errors=errors))

    def _masks(self, ask: Ask) -> tuple[list[State], np.ndarray[tuple[int, ...], np.dtype[np.int32]]] | str:
        answer = self._answers.get(ask.number)
        if answer is None:
            return "its grammar was lost"
        rows = self._rows(1 + len(ask.drafts))
        began = time.thread_time()
        try:
            answer.accept(ask.tokens)
            states = answer.masks(rows, may_end=ask.may_end, drafts=ask.drafts)
        except (MatchError, RuntimeError, ValueError) as error:
            return f"the answer cannot follow its grammar any further: {error}"
        if time.thread_time() - began > SLOW_S * (1 + len(ask.drafts)):
            return f"the grammar takes more than {SLOW_S:g} s a token to follow: make it simpler"
        return states, rows


def main() -> None:
    """Serve the connection whose file descriptor is the only argument."""
    connection = Connection(int(sys.argv[1]))
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # the engine decides when this ends
    hello = decode_to_process(connection.recv_bytes())
    assert isinstance(hello, Hello)
    with contextlib.suppress(ConnectionError):  # the engine has gone while this loaded
        try:
            server = _build(hello, connection)
        except (OctavoError, ImportError) as error:
            connection.send_bytes(encode(Broken(f"{type(error).__name__}: {error}")))
            return
        try:
            server.serve()
        finally:
            server.stop()


def _build(hello: Hello, connection: Connection) -> GrammarServer:
    from octavo.structured.guidance_backend import Guidance
    from octavo.structured.vocabulary import read_vocabulary
    from octavo.structured.xgrammar_backend import XGrammar
    from octavo.tokenizer import load_tokenizer

    tokenizer = load_tokenizer(hello.tokenizer, revision=hello.revision, trust_remote_code=hello.trust_remote_code)
    vocabulary = read_vocabulary(tokenizer, vocab_size=hello.vocab_size, ends=hello.ends)
    libraries: dict[str, Library] = {
        "xgrammar": XGrammar(vocabulary),
        "guidance": Guidance(vocabulary, lambda text: tokenizer.encode(text, add_special_tokens=False)),
    }
    return GrammarServer(
        connection,
        libraries,
        num_tokens=hello.vocab_size,
        timeout=hello.timeout,
        cache_bytes=hello.cache_bytes,
    )


if __name__ == "__main__":
    main()
