"""What tests of the Messages API share."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

MESSAGES = "/v1/messages"


@pytest.fixture
def ask() -> Callable[..., Awaitable[dict[str, Any]]]:
    """`await ask(server, body)`: the plain answer, after checking that a stream of the same request joins to it."""

    async def send(server: Any, body: dict[str, Any]) -> dict[str, Any]:
        body = {"model": "tiny", "max_tokens": 120} | body
        plain: dict[str, Any] = await server.ask(MESSAGES, body)
        joined = join(await server.events(MESSAGES, body))
        usage, plain_usage = joined.pop("usage"), plain["usage"]
        # The second request finds the first one's prompt in the prefix cache.
        assert whole_prompt(usage) == whole_prompt(plain_usage)
        assert usage["output_tokens"] == plain_usage["output_tokens"]
        for block, plain_block in zip(joined["content"], plain["content"], strict=True):
            if "id" in plain_block:  # calls get new ids
                block["id"] = plain_block["id"]
        assert {**joined, "id": plain["id"], "usage": plain_usage} == plain
        return plain

    return send


@pytest.fixture
def refused() -> Callable[..., Awaitable[str]]:
    """`await refused(server, body, "field")`: the message of an error that names the field, in Anthropic's shape."""

    async def send(
        server: Any,
        body: Any,
        field: str,
        *,
        status: int = 400,
        kind: str = "invalid_request_error",
        path: str = MESSAGES,
        raw: str | None = None,
        headers: dict[str, str] | None = None,
    ) -> str:
        response = await server.send(path, body, raw=raw, headers=headers)
        assert response.status_code == status, response.text
        error = response.json()
        assert set(error) == {"type", "error", "request_id"}
        assert error["type"] == "error"
        assert error["request_id"] == response.headers["request-id"]
        assert set(error["error"]) == {"type", "message"}
        assert error["error"]["type"] == kind
        message: str = error["error"]["message"]
        assert field in message
        plain = {"model": "tiny", "max_tokens": 4, "messages": [{"role": "user", "content": "next"}]}
        assert (await server.send(MESSAGES, plain, headers=headers)).status_code == (401 if status == 401 else 200)
        return message

    return send


def join(events: list[dict[str, Any]]) -> dict[str, Any]:
    """A message from its events, put together as clients do it; their order is checked."""
    kinds = [event["type"] for event in events]
    assert kinds[:2] == ["message_start", "ping"]
    assert kinds[-2:] == ["message_delta", "message_stop"]
    message: dict[str, Any] = events[0]["message"]
    assert (message["content"], message["stop_reason"]) == ([], None)
    open_index = None
    text = ""
    for event in events[2:-2]:
        match event["type"]:
            case "content_block_start":
                assert open_index is None
                open_index, text = event["index"], ""
                assert open_index == len(message["content"])
                message["content"].append(event["content_block"])
            case "content_block_delta":
                assert event["index"] == open_index
                block, delta = message["content"][open_index], event["delta"]
                match delta["type"]:
                    case "text_delta" | "thinking_delta" as kind:
                        block[kind.removesuffix("_delta")] += delta[kind.removesuffix("_delta")]
                    case "signature_delta":
                        block["signature"] = delta["signature"]
                    case "input_json_delta":
                        text += delta["partial_json"]
            case "content_block_stop":
                assert event["index"] == open_index
                if message["content"][open_index]["type"] == "tool_use":
                    message["content"][open_index]["input"] = json.loads(text or "{}")
                open_index = None
            case other:
                raise AssertionError(other)
    assert open_index is None
    return message | events[-2]["delta"] | {"usage": events[-2]["usage"]}


def whole_prompt(usage: dict[str, int]) -> int:
    """Prompt tokens, computed or not."""
    return usage["input_tokens"] + usage["cache_read_input_tokens"] + usage["cache_creation_input_tokens"]
