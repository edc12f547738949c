"""POST /v1/chat/completions."""

from __future__ import annotations

import pytest

from octavo.server.options import ServerOptions

pytestmark = pytest.mark.anyio
PATH = "/v1/chat/completions"
USER = [{"role": "user", "content": "What is the answer?"}]


async def test_answer_has_the_shape_that_clients_expect(serve, tokenizer):
    server = await serve("It is Paris.")
    answer = await server.both(PATH, {"model": "tiny-alias", "messages": USER})
    assert (answer["object"], answer["model"]) == ("chat.completion", "tiny-alias")
    assert answer["id"].startswith("chatcmpl-")
    assert answer["choices"] == [
        {
            "index": 0,
            "message": {"role": "assistant", "content": "It is Paris.", "refusal": None},
            "logprobs": None,
            "finish_reason": "stop",
            "stop_reason": None,
        }
    ]
    assert answer["usage"]["prompt_tokens"] == len(tokenizer.encode_chat(USER))


async def test_case_D5_a_stream_starts_with_the_role_and_ends_with_the_reason_alone(serve):
    server = await serve("It is Paris.")
    chunks = await server.stream(PATH, {"messages": USER})
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
    assert len({chunk["id"] for chunk in chunks}) == 1
    assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert chunks[0]["choices"][0]["finish_reason"] is None
    assert chunks[-1]["choices"][0]["delta"] == {}
    assert chunks[-1]["choices"][0]["finish_reason"] == "stop"


async def test_every_answer_of_n_has_its_own_role_and_reason(serve):
    server = await serve("yes")
    answer = await server.both(PATH, {"messages": USER, "n": 3})
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2]
    assert {choice["message"]["content"] for choice in answer["choices"]} == {"yes"}


async def test_case_C9_an_answer_may_take_all_the_room_that_is_left(serve, tokenizer):
    server = await serve([40] * 500, max_model_len=96)
    room = 96 - len(tokenizer.encode_chat(USER))
    answer = await server.ask(PATH, {"messages": USER})
    assert (answer["usage"]["completion_tokens"], answer["choices"][0]["finish_reason"]) == (room, "length")
    assert (await server.ask(PATH, {"messages": USER, "max_tokens": None}))["usage"]["completion_tokens"] == room
    answer = await server.ask(PATH, {"messages": USER, "max_tokens": 30, "max_completion_tokens": 3})
    assert answer["usage"]["completion_tokens"] == 3
    message = await server.refused(
        PATH, {"messages": USER, "max_completion_tokens": room + 1}, field="max_completion_tokens"
    )
    assert "96" in message
    await server.refused(PATH, {"messages": USER, "max_tokens": room + 1}, field="max_tokens")


async def test_the_models_own_limit_is_a_default_within_the_room(serve, tokenizer):
    server = await serve([40] * 500, default_sampling={"max_tokens": 5})
    assert (await server.ask(PATH, {"messages": USER}))["usage"]["completion_tokens"] == 5
    server = await serve([40] * 500, max_model_len=96, default_sampling={"max_tokens": 4096})
    room = 96 - len(tokenizer.encode_chat(USER))
    assert (await server.ask(PATH, {"messages": USER}))["usage"]["completion_tokens"] == room


@pytest.mark.parametrize("max_tokens", [0, -1])
@pytest.mark.parametrize("field", ["max_tokens", "max_completion_tokens"])
async def test_case_C7_an_answer_of_no_tokens_is_refused(serve, field, max_tokens):
    server = await serve()
    await server.refused(PATH, {"messages": USER, field: max_tokens}, field=field)


async def test_case_A7_logprobs_hold_the_true_bytes_of_each_token(serve, bytes_as_ids):
    server = await serve([*bytes_as_ids("“ď”".encode()), 2])
    answer = await server.both(PATH, {"messages": USER, "logprobs": True, "top_logprobs": 2})
    (choice,) = answer["choices"]
    entries = choice["logprobs"]["content"]
    assert bytes(byte for entry in entries[:-1] for byte in entry["bytes"]).decode() == "“ď”"
    assert choice["message"]["content"] == "“ď”"
    for entry in entries:
        assert len(entry["top_logprobs"]) == 2
        assert len({bytes(top["bytes"]) for top in entry["top_logprobs"]}) == 2
        assert all(top["bytes"] for top in entry["top_logprobs"])


async def test_case_B10_logprobs_alone_have_no_alternatives(serve):
    server = await serve("yes")
    (choice,) = (await server.both(PATH, {"messages": USER, "logprobs": True}))["choices"]
    assert choice["logprobs"]["content"]
    assert all(entry["top_logprobs"] == [] for entry in choice["logprobs"]["content"])


async def test_case_B11_too_many_top_logprobs_are_refused(serve):
    server = await serve()
    await server.refused(PATH, {"messages": USER, "logprobs": True, "top_logprobs": 1000000}, field="top_logprobs")
    await server.refused(PATH, {"messages": USER, "top_logprobs": 2}, field="top_logprobs")
    server = await serve(options=ServerOptions(max_logprobs=-1))
    await server.refused(PATH, {"messages": USER, "logprobs": True, "top_logprobs": 1000000}, field="top_logprobs")


async def test_case_E2_an_assistant_turn_may_have_tool_calls_and_no_content(serve):
    server = await serve("42 it is")
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}
    for assistant in ({"content": None}, {}):
        messages = [
            *USER,
            {"role": "assistant", "tool_calls": [call], **assistant},
            {"role": "tool", "tool_call_id": "c1", "content": "42"},
        ]
        assert (await server.both(PATH, {"messages": messages}))["choices"][0]["message"]["content"] == "42 it is"


async def test_case_E3_parts_of_text_are_as_good_as_text(serve, tokenizer):
    server = await serve("yes")
    as_text = [*USER, {"role": "assistant", "content": "Sure,"}]
    as_parts = [*USER, {"role": "assistant", "content": [{"type": "text", "text": "Sure,"}]}]
    answers = [
        await server.ask(
            PATH,
            {
                "messages": messages,
                "continue_final_message": True,
                "add_generation_prompt": False,
                "return_token_ids": True,
                "echo": True,
            },
        )
        for messages in (as_text, as_parts)
    ]
    assert answers[0]["prompt_token_ids"] == answers[1]["prompt_token_ids"]
    assert tokenizer.decode(answers[0]["prompt_token_ids"], skip_special_tokens=False).endswith("assistant\nSure,")
    assert [answer["choices"][0]["message"]["content"] for answer in answers] == ["Sure,yes"] * 2


async def test_case_E1_what_a_template_raises_is_the_clients_error(serve, tokenizer):
    options = ServerOptions(trust_request_chat_template=True)
    server = await serve(options=options)
    system = [{"role": "system", "content": "be kind"}, *USER]
    template = "{% if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}hi"
    message = await server.refused(PATH, {"messages": system, "chat_template": template}, field="messages")
    assert "System role not supported" in message
    folding = "{{ messages[0].content }}, {{ messages[1].content }}"  # into the user's turn, as Gemma 3 has it
    body = {"messages": system, "chat_template": folding, "return_token_ids": True}
    prompt = (await server.both(PATH, body))["prompt_token_ids"]
    assert tokenizer.decode(prompt) == "be kind, " + USER[0]["content"]
    server = await serve()
    await server.refused(PATH, {"messages": USER, "chat_template": "x"}, field="chat_template")


async def test_template_arguments_reach_the_template(serve):
    server = await serve("ok", options=ServerOptions(trust_request_chat_template=True))
    body = {"messages": USER, "chat_template": "{{ tone }}!", "chat_template_kwargs": {"tone": "warm"}}
    answer = await server.ask(PATH, body | {"return_token_ids": True})
    tokens = (await server.ask("/tokenize", {"prompt": "warm!"}))["tokens"]
    assert answer["prompt_token_ids"] == tokens


@pytest.mark.parametrize(
    ("messages", "field"),
    [
        ([], "messages"),
        ("hello", "messages"),
        (["hello"], "messages[0]"),
        ([{"content": "x"}], "messages[0].role"),
        ([{"role": 5, "content": "x"}], "messages[0].role"),
        ([{"role": "user", "content": 5}], "messages[0].content"),
        ([{"role": "user", "content": [5]}], "messages[0].content[0]"),
        ([{"role": "user", "content": [{"type": "text"}]}], "messages[0].content[0].text"),
        (
            [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}],
            "messages[0].content[0].type",
        ),
        ([{"role": "user"}], "messages"),
    ],
)
async def test_ill_formed_messages_are_refused_by_name(serve, messages, field):
    server = await serve()
    await server.refused(PATH, {"messages": messages}, field=field)


@pytest.mark.parametrize(
    ("extra", "field"),
    [
        ({"return_prompt_text": True}, "return_prompt_text"),
        ({"web_search_options": {"user_location": None}}, "web_search_options"),
        ({"functions": [{"name": "f"}]}, "functions"),
        ({"modalities": ["text", "audio"]}, "modalities"),
        ({"best_of": 4}, "best_of"),
    ],
)
async def test_features_to_come_are_refused_by_name(serve, extra, field):
    server = await serve()
    message = await server.refused(PATH, {"messages": USER} | extra, field=field)
    assert "not supported yet" in message


async def test_empty_forms_of_those_features_are_fine(serve):
    server = await serve("yes")
    extra = {"tools": [], "tool_choice": "none", "response_format": {"type": "text"}, "modalities": ["text"]}
    assert (await server.ask(PATH, {"messages": USER} | extra))["choices"][0]["message"]["content"] == "yes"
