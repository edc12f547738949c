"""When the engine stands still: paused, or asleep with its memory given back.

             pause                      sleep
  running ----------> paused        running ----------> asleep (executor closed, weights and KV gone)
          <----------                       <----------
             resume                    wake_up: the executor is built again, of the same size

Both wait for the running requests, or abort them first. What comes while the engine is paused is held and served
after `resume`; while it is asleep, or falling asleep, it is refused. `pause` with mode "keep" freezes requests as they
are.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Protocol

from octavo.engine.messages import Control, Done, Submit
from octavo.engine.scheduler import Scheduler
from octavo.errors import EngineError, OctavoError
from octavo.plugin.contracts import ModelExecutor


class ExecutorSource(Protocol):
    """Makes the executor of an engine that wakes up."""

    def release(self, level: int) -> None:
        """Give back what is left of a closed executor. Level 1 keeps the weights at hand in host memory, 2 does not."""

    def build(self) -> ModelExecutor:
        """A new executor with KV groups of the same sizes. Raises OctavoError."""


class Standstill:
    """Controls that wait to be obeyed, and what they have brought about."""

    def __init__(self, source: ExecutorSource | None) -> None:
        self._source = source
        self._controls: deque[Control] = deque()
        self._done: list[tuple[int, Done]] = []
        self._held: dict[tuple[int, int], Submit] = {}
        self.holds = False
        """New requests wait outside of the scheduler."""
        self.refuses = False
        """New requests are turned away: the engine sleeps, or is about to."""
        self.frozen = False
        """Nothing is scheduled."""
        self.sleep_level = 0
        """0 while awake."""

    @property
    def has_work(self) -> bool:
        return bool(self._controls)

    def ask(self, control: Control) -> None:
        """Take in a control. What comes behind it is held or refused at once, even if running requests go on."""
        self._controls.append(control)
        self.holds |= control.action == "pause"
        self.refuses |= control.action == "sleep"

    def hold(self, submit: Submit) -> None:
        self._held[submit.client, submit.handle] = submit

    def drop(self, client: int, handle: int) -> bool:
        """Forget a held request; False if it is not held."""
        return self._held.pop((client, handle), None) is not None

    def take_held(self) -> Iterator[Submit]:
        """Requests that may go on now."""
        while self._held and not self.holds:
            yield self._held.pop(next(iter(self._held)))

    def take_done(self) -> list[tuple[int, Done]]:
        """(client, answer) of controls that have been obeyed."""
        done, self._done = self._done, []
        return done

    def obey(self, executor: ModelExecutor | None, scheduler: Scheduler, *, in_flight: bool) -> ModelExecutor | None:
        """Do what can be done now of what was asked for, in order. Returns the executor, None for a sleeping engine."""
        while self._controls:
            control = self._controls[0]
            error = ""
            try:
                if not self._begin(control, scheduler, in_flight=in_flight):
                    break
                if control.action == "sleep" and executor is not None:
                    executor.close()
                    executor = None
                    scheduler.forget_memory()
                    self.sleep_level = control.level
                elif control.action == "wake_up" and executor is None:
                    executor = self._wake_up(scheduler)
            except OctavoError as failure:
                error = str(failure)
                self.refuses = self.sleep_level > 0
            self._controls.popleft()
            self._done.append((control.client, Done(ticket=control.ticket, error=error)))
        return executor

    def _begin(self, control: Control, scheduler: Scheduler, *, in_flight: bool) -> bool:
        """Change what is let in and scheduled. False: requests have to end first."""
        roster = scheduler.roster
        idle = not (in_flight or roster.live or roster.leaving or scheduler.shapes.num_preparing)
        if control.action == "resume":
            if self.sleep_level:
                raise EngineError("the engine is asleep: wake it up instead")
            self.holds = self.frozen = False
        elif control.action == "pause":
            self.holds = True
            if control.mode == "keep":
                self.frozen = True
                return not in_flight
            if control.mode == "abort":
                scheduler.abort_all()
            self.frozen = idle
            return idle
        elif control.action == "sleep":
            if self._source is None:
                raise EngineError("this engine cannot sleep: nothing could build its executor again")
            if self.frozen and scheduler.roster.live:
                raise EngineError("the engine is paused in the middle of requests: resume or abort them first")
            self.refuses = True
            if control.mode == "abort":
                scheduler.abort_all()
            return idle
        return True

    def _wake_up(self, scheduler: Scheduler) -> ModelExecutor:
        assert self._source is not None
        executor = self._source.build()
        sizes = [(group.block_size, group.num_blocks) for group in executor.kv_groups]
        if sizes != scheduler.kv_sizes:
            executor.close()
            raise EngineError(
                f"the executor came back with KV memory of {sizes} blocks instead of {scheduler.kv_sizes}"
            )
        self.sleep_level = 0
        self.refuses = False
        return executor

    def release(self) -> None:
        """Give back memory of the executor that was closed. Nobody may hold it any more."""
        assert self._source is not None
        self._source.release(self.sleep_level)
