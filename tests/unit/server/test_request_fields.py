"""Every field that vLLM's completions and chats have is taken, or refused by name: none is ignored that matters."""

from __future__ import annotations

import pytest

from octavo.outputs import CompletionOutput, RequestOutput
from octavo.server.options import ServerOptions
from octavo.server.stream_interval import spaced

pytestmark = pytest.mark.anyio
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
USER = {"messages": [{"role": "user", "content": "hi"}]}
BODIES = {COMPLETIONS: {"prompt": "x y z"}, CHAT: USER}

TAKEN = {
    "frequency_penalty": 0.5,
    "presence_penalty": 0.5,
    "logit_bias": {"5": 1.0},
    "n": 2,
    "seed": 7,
    "stop": ["a", "b", "c", "d", "e", "f"],
    "temperature": 0.0,
    "top_p": 0.9,
    "top_k": 5,
    "min_p": 0.1,
    "repetition_penalty": 1.1,
    "stop_token_ids": [5],
    "include_stop_str_in_output": True,
    "ignore_eos": True,
    "min_tokens": 1,
    "skip_special_tokens": False,
    "spaces_between_special_tokens": False,
    "truncate_prompt_tokens": 2,
    "truncation_side": "right",
    "allowed_token_ids": [20, 21],
    "bad_words": ["x"],
    "prompt_logprobs": 1,
    "logprob_token_ids": [5, 6],
    "repetition_detection": {"max_pattern_size": 4, "min_pattern_size": 1, "min_count": 2},
    "stream_interval": 4,
    "add_special_tokens": True,
    "response_format": {"type": "text"},
    "priority": 0,
    "request_id": "mine",
    "session_id": "s",
    "return_tokens_as_token_ids": True,
    "return_token_ids": True,
    "cache_salt": "salt",
    "best_of": None,
    "user": "me",
    "metadata": {"a": "b"},
    "store": True,
    "service_tier": "auto",
    "safety_identifier": "s",
    "prompt_cache_key": "k",
    "vllm_xargs": {},
    "length_penalty": 1.0,
}
REFUSED = {
    "kv_transfer_params": {"x": 1},
    "ec_transfer_params": {"x": 1},
    "mm_processor_kwargs": {"x": 1},
    "best_of": 5,
    "stream_interval": 0,
    "truncate_prompt_tokens": -2,
    "truncation_side": "middle",
    "logprob_token_ids": [99999],
    "repetition_detection": {"max_pattern_size": -1},
    "thinking_token_budget": -2,
    "spaces_between_special_tokens": "yes",
    "cache_salt": "",
    "vllm_xargs": {"no_such_processor": 1},
}


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize("name", TAKEN)
async def test_the_field_is_taken(serve, path, name, caplog):
    server = await serve("a short answer")
    with caplog.at_level("WARNING", logger="octavo.server"):
        await server.ask(path, BODIES[path] | {name: TAKEN[name]})
    assert not [record for record in caplog.records if "ignored" in record.getMessage()]


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize("name", REFUSED)
async def test_the_field_is_refused_by_name(serve, path, name):
    server = await serve()
    response = await server.send(path, BODIES[path] | {name: REFUSED[name]})
    assert response.status_code == 400, response.text
    assert response.json()["error"]["param"].split(".")[0] == name
    await server.ask(path, BODIES[path])


@pytest.mark.parametrize(
    ("name", "value"),
    [("include_reasoning", False), ("documents", [{"text": "x"}]), ("reasoning_effort", "high"), ("tools", [])],
)
async def test_fields_of_chats_are_taken(serve, name, value):
    server = await serve("yes")
    await server.ask(CHAT, USER | {name: value})


@pytest.mark.parametrize("path", BODIES)
async def test_a_stream_may_come_in_larger_pieces(serve, path):
    server = await serve([40] * 20)
    body = BODIES[path] | {"max_tokens": 13, "return_token_ids": True, "stream_interval": 4}
    chunks = [choice for chunk in await server.stream(path, body) for choice in chunk["choices"]]
    sizes = [len(choice["token_ids"]) for choice in chunks if choice.get("token_ids")]
    assert all(size >= 4 for size in sizes[1:-1])  # a busy engine may give more at a time
    assert sum(sizes) == 13


async def test_a_stream_in_larger_pieces_begins_at_once_and_ends_whole():
    async def deltas():
        for number in range(8):
            last = number == 7
            new = CompletionOutput(0, text="x", token_ids=[number], finish_reason="length" if last else None)
            yield RequestOutput("r", None, [1], [new], finished=last)

    pieces = [[len(new.token_ids) for new in joined.outputs] async for joined in spaced(deltas(), 3)]
    assert pieces == [[1], [3], [3], [1]]


async def test_documents_reach_the_template(serve):
    server = await serve("ok", options=ServerOptions(trust_request_chat_template=True))
    body = USER | {"documents": [{"text": "one"}], "chat_template": "{{ documents[0].text }}!"}
    answer = await server.ask(CHAT, body | {"return_token_ids": True})
    assert answer["prompt_token_ids"] == (await server.ask("/tokenize", {"prompt": "one!"}))["tokens"]


async def test_tokenize_shows_tools_as_a_chat_does(serve):
    server = await serve("ok", options=ServerOptions(trust_request_chat_template=True))
    tools = [{"type": "function", "function": {"name": "weather"}}]
    body = USER | {"tools": tools, "chat_template": "{{ tools | tojson }}"}
    answer = await server.ask(CHAT, body | {"return_token_ids": True})
    assert (await server.ask("/tokenize", body))["tokens"] == answer["prompt_token_ids"]
    await server.refused("/tokenize", USER | {"tools": [{}]}, field="tools[0].function")
