"""What a model sees of the turns of a Messages body."""

from __future__ import annotations

import json

import pytest

from octavo.errors import RequestError
from octavo.server.anthropic.protocol import CountTokensBody
from octavo.server.anthropic.turns import to_messages

CALL = {"type": "tool_use", "id": "t1", "name": "look", "input": {"at": "über", "n": 1}}


def seen(*turns, system=None):
    return to_messages(CountTokensBody(messages=list(turns), system=system))


def user(*blocks):
    return {"role": "user", "content": list(blocks)}


def text(said):
    return {"type": "text", "text": said}


def test_system_text_comes_first_and_its_blocks_stay_apart():
    assert seen(user(text("hi")), system="Be brief.")[0] == {"role": "system", "content": "Be brief."}
    assert seen(user(text("hi")), system=[text("a"), text("b")])[0]["content"] == [text("a"), text("b")]


def test_claude_codes_billing_text_does_not_spoil_the_prefix_cache():
    header = text("x-anthropic-billing-header: cc_version=1; cch=4711;")
    assert seen(user(text("hi")), system=[header, text("a")])[0]["content"] == "a"
    assert seen(user(text("hi")), system=[header])[0]["role"] == "user"


def test_a_call_its_thinking_and_its_result_are_told_as_templates_know_them():
    messages = seen(
        {"role": "user", "content": "what is there?"},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "I must look", "signature": "s"},
                {"type": "redacted_thinking", "data": "xyz"},
                text("Let me look."),
                CALL,
            ],
        },
        user({"type": "tool_result", "tool_use_id": "t1", "content": "a cat"}, text("and then?")),
    )
    assert messages[1] == {
        "role": "assistant",
        "content": "Let me look.",
        "reasoning": "I must look",
        "tool_calls": [
            {"id": "t1", "type": "function", "function": {"name": "look", "arguments": '{"at": "über", "n": 1}'}}
        ],
    }
    assert messages[2] == {"role": "tool", "tool_call_id": "t1", "content": "a cat"}
    assert messages[3] == {"role": "user", "content": "and then?"}


@pytest.mark.parametrize(
    ("result", "shown"),
    [
        ({"content": "done"}, "done"),
        ({"content": [text("a"), text("b")]}, "a\nb"),
        ({"content": [{"type": "tool_reference", "tool_name": "look"}]}, "look"),
        ({}, ""),
        ({"content": None}, ""),
        ({"content": "no such file", "is_error": True}, "Error: no such file"),
        ({"content": "ERROR 5", "is_error": True}, "ERROR 5"),
        ({"is_error": True}, "Error: "),
    ],
)
def test_results_of_tools(result, shown):
    turns = [
        {"role": "assistant", "content": [CALL]},
        user({"type": "tool_result", "tool_use_id": "t1", **result}),
    ]
    assert seen({"role": "user", "content": "go"}, *turns)[-1]["content"] == shown


def test_turns_of_one_role_in_a_row_become_one_message():
    messages = seen({"role": "user", "content": "a"}, user(text("b"), text("c")))
    assert messages == [{"role": "user", "content": [text("a"), text("b"), text("c")]}]


def test_a_turn_with_calls_only_has_no_content():
    messages = seen(
        {"role": "user", "content": "go"},
        {"role": "assistant", "content": [CALL]},
        user({"type": "tool_result", "tool_use_id": "t1"}),
    )
    assert messages[1]["content"] is None
    assert json.loads(messages[1]["tool_calls"][0]["function"]["arguments"]) == CALL["input"]


def test_system_messages_may_stand_between_turns():
    messages = seen({"role": "user", "content": "a"}, {"role": "system", "content": [text("now in French")]})
    assert messages[1] == {"role": "system", "content": "now in French"}


def test_a_call_without_a_result_cannot_be_gone_on_from():
    with pytest.raises(RequestError, match=r"messages\[1\].content ends with a tool_use"):
        seen({"role": "user", "content": "go"}, {"role": "assistant", "content": [CALL]})
