"""The compiled attention on every instruction set of this machine, against dense float32 attention."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch

from octavo.ops.attention import ReferenceAttention
from octavo.plugin import AttentionSpec, AttnLayer, BatchLimits, KVPlan, KVSpec, KVView
from octavo.testing.conformance.paged import Case, Inputs, build, dense, kv_spec_of
from octavo_cpu import native
from octavo_cpu.attention_native import NativeAttention, Plan, interleaved
from octavo_cpu.device import CpuDevice

pytestmark = pytest.mark.skipif(bool(native.why_not()), reason=native.why_not() or "there is a library")

DEVICE = CpuDevice(num_threads=1)
LIMITS = BatchLimits(max_num_tokens=2048, max_num_seqs=64, max_model_len=8192)
ALLOWED = {"float32": 2e-5, "float16": 4e-3, "bfloat16": 3e-2}
"""Absolute and relative: the order of sums; for 16 bits also the rounding of weights and answers."""

RAGGED = [(5, 1), (700, 1), (0, 1), (15, 1), (16, 1), (40, 20), (0, 37), (16, 16), (1100, 3), (64, 3), (0, 2)]
"""(context before, new tokens): one piece and several, few rows and many, and both sides of every multiple of 16."""


def spec_of(dtype: str = "float32", heads: int = 6, kv_heads: int = 2, dim: int = 64, **changes: object):
    fields = {"kv_dtype": dtype, "block_size": 16, "scale": dim**-0.5} | changes
    return AttentionSpec(num_heads=heads, num_kv_heads=kv_heads, head_dim=dim, dtype=dtype, **fields)


def inputs_of(case: Case) -> Inputs:
    return build(case, NativeAttention.kv_layout(kv_spec_of(case.spec)), DEVICE)


def answer(case: Case, inputs: Inputs, layer: AttnLayer | None = None, *, written: bool = False) -> torch.Tensor:
    backend = NativeAttention(case.spec, LIMITS, DEVICE)
    plan = backend.plan(inputs.batch, graph=False)
    out = torch.full_like(inputs.q, float("nan"))
    k, v = (None, None) if written else (inputs.k, inputs.v)
    layer = layer or AttnLayer(index=0, sinks=inputs.sinks)
    assert backend.run(layer, inputs.q, k, v, inputs.kv, plan, out) is out
    return out


def check(spec: AttentionSpec, lens: Sequence[tuple[int, int]] = RAGGED, seed: int = 0) -> None:
    case = Case(spec=spec, lens=lens, seed=seed)
    inputs = inputs_of(case)
    allowed = ALLOWED[spec.dtype]
    torch.testing.assert_close(answer(case, inputs).float(), dense(case, inputs), atol=allowed, rtol=allowed)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_ragged_batch_equals_dense_attention(isa: str, dtype: str) -> None:
    check(spec_of(dtype))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("heads", "kv_heads"), [(4, 4), (4, 2), (9, 3), *((n, 1) for n in (4, 5, 6, 7, 8, 9, 11, 12, 13, 150))]
)
def test_every_number_of_query_heads_for_a_kv_head(isa: str, dtype: str, heads: int, kv_heads: int) -> None:
    check(spec_of(dtype, heads, kv_heads, 32), [(70, 1), (600, 1), (9, 30), (0, 3)])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("dim", [1, 8, 24, 40, 64, 72, 80, 96, 128, 192, 256])
def test_every_head_size(isa: str, dtype: str, dim: int) -> None:
    check(spec_of(dtype, 4, 2, dim), [(70, 1), (600, 1), (9, 30), (0, 3)])


@pytest.mark.parametrize("block_size", [1, 4, 8, 32, 128, 1024])
def test_every_size_of_blocks(isa: str, block_size: int) -> None:
    check(spec_of("bfloat16", block_size=block_size))


@pytest.mark.parametrize("window", [1, 7, 16, 33, 600, 1000])
def test_window_hides_all_but_the_newest_positions(isa: str, window: int) -> None:
    check(spec_of(window=window))
    check(spec_of("bfloat16", window=window))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    "changes", [{"softcap": 5.0}, {"softcap": 30.0, "window": 30}, {"sinks": True}, {"sinks": True, "window": 9}]
)
def test_softcap_and_sinks(isa: str, dtype: str, changes: dict) -> None:
    check(spec_of(dtype, **changes))


def test_random_batches(isa: str) -> None:
    generator = torch.Generator().manual_seed(3)
    for seed in range(6):
        draw = torch.randint(0, 300, (8, 2), generator=generator).tolist()
        lens = [(context, 1 if i < 4 else 1 + new % 90) for i, (context, new) in enumerate(draw)]
        check(spec_of(("float32", "bfloat16")[seed % 2]), lens, seed)


def test_long_prompt_behind_a_long_context(isa: str) -> None:
    check(spec_of("bfloat16", 3, 1, 32), [(4200, 100), (0, 600)])


def test_non_causal_queries_see_the_whole_context(isa: str) -> None:
    lens = [(0, 1), (0, 5), (0, 50), (20, 30)]
    for dtype in ("float32", "bfloat16"):
        case = Case(spec=spec_of(dtype, causal=False), lens=lens)
        inputs, expected, start = inputs_of(case), [], 0
        for (_, new), keys, values in zip(lens, inputs.keys, inputs.values, strict=True):
            k, v = keys.repeat_interleave(3, dim=1), values.repeat_interleave(3, dim=1)
            logits = torch.einsum("qhd,khd->hqk", inputs.q[start : start + new].float(), k) * case.spec.scale
            expected.append(torch.einsum("hqk,khd->qhd", logits.softmax(-1), v))
            start += new
        allowed = ALLOWED[dtype]
        torch.testing.assert_close(answer(case, inputs).float(), torch.cat(expected), atol=allowed, rtol=allowed)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("scales", [(1.0, 1.0), (0.02, 0.5), (torch.tensor([0.02, 0.03]), torch.tensor([0.5, 0.1]))])
def test_float8_cache_equals_the_reference_over_the_same_cache(isa: str, dtype: str, scales: tuple) -> None:
    case = Case(spec=spec_of(dtype, kv_dtype="float8_e4m3fn"), lens=RAGGED)
    inputs = inputs_of(case)
    layer = AttnLayer(index=0, k_scale=scales[0], v_scale=scales[1])
    found = answer(case, inputs, layer)
    reference = ReferenceAttention(case.spec, LIMITS, DEVICE)
    kv = KVView(k=inputs.kv.k.clone(), v=inputs.kv.v.clone())
    expected = torch.empty_like(found)
    reference.run(layer, inputs.q, inputs.k, inputs.v, kv, reference.plan(inputs.batch, graph=False), expected)
    # The reference rounds a quotient of 16 bits twice, so that some codes are each other's neighbours.
    limit = (2e-3 if dtype == "float32" else 3e-2) * float(expected.float().abs().max())
    assert (found.float() - expected.float()).abs().max() <= limit


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_float8_numbers_are_rounded_as_torch_rounds_them(dtype: torch.dtype) -> None:
    name = str(dtype).removeprefix("torch.")
    bits = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32).short()
    x = (bits.int() << 16).view(torch.float32) if dtype == torch.float32 else bits.view(dtype)
    case = Case(spec=spec_of(name, 1, 1, 64, kv_dtype="float8_e4m3fn"), lens=[(0, len(x) // 64)])
    inputs = inputs_of(case)
    inputs = replace(inputs, k=x.view(-1, 1, 64), v=x.view(-1, 1, 64).flip(0).contiguous())
    answer(case, inputs)
    stored = inputs.kv.k.transpose(1, 2).reshape(-1, 64)[inputs.batch.slots]
    expected = x.float().clamp(-448, 448).to(torch.float8_e4m3fn).view(-1, 64)
    same = stored.view(torch.uint8) == expected.view(torch.uint8)
    assert (same | (stored.float().isnan() & expected.float().isnan())).all()


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_answers_depend_neither_on_threads_nor_on_the_batch_around(isa: str, threads: int) -> None:
    spec = spec_of("bfloat16")
    case = Case(spec=spec, lens=RAGGED)
    inputs = inputs_of(case)
    native.load().octavo_set_threads(1)
    expected = answer(case, inputs)
    native.load().octavo_set_threads(threads)
    for _ in range(20):
        assert torch.equal(answer(case, inputs, written=True), expected)
    start = 0
    for i, (_, new) in enumerate(RAGGED):
        rows, batch = slice(start, start + new), inputs.batch
        start += new
        alone = replace(
            batch,
            num_tokens=new,
            num_seqs=1,
            q_starts_host=batch.q_starts_host[:2] * 0 + [0, new],
            kv_lens_host=batch.kv_lens_host[i : i + 1],
            block_table=batch.block_table[i : i + 1],
            slots=batch.slots[rows],
        )
        one = replace(inputs, batch=alone, q=inputs.q[rows], k=inputs.k[rows], v=inputs.v[rows])
        assert torch.equal(answer(case, one), expected[rows])


def test_new_keys_and_values_land_in_their_slots_and_nowhere_else() -> None:
    case = Case(spec=spec_of("bfloat16"), lens=RAGGED)
    inputs = inputs_of(case)
    before = [cache.clone() for cache in (inputs.kv.k, inputs.kv.v)]
    answer(case, inputs)
    slots, size = inputs.batch.slots, case.spec.block_size
    for cache, old, new in zip((inputs.kv.k, inputs.kv.v), before, (inputs.k, inputs.v), strict=True):
        old[slots // size, :, slots % size] = new
        assert torch.equal(cache, old)


def test_written_keys_give_the_same_and_padding_is_zeroed(isa: str) -> None:
    case = Case(spec=spec_of("bfloat16"), lens=RAGGED, pad_tokens=5, pad_seqs=3)
    inputs = inputs_of(case)
    found = answer(case, inputs)
    assert torch.equal(answer(case, inputs, written=True), found)
    assert (found[case.num_tokens :] == 0).all()
    torch.testing.assert_close(found[: case.num_tokens].float(), dense(case, inputs), atol=3e-2, rtol=3e-2)


def test_what_no_query_sees_is_not_read(isa: str) -> None:
    """Slots past a context and blocks that slid out of the window may hold anything, as they may be others' by now."""
    for dtype in ("float32", "bfloat16"):
        case = Case(spec=spec_of(dtype, window=20), lens=[(200, 1), (200, 3), (200, 40), (3, 1)])
        inputs = inputs_of(case)
        expected = answer(case, inputs)
        seen = torch.zeros(len(inputs.kv.k), case.spec.block_size, dtype=torch.bool)
        for (context, new), table in zip(case.lens, inputs.tables, strict=True):
            for position in range(max(0, context - 19), context + new):
                seen[table[position // 16], position % 16] = True
        for cache in (inputs.kv.k, inputs.kv.v):
            cache.masked_fill_(~seen[:, None, :, None], float("nan"))
        assert torch.equal(answer(case, inputs, written=True), expected)


def test_what_is_no_number_is_not_hidden(isa: str) -> None:
    case = Case(spec=spec_of("bfloat16"), lens=[(20, 1), (9, 30)])
    inputs = inputs_of(case)
    inputs.k[0, 0, 3] = float("nan")
    inputs.v[-1, 1, 5] = float("nan")
    found = answer(case, inputs)
    assert found[0, :3].isnan().all()
    assert found[-1, 3:, 5].isnan().all()
    assert not found[0, 3:].isnan().any()
    # As in the reference, earlier queries of the same prompt may meet it with a weight of 0: others must not.
    assert not found[1:, :, :5].isnan().any()
    assert not found[1:, :3].isnan().any()


def test_strided_queries_and_answers(isa: str) -> None:
    case = Case(spec=spec_of("bfloat16"), lens=RAGGED)
    inputs = inputs_of(case)
    expected = answer(case, inputs)
    packed = torch.cat([inputs.q, inputs.k, inputs.v], dim=1)
    q, k, v = packed.split([6, 2, 2], dim=1)
    assert torch.equal(answer(case, replace(inputs, q=q, k=k, v=v)), expected)
    backend = NativeAttention(case.spec, LIMITS, DEVICE)
    out = torch.zeros(len(q), 6, 80, dtype=q.dtype)[..., :64]
    turned = q.transpose(0, 1).contiguous().transpose(0, 1)
    backend.run(AttnLayer(index=0), turned, k, v, inputs.kv, backend.plan(inputs.batch, graph=False), out)
    assert torch.equal(out, expected)


def test_recorded_plan_keeps_its_address_and_takes_the_new_step() -> None:
    spec = spec_of("bfloat16")
    short, long = (Case(spec=spec, lens=lens) for lens in ([(3, 1), (1, 1)], [(900, 1), (40, 1)]))
    first, second = inputs_of(short), inputs_of(long)
    backend = NativeAttention(spec, LIMITS, DEVICE)
    plan = backend.plan(first.batch, graph=True)
    assert backend.plan(second.batch, graph=True) is plan
    out = torch.empty_like(second.q)
    backend.run(AttnLayer(index=0), second.q, second.k, second.v, second.kv, plan, out)
    torch.testing.assert_close(out.float(), dense(long, second), atol=3e-2, rtol=3e-2)
    assert isinstance(plan, Plan)


def test_step_of_no_tokens_is_nothing() -> None:
    case = Case(spec=spec_of(), lens=[(5, 1)])
    inputs = inputs_of(case)
    batch = replace(inputs.batch, num_tokens=0, num_seqs=0, q_starts_host=inputs.batch.q_starts_host[:1])
    empty = replace(inputs, batch=batch, q=inputs.q[:0], k=inputs.k[:0], v=inputs.v[:0])
    assert answer(case, empty).shape == (0, 6, 64)


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"kv_dtype": "float8_e5m2"}, "e5m2"),
        ({"dtype": "float64"}, "float64"),
        ({"num_heads": 5}, "divide"),
        ({"scale": 0.0}, "positive"),
        ({"causal": False, "window": 8}, "causal"),
    ],
)
def test_refusals_say_why(changes: dict, word: str) -> None:
    answered = NativeAttention.supports(replace(spec_of(), **changes), DEVICE)
    assert not answered.ok
    assert word in answered.reason


def test_scale_of_a_cache_that_is_not_float8_is_refused_by_name() -> None:
    case = Case(spec=spec_of(), lens=[(5, 1)])
    with pytest.raises(ValueError, match="layer 3: k_scale"):
        answer(case, inputs_of(case), AttnLayer(index=3, k_scale=0.5))


def test_layout_keeps_a_head_together() -> None:
    spec = KVSpec(kind="full", num_kv_heads=2, head_dim=64, block_size=16, dtype="float8_e4m3fn")
    layout = NativeAttention.kv_layout(spec)
    assert (layout.order, layout.block_size, layout.dtype) == ("BHNC", 16, "float8_e4m3fn")


def test_keys_and_values_of_different_strides_land_alike(isa: str) -> None:
    case = Case(spec=spec_of("bfloat16"), lens=RAGGED)
    inputs = inputs_of(case)
    expected = answer(case, inputs)
    wide = torch.cat([inputs.k, inputs.k], dim=1)[:, :2]
    assert wide.stride(0) != inputs.v.stride(0)
    assert torch.equal(answer(case, replace(inputs, k=wide)), expected)
    one_by_one = torch.cat([inputs.v, inputs.v], dim=2)[..., :64]
    assert torch.equal(answer(case, replace(inputs, k=wide, v=one_by_one)), expected)


def test_rows_of_a_wider_block_table_are_read_by_their_stride(isa: str) -> None:
    case = Case(spec=spec_of(), lens=RAGGED)
    inputs = inputs_of(case)
    expected = answer(case, inputs)
    table = inputs.batch.block_table
    wider = torch.cat([table, torch.full_like(table, 1)], dim=1)[:, : table.shape[1]]
    assert torch.equal(answer(case, replace(inputs, batch=replace(inputs.batch, block_table=wider))), expected)


def test_layers_of_a_step_share_its_plan_and_nothing_else(isa: str) -> None:
    """Layer after layer over one plan, contexts in several pieces; then other caches and scales by the same backend."""
    spec = spec_of(kv_dtype="float8_e4m3fn")
    lens = [(1100, 1), (600, 3), (5000, 30), (4, 1)]
    cases = [Case(spec=spec, lens=lens, seed=seed) for seed in (0, 1)]
    several = [inputs_of(case) for case in cases]
    layers = [AttnLayer(index=0, k_scale=0.02, v_scale=0.5), AttnLayer(index=0, k_scale=0.03, v_scale=0.25)]
    # From one to the next only the cache or only the layer is another.
    pairs = [(several[i], layers[j]) for i, j in ((0, 0), (1, 0), (1, 1), (0, 1))]
    backend = NativeAttention(spec, LIMITS, DEVICE)
    for inputs, layer in pairs * 2:
        plan = backend.plan(inputs.batch, graph=True)
        for q in (inputs.q, -inputs.q):
            out = torch.empty_like(q)
            backend.run(layer, q, inputs.k, inputs.v, inputs.kv, plan, out)
            assert torch.equal(out, answer(cases[0], replace(inputs, q=q), layer))


def test_weights_of_softmax_are_as_exact_as_their_numbers(isa: str) -> None:
    """One token of score 0 and one of a score s, whose values show the weights: their quotient is e^s."""
    for dtype, allowed in (("bfloat16", 8e-3), ("float32", 1e-6)):
        for score in torch.linspace(-6, 0, 97).bfloat16().tolist():
            case = Case(spec=spec_of(dtype, 1, 1, 32, scale=1.0), lens=[(1, 1)])
            inputs = inputs_of(case)
            table = inputs.tables[0]
            for one in (inputs.q, inputs.k, inputs.v, inputs.kv.k[table[0], 0, 0], inputs.kv.v[table[0], 0, 0]):
                one.zero_()
            inputs.q[0, 0, 0], inputs.k[0, 0, 0] = 1.0, score
            inputs.kv.v[table[0], 0, 0, :16], inputs.v[0, 0, 16:] = 1.0, 1.0
            found = answer(case, inputs)[0, 0].double()
            torch.testing.assert_close(
                found[16:] / found[0], torch.full((16,), score).double().exp(), atol=0, rtol=allowed
            )


def test_layers_lie_apart_in_one_memory() -> None:
    spec = KVSpec(kind="full", num_kv_heads=2, head_dim=8, block_size=16, dtype="bfloat16")
    views = interleaved(KVPlan(spec=spec, num_layers=3, num_blocks=5), DEVICE)
    caches = [cache for view in views for cache in (view.k, view.v)]
    assert all(cache.shape == (5, 2, 16, 8) for cache in caches)
    for number, cache in enumerate(caches, 1):
        cache.fill_(number)
    assert all((cache == number).all() for number, cache in enumerate(caches, 1))
    assert len({cache.untyped_storage().data_ptr() for cache in caches}) == 1


@pytest.mark.parametrize("position", [0, 500, 1090])
@pytest.mark.parametrize("new", [1, 40])
def test_one_score_far_above_all_others_wins_in_whatever_piece_it_lies(isa: str, position: int, new: int) -> None:
    """Far enough that a power of two of the difference is no number of float32."""
    case = Case(spec=spec_of("float32", 1, 1, 64, scale=1.0), lens=[(5000, new)])
    inputs = inputs_of(case)
    inputs.q[:] = inputs.q[0]
    block, offset = inputs.tables[0][position // 16], position % 16
    q = inputs.q[0, 0]
    inputs.kv.k[block, 0, offset] = q * (1000 / q.square().sum())
    found = answer(case, inputs)
    torch.testing.assert_close(found, inputs.kv.v[block, 0, offset].expand_as(found), atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("heads", [2, 6])
@pytest.mark.parametrize("window", [1, 7, 33, 50, 140])
def test_windows_of_neighbouring_rows_begin_in_different_registers(isa: str, window: int, heads: int) -> None:
    for dtype in ("float32", "bfloat16"):
        check(spec_of(dtype, heads, 2, 32, window=window), [(10, 90), (201, 120), (0, 70)])


def test_sequences_whose_values_are_no_numbers_leave_their_neighbours_alone(isa: str) -> None:
    """One thread works on all: where a tile ends, places of another sequence's tokens stand."""
    native.load().octavo_set_threads(1)
    for dtype in ("float32", "bfloat16", "float16"):
        case = Case(spec=spec_of(dtype), lens=[(300, 40), (400, 1), (32, 1), (90, 1), (61, 2), (8, 1), (96, 1)])
        inputs = inputs_of(case)
        expected = answer(case, inputs)
        for sequence in (0, 1, 3, 5):
            inputs.kv.v[inputs.tables[sequence]] = float("nan")
        starts = inputs.batch.q_starts_host
        whole = [row for sequence in (2, 4, 6) for row in range(starts[sequence], starts[sequence + 1])]
        found = answer(case, inputs)
        assert found[:41].isnan().any(-1).all()
        assert torch.equal(found[whole], expected[whole])
