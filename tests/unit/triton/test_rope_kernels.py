"""Triton's rotary embedding and the fused step after the QKV projection, interpreted, against the references."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace

import pytest
import torch

from octavo.ops import norm as norm_reference
from octavo.ops import rope as reference
from octavo.ops.attention import kv_write
from octavo.ops.samples import gaussian, integers

pytest.importorskip("triton", reason="the Triton kernels need triton")

from octavo.triton import rope

OPS = SimpleNamespace(rms_norm=norm_reference.rms_norm, rope=reference.rope)
WRITING = SimpleNamespace(qkv_norm_rope=partial(reference.qkv_norm_rope, OPS), kv_write=kv_write)
# The kernels turn in float32 and round once, the references after every product.
TOLERANCE = {"float32": 1e-5, "float16": 5e-3}


def table(rotated: int, dtype: str) -> torch.Tensor:
    angles = torch.arange(100)[:, None] * 10000.0 ** (-torch.arange(0, rotated, 2) / rotated)
    return torch.cat((angles.cos(), angles.sin()), dim=-1).to(getattr(torch, dtype))


def close(ours: tuple[torch.Tensor, ...], theirs: tuple[torch.Tensor, ...], dtype: str) -> None:
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(
    ("tokens", "heads", "kv_heads", "dim", "rotated"),
    [(0, 2, 1, 64, 64), (1, 4, 2, 64, 64), (3, 3, 1, 80, 32), (3, 9, 3, 48, 48), (2, 1, 1, 96, 24)],
)
def test_rope_turns_queries_and_keys_of_strided_rows(
    tokens: int, heads: int, kv_heads: int, dim: int, rotated: int, dtype: str
) -> None:
    packed = gaussian(tokens, heads + kv_heads, dim, dtype=dtype, seed=1)
    q, k = packed.split((heads, kv_heads), dim=1)
    positions, cos_sin = integers(tokens, high=100, seed=2), table(rotated, dtype)
    before = packed.clone()
    ours = rope.rope(q, k, positions, cos_sin)
    close(ours, reference.rope(q, k, positions, cos_sin), dtype)
    assert all(t.is_contiguous() for t in ours)
    assert torch.equal(packed, before)


def weights(kind: str, heads: int, kv_heads: int, dim: int, dtype: str) -> list[torch.Tensor | None]:
    widths = {"none": (), "head": (dim, dim), "row": (heads * dim, kv_heads * dim)}[kind]
    made = [1 + gaussian(n, seed=7 + i, scale=0.3) for i, n in enumerate(widths)]
    return [w.to(getattr(torch, dtype)) for w in made] or [None, None]


@pytest.mark.parametrize("rotated", [None, 16, 48])
@pytest.mark.parametrize("kind", ["none", "head", "row"])
@pytest.mark.parametrize("dtype", TOLERANCE)
def test_qkv_norm_rope_is_its_parts_one_after_another(dtype: str, kind: str, rotated: int | None) -> None:
    for tokens, heads, kv_heads in ((1, 6, 2), (3, 9, 3)):
        dim = 48
        qkv = gaussian(tokens, (heads + 2 * kv_heads) * dim, dtype=dtype, seed=1)
        positions = integers(tokens, high=100, seed=3)
        cos_sin = None if rotated is None else table(rotated, dtype)
        rest = positions, cos_sin, *weights(kind, heads, kv_heads, dim, dtype), 1e-6, heads, kv_heads
        close(rope.qkv_norm_rope(qkv.clone(), *rest), reference.qkv_norm_rope(OPS, qkv, *rest), dtype)


def caches(kv_heads: int, dim: int, dtype: torch.dtype, order: str = "BHNC") -> list[torch.Tensor]:
    """Two of 3 blocks of 8 tokens, full of ones, as [B, Hkv, N, D] with the given order of strides."""
    sizes = {"B": 3, "H": kv_heads, "N": 8, "C": dim}
    to_logical = [order.index(axis) for axis in "BHNC"]
    return [torch.ones([sizes[a] for a in order]).to(dtype).permute(to_logical) for _ in range(2)]


@pytest.mark.parametrize("rotated", [None, 16, 48])
@pytest.mark.parametrize("kind", ["none", "head", "row"])
@pytest.mark.parametrize(("dtype", "order"), [("float32", "BHNC"), ("float16", "BNHC"), ("float32", "HBCN")])
@pytest.mark.parametrize("by_head", [None, False, True])
def test_keys_and_values_are_written_where_the_slots_say(
    by_head: bool | None, dtype: str, order: str, kind: str, rotated: int | None
) -> None:
    for tokens, heads, kv_heads in ((1, 6, 2), (3, 9, 3)):
        dim = 48
        qkv = gaussian(tokens, (heads + 2 * kv_heads) * dim, dtype=dtype, seed=1)
        positions, slots = integers(tokens, high=100, seed=3), torch.tensor([20, 3, 9])[:tokens]
        cos_sin = None if rotated is None else table(rotated, dtype)
        rest = positions, cos_sin, *weights(kind, heads, kv_heads, dim, dtype), 1e-6, heads, kv_heads
        scales = (0.5, 4.0) if by_head is False else (torch.tensor([0.5, 2.0, 4.0]), torch.tensor([4.0, 1.0, 0.25]))
        scales = (1.0, 1.0) if by_head is None else tuple(s[:kv_heads] if by_head else s for s in scales)
        answers = []
        for write in (rope.qkv_norm_rope_write, partial(reference.qkv_norm_rope_write, WRITING)):
            answers.append(write(qkv.clone(), *rest, *caches(kv_heads, dim, qkv.dtype, order), slots, *scales))
        close(*answers, dtype)


def test_an_8_bit_cache_gets_the_nearest_number_it_holds() -> None:
    qkv = gaussian(3, 6 * 32, seed=1).to(torch.float8_e4m3fn).float()
    qkv[0, 2 * 32] = 1e6
    qkv[1, 4 * 32 + 31] = -1e6
    rest = integers(3, high=9, seed=3), None, None, None, 1e-6, 2, 2
    slots = torch.tensor([20, 3, 9])
    # Only scales that keep the numbers within the format: the interpreter rounds to eight bits wrongly.
    ours = rope.qkv_norm_rope_write(qkv.clone(), *rest, *caches(2, 32, torch.float8_e4m3fn), slots, 0.5, 1.0)
    theirs = reference.qkv_norm_rope_write(
        WRITING, qkv.clone(), *rest, *caches(2, 32, torch.float8_e4m3fn), slots, 0.5, 1.0
    )
    assert theirs[1].float().max() == 448
    assert all(torch.equal(a.float(), b.float()) for a, b in zip(ours, theirs, strict=True))


def test_no_tokens_write_nothing() -> None:
    cache = caches(2, 64, torch.float32)
    rest = table(64, "float32"), None, None, 1e-6, 4, 2
    q, k, v = rope.qkv_norm_rope_write(torch.empty(0, 8 * 64), integers(0, high=9), *rest, *cache, integers(0, high=9))
    assert q.shape == (0, 4, 64)
    assert (k == 1).all()
    assert (v == 1).all()


def test_float32_weights_are_rounded_once() -> None:
    qkv = gaussian(3, 8 * 64, dtype="float16", seed=1)
    weight = 1 + gaussian(64, seed=2, scale=0.3)
    rest = integers(3, high=100, seed=3), table(64, "float32"), weight, weight, 1e-6, 4, 2
    close(rope.qkv_norm_rope(qkv.clone(), *rest), reference.qkv_norm_rope(OPS, qkv, *rest), "float16")


def test_no_tokens_are_no_work() -> None:
    q, k, v = rope.qkv_norm_rope(
        torch.empty(0, 8 * 64), integers(0, high=9), table(64, "float32"), None, None, 1e-6, 4, 2
    )
    assert [t.shape for t in (q, k, v)] == [(0, 4, 64), (0, 2, 64), (0, 2, 64)]


def test_results_are_views_of_the_projection_and_values_are_not_touched() -> None:
    qkv = gaussian(3, 8 * 64, seed=1)
    values = qkv[:, 6 * 64 :].clone()
    q, k, v = rope.qkv_norm_rope(qkv, integers(3, high=100), table(64, "float32"), None, None, 1e-6, 4, 2)
    assert [t.shape for t in (q, k, v)] == [(3, 4, 64), (3, 2, 64), (3, 2, 64)]
    assert {t.untyped_storage().data_ptr() for t in (q, k, v)} == {qkv.untyped_storage().data_ptr()}
    assert torch.equal(v.flatten(1), values)
