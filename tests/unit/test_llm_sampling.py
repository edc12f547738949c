"""Sampling extras with a real (tiny, random) model: through the client side, the engine and the model."""

from __future__ import annotations

import sys
import types
from collections.abc import Callable, Iterator, Sequence
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import pytest
from invariants import Invariants

from octavo.errors import EngineError, RequestError
from octavo.llm import LLM
from octavo.outputs import RequestOutput
from octavo.plugin import hookimpl
from octavo.plugin.step import Batch
from octavo.runner.runner import ModelRunner
from octavo.sampling.params import SamplingParams
from octavo.testing.tiny import make_model

SETTINGS: dict[str, Any] = {"dtype": "float32", "num_kv_blocks": 64, "max_num_seqs": 8, "max_model_len": 128}


class Shout:
    """A third party's processor: forces one token, until it fails on purpose."""

    def __init__(self, value: Any, admit: Any) -> None:
        self.token, self.until = value["token"], admit.num_prompt_tokens + value.get("until", 1000)

    @classmethod
    def check(cls, value: Any, vocab_size: int) -> None:
        if not isinstance(value, dict) or not 0 <= value.get("token", -1) < vocab_size:
            raise ValueError("must have a token of the vocabulary")

    @classmethod
    def apply(cls, processors: Sequence[Any], logits: Any, tokens: Any, lengths: Sequence[int]) -> None:
        for row, (processor, length) in enumerate(zip(processors, lengths, strict=True)):
            if length >= processor.until:
                raise ZeroDivisionError("on purpose")
            logits[row] = -1e9
            logits[row, processor.token] = 1e9


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("tiny") / "model", "llama", seed=3)


@pytest.fixture(scope="module")
def llm(folder: Path) -> Iterator[LLM]:
    module: Any = types.ModuleType("shouting")
    module.Shout = Shout

    def register_extensions(registry: Any) -> None:
        registry.logits_processor("shout", "shouting:Shout")

    module.register_extensions = hookimpl(register_extensions)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "shouting", module)
        entry = EntryPoint(name="shouting", value="shouting", group="octavo.extensions")
        patch.setattr("octavo.extensions.entries_of", lambda group: [entry])
        with LLM(str(folder), **SETTINGS) as llm:
            yield llm


@pytest.fixture
def computed(monkeypatch: pytest.MonkeyPatch) -> Callable[[], int]:
    """How many tokens the model has computed since the last look."""
    counts: list[int] = []
    launch = ModelRunner.launch

    def count(self: ModelRunner, batch: Batch) -> None:
        counts.append(batch.num_tokens)
        launch(self, batch)

    monkeypatch.setattr(ModelRunner, "launch", count)

    def take() -> int:
        total = sum(counts)
        counts.clear()
        return total

    return take


def ids(result: RequestOutput) -> list[list[int]]:
    return [answer.token_ids for answer in result.outputs]


def test_greedy_answers_to_one_prompt_are_equal_and_compute_it_once(llm: LLM, computed: Callable[[], int]) -> None:
    prompt = [3 + i for i in range(40)]
    (alone,) = llm.generate([prompt], SamplingParams(temperature=0, max_tokens=6, ignore_eos=True))
    llm.reset_prefix_cache()
    computed()
    (four,) = llm.generate([prompt], SamplingParams(n=4, temperature=0, max_tokens=6, ignore_eos=True))
    assert ids(four) == ids(alone) * 4
    assert computed() == 40 + 3 * 8 + 4 * 5, "40 of the prompt, then for three more what its two blocks do not hold"


def test_random_answers_are_those_of_separate_requests(llm: LLM) -> None:
    prompt = [3 + i for i in range(40)]
    llm.reset_prefix_cache()
    (first,) = llm.generate([prompt], SamplingParams(n=3, seed=5, temperature=1.2, max_tokens=6))
    (again,) = llm.generate([prompt], SamplingParams(n=3, seed=5, temperature=1.2, max_tokens=6))
    assert ids(first) == ids(again)
    assert len({tuple(answer) for answer in ids(first)}) == 3


def test_case_B6_scores_of_a_cached_prompt_are_those_of_a_fresh_one(
    llm: LLM, folder: Path, invariants: Invariants
) -> None:
    prompt = list(range(20, 84))
    params = SamplingParams(max_tokens=1, prompt_logprobs=2, temperature=0)
    llm.generate([prompt], SamplingParams(max_tokens=1))
    (cached,) = llm.generate([prompt], params)
    with LLM(str(folder), enable_prefix_caching=False, **SETTINGS) as plain:
        (fresh,) = plain.generate([prompt], params)
    assert cached.prompt_logprobs is not None
    assert fresh.prompt_logprobs is not None
    assert len(cached.prompt_logprobs) == 64
    for one, other in zip(cached.prompt_logprobs[1:], fresh.prompt_logprobs[1:], strict=True):
        assert one is not None
        assert other is not None
        assert list(one) == list(other)
        assert [e.logprob for e in one.values()] == pytest.approx([e.logprob for e in other.values()], abs=1e-4)
    invariants(llm)


def test_the_prefix_cache_can_be_passed_by(llm: LLM) -> None:
    prompt = list(range(30, 94))
    llm.generate([prompt], SamplingParams(max_tokens=1))
    hit, missed = llm.generate(
        [prompt, prompt], [SamplingParams(max_tokens=1), SamplingParams(max_tokens=1, skip_reading_prefix_cache=True)]
    )
    assert (hit.num_cached_tokens, missed.num_cached_tokens) == (48, 0)


def test_modes_of_logprobs_and_named_ids_reach_the_reader(llm: LLM) -> None:
    shared: dict[str, Any] = {"temperature": 0, "max_tokens": 1, "logprobs": 3}
    raw, logits, masked = (
        llm.generate([[7, 8, 9]], SamplingParams(**shared, **extra))[0].outputs[0].logprobs or []
        for extra in (
            {"logprob_token_ids": [11, 12]},
            {"logprobs_mode": "raw_logits", "logprob_token_ids": [11, 12]},
            {"logprobs_mode": "processed_logprobs", "allowed_token_ids": [11, 12]},
        )
    )
    assert list(raw[0])[:3] == list(logits[0])[:3]
    assert raw[0][11].logprob - raw[0][12].logprob == pytest.approx(logits[0][11].logprob - logits[0][12].logprob, 1e-3)
    assert [raw[0][token].rank for token in (11, 12)] == [None, None]
    assert [entry.rank for entry in list(raw[0].values())[:3]] == [1, 2, 3]
    likely = sum(2.718281828**entry.logprob for entry in masked[0].values())
    assert likely == pytest.approx(1, abs=1e-3)


def test_an_answer_that_repeats_itself_ends(llm: LLM) -> None:
    params = SamplingParams(
        temperature=0,
        max_tokens=30,
        logit_bias={50: 100.0},
        repetition_detection={"max_pattern_size": 3, "min_count": 4},  # type: ignore[arg-type]
    )
    (answer,) = llm.generate("Once", params)[0].outputs
    assert (answer.token_ids, answer.finish_reason, answer.stop_reason) == ([50] * 4, "repetition", None)
    assert answer.text == llm.get_tokenizer().decode([50] * 4)


def test_reasoning_ends_where_its_budget_does(llm: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, thinking_token_budget=5)
    thinking, plain = llm.generate(["What is an octavo? <think>", "What is an octavo?"], params)
    end = llm.get_tokenizer().encode("</think>", add_special_tokens=False)
    assert thinking.outputs[0].token_ids[5 : 5 + len(end)] == end
    assert "</think>" not in plain.outputs[0].text


def test_a_third_partys_processor_changes_its_own_request_only(llm: LLM) -> None:
    free = llm.generate([[7, 8, 9]], SamplingParams(temperature=0, max_tokens=5))[0]
    forced, other = llm.generate(
        [[7, 8, 9], [7, 8, 9]],
        [
            SamplingParams(temperature=0, max_tokens=5, extra_args={"shout": {"token": 44}}),
            SamplingParams(temperature=0, max_tokens=5),
        ],
    )
    assert ids(forced) == [[44] * 5]
    assert ids(other) == ids(free)


def test_a_processor_that_fails_ends_its_request_and_the_engine_lives(llm: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=9, extra_args={"shout": {"token": 44, "until": 3}})
    seen: list[int] = []

    def read() -> None:
        for delta in llm.stream([7, 8, 9], params):
            seen.extend(delta.outputs[0].token_ids)

    with pytest.raises(EngineError, match=r"'shout' failed: ZeroDivisionError: on purpose"):
        read()
    assert seen == [44] * 3
    assert len(llm.generate([[7, 8, 9]], SamplingParams(max_tokens=2, ignore_eos=True))[0].outputs[0].token_ids) == 2
    assert (llm.stats.running, llm.stats.kv_usage) == (0, 0)


@pytest.mark.parametrize(
    ("extra_args", "field"),
    [({"shout": {"token": 10**6}}, "extra_args.shout"), ({"shout": 3}, "extra_args.shout"), ({"cry": 1}, "extra_args")],
)
def test_wrong_arguments_of_processors_are_the_requests_fault(llm: LLM, extra_args: dict[str, Any], field: str) -> None:
    with pytest.raises(RequestError) as caught:
        llm.generate([[7]], SamplingParams(extra_args=extra_args))
    assert caught.value.field == field


def test_case_C15_nothing_left_to_choose_is_told_before_any_work(llm: LLM, invariants: Invariants) -> None:
    for params in (
        SamplingParams(allowed_token_ids=[9], bad_words_ids=[[9]]),
        SamplingParams(allowed_token_ids=[2], min_tokens=4),
    ):
        with pytest.raises(RequestError) as caught:
            llm.generate([[7]], params)
        assert caught.value.field == "allowed_token_ids"
    invariants(llm)
