"""POST /v1/completions: prompts, echo, logprobs, usage, streams."""

from __future__ import annotations

import unicodedata

import pytest

from octavo.server.options import ServerOptions

pytestmark = pytest.mark.anyio
PATH = "/v1/completions"


async def test_answer_has_the_shape_that_clients_expect(serve, tokenizer):
    server = await serve("a story of pages")
    answer = await server.both(PATH, {"model": "tiny", "prompt": "Once upon"})
    assert answer["object"] == "text_completion"
    assert answer["id"].startswith("cmpl-")
    assert answer["model"] == "tiny"
    (choice,) = answer["choices"]
    assert choice == {
        "index": 0,
        "text": "a story of pages",
        "logprobs": None,
        "finish_reason": "stop",
        "stop_reason": None,
    }
    num_prompt, num_said = len(tokenizer.encode("Once upon")), len(tokenizer.encode("a story of pages")) + 1
    assert answer["usage"] == {
        "prompt_tokens": num_prompt,
        "completion_tokens": num_said,
        "total_tokens": num_prompt + num_said,
        "prompt_tokens_details": {"cached_tokens": 0},
    }


async def test_all_kinds_of_prompts_are_taken(serve, tokenizer):
    server = await serve(lambda prompt: [prompt[0], 2])
    ids = tokenizer.encode("the book")
    for prompt, num_choices in (("the book", 1), (["the book", "a cat"], 2), (ids, 1), ([ids, [20, 21]], 2)):
        answer = await server.both(PATH, {"prompt": prompt})
        assert [choice["index"] for choice in answer["choices"]] == list(range(num_choices))
        assert answer["choices"][0]["text"] == tokenizer.decode(ids[:1])


async def test_choices_of_prompts_and_answers_are_numbered_through(serve, tokenizer):
    server = await serve(lambda prompt: [prompt[0], 2])
    answer = await server.both(PATH, {"prompt": ["cat", "dog"], "n": 2})
    firsts = [tokenizer.decode(tokenizer.encode(text)[:1]) for text in ("cat", "cat", "dog", "dog")]
    assert [choice["text"] for choice in answer["choices"]] == firsts
    assert answer["usage"]["prompt_tokens"] == sum(len(tokenizer.encode(text)) for text in ("cat", "dog"))
    assert answer["usage"]["completion_tokens"] == 8


async def test_case_D1_usage_comes_once_at_the_end_summed_over_answers(serve):
    server = await serve("one two")
    plain = await server.ask(PATH, {"prompt": "count", "n": 2})
    chunks = await server.stream(PATH, {"prompt": "count", "n": 2, "stream_options": {"include_usage": True}})
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"]["total_tokens"] == plain["usage"]["total_tokens"]
    assert all(chunk["usage"] is None for chunk in chunks[:-1])
    assert all("usage" not in chunk for chunk in await server.stream(PATH, {"prompt": "count"}))


async def test_continuous_usage_grows_with_every_chunk(serve):
    server = await serve("one two three", delay=0.01)
    options = {"include_usage": True, "continuous_usage_stats": True}
    chunks = await server.stream(PATH, {"prompt": "count", "stream_options": options})
    totals = [chunk["usage"]["total_tokens"] for chunk in chunks]
    assert totals == sorted(totals)
    assert totals[0] < totals[-1]


async def test_case_B1_echo_with_max_tokens_0_scores_the_prompt(serve, tokenizer):
    server = await serve()
    body = {"prompt": "Your answer: Yes", "echo": True, "max_tokens": 0, "logprobs": 1}
    answer = await server.both(PATH, body)
    (choice,) = answer["choices"]
    num_prompt = len(tokenizer.encode("Your answer: Yes"))
    assert choice["text"] == "Your answer: Yes"
    assert choice["finish_reason"] == "length"
    assert [len(column) for column in choice["logprobs"].values()] == [num_prompt] * 4
    assert choice["logprobs"]["token_logprobs"][0] is None
    assert all(isinstance(value, float) for value in choice["logprobs"]["token_logprobs"][1:])
    assert answer["usage"]["completion_tokens"] == 0


async def test_case_B2_echo_of_token_ids_is_their_text(serve, tokenizer):
    server = await serve()
    ids = tokenizer.encode("pages in this")
    answer = await server.both(PATH, {"prompt": ids, "echo": True, "max_tokens": 0, "logprobs": 1})
    assert answer["choices"][0]["text"] == "pages in this"


@pytest.mark.parametrize("max_tokens", [0, 5])
async def test_case_B3_B4_offsets_fit_the_tokens_and_tokens_join_to_the_text(serve, max_tokens):
    server = await serve([45, 46, 47, 48, 49, 50])
    body = {"prompt": "\n1. Carol has 20", "echo": True, "logprobs": 1, "max_tokens": max_tokens}
    (choice,) = (await server.both(PATH, body))["choices"]
    tokens, offsets = choice["logprobs"]["tokens"], choice["logprobs"]["text_offset"]
    assert "".join(tokens) == choice["text"]
    assert offsets == [len("".join(tokens[:i])) for i in range(len(tokens))]


async def test_case_B5_no_logprob_is_infinite(serve):
    server = await serve()
    body = {"prompt": "The", "logprobs": 1, "top_k": 1, "echo": True, "allowed_token_ids": [50]}
    (choice,) = (await server.both(PATH, body))["choices"]
    assert all(value is None or -9999.0 <= value <= 0.0 for value in choice["logprobs"]["token_logprobs"])


async def test_case_B6_prompt_logprobs_cover_the_prompt(serve, tokenizer):
    server = await serve()
    answer = await server.ask(PATH, {"prompt": [20, 21, 22, 23, 24, 25, 26, 27], "prompt_logprobs": 1})
    rows = answer["choices"][0]["prompt_logprobs"]
    assert rows[0] is None
    assert len(rows) == 8
    for token, row in zip(range(21, 28), rows[1:], strict=True):
        assert row[str(token)]["decoded_token"] == tokenizer.token_text(token)
        assert all(entry["logprob"] <= 0.0 for entry in row.values())


async def test_case_A8_tokens_that_look_alike_are_all_kept(serve, bytes_as_ids):
    server = await serve([*bytes_as_ids(b"\xe4\xbd\xa0"), 2])
    (choice,) = (await server.both(PATH, {"prompt": "x", "logprobs": 5}))["choices"]
    assert choice["text"] == "你"
    assert all(len(top) >= 5 for top in choice["logprobs"]["top_logprobs"])


async def test_tokens_can_be_named_by_id(serve, tokenizer):
    server = await serve("the cat")
    body = {"prompt": "x", "logprobs": 0, "return_tokens_as_token_ids": True, "return_token_ids": True}
    answer = await server.both(PATH, body)
    (choice,) = answer["choices"]
    assert choice["token_ids"] == [*tokenizer.encode("the cat"), 2]
    assert choice["prompt_token_ids"] == tokenizer.encode("x")
    assert choice["logprobs"]["tokens"] == [f"token_id:{token}" for token in choice["token_ids"]]
    assert [len(top) for top in choice["logprobs"]["top_logprobs"]] == [1] * len(choice["token_ids"])


async def test_cached_prompt_tokens_are_told(serve):
    server = await serve("yes")
    prompt = list(range(20, 70))
    await server.ask(PATH, {"prompt": prompt})
    usage = (await server.ask(PATH, {"prompt": prompt}))["usage"]
    assert usage["prompt_tokens_details"]["cached_tokens"] == 48
    salted = await server.ask(PATH, {"prompt": prompt, "cache_salt": "mine"})
    assert salted["usage"]["prompt_tokens_details"]["cached_tokens"] == 0


async def test_a_server_without_tokenizer_serves_token_ids(serve):
    server = await serve([40, 41, 2], tokenizer=None)
    answer = await server.both(PATH, {"prompt": [20, 21], "logprobs": 1})
    (choice,) = answer["choices"]
    assert choice["token_ids"] == [40, 41, 2]
    assert choice["logprobs"]["tokens"] == ["token_id:40", "token_id:41", "token_id:2"]
    response = await server.send(PATH, {"prompt": "text"})
    assert response.status_code == 400


async def test_case_A1_nothing_of_a_stop_string_is_streamed(serve, tokenizer):
    ids = [token for piece in ("DEF", "G", "HI", "J") for token in tokenizer.encode(piece)]
    server = await serve([*ids, 50, 50, 50])
    (choice,) = (await server.both(PATH, {"prompt": "ABC", "stop": ["DEFGHIJ"]}))["choices"]
    assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == ("", "stop", "DEFGHIJ")


@pytest.mark.parametrize("text", ["你好 ď 👍🏽 🇫🇷", "a“b”c", unicodedata.normalize("NFD", "é")])
async def test_case_A5_no_piece_of_a_stream_holds_half_a_character(serve, bytes_as_ids, text):
    server = await serve([*bytes_as_ids(text.encode()), 2])
    chunks = await server.stream(PATH, {"prompt": "x", "max_tokens": 100})
    pieces = [choice["text"] for chunk in chunks for choice in chunk["choices"]]
    assert "".join(pieces) == text
    assert not any("\ufffd" in piece for piece in pieces)


async def test_case_A6_ill_formed_bytes_are_replaced_and_the_server_lives(serve, bytes_as_ids):
    server = await serve([*bytes_as_ids(b"ab\xc3\x28cd\xffef"), 2])
    (choice,) = (await server.both(PATH, {"prompt": "x", "logprobs": 1}))["choices"]
    assert choice["text"] == "ab\ufffd(cd\ufffdef"


async def test_case_X_generation_config_defaults_hold_online_and_yield_to_the_request(serve):
    server = await serve(default_sampling={"temperature": 0.0, "top_p": 0.5, "repetition_penalty": 1.2})
    seen = []
    generate = server.service.client.generate

    def spy(prompt, params, **how):
        seen.append(params)
        return generate(prompt, params, **how)

    server.service.client.generate = spy
    await server.ask(PATH, {"prompt": "x", "top_p": 0.9, "seed": 7, "logit_bias": {"50": -3}, "bad_words": ["cat"]})
    (params,) = seen
    assert (params.temperature, params.top_p, params.repetition_penalty) == (0.0, 0.9, 1.2)
    assert (params.seed, params.logit_bias, params.bad_words) == (7, {50: -3.0}, ("cat",))


async def test_case_D8_an_error_in_a_stream_is_told_in_the_stream(serve):
    server = await serve([40] * 50, fail_at_step=3)
    response = await server.send(PATH, {"prompt": "x", "stream": True, "max_tokens": 40})
    events = response.text.split("\n\n")
    assert '"error"' in events[-2]
    assert "[DONE]" not in response.text


async def test_case_G7_when_the_engine_dies_requests_fail_and_health_says_so(serve):
    server = await serve([40] * 50, fail_at_step=3)
    assert (await server.get("/health")).status_code == 200
    response = await server.send(PATH, {"prompt": "x", "max_tokens": 40})
    assert response.status_code == 503
    assert response.json()["error"]["code"] == "engine_dead"
    assert (await server.get("/health")).status_code == 503
    assert (await server.send(PATH, {"prompt": "x"})).status_code == 503


async def test_more_logprobs_than_the_operator_allows_are_refused(serve):
    server = await serve(options=ServerOptions(max_logprobs=3))
    assert (await server.ask(PATH, {"prompt": "x", "logprobs": 3}))["choices"][0]["logprobs"]
    for field in ("logprobs", "prompt_logprobs"):
        for number in (4, -1):
            await server.refused(PATH, {"prompt": "x", field: number}, field=field)
    server = await serve(options=ServerOptions(max_logprobs=-1))
    (choice,) = (await server.ask(PATH, {"prompt": "x", "logprobs": -1, "max_tokens": 1}))["choices"]
    assert len(choice["logprobs"]["top_logprobs"][0]) == 384


async def test_the_default_length_is_cut_to_the_room_that_is_left(serve):
    server = await serve([40] * 99, max_model_len=64)
    assert (await server.ask(PATH, {"prompt": [20] * 10}))["usage"]["completion_tokens"] == 16
    assert (await server.ask(PATH, {"prompt": [20] * 60}))["usage"]["completion_tokens"] == 4


@pytest.mark.parametrize("stream", [False, True])
async def test_one_bad_prompt_of_many_refuses_the_request_and_stops_the_others(serve, stream):
    server = await serve([40] * 200, delay=0.002)
    body = {"prompt": [[20], [21], [999999]], "max_tokens": 200, "stream": stream}
    await server.refused(PATH, body, field="prompt")
    await server.settled()
    assert server.engine.stats.generation_tokens < 100


async def test_a_stop_token_is_told_as_the_reason_and_kept_out_of_the_text(serve, tokenizer):
    server = await serve([*tokenizer.encode("the cat"), 77, 40, 40])
    (choice,) = (await server.both(PATH, {"prompt": "x", "stop_token_ids": [77]}))["choices"]
    assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == ("the cat", "stop", 77)
    body = {"prompt": "x", "stop_token_ids": [77], "include_stop_str_in_output": True}
    (choice,) = (await server.both(PATH, body))["choices"]
    assert choice["text"] == "the cat" + tokenizer.decode([77])


@pytest.mark.parametrize("width", [1, 3])
async def test_several_tokens_a_step_change_no_answer(serve, width):
    server = await serve("the cat and the dog", width=width)
    (choice,) = (await server.both(PATH, {"prompt": "x", "stop": ["dog"], "logprobs": 1, "max_tokens": 50}))["choices"]
    assert (choice["text"], choice["stop_reason"]) == ("the cat and the ", "dog")
