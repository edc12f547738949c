"""POST /v1/messages and count_tokens over a scripted engine."""

from __future__ import annotations

import pytest

from octavo.server.options import ServerOptions

pytestmark = pytest.mark.anyio
MESSAGES, COUNT = "/v1/messages", "/v1/messages/count_tokens"
TOOL = {"name": "f", "input_schema": {}}
USER = [{"role": "user", "content": "What is the answer?"}]


async def test_an_answer_has_the_shape_that_clients_expect(serve, ask, tokenizer):
    server = await serve("It is Paris.")
    answer = await ask(server, {"model": "tiny-alias", "messages": USER})
    assert answer.pop("id").startswith("msg_")
    usage = answer.pop("usage")
    assert answer == {
        "type": "message",
        "role": "assistant",
        "model": "tiny-alias",
        "content": [{"type": "text", "text": "It is Paris.", "citations": None}],
        "stop_reason": "end_turn",
        "stop_sequence": None,
    }
    assert usage["input_tokens"] == len(tokenizer.encode_chat(USER))
    assert usage["output_tokens"] == len(tokenizer.encode("It is Paris.")) + 1  # EOS was generated too


async def test_case_X_anthropic_usage_is_never_zero_and_tells_the_cached_part_apart(serve, tokenizer):
    server = await serve("yes")
    body = {"max_tokens": 4, "messages": [{"role": "user", "content": "a long question " * 8}]}
    whole = len(tokenizer.encode_chat(body["messages"]))
    first = (await server.ask(MESSAGES, body))["usage"]
    assert (first["input_tokens"], first["cache_read_input_tokens"]) == (whole, 0)
    events = await server.events(MESSAGES, body)
    for usage in (events[0]["message"]["usage"], events[-2]["usage"]):
        assert usage["cache_read_input_tokens"] >= 16
        assert usage["input_tokens"] > 0
        assert usage["input_tokens"] + usage["cache_read_input_tokens"] == whole
    assert events[-2]["usage"]["output_tokens"] == first["output_tokens"] > 0


async def test_a_stop_sequence_is_named_and_left_out(serve, ask):
    server = await serve("one two three four")
    answer = await ask(server, {"messages": USER, "stop_sequences": ["zzz", " three"]})
    assert answer["content"][0]["text"] == "one two"
    assert (answer["stop_reason"], answer["stop_sequence"]) == ("stop_sequence", " three")


async def test_an_answer_that_is_cut_says_whether_by_its_limit_or_by_the_context(serve, ask, tokenizer):
    server = await serve([40] * 500, max_model_len=96)
    answer = await ask(server, {"messages": USER, "max_tokens": 5})
    assert (answer["stop_reason"], answer["usage"]["output_tokens"]) == ("max_tokens", 5)
    # Clients have to name some limit, and many name a large one.
    answer = await ask(server, {"messages": USER, "max_tokens": 32000})
    assert answer["stop_reason"] == "model_context_window_exceeded"
    assert answer["usage"]["output_tokens"] == 96 - len(tokenizer.encode_chat(USER))


async def test_an_assistants_last_turn_is_gone_on_from(serve, ask, tokenizer):
    server = await serve(" Paris.")
    prefill = [*USER, {"role": "assistant", "content": "It is"}]
    answer = await ask(server, {"messages": prefill})
    assert answer["content"][0]["text"] == " Paris."
    count = await server.ask(COUNT, {"messages": prefill})
    prompt = tokenizer.encode_chat(prefill, add_generation_prompt=False, continue_final_message=True)
    assert count == {"input_tokens": len(prompt)}


async def test_an_answer_of_white_space_is_still_told(serve, ask):
    server = await serve(" \n")
    assert (await ask(server, {"messages": USER}))["content"] == [{"type": "text", "text": " \n", "citations": None}]


async def test_an_answer_of_nothing_has_no_blocks(serve, ask):
    server = await serve([2])
    answer = await ask(server, {"messages": USER})
    assert (answer["content"], answer["stop_reason"]) == ([], "end_turn")


async def test_tokens_are_counted_without_generating(serve, tokenizer):
    server = await serve("yes")
    body = {"model": "tiny", "system": "Be brief.", "messages": USER, "thinking": {"type": "adaptive"}}
    messages = [{"role": "system", "content": "Be brief."}, *USER]
    assert await server.ask(COUNT, body) == {"input_tokens": len(tokenizer.encode_chat(messages))}
    assert server.engine.stats.running == 0
    assert server.executor.batches == []


async def test_fields_that_have_nothing_to_do_here_are_taken(serve, ask):
    server = await serve("yes")
    block = {"type": "text", "text": "x", "cache_control": {"type": "ephemeral"}}
    body = {
        "messages": [{"role": "user", "content": [block]}],
        "metadata": {"user_id": "u1"},
        "service_tier": "auto",
        "context_management": {"edits": []},
        "temperature": 0.5,
        "top_k": 5,
        "top_p": 0.9,
    }
    assert (await ask(server, body))["stop_reason"] == "end_turn"


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"max_tokens": None}, "max_tokens"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": "5"}, "max_tokens"),
        ({"messages": []}, "messages"),
        ({"messages": None}, "messages"),
        ({"messages": [5]}, "messages[0]"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user"}]}, "messages[0].content is required"),
        ({"messages": [{"role": "user", "content": []}]}, "messages"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0].text is required"),
        ({"messages": [{"role": "user", "content": [{"type": "hologram"}]}]}, "messages[0].content[0].type"),
        ({"messages": [{"role": "user", "content": [{"type": "tool_use"}]}]}, "messages[0].content[0].type"),
        ({"messages": [*USER, {"role": "assistant", "content": ""}]}, "messages[1].content"),
        ({"system": 5}, "system"),
        ({"system": [{"type": "image"}]}, "system[0].type"),
        ({"system": "x", "messages": [{"role": "system", "content": "y"}]}, "messages"),
        ({"temperature": -1}, "temperature"),
        ({"top_p": 2}, "top_p"),
        ({"stop_sequences": ["a", ""]}, "stop_sequences[1]"),
        ({"stop_sequences": "x"}, "stop_sequences"),
        ({"thinking": {"type": "enabled"}}, "thinking.budget_tokens is required"),
        ({"thinking": {"type": "enabled", "budget_tokens": 100}}, "thinking.budget_tokens"),
        ({"thinking": {"type": "enabled", "budget_tokens": 2048}}, "thinking.budget_tokens"),
        ({"thinking": {"type": "loud"}}, "thinking.type"),
        ({"tools": [{"name": "f"}]}, "tools[0].input_schema is required"),
        ({"tools": [{"name": "", "input_schema": {}}]}, "tools[0].name"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools[0].type"),
        ({"tool_choice": {"type": "any"}}, "tool_choice"),
        ({"tool_choice": {"type": "some"}}, "tool_choice.type"),
        ({"tools": [TOOL], "tool_choice": {"type": "tool", "name": "g"}}, "tool_choice.name"),
        ({"output_config": {"format": {"type": "xml", "schema": {}}}}, "output_config.format.type"),
        ({"mcp_servers": [{"url": "x"}]}, "mcp_servers"),
        ({"stream": 1}, "stream"),
    ],
)
async def test_wrong_bodies_are_refused_by_the_name_of_the_field(serve, refused, change, field):
    server = await serve()
    body = {"model": "tiny", "max_tokens": 9, "messages": USER} | change
    await refused(server, {name: value for name, value in body.items() if value is not None}, field)


@pytest.mark.parametrize(
    "block",
    [
        {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AA=="}},
        {"type": "tool_result", "tool_use_id": "t1", "content": [{"type": "image", "source": {}}]},
    ],
)
async def test_an_image_is_refused_with_what_the_model_takes(serve, refused, block):
    server = await serve()
    body = {"model": "tiny", "max_tokens": 9, "messages": [{"role": "user", "content": [block]}]}
    assert "takes no images" in await refused(server, body, "messages[0].content[0]")


async def test_an_unknown_model_is_not_found(serve, refused):
    server = await serve()
    body = {"model": "claude-9", "max_tokens": 9, "messages": USER}
    await refused(server, body, "claude-9", status=404, kind="not_found_error")


async def test_a_prompt_that_is_too_long_is_refused_before_the_stream_begins(serve, refused):
    server = await serve(max_model_len=64)
    body = {"max_tokens": 9, "messages": [{"role": "user", "content": "word " * 500}], "stream": True}
    await refused(server, body, "64")


async def test_a_large_body_a_lost_route_and_a_wrong_method_have_the_same_shape(serve, refused):
    server = await serve(options=ServerOptions(max_body_bytes=200))
    body = {"max_tokens": 9, "messages": [{"role": "user", "content": "x" * 300}]}
    await refused(server, body, "max-body-bytes", status=413, kind="request_too_large")
    await refused(server, {}, "batches", status=404, kind="not_found_error", path="/v1/messages/batches")
    response = await server.get(MESSAGES)
    assert (response.status_code, response.json()["error"]["type"]) == (405, "invalid_request_error")
    response = await server.get("/v1/messagesx")
    assert "code" in response.json()["error"], "other paths keep their shape"


async def test_either_header_opens_the_door(serve, refused):
    server = await serve("yes", options=ServerOptions(api_keys=("sesame",)))
    body = {"max_tokens": 4, "messages": USER}
    for headers in ({"x-api-key": "sesame"}, {"authorization": "Bearer sesame"}):
        assert (await server.send(MESSAGES, body, headers=headers)).status_code == 200
    for headers in ({}, {"x-api-key": "wrong"}, {"authorization": "Bearer wrong"}):
        await refused(server, body, "x-api-key", status=401, kind="authentication_error", headers=headers)


async def test_a_server_that_is_full_or_leaving_says_so(serve, refused):
    server = await serve("yes")
    server.service.draining = True
    response = await server.send(MESSAGES, {"max_tokens": 4, "messages": USER})
    assert (response.status_code, response.json()["error"]["type"]) == (503, "overloaded_error")
    server.service.draining = False


async def test_an_error_in_the_middle_is_an_error_event(serve):
    server = await serve([40] * 50, fail_at_step=3)
    events = await server.events(MESSAGES, {"max_tokens": 40, "messages": USER})
    assert events[0]["type"] == "message_start"
    assert events[-1]["type"] == "error"
    assert events[-1]["error"]["type"] in ("api_error", "overloaded_error")


async def test_half_a_surrogate_pair_is_refused(serve, refused):
    server = await serve()
    raw = '{"max_tokens": 4, "messages": [{"role": "user", "content": "\\ud83d"}]}'
    await refused(server, None, "messages[0].content", raw=raw)
