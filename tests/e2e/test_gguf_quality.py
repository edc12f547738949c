"""What computing GGUF weights in their own bits costs: SmolLM2 and Gemma 3 as packaged, by the CPU's compiled kernels.

Held against the same weights unpacked, in float32 (perplexity of a text), and against llama.cpp (greedy tokens), which
rounds activations to 8 bits too: near-ties fall either way, so a token is right if llama.cpp's own logits put no other
more than `NEAR_TIE` above it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import numpy as np
import pytest

from octavo import LLM, SamplingParams
from octavo.testing.real_models import gemma3_gguf, smollm2_gguf
from octavo_cpu import native

NEAR_TIE = {"float32": 0.5, "bfloat16": 0.75}
"""In logits, by the dtype of activations: a bfloat16 of Gemma's logits, 16 to 32, is up to 0.06 beside its number."""
PERPLEXITY_RATIO = 1.005
NUM_NEW = 32
LENGTHS = (5, 16, 33, 64, 128, 255, 512)
PIECES, PIECE_TOKENS = 6, 1536
"""Of the text. One piece alone says 0.3 to 0.6 percent where all say 0.47."""

pytestmark = [
    pytest.mark.slow,
    pytest.mark.real_model,
    pytest.mark.timeout(900),
    pytest.mark.skipif(bool(native.why_not()), reason=native.why_not() or "-"),
]


@pytest.fixture(scope="module", params=[smollm2_gguf, gemma3_gguf], ids=["smollm2", "gemma3"])
def model(request: pytest.FixtureRequest) -> Path:
    path: Path = request.param()
    return path


def engine(model: Path, dtype: str, int8_activations: str) -> LLM:
    return LLM(
        str(model),
        platform="cpu",
        dtype=dtype,
        max_model_len=2048,
        kv_cache_memory_bytes=1 << 30,
        platform_options={"int8_activations": int8_activations},
    )


def english() -> str:
    return "\n".join(topics[key] for key in sorted(topics))[:60_000]


def perplexity(llm: LLM) -> float:
    ids = llm.get_tokenizer().encode(english())[: PIECES * PIECE_TOKENS]
    assert len(ids) == PIECES * PIECE_TOKENS
    logprobs: list[float] = []
    for start in range(0, len(ids), PIECE_TOKENS):
        piece = ids[start : start + PIECE_TOKENS]
        (result,) = llm.generate([piece], SamplingParams(max_tokens=0, prompt_logprobs=0), use_tqdm=False)
        scored = zip(piece[1:], result.prompt_logprobs[1:], strict=True)
        logprobs += [entry[token].logprob for token, entry in scored]
    return math.exp(-sum(logprobs) / len(logprobs))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_perplexity_is_that_of_unpacked_weights(model: Path, dtype: str) -> None:
    with engine(model, "float32", "never") as exact, engine(model, dtype, "always") as ours:
        expected, found = perplexity(exact), perplexity(ours)
    assert found < expected * PERPLEXITY_RATIO, f"{found:.3f} instead of {expected:.3f}"


@pytest.fixture
def llama_logits(model: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[Sequence[int]], Any]]:
    """Token ids -> llama.cpp's logits [T, V] behind each of them."""
    import llama_cpp  # compiled for minutes where no wheel fits: the command that runs slow tests installs it

    make_params = llama_cpp.llama_cpp.llama_model_default_params

    def without_repacking() -> Any:
        params = make_params()
        params.use_extra_bufts = False  # built by GCC 12, its AMX kernels crash
        return params

    monkeypatch.setattr(llama_cpp.llama_cpp, "llama_model_default_params", without_repacking)
    llama = llama_cpp.Llama(str(model), n_ctx=1024, n_threads=2, logits_all=True, verbose=False)

    def logits(ids: Sequence[int]) -> Any:
        llama.reset()
        llama.eval(list(ids))
        return np.array(llama.scores[: len(ids)])

    yield logits
    llama.close()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_greedy_tokens_are_llama_cpps(model: Path, dtype: str, llama_logits: Callable[[Sequence[int]], Any]) -> None:
    greedy = SamplingParams(temperature=0.0, max_tokens=NUM_NEW, ignore_eos=True)
    with engine(model, dtype, "always") as llm:
        ids = llm.get_tokenizer().encode(english(), add_special_tokens=False)
        prompts = [ids[900 * i : 900 * i + length] for i, length in enumerate(LENGTHS)]
        answers = [list(result.outputs[0].token_ids) for result in llm.generate(prompts, greedy, use_tqdm=False)]
    for prompt, answer in zip(prompts, answers, strict=True):
        logits = llama_logits(prompt + answer)[len(prompt) - 1 : -1]
        gap = logits.max(-1) - logits[np.arange(NUM_NEW), answer]
        worst = int(gap.argmax())
        assert gap[worst] <= NEAR_TIE[dtype], f"token {worst} after {len(prompt)} lies {gap[worst]:.3f} below the best"
