"""Answers in shape from a random model, which without a grammar says nothing sensible: offline, through the engine."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from invariants import Invariants

from octavo.errors import EngineError, RequestError
from octavo.llm import LLM
from octavo.outputs import RequestOutput
from octavo.sampling.params import SamplingParams
from octavo.structured.spec import MAX_BYTES, MAX_CHOICES, StructuredOutputs
from octavo.testing.tiny import make_model

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "pattern": "^[a-z]{1,6}$"},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "tags": {"type": "array", "items": {"enum": ["x", "y"]}, "maxItems": 3},
    },
    "required": ["name", "age"],
}
SETTINGS: dict[str, Any] = {"dtype": "float32", "max_num_seqs": 8, "max_model_len": 192}
PROMPTS = [f"{number} sheets: the printer set the letters by hand and inked the form" for number in range(9)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("tiny") / "model", "qwen3", seed=3)


@pytest.fixture(scope="module")
def llm(folder: Path) -> Iterator[LLM]:
    """Nothing in short supply, no step before the last one's tokens are known."""
    with LLM(str(folder), platform="cpu", run_ahead=0, num_kv_blocks=200, **SETTINGS) as llm:
        yield llm


@pytest.fixture(scope="module")
def tight(folder: Path) -> Iterator[LLM]:
    """Recorded steps, run-ahead, prompts in chunks and too few blocks for all."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OCTAVO_EXTRA_PLATFORMS", "refdev=octavo.testing.refdev")
        with LLM(
            str(folder), platform="refdev", run_ahead=1, num_kv_blocks=13, max_num_batched_tokens=16, **SETTINGS
        ) as llm:
            yield llm


def shaped(max_tokens: int = 120, **given: Any) -> SamplingParams:
    spec = {name: given.pop(name) for name in list(given) if name in StructuredOutputs.__struct_fields__}
    given = {"seed": 7, "temperature": 1.0, **given}
    return SamplingParams(max_tokens=max_tokens, structured_outputs=StructuredOutputs(**spec), **given)


def ask(llm: LLM, params: SamplingParams, prompt: str = "What is") -> RequestOutput:
    (result,) = llm.generate(prompt, params, use_tqdm=False)
    return result


def only(llm: LLM, params: SamplingParams) -> tuple[str, str | None]:
    (output,) = ask(llm, params).outputs
    return output.text, output.finish_reason


def mixed() -> tuple[list[str], list[SamplingParams]]:
    """Requests with and without a shape, side by side."""
    params = [
        shaped(json=PERSON, n=2),
        shaped(regex=r"\d{3}-\d{4}", logprobs=2),
        SamplingParams(max_tokens=30, seed=1, temperature=1.0, ignore_eos=True),
        shaped(json=PERSON, temperature=0.0, logit_bias={40: 3.0}),
        shaped(grammar='root ::= "x" | "(" root ")"', seed=3),
        shaped(json={"type": "integer", "multipleOf": 7}, presence_penalty=0.5, top_k=20),
        *(shaped(regex="[ab]{90}", seed=seed) for seed in range(3)),
    ]
    return PROMPTS, params


def test_answers_that_stop_are_valid(llm: LLM) -> None:
    params = [shaped(json=PERSON, seed=seed) for seed in range(12)]
    results = llm.generate(["What is"] * 12, params, use_tqdm=False)
    texts = [r.outputs[0].text for r in results if r.outputs[0].finish_reason == "stop"]
    assert len(texts) >= 6
    assert len(set(texts)) > 1
    for text in texts:
        jsonschema.validate(json.loads(text), PERSON)


def test_run_ahead_chunks_preemption_and_recorded_steps_change_nothing(llm: LLM, tight: LLM) -> None:
    prompts, params = mixed()
    want = llm.generate(prompts, params, use_tqdm=False)
    got = tight.generate(prompts, params, use_tqdm=False)
    assert tight.stats.preemptions > 0
    for one, other in zip(want, got, strict=True):
        assert [(o.token_ids, o.finish_reason) for o in one.outputs] == [
            (o.token_ids, o.finish_reason) for o in other.outputs
        ]


def test_a_shape_binds_only_its_own_request(llm: LLM) -> None:
    free = SamplingParams(max_tokens=30, seed=1, temperature=1.0, ignore_eos=True)
    alone = ask(llm, free)
    beside, _ = llm.generate(["What is"] * 2, [free, shaped(json=PERSON)], use_tqdm=False)
    assert beside.outputs[0].token_ids == alone.outputs[0].token_ids


def test_each_of_several_answers_has_the_shape(llm: LLM) -> None:
    outputs = ask(llm, shaped(regex="[ab]{4}", n=3)).outputs
    assert {o.index for o in outputs} == {0, 1, 2}
    assert all(len(o.text) == 4 and set(o.text) <= {"a", "b"} for o in outputs)


def test_a_stream_joins_to_the_answer_and_ends_once(llm: LLM) -> None:
    params = shaped(regex="[ab]{4}")
    deltas = [output for delta in llm.stream("What is", params) for output in delta.outputs]
    assert "".join(output.text for output in deltas) == only(llm, params)[0]
    assert [output.finish_reason for output in deltas if output.finish_reason] == ["stop"]


@pytest.mark.parametrize(
    "texts",
    [
        [f"product-{number:05}" for number in range(MAX_CHOICES)],
        ["".join(random.Random(number).choices("abc 你", k=40)) + str(number) for number in range(MAX_CHOICES)],
        [f"{number % 7} {number} " * (MAX_BYTES // 200) for number in range(10)],
    ],
)
def test_as_many_choices_as_are_taken_compile_within_the_limit(llm: LLM, texts: list[str]) -> None:
    text, finish = only(llm, shaped(choice=texts))
    assert (text in texts) if finish == "stop" else any(each.startswith(text) for each in texts)


@pytest.mark.parametrize("ignore_eos", [False, True])
def test_case_C14_an_answer_ends_with_its_grammar(llm: LLM, ignore_eos: bool, invariants: Invariants) -> None:
    # A model that would never choose EOS.
    text, finish = only(llm, shaped(choice=["a", "b"], logit_bias={2: -100.0}, ignore_eos=ignore_eos))
    assert text in ("a", "b")
    assert finish == "stop"
    invariants(llm)


def test_case_C15_a_grammar_that_has_ended_goes_before_min_tokens(llm: LLM, invariants: Invariants) -> None:
    text, finish = only(llm, shaped(json={"type": "boolean"}, min_tokens=64))
    assert (json.loads(text) in (True, False), finish) == (True, "stop")
    invariants(llm)


def test_case_C15_min_tokens_hold_while_the_grammar_goes_on(llm: LLM, invariants: Invariants) -> None:
    (output,) = ask(llm, shaped(regex="[ab]*", min_tokens=20, logit_bias={2: 100.0})).outputs
    assert len(output.token_ids) == 21
    assert output.finish_reason == "stop"
    invariants(llm)


def test_case_C15_a_row_that_allows_nothing_fails_alone(llm: LLM, invariants: Invariants) -> None:
    with pytest.raises(EngineError, match="every token is forbidden"):
        ask(llm, shaped(choice=["a", "b"], allowed_token_ids=[100]))
    assert only(llm, shaped(choice=["a", "b"]))[1] == "stop"
    invariants(llm)


def test_case_B5_logprobs_of_a_grammar_are_finite_numbers(llm: LLM, invariants: Invariants) -> None:
    (output,) = ask(llm, shaped(json={"type": "boolean"}, logprobs=3)).outputs
    assert output.logprobs is not None
    assert len(output.logprobs) == len(output.token_ids)
    json.dumps([entry.logprob for entries in output.logprobs for entry in entries.values()], allow_nan=False)
    invariants(llm)


@pytest.mark.parametrize(
    ("given", "field"),
    [
        ({"json": {"properties": {"foo": "bar"}}}, "json"),
        ({"regex": "("}, "regex"),
        ({"grammar": "Root ::= [^"}, "grammar"),
        ({"json": {"type": "object", "not": {}}}, "json"),
    ],
)
def test_case_C11_C12_C13_C16_only_the_request_that_is_wrong_fails(
    llm: LLM, given: dict, field: str, invariants: Invariants
) -> None:
    with pytest.raises(RequestError) as error:
        ask(llm, shaped(**given))
    assert error.value.field == f"structured_outputs.{field}"
    assert only(llm, shaped(choice=["a"])) == ("a", "stop")
    invariants(llm)


def test_a_grammar_begins_behind_its_mark(llm: LLM) -> None:
    mark = tuple(llm.get_tokenizer().encode("x"))
    # The bias makes the mark come within a few tokens.
    (output,) = ask(llm, shaped(regex="[ab]{3}", structured_after=mark, logit_bias={mark[0]: 6.0})).outputs
    assert output.finish_reason == "stop"
    assert output.token_ids.index(mark[0]) == len(output.token_ids) - 4 or output.text[-3:].strip("ab") == ""


def test_an_answer_whose_mark_never_comes_runs_to_its_length(llm: LLM) -> None:
    text, finish = only(llm, shaped(max_tokens=20, regex="[ab]", structured_after=(1,), logit_bias={1: -100.0}))
    assert (finish, text != "") == ("length", True)


def test_a_tag_frees_what_is_around_it(llm: LLM) -> None:
    tag = {"begin": "<f>", "content": {"type": "json_schema", "json_schema": {"type": "boolean"}}, "end": "</f>"}
    form = {"type": "triggered_tags", "triggers": ["<f"], "tags": [tag], "at_least_one": True, "stop_after_first": True}
    text, finish = only(llm, shaped(structural_tag={"type": "structural_tag", "format": form}))
    assert text in ("<f>true</f>", "<f>false</f>")
    assert finish == "stop"


def test_hundreds_of_requests_at_once_do_not_fill_the_pipe_both_ways(llm: LLM) -> None:
    with pytest.raises(RequestError):
        llm.generate(["What is"] * 900, shaped(regex="("), use_tqdm=False)
    assert only(llm, shaped(choice=["a"])) == ("a", "stop")


def test_a_process_that_dies_fails_its_own_requests_and_is_started_again(llm: LLM) -> None:
    stream = llm.stream("What is", shaped(regex="[ab]{100}"))
    next(stream)
    grammars = llm._engine._scheduler.shapes._grammars  # type: ignore[union-attr]
    grammars._process.kill()  # type: ignore[union-attr]
    with pytest.raises(EngineError, match="grammar process has ended"):
        list(stream)
    assert only(llm, shaped(choice=["a"])) == ("a", "stop")


def test_a_process_that_ended_while_nobody_needed_it_fails_nobody(llm: LLM) -> None:
    engine = llm._engine
    assert engine is not None
    engine.warm()
    grammars: Any = engine._scheduler.shapes._grammars
    grammars._process.kill()
    grammars._process.wait()
    assert only(llm, shaped(choice=["a"])) == ("a", "stop")


@pytest.mark.slow
def test_two_ranks_give_the_answers_of_one(llm: LLM, folder: Path) -> None:
    prompts, params = mixed()
    want = llm.generate(prompts, params, use_tqdm=False)
    with LLM(str(folder), platform="cpu", run_ahead=1, tensor_parallel_size=2, num_kv_blocks=100, **SETTINGS) as two:
        got = two.generate(prompts, params, use_tqdm=False)
    for one, other in zip(want, got, strict=True):
        assert [o.token_ids for o in one.outputs] == [o.token_ids for o in other.outputs]
