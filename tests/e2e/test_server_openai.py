"""`octavo serve` of a tiny random model, driven by OpenAI's own client."""

from __future__ import annotations

import asyncio

import pytest

openai = pytest.importorskip("openai")

USER = [{"role": "user", "content": "How many pages?"}]
GREEDY = {"model": "tiny", "temperature": 0.0}


@pytest.fixture
def client(tiny_server, invariants):
    with openai.OpenAI(base_url=f"{tiny_server.url}/v1", api_key="sesame", max_retries=0) as client:
        yield client
    invariants.url(tiny_server.url, key="sesame")


def test_the_ready_line_says_what_is_served_and_how_to_try_it(tiny_server):
    assert "Octavo serves tiny at http://127.0.0.1:" in tiny_server.ready
    assert "platform cpu, float32" in tiny_server.ready


def test_completions_stream_and_plain_agree(client):
    ask = GREEDY | {"prompt": "Once upon a time", "max_tokens": 24, "logprobs": 2}
    plain = client.completions.create(**ask)
    chunks = list(client.completions.create(**ask, stream=True, stream_options={"include_usage": True}))
    assert "".join(chunk.choices[0].text for chunk in chunks[:-1]) == plain.choices[0].text
    assert chunks[-1].choices == []
    assert chunks[-1].usage.completion_tokens == plain.usage.completion_tokens
    joined = [value for chunk in chunks[:-1] for value in chunk.choices[0].logprobs.token_logprobs]
    assert joined == pytest.approx(plain.choices[0].logprobs.token_logprobs, abs=1e-4)
    again = client.completions.create(**ask)
    assert again.choices[0].text == plain.choices[0].text


def test_chat_stream_and_plain_agree(client):
    ask = GREEDY | {"messages": USER, "max_tokens": 12, "logprobs": True, "top_logprobs": 3}
    plain = client.chat.completions.create(**ask)
    chunks = list(client.chat.completions.create(**ask, stream=True))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == plain.choices[0].message.content
    assert chunks[0].choices[0].delta.role == "assistant"
    assert chunks[-1].choices[0].finish_reason == plain.choices[0].finish_reason
    assert len(plain.choices[0].logprobs.content) == plain.usage.completion_tokens


def test_case_B7_scores_of_an_echoed_prompt_are_those_of_a_forward_pass(client, tiny_model):
    torch = pytest.importorskip("torch")
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)
    for ids in ([30, 31, 32, 33, 40], [30, 31, 32, 33, 41]):
        answer = client.completions.create(model="tiny", prompt=ids, max_tokens=0, echo=True, logprobs=1)
        got = answer.choices[0].logprobs.token_logprobs
        with torch.inference_mode():
            expected = torch.log_softmax(model(torch.tensor([ids])).logits[0].double(), dim=-1)
        assert got[0] is None
        assert got[1:] == pytest.approx([expected[i, token].item() for i, token in enumerate(ids[1:])], abs=1e-3)


def test_case_F2_answers_of_one_seed_differ_and_repeat(client):
    ask = {"model": "tiny", "prompt": "The", "n": 4, "seed": 7, "temperature": 1.5, "max_tokens": 12}
    first = [choice.text for choice in client.completions.create(**ask).choices]
    assert len(set(first)) > 1
    assert [choice.text for choice in client.completions.create(**ask).choices] == first


def test_errors_arrive_as_the_clients_own_exceptions(client, tiny_server):
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(model="tiny", prompt="x", temperature=-1)
    assert caught.value.param == "temperature"
    with pytest.raises(openai.NotFoundError) as missing:
        client.completions.create(model="other", prompt="x")
    assert missing.value.code == "model_not_found"
    stranger = openai.OpenAI(base_url=f"{tiny_server.url}/v1", api_key="wrong", max_retries=0)
    with stranger, pytest.raises(openai.AuthenticationError):
        stranger.models.list()


def test_models_are_listed(client):
    assert [model.id for model in client.models.list()] == ["tiny"]
    assert client.models.retrieve("tiny").id == "tiny"


def test_many_streams_at_once_give_what_each_gives_alone(tiny_server, read_metric):
    prompts = [f"The sheet number {i} has" for i in range(16)]
    ask = GREEDY | {"max_tokens": 16}

    async def run() -> tuple[list[str], list[str]]:
        async with openai.AsyncOpenAI(base_url=f"{tiny_server.url}/v1", api_key="sesame") as client:

            async def stream(prompt: str) -> str:
                chunks = await client.completions.create(**ask, prompt=prompt, stream=True)
                return "".join([chunk.choices[0].text async for chunk in chunks])

            alone = [(await client.completions.create(**ask, prompt=prompt)).choices[0].text for prompt in prompts]
            return alone, await asyncio.gather(*map(stream, prompts))

    alone, together = asyncio.run(run())
    assert together == alone
    assert len(set(alone)) > 1
    assert read_metric(tiny_server.url, "num_requests_running", "sesame") == 0
    assert read_metric(tiny_server.url, "kv_cache_usage_perc", "sesame") == 0
