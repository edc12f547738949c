"""Where an answer ends: stop strings and stop tokens, however the engine's steps cut the text."""

from __future__ import annotations

import itertools

import pytest

pytestmark = pytest.mark.anyio
PATH = "/v1/completions"


@pytest.mark.parametrize("width", [1, 4])
@pytest.mark.parametrize(("include", "text"), [(False, " is "), (True, " is Pari")])
async def test_case_A2_a_stop_string_that_ends_inside_a_token_ends_the_answer(serve, width, include, text):
    server = await serve(" is Paris. More text follows here.", width=width)
    body = {"prompt": "x", "stop": ["Pari"], "include_stop_str_in_output": include, "max_tokens": 60}
    (choice,) = (await server.both(PATH, body | {"return_token_ids": True}))["choices"]
    assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == (text, "stop", "Pari")
    assert "More" not in server.service.tokenizer.decode(choice["token_ids"])


@pytest.mark.parametrize(
    ("how", "text"),
    [
        ({}, "word"),
        ({"skip_special_tokens": False}, "word"),
        ({"skip_special_tokens": False, "include_stop_str_in_output": True}, "word<|im_start|>"),
        ({"include_stop_str_in_output": True}, "word"),
    ],
)
async def test_case_A3_a_special_stop_token_is_in_the_ids_and_only_on_demand_in_the_text(serve, tokenizer, how, text):
    word = tokenizer.encode("word")
    server = await serve([*word, 1, 40, 40])
    (choice,) = (await server.both(PATH, {"prompt": "x", "stop_token_ids": [1], "return_token_ids": True, **how}))[
        "choices"
    ]
    assert (choice["text"], choice["token_ids"], choice["stop_reason"]) == (text, [*word, 1], 1)


async def test_case_A4_only_a_real_beginning_of_a_stop_string_is_held_back(serve, bytes_as_ids):
    # One byte a step; news of several steps may come in one piece, but no piece ends inside what is held back.
    server = await serve([*bytes_as_ids(b"alphab,d long b,"), 2], delay=0.02)
    chunks = await server.stream(PATH, {"prompt": "x", "stop": ["b,c", "x" * 30], "max_tokens": 60})
    texts = [choice["text"] for chunk in chunks for choice in chunk["choices"] if choice["text"]]
    ends = list(itertools.accumulate(map(len, texts)))
    shown_at_once = [*"alpha", "b,d", *" long", " ", "b,"]
    assert set(ends) <= set(itertools.accumulate(map(len, shown_at_once)))
    assert len(ends) > 3
    assert "".join(texts) == "alphab,d long b,"
