"""The engine's side of the grammar process: start it ahead or when first needed, ask it, notice when it is gone."""

from __future__ import annotations

import logging
import os
import socket
import subprocess
import sys
import time
from collections import deque
from collections.abc import Sequence
from multiprocessing.connection import Connection

import msgspec
import numpy as np

from octavo.config import ModelConfig, StructuredConfig
from octavo.engine.shapes import Allowed, News, Want
from octavo.plugin.step import Ints
from octavo.structured.answer import State
from octavo.structured.messages import (
    Ask,
    Broken,
    Close,
    Fill,
    Filled,
    Hello,
    Open,
    Ready,
    Refused,
    Started,
    decode_from_process,
    encode,
)
from octavo.structured.spec import StructuredOutputs

log = logging.getLogger("octavo.structured")

MAX_OPEN = 32
"""Specs sent whose outcome is not known. More could fill the pipe both ways: then each end would wait for the other."""
REPLY_S = 30.0
"""A process that gives no masks for so long is killed: steps wait for it."""


class GrammarProcess:
    """Implements `octavo.engine.shapes.Grammars`. source: where the tokenizer is."""

    def __init__(
        self, source: str, model: ModelConfig, config: StructuredConfig, *, vocab_size: int, ends: Sequence[int]
    ) -> None:
        self._hello = Hello(
            tokenizer=source,
            revision=model.revision,
            trust_remote_code=model.trust_remote_code,
            vocab_size=vocab_size,
            ends=tuple(ends),
            timeout=config.structured_outputs_timeout,
            cache_bytes=config.structured_outputs_cache_bytes,
        )
        self._config = config
        self._num_words = (vocab_size + 31) // 32
        self._process: subprocess.Popen[bytes] | None = None
        self._connection: Connection | None = None
        self._serves = False
        self._held: deque[Open] = deque()
        self._sent: set[int] = set()
        self._preparing: set[int] = set()
        self._news: deque[News] = deque()

    def warm(self) -> None:
        if self._process is None:
            self._start()

    def open(self, number: int, spec: StructuredOutputs, *, ends: Sequence[int], after: Sequence[int]) -> None:
        if not self._preparing:
            self._receive(0.0)  # a process that nobody listened to may have ended since
        self.warm()
        spec = self._with_defaults(spec)
        self._preparing.add(number)
        self._held.append(Open(number=number, spec=spec, ends=tuple(ends), after=tuple(after)))
        self._send_held()

    def news(self, timeout: float) -> list[News]:
        self._receive(timeout)
        found = list(self._news)
        self._news.clear()
        return found

    def masks(self, wants: Sequence[Want]) -> Allowed:
        asks = tuple(Ask(want.number, tuple(want.tokens), want.may_end, tuple(want.drafts)) for want in wants)
        self._send(Fill(asks))
        deadline = time.monotonic() + REPLY_S
        while self._connection is not None:
            filled = self._receive(max(0.0, deadline - time.monotonic()))
            if filled is not None:
                return self._unpack(wants, filled)
            if time.monotonic() >= deadline:
                self._lose(f"it gave no masks for {REPLY_S:g} s")
        lost = "the grammar process has ended; send the request again"
        return Allowed(done=[], words=[], errors={want.number: lost for want in wants})

    def forget(self, numbers: Sequence[int]) -> None:
        gone = set(numbers)
        self._preparing -= gone
        self._sent -= gone
        self._held = deque(message for message in self._held if message.number not in gone)
        if self._serves:
            self._send(Close(tuple(numbers)))
        self._send_held()

    def close(self) -> None:
        if self._process is not None:
            self._end()

    def _with_defaults(self, spec: StructuredOutputs) -> StructuredOutputs:
        """The spec with what the operator chose where it says nothing."""
        config = self._config
        compact = config.structured_outputs_disable_any_whitespace and spec.whitespace_pattern is None
        return msgspec.structs.replace(
            spec,
            backend=config.structured_outputs_backend if spec.backend == "auto" else spec.backend,
            disable_any_whitespace=spec.disable_any_whitespace or (compact and spec.structural_tag is None),
            disable_additional_properties=spec.disable_additional_properties
            or config.structured_outputs_disable_additional_properties,
        )

    def _start(self) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            number = theirs.fileno()
            command = [sys.executable, "-m", "octavo.structured.process", str(number)]
            # No module of the user's is run again, as multiprocessing would.
            self._process = subprocess.Popen(
                command, pass_fds=(number,), stdin=subprocess.DEVNULL, env={**os.environ, "OMP_NUM_THREADS": "1"}
            )
        self._connection = Connection(ours.detach())
        log.info("starting the grammar process")
        self._send(self._hello)

    def _send_held(self) -> None:
        """Send specs that the process has room for. While it reads its vocabulary it takes none, and the engine must
        not wait for it."""
        while self._serves and self._held and len(self._sent) < MAX_OPEN:
            message = self._held.popleft()
            self._sent.add(message.number)
            self._send(message)

    def _send(self, message: Hello | Open | Fill | Close) -> None:
        if self._connection is None:
            return
        try:
            self._connection.send_bytes(encode(message))
        except OSError:
            self._lose("")

    def _receive(self, timeout: float) -> Filled | None:
        """Take in what has come, waiting for at most `timeout` seconds for the first of it; stops at masks."""
        while self._connection is not None:
            try:
                if not self._connection.poll(timeout):
                    return None
                message = decode_from_process(self._connection.recv_bytes())
            except (EOFError, OSError):
                self._lose("")
                return None
            if isinstance(message, Filled):
                return message
            timeout = 0.0
            if isinstance(message, Started):
                self._serves = True
                self._send_held()
            elif isinstance(message, Ready):
                self._tell(News(number=message.number, backend=message.backend, seconds=message.seconds))
            elif isinstance(message, Refused):
                self._tell(News(number=message.number, error=message.message, field=message.field))
            elif isinstance(message, Broken):
                self._lose(message.message)
        return None

    def _tell(self, news: News) -> None:
        self._sent.discard(news.number)
        self._send_held()
        if news.number in self._preparing:
            self._preparing.discard(news.number)
            self._news.append(news)

    def _lose(self, reason: str) -> None:
        """The process is of no use any more: what waits for it fails, and the next request starts another."""
        code = self._end()
        reason = reason or f"it has ended with exit code {code}"
        log.error("the grammar process is lost: %s", reason)
        for number in sorted(self._preparing):
            self._news.append(News(number=number, error=f"structured outputs cannot be served: {reason}"))
        self._preparing.clear()

    def _end(self) -> int:
        assert self._process is not None
        assert self._connection is not None
        self._connection.close()
        self._process.kill()
        code = self._process.wait()
        self._process = self._connection = None
        self._serves = False
        self._held.clear()
        self._sent.clear()
        return code

    def _unpack(self, wants: Sequence[Want], filled: Filled) -> Allowed:
        words = np.frombuffer(filled.words, "<i4").reshape(-1, self._num_words)
        rows, codes = iter(words), iter(filled.states)
        done: list[bool] = []
        masks: list[Ints | None] = []
        for want in wants:
            if want.number in filled.errors:
                continue
            for _ in range(1 + len(want.drafts)):
                state = State(next(codes))
                done.append(state is State.DONE)
                masks.append(next(rows) if state is State.MASKED else None)
        return Allowed(done=done, words=masks, errors=filled.errors)
