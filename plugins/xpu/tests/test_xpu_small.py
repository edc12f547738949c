"""Norms, rotations, gates and cache writes on Intel's CPU device, against core's references in float32."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from octavo.ops import activation, attention, norm, rope  # noqa: F401  (fill the catalogue)
from octavo.ops.catalogue import CATALOGUE, reference
from octavo.plugin import OpContext
from octavo_xpu.device import SyclDevice
from octavo_xpu.small import SmallOps, takes_heads

ALLOWED = {"float32": 1e-5, "float16": 2e-3, "bfloat16": 2e-2}
"""Share of the largest result."""

START = 5
"""Elements of memory before a tensor."""

OPS = ("rms_norm", "add_rms_norm", "act_and_mul", "rope", "kv_write", "qkv_norm_rope", "qkv_norm_rope_write")


def gaussian(*shape: int, dtype: str = "float32", seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(getattr(torch, dtype))


def odd(name: str, dtype: str) -> Iterator[tuple[Any, ...]]:
    """Shapes beyond the catalogue's samples: sizes that no vector fits, rows longer than a work-group, one head."""
    if name == "rms_norm":
        yield gaussian(3, 1000, dtype=dtype), gaussian(1000, dtype=dtype, seed=1), 1e-6
        yield gaussian(2, 7, dtype=dtype), gaussian(7, seed=1), 1e-6
        yield gaussian(5, dtype=dtype), gaussian(5, dtype=dtype, seed=1), 1e-6
        yield gaussian(6, 34, dtype=dtype)[:, ::2], gaussian(17, dtype=dtype, seed=1), 1e-6
    if name == "add_rms_norm":
        yield gaussian(3, 777, dtype=dtype), gaussian(3, 777, dtype=dtype, seed=2), gaussian(777, seed=1), 1e-6
    if name == "act_and_mul":
        yield gaussian(3, 2 * 301, dtype=dtype), "gelu_tanh"
        yield gaussian(3, 2 * 33 + 5, dtype=dtype)[:, :66], "silu"
    if name == "rope":
        table = gaussian(9, 6, dtype=dtype, seed=4)
        yield gaussian(2, 1, 10, dtype=dtype), gaussian(2, 40, 10, dtype=dtype, seed=1), torch.tensor([8, 0]), table


def samples(name: str, dtype: str) -> list[tuple[Any, ...]]:
    return [*CATALOGUE[name].samples(dtype), *odd(name, dtype)]


def copies(sample: tuple[Any, ...], wide: bool) -> list[Any]:
    """Own tensors in the same strides, as kernels write into them, which begin somewhere in their memory."""
    out = []
    for arg in sample:
        if not isinstance(arg, torch.Tensor):
            out.append(arg)
            continue
        dtype = torch.float32 if wide and arg.is_floating_point() else arg.dtype
        length = 1 + sum((size - 1) * stride for size, stride in zip(arg.shape, arg.stride(), strict=True))
        memory = torch.zeros(max(0, length) + START, dtype=dtype)
        out.append(memory.as_strided(arg.shape, arg.stride(), START).copy_(arg))
    return out


@pytest.mark.parametrize("dtype", ALLOWED)
@pytest.mark.parametrize("name", OPS)
def test_an_op_gives_what_the_reference_gives_in_float32(device: SyclDevice, name: str, dtype: str) -> None:
    kernel, ran = getattr(SmallOps(device.runtime), name), 0
    for sample in samples(name, dtype):
        params = CATALOGUE[name].params(sample) if CATALOGUE[name].params else {}
        if not takes_heads(OpContext(op=name, dtype=dtype, device_type="xpu", params=params)).ok:
            continue
        ran += 1
        expected, found = reference(name)(*copies(sample, wide=True)), kernel(*copies(sample, wide=False))
        for want, got in zip(as_tuple(expected), as_tuple(found), strict=True):
            assert got.shape == want.shape
            assert got.dtype == getattr(torch, dtype)
            if want.numel():
                error = (got.float() - want).abs().max() / want.abs().max().clamp_min(1e-6)
                assert error <= ALLOWED[dtype], f"{[getattr(a, 'shape', a) for a in sample]}: {error:.2e}"
    assert ran >= 3, "the op was tested on samples"


def as_tuple(result: Any) -> tuple[torch.Tensor, ...]:
    return (result,) if isinstance(result, torch.Tensor) else tuple(result)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_what_is_not_a_number_stays_so_and_ties_round_to_even(device: SyclDevice, dtype: str) -> None:
    number = getattr(torch, dtype)
    step = torch.finfo(number).eps
    x = torch.tensor([[1.0, 1 + step, -1.0, 1.0, float("inf"), float("nan"), -float("inf"), 1e-45]]).to(number)
    residual = torch.tensor([[step / 2, step / 2, -step / 2, 0.51 * step, 1.0, 0.0, 1.0, 0.0]]).to(number)
    want = (x.float() + residual.float()).to(number)
    assert want[0, 0] == 1, "a tie, and the even number is below"
    assert want[0, 1] == 1 + 2 * step, "a tie, and the even number is above"
    got = SmallOps(device.runtime).add_rms_norm(x, residual, torch.ones(8), 1e-6)[1]
    assert torch.equal(got.nan_to_num(nan=-7.0), want.nan_to_num(nan=-7.0))


def test_a_cache_write_touches_no_other_slot(device: SyclDevice) -> None:
    caches = [torch.full((4, 16, 2, 24), 5.0).transpose(1, 2) for _ in range(2)]
    k, v = gaussian(3, 2, 24), gaussian(3, 2, 24, seed=1)
    slots = torch.tensor([63, 0, 17])
    SmallOps(device.runtime).kv_write(k, v, caches[0], caches[1], slots)
    for cache, new in zip(caches, (k, v), strict=True):
        flat = cache.transpose(1, 2).reshape(64, 2, 24)
        assert torch.equal(flat[slots], new)
        others = [slot for slot in range(64) if slot not in slots.tolist()]
        assert (flat[others] == 5.0).all()


def test_a_norm_over_a_whole_token_is_left_to_its_parts() -> None:
    answer = takes_heads(OpContext(op="qkv_norm_rope", dtype="float32", device_type="xpu", params={"norm": "row"}))
    assert not answer.ok
    assert "row" in answer.reason
