"""What clients build on: bodies that are objects, streams that start with the prompt they echo, a server that stays
reachable while it works."""

from __future__ import annotations

import asyncio

import pytest

pytestmark = pytest.mark.anyio
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
USER = [{"role": "user", "content": "hi"}]


@pytest.mark.parametrize("prompt", ["\n1. Carol has 20", [50, 51, 52], ["one", "two"]])
@pytest.mark.parametrize("n", [1, 2])
async def test_case_B4_a_stream_with_echo_and_logprobs_starts_with_the_prompt(serve, prompt, n):
    server = await serve(" pages, 你好")
    body = {"prompt": prompt, "echo": True, "logprobs": 1, "max_tokens": 30, "n": n}
    plain = await server.both(COMPLETIONS, body)
    chunks = await server.stream(COMPLETIONS, body)
    for choice in plain["choices"]:
        first = next(c for chunk in chunks for c in chunk["choices"] if c["index"] == choice["index"])
        silent = await server.ask(COMPLETIONS, body | {"max_tokens": 0, "n": 1})
        echoed = silent["choices"][choice["index"] // n]["text"]
        assert first["text"].startswith(echoed)
        assert first["logprobs"]["token_logprobs"][0] is None
        assert choice["text"] == echoed + " pages, 你好"


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT, "/tokenize"])
async def test_case_D6_a_plain_body_is_an_object_however_many_run_at_once(serve, path):
    server = await serve("yes", delay=0.002)
    body = {"messages": USER} if path == CHAT else {"prompt": "x"}
    answers = await asyncio.gather(*(server.ask(path, body) for _ in range(20)))
    assert [type(answer) for answer in answers] == [dict] * 20


@pytest.mark.parametrize("body", [{"input": "x"}, {"input": "x " * 9999}, {"input": "x", "encoding_format": "base64"}])
async def test_case_X_embeddings_are_refused_by_name_and_not_answered_with_something_else(serve, body):
    # Too long an input, and base64, become cases of their own when a model that pools is served.
    server = await serve()
    assert "generates text" in await server.refused("/v1/embeddings", body, field="model")


async def test_case_X_chat_echo_of_a_continued_answer_has_no_header(serve):
    server = await serve(" indeed")
    body = {
        "messages": [*USER, {"role": "assistant", "content": "Yes,"}],
        "continue_final_message": True,
        "add_generation_prompt": False,
        "echo": True,
    }
    answer = await server.both(CHAT, body)
    assert answer["choices"][0]["message"] == answer["choices"][0]["message"] | {
        "role": "assistant",
        "content": "Yes, indeed",
    }


async def test_case_X_health_answers_while_every_place_is_taken_and_more_wait(serve):
    server = await serve([40] * 250, delay=0.005, max_num_seqs=4, num_blocks=128)
    body = {"prompt": [40], "max_tokens": 60}
    streams = [asyncio.create_task(server.stream(COMPLETIONS, body)) for _ in range(12)]
    while server.service.num_live < 12:
        await asyncio.sleep(0.001)
    for _ in range(20):
        assert (await server.get("/health")).status_code == 200
    assert not any(stream.done() for stream in streams), "health waits for no stream"
    assert len(await asyncio.gather(*streams)) == 12
