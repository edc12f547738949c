"""Tools and reasoning in chats. `server.both` checks that a stream joins to the plain answer."""

from __future__ import annotations

import json

import pytest

from octavo.server.conversation import Conversation, Tool
from octavo.server.options import ServerOptions

pytestmark = pytest.mark.anyio
PATH = "/v1/chat/completions"
USER = [{"role": "user", "content": "How warm is it in Oslo?"}]
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather of a city.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
TABLES = {"type": "function", "function": {"name": "list_tables"}}
TOOLS = [WEATHER, TABLES]
NAMED = {"type": "function", "function": {"name": "weather"}}
OSLO = '{"city": "Oslo"}'
CALL = f'<tool_call>\n{{"name": "weather", "arguments": {OSLO}}}\n</tool_call>'
NO_ARGUMENTS = '<tool_call>\n{"name": "list_tables", "arguments": {}}\n</tool_call>'
HERMES = ServerOptions(tool_call_parser="hermes", reasoning_parser="none")
THINKING = ServerOptions(tool_call_parser="hermes", reasoning_parser="qwen3")


@pytest.fixture
def trusting(monkeypatch):
    """The scripted model keeps to every form by itself: the engine is not asked to hold it."""
    monkeypatch.setattr("octavo.server.answer_reader.enforce", lambda params, *_, **__: params)


async def test_a_call_comes_in_the_shape_that_clients_expect(serve):
    server = await serve("Let me see. " + CALL, options=HERMES)
    (choice,) = (await server.both(PATH, {"messages": USER, "tools": TOOLS}))["choices"]
    (call,) = choice["message"]["tool_calls"]
    assert call["type"] == "function"
    assert call["id"]
    assert call["function"] == {"name": "weather", "arguments": OSLO}
    assert choice["message"]["content"].strip() == "Let me see."
    assert choice["finish_reason"] == "tool_calls"


async def test_a_call_alone_leaves_the_content_null(serve):
    server = await serve(CALL, options=HERMES)
    (choice,) = (await server.both(PATH, {"messages": USER, "tools": TOOLS}))["choices"]
    assert choice["message"]["content"] is None


@pytest.mark.parametrize("width", [1, 2, 3, 7, 50])
async def test_case_D3_arguments_are_whole_however_many_tokens_a_step_gives(serve, width):
    server = await serve(CALL + "\n" + CALL, options=HERMES, width=width)
    (choice,) = (await server.both(PATH, {"messages": USER, "tools": TOOLS}))["choices"]
    assert [json.loads(call["function"]["arguments"]) for call in choice["message"]["tool_calls"]] == [
        {"city": "Oslo"}
    ] * 2
    assert len({call["id"] for call in choice["message"]["tool_calls"]}) == 2


async def test_case_D4_a_call_without_arguments_streams_an_empty_object(serve):
    server = await serve(NO_ARGUMENTS, options=HERMES)
    (choice,) = (await server.both(PATH, {"messages": USER, "tools": TOOLS}))["choices"]
    assert choice["message"]["tool_calls"][0]["function"] == {"name": "list_tables", "arguments": "{}"}


@pytest.mark.parametrize(
    ("choice", "text", "reason"),
    [
        ("auto", CALL, "tool_calls"),
        (None, CALL, "tool_calls"),
        ("auto", "It is warm.", "stop"),
        ("required", CALL, "tool_calls"),
        (NAMED, CALL, "stop"),
        ("none", "It is warm.", "stop"),
    ],
)
async def test_case_D2_the_finish_reason_says_who_asked_for_the_call(serve, trusting, choice, text, reason):
    server = await serve(text, options=HERMES)
    body = {"messages": USER, "tools": TOOLS, "tool_choice": choice}
    (answer,) = (await server.both(PATH, body))["choices"]
    assert answer["finish_reason"] == reason
    assert bool(answer["message"].get("tool_calls")) == (text == CALL)


async def test_case_D2_a_call_that_is_cut_ends_with_length(serve):
    server = await serve(CALL, options=HERMES)
    (choice,) = (await server.both(PATH, {"messages": USER, "tools": TOOLS, "max_tokens": 20}))["choices"]
    assert choice["finish_reason"] == "length"


async def test_case_D1_the_usage_comes_once_at_the_end_summed_over_all_answers(serve):
    server = await serve(CALL, options=HERMES)
    body = {"messages": USER, "tools": TOOLS, "n": 2}
    plain = await server.ask(PATH, body)
    chunks = await server.stream(PATH, body | {"stream_options": {"include_usage": True}})
    *others, last = chunks
    assert last["choices"] == []
    assert last["usage"] == plain["usage"] | {"prompt_tokens_details": last["usage"]["prompt_tokens_details"]}
    assert all(chunk["usage"] is None for chunk in others)
    assert last["usage"]["completion_tokens"] % 2 == 0


async def test_without_tools_what_looks_like_a_call_is_text(serve):
    server = await serve(CALL, options=HERMES)
    for body in ({}, {"tools": TOOLS, "tool_choice": "none"}, {"tools": []}):
        (choice,) = (await server.both(PATH, {"messages": USER} | body))["choices"]
        assert choice["message"]["content"] == CALL
        assert choice["finish_reason"] == "stop"


async def test_one_call_at_most_where_calls_may_not_be_parallel(serve):
    server = await serve(CALL + "\n" + NO_ARGUMENTS, options=HERMES)
    body = {"messages": USER, "tools": TOOLS, "parallel_tool_calls": False}
    (choice,) = (await server.both(PATH, body))["choices"]
    assert [call["function"]["name"] for call in choice["message"]["tool_calls"]] == ["weather"]


async def test_reasoning_comes_under_both_of_its_names(serve):
    server = await serve("<think>Oslo is north.</think>It is cold.", options=THINKING)
    answer = await server.both(PATH, {"messages": USER})
    message = answer["choices"][0]["message"]
    assert message["reasoning"] == message["reasoning_content"] == "Oslo is north."
    assert message["content"] == "It is cold."
    details = answer["usage"]["completion_tokens_details"]
    assert 0 < details["reasoning_tokens"] < answer["usage"]["completion_tokens"]


async def test_reasoning_is_left_out_on_request_but_counted(serve):
    server = await serve("<think>Oslo is north.</think>It is cold.", options=THINKING)
    answer = await server.both(PATH, {"messages": USER, "include_reasoning": False})
    assert "reasoning" not in answer["choices"][0]["message"]
    assert answer["choices"][0]["message"]["content"] == "It is cold."
    assert answer["usage"]["completion_tokens_details"]["reasoning_tokens"] > 0


async def test_case_D9_reasoning_that_is_cut_is_reasoning_and_the_content_null(serve):
    server = await serve("<think>Oslo is far in the north of the world.</think>Cold.", options=THINKING)
    (choice,) = (await server.both(PATH, {"messages": USER, "max_tokens": 14}))["choices"]
    assert choice["finish_reason"] == "length"
    assert choice["message"]["content"] is None
    assert choice["message"]["reasoning"].startswith("O")


async def test_case_D10_reasoning_that_the_prompt_has_opened_is_reasoning(serve):
    options = ServerOptions(reasoning_parser="qwen3", trust_request_chat_template=True)
    server = await serve("a</think>b", options=options)
    body = {"messages": USER, "chat_template": "<|im_start|>assistant\n<think>\n"}
    (choice,) = (await server.both(PATH, body))["choices"]
    assert (choice["message"]["reasoning"], choice["message"]["content"]) == ("a", "b")


async def test_a_call_behind_reasoning_is_a_call(serve):
    server = await serve(f"<think>I must look.</think>\n\n{CALL}", options=THINKING)
    (choice,) = (await server.both(PATH, {"messages": USER, "tools": TOOLS}))["choices"]
    assert choice["message"]["reasoning"] == "I must look."
    assert choice["message"]["tool_calls"][0]["function"]["name"] == "weather"
    assert choice["finish_reason"] == "tool_calls"


async def test_logprobs_and_ids_of_parsed_text_lose_no_token(serve):
    server = await serve(f"<think>Hm.</think>{CALL}", options=THINKING)
    body = {"messages": USER, "tools": TOOLS, "logprobs": True, "return_token_ids": True}
    answer = await server.both(PATH, body)
    (choice,) = answer["choices"]
    assert len(choice["token_ids"]) == answer["usage"]["completion_tokens"] == len(choice["logprobs"]["content"])


async def test_a_request_without_a_parser_keeps_special_tokens_out_of_its_text(serve, tokenizer):
    im_end = tokenizer.encode("<|im_end|>", add_special_tokens=False)
    script = [*tokenizer.encode("a"), *im_end, *tokenizer.encode("b"), 2]
    for options in (HERMES, THINKING):
        server = await serve(script, options=options)
        for skip, text in ((None, "ab"), (True, "ab"), (False, "a<|im_end|>b")):
            body = {"messages": USER, "tools": TOOLS, "skip_special_tokens": skip, "ignore_eos": True, "max_tokens": 3}
            (choice,) = (await server.both(PATH, body))["choices"]
            assert choice["message"]["content"] == text


async def test_tools_are_shown_to_the_template_and_none_hides_them(serve):
    options = ServerOptions(trust_request_chat_template=True)
    server = await serve("ok", options=options)
    template = "{% for tool in tools or [] %}{{ tool.function.name }},{% endfor %}{{ reasoning_effort }}!"
    body = {"messages": USER, "tools": TOOLS, "chat_template": template, "reasoning_effort": "low"}
    for choice, text in (("auto", "weather,list_tables,low!"), ("none", "low!")):
        answer = await server.ask(PATH, body | {"tool_choice": choice, "return_token_ids": True})
        assert answer["prompt_token_ids"] == (await server.ask("/tokenize", {"prompt": text}))["tokens"]


@pytest.mark.parametrize(
    ("extra", "field"),
    [
        ({"tools": "weather"}, "tools"),
        ({"tools": ["weather"]}, "tools[0]"),
        ({"tools": [{}]}, "tools[0].function"),
        ({"tools": [{"type": "retrieval", "function": {"name": "f"}}]}, "tools[0].type"),
        ({"tools": [{"function": {}}]}, "tools[0].function.name"),
        ({"tools": [{"function": {"name": ""}}]}, "tools[0].function.name"),
        ({"tools": [{"function": {"name": "a b"}}]}, "tools[0].function.name"),
        ({"tools": [{"function": {"name": 5}}]}, "tools[0].function.name"),
        ({"tools": [{"function": {"name": "f", "description": 5}}]}, "tools[0].function.description"),
        ({"tools": [{"function": {"name": "f", "strict": "yes"}}]}, "tools[0].function.strict"),
        ({"tools": [{"function": {"name": "f", "parameters": []}}]}, "tools[0].function.parameters"),
        (
            {"tools": [{"function": {"name": "f", "parameters": {"type": "array"}}}]},
            "tools[0].function.parameters.type",
        ),
        (
            {"tools": [{"function": {"name": "f", "parameters": {"properties": []}}}]},
            "tools[0].function.parameters.properties",
        ),
        (
            {"tools": [{"function": {"name": "f", "parameters": {"properties": {"foo": "bar"}}}}]},
            "tools[0].function.parameters.properties.foo",
        ),
        (
            {"tools": [{"function": {"name": "f", "parameters": {"required": [5]}}}]},
            "tools[0].function.parameters.required",
        ),
        ({"tools": [TABLES, TABLES]}, "tools[1].function.name"),
        ({"tools": TOOLS, "tool_choice": "always"}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": 5}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": {"type": "function"}}, "tool_choice.function"),
        ({"tools": TOOLS, "tool_choice": {"type": "custom", "function": {"name": "weather"}}}, "tool_choice.type"),
        ({"tools": TOOLS, "tool_choice": {"function": {"name": "other"}}}, "tool_choice.function.name"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": TOOLS, "parallel_tool_calls": "no"}, "parallel_tool_calls"),
        ({"reasoning_effort": "extreme"}, "reasoning_effort"),
        ({"reasoning_effort": 5}, "reasoning_effort"),
        ({"include_reasoning": 1}, "include_reasoning"),
        ({"documents": ["text"]}, "documents[0]"),
    ],
)
async def test_wrong_tools_and_choices_are_refused_by_name(serve, extra, field):
    server = await serve()
    await server.refused(PATH, {"messages": USER} | extra, field=field)


@pytest.mark.parametrize(
    ("message", "field"),
    [
        ({"tool_calls": {}}, "messages[1].tool_calls"),
        ({"tool_calls": ["f"]}, "messages[1].tool_calls[0]"),
        ({"tool_calls": [{"id": 5, "function": {"name": "f"}}]}, "messages[1].tool_calls[0].id"),
        ({"tool_calls": [{"type": "x", "function": {"name": "f"}}]}, "messages[1].tool_calls[0].type"),
        ({"tool_calls": [{"function": {"name": ""}}]}, "messages[1].tool_calls[0].function.name"),
        ({"tool_calls": [{"function": {"name": "f", "arguments": 5}}]}, "messages[1].tool_calls[0].function.arguments"),
        ({"reasoning": 5, "content": "x"}, "messages[1].reasoning"),
        ({"reasoning_content": [], "content": "x"}, "messages[1].reasoning_content"),
        ({"name": 5, "content": "x"}, "messages[1].name"),
    ],
)
async def test_wrong_calls_of_the_past_are_refused_by_name(serve, message, field):
    server = await serve()
    await server.refused(PATH, {"messages": [*USER, {"role": "assistant"} | message, *USER]}, field=field)


async def test_reasoning_of_the_past_reaches_the_template_under_either_name(serve):
    server = await serve("ok", options=ServerOptions(trust_request_chat_template=True))
    template = "{% for m in messages %}{{ m.reasoning_content }}{{ m.reasoning }}{% endfor %}"
    wanted = (await server.ask("/tokenize", {"prompt": "hmhm"}))["tokens"]
    for name in ("reasoning", "reasoning_content"):
        messages = [*USER, {"role": "assistant", "content": "x", name: "hm"}, *USER]
        body = {"messages": messages, "chat_template": template, "return_token_ids": True}
        assert (await server.ask(PATH, body))["prompt_token_ids"] == wanted


async def test_no_parser_means_that_calls_are_text_and_cannot_be_required(serve):
    server = await serve(CALL, options=ServerOptions(tool_call_parser="none"))
    (choice,) = (await server.both(PATH, {"messages": USER, "tools": TOOLS}))["choices"]
    assert choice["message"]["content"] == CALL
    message = await server.refused(
        PATH, {"messages": USER, "tools": TOOLS, "tool_choice": "required"}, field="tool_choice"
    )
    assert "--tool-call-parser" in message


def test_a_choice_of_none_offers_no_tools():
    tool = Tool(name="f")
    some = Conversation(messages=USER, params=None, tools=(tool,), request_id="x")  # type: ignore[arg-type]
    none = Conversation(messages=USER, params=None, tools=(tool,), tool_choice="none", request_id="x")  # type: ignore[arg-type]
    assert (some.offered_tools, none.offered_tools) == ((tool,), ())
