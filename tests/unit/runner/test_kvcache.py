"""How KV memory is divided and laid out."""

from __future__ import annotations

import pytest
import torch

from octavo.errors import ConfigError
from octavo.plugin import BatchLimits, KVLayout, KVPlan, KVSpec, MemInfo
from octavo.plugin.torch import TorchDevice
from octavo.runner.kvcache import NULL_BLOCKS, GroupNeed, allocate, divide, measured_budget

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


def test_budget_leaves_room_for_what_the_largest_step_adds() -> None:
    readings = iter([MemInfo(total=1000, free=600, peak_torch=50), MemInfo(total=1000, free=600, peak_torch=170)])
    device = TorchDevice("cpu", memory=lambda: next(readings))
    ran = []
    assert measured_budget(device, 0.9, lambda: ran.append(torch.zeros(1))) == 900 - 400 - 120
    assert len(ran) == 1
