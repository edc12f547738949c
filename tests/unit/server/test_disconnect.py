"""Clients that leave: generation stops, memory is freed. Raw ASGI, because HTTP clients in process cannot hang up."""

from __future__ import annotations

import asyncio
import json
import random
from typing import Any

import pytest

pytestmark = pytest.mark.anyio


async def call(app: Any, path: str, body: dict[str, Any], *, leave_after: int | None) -> list[dict[str, Any]]:
    """POST, and hang up after that many messages from the server (0: right after the body; None: never)."""
    gone = asyncio.Event()
    sent: list[dict[str, Any]] = []
    inbox: list[dict[str, Any]] = [{"type": "http.request", "body": json.dumps(body).encode(), "more_body": False}]
    if leave_after == 0:
        gone.set()

    async def receive() -> dict[str, Any]:
        if inbox:
            return inbox.pop()
        await gone.wait()
        return {"type": "http.disconnect"}

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)
        if leave_after is not None and len(sent) >= leave_after:
            gone.set()

    scope = {
        "type": "http",
        "method": "POST",
        "path": path,
        "raw_path": path.encode(),
        "root_path": "",
        "query_string": b"",
        "headers": [],
    }
    await asyncio.wait_for(app(scope, receive, send), 30)
    return sent


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("leave_after", [0, 3])
async def test_case_G1_generation_stops_when_the_client_is_gone(serve, stream, leave_after):
    server = await serve([40] * 5000, max_model_len=6000, num_blocks=500, delay=0.001)
    body = {"prompt": "x", "max_tokens": 5000, "stream": stream, "n": 2}
    if not stream:
        leave_after = 0
    sent = await call(server.app, "/v1/completions", body, leave_after=leave_after)
    assert len(sent) <= leave_after + 2
    # Within two seconds, says the case; a machine that runs other tests meanwhile may take longer.
    await asyncio.wait_for(server.settled(), 10)
    assert server.engine.stats.generation_tokens < 5000
    assert (await server.ask("/v1/completions", {"prompt": "x", "max_tokens": 1}))["choices"]


async def test_case_G2_leaving_at_random_disturbs_nobody_and_loses_no_block(serve):
    chance = random.Random(7)
    server = await serve(lambda prompt: [prompt[0]] * 30 + [2], max_num_seqs=16)
    for _ in range(5):
        calls = []
        for token in range(40, 104):
            body = {"prompt": [token] * 20, "max_tokens": 40, "stream": True, "return_token_ids": True}
            leave_after = chance.choice([None, None, 0, chance.randrange(1, 25)])
            calls.append((token, leave_after, call(server.app, "/v1/completions", body, leave_after=leave_after)))
        results = await asyncio.gather(*(running for _, _, running in calls))
        for (token, leave_after, _), sent in zip(calls, results, strict=True):
            if leave_after is None:
                text = b"".join(message.get("body", b"") for message in sent).decode()
                events = [event.removeprefix("data: ") for event in text.split("\n\n")[:-1]]
                assert events[-1] == "[DONE]"
                got = [
                    t for event in events[:-1] for choice in json.loads(event)["choices"] for t in choice["token_ids"]
                ]
                assert got == [token] * 30 + [2]
        await server.settled()


@pytest.mark.parametrize("stream", [True, False])
async def test_thousands_of_answers_that_nobody_waits_for_keep_nobody_waiting(serve, stream):
    server = await serve([40] * 250, delay=0.001)
    body = {"prompt": "x", "n": 16384, "max_tokens": 200, "temperature": 1, "stream": stream}
    leaving = asyncio.create_task(call(server.app, "/v1/completions", body, leave_after=1 if stream else 0))
    while not leaving.done() and not server.engine.stats.generation_tokens:
        await asyncio.sleep(0.002)
    await leaving
    steps = server.engine.stats.steps
    assert (await server.ask("/v1/completions", {"prompt": "x", "max_tokens": 1}))["choices"]
    assert server.engine.stats.steps - steps < 20
    await server.settled()
    assert server.engine.stats.generation_tokens < 16384
