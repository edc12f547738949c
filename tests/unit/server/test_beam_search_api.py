"""`use_beam_search` on completions and chats. The search itself is tested in tests/unit/test_beam_search.py."""

from __future__ import annotations

import asyncio

import pytest

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
BEAMS = {"use_beam_search": True, "temperature": 0, "max_tokens": 3, "ignore_eos": True}


def after(prompt):
    """The token that follows is one more than the last: so a beam's answer depends on all of its tokens."""
    return [(prompt[-1] + 1) % 300 + 3]


pytestmark = pytest.mark.anyio


async def test_answers_are_beams_best_first_whatever_the_limit_on_logprobs(serve):
    server = await serve(after)
    body = {"prompt": [5, 6], "n": 12, "logprobs": 1, "return_token_ids": True, **BEAMS}
    answer = await server.both(COMPLETIONS, body)
    choices = answer["choices"]
    assert [choice["index"] for choice in choices] == list(range(12))
    assert len({tuple(choice["token_ids"]) for choice in choices}) == 12
    totals = [sum(choice["logprobs"]["token_logprobs"]) for choice in choices]
    assert totals == sorted(totals, reverse=True)
    assert all(len(row) <= 2 for choice in choices for row in choice["logprobs"]["top_logprobs"])
    assert answer["usage"]["completion_tokens"] == 36
    await server.settled()


async def test_best_of_beams_are_searched_and_n_are_shown(serve):
    server = await serve(after)
    wide = await server.ask(COMPLETIONS, {"prompt": [5, 6], "n": 4, "return_token_ids": True, **BEAMS})
    best = await server.ask(COMPLETIONS, {"prompt": [5, 6], "n": 1, "best_of": 4, "return_token_ids": True, **BEAMS})
    assert [choice["token_ids"] for choice in best["choices"]] == [wide["choices"][0]["token_ids"]]
    await server.refused(COMPLETIONS, {"prompt": [5], "n": 4, "best_of": 2, **BEAMS}, field="best_of")
    await server.settled()


async def test_chats_take_it_too_and_a_stream_is_one_piece(serve):
    server = await serve(after)
    body = {"messages": [{"role": "user", "content": "count"}], "n": 2, "logprobs": True, "top_logprobs": 2, **BEAMS}
    answer = await server.both(CHAT, body)
    assert len(answer["choices"]) == 2
    assert all(choice["finish_reason"] == "length" for choice in answer["choices"])
    assert all(len(choice["logprobs"]["content"]) == 3 for choice in answer["choices"])
    await server.settled()


async def test_several_prompts_get_their_own_beams(serve):
    server = await serve(after)
    answer = await server.ask(COMPLETIONS, {"prompt": [[5, 6], [80, 81]], "n": 2, "return_token_ids": True, **BEAMS})
    alone = [
        await server.ask(COMPLETIONS, {"prompt": prompt, "n": 2, "return_token_ids": True, **BEAMS})
        for prompt in ([5, 6], [80, 81])
    ]
    expected = [choice["token_ids"] for one in alone for choice in one["choices"]]
    assert [choice["token_ids"] for choice in answer["choices"]] == expected
    await server.settled()


async def test_echo_and_scores_of_the_prompt_come_with_beams(serve):
    server = await serve(after)
    body = {"prompt": [40, 41, 42], "n": 2, "echo": True, "logprobs": 1, **BEAMS}
    answer = await server.both(COMPLETIONS, body)
    for choice in answer["choices"]:
        assert len(choice["logprobs"]["tokens"]) == 6
        assert choice["logprobs"]["token_logprobs"][0] is None
        assert "".join(choice["logprobs"]["tokens"]) == choice["text"]


@pytest.mark.parametrize(
    ("extra", "field"),
    [
        ({"presence_penalty": 1.0}, "presence_penalty"),
        ({"frequency_penalty": 1.0}, "frequency_penalty"),
        ({"bad_words": ["page"]}, "bad_words"),
        ({"max_tokens": 1000}, "max_tokens"),
        ({"early_stopping": "maybe"}, "early_stopping"),
        ({"length_penalty": 1e9}, "length_penalty"),
    ],
)
async def test_what_beams_cannot_do_is_refused_by_name(serve, extra, field):
    server = await serve(after)
    await server.refused(COMPLETIONS, {"prompt": [5, 6], "n": 2, **BEAMS, **extra}, field=field)
    await server.settled()


async def test_leaving_early_ends_all_beams(serve):
    server = await serve(after, delay=0.05)
    asking = asyncio.create_task(server.send(COMPLETIONS, {"prompt": [5, 6], "n": 3, **BEAMS, "max_tokens": 100}))
    await asyncio.sleep(0.4)
    assert server.service.client.num_live
    asking.cancel()
    await asyncio.gather(asking, return_exceptions=True)
    await server.settled()


async def test_a_dead_engine_fails_the_request_and_no_beam_stays(serve):
    server = await serve(after, fail_at_step=3)
    response = await server.send(COMPLETIONS, {"prompt": [5, 6], "n": 2, **BEAMS})
    assert response.status_code == 503
    assert (server.service.num_live, server.service.client.num_live) == (0, 0)


@pytest.mark.parametrize(("num_prompts", "width"), [(1, 513), (1, 16384), (100, 64)])
async def test_more_beams_than_fit_into_memory_are_refused(serve, num_prompts, width):
    server = await serve(after)
    body = {"prompt": [[5, 6]] * num_prompts, **BEAMS}
    await server.refused(COMPLETIONS, {**body, "n": width}, field="n")
    await server.refused(COMPLETIONS, {**body, "n": 1, "best_of": width}, field="n")
    await server.settled()
