"""The synchronous heart of the API side: requests in, `Submit`s out; `Deltas` in, each request's news out.

`LLM` and `EngineClient` both drive this; neither threads nor sockets nor clocks are known here.
A request has n answers; the engine sees n sequences, each under its own handle (an integer never used twice).
"""

from __future__ import annotations

import functools
import hashlib
import random
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from octavo.engine.door import Door, Prepared
from octavo.engine.info import ModelInfo
from octavo.engine.logprobs import entries
from octavo.engine.messages import Abort, Deltas, Failure, Finish, Inbound, LogprobBlock, Submit, int32, int64
from octavo.engine.output import Answer
from octavo.errors import EngineAsleepError, EngineError, RequestError
from octavo.outputs import CompletionOutput, Logprob, RequestOutput

if TYPE_CHECKING:
    from octavo.tokenizer import Tokenizer

Item = RequestOutput | Exception
"""News of a request: a delta, or the error that ended it."""

FINISHES = {int(finish): finish for finish in Finish}


class Request:
    """A live request: its prompt and the state of its answers. Compared by identity."""

    def __init__(self, prepared: Prepared, *, request_id: str, first: Submit, answers: list[Answer]) -> None:
        """`first` is the message for the first answer; the others' differ in handle and seed."""
        self.request_id = request_id
        self.prepared = prepared
        self.params = prepared.params
        self.answers = answers
        self.handles = range(first.handle, first.handle + len(answers))
        self.ended = False
        self._num_open = len(answers)
        self.num_cached_tokens = 0
        self.arrived_at = 0.0
        self.admitted_at: float | None = None
        self.first_token_at: float | None = None
        self._first = first
        self._held: list[CompletionOutput] = []
        self._prompt_logprobs: list[dict[int, Logprob] | None] | None = None
        self._num_prompt_logprobs_missing = 0
        if prepared.params.prompt_logprobs is not None:
            self._prompt_logprobs = [None] * len(prepared.token_ids)
            self._num_prompt_logprobs_missing = len(prepared.token_ids) - 1

    def submits(self) -> Iterator[Submit]:
        """The message for each answer. Only the first computes the prompt's logprobs: they are the same for all."""
        first = self._first
        yield first
        params = first.params
        if params.prompt_logprobs is not None:
            params = msgspec.structs.replace(params, prompt_logprobs=None)
        changes = {"params": params, "leader": first.handle}
        for index, handle in enumerate(self.handles[1:], start=1):
            seed = derive_seed(first.seed, index)
            yield msgspec.structs.replace(first, handle=handle, seed=seed, **changes)

    def add_prompt_logprobs(self, block: LogprobBlock, token_text: Callable[[int], str] | None) -> None:
        """Place one chunk's entries. A chunk may come twice (recompute after preemption)."""
        if self._prompt_logprobs is None:
            return
        for position, entry in enumerate(entries(block, token_text), start=block.start):
            if 0 < position < len(self._prompt_logprobs):
                self._num_prompt_logprobs_missing -= self._prompt_logprobs[position] is None
                self._prompt_logprobs[position] = entry

    def news(self, outputs: list[CompletionOutput]) -> RequestOutput | None:
        """A delta with these outputs, or None while they must wait for the prompt's logprobs, which come first."""
        for output in outputs:
            self._num_open -= output.finish_reason is not None
        self.ended = not self._num_open
        self._held += outputs
        if self._num_prompt_logprobs_missing > 0 and not self.ended:
            return None
        outputs, self._held = self._held, []
        prompt_logprobs, self._prompt_logprobs = self._prompt_logprobs, None
        self._num_prompt_logprobs_missing = 0
        return RequestOutput(
            request_id=self.request_id,
            prompt=self.prepared.text,
            prompt_token_ids=self.prepared.token_ids,
            outputs=outputs,
            finished=self.ended,
            prompt_logprobs=prompt_logprobs,
            num_cached_tokens=self.num_cached_tokens,
        )


class Frontend:
    """All live requests of one client of one engine.

    seed: draws the seeds of requests that have none; None draws them from the system's entropy, so that two
    processes never give the same samples by chance.
    """

    def __init__(
        self, tokenizer: Tokenizer | None, info: ModelInfo, *, client: int = 0, seed: int | None = None
    ) -> None:
        if tokenizer is not None:
            info = info.with_eos(tokenizer.eos_token_ids)
        self.door = Door(tokenizer, info)
        self._tokenizer = tokenizer
        self._info = info
        self._client = client
        self._random = random.SystemRandom() if seed is None else random.Random(seed)
        self._next_handle = 1
        # Logprobs name the same tokens over and over; their texts are worked out once.
        self._token_text = None if tokenizer is None else functools.cache(tokenizer.token_text)
        self._live: dict[int, tuple[Request, Answer]] = {}

    def add(self, prepared: Prepared, *, request_id: str, lora: int = 0) -> Request:
        """Register a request; its `submits()` go to the engine."""
        params = prepared.params
        first = Submit(
            handle=self._next_handle,
            client=self._client,
            tokens=np.asarray(prepared.token_ids, dtype="<i4").tobytes(),
            params=prepared.engine_params,
            max_tokens=prepared.max_tokens,
            seed=self._random.getrandbits(63) if params.seed is None else params.seed,
            eos=prepared.eos,
            priority=prepared.priority,
            lora=lora,
            salt=prepared.salt,
        )
        answers = [
            Answer(
                index=index,
                params=params,
                tokenizer=self._tokenizer,
                token_text=self._token_text,
                prompt_ids=prepared.token_ids,
                silent_stops=() if params.ignore_eos else self._info.eos_token_ids,
            )
            for index in range(params.n)
        ]
        request = Request(prepared, request_id=request_id, first=first, answers=answers)
        self._next_handle += params.n
        self._live.update(zip(request.handles, ((request, answer) for answer in request.answers), strict=True))
        return request

    def process(self, deltas: Deltas) -> tuple[list[tuple[Request, Item]], list[Inbound]]:
        """The news of every request that a step touched, and messages that the engine must get in turn.

        Handles that are not live any more are skipped: the engine learns of an abort or a stop string a step late.
        """
        live = self._live
        items: list[tuple[Request, Item]] = []
        stopped: list[int] = []
        dropped: list[int] = []
        touched: dict[Request, list[CompletionOutput]] = {}
        for handle, when in deltas.admitted:
            if handle in live and live[handle][0].admitted_at is None:
                live[handle][0].admitted_at = when
        for failure in deltas.failures:
            if failure.handle in self._live:
                request = self._live.pop(failure.handle)[0]
                dropped += self._drop(request)
                items.append((request, error_of(failure)))
        blocks = self._take_logprobs(deltas)
        offset = 0
        tokens = int32(deltas.tokens).tolist()
        for handle, count, finish, cached in zip(
            int64(deltas.handles).tolist(),
            int32(deltas.counts).tolist(),
            np.frombuffer(deltas.finish, dtype=np.int8).tolist(),
            int32(deltas.cached).tolist(),
            strict=True,
        ):
            new = tokens[offset : offset + count]
            offset += count
            if handle not in live:
                continue
            request, answer = live[handle]
            try:
                output = answer.push(new, FINISHES[finish], blocks.get(handle))
            except Exception as error:  # whatever the tokenizer could not digest ends this request only
                touched.pop(request, None)
                dropped += self._drop(request)
                failed = EngineError(f"the answer cannot be turned into text: {type(error).__name__}: {error}")
                failed.__cause__ = error
                items.append((request, failed))
                continue
            if cached > request.num_cached_tokens:
                request.num_cached_tokens = cached
            if answer.finished:
                del live[handle]
                if not finish:
                    stopped.append(handle)
            if request in touched:
                touched[request].append(output)
            else:
                touched[request] = [output]
        for request, outputs in touched.items():
            news = request.news(outputs)
            if news is not None:
                items.append((request, news))
        return items, self._aborts(stopped, finished=True) + self._aborts(dropped, finished=False)

    def abort(self, request: Request) -> tuple[Abort, RequestOutput]:
        """End a live request: the message for the engine, and the last delta for whoever still reads."""
        outputs = [answer.end("abort") for answer in request.answers if not answer.finished]
        handles = self._drop(request)
        last = request.news(outputs)
        assert last is not None, "all answers have ended, so nothing is held back"
        return Abort(client=self._client, handles=tuple(handles)), last

    def drop_all(self) -> list[Request]:
        """Forget every live request (the engine is gone) and return them."""
        requests = list(dict.fromkeys(request for request, _ in self._live.values()))
        for request in requests:
            self._drop(request)
        return requests

    def _drop(self, request: Request) -> list[int]:
        request.ended = True
        return [handle for handle in request.handles if self._live.pop(handle, None) is not None]

    def _aborts(self, handles: list[int], *, finished: bool) -> list[Inbound]:
        return [Abort(client=self._client, handles=tuple(handles), finished=finished)] if handles else []

    def _take_logprobs(self, deltas: Deltas) -> dict[int, LogprobBlock]:
        """Prompt blocks go to their requests; the others are returned by handle."""
        blocks = {}
        for block in deltas.logprobs:
            if not block.prompt:
                blocks[block.handle] = block
            elif block.handle in self._live:
                self._live[block.handle][0].add_prompt_logprobs(block, self._token_text)
        return blocks


def derive_seed(seed: int, index: int) -> int:
    """The seed of a request's index-th answer: the first keeps the seed, the others get their own from it."""
    if index == 0:
        return seed
    digest = hashlib.blake2b(f"{seed}/{index}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def error_of(failure: Failure) -> Exception:
    """The exception that a failed sequence raises for its reader."""
    if failure.asleep:
        return EngineAsleepError(failure.message)
    if failure.client_error:
        return RequestError(failure.message, field=failure.field)
    return EngineError(failure.message)
