"""Triton's paged attention, interpreted on the CPU, against dense attention."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed: `make test-triton` makes an environment that has it")

from octavo.ops.attention import kv_write, paged_attention
from octavo.plugin import AttentionSpec, AttnLayer, BatchLimits, MemInfo
from octavo.plugin.torch import TorchDevice
from octavo.testing.conformance.paged import Case, Inputs, build, dense, kv_spec_of
from octavo.triton.attention_backend import TritonAttention
from octavo.triton.attention_tuning import AttentionTuning, DecodeCut, decode_tiles, fit, prefill_tiles

DEVICE = TorchDevice("cpu", memory=lambda: MemInfo(total=0, free=0))
LIMITS = BatchLimits(max_num_tokens=256, max_num_seqs=16, max_model_len=256)
ALLOWED = {"float32": 2e-5, "float16": 4e-3, "bfloat16": 3e-2}
SMALL = AttentionTuning(
    decode=DecodeCut(programs=5, min_tiles=1, block=16),
    decode_rows=16,
    prefill_rows=16,
    prefill_block=32,
    prefill_warps=4,
    prefill_programs_per_unit=3,
)
DECODES = [(9, 1), (33, 1), (0, 1), (70, 1)]
MIXED = [(16, 1), (70, 1), (0, 23), (30, 2), (20, 13)]


def spec_of(*, dtype: str = "float32", heads: int = 4, kv_heads: int = 2, dim: int = 64) -> AttentionSpec:
    return AttentionSpec(
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=dim,
        scale=dim**-0.5,
        dtype=dtype,
        kv_dtype=dtype,
        block_size=16,
    )


def attend(case: Case, inputs: Inputs, *, tuning: AttentionTuning = SMALL, graph: bool = False) -> torch.Tensor:
    """The backend's answer, padding included."""
    backend = TritonAttention.with_tuning(tuning)(case.spec, LIMITS, DEVICE)
    plan = backend.plan(inputs.batch, graph=graph)
    backend.start_step(plan)
    out = torch.full_like(inputs.q, float("nan"))
    layer = AttnLayer(index=0, sinks=inputs.sinks)
    assert backend.run(layer, inputs.q, inputs.k, inputs.v, inputs.kv, plan, out) is out
    again = torch.full_like(inputs.q, float("nan"))
    assert torch.equal(backend.run(layer, inputs.q, None, None, inputs.kv, plan, again), out), "written already"
    assert all((scratch.arrivals == 0).all() for scratch in backend._scratch.values())
    return out


def inputs_of(case: Case) -> Inputs:
    return build(case, TritonAttention.kv_layout(kv_spec_of(case.spec)), DEVICE)


def check(case: Case, *, tuning: AttentionTuning = SMALL, graph: bool = False) -> None:
    inputs = inputs_of(case)
    out = attend(case, inputs, tuning=tuning, graph=graph)
    allowed = ALLOWED[case.spec.dtype]
    torch.testing.assert_close(out[: case.num_tokens].float(), dense(case, inputs), atol=allowed, rtol=allowed)
    assert (out[case.num_tokens :] == 0).all(), "padding tokens become zero"


@pytest.mark.parametrize("lens", [DECODES, MIXED, [(0, 33)], [(16, 16), (5, 40), (31, 20)]])
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(2, 2, 128), (4, 1, 64), (8, 1, 64), (6, 2, 16)])
def test_attention_agrees_with_dense(lens: list[tuple[int, int]], heads: int, kv_heads: int, dim: int) -> None:
    check(Case(spec=spec_of(heads=heads, kv_heads=kv_heads, dim=dim), lens=lens))


@pytest.mark.parametrize("lens", [DECODES, MIXED])
@pytest.mark.parametrize(
    "change",
    [
        pytest.param(lambda spec: replace(spec, window=8), id="window_8"),
        pytest.param(lambda spec: replace(spec, window=24), id="window_24"),
        pytest.param(lambda spec: replace(spec, softcap=2.0), id="softcap"),
        pytest.param(lambda spec: replace(spec, sinks=True), id="sinks"),
        pytest.param(lambda spec: replace(spec, window=12, softcap=5.0, sinks=True), id="all"),
        pytest.param(lambda spec: replace(spec, block_size=8), id="blocks_of_8"),
        pytest.param(lambda spec: replace(spec, block_size=64), id="blocks_of_64"),
        pytest.param(lambda spec: replace(spec, dtype="float16", kv_dtype="float16"), id="float16"),
        pytest.param(lambda spec: replace(spec, dtype="bfloat16", kv_dtype="bfloat16"), id="bfloat16"),
    ],
)
def test_every_option_agrees_with_dense(
    lens: list[tuple[int, int]], change: Callable[[AttentionSpec], AttentionSpec]
) -> None:
    check(Case(spec=change(spec_of()), lens=lens))


@pytest.mark.parametrize("programs", [1, 2, 3, 4, 40])
def test_any_number_of_programs_shares_the_work(programs: int) -> None:
    # One long sequence among short ones, and a group of three, which fills no power of two.
    lens = [(5, 1), (200, 1), (0, 1), (18, 1)]
    tuning = replace(SMALL, decode=replace(SMALL.decode, programs=programs))
    check(Case(spec=spec_of(heads=6, kv_heads=2, dim=16), lens=lens), tuning=tuning)


def test_shares_are_not_cut_below_the_least_number_of_tiles() -> None:
    check(
        Case(spec=spec_of(dim=16), lens=DECODES),
        tuning=replace(SMALL, decode=replace(SMALL.decode, programs=40, min_tiles=3)),
    )


def test_results_repeat_exactly() -> None:
    case = Case(spec=spec_of(dim=16), lens=[(120, 1), (77, 1)])
    assert torch.equal(*(attend(case, inputs_of(case)) for _ in range(2)))


@pytest.mark.parametrize("fence", [False, True])
def test_wide_tiles_and_no_fence_agree_with_dense(fence: bool) -> None:
    check(
        Case(spec=spec_of(dim=32), lens=MIXED), tuning=AttentionTuning(decode=DecodeCut(programs=3), decode_fence=fence)
    )


@pytest.mark.parametrize("graph", [False, True])
@pytest.mark.parametrize("lens", [DECODES, MIXED, [(0, 40)]])
def test_padding_becomes_zero(lens: list[tuple[int, int]], graph: bool) -> None:
    check(Case(spec=spec_of(dim=16), lens=lens, pad_tokens=9, pad_seqs=3), graph=graph)


@pytest.mark.parametrize(("new", "heads"), [(3, 2), (3, 16), (8, 8)])
def test_drafts_go_through_the_decode_kernel(new: int, heads: int) -> None:
    case = Case(spec=spec_of(heads=heads, kv_heads=2, dim=16), lens=[(30, new), (7, 1), (0, new), (64, 2)])
    tuning = replace(SMALL, decode_rows=32)
    backend = TritonAttention.with_tuning(tuning)(case.spec, LIMITS, DEVICE)
    plan = backend.plan(inputs_of(case).batch, graph=False)
    assert plan.decode_programs > 0
    assert plan.prefill_programs == 0
    check(case, tuning=tuning)
    check(replace(case, spec=replace(case.spec, window=9)), tuning=tuning)


@pytest.mark.parametrize(
    ("lens", "graph", "decodes", "prefills"),
    [
        (DECODES, False, True, False),
        (DECODES, True, True, False),
        (MIXED, False, True, True),
        ([(0, 33), (7, 20)], False, False, True),
        ([(0, 33), (7, 20)], True, True, True),
    ],
)
def test_only_kernels_that_may_have_work_are_launched(
    lens: list[tuple[int, int]], graph: bool, decodes: bool, prefills: bool
) -> None:
    case = Case(spec=spec_of(dim=16), lens=lens)
    plan = TritonAttention.with_tuning(SMALL)(case.spec, LIMITS, DEVICE).plan(inputs_of(case).batch, graph=graph)
    assert (plan.decode_programs > 0, plan.prefill_programs > 0) == (decodes, prefills)


def test_a_sequence_without_context_gets_zeros() -> None:
    case = Case(spec=spec_of(dim=16), lens=DECODES)
    inputs = inputs_of(case)
    inputs.batch.kv_lens[1] = 0
    out, want = attend(case, inputs), dense(case, inputs)
    want[1] = 0
    torch.testing.assert_close(out, want, atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("window", [None, 10])
def test_memory_that_no_query_sees_is_not_read(window: int | None) -> None:
    case = Case(spec=replace(spec_of(dim=16), window=window), lens=MIXED)
    inputs = inputs_of(case)
    seen = torch.zeros(inputs.kv.k.shape[0], case.spec.block_size, dtype=torch.bool)
    for (context, new), table in zip(case.lens, inputs.tables, strict=True):
        for position in range(max(0, context - window + 1) if window else 0, context + new):
            seen[table[position // 16], position % 16] = True
    for cache in (inputs.kv.k, inputs.kv.v):
        cache.masked_fill_(~seen[:, None, :, None], float("nan"))
    torch.testing.assert_close(attend(case, inputs), dense(case, inputs), atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("max_q_len", [1, 40])
def test_a_recorded_plan_serves_other_lengths(max_q_len: int) -> None:
    """A replay reads lengths, block tables and slots from the addresses that the plan has seen."""
    spec = spec_of(dim=16)
    shapes = ([(3, 1), (90, 1), (9, 1)], [(100, 1), (2, 1), (40, 1)])
    if max_q_len > 1:
        shapes = ([(3, 1), (0, 36), (9, 3)], [(30, 20), (80, 1), (5, 19)])
    first = inputs_of(Case(spec=spec, lens=shapes[0]))
    table = torch.zeros(3, 16, dtype=torch.int32)
    fixed = replace(
        first.batch,
        block_table=table,
        num_decodes=3 if max_q_len == 1 else 0,
        max_q_len=max_q_len,
        max_kv_len=LIMITS.max_model_len,
    )
    backend = TritonAttention.with_tuning(SMALL)(spec, LIMITS, DEVICE)
    plan = backend.plan(fixed, graph=True)
    for lens in shapes:
        case = Case(spec=spec, lens=lens, seed=1)
        fresh = inputs_of(case)
        for name in ("q_starts", "kv_lens", "slots"):
            getattr(fixed, name).copy_(getattr(fresh.batch, name))
        table[:, : fresh.batch.block_table.shape[1]] = fresh.batch.block_table
        assert backend.plan(fixed, graph=True).scratch is plan.scratch, "a replay's plan takes no memory"
        out = torch.empty_like(fresh.q)
        backend.start_step(plan)
        backend.run(AttnLayer(index=0), fresh.q, fresh.k, fresh.v, fresh.kv, plan, out)
        torch.testing.assert_close(out, dense(case, fresh), atol=2e-5, rtol=2e-5)


def test_random_batches_agree_with_dense() -> None:
    generator = torch.Generator().manual_seed(11)
    for seed in range(4):
        draw = torch.randint(0, 90, (5, 2), generator=generator).tolist()
        lens = sorted(((context, max(1, new - 50)) for context, new in draw), key=lambda pair: pair[1] != 1)
        check(Case(spec=spec_of(dim=16), lens=lens, seed=seed))


def test_strided_inputs_and_outputs_are_taken_as_they_are() -> None:
    """Queries, keys and values may be views into one packed projection."""
    case = Case(spec=spec_of(dim=16), lens=MIXED)
    inputs = inputs_of(case)
    packed = torch.cat((inputs.q, inputs.k, inputs.v), dim=1)
    q, k, v = torch.split(packed, [4, 2, 2], dim=1)
    out = torch.zeros(case.num_tokens, 6, 16)[:, 1:5]
    backend = TritonAttention.with_tuning(SMALL)(case.spec, LIMITS, DEVICE)
    plan = backend.plan(inputs.batch, graph=False)
    backend.start_step(plan)
    backend.run(AttnLayer(index=0), q, k, v, inputs.kv, plan, out)
    torch.testing.assert_close(out, dense(case, inputs), atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("by_head", [False, True])
def test_a_narrow_cache_is_scaled_cut_to_its_range_and_read_back(by_head: bool) -> None:
    case = Case(spec=replace(spec_of(dim=16), kv_dtype="float8_e4m3fn"), lens=MIXED)
    inputs, expected = inputs_of(case), inputs_of(case).kv
    k_scale, v_scale = torch.tensor([0.5, 2.0]), torch.tensor([0.25, 1.0])
    layer = AttnLayer(index=0, k_scale=k_scale, v_scale=v_scale) if by_head else AttnLayer(index=0, k_scale=0.5)
    if not by_head:
        k_scale, v_scale = torch.full((2,), 0.5), torch.ones(2)
    k_scale, v_scale = k_scale[:, None], v_scale[:, None]
    # The interpreter rounds to eight bits wrongly, so what is written has to be a number of the format already.
    k = (inputs.k / k_scale).to(torch.float8_e4m3fn).float() * k_scale
    v = (inputs.v / v_scale).to(torch.float8_e4m3fn).float() * v_scale
    k[0, 0, 0] = 1e6  # beyond the format: its largest number, not NaN
    backend = TritonAttention.with_tuning(SMALL)(case.spec, LIMITS, DEVICE)
    out = torch.empty_like(inputs.q)
    plan = backend.plan(inputs.batch, graph=False)
    backend.start_step(plan)
    backend.run(layer, inputs.q, k, v, inputs.kv, plan, out)

    kv_write((k / k_scale).clamp(-448, 448), v / v_scale, expected.k, expected.v, inputs.batch.slots)
    for got, want in ((inputs.kv.k, expected.k), (inputs.kv.v, expected.v)):
        assert torch.equal(got.float(), want.float())
    batch, spec = inputs.batch, case.spec
    tables = (batch.block_table, batch.q_starts, batch.kv_lens)
    caches = inputs.kv.k.float() * k_scale[:, None], inputs.kv.v.float() * v_scale[:, None]
    want = paged_attention(inputs.q, *caches, *tables, spec.scale)
    torch.testing.assert_close(out, want, atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"head_dim": 80}, "power of two from 16 to 256, not 80"),
        ({"head_dim": 512}, "not 512"),
        ({"block_size": 24}, "block_size must be a power of two, not 24"),
        ({"kv_dtype": "int8"}, "not int8"),
        ({"causal": False}, "only causal"),
        ({"scale": -1.0}, "must be positive, not -1.0"),
        ({"num_heads": 5}, "do not divide"),
        ({"num_heads": 256}, "at most 64"),
        ({"dtype": "float64"}, "no float64"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(change: dict[str, Any], reason: str) -> None:
    assert TritonAttention.supports(spec_of(), DEVICE).ok
    assert reason in TritonAttention.supports(replace(spec_of(), **change), DEVICE).reason


def test_tuning_makes_another_class_and_leaves_the_first() -> None:
    tuned = TritonAttention.with_tuning(SMALL)
    assert issubclass(tuned, TritonAttention)
    assert tuned.name == "triton"
    assert tuned.tuning is SMALL
    assert TritonAttention.tuning == AttentionTuning()


def test_tiles_are_cut_to_the_memory() -> None:
    assert fit(64, 5, decode_tiles, token_bytes=512, memory=64 * 1024) == (64, 5)
    assert fit(64, 5, decode_tiles, token_bytes=512, memory=63 * 1024) == (64, 3)
    assert fit(64, 5, decode_tiles, token_bytes=512, memory=31 * 1024) == (32, 3)
    assert fit(64, 5, decode_tiles, token_bytes=4096, memory=1024) == (16, 3)
    assert fit(128, 3, prefill_tiles, token_bytes=1024, memory=168 * 1024) == (64, 3)
