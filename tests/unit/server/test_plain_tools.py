"""Tools for a model whose chat template knows none."""

from __future__ import annotations

import json

import pytest

from octavo.server.options import ServerOptions
from octavo.server.plain_tools import in_words, shows_tools

pytestmark = pytest.mark.anyio
PATH = "/v1/chat/completions"
USER = [{"role": "user", "content": "How warm is it in Oslo?"}]
WEATHER = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}
CALLED = {
    "role": "assistant",
    "content": None,
    "tool_calls": [{"id": "c1", "function": {"name": "weather", "arguments": '{"city": "Oslo"}'}}],
}
RESULT = {"role": "tool", "tool_call_id": "c1", "content": "7 degrees"}


async def prompt_of(server, body):
    answer = await server.ask(PATH, body | {"return_token_ids": True, "max_tokens": 1})
    return server.service.tokenizer.decode(answer["prompt_token_ids"], skip_special_tokens=False)


async def test_a_model_without_a_format_is_told_of_tools_and_calls_in_json(serve):
    server = await serve('{"name": "weather", "arguments": {"city": "Oslo"}}', max_model_len=512)
    body = {"messages": USER, "tools": [WEATHER]}
    (choice,) = (await server.both(PATH, body))["choices"]
    assert choice["message"]["tool_calls"][0]["function"] == {"name": "weather", "arguments": '{"city": "Oslo"}'}
    assert choice["finish_reason"] == "tool_calls"
    prompt = await prompt_of(server, body)
    assert '"name": "weather"' in prompt
    assert prompt.index("call functions") < prompt.index("Oslo")
    assert '"weather"' not in await prompt_of(server, body | {"tool_choice": "none"})


async def test_a_template_that_shows_tools_is_not_overruled(serve):
    server = await serve("ok", options=ServerOptions(trust_request_chat_template=True))
    body = {"messages": USER, "tools": [WEATHER], "chat_template": "{{ tools | length }} {{ messages[0].content }}"}
    assert await prompt_of(server, body) == "1 " + USER[0]["content"]


async def test_a_format_that_the_operator_names_is_not_overruled(serve):
    server = await serve("ok", options=ServerOptions(tool_call_parser="hermes"))
    assert "weather" not in await prompt_of(server, {"messages": USER, "tools": [WEATHER]})


def test_past_calls_and_results_become_text_and_roles_still_alternate():
    told = in_words(
        [*USER, CALLED, RESULT, RESULT, {"role": "user", "content": [{"type": "text", "text": "And?"}]}], []
    )
    assert [message["role"] for message in told] == ["user", "assistant", "user"]
    assert json.loads(told[1]["content"]) == [{"name": "weather", "arguments": {"city": "Oslo"}}]
    assert "tool_calls" not in told[1]
    assert told[2]["content"] == [
        "weather returned:\n\n7 degrees\n\nweather returned:\n\n7 degrees",
        {"type": "text", "text": "And?"},
    ]


def test_tools_stand_in_the_system_message_if_there_is_one():
    system = {"role": "system", "content": "Be brief."}
    told = in_words([system, *USER], [WEATHER])
    assert told[0]["content"].startswith("Be brief.\n\n")
    assert "weather" in told[0]["content"]
    assert told[1] == USER[0]
    assert system["content"] == "Be brief."  # what the client sent is left as it is


def test_only_the_word_itself_counts():
    assert shows_tools("{% for tool in tools %}")
    assert not shows_tools("{{ messages }} tool_calls toolset")
