"""Real models with drafts: fewer steps, and every answer as without them."""

from __future__ import annotations

from typing import Any

import pytest

from octavo import SamplingParams

PROMPTS = [[17, 40, 3] * 6, list(range(20, 60)), [5] * 30, [9]]
COMMON: dict[str, Any] = {"ignore_eos": True, "detokenize": False, "max_tokens": 30}
GREEDY = SamplingParams(temperature=0.0, **COMMON)
DRAWN = SamplingParams(temperature=0.9, seed=11, **COMMON)
RARE = {
    "drawn": DRAWN,
    "filtered": SamplingParams(temperature=1.1, seed=7, top_k=20, top_p=0.9, min_p=0.01, **COMMON),
    "penalised": SamplingParams(
        temperature=0.0, repetition_penalty=1.3, frequency_penalty=0.8, presence_penalty=0.5, **COMMON
    ),
    "penalised and drawn": SamplingParams(temperature=0.8, seed=3, frequency_penalty=0.9, **COMMON),
    "logprobs": SamplingParams(temperature=0.0, logprobs=3, **COMMON),
    "processed logprobs": SamplingParams(
        temperature=0.7, seed=3, logprobs=2, top_k=9, logprobs_mode="processed_logprobs", **COMMON
    ),
    "named logprobs": SamplingParams(temperature=0.0, logprobs=0, logprob_token_ids=(4, 9), **COMMON),
    "prompt logprobs": SamplingParams(temperature=0.0, prompt_logprobs=2, **COMMON),
    "bias": SamplingParams(temperature=0.0, logit_bias={7: 3.0, 9: 2.5}, **COMMON),
    "allowed": SamplingParams(temperature=0.6, seed=1, allowed_token_ids=tuple(range(3, 40)), **COMMON),
    "several": SamplingParams(temperature=1.0, seed=5, n=3, **COMMON),
}


@pytest.mark.parametrize("platform", ["cpu", "refdev"])
@pytest.mark.parametrize("model", ["llama", "gemma2"])
def test_right_drafts_save_steps(both: Any, platform: str, model: str) -> None:
    before, after = both(PROMPTS, [GREEDY, DRAWN, GREEDY, DRAWN], platform=platform, model=model)
    assert after.spec_accepted[0] == after.spec_drafts > 0
    assert sum(after.spec_accepted) == after.spec_draft_tokens
    # 30 tokens are 1 with the prompt, and 29 by five at a time.
    assert after.steps <= before.steps - 29 + 6 + 2


@pytest.mark.parametrize("platform", ["cpu", "refdev"])
@pytest.mark.parametrize("right", [0, 7])
def test_wrong_drafts_change_no_token(both: Any, platform: str, right: int) -> None:
    before, after = both(PROMPTS, [GREEDY, DRAWN, GREEDY, DRAWN], platform=platform, right=right)
    assert (sum(after.spec_accepted) > 0) == (right > 0)
    assert after.steps <= before.steps


@pytest.mark.parametrize("kind", RARE)
def test_whatever_a_request_asks_for_is_as_without_drafts(both: Any, kind: str) -> None:
    _, after = both(PROMPTS, [RARE[kind], GREEDY, RARE[kind], DRAWN], right=8)
    assert sum(after.spec_accepted) > 0


def test_recorded_steps_with_drafts_and_rare_requests(both: Any) -> None:
    both(PROMPTS, [RARE["penalised"], RARE["logprobs"], GREEDY, RARE["filtered"]], right=8, platform="refdev")


def test_bad_words_among_drafts(both: Any, answers_of: Any) -> None:
    # Pairs that it would say: the first of each is a draft before the place where the second is forbidden.
    params = [
        SamplingParams(temperature=0.0, bad_words_ids=tuple(zip(ids[4::6], ids[5::6], strict=False)), **COMMON)
        for ids in answers_of(PROMPTS, GREEDY)
    ]
    _, after = both(PROMPTS, params, right=9)
    assert sum(after.spec_accepted) > 0


def test_stop_tokens_limits_and_min_tokens_within_a_step(both: Any, answers_of: Any) -> None:
    answers = answers_of(PROMPTS, GREEDY)
    for at, min_tokens, most in ((2, 0, 30), (7, 0, 30), (3, 9, 30), (12, 0, 11), (29, 0, 3)):
        limits = COMMON | {"max_tokens": most, "min_tokens": min_tokens}
        params = [SamplingParams(temperature=0.0, stop_token_ids=(ids[at],), **limits) for ids in answers]
        both(PROMPTS, params, drafts=5)


def test_drafts_end_with_the_context(both: Any) -> None:
    params = SamplingParams(temperature=0.0, ignore_eos=True, detokenize=False, max_tokens=None)
    both(PROMPTS, params, max_model_len=64, drafts=6)


@pytest.mark.parametrize(
    "settings",
    [
        {"enable_prefix_caching": False},
        {"max_num_batched_tokens": 8},
        {"num_kv_blocks": 12, "max_num_seqs": 4},
        {"num_kv_blocks": 40, "block_size": 4, "model": "gemma2"},
        {"max_num_seqs": 2},
    ],
    ids=str,
)
@pytest.mark.parametrize("platform", ["cpu", "refdev"])
def test_no_setting_changes_a_token(both: Any, settings: dict[str, Any], platform: str) -> None:
    params = [GREEDY, DRAWN, RARE["penalised"], GREEDY, DRAWN, GREEDY]
    prompts = [*PROMPTS, list(range(20, 58)), [17, 40, 3] * 7]
    before, after = both(prompts, params, right=8, platform=platform, **settings)
    if "num_kv_blocks" in settings:
        assert before.preemptions + after.preemptions > 0


def test_a_later_prompt_reads_of_the_cache_only_what_was_accepted(both: Any, answers_of: Any) -> None:
    """One sequence after another: each prompt is an earlier one with its answer, or with what drafts said instead."""
    (answer,) = answers_of([PROMPTS[1]], GREEDY)
    wrong = [(token + 1) % 100 for token in answer]
    prompts = [PROMPTS[1], [*PROMPTS[1], *answer[:25]], [*PROMPTS[1], *answer[:8], *wrong[8:25]], PROMPTS[1]]
    before, after = both(prompts, GREEDY, right=6, max_num_seqs=1)
    assert after.prefix_hits == before.prefix_hits > 0
