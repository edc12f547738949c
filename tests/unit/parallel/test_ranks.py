"""Rank 0 and its ranks, with ranks that only talk: who is waited for, and what is made of every way to fail."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from octavo.config import make_config
from octavo.errors import CheckpointError, ConfigError, EngineError
from octavo.parallel import follower, ranks
from octavo.parallel.ranks import Ranks, start_ranks, worker_env
from octavo.plugin.data import WorkerLaunch

PLAIN = WorkerLaunch()

BEHAVIOURS = """
import os, time
from octavo.errors import CheckpointError
from octavo.parallel.follower import Follower, Stopped
from octavo.parallel.ranks import STOP

def run(config, lock, pipe, port, local_rank, log_level):
    rank, me = config.parallel.rank, Follower(config, pipe, port, local_rank)
    try:
        globals()[os.environ["BEHAVIOUR"]](rank, me)
    except Stopped:
        pass

def good(rank, me):
    me.meet("here", os.environ.get("STATE", "") + f"local rank {me.local_rank}")
    while (message := me.receive()) != STOP:
        me.meet(message.decode())

def odd(rank, me): me.meet("here", f"I am {rank}")
def silent(rank, me): os._exit(5) if rank == 2 else me.receive()
def failing(rank, me): me.tell(CheckpointError("cut short", path="model.safetensors")) if rank == 1 else me.receive()
def buggy(rank, me): me.meet("here"); me.tell(ZeroDivisionError("oops"))
def stuck(rank, me):
    me.meet("here")
    while True: time.sleep(1)
"""


@pytest.fixture
def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """start(behaviour, size) -> Ranks whose processes behave like that."""
    name = f"behaviours_{tmp_path.name}".replace("-", "_")
    (tmp_path / f"{name}.py").write_text(BEHAVIOURS)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(follower, "follow", __import__(name).run)
    made: list[Ranks] = []

    def run(behaviour: str, size: int = 2, launch: WorkerLaunch = PLAIN) -> Ranks:
        monkeypatch.setenv("BEHAVIOUR", behaviour)
        made.append(start_ranks(make_config(tensor_parallel_size=size), None, launch))  # type: ignore[arg-type]
        return made[0]

    yield run
    made[0].close()
    assert not made[0]._watcher.is_alive()
    assert [process.exitcode for process in made[0]._processes.values()].count(None) == 0


def test_stages_are_met_and_an_orderly_end_waits_for_all(start: Any) -> None:
    group = start("good", 3)
    with pytest.raises(EngineError, match=r"rank 1 differs from rank 0 .here.: local rank 1, not local rank 0"):
        group.meet("here", "local rank 0")
    group._send(b"go")
    group.send(b"further")
    group.meet("further")
    assert not group.failed
    group.stop()
    group.close()
    assert [process.exitcode for process in group._processes.values()] == [0, 0]
    group.close()


def test_ranks_with_one_visible_device_take_the_first(start: Any) -> None:
    launch = WorkerLaunch(visible_env="VISIBLE", env=lambda rank, size: {"STATE": f"rank {rank} of {size}, "})
    group = start("good", 2, launch)
    group.meet("here", "rank 1 of 2, local rank 0")
    assert "VISIBLE" not in os.environ
    assert os.environ.pop("STATE") == "rank 0 of 2, "


def test_a_rank_in_another_state_is_refused(start: Any) -> None:
    with pytest.raises(EngineError, match=r"rank 1 differs from rank 0 \(here\): I am 1, not I am 0"):
        start("odd").meet("here", "I am 0")


@pytest.mark.parametrize(
    ("behaviour", "size", "kind", "message"),
    [
        ("failing", 3, CheckpointError, "^rank 1: model.safetensors: cut short$"),
        ("silent", 3, EngineError, r"^the process of rank 2 has ended \(exit code 5\); its output says why"),
    ],
)
def test_a_rank_that_does_not_come_is_the_error(
    start: Any, behaviour: str, size: int, kind: type[Exception], message: str
) -> None:
    group = start(behaviour, size)
    with pytest.raises(kind, match=message):
        group.meet("here")
    with pytest.raises(kind, match=message):
        group.send(b"a step")


def test_what_a_step_meets_is_blamed_on_the_rank_that_failed(start: Any) -> None:
    group = start("buggy")
    group.meet("here")
    with pytest.raises(EngineError, match=r"^rank 1: ZeroDivisionError: oops$") as caught, group.blamed():
        raise RuntimeError("connection closed by peer")
    assert "connection closed" in str(caught.value.__cause__)
    # An error made for users is of this rank, whatever the others say.
    with pytest.raises(ConfigError, match="mine"), group.blamed():
        raise ConfigError("mine")


def test_an_error_of_rank_0_alone_stays_its_own(start: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranks, "BLAME_S", 0.01)
    group = start("good")
    with pytest.raises(ZeroDivisionError), group.blamed():
        raise ZeroDivisionError


@pytest.mark.parametrize("inside", [True, False])
def test_a_main_thread_that_waits_on_the_device_is_unblocked(
    start: Any, monkeypatch: pytest.MonkeyPatch, inside: bool
) -> None:
    monkeypatch.setattr(ranks, "UNBLOCK_S", 0.05)
    group = start("stuck")
    group.meet("here")
    aborted = []
    group._leave = lambda: aborted.append(time.monotonic())
    os.kill(group._processes[1].pid, signal.SIGKILL)
    if not inside:
        group._watcher.join(30)
        time.sleep(0.2)
        assert not aborted
    else:

        def collective() -> None:
            deadline = time.monotonic() + 30
            while not aborted and time.monotonic() < deadline:
                time.sleep(0.01)
            raise RuntimeError("the collective was aborted")

        with pytest.raises(EngineError), group.blamed():
            collective()
        assert aborted
    with pytest.raises(EngineError, match=r"rank 1 has ended \(killed by signal 9\); it may have run out of memory"):
        group.check()


def test_a_rank_that_does_not_stop_is_killed(
    start: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(ranks, "STOP_S", 0.05)
    group = start("stuck")
    group.meet("here")
    group.stop()
    group.close()
    assert "rank 1 did not stop within 0.05 s" in caplog.text
    assert group._processes[1].exitcode == -signal.SIGKILL


def test_devices_are_handed_out_in_the_order_in_which_this_process_sees_them(monkeypatch: pytest.MonkeyPatch) -> None:
    pairs = WorkerLaunch(visible_env="VISIBLE", devices_per_worker=2)
    monkeypatch.delenv("VISIBLE", raising=False)
    assert worker_env(pairs, 1, 3) == {"VISIBLE": "2,3"}
    monkeypatch.setenv("VISIBLE", "7,5,GPU-a,1")
    assert worker_env(pairs, 1, 2) == {"VISIBLE": "GPU-a,1"}
    assert worker_env(WorkerLaunch(), 1, 2) == {}
