"""Tier 6: whole tiny models. Tokens agree with a plain CPU model, and with each other whatever the settings are."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from octavo import SamplingParams
from octavo.models.registry import MODELS
from octavo.testing.conformance.engines import (
    GREEDY,
    assert_likeliest,
    engine,
    prompts,
    reference_kernels,
    tokens,
)
from octavo.testing.conformance.subject import Subject
from octavo.testing.tiny import make_model

FAMILIES: dict[str, tuple[str, ...]] = {
    "grouped-query attention": ("llama",),
    "norms of queries and keys": ("qwen3",),
    "sliding windows and soft caps": ("gemma2",),
    "experts": ("qwen3_moe", "mixtral", "olmoe", "gpt_oss"),
    "latent attention": ("deepseek_v3", "deepseek_v2"),
    "state spaces": ("qwen3_next", "granitemoehybrid", "falcon_h1", "jamba"),
}
"""What models are made of -> model types that have it. The first one that core serves is tested."""

MIXED = [
    GREEDY,
    SamplingParams(temperature=0.8, seed=7, max_tokens=24, ignore_eos=True),
    SamplingParams(temperature=1.2, seed=8, top_k=20, top_p=0.9, max_tokens=20, ignore_eos=True),
    SamplingParams(temperature=0.9, seed=9, min_p=0.02, repetition_penalty=1.2, max_tokens=18, ignore_eos=True),
    SamplingParams(temperature=0.0, frequency_penalty=0.5, presence_penalty=0.3, max_tokens=24, ignore_eos=True),
    SamplingParams(temperature=0.0, logit_bias={5: 50.0}, min_tokens=3, max_tokens=6, ignore_eos=True),
]


@pytest.fixture(scope="module", params=FAMILIES)
def folder(request: pytest.FixtureRequest, subject: Subject, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model of each family."""
    candidates = FAMILIES[request.param]
    served = [model_type for model_type in candidates if model_type in MODELS]
    if not served:
        pytest.skip(f"core has no model with {request.param} yet (it looks for {', '.join(candidates)})")
    return make_model(tmp_path_factory.mktemp(served[0]), served[0], seed=2, tokenizer=False)


@pytest.fixture(scope="module")
def usual(subject: Subject, folder: Path) -> list[list[int]]:
    """What the default settings give."""
    return tokens(engine(subject, folder), prompts(), MIXED)


def test_greedy_tokens_are_the_likeliest_of_a_plain_model(subject: Subject, folder: Path) -> None:
    assert_likeliest(subject, folder, prompts(), tokens(engine(subject, folder), prompts(), GREEDY))


SETTINGS: dict[str, dict[str, Any]] = {
    "no_prefix_cache": {"enable_prefix_caching": False},
    "small_chunks": {"max_num_batched_tokens": 16},
    "no_chunked_prefill": {"enable_chunked_prefill": False, "max_num_batched_tokens": 256},  # room for whole prompts
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


def test_drafts_change_no_token(subject: Subject, folder: Path) -> None:
    """Decodes of several tokens, some of which are rejected."""
    if "spec_decode" not in subject.caps.features:
        pytest.skip("spec_decode is not claimed")
    # With two tokens to choose from, what followed the last one before is often right.
    few: dict[str, Any] = {"allowed_token_ids": (5, 9), "max_tokens": 40, "ignore_eos": True}
    narrow = [SamplingParams(temperature=0.3 * i, seed=i, **few) for i in range(len(MIXED))]
    asked, params = [*prompts(), *prompts()], [*MIXED, *narrow]
    speculative = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 2}
    with engine(subject, folder, speculative_config=speculative) as llm:
        drafted = [output.outputs[0].token_ids for output in llm.generate(asked, params, use_tqdm=False)]
        stats = llm.stats
    assert drafted == tokens(engine(subject, folder), asked, params)
    assert 0 < sum(stats.spec_accepted) < stats.spec_draft_tokens


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
    if not (forced := reference_kernels(subject)):
        pytest.skip("the platform has no kernel of its own")
    reference = tokens(engine(subject, folder, kernels=forced, enforce_eager=True), prompts(), GREEDY)
    assert tokens(engine(subject, folder), prompts(), GREEDY) == reference
