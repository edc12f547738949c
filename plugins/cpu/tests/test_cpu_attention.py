"""Paged attention against dense float32 attention written out here."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from octavo.plugin import AttentionSpec, AttnBatch, AttnLayer, BatchLimits, KVSpec, KVView
from octavo_cpu.attention import PagedAttention
from octavo_cpu.attention_plan import FEW, PIECE, Context, Plan
from octavo_cpu.device import CpuDevice

DEVICE = CpuDevice(num_threads=1)
LIMITS = BatchLimits(max_num_tokens=2048, max_num_seqs=64, max_model_len=2048)
TOLERANCE = {"float32": 2e-5, "bfloat16": 2e-2, "float16": 4e-3}


def spec_of(**changes: object) -> AttentionSpec:
    fields = {"num_heads": 6, "num_kv_heads": 2, "head_dim": 64, "dtype": "float32", "block_size": 16} | changes
    fields["kv_dtype"] = fields["dtype"]
    return AttentionSpec(scale=fields["head_dim"] ** -0.5, **fields)


class Case:
    """Sequences of (context before the step, new tokens), with a cache in which their context lies scattered."""

    def __init__(self, spec: AttentionSpec, seqs: list[tuple[int, int]], *, seed: int = 0, shuffle: bool = True):
        g = torch.Generator().manual_seed(seed)
        self.spec, self.seqs = spec, seqs
        dtype = getattr(torch, spec.dtype)
        size, heads, dim = spec.block_size, spec.num_kv_heads, spec.head_dim
        new = np.array([t for _, t in seqs], dtype=np.int32)
        lens = np.array([c + t if t else 0 for c, t in seqs], dtype=np.int32)
        starts = np.concatenate([[0], np.cumsum(new)]).astype(np.int32)
        per_seq = [-(-int(n) // size) for n in lens]
        num_blocks = 1 + sum(per_seq)
        ids = torch.randperm(num_blocks - 1, generator=g) if shuffle else torch.arange(num_blocks - 1)
        ids = (ids + 1).tolist()
        table = np.zeros((len(seqs), max(per_seq, default=1) or 1), dtype=np.int32)
        for i, count in enumerate(per_seq):
            table[i, :count] = [ids.pop(0) for _ in range(count)]
        # Stored as the backend wants it (BNHC), filled with junk that must never be read.
        shape = (num_blocks, size, heads, dim)
        self.kv = KVView(
            k=torch.full(shape, 99.0, dtype=dtype).transpose(1, 2),
            v=torch.full(shape, 99.0, dtype=dtype).transpose(1, 2),
        )
        total = int(starts[-1])
        self.q = torch.randn(total, spec.num_heads, dim, generator=g).to(dtype)
        self.keys = [torch.randn(int(n), heads, dim, generator=g).to(dtype) for n in lens]
        self.values = [torch.randn(int(n), heads, dim, generator=g).to(dtype) for n in lens]
        slots = []
        for i, (context, count) in enumerate(seqs):
            for pos in range(context + count if count else 0):
                block, offset = int(table[i, pos // size]), pos % size
                if pos < context:
                    self.kv.k[block, :, offset] = self.keys[i][pos]
                    self.kv.v[block, :, offset] = self.values[i][pos]
                else:
                    slots.append(block * size + offset)
        self.k = torch.cat([key[len(key) - t :] for key, (_, t) in zip(self.keys, seqs, strict=True)])
        self.v = torch.cat([val[len(val) - t :] for val, (_, t) in zip(self.values, seqs, strict=True)])
        self.slots = slots
        self.batch = AttnBatch(
            num_tokens=total,
            num_seqs=len(seqs),
            num_decodes=sum(1 for _ in iter_while_one(new)),
            max_q_len=int(new.max()),
            max_kv_len=int(lens.max()),
            q_starts=torch.from_numpy(starts),
            kv_lens=torch.from_numpy(lens),
            block_table=torch.from_numpy(table),
            slots=torch.tensor(slots, dtype=torch.int64),
            q_starts_host=starts,
            kv_lens_host=lens,
        )

    def run(self, sinks: torch.Tensor | None = None) -> torch.Tensor:
        backend = PagedAttention(self.spec, LIMITS, DEVICE)
        out = torch.full_like(self.q, float("nan"))
        plan = backend.plan(self.batch, graph=False)
        layer = AttnLayer(index=0, sinks=sinks)
        assert backend.run(layer, self.q, self.k, self.v, self.kv, plan, out) is out
        return out

    def expected(self, sinks: torch.Tensor | None = None) -> torch.Tensor:
        spec, parts, start = self.spec, [], 0
        group = spec.num_heads // spec.num_kv_heads
        for i, (context, count) in enumerate(self.seqs):
            if not count:
                continue
            q = self.q[start : start + count].float()
            start += count
            k = self.keys[i].float().repeat_interleave(group, dim=1)
            v = self.values[i].float().repeat_interleave(group, dim=1)
            logits = torch.einsum("qhd,khd->hqk", q, k) * spec.scale
            if spec.softcap:
                logits = spec.softcap * torch.tanh(logits / spec.softcap)
            query, key = context + torch.arange(count)[:, None], torch.arange(context + count)[None]
            seen = key <= query if spec.causal else torch.ones(count, context + count, dtype=torch.bool)
            if spec.window:
                seen = seen & (key > query - spec.window)
            logits = logits.masked_fill(~seen, float("-inf"))
            if sinks is not None:
                column = sinks[:, None, None].expand(-1, count, 1)
                weights = torch.cat([logits, column], dim=-1).softmax(-1)[..., :-1]
            else:
                weights = logits.softmax(-1)
            parts.append(torch.einsum("hqk,khd->qhd", weights, v))
        return torch.cat(parts)

    def check(self, sinks: torch.Tensor | None = None) -> None:
        tolerance = TOLERANCE[self.spec.dtype]
        torch.testing.assert_close(self.run(sinks).float(), self.expected(sinks), rtol=tolerance, atol=tolerance)


def iter_while_one(counts: np.ndarray):
    for count in counts:
        if count != 1:
            return
        yield count


RAGGED = [(5, 1), (300, 1), (17, 1), (0, 1), (31, 1), (290, 1), (40, 20), (0, 37), (16, 16), (100, 3), (64, 3), (0, 2)]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("block_size", [16, 32])
def test_ragged_batch_equals_dense_attention(dtype: str, block_size: int) -> None:
    Case(spec_of(dtype=dtype, block_size=block_size), RAGGED).check()


@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (9, 3), (8, 1), (8, 2)])
@pytest.mark.parametrize("head_dim", [64, 80, 128, 256])
def test_every_gqa_ratio_and_head_size_equals_dense_attention(heads: int, kv_heads: int, head_dim: int) -> None:
    Case(spec_of(num_heads=heads, num_kv_heads=kv_heads, head_dim=head_dim), RAGGED).check()


@pytest.mark.parametrize("window", [1, 7, 16, 33, 1000])
def test_window_hides_all_but_the_newest_positions(window: int) -> None:
    Case(spec_of(window=window), RAGGED).check()


def test_blocks_that_slid_out_of_the_window_are_not_read() -> None:
    case = Case(spec_of(window=20), [(200, 1), (200, 3), (200, 40)])
    table = case.batch.block_table
    table[:, : (200 - 20) // 16] = 0
    case.kv.k[0] = float("nan")
    case.kv.v[0] = float("nan")
    case.check()


@pytest.mark.parametrize("changes", [{"softcap": 5.0}, {"softcap": 5.0, "window": 30}, {"sinks": True}])
def test_softcap_and_sinks_equal_dense_attention(changes: dict) -> None:
    sinks = torch.linspace(-1, 2, 6) if changes.get("sinks") else None
    Case(spec_of(**changes), RAGGED).check(sinks)
    Case(spec_of(dtype="bfloat16", **changes), RAGGED).check(sinks)


def test_non_causal_queries_see_the_whole_context() -> None:
    Case(spec_of(causal=False), [(0, 1), (0, 5), (0, 50), (20, 30)]).check()


def test_long_chunked_prefill_is_cut_into_pieces_that_see_their_context() -> None:
    Case(spec_of(), [(70, PIECE + 45), (0, PIECE + 30)]).check()
    Case(spec_of(window=100), [(150, PIECE + 45), (0, PIECE + 30)]).check()


def contexts(plan: Plan) -> list[Context]:
    return [r.context for r in plan.rows] + [p.keys for p in plan.pieces if isinstance(p.keys, Context)]


def test_consecutive_blocks_are_read_in_place_and_give_the_same() -> None:
    spec = spec_of()
    for seqs in ([(130, 1)], [(31, 1), (31, 1)], [(40, FEW + 1)]):
        case = Case(spec, seqs, shuffle=False)
        plan = PagedAttention(spec, LIMITS, DEVICE).plan(case.batch, graph=False)
        assert all(context.gathered is None for context in contexts(plan))
        case.check()


def test_padded_sequences_are_skipped_and_padding_tokens_are_zeroed() -> None:
    case = Case(spec_of(), [(20, 1), (9, 4), (0, 0), (0, 0)])
    case.check()
    case.batch = padded(case.batch, num_tokens=8)
    pad = torch.zeros(3, 2, 64)
    case.k, case.v = torch.cat([case.k, pad]), torch.cat([case.v, pad])
    case.q = torch.cat([case.q, torch.ones(3, 6, 64)])
    out = case.run()
    torch.testing.assert_close(out[:5], case.expected()[:5], rtol=2e-5, atol=2e-5)
    assert (out[5:] == 0).all()


def padded(batch: AttnBatch, *, num_tokens: int) -> AttnBatch:
    slots = torch.cat([batch.slots, torch.zeros(num_tokens - batch.num_tokens, dtype=torch.int64)])
    return replace(batch, num_tokens=num_tokens, slots=slots)


def test_new_keys_and_values_land_in_their_slots() -> None:
    case = Case(spec_of(), RAGGED)
    case.run()
    stored = case.kv.k.transpose(1, 2).reshape(-1, 2, 64)[case.batch.slots]
    assert torch.equal(stored, case.k)
    stored = case.kv.v.transpose(1, 2).reshape(-1, 2, 64)[case.batch.slots]
    assert torch.equal(stored, case.v)


def test_queries_may_be_a_strided_part_of_a_packed_projection() -> None:
    case = Case(spec_of(), RAGGED)
    total = len(case.q)
    packed = torch.cat([case.q.flatten(1), case.k.flatten(1), case.v.flatten(1)], dim=1)
    q, k, v = packed.split([6 * 64, 2 * 64, 2 * 64], dim=1)
    case.q, case.k, case.v = q.view(total, 6, 64), k.view(total, 2, 64), v.view(total, 2, 64)
    case.check()


def test_random_batches_equal_dense_attention() -> None:
    rng = np.random.default_rng(1)
    for seed in range(6):
        decodes = [(int(rng.integers(0, 400)), 1) for _ in range(int(rng.integers(0, 20)))]
        others = [(int(rng.integers(0, 100)), int(rng.integers(2, 60))) for _ in range(int(rng.integers(1, 5)))]
        Case(spec_of(num_heads=4, num_kv_heads=2, head_dim=64), decodes + others, seed=seed).check()


@pytest.mark.parametrize(
    ("changes", "word"),
    [({"kv_dtype": "float8_e4m3fn"}, "float8"), ({"dtype": "float64"}, "float64"), ({"num_heads": 5}, "divide")],
)
def test_refusals_say_why(changes: dict, word: str) -> None:
    spec = replace(spec_of(), **changes)
    answer = PagedAttention.supports(spec, DEVICE)
    assert not answer.ok
    assert word in answer.reason


def test_layout_keeps_a_token_together() -> None:
    layout = PagedAttention.kv_layout(KVSpec(kind="full", num_kv_heads=2, head_dim=64, block_size=16, dtype="float32"))
    assert (layout.order, layout.block_size, layout.dtype) == ("BNHC", 16, "float32")
