"""A real model on torch_tpu, executed by XLA:CPU."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from octavo import LLM, SamplingParams
from octavo.testing.real_models import smollm2_gguf
from xla_cpu import num_programs

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


def test_smollm2_answers_as_on_the_cpu_and_compiles_nothing_more(
    tpu_on_cpu: str, caplog: pytest.LogCaptureFixture
) -> None:
    prompts = ["The capital of France is", "Once upon a time, there was a little girl who"]
    params = SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True)

    def answers(llm: LLM) -> list[tuple[str, list[int]]]:
        outputs = [output.outputs[0] for output in llm.generate(prompts, params, use_tqdm=False)]
        return [(output.text, list(output.token_ids)) for output in outputs]

    with LLM(str(smollm2_gguf()), platform="cpu", **SETTINGS) as llm:
        expected = answers(llm)
    caplog.set_level(logging.INFO, logger="octavo.worker")
    with LLM(str(smollm2_gguf()), platform=tpu_on_cpu, **SETTINGS) as llm:
        compiled = num_programs()
        found = answers(llm)
        assert num_programs() == compiled
    assert "2 shapes of steps to compile" in [record.getMessage() for record in caplog.records]
    assert "Paris" in expected[0][0]
    assert found == expected
