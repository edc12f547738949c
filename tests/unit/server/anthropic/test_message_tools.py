"""Tools and thinking of the Messages API, with a model that writes them as Hermes and Qwen do."""

from __future__ import annotations

import pytest

from octavo.server.options import ServerOptions

pytestmark = pytest.mark.anyio
MESSAGES, COUNT = "/v1/messages", "/v1/messages/count_tokens"
USER = [{"role": "user", "content": "How warm is it in Oslo?"}]
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
WEATHER = {"name": "weather", "description": "The weather of a city.", "input_schema": SCHEMA}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>'
HERMES = ServerOptions(tool_call_parser="hermes", reasoning_parser="none")
THINKING = ServerOptions(tool_call_parser="hermes", reasoning_parser="qwen3")


@pytest.fixture
def trusting(monkeypatch):
    """The scripted model keeps to every form by itself: the engine is not asked to hold it."""
    monkeypatch.setattr("octavo.server.answer_reader.enforce", lambda params, *_, **__: params)


async def test_case_X_anthropic_stop_reason_is_tool_use_after_a_call(serve, ask):
    server = await serve("Let me see. " + CALL, options=HERMES)
    answer = await ask(server, {"messages": USER, "tools": [WEATHER]})
    text, call = answer["content"]
    assert text["text"].strip() == "Let me see."
    assert call.pop("id")
    assert call == {"type": "tool_use", "name": "weather", "input": {"city": "Oslo"}}
    assert (answer["stop_reason"], answer["stop_sequence"]) == ("tool_use", None)
    assert answer["usage"]["output_tokens"] > 0


@pytest.mark.parametrize("choice", [{"type": "any"}, {"type": "tool", "name": "weather"}])
async def test_a_call_that_was_asked_for_ends_with_tool_use_too(serve, ask, trusting, choice):
    server = await serve(CALL, options=HERMES)
    answer = await ask(server, {"messages": USER, "tools": [WEATHER], "tool_choice": choice})
    assert [block["type"] for block in answer["content"]] == ["tool_use"]
    assert answer["stop_reason"] == "tool_use"


async def test_parallel_calls_can_be_switched_off(serve, ask):
    server = await serve(f"{CALL}\n{CALL}", options=HERMES)
    body = {"messages": USER, "tools": [WEATHER], "max_tokens": 200}
    assert [block["type"] for block in (await ask(server, body))["content"]] == ["tool_use", "tool_use"]
    one = {"tool_choice": {"type": "auto", "disable_parallel_tool_use": True}}
    assert [block["type"] for block in (await ask(server, body | one))["content"]] == ["tool_use"]


async def test_without_tools_a_call_is_text(serve, ask):
    server = await serve(CALL, options=HERMES)
    for extra in ({}, {"tools": [WEATHER], "tool_choice": {"type": "none"}}):
        answer = await ask(server, {"messages": USER, **extra})
        assert (answer["content"][0]["text"], answer["stop_reason"]) == (CALL, "end_turn")


async def test_thinking_is_shown_only_if_asked_for(serve, ask):
    server = await serve("<think>\nLet me think.\n</think>\n\nIt is cold.", options=THINKING)
    answer = await ask(server, {"messages": USER, "thinking": {"type": "adaptive"}})
    thinking, text = answer["content"]
    assert (thinking["type"], thinking["thinking"].strip()) == ("thinking", "Let me think.")
    assert thinking["signature"]
    assert text["text"] == "It is cold."
    assert 0 < answer["usage"]["output_tokens_details"]["thinking_tokens"] < answer["usage"]["output_tokens"]
    omitted = await ask(server, {"messages": USER, "thinking": {"type": "adaptive", "display": "omitted"}})
    assert [block["type"] for block in omitted["content"]] == ["text"]
    assert omitted["usage"]["output_tokens"] == answer["usage"]["output_tokens"]


async def test_an_answer_can_be_sent_back_as_it_came(serve, ask):
    server = await serve("<think>\nLet me think.\n</think>\n\n" + CALL, options=THINKING)
    body = {"messages": USER, "tools": [WEATHER], "thinking": {"type": "adaptive"}}
    answer = await ask(server, body)
    assert [block["type"] for block in answer["content"]] == ["thinking", "tool_use"]
    result = {"type": "tool_result", "tool_use_id": answer["content"][1]["id"], "content": "5 degrees"}
    turns = [*USER, {"role": "assistant", "content": answer["content"]}, {"role": "user", "content": [result]}]
    assert (await server.ask(MESSAGES, body | {"messages": turns, "max_tokens": 8}))["usage"]["output_tokens"] == 8


async def test_a_form_is_asked_of_the_engine(serve, monkeypatch):
    server = await serve("{}")
    seen = []
    generate = server.service.generate
    monkeypatch.setattr(server.service, "generate", lambda p, params, **how: seen.append(params) or generate(p, params))
    form = {"type": "json_schema", "schema": SCHEMA}
    for extra in ({"output_config": {"format": form}}, {"output_format": form}):
        await server.send(MESSAGES, {"max_tokens": 9, "messages": USER, **extra})
    assert [params.structured_outputs.kind for params in seen] == ["json", "json"]


async def test_a_schema_that_is_none_is_refused_by_its_field(serve, refused):
    server = await serve()
    schema = {"type": "object", "properties": {"foo": "bar"}}
    tool = {"name": "f", "input_schema": schema}
    body = {"model": "tiny", "max_tokens": 9, "messages": USER}
    await refused(server, body | {"tools": [tool]}, "tools[0].input_schema.properties.foo")
    await refused(server, body | {"tools": [WEATHER, WEATHER]}, "tools[1].name")
    await refused(server, body | {"tools": [{"name": "a b", "input_schema": {}}]}, "tools[0].name")
    await refused(server, body | {"output_config": {"effort": "extreme"}}, "output_config.effort")


async def test_thinking_that_no_switch_turns_off_is_no_text(serve, ask, monkeypatch):
    server = await serve("Let me think.\n</think>\n\nIt is cold.", options=THINKING)
    render = server.service.tokenizer.render_chat
    monkeypatch.setattr(
        server.service.tokenizer, "render_chat", lambda *args, **how: render(*args, **how) + "<think>\n"
    )
    answer = await ask(server, {"messages": USER})
    assert [(block["type"], block["text"]) for block in answer["content"]] == [("text", "It is cold.")]
