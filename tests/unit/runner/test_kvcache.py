"""How KV memory is divided and laid out."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from octavo.errors import ConfigError
from octavo.plugin import BatchLimits, KVLayout, KVPlan, KVSpec, MemInfo
from octavo.plugin.torch import TorchDevice
from octavo.runner import kvcache
from octavo.runner.kvcache import NULL_BLOCKS, Footprint, GroupNeed, allocate, divide, measure_recorded, measure_step

FULL = KVSpec(kind="full", num_kv_heads=2, head_dim=8, block_size=16, dtype="float32")
SLIDING = KVSpec(kind="sliding", num_kv_heads=2, head_dim=8, block_size=16, dtype="float32", window=32)
LIMITS = BatchLimits(max_num_tokens=64, max_num_seqs=1000, max_model_len=1024)


def test_every_group_can_hold_equally_many_longest_sequences() -> None:
    needs = [GroupNeed(spec=FULL, num_layers=1), GroupNeed(spec=SLIDING, num_layers=5)]
    plans = divide(needs, LIMITS, budget=50 * 2**20, num_blocks=None)
    held = [
        (plan.num_blocks - NULL_BLOCKS) // need.blocks_per_sequence(LIMITS)
        for plan, need in zip(plans, needs, strict=True)
    ]
    assert held[0] == held[1] > 10
    used = sum(need.block_bytes * plan.num_blocks for need, plan in zip(needs, plans, strict=True))
    assert 0.97 * 50 * 2**20 < used <= 50 * 2**20


def test_no_more_memory_is_taken_than_the_most_sequences_can_fill() -> None:
    limits = BatchLimits(max_num_tokens=64, max_num_seqs=2, max_model_len=64)
    (plan,) = divide([GroupNeed(spec=FULL, num_layers=1)], limits, budget=2**30, num_blocks=None)
    assert plan.num_blocks == NULL_BLOCKS + 2 * 4


def test_fixed_number_of_blocks_is_taken_as_it_is() -> None:
    (plan,) = divide([GroupNeed(spec=FULL, num_layers=1)], LIMITS, budget=None, num_blocks=77)
    assert plan.num_blocks == 77


@pytest.mark.parametrize("budget", [-5, 0, 100_000])
def test_too_little_memory_for_one_sequence_names_the_flags(budget: int) -> None:
    with pytest.raises(ConfigError, match="--max-model-len"):
        divide([GroupNeed(spec=FULL, num_layers=4)], LIMITS, budget=budget, num_blocks=None)


@pytest.mark.parametrize("order", ["BHNC", "BNHC", "HBNC"])
def test_views_are_logical_and_memory_follows_the_order(order: str) -> None:
    plan = KVPlan(spec=FULL, num_layers=2, num_blocks=5)
    views = allocate(plan, KVLayout(block_size=16, dtype="float32", order=order), TorchDevice("cpu"))
    assert len(views) == 2
    for tensor in (views[0].k, views[1].v):
        assert tensor.shape == (5, 2, 16, 8)
        assert [tensor.stride("BHNC".index(axis)) for axis in order] == sorted(tensor.stride(), reverse=True)
    assert not views[0].k.any()


def test_unknown_axis_in_a_layout_is_refused() -> None:
    with pytest.raises(ConfigError, match="BHNC"):
        allocate(
            KVPlan(spec=FULL, num_layers=1, num_blocks=2),
            KVLayout(block_size=16, dtype="float32", order="BHNX"),
            TorchDevice("cpu"),
        )


def reading(*memory: MemInfo) -> TorchDevice:
    """A device whose memory reads like this, one reading after the other."""
    readings = iter(memory)
    return TorchDevice("cpu", memory=lambda: next(readings))


def test_budget_leaves_room_for_what_the_largest_step_adds() -> None:
    device = reading(
        MemInfo(total=1000, free=600, peak_torch=50, non_torch=10),
        MemInfo(total=1000, free=500, peak_torch=170, non_torch=17),
    )
    ran = []
    footprint = measure_step(device, lambda: ran.append(torch.zeros(1)))
    assert footprint.budget(0.9) == 900 - 400 - (120 + 7)
    assert len(ran) == 1
    assert replace(footprint, recorded=30).budget(0.9) == 900 - 400 - 127 - 30


def test_recorded_steps_share_the_memory_of_the_largest_and_each_keeps_a_little_of_the_drivers() -> None:
    device = reading(MemInfo(total=1000, free=600, non_torch=10), MemInfo(total=1000, free=500, non_torch=18))
    ran: list[int] = []
    records = [lambda: ran.append(1), lambda: ran.append(2)]
    assert measure_recorded(device, records, num_shapes=12) == 100 + 10 * 4
    assert ran == [1, 2]


def test_the_account_says_where_memory_is() -> None:
    gib = 2**30
    footprint = Footprint(total=100 * gib, in_use=16 * gib, step=2 * gib, recorded=gib)
    assert footprint.describe(70 * gib, 11 * gib) == (
        "memory in GiB of 100.00: weights and libraries 16.00, KV 70.00, recorded steps 1.00, "
        "kept for the largest step 2.00, free 11.00"
    )


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("CUDA out of memory"), MemoryError()])
def test_refused_memory_names_the_options_to_lower(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object) -> None:
        raise error

    monkeypatch.setattr(kvcache, "lazy_zeros", refuse)
    plan = KVPlan(spec=FULL, num_layers=2**10, num_blocks=2**12)
    with pytest.raises(ConfigError, match=r"8\.0 GiB of KV memory \(4096 blocks\): lower --gpu-memory-utilization"):
        allocate(plan, KVLayout(block_size=16, dtype="float32"), TorchDevice("cpu"))
