"""Which steps are recorded, and in which order things happen; the recording itself needs a card (test_cuda_gpu.py)."""

from __future__ import annotations

import gc
import itertools
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from octavo.plugin import BatchKey, BatchLimits, PlatformCaps
from octavo.plugin.recording import decode_sizes, lend, recorded_shapes
from octavo.runner.buckets import Shapes
from octavo_cuda import graphs
from octavo_cuda.graphs import CudaGraphs

LIMITS = BatchLimits(max_num_tokens=2048, max_num_seqs=100, max_model_len=4096)
KEY = BatchKey(num_tokens=8, num_seqs=8, max_q_len=1)


class FakeCuda:
    """torch.cuda as far as recording needs it; notes the order of calls."""

    def __init__(self) -> None:
        self.log: list[str] = []

    def Stream(self, device: object) -> Any:
        return SimpleNamespace(
            wait_stream=lambda other: self.log.append("side waits for current"),
            synchronize=lambda: self.log.append("side is done"),
        )

    def current_stream(self, device: object) -> Any:
        return SimpleNamespace(wait_stream=lambda other: self.log.append("current waits for side"))

    def graph_pool_handle(self) -> str:
        return "pool"

    def stream(self, stream: object) -> Any:
        fake = self

        class Use:
            def __enter__(self) -> None:
                fake.log.append("on side")

            def __exit__(self, *error: object) -> None:
                fake.log.append("off side")

        return Use()

    def CUDAGraph(self) -> Any:
        return SimpleNamespace(
            capture_begin=lambda pool, capture_error_mode: self.log.append(f"begin {pool} {capture_error_mode}"),
            capture_end=lambda: self.log.append("end"),
            replay=lambda: self.log.append("replay"),
            reset=lambda: self.log.append("reset"),
        )


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    cuda = FakeCuda()
    monkeypatch.setattr(graphs, "torch", SimpleNamespace(cuda=cuda, Tensor=torch.Tensor))
    return cuda


def test_decode_sizes_end_with_the_largest_batch() -> None:
    assert decode_sizes(1) == [1]
    assert decode_sizes(3) == [1, 2, 3]
    assert decode_sizes(20) == [1, 2, 4, 8, 16, 20]
    sizes = decode_sizes(512)
    assert sizes[-1] == 512
    assert len(sizes) < 40, "each costs memory and start-up time"
    assert all(b - a <= max(4, a // 4 + 1, 8) for a, b in itertools.pairwise(sizes)), "too much padding"


def test_every_small_step_has_a_recorded_shape() -> None:
    shapes = Shapes.of(PlatformCaps(graph="capture"), LIMITS, recorded_shapes(LIMITS))
    for num_seqs in range(1, 101):
        key, captured = shapes.choose(num_seqs, num_seqs, 500, 1)
        assert captured
        assert key.max_q_len == 1, "a decode step must not run as a mixed one"
    for num_tokens, num_seqs in ((2, 1), (17, 3), (512, 100), (130, 1), (1900, 100)):
        key, captured = shapes.choose(num_tokens, num_seqs, 500, num_tokens - num_seqs + 1)
        assert captured
        assert key.max_q_len == 0
        assert key.num_tokens >= num_tokens
    assert shapes.choose(1900, 4, 2000, 1897)[0].num_seqs == 4, "few long prompts have shapes of their own"
    assert not shapes.choose(2049, 1, 2100, 2049)[1], "a large step fills the card by itself"


def test_shapes_stay_within_the_limits() -> None:
    limits = BatchLimits(max_num_tokens=40, max_num_seqs=64, max_model_len=4096)
    keys = recorded_shapes(limits)
    assert all(key.num_tokens <= 40 and key.num_seqs <= 40 for key in keys)
    assert BatchKey(num_tokens=40, num_seqs=40, max_q_len=1) in keys


def test_no_shape_is_recorded_twice() -> None:
    for num_seqs in (1, 4, 5, 512):
        keys = recorded_shapes(BatchLimits(max_num_tokens=2048, max_num_seqs=num_seqs, max_model_len=4096))
        assert len(keys) == len(set(keys))


def test_a_step_runs_once_and_is_then_recorded_on_the_side_stream(fake: FakeCuda) -> None:
    runner = CudaGraphs(torch.device("cpu"))
    handle = runner.prepare(KEY, lambda: fake.log.append(f"step, gc {gc.isenabled()}") or "outputs")
    assert fake.log == [
        "side waits for current",
        "on side",
        "step, gc True",
        "side is done",
        "begin pool thread_local",
        "step, gc False",
        "end",
        "off side",
        "current waits for side",
    ]
    assert gc.isenabled()
    fake.log.clear()
    assert runner.run(handle) == "outputs"
    runner.close()
    runner.close()
    assert fake.log == ["replay", "reset"]


def test_a_step_that_cannot_be_recorded_is_named_and_leaves_the_stream_usable(fake: FakeCuda) -> None:
    calls = iter([None, RuntimeError("operation not permitted when stream is capturing")])

    def step() -> None:
        if (problem := next(calls)) is not None:
            raise problem

    with pytest.raises(RuntimeError, match=r"8 tokens in 8 sequences .*not permitted.*--enforce-eager"):
        CudaGraphs(torch.device("cpu")).prepare(KEY, step)
    assert fake.log[-2:] == ["end", "off side"]
    assert gc.isenabled()


def test_a_broken_recording_gives_its_pool_back(fake: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> None:
        raise RuntimeError("operation failed due to a previous error during capture")

    graph = fake.CUDAGraph()
    graph.capture_end = broken
    monkeypatch.setattr(fake, "CUDAGraph", lambda: graph)
    ended = SimpleNamespace(_cuda_endAllocateToPool=lambda device, pool: fake.log.append(f"{pool} of {device} is free"))
    monkeypatch.setattr(graphs.torch, "_C", ended, raising=False)
    with pytest.raises(RuntimeError, match="previous error"):
        CudaGraphs(torch.device("cuda", 1)).prepare(KEY, lambda: None)
    assert "pool of 1 is free" in fake.log


@dataclass(frozen=True)
class Outputs:
    logits: Any
    tokens: Any = None


def test_outputs_are_lent_field_by_field(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    taken = torch.arange(8, dtype=torch.bfloat16).view(torch.uint8)
    monkeypatch.setattr(torch, "as_tensor", lambda memory, device: seen.append(memory) or taken)
    logits = torch.zeros(2, 4, dtype=torch.bfloat16)
    found = lend(Outputs(logits))
    assert torch.equal(found.logits, torch.arange(8, dtype=torch.bfloat16).view(2, 4))
    assert found.tokens is None
    assert seen[0].__cuda_array_interface__["data"] == (logits.data_ptr(), False)
    assert seen[0].__cuda_array_interface__["shape"] == (16,)
    strided = torch.zeros(4, 4)[:, :2]
    assert lend(strided) is strided, "only contiguous memory can be lent"
