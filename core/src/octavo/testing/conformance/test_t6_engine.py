"""Tier 6: whole tiny models. Tokens agree with a plain CPU model, and with each other whatever the settings are."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from octavo import SamplingParams
from octavo.testing.conformance.engines import GREEDY, dtype_of, engine, tokens
from octavo.testing.conformance.subject import Subject
from octavo.testing.tiny import make_model

MODELS = ("llama", "qwen3", "gemma2")
"""Plain grouped-query attention; query and key norms; sliding windows with soft caps."""

GAP = {"float32": 1e-3, "float16": 0.1, "bfloat16": 0.4}
"""How far below the likeliest token, in logits, a greedy choice may lie: rounding flips near ties."""

MIXED = [
    GREEDY,
    SamplingParams(temperature=0.8, seed=7, max_tokens=24, ignore_eos=True),
    SamplingParams(temperature=1.2, seed=8, top_k=20, top_p=0.9, max_tokens=20, ignore_eos=True),
    SamplingParams(temperature=0.9, seed=9, min_p=0.02, repetition_penalty=1.2, max_tokens=18, ignore_eos=True),
    SamplingParams(temperature=0.0, frequency_penalty=0.5, presence_penalty=0.3, max_tokens=24, ignore_eos=True),
    SamplingParams(temperature=0.0, logit_bias={5: 50.0}, min_tokens=3, max_tokens=6, ignore_eos=True),
]


def prompts() -> list[list[int]]:
    """Token ids: one token, shared beginnings, lengths around a block's and beyond a step's."""
    generator = torch.Generator().manual_seed(3)
    shared = torch.randint(3, 380, (40,), generator=generator).tolist()
    tails = [torch.randint(3, 380, (n,), generator=generator).tolist() for n in (1, 15, 16, 17, 33)]
    return [[17], shared + tails[0], shared + tails[1], tails[2], tails[3], shared + tails[4]]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {name: make_model(tmp_path_factory.mktemp(name), name, seed=2, tokenizer=False) for name in MODELS}


@pytest.fixture(scope="module", params=MODELS)
def folder(request: pytest.FixtureRequest, folders: dict[str, Path]) -> Path:
    return folders[request.param]


@pytest.fixture(scope="module")
def usual(subject: Subject, folder: Path) -> list[list[int]]:
    """What the default settings give."""
    return tokens(engine(subject, folder), prompts(), MIXED)


def test_greedy_tokens_are_the_likeliest_of_a_plain_model(subject: Subject, folder: Path) -> None:
    asked = prompts()
    plain = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    for prompt, generated in zip(asked, tokens(engine(subject, folder), asked, GREEDY), strict=True):
        assert len(generated) == GREEDY.max_tokens
        with torch.no_grad():
            logits = plain(torch.tensor([prompt + generated])).logits[0, len(prompt) - 1 : -1]
        gap = logits.amax(-1) - logits.gather(-1, torch.tensor(generated)[:, None])[:, 0]
        assert gap.max() <= GAP[dtype_of(subject)], f"a token lies {gap.max():.4f} below the likeliest"


SETTINGS: dict[str, dict[str, Any]] = {
    "no_prefix_cache": {"enable_prefix_caching": False},
    "small_chunks": {"max_num_batched_tokens": 16},
    "no_chunked_prefill": {"enable_chunked_prefill": False},
    "no_run_ahead": {"run_ahead": 0},
    "run_ahead": {"run_ahead": 1},
    "eager": {"enforce_eager": True},
    "few_sequences_and_blocks": {"max_num_seqs": 3, "num_kv_blocks": 12},
}


@pytest.mark.parametrize("setting", SETTINGS)
def test_a_setting_changes_no_token(subject: Subject, folder: Path, usual: list[list[int]], setting: str) -> None:
    needs = {"no_prefix_cache": "prefix_cache", "small_chunks": "chunked_prefill"}.get(setting)
    if needs is not None and needs not in subject.caps.features:
        pytest.skip(f"{needs} is not claimed")
    assert tokens(engine(subject, folder, **SETTINGS[setting]), prompts(), MIXED) == usual


def test_batch_mates_change_no_token(subject: Subject, folder: Path, usual: list[list[int]]) -> None:
    with engine(subject, folder) as llm:
        alone = [
            llm.generate([prompt], params, use_tqdm=False)[0].outputs[0].token_ids
            for prompt, params in zip(prompts(), MIXED, strict=True)
        ]
    assert alone == usual


def test_a_cached_prefix_changes_no_token(subject: Subject, folder: Path) -> None:
    if "prefix_cache" not in subject.caps.features:
        pytest.skip("prefix_cache is not claimed")
    with engine(subject, folder) as llm:
        first = llm.generate(prompts(), GREEDY, use_tqdm=False)
        again = llm.generate(prompts(), GREEDY, use_tqdm=False)
    assert [o.outputs[0].token_ids for o in again] == [o.outputs[0].token_ids for o in first]
    assert any(output.num_cached_tokens for output in again), "the second time, prompts must come from the cache"


def test_own_kernels_and_reference_kernels_agree(subject: Subject, folder: Path) -> None:
    families = [family for family in ("attention", "linear") if subject.kernels.classes(family)]
    ops = [kernel.what for kernel in subject.ops() if kernel.provider != "reference"]
    if not families and not ops:
        pytest.skip("the platform has no kernel of its own")
    forced = tuple((name, "reference") for name in [*families, *ops])
    reference = tokens(engine(subject, folder, kernels=forced, enforce_eager=True), prompts(), GREEDY)
    assert tokens(engine(subject, folder), prompts(), GREEDY) == reference
