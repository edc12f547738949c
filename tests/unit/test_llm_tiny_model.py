"""Offline inference with a real (tiny, random) model on whatever platform is installed."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from invariants import Invariants

from octavo.errors import ConfigError, ModelNotFoundError
from octavo.llm import LLM
from octavo.outputs import OutputMerger
from octavo.sampling.params import SamplingParams
from octavo.testing.tiny import make_model

SETTINGS: dict[str, Any] = {"dtype": "float32", "num_kv_blocks": 64, "max_num_seqs": 8, "max_model_len": 128}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("tiny") / "model", "llama", seed=3)


@pytest.fixture(scope="module")
def llm(folder: Path) -> Iterator[LLM]:
    with LLM(str(folder), **SETTINGS) as llm:
        yield llm


def test_streamed_pieces_join_to_the_generated_text(llm: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=20)
    (whole,) = llm.generate("The printer set the letters", params)
    merger = OutputMerger()
    for delta in llm.stream("The printer set the letters", params):
        merger.add(delta)
    streamed = merger.result()
    assert streamed is not None
    assert streamed.outputs == whole.outputs
    assert whole.outputs[0].text == llm.get_tokenizer().decode(whole.outputs[0].token_ids)


def test_case_F1_order_and_batch_do_not_change_seeded_answers(llm: LLM, invariants: Invariants) -> None:
    prompts = [[10 + i] * (3 + 5 * i) for i in range(8)]
    params = [SamplingParams(seed=i, temperature=1.3, max_tokens=10, ignore_eos=True) for i in range(8)]
    alone = [llm.generate([p], s)[0].outputs[0].token_ids for p, s in zip(prompts, params, strict=True)]
    for seed in range(2):
        order = random.Random(seed).sample(range(8), 8)
        results = llm.generate([prompts[i] for i in order], [params[i] for i in order])
        assert [r.outputs[0].token_ids for r in results] == [alone[i] for i in order]
    invariants(llm)


def test_case_F2_answers_of_one_seed_differ_and_repeat(llm: LLM, invariants: Invariants) -> None:
    params = SamplingParams(n=4, seed=7, temperature=1.5, max_tokens=8)
    runs = [[o.token_ids for o in llm.generate("Once upon", params)[0].outputs] for _ in range(2)]
    assert runs[0] == runs[1]
    assert len({tuple(ids) for ids in runs[0]}) == 4
    invariants(llm)


def test_case_B8_prompt_logprobs_do_not_depend_on_chunks(llm: LLM, folder: Path, invariants: Invariants) -> None:
    prompt = list(range(20, 70))
    params = SamplingParams(max_tokens=0, prompt_logprobs=2)
    (whole,) = llm.generate([prompt], params)
    with LLM(str(folder), max_num_batched_tokens=16, **SETTINGS) as chunked:
        (pieces,) = chunked.generate([prompt], params)
    assert whole.prompt_logprobs is not None
    assert pieces.prompt_logprobs is not None
    assert len(whole.prompt_logprobs) == 50
    assert whole.prompt_logprobs[0] is None
    for position in range(1, 50):
        one, other = whole.prompt_logprobs[position], pieces.prompt_logprobs[position]
        assert one is not None
        assert other is not None
        assert list(one) == list(other)
        assert next(iter(one)) == prompt[position]
        assert [e.logprob for e in one.values()] == pytest.approx([e.logprob for e in other.values()], abs=1e-3)
    assert (whole.outputs[0].token_ids, whole.outputs[0].finish_reason) == ([], "length")
    invariants(llm)


def test_logprobs_of_the_whole_vocabulary_sum_to_one(llm: LLM) -> None:
    (result,) = llm.generate("Once", SamplingParams(max_tokens=2, logprobs=-1, temperature=0))
    assert result.outputs[0].logprobs is not None
    for entry, token in zip(result.outputs[0].logprobs, result.outputs[0].token_ids, strict=True):
        assert len(entry) == llm.info.vocab_size
        assert sum(2.718281828459045**e.logprob for e in entry.values()) == pytest.approx(1, abs=1e-3)
        assert entry[token].rank == 1


def test_bad_words_and_stop_strings_hold_for_a_real_model(llm: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    tokenizer = llm.get_tokenizer()
    ids = llm.generate("The weather", params)[0].outputs[0].token_ids
    banned = next(tokenizer.token_text(t) for t in ids if tokenizer.token_text(t).isalpha())
    held = llm.generate("The weather", SamplingParams(temperature=0, max_tokens=12, bad_words=(banned,)))
    assert tokenizer.encode(banned)[0] not in held[0].outputs[0].token_ids
    stopped = llm.generate("The weather", SamplingParams(temperature=0, max_tokens=12, stop=(banned,)))[0].outputs[0]
    assert (stopped.stop_reason, stopped.finish_reason) == (banned, "stop")
    assert banned not in stopped.text


def test_more_prompts_than_fit_all_get_answered(llm: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)
    prompts = [[5 + i] * 60 for i in range(12)]
    results = llm.generate(prompts, params)
    assert [len(r.outputs[0].token_ids) for r in results] == [60] * 12
    assert (llm.stats.running, llm.stats.kv_usage) == (0, 0)
    again = llm.generate([prompts[0]], params)
    assert again[0].outputs[0].token_ids == results[0].outputs[0].token_ids


def test_memory_for_less_than_one_sequence_is_refused_at_the_start(folder: Path) -> None:
    with pytest.raises(ConfigError, match="cannot hold one sequence of max_model_len 128"):
        LLM(str(folder), **{**SETTINGS, "num_kv_blocks": 4})


def test_absent_model_is_named() -> None:
    with pytest.raises(ModelNotFoundError, match="no-such-folder"):
        LLM("./no-such-folder")
