"""What is refused at the door, with the field's name; the next request is always served."""

from __future__ import annotations

import json

import msgspec
import pytest

from octavo.errors import RequestError
from octavo.server.decode import decode_body
from octavo.server.openai.protocol import ChatBody, CompletionBody

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
MESSAGES = '"messages": [{"role": "user", "content": "hi"}]'


@pytest.mark.anyio
@pytest.mark.parametrize("value", ["NaN", "Infinity", "-Infinity", "1e999", '"0.5"', "true", "[1]"])
@pytest.mark.parametrize(
    "field", ["temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty"]
)
async def test_case_C1_what_is_no_finite_number_is_refused(serve, field, value):
    server = await serve()
    await server.refused(COMPLETIONS, raw=f'{{"prompt": "x", "{field}": {value}}}', field=field)


@pytest.mark.anyio
async def test_case_C1_logit_bias_must_be_finite(serve):
    server = await serve()
    await server.refused(COMPLETIONS, raw='{"prompt": "x", "logit_bias": {"5": NaN}}', field="logit_bias.5")
    await server.refused(COMPLETIONS, raw='{"prompt": "x", "logit_bias": {"5": 1e999}}', field="logit_bias[...]")


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("extra", "field"),
    [
        ('"temperature": -1', "temperature"),
        ('"top_p": 0', "top_p"),
        ('"top_p": 1.5', "top_p"),
        ('"top_k": -2', "top_k"),
        ('"top_k": 1.5', "top_k"),
        ('"min_p": 2', "min_p"),
        ('"repetition_penalty": 1e-320', "repetition_penalty"),
        ('"repetition_penalty": 1e308', "repetition_penalty"),
        ('"n": 0', "n"),
        ('"n": true', "n"),
        ('"seed": 100000000000000000000000000', "seed"),
        ('"max_tokens": -1', "max_tokens"),
        ('"max_tokens": 0', "max_tokens"),
        ('"max_tokens": "5"', "max_tokens"),
        ('"min_tokens": 20', "min_tokens"),
        ('"stop": [""]', "stop"),
        ('"stop": 5', "stop"),
        ('"stop": [5]', "stop[0]"),
        ('"stop_token_ids": [999999]', "stop_token_ids"),
        ('"stop_token_ids": [-1]', "stop_token_ids"),
        ('"allowed_token_ids": []', "allowed_token_ids"),
        ('"bad_words": [""]', "bad_words"),
        ('"logprobs": -2', "logprobs"),
        ('"logprobs": true', "logprobs"),
        ('"priority": 100000000000000000000', "priority"),
        ('"stream": 1', "stream"),
        ('"stream_options": {"include_usage": true}', "stream_options"),
        ('"stream": true, "stream_options": {"include_usage": 5}', "stream_options.include_usage"),
        ('"request_id": ""', "request_id"),
        ('"suffix": "end"', "suffix"),
        ('"user": "\\ud83d"', "user"),
    ],
)
async def test_wrong_values_are_refused(serve, extra, field):
    server = await serve()
    await server.refused(COMPLETIONS, raw=f'{{"prompt": "x", {extra}}}', field=field)


@pytest.mark.anyio
@pytest.mark.parametrize("key", ["999999", "-1", "abc", "383383", " 5", "1_0", "٣"])
async def test_case_C4_logit_bias_of_no_token_is_refused(serve, key):
    server = await serve()
    await server.refused(COMPLETIONS, {"prompt": "x", "logit_bias": {key: 5}}, field="logit_bias")


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("prompt", "field"),
    [
        ([999999], "prompt"),
        ([-1], "prompt"),
        ([5279552648203111001], "prompt"),
        ([True], "prompt"),
        ([1.5], "prompt"),
        ([None], "prompt"),
        ([5, "x"], "prompt"),
        ([[5], "x"], "prompt"),
        ([[5], [True]], "prompt[1]"),
        ({"text": "x"}, "prompt"),
        (None, "prompt"),
        (5, "prompt"),
        (["x"] * 1025, "prompt"),
    ],
)
async def test_case_C5_prompts_of_no_tokens_are_refused(serve, prompt, field):
    server = await serve()
    await server.refused(COMPLETIONS, {"prompt": prompt}, field=field)


@pytest.mark.anyio
@pytest.mark.parametrize("prompt", ["", [""], [], [[]]])
async def test_case_C6_an_empty_prompt_needs_a_start_token(serve, bos_tokenizer, prompt):
    server = await serve()
    await server.refused(COMPLETIONS, {"prompt": prompt}, field="prompt")
    if prompt != []:  # no prompt at all is wrong in any case
        server = await serve([40, 2], tokenizer=bos_tokenizer)
        answer = await server.ask(COMPLETIONS, {"prompt": prompt})
        assert answer["usage"]["prompt_tokens"] == 1


@pytest.mark.anyio
async def test_case_C8_too_much_names_the_limit_the_prompt_and_what_was_asked(serve):
    server = await serve(max_model_len=64)
    message = await server.refused(COMPLETIONS, {"prompt": [20] * 8, "max_tokens": 61}, field="max_tokens")
    assert all(number in message for number in ("64", "8", "61"))


@pytest.mark.anyio
async def test_case_C10_a_prompt_may_fill_all_but_one_token(serve):
    server = await serve([40] * 99, max_model_len=64)
    answer = await server.ask(COMPLETIONS, {"prompt": [20] * 63, "max_tokens": 1})
    assert (answer["usage"]["completion_tokens"], answer["choices"][0]["finish_reason"]) == (1, "length")
    await server.refused(COMPLETIONS, {"prompt": [20] * 64, "max_tokens": 1}, field="prompt")
    scored = await server.ask(COMPLETIONS, {"prompt": [20] * 64, "max_tokens": 0, "echo": True, "logprobs": 1})
    assert len(scored["choices"][0]["logprobs"]["tokens"]) == 64
    await server.refused(COMPLETIONS, {"prompt": [20] * 65, "max_tokens": 0, "echo": True}, field="prompt")


@pytest.mark.anyio
async def test_case_C3_top_k_above_the_vocabulary_is_no_limit(serve):
    server = await serve("yes")
    assert (await server.ask(COMPLETIONS, {"prompt": "x", "top_k": 9999999}))["choices"][0]["text"] == "yes"


@pytest.mark.anyio
@pytest.mark.parametrize("raw", ["", "{", "[]", "5", "null", '"x"', "{'prompt': 1}", "\x00"])
@pytest.mark.parametrize("path", [COMPLETIONS, CHAT, "/tokenize", "/detokenize"])
async def test_a_body_that_is_no_object_is_refused(serve, path, raw):
    server = await serve()
    await server.refused(path, raw=raw, field=None)


@pytest.mark.anyio
async def test_a_request_may_not_be_a_flood(serve):
    server = await serve()
    await server.refused(COMPLETIONS, {"prompt": ["x"] * 1000, "n": 1000}, field="n")


@pytest.mark.anyio
async def test_text_behind_the_body_is_refused(serve):
    server = await serve()
    await server.refused(COMPLETIONS, raw='{"prompt": "x"} {}', field=None)


@pytest.mark.anyio
async def test_missing_fields_are_named(serve):
    server = await serve()
    await server.refused(COMPLETIONS, {}, field="prompt")
    await server.refused(CHAT, {}, field="messages")
    await server.refused("/detokenize", {}, field="tokens")


@pytest.mark.anyio
async def test_deep_nesting_is_refused(serve):
    server = await serve()
    deep = '{"prompt": ' + "[" * 200_000 + "]" * 200_000 + "}"
    await server.refused(COMPLETIONS, raw=deep, field=None)


@pytest.mark.anyio
async def test_unknown_fields_are_ignored_with_one_line_in_the_log(serve, caplog):
    server = await serve("yes")
    with caplog.at_level("WARNING", logger="octavo.server"):
        await server.ask(COMPLETIONS, {"prompt": "x", "brand_new": 1, "another": {"a": [1]}})
    lines = [record.getMessage() for record in caplog.records if record.name == "octavo.server"]
    assert lines == ["ignored unknown fields: another, brand_new"]


def test_null_is_not_given():
    fields = [name for name in CompletionBody.__struct_fields__ if name != "prompt"]
    body = decode_body(json.dumps({"prompt": "x"} | dict.fromkeys(fields)).encode(), CompletionBody)
    assert all(getattr(body, name) is None for name in fields)
    fields = [name for name in ChatBody.__struct_fields__ if name != "messages"]
    raw = f"{{{MESSAGES}, {json.dumps(dict.fromkeys(fields))[1:-1]}}}"
    assert all(getattr(decode_body(raw.encode(), ChatBody), name) is None for name in fields)


@pytest.mark.anyio
async def test_case_X_lone_surrogate_half_a_pair_deep_inside_is_found(serve):
    server = await serve()
    raw = r'{"messages": [{"role": "user", "content": "a\ud83d"}]}'
    await server.refused(CHAT, raw=raw, field="messages[0].content")


def test_bytes_that_are_no_utf8_are_refused():
    with pytest.raises(RequestError, match="not valid JSON"):
        decode_body(b'{"prompt": "\xff\xfe"}', CompletionBody)


def test_a_field_of_the_body_that_the_decoder_does_not_know_by_type_is_checked_later():
    assert decode_body(b'{"prompt": [1, 2]}', CompletionBody).prompt == [1, 2]
    assert issubclass(CompletionBody, msgspec.Struct)


@pytest.mark.anyio
@pytest.mark.parametrize("depth", range(900, 1000, 4))
async def test_case_C1_what_is_nested_deeper_than_python_goes_is_refused(serve, depth):
    """The JSON decoder takes some values that nothing behind it can walk through."""
    server = await serve()
    arguments = json.dumps("[" * depth + "]" * depth)
    call = f'{{"id": "c", "type": "function", "function": {{"name": "f", "arguments": {arguments}}}}}'
    schema = '{"a": ' * depth + "1" + "}" * depth
    tool = f'{{"type": "function", "function": {{"name": "f", "parameters": {{"properties": {{"a": {schema}}}}}}}}}'
    for raw in (
        f'{{"messages": [{{"role": "assistant", "tool_calls": [{call}]}}, {{"role": "user", "content": "x"}}]}}',
        f'{{{MESSAGES}, "tools": [{tool}]}}',
        f'{{{MESSAGES}, "x": {"[" * depth}NaN{"]" * depth}}}',
    ):
        response = await server.send(CHAT, raw=raw, headers={"content-type": "application/json"})
        assert response.status_code in (200, 400), response.text
    await server.settled()
