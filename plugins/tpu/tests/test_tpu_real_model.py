"""A real model on torch_tpu, executed by XLA:CPU."""

from __future__ import annotations

from typing import Any

import pytest

from octavo import LLM, SamplingParams
from octavo.testing.real_models import smollm2_gguf

pytestmark = [pytest.mark.real_model, pytest.mark.timeout(900)]

SETTINGS: dict[str, Any] = {
    "dtype": "float32",
    "quantization": "none",
    "max_num_seqs": 2,
    "max_num_batched_tokens": 16,
    "max_model_len": 48,
    "num_kv_blocks": 9,
    "block_size": 16,
}


def test_smollm2_answers_as_on_the_cpu(tpu_on_cpu: str) -> None:
    prompts = ["The capital of France is", "Once upon a time, there was a little girl who"]
    params = SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True)
    texts = []
    for platform in ("cpu", tpu_on_cpu):
        with LLM(str(smollm2_gguf()), platform=platform, **SETTINGS) as llm:
            texts.append([output.outputs[0].text for output in llm.generate(prompts, params, use_tqdm=False)])
    assert "Paris" in texts[0][0]
    assert texts[0] == texts[1]
