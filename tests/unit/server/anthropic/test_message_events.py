"""From what a parser finds in an answer to typed events and whole messages."""

from __future__ import annotations

import msgspec
import pytest

from octavo.server.anthropic.answers import Message, Usage
from octavo.server.anthropic.events import join_events, make_events
from octavo.server.conversation import AnswerDelta
from octavo.server.errors import ApiError
from octavo.server.parsers.events import Content, Reasoning, ToolCallArguments, ToolCallEnd, ToolCallStart

pytestmark = pytest.mark.anyio
CALL = [ToolCallStart(0, "c1", "look"), ToolCallArguments(0, '{"at":'), ToolCallArguments(0, ' "x"}'), ToolCallEnd(0)]


async def deltas(*steps, finish="stop", stop=None):
    """One delta of one token a step, and the last one."""
    for number, step in enumerate([*steps, []]):
        last = number == len(steps)
        yield AnswerDelta(
            index=0,
            events=step,
            token_ids=[7],
            finish_reason=finish if last else None,
            stop_reason=stop if last else None,
            num_prompt_tokens=20,
            num_cached_tokens=16,
            prompt_token_ids=[1] * 20,
            num_reasoning_tokens=3,
        )


def events_of(*steps, max_tokens=99, **end):
    head = Message(id="msg_1", model="tiny", content=[], usage=Usage(input_tokens=0, output_tokens=0))
    return make_events(deltas(*steps, **end), head, max_tokens=max_tokens)


async def told(*steps, **end):
    return [msgspec.to_builtins(event) async for event in events_of(*steps, **end)]


async def joined(*steps, **end):
    return msgspec.to_builtins(await join_events(events_of(*steps, **end)))


async def test_a_call_ends_with_tool_use_and_has_its_input_as_an_object():
    message = await joined([Content("Let me look.")], CALL)
    assert message["stop_reason"] == "tool_use"
    assert [block["type"] for block in message["content"]] == ["text", "tool_use"]
    assert message["content"][1] == {"type": "tool_use", "id": "c1", "name": "look", "input": {"at": "x"}}


@pytest.mark.parametrize("finish", ["tool_calls", "stop"])
async def test_the_stop_reason_is_tool_use_after_a_call_whatever_the_engine_says(finish):
    assert (await joined(CALL, finish=finish))["stop_reason"] == "tool_use"
    assert (await joined(CALL, finish=finish, stop=151645))["stop_reason"] == "tool_use"
    assert (await joined(CALL, finish="length", max_tokens=2))["stop_reason"] == "max_tokens"


async def test_input_is_streamed_as_it_comes():
    events = await told(CALL[:2], CALL[2:])
    assert [event["type"] for event in events] == [
        "message_start",
        "ping",
        "content_block_start",
        "content_block_delta",
        "content_block_delta",
        "content_block_stop",
        "message_delta",
        "message_stop",
    ]
    assert events[2]["content_block"] == {"type": "tool_use", "id": "c1", "name": "look", "input": {}}
    assert [event["delta"]["partial_json"] for event in events[3:5]] == ['{"at":', ' "x"}']


async def test_two_calls_have_a_block_each():
    second = [ToolCallStart(1, "c2", "look"), ToolCallArguments(1, "{}"), ToolCallEnd(1)]
    message = await joined(CALL, second)
    assert [(block["id"], block["input"]) for block in message["content"]] == [("c1", {"at": "x"}), ("c2", {})]


async def test_white_space_before_a_call_is_no_block():
    for before in ([Content("\n")], [Reasoning("hm"), Content("\n"), Content(" ")]):
        message = await joined([*before, *CALL])
        assert "text" not in [block["type"] for block in message["content"]]
    assert (await joined([Content("\n"), Content("\nyes")]))["content"][0]["text"] == "\n\nyes"


async def test_thinking_is_signed_when_it_is_over():
    events = await told([Reasoning("a")], [Reasoning("b")], [Content("c")])
    block = [event for event in events if event.get("index") == 0]
    assert [event["type"].removeprefix("content_block_") for event in block] == [
        "start",
        "delta",
        "delta",
        "delta",
        "stop",
    ]
    assert block[0]["content_block"] == {"type": "thinking", "thinking": "", "signature": ""}
    assert [event["delta"]["type"] for event in block[1:-1]] == ["thinking_delta", "thinking_delta", "signature_delta"]
    (thinking, text) = (await joined([Reasoning("a")], [Reasoning("b")], [Content("c")]))["content"]
    assert (thinking["thinking"], text["text"]) == ("ab", "c")
    assert thinking["signature"] == block[3]["delta"]["signature"] != ""


async def test_thinking_that_is_cut_stays_thinking():
    message = await joined([Reasoning("a")], finish="length", max_tokens=2)
    assert [block["type"] for block in message["content"]] == ["thinking"]
    assert message["stop_reason"] == "max_tokens"


async def test_usage_comes_with_the_start_and_grows_to_the_end():
    events = await told([Content("a")], [Content("b")])
    start, end = events[0]["message"]["usage"], events[-2]["usage"]
    assert (start["input_tokens"], start["cache_read_input_tokens"]) == (4, 16)
    assert start | {"output_tokens": 3, "output_tokens_details": end["output_tokens_details"]} == end
    assert end["output_tokens_details"] == {"thinking_tokens": 3}


async def test_an_aborted_answer_is_an_error_and_no_end():
    events = events_of([Content("a")], finish="abort")
    with pytest.raises(ApiError, match="aborted"):
        await join_events(events)


async def test_arguments_that_are_no_object_are_not_lost():
    call = [ToolCallStart(0, "c1", "look"), ToolCallArguments(0, "[1]"), ToolCallEnd(0)]
    assert (await joined(call))["content"][0]["input"] == {"value": [1]}
