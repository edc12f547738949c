"""POST /v1/chat/completions/batch."""

from __future__ import annotations

import pytest

pytestmark = pytest.mark.anyio
PATH = "/v1/chat/completions/batch"


def conversation(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


@pytest.fixture
async def echoing(serve, tokenizer):
    """A server whose model says how long the prompt is, so that answers cannot be mixed up."""
    return await serve(lambda prompt: [*tokenizer.encode(f"{len(prompt)} tokens"), 2])


async def test_every_conversation_gets_its_own_answers_in_order(echoing, tokenizer):
    conversations = [conversation("a" * length) for length in (40, 1, 20)]
    lengths = [len(tokenizer.encode_chat(messages)) for messages in conversations]
    answer = await echoing.ask(PATH, {"messages": conversations, "n": 2})
    assert [choice["index"] for choice in answer["choices"]] == list(range(6))
    said = [choice["message"]["content"] for choice in answer["choices"]]
    assert said == [f"{length} tokens" for length in lengths for _ in range(2)]
    assert answer["usage"]["prompt_tokens"] == sum(lengths)
    alone = await echoing.ask("/v1/chat/completions", {"messages": conversations[0]})
    assert answer["choices"][0]["message"] == alone["choices"][0]["message"]


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"messages": []}, "messages"),
        ({"messages": conversation("x")}, "messages[0]"),
        ({"messages": [conversation("x"), []]}, "messages[1]"),
        ({"messages": [conversation("x"), [{"role": "user", "content": 5}]]}, "messages[1][0].content"),
        ({"messages": [conversation("x")] * 1025}, "messages"),
        ({"messages": [conversation("x")] * 1000, "n": 1000}, "n"),
        ({"messages": [conversation("x")], "stream": True}, "stream"),
        ({"messages": [conversation("x")], "return_token_ids": True}, "return_token_ids"),
        ({"messages": [conversation("x")], "prompt_logprobs": 1}, "prompt_logprobs"),
        ({"messages": [conversation("x")], "temperature": -1}, "temperature"),
        ({"messages": [conversation("x"), conversation("x" * 9000)]}, "messages[1]"),
    ],
)
async def test_what_is_wrong_is_named_with_its_conversation(echoing, body, field):
    await echoing.refused(PATH, body, field=field)
