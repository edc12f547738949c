"""Recorded steps of the CPU: what is replayed equals what runs, in memory that is used again and again."""

from __future__ import annotations

import itertools
import logging
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch

from octavo.plugin import BatchKey, BatchLimits, LinearSpec
from octavo_cpu import native, ops_native
from octavo_cpu.linear_native import matmul
from octavo_cpu.tape import Arena, Segment, TapeRunner, decode_sizes

pytestmark = pytest.mark.skipif(bool(native.why_not()), reason=native.why_not() or "there is a library")

KEY = BatchKey(num_tokens=4, num_seqs=4, max_q_len=1)
WIDTH = 64


@pytest.fixture
def x() -> torch.Tensor:
    return torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(0))


def model(x: torch.Tensor, layers: int = 6) -> Callable[[], Any]:
    """A step of products and norms over the buffer x, with views between them."""
    generator = torch.Generator().manual_seed(1)
    spec = LinearSpec(in_features=WIDTH, out_features=WIDTH, act_dtype="float32", out_dtype="float32")
    products = [matmul(spec, "float32", torch.randn(WIDTH, WIDTH, generator=generator) / 8) for _ in range(layers)]
    weight = torch.rand(WIDTH, generator=generator)

    def step() -> tuple[torch.Tensor, torch.Tensor]:
        y = x
        for product in products:
            y = ops_native.rms_norm(product(y, None).view(4, WIDTH), weight, 1e-5)
        return y, y[1:3]

    return step


def test_replay_reads_its_inputs_again_and_gives_the_same_tensors(x: torch.Tensor) -> None:
    runner, step = TapeRunner(), model(x)
    with torch.inference_mode():
        handle = runner.prepare(KEY, step)
        first, part = runner.run(handle)
        assert torch.equal(first, step()[0])
        for value in (2.0, -0.5):
            x.fill_(value)
            again, _ = runner.run(handle)
            assert again is first
            assert torch.equal(again, step()[0])
            assert torch.equal(part, again[1:3])


def test_a_step_runs_once_in_each_run(x: torch.Tensor) -> None:
    weight, counter, steps = torch.ones(WIDTH), torch.zeros(1, WIDTH), torch.ones(1, WIDTH)

    def step() -> torch.Tensor:
        # Adds its first argument to the second in place.
        return ops_native.add_rms_norm(ops_native.rms_norm(steps, weight, 0.0), counter, weight, 1e-5)[0]

    runner = TapeRunner()
    handle = runner.prepare(KEY, step)
    assert counter[0, 0] == 0
    for run in range(1, 4):
        runner.run(handle)
        assert counter[0, 0] == run


def test_step_in_which_torch_computes_runs_in_python_for_good(
    x: torch.Tensor, caplog: pytest.LogCaptureFixture
) -> None:
    calls = []

    def step() -> torch.Tensor:
        calls.append(1)
        return torch.tanh(x)

    runner = TapeRunner()
    with caplog.at_level(logging.WARNING), torch.inference_mode():
        handle = runner.prepare(KEY, step)
        for value in (0.1, 0.2, 0.3):
            x.fill_(value)
            assert torch.equal(runner.run(handle), torch.tanh(x))
    assert len(calls) == 3
    assert caplog.text.count("aten.tanh.default") == 1, "said once, by name"


@pytest.mark.parametrize(
    "copies",
    [
        lambda x: x.t().reshape(-1),
        lambda x: x.t().contiguous(),
        lambda x: x.to(torch.float64),
        lambda x: x[torch.tensor([0])],
        lambda x: torch.zeros(3),
        lambda x: x.clone(),
        lambda x: x[0, 0].item(),
        lambda x: torch.empty_like(x.t()),
    ],
)
def test_what_copies_is_noticed(x: torch.Tensor, copies: Callable[[torch.Tensor], Any]) -> None:
    runner = TapeRunner()
    with torch.inference_mode():
        handle = runner.prepare(KEY, lambda: copies(x))
        runner.run(handle)
    assert handle.computed
    assert handle.tape is None


def test_views_are_no_work(x: torch.Tensor) -> None:
    runner = TapeRunner()
    with torch.inference_mode():
        handle = runner.prepare(KEY, lambda: (x.view(2, -1).unbind(), x[1:].t(), x.contiguous(), torch.empty_like(x)))
        runner.run(handle)
    assert not handle.computed


def test_a_dead_tensor_s_memory_serves_the_next_one() -> None:
    arena = Arena()
    first = arena.empty((100,), torch.float32)
    view = first.view(10, 10)[3:]
    address = first.data_ptr()
    del first
    assert arena.empty((100,), torch.float32).data_ptr() != address, "a view still looks at it"
    del view
    assert arena.empty((100,), torch.float32).data_ptr() == address


def test_many_shapes_take_little_more_memory_than_the_largest(x: torch.Tensor) -> None:
    runner = TapeRunner()
    table = torch.randn(8, 50_000)
    for size in range(1, 33):
        ids = torch.zeros(size, dtype=torch.int64)
        runner.run(runner.prepare(KEY, lambda ids=ids: ops_native.embedding(ids, table)))
    assert runner._arena.num_bytes <= 4 * 32 * 50_000 * 4


def test_gaps_of_a_segment_are_found_and_what_outlives_a_reset_frees_nothing() -> None:
    segment = Segment(1024)
    a, b, c = (segment.take(256) for _ in range(3))
    assert a is not None
    assert b is not None
    assert c is not None
    middle = b.ctypes.data
    del b
    assert segment.take(512) is None
    again = segment.take(192)
    assert again is not None
    assert again.ctypes.data == middle
    segment.reset()
    whole = segment.take(1024)
    del a, c, again
    assert whole is not None
    assert segment.take(64) is None


def test_failing_step_leaves_no_recording_behind(x: torch.Tensor) -> None:
    runner = TapeRunner()
    handle = runner.prepare(KEY, lambda: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        runner.run(handle)
    assert native.recording.recorder is None
    handle.step = model(x)
    assert torch.equal(runner.run(handle)[0], model(x)()[0])


def test_rank_that_was_lost_within_a_replay_is_an_error(x: torch.Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    runner = TapeRunner()
    handle = runner.prepare(KEY, model(x))
    runner.run(handle)

    def lost() -> None:
        raise ConnectionError("rank 1")

    monkeypatch.setattr("octavo_cpu.tape.check_ranks", lost)
    with pytest.raises(ConnectionError, match="rank 1"):
        runner.run(handle)


def test_decode_sizes_end_at_the_largest_batch() -> None:
    assert decode_sizes(1) == [1]
    assert decode_sizes(18) == [*range(1, 17), 18]
    sizes = decode_sizes(256)
    assert sizes[:18] == [*range(1, 17), 20, 24]
    assert sizes[-1] == 256
    assert all((b - a) * 5 <= b for a, b in itertools.pairwise(sizes[15:])), "padding stays a small share"
    keys = TapeRunner().keys(BatchLimits(max_num_tokens=8, max_num_seqs=100, max_model_len=64))
    assert [key.num_seqs for key in keys] == list(range(1, 9))


FIRST_RECORDING = """
import sys, torch
from octavo_cpu.tape import Arena, Watch
with Watch(Arena()):
    torch.empty(4).view(2, 2)
print("torch._dynamo" in sys.modules)
"""


def test_recording_does_not_import_torchs_compiler() -> None:
    done = subprocess.run([sys.executable, "-c", FIRST_RECORDING], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n", "it would stop the first answer for seconds"
