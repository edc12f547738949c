"""From what a parser finds in an answer to the typed events of a response."""

from __future__ import annotations

import msgspec
import pytest

from octavo.server.conversation import AnswerDelta
from octavo.server.errors import ApiError
from octavo.server.openai.answers import TokenLogprob
from octavo.server.parsers.events import Content, Reasoning, ToolCallArguments, ToolCallEnd, ToolCallStart
from octavo.server.responses.answers import Event, ReasoningOptions, Response
from octavo.server.responses.events import ResponseWriter, make_events, saved, with_failure

pytestmark = pytest.mark.anyio
CALL = [ToolCallStart(0, "c1", "look"), ToolCallArguments(0, '{"at":'), ToolCallArguments(0, ' "x"}'), ToolCallEnd(0)]


async def deltas(*steps, finish="stop", error=None):
    """One delta of one token a step, and the last one, or an error."""
    for number, step in enumerate([*steps, []]):
        last = number == len(steps)
        if last and error is not None:
            raise error
        yield AnswerDelta(
            index=0,
            events=step,
            token_ids=[number],
            finish_reason=finish if last else None,
            num_prompt_tokens=20,
            num_cached_tokens=16,
            prompt_token_ids=[1] * 20,
            num_reasoning_tokens=3,
        )


def new_writer(status="in_progress", **how):
    response = Response(
        id="resp_1",
        created_at=1,
        status=status,
        model="tiny",
        reasoning=ReasoningOptions(),
        temperature=1.0,
        text={},
        tool_choice="auto",
        tools=[],
        top_p=1.0,
        metadata={},
    )
    return ResponseWriter(response, **how)


async def told(*steps, writer=None, **end):
    """The events, which are numbered without a gap and can be read again as they were."""
    events = [event async for event in make_events(deltas(*steps, **end), writer or new_writer())]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    for event in events:
        assert msgspec.json.decode(msgspec.json.encode(event), type=Event) == event
    return [msgspec.to_builtins(event) for event in events]


def kinds(events):
    return [event["type"].removeprefix("response.") for event in events]


async def test_a_message_is_told_part_by_part():
    events = await told([Content("Hel")], [Content("lo")])
    assert kinds(events) == [
        "created",
        "in_progress",
        "output_item.added",
        "content_part.added",
        "output_text.delta",
        "output_text.delta",
        "output_text.done",
        "content_part.done",
        "output_item.done",
        "completed",
    ]
    assert events[0]["response"]["output"] == events[1]["response"]["output"] == events[2]["item"]["content"] == []
    assert events[3]["part"]["text"] == ""
    assert [event["delta"] for event in events[4:6]] == ["Hel", "lo"]
    assert events[6]["text"] == events[7]["part"]["text"] == events[8]["item"]["content"][0]["text"] == "Hello"
    whole = events[-1]["response"]
    assert whole["output"] == [events[8]["item"]]
    assert (whole["status"], whole["output"][0]["status"]) == ("completed", "completed")
    assert len({event["item_id"] for event in events[3:8]} | {events[2]["item"]["id"]}) == 1


async def test_reasoning_text_and_calls_are_items_in_their_order():
    second = [ToolCallStart(1, "c2", "look"), ToolCallArguments(1, "{}"), ToolCallEnd(1)]
    events = await told([Reasoning("hm")], [Content("So:")], CALL, second, finish="tool_calls")
    output = events[-1]["response"]["output"]
    assert [item["type"] for item in output] == ["reasoning", "message", "function_call", "function_call"]
    assert output[0]["content"] == [{"type": "reasoning_text", "text": "hm"}]
    assert output[0]["summary"] == []
    assert (output[2]["call_id"], output[2]["name"], output[2]["arguments"]) == ("c1", "look", '{"at": "x"}')
    assert [event["output_index"] for event in events if event["type"].endswith("item.done")] == [0, 1, 2, 3]
    done = next(event for event in events if event["type"] == "response.function_call_arguments.done")
    assert (done["name"], done["arguments"]) == ("look", '{"at": "x"}')
    thought = [event["type"] for event in events if event.get("item_id") == output[0]["id"]]
    assert thought == [
        "response.content_part.added",
        "response.reasoning_text.delta",
        "response.reasoning_text.done",
        "response.content_part.done",
    ]


@pytest.mark.parametrize(
    ("last", "kind"), [(Content("a"), "message"), (Reasoning("a"), "reasoning"), (CALL[0], "function_call")]
)
async def test_an_answer_that_is_cut_is_incomplete_and_so_is_its_last_item(last, kind):
    whole = (await told([Content("x"), Reasoning("y")], [last], finish="length"))[-1]
    assert whole["type"] == "response.incomplete"
    assert whole["response"]["incomplete_details"] == {"reason": "max_output_tokens"}
    assert whole["response"]["output"][-1]["status"] == "incomplete"
    assert whole["response"]["output"][-1]["type"] == kind
    assert whole["response"]["output"][0]["status"] == "completed"


async def test_usage_tells_cached_and_reasoning_tokens():
    usage = (await told([Content("a")]))[-1]["response"]["usage"]
    assert usage == {
        "input_tokens": 20,
        "input_tokens_details": {"cached_tokens": 16, "cache_write_tokens": 0},
        "output_tokens": 2,
        "output_tokens_details": {"reasoning_tokens": 3},
        "total_tokens": 22,
    }


async def test_logprobs_stand_with_the_text_and_not_with_reasoning_or_calls():
    def logprobs(new):
        return [TokenLogprob(str(token), -1.0, None, []) for token in new.token_ids]

    steps = ([Reasoning("a")], [], [Content("b")], [], [Content("c")], CALL[:1], CALL[1:3], CALL[3:], [Content("d")])
    events = await told(*steps, writer=new_writer(logprobs=logprobs))
    messages = [item for item in events[-1]["response"]["output"] if item["type"] == "message"]
    assert [[entry["token"] for entry in item["content"][0]["logprobs"]] for item in messages] == [
        ["1", "2", "3", "4"],
        ["8"],
    ]
    streamed = [entry["token"] for event in events if "delta" in event for entry in event.get("logprobs", [])]
    assert streamed == ["1", "2", "3", "4", "8"]


async def test_an_error_before_the_first_event_is_raised_and_a_later_one_is_told():
    writer = new_writer()
    events = with_failure(make_events(deltas(error=ApiError(400, "no")), writer), writer)
    with pytest.raises(ApiError, match="no"):
        await anext(events)
    writer = new_writer()
    events = [
        e async for e in with_failure(make_events(deltas([Content("a")], error=ApiError(500, "no")), writer), writer)
    ]
    assert events[-1].__struct_config__.tag == "response.failed"
    response = events[-1].response
    assert (response.status, response.error.code, response.error.message) == ("failed", "server_error", "no")
    assert response.output[0].status == "incomplete"
    assert [event.sequence_number for event in events] == list(range(len(events)))


async def test_an_aborted_answer_fails():
    writer = new_writer()
    events = [e async for e in with_failure(make_events(deltas([Content("a")], finish="abort"), writer), writer)]
    assert (events[-1].response.status, events[-1].response.error.code) == ("failed", "aborted")


async def test_the_end_is_told_when_it_is_saved():
    order = []

    async def save(response):
        order.append(response.status)

    async for event in saved(make_events(deltas([Content("a")]), new_writer()), save):
        order.append(event.__struct_config__.tag)
    assert order[-2:] == ["completed", "response.completed"]

    async def fail(response):
        raise ApiError(500, "disk full", code="response_store_failed")

    writer = new_writer()
    events = [e async for e in with_failure(saved(make_events(deltas([Content("a")]), writer), fail), writer)]
    assert "response.completed" not in [event.__struct_config__.tag for event in events]
    assert events[-1].response.error.code == "response_store_failed"
    assert events[-1].response.output[0].content[0].text == "a"
