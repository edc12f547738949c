"""A real model on torch_xla, executed by XLA:CPU."""

from __future__ import annotations

import logging

import pytest

from octavo import LLM, SamplingParams
from octavo.testing.real_models import smollm2_gguf
from one_engine import count

pytestmark = [pytest.mark.real_model, pytest.mark.timeout(1500)]

PROMPTS = ["The capital of France is", "Once upon a time, there was a little girl who"]
TOKENS = [
    [7042, 30, 198, 198, 504, 2988, 314, 42, 216, 34, 32, 33, 40, 29, 32, 33],
    [5732, 288, 1238, 351, 874, 9173, 30, 2306, 761, 253, 2066, 9256, 284, 5732, 288, 1464],
]
"""What the CPU platform answers with the same settings."""


def test_smollm2_answers_as_on_the_cpu_and_compiles_nothing_more(
    tpu_xla_on_cpu: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="octavo.worker")
    params = SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True)
    with LLM(
        str(smollm2_gguf()),
        platform=tpu_xla_on_cpu,
        dtype="float32",
        quantization="none",
        max_num_seqs=2,
        max_num_batched_tokens=16,
        max_model_len=48,
        num_kv_blocks=9,
        block_size=16,
    ) as llm:
        compiled = count("UncachedCompile")
        outputs = [output.outputs[0] for output in llm.generate(PROMPTS, params, use_tqdm=False)]
        assert count("UncachedCompile") == compiled > 0
    assert "2 shapes of steps to compile" in [record.getMessage() for record in caplog.records]
    assert [list(output.token_ids) for output in outputs] == TOKENS
    assert outputs[0].text.startswith(" Paris")
