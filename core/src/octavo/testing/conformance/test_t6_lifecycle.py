"""Tier 6: what happens to requests and engines besides a quiet end: abort, preemption, restart, too little memory."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
import torch

from octavo import SamplingParams
from octavo.errors import ConfigError, EngineDeadError
from octavo.testing.conformance.engines import GREEDY, block_size_of, engine, tokens
from octavo.testing.conformance.subject import Subject
from octavo.testing.tiny import make_model

SAMPLED = SamplingParams(temperature=0.8, seed=5, max_tokens=24, ignore_eos=True)
PROMPTS = [[17, 30, 101], [40 + i for i in range(35)]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(
        tmp_path_factory.mktemp("lifecycle"), "qwen3", seed=4, tokenizer=False, max_position_embeddings=2048
    )


def test_after_an_abort_the_same_prompt_gives_the_same_tokens(subject: Subject, folder: Path) -> None:
    expected = tokens(engine(subject, folder), PROMPTS, [GREEDY, SAMPLED])
    with engine(subject, folder) as llm:
        for prompt, params in zip(PROMPTS, (GREEDY, SAMPLED), strict=True):
            stream = llm.stream(prompt, params)
            begun = next(stream).outputs[0].token_ids + next(stream).outputs[0].token_ids
            stream.close()
            assert 0 < len(begun) < 24
        assert llm.stats.aborts == len(PROMPTS)
        assert llm.stats.running == 0
        outputs = llm.generate(PROMPTS, [GREEDY, SAMPLED], use_tqdm=False)
    assert [output.outputs[0].token_ids for output in outputs] == expected


def test_preempted_requests_give_the_tokens_of_undisturbed_ones(subject: Subject, folder: Path) -> None:
    block = block_size_of(subject)
    longest = 4 * block
    # Both begin in one block and grow into a third; the pool has room for the longest sequence and no more.
    generator = torch.Generator().manual_seed(6)
    asked = [torch.randint(3, 380, (block - 4,), generator=generator).tolist() for _ in range(2)]
    params = [msgspec.structs.replace(each, max_tokens=2 * block - 4) for each in (GREEDY, SAMPLED)]
    undisturbed = tokens(engine(subject, folder, max_model_len=longest), asked, params)
    with engine(subject, folder, max_model_len=longest, num_kv_blocks=1 + 4) as llm:
        outputs = llm.generate(asked, params, use_tqdm=False)
        assert llm.stats.preemptions > 0, "the test is to preempt"
    assert [output.outputs[0].token_ids for output in outputs] == undisturbed


def test_a_new_engine_after_a_closed_one_gives_the_same_tokens(subject: Subject, folder: Path) -> None:
    first = engine(subject, folder)
    before = first.generate(PROMPTS, GREEDY, use_tqdm=False)
    first.close()
    with pytest.raises(EngineDeadError):
        first.generate(PROMPTS, GREEDY, use_tqdm=False)
    again = tokens(engine(subject, folder), PROMPTS, GREEDY)
    assert again == [output.outputs[0].token_ids for output in before]


@pytest.mark.parametrize("setting", [{"num_kv_blocks": 2}, {"num_kv_blocks": None, "kv_cache_memory_bytes": 1}])
def test_too_little_memory_is_explained_by_the_flags_that_help(
    subject: Subject, folder: Path, setting: dict[str, int | None]
) -> None:
    with pytest.raises(ConfigError) as caught:
        engine(subject, folder, max_model_len=2 * block_size_of(subject), **setting)
    for flag in ("--max-model-len", "--kv-cache-memory-bytes", "--gpu-memory-utilization"):
        assert flag in str(caught.value)
