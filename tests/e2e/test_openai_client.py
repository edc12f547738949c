"""OpenAI's own client, unmodified, against `octavo serve` of a tiny random model: every route, streamed and not.

The model is random, so what it says is noise; that it says it in the right form is the grammar's doing.
"""

from __future__ import annotations

import json

import pytest

openai = pytest.importorskip("openai")
pydantic = pytest.importorskip("pydantic")

USER = [{"role": "user", "content": "How warm is it in Oslo?"}]
GREEDY = {"model": "tiny", "temperature": 0.0}
CITY = {"type": "object", "properties": {"city": {"enum": ["Oslo", "Rome"]}}, "required": ["city"]}
WEATHER = {"type": "function", "function": {"name": "weather", "parameters": CITY | {"additionalProperties": False}}}
NAMED = {"type": "function", "function": {"name": "weather"}}


class Binding(pydantic.BaseModel):
    """What an answer is to be parsed into."""

    bound: bool
    cover: str = pydantic.Field(pattern="^(cloth|paper)$")


@pytest.fixture(scope="module")
def server(octavo_serve, tiny_model):
    """A server that is told how the model would write calls, which its template does not show."""
    flags = ["--port", "0", "--served-model-name", "tiny", "--platform", "cpu", "--dtype", "float32", "--threads", "1"]
    flags += ["--num-kv-blocks", "256", "--tool-call-parser", "hermes", "--reasoning-parser", "none"]
    return octavo_serve(str(tiny_model), *flags)


@pytest.fixture(scope="module")
def client(server):
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=120) as client:
        yield client


def joined_calls(chunks) -> dict[int, dict[str, str]]:
    """The calls that the chunks of a stream add up to, by index."""
    calls: dict[int, dict[str, str]] = {}
    for chunk in chunks:
        for call in chunk.choices[0].delta.tool_calls or ():
            held = calls.setdefault(call.index, {"id": "", "name": "", "arguments": ""})
            held["id"] += call.id or ""
            held["name"] += call.function.name or ""
            held["arguments"] += call.function.arguments or ""
    return calls


@pytest.mark.parametrize(("choice", "reason"), [("required", "tool_calls"), (NAMED, "stop")])
def test_case_D2_a_call_that_must_come_comes_by_its_schema(client, server, invariants, choice, reason):
    ask = GREEDY | {"messages": USER, "tools": [WEATHER], "tool_choice": choice, "parallel_tool_calls": False}
    plain = client.chat.completions.create(**ask, max_tokens=100).choices[0]
    (call,) = plain.message.tool_calls
    assert (call.type, call.function.name, plain.finish_reason) == ("function", "weather", reason)
    assert json.loads(call.function.arguments)["city"] in ("Oslo", "Rome")
    assert plain.message.content is None
    chunks = list(client.chat.completions.create(**ask, max_tokens=100, stream=True))
    (streamed,) = joined_calls(chunks).values()
    assert (streamed["name"], streamed["arguments"]) == (call.function.name, call.function.arguments)
    assert streamed["id"]
    assert [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices[0].finish_reason] == [reason]
    invariants.url(server.url)


def test_the_clients_own_stream_helper_puts_calls_together(client):
    ask = GREEDY | {"messages": USER, "tools": [WEATHER], "tool_choice": "required", "parallel_tool_calls": False}
    with client.chat.completions.stream(**ask, max_tokens=100) as stream:
        kinds = {event.type for event in stream}
        final = stream.get_final_completion()
    assert "tool_calls.function.arguments.done" in kinds
    assert json.loads(final.choices[0].message.tool_calls[0].function.arguments)["city"] in ("Oslo", "Rome")


def test_the_clients_parse_gives_an_object_of_its_class(client):
    answer = client.chat.completions.parse(**GREEDY, messages=USER, response_format=Binding, max_tokens=100)
    assert isinstance(answer.choices[0].message.parsed, Binding)
    assert answer.choices[0].finish_reason == "stop"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("extra", "allowed"),
    [
        ({"structured_outputs": {"choice": ["cloth", "paper"]}}, ("cloth", "paper")),
        ({"guided_regex": "(1|2)6"}, ("16", "26")),
        ({"structured_outputs": {"grammar": 'root ::= "a" | "bc"'}}, ("a", "bc")),
    ],
)
def test_forms_of_answers_hold_in_completions_and_chats(client, extra, allowed, stream):
    ask = GREEDY | {"max_tokens": 40, "extra_body": extra}
    if stream:
        chat = client.chat.completions.create(**ask, messages=USER, stream=True)
        said = "".join(chunk.choices[0].delta.content or "" for chunk in chat)
        text = "".join(chunk.choices[0].text for chunk in client.completions.create(**ask, prompt="x", stream=True))
    else:
        said = client.chat.completions.create(**ask, messages=USER).choices[0].message.content
        text = client.completions.create(**ask, prompt="x").choices[0].text
    assert said in allowed
    assert text in allowed


def test_a_history_with_calls_and_reasoning_is_taken(client):
    call = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Oslo"}'}}
    history = [
        *USER,
        {"role": "assistant", "content": None, "tool_calls": [call], "reasoning_content": "hm"},
        {"role": "tool", "tool_call_id": "c1", "content": "7"},
    ]
    answer = client.chat.completions.create(**GREEDY, messages=history, tools=[WEATHER], max_tokens=4)
    assert answer.usage.completion_tokens == 4


def test_usage_comes_with_the_last_chunk(client):
    ask = GREEDY | {"messages": USER, "max_tokens": 8, "stream": True, "stream_options": {"include_usage": True}}
    *chunks, last = client.chat.completions.create(**ask)
    assert (last.choices, last.usage.completion_tokens) == ([], 8)
    assert all(chunk.usage is None for chunk in chunks)


def test_models_are_listed_and_found(client):
    assert [model.id for model in client.models.list()] == ["tiny"]
    assert client.models.retrieve("tiny").owned_by == "octavo"


@pytest.mark.parametrize(
    ("extra", "field"),
    [
        ({"tools": [{"type": "function", "function": {"name": ""}}]}, "tools[0].function.name"),
        ({"tools": [WEATHER], "tool_choice": {"function": {"name": "x"}}}, "tool_choice.function.name"),
        ({"response_format": {"type": "xml"}}, "response_format.type"),
        ({"extra_body": {"structured_outputs": {"regex": "("}}}, "structured_outputs"),
        ({"extra_body": {"guided_grammar": "root ::= ["}}, "guided_grammar"),
    ],
)
def test_wrong_requests_name_their_field(client, extra, field):
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(**GREEDY, messages=USER, max_tokens=4, **extra)
    assert caught.value.param.startswith(field)


def test_what_this_model_cannot_do_is_told_as_such(client):
    with pytest.raises(openai.BadRequestError) as caught:
        client.embeddings.create(model="tiny", input="x")
    assert (caught.value.status_code, caught.value.code) == (400, "not_supported")
