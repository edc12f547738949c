"""Pause and sleep: what becomes of running requests, of new ones, and of the executor."""

from __future__ import annotations

import numpy as np
import pytest

from octavo.config import CacheConfig, SchedulerConfig
from octavo.engine.loop import EngineLoop
from octavo.engine.messages import Control, Finish
from octavo.errors import EngineError
from octavo.plugin.data import ScheduleLimits
from octavo.plugin.step import KVGroup
from octavo.testing.scripted import ScriptedExecutor

GROUPS = (KVGroup(block_size=4, num_blocks=65),)
both_depths = pytest.mark.parametrize("run_ahead", [0, 1])


class Source:
    """Builds scripted executors; counts what was released."""

    def __init__(self, groups=GROUPS) -> None:
        self.groups = groups
        self.released: list[int] = []
        self.built: list[ScriptedExecutor] = []
        self.fails = False

    def release(self, level: int) -> None:
        self.released.append(level)

    def build(self) -> ScriptedExecutor:
        if self.fails:
            raise EngineError("no memory left")
        self.built.append(ScriptedExecutor(lambda p: range(p[-1] + 1, p[-1] + 1000), kv_groups=self.groups))
        return self.built[-1]


@pytest.fixture
def drive_asleep(drive):
    def make(run_ahead=0, source=None):
        d = drive(run_ahead=run_ahead)
        d.source = source or Source()
        d.loop = EngineLoop(
            d.executor,
            cache=CacheConfig(),
            scheduler=SchedulerConfig(max_num_seqs=8, max_num_batched_tokens=64),
            limits=ScheduleLimits(),
            max_model_len=128,
            run_ahead=run_ahead,
            source=d.source,
        )
        return d

    return make


def ask(d, action, **how):
    d.loop.receive(Control(client=0, ticket=7, action=action, **how))


def answers(d, steps=60):
    """What controls were answered within that many steps."""
    for _ in range(steps):
        if not d.loop.has_work:
            break
        d.step()
    return [done.error for _, done in d.loop.take_done()]


@both_depths
@pytest.mark.parametrize("level", [1, 2])
def test_sleep_aborts_frees_and_refuses_and_a_woken_engine_serves_as_before(drive_asleep, run_ahead, level):
    d = drive_asleep(run_ahead)
    d.submit(range(1, 9), handle=1, max_tokens=50)
    d.step(3)
    ask(d, "sleep", level=level)
    assert answers(d) == [""]
    assert d.finish[1] is Finish.ABORT
    assert d.executor.closed
    assert d.source.released == [level]
    assert (d.loop.stats.sleep_level, d.loop.stats.kv_usage) == (level, 0.0)
    d.submit([3], handle=2)
    d.run()
    assert d.failures[2].asleep
    d.loop.check()
    ask(d, "wake_up")
    assert answers(d) == [""]
    assert d.loop.stats.sleep_level == 0
    d.submit(range(1, 9), handle=3, max_tokens=4)
    d.run()
    assert d.tokens[3] == [9, 10, 11, 12]
    assert d.cached[3] == 0  # the prefix cache died with the memory
    assert d.source.built[0].batches


@both_depths
def test_sleep_may_wait_for_what_runs_and_lets_nothing_new_in(drive_asleep, run_ahead):
    d = drive_asleep(run_ahead)
    d.submit([5], handle=1, max_tokens=6)
    d.step(2)
    ask(d, "sleep", mode="wait")
    d.submit([5], handle=2)
    assert answers(d) == [""]
    assert d.tokens[1] == [6, 7, 8, 9, 10, 11]
    assert d.failures[2].asleep


@both_depths
def test_what_comes_while_paused_is_served_after_resume(drive_asleep, run_ahead):
    d = drive_asleep(run_ahead)
    d.submit([5], handle=1, max_tokens=3)
    d.step()
    ask(d, "pause", mode="wait")
    d.submit([8], handle=2, max_tokens=2)
    d.submit([8], handle=3, max_tokens=2)
    assert answers(d) == [""]
    assert d.tokens[1] == [6, 7, 8]
    assert d.loop.stats.paused
    assert not d.loop.has_work
    d.abort(3)
    ask(d, "resume")
    assert answers(d) == [""]
    d.run()
    assert d.tokens[2] == [9, 10]
    assert 3 not in d.tokens
    assert not d.loop.stats.paused


@both_depths
def test_requests_may_freeze_and_go_on(drive_asleep, run_ahead):
    d = drive_asleep(run_ahead)
    d.submit([5], handle=1, max_tokens=6)
    d.step(3)
    ask(d, "pause", mode="keep")
    assert answers(d) == [""]
    so_far = list(d.tokens[1])
    assert len(so_far) < 6
    assert not d.loop.has_work
    ask(d, "sleep", mode="wait")
    assert "paused in the middle" in answers(d)[0]
    ask(d, "resume")
    answers(d)
    d.run()
    assert d.tokens[1] == [6, 7, 8, 9, 10, 11]


def test_pausing_may_abort(drive_asleep):
    d = drive_asleep()
    d.submit([5], handle=1, max_tokens=60)
    d.step(2)
    ask(d, "pause", mode="abort")
    assert answers(d) == [""]
    assert d.finish[1] is Finish.ABORT


def test_an_engine_whose_executor_nobody_can_make_does_not_sleep(drive):
    d = drive()
    ask(d, "sleep")
    assert "cannot sleep" in answers(d)[0]
    d.submit([5], handle=1, max_tokens=1)
    d.run()
    assert d.tokens[1] == [6]


def test_an_engine_that_cannot_wake_stays_asleep_and_may_try_again(drive_asleep):
    d = drive_asleep()
    ask(d, "sleep")
    answers(d)
    d.source.fails = True
    ask(d, "wake_up")
    assert answers(d) == ["no memory left"]
    assert d.loop.stats.sleep_level == 1
    d.source.fails = False
    d.source.groups = (KVGroup(block_size=4, num_blocks=9),)
    ask(d, "wake_up")
    assert "KV memory" in answers(d)[0]
    assert d.source.built[-1].closed
    ask(d, "resume")
    assert "asleep" in answers(d)[0]
    d.source.groups = GROUPS
    ask(d, "wake_up")
    ask(d, "wake_up")
    assert answers(d) == ["", ""]
    d.submit(np.array([5]), handle=1, max_tokens=1)
    d.run()
    assert d.tokens[1] == [6]
