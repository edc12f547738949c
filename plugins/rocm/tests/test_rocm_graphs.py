"""That steps are recorded by torch's HIP backend: with stand-ins."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from octavo.plugin import BatchKey
from octavo_rocm import graphs
from octavo_rocm.graphs import HipGraphs

KEY = BatchKey(num_tokens=8, num_seqs=8, max_q_len=1)


class FakeHip:
    """torch.cuda of a HIP build as far as recording needs it; notes the order of calls."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.fails = False

    def Stream(self, device: object) -> Any:
        return SimpleNamespace(wait_stream=lambda other: None, synchronize=lambda: self.log.append("side is done"))

    def current_stream(self, device: object) -> Any:
        return SimpleNamespace(wait_stream=lambda other: self.log.append("current waits for side"))

    def graph_pool_handle(self) -> str:
        return "pool"

    def stream(self, stream: object) -> Any:
        import contextlib

        return contextlib.nullcontext()

    def CUDAGraph(self) -> Any:
        def end() -> None:
            self.log.append("end")
            if self.fails:
                raise RuntimeError("operation failed due to a previous error during capture")

        return SimpleNamespace(
            capture_begin=lambda pool, capture_error_mode: self.log.append(f"begin {pool} {capture_error_mode}"),
            capture_end=end,
            replay=lambda: self.log.append("replay"),
            reset=lambda: self.log.append("reset"),
        )


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeHip:
    hip = FakeHip()
    freed = SimpleNamespace(_cuda_endAllocateToPool=lambda index, pool: hip.log.append(f"{pool} of {index} is free"))
    monkeypatch.setattr(graphs, "torch", SimpleNamespace(cuda=hip, _C=freed))
    return hip


def test_a_step_is_recorded_once_and_replayed(fake: FakeHip) -> None:
    runner = HipGraphs(torch.device("cuda", 1))
    handle = runner.prepare(KEY, lambda: fake.log.append("step") or "outputs")
    assert fake.log == [
        "step",
        "side is done",
        "begin pool thread_local",
        "step",
        "end",
        "current waits for side",
    ]
    assert runner.run(handle) == "outputs"
    runner.close()
    assert fake.log[-2:] == ["replay", "reset"]


def test_a_broken_recording_is_named_and_gives_its_pool_back(fake: FakeHip) -> None:
    fake.fails = True
    with pytest.raises(RuntimeError, match=r"8 tokens in 8 sequences .*previous error"):
        HipGraphs(torch.device("cuda", 1)).prepare(KEY, lambda: None)
    assert fake.log[-1] == "pool of 1 is free"
