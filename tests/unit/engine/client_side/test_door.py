"""Prompts and parameters are checked before they reach the engine."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from octavo.engine.door import Door
from octavo.engine.info import ModelInfo
from octavo.errors import RequestError, RequestTooLargeError
from octavo.sampling.params import SamplingParams
from octavo.tokenizer import Tokenizer


@pytest.fixture
def door(tokenizer: Tokenizer, info: ModelInfo) -> Door:
    return Door(tokenizer, info)


def test_text_is_tokenized_and_kept(door: Door, tokenizer: Tokenizer) -> None:
    prepared = door.prepare("Once upon a time", SamplingParams(max_tokens=5))
    assert prepared.text == "Once upon a time"
    assert prepared.token_ids == tokenizer.encode("Once upon a time")
    assert prepared.max_tokens == 5


@pytest.mark.parametrize("prompt", ["", []])
def test_empty_prompt_without_bos_is_refused(door: Door, prompt: Any) -> None:
    with pytest.raises(RequestError, match="empty") as caught:
        door.prepare(prompt, SamplingParams())
    assert caught.value.field == "prompt"


@pytest.mark.parametrize("prompt", ["", []])
def test_empty_prompt_becomes_bos_where_there_is_one(bos_tokenizer: Tokenizer, info: ModelInfo, prompt: Any) -> None:
    door = Door(bos_tokenizer, info)
    assert door.prepare(prompt, SamplingParams()).token_ids == [0]
    with pytest.raises(RequestError, match="empty"):
        door.prepare(prompt, SamplingParams(), add_special_tokens=False)


@pytest.mark.parametrize("bad", [384, -1, 5279552648203111001, True, 1.5, "a", None, np.int32(3)])
def test_ids_outside_the_vocabulary_or_of_another_type_are_refused(door: Door, bad: Any) -> None:
    with pytest.raises(RequestError, match="token id") as caught:
        door.prepare([5, bad], SamplingParams())
    assert caught.value.field == "prompt"


def test_an_array_of_ids_is_a_prompt(door: Door) -> None:
    ids: Any = np.array([5, 6], np.int32)
    assert door.prepare(ids, SamplingParams()).token_ids == [5, 6]
    with pytest.raises(RequestError, match=r"2\.5"):
        door.prepare(ids / 2, SamplingParams())


def test_too_large_max_tokens_names_limit_prompt_and_asked(door: Door) -> None:
    with pytest.raises(RequestTooLargeError) as caught:
        door.prepare([5] * 8, SamplingParams(max_tokens=61))
    assert caught.value.field == "max_tokens"
    for number in ("61", "8 tokens", "69", "64", "at most 56"):
        assert number in str(caught.value)


def test_no_max_tokens_is_the_room_left_or_the_default(door: Door) -> None:
    unlimited = SamplingParams(max_tokens=None)
    assert door.prepare([5] * 8, unlimited).max_tokens == 56
    assert door.prepare([5] * 8, unlimited, default_max_tokens=16).max_tokens == 16
    assert door.prepare([5] * 60, unlimited, default_max_tokens=16).max_tokens == 4


def test_prompts_around_the_context_length(door: Door) -> None:
    one, score = SamplingParams(max_tokens=1), SamplingParams(max_tokens=0)
    assert door.prepare([5] * 63, one).max_tokens == 1
    assert door.prepare([5] * 64, score).max_tokens == 0
    for length, params in ((64, one), (64, SamplingParams(max_tokens=None)), (65, score), (65, one)):
        with pytest.raises(RequestTooLargeError, match=f"{length} tokens.* 64 tokens"):
            door.prepare([5] * length, params)


def test_hopeless_text_is_refused_without_tokenizing(info: ModelInfo, tokenizer: Tokenizer) -> None:
    class NeverEncodes:
        vocab_size = tokenizer.vocab_size
        token_bytes = staticmethod(tokenizer.token_bytes)

        def encode(self, text: str, **_: Any) -> list[int]:
            raise AssertionError("must not be tokenized")

    door = Door(NeverEncodes(), info)  # type: ignore[arg-type]
    with pytest.raises(RequestTooLargeError, match="5000000 characters") as caught:
        door.prepare("x" * 5_000_000, SamplingParams())
    assert caught.value.field == "prompt"


def test_text_within_the_character_limit_is_counted_in_tokens(door: Door, tokenizer: Tokenizer) -> None:
    text = "Once upon a time " * 5
    assert len(text) > 64
    assert door.prepare(text, SamplingParams(max_tokens=1)).token_ids == tokenizer.encode(text)


@pytest.mark.parametrize("prompt", [None, 5, {5, 6}])
def test_what_is_neither_text_nor_ids_is_refused(door: Door, prompt: Any) -> None:
    with pytest.raises(RequestError, match="text or token ids"):
        door.prepare(prompt, SamplingParams())


def test_millions_of_ids_are_refused_by_their_number(door: Door) -> None:
    with pytest.raises(RequestTooLargeError, match="1000000 tokens"):
        door.prepare([-1] * 1_000_000, SamplingParams())


def test_stop_token_ids_end_an_answer_even_with_ignore_eos(door: Door) -> None:
    assert door.prepare([5], SamplingParams(stop_token_ids=(9, 2))).eos == (2, 9)
    assert door.prepare([5], SamplingParams(stop_token_ids=(9,), ignore_eos=True)).eos == (9,)
    assert door.prepare([5], SamplingParams(ignore_eos=True)).eos == ()


@pytest.mark.parametrize(
    ("field", "params"),
    [
        ("stop_token_ids", SamplingParams(stop_token_ids=(384,))),
        ("logit_bias", SamplingParams(logit_bias={999999: 5.0})),
        ("allowed_token_ids", SamplingParams(allowed_token_ids=(384,))),
        ("logprobs", SamplingParams(logprobs=1_000_000)),
        ("min_tokens", SamplingParams(min_tokens=10**30, max_tokens=None)),
    ],
)
def test_parameters_outside_the_vocabulary_are_refused(door: Door, field: str, params: SamplingParams) -> None:
    with pytest.raises(RequestError) as caught:
        door.prepare([5], params)
    assert caught.value.field == field


def test_top_k_over_the_vocabulary_is_off(door: Door) -> None:
    assert door.prepare([5], SamplingParams(top_k=10**30)).engine_params.top_k == 0
    assert door.prepare([5], SamplingParams(top_k=383)).engine_params.top_k == 383


def test_bad_words_become_ids_at_the_start_and_after_a_space(door: Door, tokenizer: Tokenizer) -> None:
    ids = door.prepare([5], SamplingParams(bad_words=("cat",), bad_words_ids=((7, 8),))).engine_params.bad_words_ids
    forms = {tuple(tokenizer.encode(form)) for form in ("cat", " cat")}
    assert len(forms) == 2
    assert set(ids) == {(7, 8), *forms}


def test_without_a_tokenizer_only_ids_are_served(info: ModelInfo) -> None:
    door = Door(None, info)
    assert door.prepare([5], SamplingParams()).token_ids == [5]
    for prompt, params, field in (
        ("text", SamplingParams(), "prompt"),
        ([5], SamplingParams(stop=("x",)), "stop"),
        ([5], SamplingParams(bad_words=("x",)), "bad_words"),
    ):
        with pytest.raises(RequestError, match="tokenizer") as caught:
            door.prepare(prompt, params)
        assert caught.value.field == field


def test_shared_parameters_are_resolved_once(door: Door) -> None:
    params = SamplingParams(bad_words=("cat",))
    first, second = door.prepare([5], params), door.prepare([6], params)
    assert first.engine_params is second.engine_params
    assert door.prepare([6], SamplingParams()).engine_params is not first.engine_params


def test_lone_surrogate_is_refused(door: Door) -> None:
    with pytest.raises(RequestError, match="surrogate"):
        door.prepare("a\ud83d", SamplingParams())


@pytest.mark.parametrize(
    "settings", [{"priority": 2**40}, {"priority": True}, {"priority": "high"}, {"cache_salt": 5}, {"cache_salt": None}]
)
def test_bad_priority_and_salt_are_refused_by_name(door: Door, settings: dict[str, Any]) -> None:
    with pytest.raises(RequestError) as caught:
        door.prepare([5], SamplingParams(), **settings)
    assert caught.value.field == next(iter(settings))


def test_priority_and_salt_are_passed_on(door: Door) -> None:
    prepared = door.prepare([5], SamplingParams(), priority=-3, cache_salt="é")
    assert (prepared.priority, prepared.salt) == (-3, "é".encode())
