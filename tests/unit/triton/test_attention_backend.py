"""Triton's paged attention, interpreted on the CPU, against dense attention."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed: `make test-triton` makes an environment that has it")

from octavo.ops.attention import ReferenceAttention
from octavo.plugin import AttentionSpec, AttnLayer, BatchLimits, MemInfo
from octavo.plugin.torch import TorchDevice
from octavo.testing.conformance.paged import Case, Inputs, build, dense, kv_spec_of
from octavo.triton.attention_backend import TritonAttention
from octavo.triton.attention_tuning import AttentionTuning, fit

DEVICE = TorchDevice("cpu", memory=lambda: MemInfo(total=0, free=0))
LIMITS = BatchLimits(max_num_tokens=256, max_num_seqs=16, max_model_len=256)
ALLOWED = {"float32": 2e-5, "float16": 4e-3, "bfloat16": 3e-2}
SMALL = AttentionTuning(
    decode_programs=5, decode_min_tiles=1, decode_block=16, prefill_rows=16, prefill_block=32, prefill_warps=4
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
    out = torch.full_like(inputs.q, float("nan"))
    layer = AttnLayer(index=0, sinks=inputs.sinks)
    assert backend.run(layer, inputs.q, inputs.k, inputs.v, inputs.kv, plan, out) is out
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
