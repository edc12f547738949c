"""Routes besides generation, and what holds for all of them: keys, ids, limits, error shape."""

from __future__ import annotations

import asyncio
import re
import time

import pytest

from octavo import __version__
from octavo.errors import ConfigError
from octavo.server import pooling
from octavo.server.app import ROUTES
from octavo.server.options import ServerOptions
from octavo.server.service import REJECTIONS

pytestmark = pytest.mark.anyio
PATH = "/v1/completions"


async def test_models_are_listed_under_all_their_names(serve):
    server = await serve()
    listed = (await server.get("/v1/models")).json()
    assert [model["id"] for model in listed["data"]] == ["tiny", "tiny-alias"]
    assert (await server.get("/v1/models/tiny-alias")).json() == listed["data"][1]
    assert listed["data"][0]["max_model_len"] == 256
    assert (await server.get("/v1/models/other/name")).status_code == 404


async def test_an_unknown_model_is_not_found(serve):
    server = await serve()
    message = await server.refused(PATH, {"model": "gpt-9", "prompt": "x"}, field="model", status=404)
    assert "tiny" in message


async def test_unknown_routes_and_methods_have_the_shape_of_all_errors(serve):
    server = await serve()
    for method, path, status in (("GET", "/nothing", 404), ("GET", PATH, 405), ("DELETE", "/v1/models", 405)):
        response = await server.http.request(method, path)
        assert response.status_code == status
        assert set(response.json()["error"]) == {"message", "type", "param", "code"}


async def test_rejections_are_counted_from_0_for_every_reason(serve):
    server = await serve(options=ServerOptions(max_queue=0), max_num_seqs=1)
    name = "octavo:admission_rejections_total"
    text = (await server.get("/metrics")).text
    assert re.findall(rf'{name}{{reason="(\w+)"}} 0.0', text) == list(REJECTIONS)
    server.service.num_live += 1
    assert (await server.send(PATH, {"prompt": "x"})).status_code == 503
    server.service.num_live -= 1
    assert f'{name}{{reason="queue_full"}} 1.0' in (await server.get("/metrics")).text


async def test_health_ping_and_version(serve):
    server = await serve()
    for path in ("/health", "/ping"):
        response = await server.get(path)
        assert (response.status_code, response.json()) == (200, {})
    assert (await server.get("/version")).json() == {"version": __version__}


async def test_metrics_count_requests_tokens_and_responses(serve):
    server = await serve("yes")
    await server.ask(PATH, {"prompt": [20, 21, 22], "max_tokens": 4})
    await server.settled()
    await asyncio.sleep(0.05)
    response = await server.get("/metrics")
    assert response.headers["content-type"].startswith("text/plain")
    values = dict(line.rsplit(" ", 1) for line in response.text.splitlines() if not line.startswith("#"))
    assert float(values['octavo:prompt_tokens_total{engine="0",model_name="tiny"}']) == 3
    assert float(values['octavo:num_requests_running{engine="0",model_name="tiny"}']) == 0
    assert float(values['octavo:http_requests_total{method="POST",status="200"}']) == 1


@pytest.mark.parametrize("path", [path for _, path in ROUTES if path != "/health"])
async def test_a_key_guards_every_route_but_health(serve, path):
    server = await serve(options=ServerOptions(api_keys=("first", "second")))
    method = next(method for method, route in ROUTES if route == path)
    path = path.replace("{id:path}", "tiny").replace("{id}", "unknown")
    for headers in ({}, {"authorization": "Bearer wrong"}, {"authorization": "first"}, {"authorization": "Bearer "}):
        response = await server.http.request(method, path, headers=headers)
        assert response.status_code == 401
        shape = {"type", "message"} if path.startswith("/v1/messages") else {"message", "type", "param", "code"}
        assert set(response.json()["error"]) == shape
    for key in ("first", "second"):
        response = await server.http.request(method, path, headers={"authorization": f"Bearer {key}"})
        expected = 404 if "unknown" in path else 400
        assert response.status_code in (200, expected)
    assert (await server.get("/health")).status_code == 200


def test_an_empty_key_is_refused_at_start():
    with pytest.raises(ConfigError, match="api-key"):
        ServerOptions(api_keys=("good", ""))


def test_keys_are_not_shown_in_logs():
    assert "sesame" not in repr(ServerOptions(api_keys=("sesame",)))


async def test_the_request_id_comes_back(serve):
    server = await serve()
    response = await server.send(PATH, {"prompt": "x"}, headers={"x-request-id": "abc-1"})
    assert response.headers["x-request-id"] == "abc-1"
    assert response.json()["id"] == "cmpl-abc-1"
    for unfit in ("x" * 500, "naïve"):
        response = await server.http.get("/health", headers={"x-request-id": unfit.encode()})
        assert response.headers["x-request-id"] != unfit
        assert len(response.headers["x-request-id"]) == 32


async def test_case_G3_two_live_requests_may_share_an_id(serve):
    server = await serve([40] * 60, delay=0.002)
    body = {"prompt": "x", "max_tokens": 30, "request_id": "same"}
    answers = await asyncio.gather(*(server.ask(PATH, body) for _ in range(4)))
    assert [answer["id"] for answer in answers] == ["cmpl-same"] * 4
    assert [answer["usage"]["completion_tokens"] for answer in answers] == [30] * 4


async def test_large_bodies_are_refused_by_announced_and_by_true_size(serve):
    server = await serve(options=ServerOptions(max_body_bytes=1000))

    async def unannounced():
        for _ in range(20):
            yield b" " * 100

    for response in (
        await server.send(PATH, raw="x" * 1001),
        await server.http.post(PATH, content=unannounced()),
    ):
        assert response.status_code == 413
        assert response.json()["error"]["code"] == "body_too_large"
    await server.ask(PATH, {"prompt": "x"})


async def test_a_full_queue_turns_requests_away_with_a_time_to_retry(serve):
    server = await serve([40] * 200, options=ServerOptions(max_queue=1), max_num_seqs=2, delay=0.002)
    body = {"prompt": "x", "max_tokens": 100}
    busy = [asyncio.create_task(server.send(PATH, body)) for _ in range(3)]
    while server.service.num_live < 3:
        await asyncio.sleep(0.001)
    response = await server.send(PATH, body)
    assert response.status_code == 503
    assert response.json()["error"]["code"] == "queue_full"
    assert int(response.headers["retry-after"]) > 0
    assert [(await task).status_code for task in busy] == [200] * 3
    assert (await server.send(PATH, body)).status_code == 200


async def test_a_draining_server_finishes_what_runs_and_takes_nothing_new(serve):
    server = await serve([40] * 100, delay=0.002)
    running = asyncio.create_task(server.ask(PATH, {"prompt": "x", "max_tokens": 80}))
    while server.service.num_live == 0:
        await asyncio.sleep(0.001)
    server.service.draining = True
    assert (await server.get("/health")).status_code == 503
    response = await server.send(PATH, {"prompt": "x"})
    assert (response.status_code, response.json()["error"]["code"]) == (503, "shutting_down")
    assert (await running)["usage"]["completion_tokens"] == 80
    server.service.draining = False


async def test_a_browser_of_another_origin_may_read_errors_too(serve):
    server = await serve(options=ServerOptions(cors_origins=("https://app.test",), api_keys=("k",)))
    headers = {"origin": "https://app.test", "access-control-request-method": "POST"}
    assert (await server.http.options(PATH, headers=headers)).status_code == 200
    response = await server.send(PATH, {"prompt": "x"}, headers={"origin": "https://app.test"})
    assert response.status_code == 401
    assert response.headers["access-control-allow-origin"] == "https://app.test"
    closed = await serve()
    assert "access-control-allow-origin" not in (await closed.get("/health", headers=headers)).headers


async def test_tokenize_and_detokenize_are_inverse(serve, tokenizer):
    server = await serve()
    text = "The sheets, 你好 <|im_end|>"
    answer = await server.ask("/tokenize", {"prompt": text, "return_token_strs": True})
    assert answer["tokens"] == tokenizer.encode(text)
    assert (answer["count"], answer["max_model_len"]) == (len(answer["tokens"]), 256)
    assert len(answer["token_strs"]) == answer["count"]
    assert (await server.ask("/detokenize", {"tokens": answer["tokens"]})) == {"prompt": text}


async def test_tokenize_renders_conversations_as_chat_does(serve, tokenizer):
    server = await serve()
    messages = [{"role": "user", "content": "hi"}]
    assert (await server.ask("/tokenize", {"messages": messages}))["tokens"] == tokenizer.encode_chat(messages)
    await server.refused("/tokenize", {"messages": messages, "prompt": "x"}, field="prompt")
    await server.refused("/tokenize", {}, field="prompt")
    await server.refused("/detokenize", {"tokens": [99999]}, field="tokens")
    await server.refused("/detokenize", {"tokens": [-1]}, field="tokens")


async def test_case_G6_a_giant_prompt_does_not_hold_up_others(serve):
    server = await serve([40] * 200, delay=0.005)
    stream = asyncio.create_task(server.stream(PATH, {"prompt": "x", "max_tokens": 100}))
    giant = "word " * 1_000_000
    tasks = [
        asyncio.create_task(server.send(PATH, {"prompt": giant})),
        asyncio.create_task(server.send("/v1/chat/completions", {"messages": [{"role": "user", "content": giant}]})),
    ]
    slowest = 0.0
    while not all(task.done() for task in tasks):
        started = time.monotonic()
        assert (await server.get("/health")).status_code == 200
        slowest = max(slowest, time.monotonic() - started)
        await asyncio.sleep(0.02)
    for task, field in zip(tasks, ("prompt", "messages"), strict=True):
        error = (await task).json()["error"]
        assert (error["param"], error["code"]) == (field, "context_length_exceeded")
    assert (await stream)[-1]["choices"][0]["finish_reason"] == "length"
    assert slowest < 5.0  # generous: a loaded test machine; tokenizing on the loop takes longer still


async def test_case_D7_concurrent_streams_get_only_their_own_tokens(serve, tokenizer):
    server = await serve(lambda prompt: [prompt[0]] * 20 + [2])
    ids = range(40, 56)
    streams = await asyncio.gather(
        *(server.stream(PATH, {"prompt": [i], "max_tokens": 30, "return_token_ids": True}) for i in ids)
    )
    for own, chunks in zip(ids, streams, strict=True):
        got = [token for chunk in chunks for choice in chunk["choices"] for token in choice["token_ids"]]
        assert got == [own] * 20 + [2]


@pytest.mark.parametrize("path", pooling.PATHS)
async def test_routes_of_models_that_pool_say_that_this_one_does_not(serve, path):
    server = await serve()
    response = await server.send(path, {"input": "x"})
    assert response.status_code == 400
    assert response.json()["error"]["code"] == "not_supported"
