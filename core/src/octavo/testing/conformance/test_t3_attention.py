"""Tier 3: every attention backend, over a paged cache in its own layout, against dense attention."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from octavo.ops.attention import quantized
from octavo.plugin import (
    AttentionBackend,
    AttentionSpec,
    AttnLayer,
    BatchKey,
    BatchLimits,
    Device,
    KVLayout,
    MultipleOf,
    start_step,
)
from octavo.testing.conformance.paged import Case, Inputs, build, dense, kv_spec_of, with_block_size
from octavo.testing.conformance.subject import Kernel, Subject, check_usefulness

ALLOWED = {"float32": 2e-5, "float16": 4e-3, "bfloat16": 3e-2}
NARROW = {"int8": 0.04, "float8_e4m3fn": 0.16, "float8_e5m2": 0.3}
"""Error with a cache of fewer bits: of its rounding, 1/254 of a row's largest, 1/16 and 1/8 of a number."""
LIMITS = BatchLimits(max_num_tokens=256, max_num_seqs=16, max_model_len=256)
DECODES = [(9, 1), (33, 1), (0, 1), (100, 1)]
MIXED = [(16, 1), (0, 17), (20, 13), (48, 16), (63, 2)]


def spec_of(dtype: str, num_heads: int = 4, num_kv_heads: int = 2, head_dim: int = 64) -> AttentionSpec:
    return AttentionSpec(
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        scale=head_dim**-0.5,
        dtype=dtype,
        kv_dtype=dtype,
        block_size=16,
    )


def cases(dtype: str) -> Iterator[tuple[str, Case]]:
    """The batches by name."""
    plain = spec_of(dtype)
    yield "one_token", Case(spec=plain, lens=[(0, 1)])
    yield "decode", Case(spec=plain, lens=DECODES)
    yield "prefill", Case(spec=plain, lens=[(0, 33), (0, 16), (0, 5)])
    yield "chunked", Case(spec=plain, lens=[(16, 16), (5, 40), (31, 2)])
    yield "mixed", Case(spec=plain, lens=MIXED)
    yield "drafts", Case(spec=plain, lens=[(30, 4), (7, 4), (64, 4)])
    yield "padded", Case(spec=plain, lens=DECODES, pad_tokens=4, pad_seqs=4)
    yield "padded_mixed", Case(spec=plain, lens=MIXED, pad_tokens=15, pad_seqs=3)
    for heads, kv_heads in ((8, 8), (8, 1), (6, 2)):
        yield f"heads_{heads}_{kv_heads}", Case(spec=spec_of(dtype, heads, kv_heads), lens=MIXED)
    for dim in (16, 80, 128, 256):
        yield f"head_dim_{dim}", Case(spec=spec_of(dtype, head_dim=dim), lens=MIXED)
    for window in (8, 24):
        yield f"window_{window}", Case(spec=replace(plain, window=window), lens=[*DECODES, *MIXED])
    yield "softcap", Case(spec=replace(plain, softcap=2.0), lens=MIXED)
    yield "sinks", Case(spec=replace(plain, sinks=True), lens=MIXED)
    yield "window_softcap", Case(spec=replace(plain, softcap=5.0, window=12), lens=MIXED)


@pytest.mark.parametrize("case", [name for name, _ in cases("float32")])
def test_attention_agrees_with_dense(subject: Subject, attention: Kernel, dtype: str, case: str) -> None:
    check(subject, attention, fit(subject, dict(cases(dtype))[case]))


def test_an_attention_class_is_good_for_something(subject: Subject, attention: Kernel) -> None:
    batches = [fit(subject, case) for dtype in subject.caps.dtypes for _, case in cases(dtype)]
    check_usefulness(subject, attention, (case.spec for case in batches))


def test_every_claimed_block_size_works(subject: Subject, attention: Kernel, dtype: str) -> None:
    for rule in subject.caps.schedule.block_sizes:
        sizes = [n * rule.value for n in (1, 2, 16)] if isinstance(rule, MultipleOf) else [rule]
        for size in sizes:
            check(subject, attention, with_block_size(Case(spec=spec_of(dtype), lens=MIXED), size))


@pytest.mark.parametrize("kv_dtype", ["int8", "float8_e4m3fn", "float8_e5m2"])
def test_a_claimed_kv_dtype_keeps_what_attention_needs(
    subject: Subject, attention: Kernel, dtype: str, kv_dtype: str
) -> None:
    if kv_dtype not in subject.caps.kv_dtypes:
        pytest.skip(f"a cache of {kv_dtype} is not claimed")
    for lens in (DECODES, MIXED):
        case = fit(subject, Case(spec=replace(spec_of(dtype), kv_dtype=kv_dtype), lens=lens))
        check(subject, attention, case, allowed=NARROW[kv_dtype])


def test_random_batches_agree_with_dense(subject: Subject, attention: Kernel, dtype: str) -> None:
    generator = torch.Generator().manual_seed(11)
    for seed in range(12):
        draw = torch.randint(0, 90, (6, 2), generator=generator).tolist()
        lens = [(context, 1 if seed % 3 == 0 else 1 + new % 24) for context, new in draw]
        # Decodes stand first in every batch.
        lens.sort(key=lambda pair: pair[1] != 1)
        check(subject, attention, fit(subject, Case(spec=spec_of(dtype), lens=lens, seed=seed)))


def test_a_captured_plan_serves_longer_contexts(subject: Subject, attention: Kernel) -> None:
    if subject.caps.graph == "none":
        pytest.skip("no capture claimed")
    if attention.provider == "reference":
        pytest.skip("the reference walks the host's lengths and is not meant for capture")
    if not getattr(attention.fn, "graph_safe", True):
        pytest.skip("says that it is not meant for capture")
    device = subject.device
    runner = subject.platform.make_graph_runner(subject.config, device)
    assert runner is not None
    short = fit(subject, Case(spec=spec_of(subject.caps.default_dtype), lens=[(3, 1), (1, 1), (9, 1), (2, 1)]))
    long = replace(short, lens=[(100, 1), (40, 1), (17, 1), (64, 1)], seed=1)
    skip_refusal(attention, short.spec, device)
    layout = layout_of(subject, attention, short)
    with device.inference():
        # One set of persistent buffers, wide enough for the longest context; each case is copied into them.
        persistent = build(long, layout, device)
        backend: AttentionBackend = attention.fn(short.spec, LIMITS, device)
        plan = backend.plan(persistent.batch, graph=True)
        layer, out = AttnLayer(index=0), torch.empty_like(persistent.q)

        def step() -> torch.Tensor:
            start_step(backend, plan)
            return backend.run(layer, persistent.q, persistent.k, persistent.v, persistent.kv, plan, out)

        handle = runner.prepare(BatchKey(num_tokens=4, num_seqs=4), step)
        for case in (short, long):
            fresh = build(case, layout, device)
            overwrite(persistent, fresh)
            backend.plan(
                replace(
                    persistent.batch,
                    max_kv_len=fresh.batch.max_kv_len,
                    q_starts_host=fresh.batch.q_starts_host,
                    kv_lens_host=fresh.batch.kv_lens_host,
                ),
                graph=True,
            )
            got = runner.run(handle).cpu().float()
            torch.testing.assert_close(got, dense(case, fresh), atol=3e-2, rtol=3e-2)
    runner.close()


def overwrite(target: Inputs, source: Inputs) -> None:
    """Copy a case of the same shape (or a smaller cache) into persistent tensors."""
    for name in ("q", "k", "v"):
        getattr(target, name).copy_(getattr(source, name))
    for name in ("q_starts", "kv_lens", "slots"):
        getattr(target.batch, name).copy_(getattr(source.batch, name))
    target.batch.block_table.zero_()
    target.batch.block_table[:, : source.batch.block_table.shape[1]].copy_(source.batch.block_table)
    num_blocks = source.kv.k.shape[0]
    target.kv.k[:num_blocks].copy_(source.kv.k)
    target.kv.v[:num_blocks].copy_(source.kv.v)


def fit(subject: Subject, case: Case) -> Case:
    """The case in a block size that the platform claims."""
    rule = subject.caps.schedule.block_sizes[0]
    if isinstance(rule, MultipleOf):
        return with_block_size(case, -(-16 // rule.value) * rule.value)
    return with_block_size(case, rule)


def layout_of(subject: Subject, attention: Kernel, case: Case) -> KVLayout:
    spec = kv_spec_of(case.spec)
    return attention.fn.kv_layout(spec) or subject.platform.kv_layout(spec, subject.device)


def skip_refusal(attention: Kernel, spec: AttentionSpec, device: Device) -> None:
    """Skip what the backend refuses, say because a package that it needs is not installed; it must give its reason."""
    answer = attention.fn.supports(spec, device)
    if not answer.ok:
        assert answer.reason, "a refusal must carry a reason"
        pytest.skip(f"refuses: {answer.reason}")


def check(subject: Subject, attention: Kernel, case: Case, *, allowed: float | None = None) -> None:
    """Run the case; compare outputs, and what lies in the cache afterwards. allowed: by default the dtype's error."""
    device, spec = subject.device, case.spec
    skip_refusal(attention, spec, device)
    if allowed is None:
        allowed = subject.settings.error("attention", spec.dtype, ALLOWED[spec.dtype])
    with device.inference():
        inputs = build(case, layout_of(subject, attention, case), device)
        before = [cache.clone() for cache in (inputs.kv.k, inputs.kv.v)]
        backend = attention.fn(spec, LIMITS, device)
        plan = backend.plan(inputs.batch, graph=False)
        start_step(backend, plan)
        out = torch.full_like(inputs.q, float("nan"))
        layer = AttnLayer(index=0, sinks=inputs.sinks)
        got = backend.run(layer, inputs.q, inputs.k, inputs.v, inputs.kv, plan, out)
        device.synchronize()
        if getattr(backend, "takes_written_kv", False):
            # What it has just written itself lies there as if another kernel had.
            again = backend.run(layer, inputs.q, None, None, inputs.kv, plan, torch.full_like(inputs.q, float("nan")))
            assert torch.equal(again, got), "a written cache gives other results than keys and values"
    assert got.data_ptr() == out.data_ptr(), "run must fill and return `out`"
    real = got[: case.num_tokens].cpu().float()
    torch.testing.assert_close(real, dense(case, inputs), atol=allowed, rtol=allowed)
    assert not got.isnan().any(), "padding tokens must not become NaN: they run through the layers behind"
    check_cache(case, inputs, before)
    subject.proved.add(str(attention))


def check_cache(case: Case, inputs: Inputs, before: list[torch.Tensor]) -> None:
    """New keys and values lie where the block table says, and nothing but the null block is disturbed."""
    size = case.spec.block_size
    for cache, old, sequences in zip((inputs.kv.k, inputs.kv.v), before, (inputs.keys, inputs.values), strict=True):
        # Written on the host: on a device every place would be a launch, or a program to compile.
        expected = old.to("cpu", copy=True)
        for (context, new), table, tensor in zip(case.lens, inputs.tables, sequences, strict=True):
            for position in range(context, context + new):
                row = quantized(tensor[position]) if expected.dtype == torch.int8 else tensor[position].to(expected)
                expected[table[position // size], :, position % size] = row
        assert torch.equal(cache.cpu()[1:], expected[1:]), (
            "the cache does not hold what was to be written, and only that"
        )
