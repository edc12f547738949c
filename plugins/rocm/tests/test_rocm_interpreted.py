"""Whole models on the plugin's table of kernels without a card: Triton interpreted on the host, a step run again, not
replayed. Everything but the recording itself is as on a gfx950: its sizes, padded shapes, plans made once."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

if torch.cuda.is_available():
    pytest.skip("interpreting Triton would hide the card from the other tests", allow_module_level=True)
os.environ.setdefault("TRITON_INTERPRET", "1")

import rocm_interpreted
from rocm_interpreted import Again

from octavo import LLM, SamplingParams
from octavo.plugin import recording as recorder
from octavo.testing.tiny import make_model
from octavo_rocm import products
from octavo_rocm.linear import HipblasltLinear

PROMPTS = [[3, 4, 5, 6, 7], [9, 8, 7], [11] * 20]


@pytest.fixture(autouse=True)
def of_one_test(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What the platform changes in the process, for as long as that lasts, ends with the test."""
    monkeypatch.setattr(products, "card_objection", products.card_objection)
    yield
    rocm_interpreted.serve_hip_on_host()._destroy()
    for made_once in (rocm_interpreted.card, rocm_interpreted.serve_hip_on_host):
        made_once.cache_clear()


@pytest.mark.parametrize("model_type", ["llama", pytest.param("qwen3", marks=pytest.mark.slow)])
def test_recorded_shapes_give_the_tokens_of_cores_own_device(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, model_type: str
) -> None:
    monkeypatch.setenv("OCTAVO_EXTRA_PLATFORMS", "rocm_interpreted=rocm_interpreted,refdev=octavo.testing.refdev")
    monkeypatch.setattr(recorder, "LONG_TOKENS", 16)
    monkeypatch.setattr(recorder, "FEW_SEQS", 2)
    multiplied: list[int] = []
    multiply = HipblasltLinear.apply

    def counted(self: Any, x: Any, w: Any, bias: Any) -> Any:
        multiplied.append(x.shape[0])
        return multiply(self, x, w, bias)

    monkeypatch.setattr(HipblasltLinear, "apply", counted)
    model = str(make_model(tmp_path, model_type, tokenizer=False))
    options = {"max_model_len": 64, "max_num_seqs": 3, "max_num_batched_tokens": 32, "num_kv_blocks": 40}
    params = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True, detokenize=False)
    tokens = {}
    for platform in ("refdev", "rocm_interpreted"):
        with LLM(model, platform=platform, dtype="float32", skip_tokenizer_init=True, **options) as llm:
            Again.used.clear()
            outputs = llm.generate(PROMPTS, params, use_tqdm=False)
            outputs += llm.generate([[12] * 25], params, use_tqdm=False)
        tokens[platform] = [list(o.outputs[0].token_ids) for o in outputs]
    assert tokens["rocm_interpreted"] == tokens["refdev"]
    assert rocm_interpreted.card().arch == "gfx950"
    assert multiplied, "this plugin's products served the model"
    assert {key.max_q_len for key in Again.used} == {0, 1}, "prompts and decoding both went through recorded shapes"
