"""The engine: messages in, steps of the executor, one message per client out.

    run_ahead 0:  schedule 1  launch 1  collect 1 | schedule 2  launch 2  collect 2 | ...
    run_ahead 1:  schedule 1  launch 1 | schedule 2  launch 2  collect 1 | schedule 3  launch 3  collect 2 | ...

With run-ahead a step is scheduled before the last one's tokens are known: every row that samples is taken to gain one
token, which feeds forward on the device. If a row turns out to have ended, its part of the later step is dropped.
Where an answer must have a shape, the step's last part, sampling, starts behind the last one's collect: its masks need
those tokens (`octavo.engine.shapes`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

import msgspec

from octavo.config import CacheConfig, SchedulerConfig
from octavo.engine.messages import (
    Abort,
    Control,
    Deltas,
    Done,
    Failure,
    Finish,
    Inbound,
    ResetPrefixCache,
    Stats,
    Submit,
)
from octavo.engine.scheduler import Launched, Scheduler
from octavo.engine.shapes import Grammars, failure_of
from octavo.engine.standstill import ExecutorSource, Standstill
from octavo.errors import EngineError, RequestError
from octavo.plugin.contracts import MaskingExecutor, ModelExecutor
from octavo.plugin.data import ScheduleLimits
from octavo.speculate.drafting import Drafting


class EngineLoop:
    """One engine. Not thread-safe: one thread calls `receive` and `step`."""

    def __init__(
        self,
        executor: ModelExecutor,
        *,
        cache: CacheConfig,
        scheduler: SchedulerConfig,
        limits: ScheduleLimits,
        max_model_len: int,
        run_ahead: int,
        source: ExecutorSource | None = None,
        check_extra_args: Callable[[dict[str, Any]], None] | None = None,
        grammars: Grammars | None = None,
        drafting: Drafting | None = None,
    ) -> None:
        """source: makes the executor again when the engine wakes up; None: it cannot sleep.
        check_extra_args: raises RequestError for what the executor's logits processors do not take.
        grammars: gives answers their shapes; None: requests that want one are refused.
        drafting: guesses tokens behind the last known one, so that nothing can run ahead; None: a token a step."""
        assert run_ahead in (0, 1), f"run_ahead is 0 or 1, not {run_ahead}"
        assert not (drafting and run_ahead), "drafts need the last step's tokens"
        self._executor: ModelExecutor | None = executor
        self._run_ahead = run_ahead
        self._still = Standstill(source)
        self._check_extra_args = check_extra_args
        self._in_flight: deque[Launched] = deque()
        self._scheduler = Scheduler(
            executor.kv_groups,
            cache=cache,
            scheduler=scheduler,
            limits=limits,
            max_model_len=max_model_len,
            grammars=grammars if isinstance(executor, MaskingExecutor) else None,
            drafting=drafting,
        )

    def warm(self) -> None:
        """Begin to load what only some requests need, so that the first of them need not wait for it. Never waits."""
        self._scheduler.shapes.warm()

    def receive(self, message: Inbound) -> None:
        """Take in one message. A request that cannot be served becomes a Failure in the next step's deltas.

        Shutdown is the caller's business: it stops calling `step`.
        """
        scheduler = self._scheduler
        if isinstance(message, Submit) and self._still.refuses:
            text = "the engine is asleep, or about to be: wake it up, or try again later"
            scheduler.outbox.failure(message.client, Failure(handle=message.handle, message=text, asleep=True))
        elif isinstance(message, Submit) and self._still.holds:
            self._still.hold(message)
        elif isinstance(message, Submit):
            try:
                extra_args = message.params.extra_args
                if extra_args and self._check_extra_args is not None:
                    self._check_extra_args(extra_args)
                if message.params.structured_outputs is not None:
                    scheduler.shapes.prepare(message)
                else:
                    scheduler.roster.enter(message)
            except (RequestError, EngineError) as error:
                scheduler.outbox.failure(message.client, failure_of(message, error))
        elif isinstance(message, Abort):
            scheduler.shapes.abort(message, scheduler.outbox)
            for handle in message.handles:
                if not self._still.drop(message.client, handle):
                    scheduler.abort(message.client, handle, Finish.STOP if message.finished else Finish.ABORT)
        elif isinstance(message, ResetPrefixCache):
            scheduler.roster.kv.forget_unused()
        elif isinstance(message, Control):
            self._still.ask(message)

    def step(self) -> dict[int, Deltas]:
        """Launch the next step, collect the oldest, and return one message for each client that has news.

        What the executor raises goes through; `fail_all` then ends all requests and leaves the loop usable.
        """
        scheduler, in_flight = self._scheduler, self._in_flight
        self._obey()
        if scheduler.shapes and not self._still.frozen:
            scheduler.shapes.attend(scheduler.roster, scheduler.outbox, idle=not (in_flight or scheduler.roster.live))
        launched = None if self._still.frozen else scheduler.schedule(in_flight=bool(in_flight))
        if launched is not None:
            assert self._executor is not None, "a sleeping engine has no sequences"
            self._executor.launch(launched.batch)
            in_flight.append(launched)
        masked = launched if launched is not None and launched.batch.masked else None
        if masked is not None and len(in_flight) == 1:
            self._mask(masked)
            masked = None
        if in_flight and (launched is None or len(in_flight) > self._run_ahead):
            self._collect()
        else:
            idle = self._still.frozen or not scheduler.roster.live
            assert in_flight or idle, "live sequences, but nothing to schedule"
        if masked is not None:
            self._mask(masked)
        if not scheduler.outbox:
            return {}
        return scheduler.outbox.publish(scheduler.step, self.stats)

    def take_done(self) -> list[tuple[int, Done]]:
        """(client, answer) of controls that have been obeyed since the last call."""
        return self._still.take_done()

    def fail_all(self, message: str) -> dict[int, Deltas]:
        """End every request as failed through no fault of its own, after `step` raised."""
        self._in_flight.clear()
        self._scheduler.fail_all(message)
        return self._scheduler.outbox.publish(self._scheduler.step, self.stats)

    def check(self) -> None:
        """Raise if the executor can serve no more: one that has lost a rank says so (`RankedExecutor.check`)."""
        check = getattr(self._executor, "check", None)
        if check is not None:
            check()

    def close(self) -> None:
        """Free what the executor holds; nothing else may be called afterwards."""
        self._scheduler.shapes.close()
        if self._executor is not None:
            self._executor.close()

    @property
    def has_work(self) -> bool:
        """Whether `step` has something to do."""
        scheduler, still = self._scheduler, self._still
        live = (scheduler.roster.live or scheduler.shapes.num_preparing) and not still.frozen
        return bool(self._in_flight or live or scheduler.outbox or still.has_work)

    @property
    def stats(self) -> Stats:
        stats, still = self._scheduler.stats, self._still
        if not (still.sleep_level or still.frozen):
            return stats
        return msgspec.structs.replace(stats, sleep_level=still.sleep_level, paused=still.frozen)

    def _obey(self) -> None:
        """Pause, sleep and so on, where it was asked for and requests allow it."""
        if not self._still.has_work:
            return
        was_awake = self._executor is not None
        self._executor = self._still.obey(self._executor, self._scheduler, in_flight=bool(self._in_flight))
        if was_awake and self._executor is None:
            self._still.release()
        for submit in self._still.take_held():
            self.receive(submit)

    def _mask(self, launched: Launched) -> None:
        """Let a masked step sample."""
        assert isinstance(self._executor, MaskingExecutor)
        self._executor.mask(self._scheduler.masks(launched))

    def _collect(self) -> None:
        launched = self._in_flight.popleft()
        assert self._executor is not None
        result = self._executor.collect()
        while result.step < launched.batch.step:  # left over from before a failure
            result = self._executor.collect()
        self._scheduler.update(launched, result)
