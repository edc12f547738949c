"""SmolLM2 and Gemma 3 as packaged: greedy tokens are transformers' greedy tokens, alone and all at once.

A token counts as greedy when transformers' own logits, given everything before it, put no other token more than
`NEAR_TIE` above it. So two tokens that are as good as equal are both right, and nothing else is.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from pydoc_data.topics import topics

import pytest
import torch

from octavo import LLM, SamplingParams
from octavo.testing.real_models import gemma3_gguf, smollm2_gguf

NEAR_TIE = 1e-3
NUM_NEW = 64
LENGTHS = (5, 6, 9, 12, 15, 16, 17, 31, 33, 48, 64, 97, 128, 160, 255, 300, 416, 512, 640, 800)

pytestmark = [pytest.mark.slow, pytest.mark.real_model, pytest.mark.timeout(1800)]


@pytest.fixture(scope="module", params=[smollm2_gguf, gemma3_gguf], ids=["smollm2", "gemma3"])
def model_file(request: pytest.FixtureRequest) -> Path:
    path: Path = request.param()
    return path


@pytest.fixture(scope="module")
def llm(model_file: Path) -> Iterator[LLM]:
    with LLM(
        str(model_file), platform="cpu", dtype="float32", max_model_len=1024, kv_cache_memory_bytes=1 << 30
    ) as llm:
        yield llm


@pytest.fixture(scope="module")
def reference(model_file: Path) -> torch.nn.Module:
    from transformers import AutoModelForCausalLM

    model: torch.nn.Module = AutoModelForCausalLM.from_pretrained(
        model_file.parent, gguf_file=model_file.name, dtype=torch.float32
    )
    return model.eval()


@pytest.fixture(scope="module")
def prompts(llm: LLM) -> list[list[int]]:
    """English text of the wanted lengths, each from another place."""
    text = "\n".join(topics[key] for key in sorted(topics))
    ids = llm.get_tokenizer().encode(text[:120_000], add_special_tokens=False)
    starts = [i * 900 for i in range(len(LENGTHS))]
    return [ids[start : start + length] for start, length in zip(starts, LENGTHS, strict=True)]


def assert_greedy(reference: torch.nn.Module, prompt: list[int], output: list[int]) -> None:
    assert len(output) == NUM_NEW
    with torch.inference_mode():
        logits = reference(torch.tensor([prompt + output])).logits[0, len(prompt) - 1 : -1].float()
    chosen = logits.gather(-1, torch.tensor(output)[:, None])[:, 0]
    gap = logits.amax(-1) - chosen
    worst = int(gap.argmax())
    assert gap[worst] <= NEAR_TIE, f"token {worst} of a {len(prompt)}-token prompt is {gap[worst]:.4f} below the best"


PARAMS = SamplingParams(temperature=0.0, max_tokens=NUM_NEW, ignore_eos=True)


def test_each_prompt_alone_gives_greedy_tokens(llm: LLM, reference: torch.nn.Module, prompts: list[list[int]]) -> None:
    for prompt in prompts:
        (result,) = llm.generate([prompt], PARAMS)
        assert_greedy(reference, prompt, result.outputs[0].token_ids)


def test_all_prompts_at_once_give_greedy_tokens(llm: LLM, reference: torch.nn.Module, prompts: list[list[int]]) -> None:
    llm.reset_prefix_cache()
    for prompt, result in zip(prompts, llm.generate(prompts, PARAMS), strict=True):
        assert_greedy(reference, prompt, result.outputs[0].token_ids)
