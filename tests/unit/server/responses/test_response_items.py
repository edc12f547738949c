"""What a model sees of input items, and how they are listed."""

from __future__ import annotations

import pytest

from octavo.errors import RequestError
from octavo.server.message_builder import MessageBuilder
from octavo.server.responses.items import add_items, as_items

CALL = {"type": "function_call", "call_id": "c1", "name": "look", "arguments": '{"at": "x"}'}


def seen(given):
    turns = MessageBuilder()
    add_items(turns, as_items(given))
    return turns.messages


def test_a_text_is_a_message_of_a_user():
    assert seen("hi") == [{"role": "user", "content": "hi"}]
    (item,) = as_items("hi")
    assert item.pop("id").startswith("msg_")
    assert item == {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "hi"}]}


def test_messages_need_no_type_and_a_developer_is_the_system():
    given = [
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": [{"type": "input_text", "text": "hi"}]},
        {"type": "message", "id": "msg_1", "role": "assistant", "content": [{"type": "output_text", "text": "yes"}]},
        {"role": "assistant", "content": [{"type": "refusal", "refusal": "no"}]},
    ]
    assert seen(given) == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": [{"type": "text", "text": "yes"}, {"type": "text", "text": "no"}]},
    ]
    assert as_items(given)[2]["id"] == "msg_1"


def test_reasoning_text_and_calls_of_one_answer_are_one_message():
    given = [
        {"role": "user", "content": "what is there?"},
        {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "I must look"}]},
        {"role": "assistant", "content": "Let me look."},
        CALL,
        {"type": "function_call_output", "call_id": "c1", "output": "a cat"},
    ]
    messages = seen(given)
    assert messages[1] == {
        "role": "assistant",
        "content": "Let me look.",
        "reasoning": "I must look",
        "tool_calls": [{"id": "c1", "type": "function", "function": {"name": "look", "arguments": '{"at": "x"}'}}],
    }
    assert messages[2] == {"role": "tool", "tool_call_id": "c1", "content": "a cat"}


def test_reasoning_that_cannot_be_read_is_left_out():
    assert seen(
        [{"type": "reasoning", "summary": [], "encrypted_content": "xyz"}, {"role": "user", "content": "a"}]
    ) == [{"role": "user", "content": "a"}]
    summary = [{"type": "summary_text", "text": "looked"}]
    assert seen([{"type": "reasoning", "summary": summary}])[0]["reasoning"] == "looked"


@pytest.mark.parametrize(
    ("items", "field"),
    [
        ([5], "input[0]"),
        ([{"content": "x"}], "input[0].role"),
        ([{"role": "robot", "content": "x"}], "input[0].role"),
        ([{"role": "user", "content": [{"type": "input_text"}]}], "input[0].content[0].text"),
        ([{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}], "input[0].content[0].type"),
        ([{"role": "user", "content": [{"type": "input_file", "file_id": "x"}]}], "input[0].content[0].type"),
        ([{"role": "user", "content": "a"}, {"type": "web_search_call", "id": "w"}], "input[1].type"),
        ([{"type": "item_reference", "id": "msg_1"}], "input[0].type"),
        ([{"type": "function_call", "name": "f", "arguments": "{}"}], "input[0].call_id"),
        ([{**CALL, "arguments": {}}], "input[0].arguments"),
        ([{"type": "function_call_output", "call_id": "c", "output": 5}], "input[0].output"),
        ([{"type": 5}], "input[0].type"),
        ([{"type": ["message"], "role": "user", "content": "x"}], "input[0].type"),
        ([{"type": {"a": 1}}], "input[0].type"),
    ],
)
def test_wrong_items_are_named(items, field):
    with pytest.raises(RequestError) as caught:
        seen(items)
    assert caught.value.field == field
