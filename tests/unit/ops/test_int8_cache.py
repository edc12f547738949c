"""A cache of bytes: each token's key or value of a head as codes, and their scale behind them."""

from __future__ import annotations

import pytest
import torch

from octavo.ops.attention import ReferenceAttention, kv_write, quantized, restored
from octavo.plugin import AttentionSpec, AttnLayer, BatchLimits, KVLayout, KVPlan, KVSpec
from octavo.plugin.torch import TorchDevice
from octavo.runner.kvcache import GroupNeed, allocate
from octavo.testing.conformance.paged import Case, build, dense

SPEC = KVSpec(kind="full", num_kv_heads=2, head_dim=8, block_size=16, dtype="int8")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_numbers_come_back_within_half_a_step_of_their_row(dtype: torch.dtype) -> None:
    x = (torch.randn(50, 3, 24) * torch.logspace(-20, 20, 50)[:, None, None]).to(dtype)
    rows = quantized(x)
    assert (rows.shape, rows.dtype) == ((50, 3, 28), torch.int8)
    step = x.float().abs().amax(-1, keepdim=True) / 127
    assert ((restored(rows) - x.float()).abs() <= step * 0.501).all()


def test_zeros_stay_zeros_and_what_is_no_number_is_not_hidden() -> None:
    x = torch.zeros(5, 8)
    x[1] = torch.arange(8)
    x[2, 3], x[3, 4], x[4, 5] = float("nan"), float("inf"), 1e-36
    found = restored(quantized(x))
    assert (found[0] == 0).all()
    assert found[1].isfinite().all()
    assert found[2].isnan().all()
    assert found[3].isnan().all()
    assert (found[4] == 0).all()


@pytest.mark.parametrize("order", ["BHNC", "BNHC"])
def test_scales_lie_in_the_block_and_are_counted(order: str) -> None:
    assert GroupNeed(spec=SPEC, num_layers=3).block_bytes == 3 * 2 * 2 * 16 * (8 + 4)
    [view] = allocate(
        KVPlan(spec=SPEC, num_layers=1, num_blocks=3),
        KVLayout(block_size=16, dtype="int8", order=order),
        TorchDevice("cpu"),
    )
    assert view.k.shape == (3, 2, 16, 12)
    k, v, slots = torch.randn(4, 2, 8), torch.randn(4, 2, 8), torch.tensor([40, 17, 16, 31])
    kv_write(k, v, view.k, view.v, slots)
    for cache, numbers in ((view.k, k), (view.v, v)):
        assert torch.equal(cache[slots // 16, :, slots % 16], quantized(numbers))
        assert (cache.flatten(1).any(dim=1) == torch.tensor([False, True, True])).all()


@pytest.mark.parametrize("window", [None, 9])
def test_reference_attention_over_bytes_is_near_dense_attention(window: int | None) -> None:
    spec = AttentionSpec(
        num_heads=6,
        num_kv_heads=2,
        head_dim=32,
        scale=32**-0.5,
        dtype="float32",
        kv_dtype="int8",
        block_size=16,
        window=window,
    )
    case = Case(spec=spec, lens=[(40, 1), (20, 7), (0, 3)])
    device = TorchDevice("cpu")
    inputs = build(case, KVLayout(block_size=16, dtype="int8"), device)
    limits = BatchLimits(max_num_tokens=64, max_num_seqs=8, max_model_len=64)
    reference, out = ReferenceAttention(spec, limits, device), torch.empty_like(inputs.q)
    plan = reference.plan(inputs.batch, graph=False)
    reference.run(AttnLayer(index=0), inputs.q, inputs.k, inputs.v, inputs.kv, plan, out)
    # A code is off by at most 1/254 of its row's largest number, here some 3.
    torch.testing.assert_close(out, dense(case, inputs), atol=4e-2, rtol=0)
