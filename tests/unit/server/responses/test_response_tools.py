"""Tools, reasoning and forms of the Responses API, with a model that writes them as Hermes and Qwen do."""

from __future__ import annotations

import pytest

from octavo.server.options import ServerOptions

pytestmark = pytest.mark.anyio
PATH = "/v1/responses"
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
WEATHER = {"type": "function", "name": "weather", "parameters": SCHEMA, "strict": None, "description": "Of a city."}
TIME = {"type": "function", "name": "time", "parameters": None, "strict": None}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>'
HERMES = ServerOptions(tool_call_parser="hermes", reasoning_parser="none")
THINKING = ServerOptions(tool_call_parser="hermes", reasoning_parser="qwen3")


async def test_a_call_and_its_reasoning_are_items_that_go_back_as_they_came(serve):
    server = await serve("<think>\nLet me think.\n</think>\n\n" + CALL, options=THINKING)
    body = {"input": "How warm is it?", "tools": [WEATHER], "max_output_tokens": 100}
    answer = await server.ask(PATH, body)
    reasoning, call = answer["output"]
    assert reasoning["content"][0]["text"].strip() == "Let me think."
    assert (call["type"], call["name"], call["arguments"]) == ("function_call", "weather", '{"city": "Oslo"}')
    assert answer["status"] == "completed"
    assert 0 < answer["usage"]["output_tokens_details"]["reasoning_tokens"] < answer["usage"]["output_tokens"]
    streamed = (await server.events(PATH, body))[-1]["response"]["output"]
    assert [item["type"] for item in streamed] == ["reasoning", "function_call"]
    result = {"type": "function_call_output", "call_id": call["call_id"], "output": "5 degrees"}
    said = {"role": "user", "content": "How warm is it?"}
    by_hand = await server.ask(f"{PATH}/input_tokens", body | {"input": [said, *answer["output"], result]})
    stored = body | {"input": [result], "previous_response_id": answer["id"]}
    assert await server.ask(f"{PATH}/input_tokens", stored) == by_hand
    assert (await server.ask(PATH, stored | {"max_output_tokens": 4}))["status"] == "incomplete"


async def test_white_space_around_reasoning_and_calls_is_no_item(serve):
    server = await serve("<think>\nhm\n</think>\n\n" + CALL + "\n", options=THINKING)
    answer = await server.ask(PATH, {"input": "x", "tools": [WEATHER], "max_output_tokens": 100})
    assert [item["type"] for item in answer["output"]] == ["reasoning", "function_call"]


async def test_reasoning_can_be_switched_off(serve):
    server = await serve("It is cold.", options=THINKING)
    answer = await server.ask(PATH, {"input": "x", "reasoning": {"effort": "none", "summary": "auto"}})
    assert [item["type"] for item in answer["output"]] == ["message"]
    assert answer["reasoning"] == {"effort": "none", "summary": "auto"}


async def test_only_allowed_tools_are_offered(serve):
    server = await serve(CALL, options=HERMES)
    tools = {"input": "x", "tools": [WEATHER, TIME]}
    choice = {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "weather"}]}
    answer = await server.ask(PATH, tools | {"tool_choice": choice})
    assert (answer["tool_choice"], answer["tools"]) == (choice, [WEATHER, TIME])
    count = f"{PATH}/input_tokens"
    allowed = await server.ask(count, tools | {"tool_choice": choice})
    assert allowed == await server.ask(count, {"input": "x", "tools": [WEATHER]})


@pytest.mark.parametrize(
    ("form", "kind"),
    [
        ({"text": {"format": {"type": "json_schema", "name": "n", "schema": SCHEMA, "strict": True}}}, "json"),
        ({"text": {"format": {"type": "json_object"}}}, "json_object"),
        ({"structured_outputs": {"choice": ["a", "b"]}}, "choice"),
    ],
)
async def test_a_form_is_asked_of_the_engine(serve, monkeypatch, form, kind):
    server = await serve("{}")
    seen = []
    generate = server.service.generate
    monkeypatch.setattr(server.service, "generate", lambda p, params, **how: seen.append(params) or generate(p, params))
    await server.send(PATH, {"input": "x", **form})
    assert [params.structured_outputs.kind for params in seen] == [kind]
