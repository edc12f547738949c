"""Paged attention on Intel's CPU device, against dense attention in float32: mixtures of prompts and decodes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch

from octavo.ops.attention import ReferenceAttention
from octavo.plugin import AttentionSpec, AttnLayer, BatchLimits, KVLayout
from octavo.plugin.torch import TorchDevice
from octavo.testing.conformance.paged import Case, build, dense, kv_spec_of
from octavo_xpu.attention import SyclAttention
from octavo_xpu.device import SyclDevice

ALLOWED = {"float32": 1e-5, "float16": 2e-3, "bfloat16": 1e-2}
LIMITS = BatchLimits(max_num_tokens=256, max_num_seqs=16, max_model_len=2048)

DECODES = ((0, 1), (17, 1), (600, 1))
MIXED = ((5, 1), (40, 1), (0, 23), (31, 9), (300, 3))


def spec(
    dtype: str = "float32",
    *,
    heads: tuple[int, int] = (4, 2),
    head_dim: int = 64,
    block_size: int = 16,
    window: int | None = None,
    softcap: float | None = None,
    sinks: bool = False,
) -> AttentionSpec:
    return AttentionSpec(
        num_heads=heads[0],
        num_kv_heads=heads[1],
        head_dim=head_dim,
        scale=head_dim**-0.5,
        dtype=dtype,
        kv_dtype=dtype,
        block_size=block_size,
        window=window,
        softcap=softcap,
        sinks=sinks,
    )


def layout_of(of: AttentionSpec) -> KVLayout:
    return SyclAttention.kv_layout(kv_spec_of(of))


def check(
    device: SyclDevice,
    of: AttentionSpec,
    lens: Sequence[tuple[int, int]],
    *,
    graph: bool = False,
    written: bool = False,
    padding: int = 0,
) -> None:
    """One step by the kernels and by dense attention."""
    assert SyclAttention.supports(of, device).ok
    case = Case(spec=of, lens=lens, pad_tokens=padding, pad_seqs=padding)
    inputs = build(case, layout_of(of), device)
    backend = SyclAttention(of, LIMITS, device)
    out = torch.full_like(inputs.q, float("nan"))
    layer = AttnLayer(index=0, sinks=inputs.sinks)
    k, v = inputs.k, inputs.v
    plan = backend.plan(inputs.batch, graph=graph)
    if written:
        backend.run(layer, inputs.q, k, v, inputs.kv, plan, out.clone())
        k = v = None
    found = backend.run(layer, inputs.q, k, v, inputs.kv, plan, out)
    assert found is out
    expected = dense(case, inputs)
    error = (found[: case.num_tokens].float() - expected).abs().max() / expected.abs().max()
    assert error <= ALLOWED[of.dtype], f"{error:.2e}"
    assert (found[case.num_tokens :] == 0).all(), "padding tokens are zero"


@pytest.mark.parametrize("dtype", ALLOWED)
def test_prompts_and_decodes_in_every_dtype(device: SyclDevice, dtype: str) -> None:
    check(device, spec(dtype), MIXED, padding=3)
    check(device, spec(dtype), DECODES, padding=2)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize(
    "kind",
    [
        {"heads": (3, 1), "head_dim": 80},
        {"heads": (2, 2), "head_dim": 32, "block_size": 5},
        {"head_dim": 128, "window": 20, "softcap": 30.0, "sinks": True},
    ],
    ids=["odd", "one head a group", "all"],
)
def test_prompts_in_the_matrix_units(device: SyclDevice, kind: dict[str, object], dtype: str) -> None:
    of = spec(dtype, **kind)  # type: ignore[arg-type]
    assert SyclAttention(of, LIMITS, device)._prompt.source == "attention_matrix.cpp"
    check(device, of, MIXED, padding=3)
    check(device, of, MIXED, graph=True)


def test_devices_without_matrix_units_take_every_dtype(plain_device: SyclDevice) -> None:
    for dtype in ALLOWED:
        assert SyclAttention(spec(dtype), LIMITS, plain_device)._prompt.source == "attention.cpp"
        check(plain_device, spec(dtype), MIXED, padding=3)


def test_heads_that_do_not_fit_the_matrix_units_are_left_to_the_others(device: SyclDevice) -> None:
    for kind in ({"head_dim": 40}, {"head_dim": 256}, {"heads": (33, 1), "head_dim": 16}):
        of = spec("bfloat16", **kind)  # type: ignore[arg-type]
        assert SyclAttention(of, LIMITS, device)._prompt.source == "attention.cpp"


@pytest.mark.parametrize(
    "kind",
    [{"window": 8}, {"softcap": 5.0}, {"sinks": True}, {"window": 20, "softcap": 30.0, "sinks": True}],
    ids=["window", "softcap", "sinks", "all"],
)
def test_what_layers_may_ask_for(device: SyclDevice, kind: dict[str, object]) -> None:
    check(device, spec(**kind), MIXED)  # type: ignore[arg-type]
    check(device, spec(**kind), DECODES)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("heads", "head_dim", "block_size"),
    [((3, 1), 80, 16), ((16, 1), 16, 32), ((2, 2), 40, 8), ((4, 2), 256, 5)],
    ids=str,
)
def test_odd_heads_and_blocks(device: SyclDevice, heads: tuple[int, int], head_dim: int, block_size: int) -> None:
    check(device, spec(heads=heads, head_dim=head_dim, block_size=block_size), MIXED)
    check(device, spec(heads=heads, head_dim=head_dim, block_size=block_size), DECODES)


def test_a_long_context_is_read_in_parts_and_added(device: SyclDevice) -> None:
    backend = SyclAttention(spec(sinks=True), LIMITS, device)
    inputs = build(Case(spec=spec(sinks=True), lens=[(1500, 1), (3, 1)]), layout_of(spec()), device)
    plan = backend.plan(inputs.batch, graph=False)
    assert plan.num_parts == 6, "1501 positions in parts of 256"
    check(device, spec(sinks=True), [(1500, 1), (3, 1)])
    check(device, spec(window=700), [(1500, 1), (3, 1)])


def test_a_recorded_plan_serves_any_lengths(device: SyclDevice) -> None:
    """The grid follows from limits: a plan that was made for short contexts is right for long ones."""
    of = spec()
    layout = layout_of(of)
    backend = SyclAttention(of, LIMITS, device)
    short = build(Case(spec=of, lens=[(3, 1), (4, 1)], pad_seqs=1, pad_tokens=1), layout, device)
    plan = backend.plan(short.batch, graph=True)
    case = Case(spec=of, lens=[(900, 1), (33, 1)], pad_seqs=1, pad_tokens=1, seed=3)
    long = build(case, layout, device)
    again = backend.plan(long.batch, graph=True)
    assert (again.num_tiles, again.num_parts, again.clear) == (plan.num_tiles, plan.num_parts, plan.clear)
    full = build(Case(spec=of, lens=[(3, 1), (4, 1), (5, 1)]), layout, device)
    assert backend.plan(full.batch, graph=True).clear, "a later step of this shape may have padding"
    check(device, of, [(900, 1), (33, 1)], graph=True, padding=1)
    check(device, of, MIXED, graph=True, padding=2)


def test_keys_that_core_has_written_are_not_written_again(device: SyclDevice) -> None:
    check(device, spec(), MIXED, written=True)


@pytest.mark.parametrize("by_head", [False, True])
def test_a_scaled_cache_gives_what_the_reference_gives(device: SyclDevice, by_head: bool) -> None:
    of = spec()
    case = Case(spec=of, lens=MIXED)
    k_scale = torch.tensor([0.5, 4.0]) if by_head else 0.25
    v_scale = torch.tensor([2.0, 0.5]) if by_head else 8.0
    outs = []
    for cls in (SyclAttention, ReferenceAttention):
        inputs = build(case, layout_of(of), device)
        backend = cls(of, LIMITS, device)
        layer = AttnLayer(index=0, k_scale=k_scale, v_scale=v_scale)
        plan = backend.plan(inputs.batch, graph=False)
        outs.append(backend.run(layer, inputs.q, inputs.k, inputs.v, inputs.kv, plan, torch.empty_like(inputs.q)))
    assert (outs[0] - outs[1]).abs().max() <= 1e-5 * outs[1].abs().max()


def test_refusals_say_why(device: SyclDevice) -> None:
    for of, word in (
        (spec(head_dim=512), "local memory"),
        (replace(spec(), kv_dtype="int8"), "int8"),
        (replace(spec(), causal=False), "causal"),
        (spec(heads=(64, 1), head_dim=192), "64 heads of 192"),
    ):
        answer = SyclAttention.supports(of, device)
        assert not answer.ok
        assert word in answer.reason
    assert "SYCL" in SyclAttention.supports(spec(), TorchDevice("cpu")).reason
