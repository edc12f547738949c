"""The compiled attention on every instruction set of this machine, against dense float32 attention."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from octavo.ops.attention import ReferenceAttention
from octavo.plugin import AttentionSpec, AttnLayer, BatchLimits, KVSpec, KVView
from octavo.testing.conformance.paged import Case, Inputs, build, dense, kv_spec_of
from octavo_cpu import native
from octavo_cpu.attention_native import NativeAttention, Plan
from octavo_cpu.device import CpuDevice
from octavo_cpu.kernels.build import HERE, OF_FILE, sources

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


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_sanitizers_find_nothing(tmp_path: Path) -> None:
    """Every cache, odd shapes and threads in buffers of exact size, under AddressSanitizer and UBSan."""
    if shutil.which("g++") is None:
        pytest.skip("g++ is not installed")
    flags = ["-std=c++17", "-O0", "-g1", "-pthread", "-fsanitize=address,undefined", "-fno-sanitize-recover=all"]
    objects = []
    for file in [*sources(), Path(__file__).with_name("sanitized_attention.cpp")]:
        objects.append(str(tmp_path / f"{file.stem}.o"))
        command = ["g++", *flags, *OF_FILE.get(file.name, ()), f"-I{HERE}", "-c", str(file), "-o", objects[-1]]
        subprocess.run(command, check=True)
    subprocess.run(["g++", *flags, *objects, "-o", str(tmp_path / "sanitized")], check=True)
    done = subprocess.run([tmp_path / "sanitized"], capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    assert "steps" in done.stdout
