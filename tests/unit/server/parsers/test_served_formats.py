"""Every format over HTTP: what a model writes in it comes to clients as calls and reasoning, streamed and not."""

from __future__ import annotations

import json
from typing import Any

import pytest

from octavo.server.options import ServerOptions

pytestmark = pytest.mark.anyio
CHAT = "/v1/chat/completions"
USER = [{"role": "user", "content": "hi"}]
CALLS = [
    ("weather", {"city": "Paris", "days": 3, "metric": True}),
    ("weather", {"city": 'He said "no" {or [yes]}, a\\b', "place": {"lat": -23.5}}),
    ("list_tables", {}),
]
CUT_INSIDE = {
    "qwen3": "<think>\nwhy, {",
    "deepseek_r1": "why, {",
    "granite": "Here is my thought process: why, {",
    "mistral": "[THINK]why, {",
    "gemma4": "<|channel>thought\nwhy, {",
    "hunyuan_a13b": "<think>\nwhy, {",
    "seed_oss": "<seed:think>why, {",
    "openai_gptoss": "<|channel|>analysis<|message|>why, {",
}


@pytest.fixture
def tools(parsing: Any) -> list[dict[str, Any]]:
    return [
        {"type": "function", "function": {"name": tool.name, "parameters": tool.parameters}} for tool in parsing.TOOLS
    ]


async def calls_of(server: Any, tools: list[dict[str, Any]]) -> list[tuple[str, Any]]:
    (choice,) = (await server.both(CHAT, {"messages": USER, "tools": tools}))["choices"]
    found = [call["function"] for call in choice["message"]["tool_calls"]]
    return [(call["name"], json.loads(call["arguments"])) for call in found]


@pytest.mark.parametrize("width", [1, 4, 9])
async def test_case_D3_arguments_are_whole_however_many_tokens_a_step_gives(serve, written, tools, width):
    options = ServerOptions(tool_call_parser=written.name, reasoning_parser="none")
    server = await serve(written.write(CALLS), options=options, width=width, max_model_len=1024, num_blocks=128)
    assert await calls_of(server, tools) == CALLS


async def test_case_D4_a_call_without_arguments_streams_an_empty_object(serve, written, tools):
    options = ServerOptions(tool_call_parser=written.name, reasoning_parser="none")
    server = await serve(written.write([("list_tables", {})] * 2), options=options, max_model_len=1024, num_blocks=128)
    assert await calls_of(server, tools) == [("list_tables", {})] * 2


@pytest.mark.parametrize("name", CUT_INSIDE)
async def test_case_D9_reasoning_that_is_cut_is_reasoning_and_the_content_null(serve, tokenizer, name):
    text = CUT_INSIDE[name]
    server = await serve(text + "so} and so on", options=ServerOptions(reasoning_parser=name, tool_call_parser="none"))
    (choice,) = (await server.both(CHAT, {"messages": USER, "max_tokens": len(tokenizer.encode(text))}))["choices"]
    assert choice["message"]["reasoning"].startswith("why")
    assert (choice["message"]["content"], choice["finish_reason"]) == (None, "length")


@pytest.mark.parametrize("name", ["qwen3", "deepseek_r1", "glm45", "kimi_k2", "hunyuan_a13b", "ernie45"])
@pytest.mark.parametrize("opened", ["<think>\n", "<think>", "<think>\nSo far"])
async def test_case_D10_reasoning_that_the_prompt_has_opened_is_reasoning(serve, name, opened):
    options = ServerOptions(reasoning_parser=name, tool_call_parser="none", trust_request_chat_template=True)
    server = await serve("a</think>b", options=options)
    body = {"messages": USER, "chat_template": f"<|im_start|>assistant\n{opened}"}
    (choice,) = (await server.both(CHAT, body))["choices"]
    assert (choice["message"]["reasoning"], choice["message"]["content"]) == ("a", "b")
