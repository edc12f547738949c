"""What the door makes of the rarer sampling parameters."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from octavo.engine.door import Door
from octavo.engine.info import ModelInfo
from octavo.errors import RequestError, RequestTooLargeError
from octavo.sampling.params import SamplingParams
from octavo.tokenizer import Tokenizer


@pytest.fixture
def door(tokenizer: Tokenizer, info: ModelInfo) -> Door:
    return Door(tokenizer, msgspec.structs.replace(info, logits_processors=("thinking_token_budget", "mine")))


def refused(door: Door, **params: Any) -> str:
    with pytest.raises(RequestError) as caught:
        door.prepare([5], SamplingParams(**params))
    return caught.value.field


def test_a_set_of_no_tokens_is_refused_before_anything_is_computed(door: Door, tokenizer: Tokenizer) -> None:
    (token,) = tokenizer.encode("a", add_special_tokens=False)
    assert refused(door, allowed_token_ids=[token], bad_words=["a"]) == "allowed_token_ids"
    assert refused(door, allowed_token_ids=[2], min_tokens=3) == "allowed_token_ids"
    assert refused(door, allowed_token_ids=[2, 7], stop_token_ids=[7], min_tokens=3) == "allowed_token_ids"
    door.prepare([5], SamplingParams(allowed_token_ids=[token, 9], bad_words=["a"]))
    door.prepare([5], SamplingParams(allowed_token_ids=[2]))
    door.prepare([5], SamplingParams(allowed_token_ids=[2], min_tokens=3, ignore_eos=True))


@pytest.mark.parametrize(
    ("params", "kept"),
    [
        ({"truncate_prompt_tokens": 4}, slice(-4, None)),
        ({"truncate_prompt_tokens": 4, "truncation_side": "left"}, slice(-4, None)),
        ({"truncate_prompt_tokens": 4, "truncation_side": "right"}, slice(4)),
        ({"truncate_prompt_tokens": 1000}, slice(None)),
        ({}, slice(None)),
    ],
)
@pytest.mark.parametrize("text", [True, False])
def test_long_prompts_are_cut_where_asked_for(
    door: Door, tokenizer: Tokenizer, params: dict[str, Any], kept: slice, text: bool
) -> None:
    whole = tokenizer.encode("The printer set the letters by hand")
    prompt = "The printer set the letters by hand" if text else whole
    prepared = door.prepare(prompt, SamplingParams(max_tokens=2, **params))
    assert prepared.token_ids == whole[kept]
    if len(prepared.token_ids) < len(whole):
        assert prepared.text is None, "the text would say more than the model sees"


@pytest.mark.parametrize(("max_tokens", "left"), [(10, 54), (None, 63)])
def test_a_prompt_of_any_length_can_be_cut_to_what_leaves_room(door: Door, max_tokens: int | None, left: int) -> None:
    params = SamplingParams(truncate_prompt_tokens=-1, max_tokens=max_tokens)
    for prompt in ([7] * 500, "word " * 4000):
        assert len(door.prepare(prompt, params).token_ids) == left
    assert len(door.prepare([7] * 20, params).token_ids) == 20
    with pytest.raises(RequestTooLargeError):
        door.prepare([7] * 500, SamplingParams(truncate_prompt_tokens=60, max_tokens=10))


def test_ids_behind_the_cut_are_not_looked_at_but_those_before_are(door: Door) -> None:
    assert door.prepare([9999, 5, 6], SamplingParams(truncate_prompt_tokens=2)).token_ids == [5, 6]
    with pytest.raises(RequestError, match="token id 9999"):
        door.prepare([5, 9999], SamplingParams(truncate_prompt_tokens=1))


def test_a_budget_for_reasoning_becomes_the_argument_of_its_processor(door: Door, tokenizer: Tokenizer) -> None:
    marks = [tokenizer.encode(mark, add_special_tokens=False) for mark in ("<think>", "</think>")]
    prepared = door.prepare([5], SamplingParams(thinking_token_budget=7, extra_args={"mine": 1}))
    assert prepared.engine_params.extra_args == {
        "mine": 1,
        "thinking_token_budget": {"budget": 7, "start": marks[0], "end": marks[1]},
    }
    other = door.prepare([5], SamplingParams(thinking_token_budget=7, structured_after=(8, 9)))
    assert (other.engine_params.extra_args or {})["thinking_token_budget"]["end"] == [8, 9]
    assert door.prepare([5], SamplingParams(thinking_token_budget=-1)).engine_params.extra_args is None


def test_processors_that_the_engine_does_not_have_are_refused(
    door: Door, tokenizer: Tokenizer, info: ModelInfo
) -> None:
    assert refused(door, extra_args={"other": 1}) == "extra_args"
    bare = Door(tokenizer, info)
    assert refused(bare, thinking_token_budget=3) == "thinking_token_budget"
    assert refused(Door(None, door.info), thinking_token_budget=3) == "thinking_token_budget"


def test_the_mode_of_logprobs_is_the_requests_or_the_engines(tokenizer: Tokenizer, info: ModelInfo) -> None:
    door = Door(tokenizer, msgspec.structs.replace(info, logprobs_mode="raw_logits"))
    assert door.prepare([5], SamplingParams()).engine_params.logprobs_mode == "raw_logits"
    own = SamplingParams(logprobs_mode="processed_logits")
    assert door.prepare([5], own).engine_params.logprobs_mode == "processed_logits"


@pytest.mark.parametrize(
    ("params", "field"),
    [
        ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
        ({"truncate_prompt_tokens": -2}, "truncate_prompt_tokens"),
        ({"truncation_side": "middle"}, "truncation_side"),
        ({"thinking_token_budget": -2}, "thinking_token_budget"),
        ({"n": 3, "best_of": 2}, "best_of"),
        ({"best_of": 2}, "best_of"),
        ({"length_penalty": float("inf")}, "length_penalty"),
    ],
)
def test_values_out_of_range_are_named(params: dict[str, Any], field: str) -> None:
    with pytest.raises(RequestError) as caught:
        SamplingParams(**params)
    assert caught.value.field == field
