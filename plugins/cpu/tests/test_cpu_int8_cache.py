"""The compiled library's cache of bytes, written and read, against core's reference on every instruction set."""

from __future__ import annotations

import pytest
import torch

from octavo.ops.attention import ReferenceAttention, quantized
from octavo.ops.catalogue import reference
from octavo.plugin import AttentionSpec, AttnLayer, BatchLimits, KVView
from octavo.testing.conformance.paged import Case, Inputs, build, dense, kv_spec_of
from octavo_cpu import native, ops_native
from octavo_cpu.attention_native import NativeAttention
from octavo_cpu.device import CpuDevice

pytestmark = pytest.mark.skipif(bool(native.why_not()), reason=native.why_not() or "there is a library")

DEVICE = CpuDevice(num_threads=1)
LIMITS = BatchLimits(max_num_tokens=2048, max_num_seqs=64, max_model_len=8192)
RAGGED = [(5, 1), (700, 1), (0, 1), (15, 1), (16, 1), (40, 20), (0, 37), (16, 16), (1100, 3), (0, 600), (0, 2)]
ALLOWED = {"float32": 2e-5, "float16": 4e-3, "bfloat16": 3e-2}
"""Beside the reference over the same codes, as in test_cpu_attention_native.py."""


def case_of(dtype: str, heads: int = 6, kv_heads: int = 2, dim: int = 64, **changes: object) -> Case:
    fields = {"kv_dtype": "int8", "block_size": 16, "scale": dim**-0.5} | changes
    spec = AttentionSpec(num_heads=heads, num_kv_heads=kv_heads, head_dim=dim, dtype=dtype, **fields)
    return Case(spec=spec, lens=RAGGED)


def inputs_of(case: Case) -> Inputs:
    return build(case, NativeAttention.kv_layout(kv_spec_of(case.spec)), DEVICE)


def answer(case: Case, inputs: Inputs, kind: type = NativeAttention) -> torch.Tensor:
    backend, out = kind(case.spec, LIMITS, DEVICE), torch.full_like(inputs.q, float("nan"))
    plan = backend.plan(inputs.batch, graph=False)
    backend.run(AttnLayer(index=0, sinks=inputs.sinks), inputs.q, inputs.k, inputs.v, inputs.kv, plan, out)
    return out.float()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"heads": 9, "kv_heads": 3},
        {"heads": 13, "kv_heads": 1, "dim": 37},
        {"dim": 128, "window": 40},
        {"dim": 80, "softcap": 5.0},
        {"sinks": True, "block_size": 8},
    ],
)
def test_answers_are_the_references_over_the_same_codes(isa: str, dtype: str, changes: dict) -> None:
    case = case_of(dtype, **changes)
    inputs = inputs_of(case)
    again = inputs_of(case)
    found, expected = answer(case, inputs), answer(case, again, ReferenceAttention)
    torch.testing.assert_close(found, expected, atol=ALLOWED[dtype], rtol=ALLOWED[dtype])
    assert torch.equal(inputs.kv.k, again.kv.k)
    assert torch.equal(inputs.kv.v, again.kv.v)
    # The cache's own rounding: 1/254 of the largest number of a row, some 3.
    assert (found - dense(case, inputs)).abs().max() < 6e-2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("dim", [8, 64, 80])
def test_rotation_writes_what_the_reference_writes(isa: str, dtype: torch.dtype, dim: int) -> None:
    generator = torch.Generator().manual_seed(dim)
    qkv = torch.randn(9, 8 * dim, generator=generator).to(dtype)
    qkv[3] = 0
    qkv[4] *= 1e-36
    slots = torch.randperm(48, generator=generator)[:9]
    caches = [torch.zeros(3, 2, 16, dim + 4, dtype=torch.int8) for _ in range(2)]
    ops_native.qkv_norm_rope_write(qkv.clone(), slots, None, None, None, 1e-6, 4, 2, *caches, slots)
    heads = qkv.view(9, 8, dim)
    for cache, numbers in zip(caches, (heads[:, 4:6], heads[:, 6:]), strict=True):
        assert torch.equal(cache[slots // 16, :, slots % 16], quantized(numbers))
        assert int(cache.flatten(0, 2).any(dim=1).sum()) <= 2 * 9
    table = torch.cat((torch.rand(48, dim // 2), torch.rand(48, dim // 2)), dim=-1).to(dtype)
    rotated = [torch.zeros(3, 2, 16, dim + 4, dtype=torch.int8) for _ in range(4)]
    args = (slots, table, None, None, 1e-6, 4, 2)
    ops_native.qkv_norm_rope_write(qkv.clone(), *args, *rotated[:2], slots)
    reference("qkv_norm_rope_write")(qkv.clone(), *args, *rotated[2:], slots)
    # Sums of another order may round to the next bfloat16, the largest number of a row too.
    difference = rotated[0][..., :-4].int() - rotated[2][..., :-4].int()
    assert difference.abs().max() <= (1 if dtype == torch.float32 else 2)
    assert torch.equal(rotated[1], rotated[3])


def test_what_is_no_number_is_not_hidden(isa: str) -> None:
    case = case_of("bfloat16")
    inputs = inputs_of(case)
    inputs.k[0, 0, 3] = float("nan")
    found = answer(case, inputs)
    assert found[0, :3].isnan().all()
    assert not found[0, 3:].isnan().any()
    qkv = torch.ones(1, 3 * 16)
    qkv[0, 20] = float("nan")
    caches = [torch.zeros(1, 1, 1, 20, dtype=torch.int8) for _ in range(2)]
    slots = torch.zeros(1, dtype=torch.int64)
    ops_native.qkv_norm_rope_write(qkv, slots, None, None, None, 1e-6, 1, 1, *caches, slots)
    assert caches[0][0, 0, 0, -4:].clone().view(torch.float32).isnan().all()
    assert not caches[1][0, 0, 0, -4:].clone().view(torch.float32).isnan().any()


@pytest.mark.parametrize("threads", [1, 5])
def test_answers_do_not_depend_on_threads(isa: str, threads: int) -> None:
    case = case_of("bfloat16")
    inputs = inputs_of(case)
    native.load().octavo_set_threads(1)
    expected = answer(case, inputs)
    native.load().octavo_set_threads(threads)
    assert torch.equal(answer(case, inputs), expected)


def test_scales_of_a_layer_are_for_float8_only() -> None:
    case = case_of("bfloat16")
    inputs = inputs_of(case)
    backend = NativeAttention(case.spec, LIMITS, DEVICE)
    plan, kv = backend.plan(inputs.batch, graph=False), KVView(k=inputs.kv.k, v=inputs.kv.v)
    layer = AttnLayer(index=3, v_scale=0.5)
    with pytest.raises(ValueError, match="layer 3: k_scale"):
        backend.run(layer, inputs.q, inputs.k, inputs.v, kv, plan, torch.empty_like(inputs.q))
