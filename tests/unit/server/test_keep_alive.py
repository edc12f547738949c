"""A stream that has no news for long gets comments, also while its request waits; else it is left alone."""

from __future__ import annotations

import asyncio

import pytest

from octavo.errors import EngineError, RequestError
from octavo.server.errors import ErrorBody, ErrorFields
from octavo.server.options import ServerOptions
from octavo.server.sse import COMMENT, DONE, send_events

pytestmark = pytest.mark.anyio
PATH = "/v1/completions"
CHUNK = ErrorBody(ErrorFields("a chunk", "", None, None))


async def sent(*steps, keep_alive: float):
    """What a stream sends that makes these steps: a number waits, an error is raised, all else is a chunk."""

    async def chunks():
        for step in steps:
            if isinstance(step, float):
                await asyncio.sleep(step)
            elif isinstance(step, Exception):
                raise step
            else:
                yield step

    messages = []

    async def send(message) -> None:
        messages.append(message)

    await send_events(send, chunks(), error_body=lambda error: error.body, keep_alive=keep_alive)
    assert [m["type"] for m in messages] == ["http.response.start", *["http.response.body"] * (len(messages) - 1)]
    assert [m["more_body"] for m in messages[1:]] == [True] * (len(messages) - 2) + [False]
    return [m["body"] for m in messages[1:]]


async def test_silence_is_filled_with_comments_before_the_first_chunk_and_between_chunks():
    bodies = await sent(0.35, CHUNK, 0.35, CHUNK, keep_alive=0.1)
    first = bodies.index(next(body for body in bodies if body != COMMENT))
    assert 1 <= first <= 3
    assert bodies[-1] == DONE
    assert bodies.count(COMMENT) > first
    assert len([body for body in bodies if body.startswith(b"data: {")]) == 2


async def test_a_stream_with_news_gets_no_comments():
    assert COMMENT not in await sent(CHUNK, CHUNK, CHUNK, keep_alive=30.0)
    assert COMMENT not in await sent(0.2, CHUNK, keep_alive=0.0)


async def test_an_error_before_anything_was_sent_keeps_its_status_and_one_behind_a_comment_is_an_event():
    with pytest.raises(RequestError):
        await sent(RequestError("wrong"), keep_alive=5.0)
    bodies = await sent(0.35, EngineError("broken"), keep_alive=0.1)
    assert bodies[0] == COMMENT
    assert b'"code":"engine_error"' in bodies[-1]
    assert DONE not in bodies


async def test_a_request_that_waits_for_its_first_token_keeps_its_connection(serve):
    server = await serve("yes", delay=0.3, options=ServerOptions(sse_keep_alive_interval=0.1))
    response = await server.send(PATH, {"prompt": [20, 21], "max_tokens": 2, "stream": True})
    events = response.text.split("\n\n")
    assert events[0] == ": keep-alive"
    assert events[-2:] == ["data: [DONE]", ""]
    assert len([event for event in events if event.startswith("data: {")]) == 2
