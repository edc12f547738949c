"""Token ids in, token ids out; and the render routes, whose answers that route takes."""

from __future__ import annotations

import pytest

from octavo.server.options import ServerOptions

pytestmark = pytest.mark.anyio
PATH = "/inference/v1/generate"
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
USER = [{"role": "user", "content": "How many pages?"}]


async def test_ids_go_in_and_ids_come_out(serve, say):
    server = await serve("eight pages")
    body = {"token_ids": [40, 41, 42], "sampling_params": {"max_tokens": 50, "n": 2}}
    answer = await server.ask(PATH, body | {"request_id": "mine"})
    assert answer["request_id"] == "mine"
    assert [choice["token_ids"] for choice in answer["choices"]] == [say("eight pages")] * 2
    assert [choice["finish_reason"] for choice in answer["choices"]] == ["stop"] * 2
    assert answer["usage"]["prompt_tokens"] == 3


async def test_a_stream_of_ids_joins_to_the_plain_answer(serve):
    server = await serve("eight pages", width=2)
    body = {"token_ids": [40, 41], "sampling_params": {"max_tokens": 50, "logprobs": 1, "prompt_logprobs": 1}}
    plain = await server.ask(PATH, body)
    *chunks, last = await server.stream(PATH, body | {"stream_options": {"include_usage": True}})
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    assert [token for choice in choices for token in choice["token_ids"]] == plain["choices"][0]["token_ids"]
    joined = [entry for choice in choices for entry in choice["logprobs"]["content"]]
    assert joined == plain["choices"][0]["logprobs"]["content"]
    assert len(joined) == len(plain["choices"][0]["token_ids"])
    assert chunks[0]["prompt_logprobs"] == plain["prompt_logprobs"]
    assert (last["choices"], last["usage"]["completion_tokens"]) == ([], plain["usage"]["completion_tokens"])


async def test_a_stop_string_works_though_no_text_is_sent(serve, tokenizer):
    server = await serve("one two three")
    answer = await server.ask(PATH, {"token_ids": [40], "sampling_params": {"stop": "two", "max_tokens": 50}})
    (choice,) = answer["choices"]
    assert choice["stop_reason"] == "two"
    assert tokenizer.decode(choice["token_ids"]).startswith("one")
    assert "three" not in tokenizer.decode(choice["token_ids"])


async def test_it_needs_no_tokenizer(serve):
    server = await serve([40, 41, 2], tokenizer=None)
    answer = await server.ask(PATH, {"token_ids": [40], "sampling_params": {"logprobs": 0}})
    assert answer["choices"][0]["token_ids"] == [40, 41, 2]
    assert answer["choices"][0]["logprobs"]["content"][0]["token"] == "token_id:40"


async def test_no_limit_is_all_the_room_and_none_given_is_sixteen(serve):
    server = await serve([40] * 500, max_model_len=64)
    for params, length in (({}, 16), ({"max_tokens": None}, 62), ({"max_tokens": 3}, 3)):
        answer = await server.ask(PATH, {"token_ids": [40, 41], "sampling_params": params})
        assert len(answer["choices"][0]["token_ids"]) == length


@pytest.mark.parametrize("extra", [{}, {"max_tokens": 4, "n": 2, "temperature": 0.5, "logit_bias": {"40": 1}}])
async def test_what_render_gives_of_a_chat_generates_what_the_chat_says(serve, extra):
    server = await serve("eight pages", max_model_len=96)
    body = {"messages": USER, "cache_salt": "x"} | extra
    rendered = await server.ask(CHAT + "/render", body)
    answer = await server.ask(PATH, rendered)
    chat = await server.ask(CHAT, body | {"return_token_ids": True})
    assert rendered["token_ids"] == chat["prompt_token_ids"]
    assert [c["token_ids"] for c in answer["choices"]] == [c["token_ids"] for c in chat["choices"]]
    assert [c["finish_reason"] for c in answer["choices"]] == [c["finish_reason"] for c in chat["choices"]]


async def test_each_prompt_of_a_completion_is_rendered_by_itself(serve):
    server = await serve("eight pages")
    body = {"prompt": ["Once", "Twice upon"], "stop": ["x"]}
    rendered = await server.ask(COMPLETIONS + "/render", body)
    whole = await server.ask(COMPLETIONS, body | {"return_token_ids": True})
    assert [one["token_ids"] for one in rendered] == [choice["prompt_token_ids"] for choice in whole["choices"]]
    for one, choice in zip(rendered, whole["choices"], strict=True):
        assert (await server.ask(PATH, one))["choices"][0]["token_ids"] == choice["token_ids"]


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({}, "token_ids"),
        ({"token_ids": "x"}, "token_ids"),
        ({"token_ids": [1.5]}, "token_ids[0]"),
        ({"token_ids": [True]}, "token_ids[0]"),
        ({"token_ids": []}, "token_ids"),
        ({"token_ids": [999999]}, "token_ids"),
        ({"token_ids": [-1]}, "token_ids"),
        ({"token_ids": [40], "sampling_params": 5}, "sampling_params"),
        ({"token_ids": [40], "sampling_params": {"temperature": -1}}, "sampling_params.temperature"),
        ({"token_ids": [40], "sampling_params": {"temperature": "hot"}}, "sampling_params.temperature"),
        ({"token_ids": [40], "sampling_params": {"n": 0}}, "sampling_params.n"),
        ({"token_ids": [40], "sampling_params": {"max_tokens": 9999}}, "sampling_params.max_tokens"),
        ({"token_ids": [40], "sampling_params": {"logprobs": 21}}, "sampling_params.logprobs"),
        ({"token_ids": [40], "sampling_params": {"stop_token_ids": [999999]}}, "sampling_params.stop_token_ids"),
        ({"token_ids": [40], "sampling_params": {"logit_bias": {"x": 1}}}, "sampling_params.logit_bias"),
        ({"token_ids": [40], "sampling_params": {"top_z": 1}}, "sampling_params.top_z"),
        ({"token_ids": [40], "features": {"image": "x"}}, "features"),
        ({"token_ids": [40], "kv_transfer_params": {"x": 1}}, "kv_transfer_params"),
        ({"token_ids": [40], "stream_options": {"include_usage": True}}, "stream_options"),
        ({"token_ids": [40], "priority": 2**40}, "priority"),
    ],
)
async def test_wrong_bodies_are_refused_by_name(serve, body, field):
    server = await serve()
    await server.refused(PATH, body, field=field)


async def test_what_is_no_number_is_refused_deep_inside(serve):
    server = await serve()
    raw = '{"token_ids": [40], "sampling_params": {"temperature": NaN}}'
    await server.refused(PATH, raw=raw, field="sampling_params.temperature")


@pytest.mark.parametrize("path", [CHAT + "/render", COMPLETIONS + "/render"])
async def test_rendering_checks_what_generating_would(serve, path):
    server = await serve(options=ServerOptions(max_logprobs=5))
    good = {"messages": USER} if path.startswith(CHAT) else {"prompt": "x"}
    await server.refused(path, good | {"temperature": -1}, field="temperature")
    await server.refused(path, good | {"prompt_logprobs": 6}, field="prompt_logprobs")
    response = await server.send(path, good | {"model": "other"})
    assert response.status_code == 404
