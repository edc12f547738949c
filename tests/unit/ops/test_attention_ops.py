"""Paged attention against the definition, written as loops over single queries and heads."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from octavo.ops.attention import ReferenceAttention, kv_write, paged_attention
from octavo.plugin.contracts import AttnBatch, AttnLayer, KVView
from octavo.plugin.specs import AttentionSpec, BatchLimits
from octavo.plugin.torch import TorchDevice

BLOCK = 4
Q_LENS = [1, 1, 6, 3]
KV_LENS = [9, 1, 6, 14]
CASES = [
    pytest.param({}, id="plain"),
    pytest.param({"window": 5}, id="window"),
    pytest.param({"softcap": 2.0}, id="softcap"),
    pytest.param({"sinks": True}, id="sinks"),
    pytest.param({"window": 3, "softcap": 1.0, "sinks": True}, id="all"),
]


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


class Setup:
    """Sequences with random keys and values in shuffled blocks; all other cache memory is NaN."""

    def __init__(self, *, heads: int = 4, kv_heads: int = 2, dim: int = 8, seed: int = 0) -> None:
        torch.manual_seed(seed)
        self.heads, self.kv_heads, self.dim = heads, kv_heads, dim
        self.q = torch.randn(sum(Q_LENS), heads, dim)
        self.k = [torch.randn(n, kv_heads, dim) for n in KV_LENS]
        self.v = [torch.randn(n, kv_heads, dim) for n in KV_LENS]
        self.table = 1 + torch.randperm(16).view(4, 4).int()
        self.starts = torch.tensor([0, *np.cumsum(Q_LENS)]).int()
        self.kv_lens = torch.tensor(KV_LENS).int()
        self.sinks = torch.randn(heads)
        self.cache = KVView(
            k=torch.full((17, kv_heads, BLOCK, dim), torch.nan), v=torch.full((17, kv_heads, BLOCK, dim), torch.nan)
        )

    def slots(self, i: int, positions: range) -> torch.Tensor:
        return torch.tensor([int(self.table[i, p // BLOCK]) * BLOCK + p % BLOCK for p in positions])

    def fill(self, *, fresh: bool = True, before: int = 0) -> None:
        """Write contexts into the cache: with or without this step's tokens, and only from position `before`."""
        for i, (q_len, kv_len) in enumerate(zip(Q_LENS, KV_LENS, strict=True)):
            span = range(before, kv_len if fresh else kv_len - q_len)
            if span:
                rows = slice(span.start, span.stop)
                kv_write(self.k[i][rows], self.v[i][rows], self.cache.k, self.cache.v, self.slots(i, span))

    def want(self, *, window: int | None = None, softcap: float | None = None, sinks: bool = False) -> torch.Tensor:
        scale, out, row = self.dim**-0.5, torch.zeros_like(self.q), 0
        for i, (q_len, kv_len) in enumerate(zip(Q_LENS, KV_LENS, strict=True)):
            for p in range(kv_len - q_len, kv_len):
                for h in range(self.heads):
                    kv_head = h * self.kv_heads // self.heads
                    seen = [j for j in range(p + 1) if window is None or j > p - window]
                    scores = [float(self.q[row, h] @ self.k[i][j, kv_head]) * scale for j in seen]
                    if softcap is not None:
                        scores = [softcap * math.tanh(s / softcap) for s in scores]
                    total = sum(math.exp(s) for s in scores) + (math.exp(float(self.sinks[h])) if sinks else 0.0)
                    for j, s in zip(seen, scores, strict=True):
                        out[row, h] += math.exp(s) / total * self.v[i][j, kv_head]
                row += 1
        return out

    def batch(self, padding: int = 0) -> AttnBatch:
        slots = [self.slots(i, range(n - q, n)) for i, (q, n) in enumerate(zip(Q_LENS, KV_LENS, strict=True))]
        starts = torch.cat((self.starts, self.starts[-1:].expand(padding)))
        lens = torch.cat((self.kv_lens, torch.zeros(padding, dtype=torch.int32)))
        return AttnBatch(
            num_tokens=len(self.q) + padding,
            num_seqs=len(lens),
            num_decodes=2,
            max_q_len=max(Q_LENS),
            max_kv_len=max(KV_LENS),
            q_starts=starts,
            kv_lens=lens,
            block_table=torch.cat((self.table, torch.zeros(padding, 4, dtype=torch.int32))),
            slots=torch.cat((*slots, torch.zeros(padding, dtype=torch.int64))),
            q_starts_host=starts.numpy(),
            kv_lens_host=lens.numpy(),
        )

    def backend(self, **options: object) -> ReferenceAttention:
        spec = AttentionSpec(
            num_heads=self.heads,
            num_kv_heads=self.kv_heads,
            head_dim=self.dim,
            scale=self.dim**-0.5,
            dtype="float32",
            kv_dtype="float32",
            block_size=BLOCK,
            **options,
        )
        limits = BatchLimits(max_num_tokens=32, max_num_seqs=8, max_model_len=16)
        assert ReferenceAttention.supports(spec, TorchDevice("cpu")).ok
        return ReferenceAttention(spec, limits, TorchDevice("cpu"))


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 2), (3, 1), (2, 2)])
def test_paged_attention_equals_the_definition(case, heads, kv_heads):
    s = Setup(heads=heads, kv_heads=kv_heads)
    s.fill()
    options = case | {"sinks": s.sinks if case.get("sinks") else None}
    got = paged_attention(s.q, s.cache.k, s.cache.v, s.table, s.starts, s.kv_lens, s.dim**-0.5, **options)
    torch.testing.assert_close(got, s.want(**case), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("case", CASES)
def test_the_reference_backend_writes_first_then_attends(case):
    s = Setup()
    s.fill(fresh=False)
    backend = s.backend(**case)
    fresh = [(k[-q:], v[-q:]) for k, v, q in zip(s.k, s.v, Q_LENS, strict=True)]
    k, v = (torch.cat(parts) for parts in zip(*fresh, strict=True))
    layer = AttnLayer(index=0, sinks=s.sinks if case.get("sinks") else None)
    plan = backend.plan(s.batch(), graph=False)
    out = torch.full_like(s.q, torch.nan)
    assert backend.run(layer, s.q, k, v, s.cache, plan, out) is out
    torch.testing.assert_close(out, s.want(**case), atol=1e-5, rtol=1e-5)


def test_padding_tokens_become_zero_and_write_into_the_null_block_only():
    s = Setup()
    s.fill()
    before = s.cache.k.clone()
    pad = torch.zeros(2, s.heads, s.dim)
    q = torch.cat((s.q, pad))
    fresh = [(k[-n:], v[-n:]) for k, v, n in zip(s.k, s.v, Q_LENS, strict=True)]
    k, v = (torch.cat((*parts, pad[:, : s.kv_heads])) for parts in zip(*fresh, strict=True))
    backend = s.backend()
    out = torch.full_like(q, torch.nan)
    backend.run(AttnLayer(index=0), q, k, v, s.cache, backend.plan(s.batch(padding=2), graph=False), out)
    assert out[-2:].eq(0).all()
    assert torch.equal(s.cache.k[1:].nan_to_num(), before[1:].nan_to_num())


def test_scales_of_a_scaled_cache_cancel():
    s = Setup()
    backend = s.backend()
    layer = AttnLayer(index=0, k_scale=0.25, v_scale=4.0)
    for i, (k, v) in enumerate(zip(s.k, s.v, strict=True)):
        kv_write(k / 0.25, v / 4.0, s.cache.k, s.cache.v, s.slots(i, range(len(k))))
    fresh = [(k[-q:], v[-q:]) for k, v, q in zip(s.k, s.v, Q_LENS, strict=True)]
    k, v = (torch.cat(parts) for parts in zip(*fresh, strict=True))
    out = backend.run(layer, s.q, k, v, s.cache, backend.plan(s.batch(), graph=False), torch.empty_like(s.q))
    torch.testing.assert_close(out, s.want(), atol=1e-5, rtol=1e-5)


def test_positions_behind_every_window_are_never_read():
    s = Setup()
    s.fill(before=0)
    # The third block of sequence 3 is the first that its queries (positions 11 to 13, window 3) can see.
    s.cache.k[s.table[3, :2].long()] = torch.nan
    got = paged_attention(s.q, s.cache.k, s.cache.v, s.table, s.starts, s.kv_lens, s.dim**-0.5, 3)
    torch.testing.assert_close(got, s.want(window=3), atol=1e-5, rtol=1e-5)


def test_a_cache_in_fp8_takes_its_largest_value_for_what_it_cannot_hold():
    caches = torch.zeros(2, 1, 1, 4, 2).to(torch.float8_e4m3fn)
    k = torch.tensor([[[1e6, -1e6]], [[0.5, 448.0]]])
    kv_write(k, -k, caches[0], caches[1], torch.tensor([3, 0]))
    assert caches[0].float()[0, 0, [3, 0]].tolist() == [[448, -448], [0.5, 448]]
    assert caches[1].float()[0, 0, [3, 0]].tolist() == [[-448, 448], [-0.5, -448]]


def test_kv_write_fills_a_cache_of_another_layout_and_dtype():
    storage = torch.zeros(2, 3, BLOCK, 5, 8, dtype=torch.bfloat16)  # K and V, blocks, tokens, heads, content
    k_cache, v_cache = storage.permute(0, 1, 3, 2, 4)
    k, v = torch.randn(3, 5, 8), torch.randn(3, 5, 8)
    kv_write(k, v, k_cache, v_cache, torch.tensor([9, 4, 0]))
    assert torch.equal(storage[0, 2, 1], k[0].bfloat16())
    assert torch.equal(storage[1, 1, 0], v[1].bfloat16())
    assert torch.equal(storage[0, 0, 0], k[2].bfloat16())
    assert int(storage.ne(0).any(-1).sum()) == 2 * 3 * 5


def test_bidirectional_attention_is_refused_with_a_reason():
    spec = AttentionSpec(
        num_heads=1,
        num_kv_heads=1,
        head_dim=8,
        scale=1.0,
        dtype="float32",
        kv_dtype="float32",
        block_size=4,
        causal=False,
    )
    answer = ReferenceAttention.supports(spec, TorchDevice("cpu"))
    assert not answer.ok
    assert "causal" in answer.reason
