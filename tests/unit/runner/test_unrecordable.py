"""Kernels that read a step on the host keep its recording off."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch

from octavo import LLM, SamplingParams
from octavo.ops.attention import ReferenceAttention
from octavo.ops.bind import KernelTable
from octavo.plugin import AttentionSpec, BatchLimits, LinearSpec
from octavo.plugin.torch import TorchDevice
from octavo.runner.worker import unrecordable
from octavo.testing.tiny import make_model

DEVICE = TorchDevice("cpu")
SPEC = AttentionSpec(
    num_heads=2, num_kv_heads=1, head_dim=8, scale=1.0, dtype="float32", kv_dtype="float32", block_size=16
)


def test_reference_attention_cannot_be_recorded() -> None:
    table = KernelTable()
    table.linear_kernel(LinearSpec(in_features=4, out_features=4, act_dtype="float32", out_dtype="float32"), DEVICE)
    assert unrecordable(table) == []
    table.attention_backend(SPEC, BatchLimits(max_num_tokens=8, max_num_seqs=2, max_model_len=32), DEVICE)
    assert unrecordable(table) == ["attention reference (2/1 heads of 8 float32, kv float32)"]


@pytest.mark.parametrize("graph_safe", [True, False])
def test_an_op_is_judged_by_its_registration(graph_safe: bool) -> None:
    table = KernelTable()
    table.op("greedy", torch.argmax, provider="mine", graph_safe=graph_safe)
    table.bind("greedy", dtype="float32", device=DEVICE)
    table.bind("rms_norm", dtype="float32", device=DEVICE)
    assert unrecordable(table) == ([] if graph_safe else ["greedy mine (float32)"])


@pytest.mark.parametrize("graph_safe", [True, False])
def test_an_attention_backend_says_itself_whether_a_plan_serves_replays(graph_safe: bool) -> None:
    mine = type("Mine", (ReferenceAttention,), {"name": "mine", "graph_safe": graph_safe})
    table = KernelTable()
    table.attention(mine)
    table.attention_backend(SPEC, BatchLimits(max_num_tokens=8, max_num_seqs=2, max_model_len=32), DEVICE)
    assert unrecordable(table) == ([] if graph_safe else ["attention mine (2/1 heads of 8 float32, kv float32)"])


def test_a_capturing_platform_with_reference_attention_runs_eagerly_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("OCTAVO_EXTRA_PLATFORMS", "refdev=octavo.testing.refdev")
    model = str(make_model(tmp_path, tokenizer=False))
    options = {"max_model_len": 64, "max_num_seqs": 4, "num_kv_blocks": 32, "skip_tokenizer_init": True}
    params = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True, detokenize=False)
    prompts = [[3, 4, 5], [9, 8, 7, 6, 5, 4]]
    caplog.set_level(logging.WARNING)
    tokens = {}
    for backend in ("refdev", "reference"):
        with LLM(model, platform="refdev", attention_backend=backend, **options) as llm:
            outputs = llm.generate(prompts, params, use_tqdm=False)
        tokens[backend] = [list(o.outputs[0].token_ids) for o in outputs]
    assert tokens["reference"] == tokens["refdev"]
    assert [
        r.message for r in caplog.records if "cannot be recorded" in r.message and "attention reference" in r.message
    ]
