"""`octavo serve` of a tiny random model, driven by Anthropic's own client."""

from __future__ import annotations

import json

import pytest

anthropic = pytest.importorskip("anthropic")
pydantic = pytest.importorskip("pydantic")

USER = [{"role": "user", "content": "How many pages?"}]
GREEDY = {"extra_body": {"temperature": 0.0}}
"""Not every version of the client has the argument."""
ASK = {"model": "tiny", "max_tokens": 24, "messages": USER, **GREEDY}
SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string", "enum": ["Oslo", "Rome"]}},
    "required": ["city"],
    "additionalProperties": False,
}
TOOL = {"name": "weather", "description": "The weather of a city.", "input_schema": SCHEMA}


def as_client(server, **how):
    return anthropic.Anthropic(base_url=server.url, max_retries=0, **({"api_key": "sesame"} | how))


@pytest.fixture
def client(roomy_server):
    with as_client(roomy_server) as client:
        yield client


def test_plain_answers_and_the_two_kinds_of_streams_agree(client):
    plain = client.messages.create(**ASK)
    assert (plain.type, plain.role, plain.model, plain.content[0].type) == ("message", "assistant", "tiny", "text")
    assert plain.usage.output_tokens > 0
    events = list(client.messages.create(**ASK, stream=True))
    said = [event.delta.text for event in events if event.type == "content_block_delta"]
    assert "".join(said) == plain.content[0].text
    with client.messages.stream(**ASK) as stream:
        texts = list(stream.text_stream)
        final = stream.get_final_message()
        assert stream.request_id
    assert "".join(texts) == final.content[0].text == plain.content[0].text
    assert final.stop_reason == plain.stop_reason
    assert final.usage.output_tokens == plain.usage.output_tokens
    prompt = client.messages.count_tokens(model="tiny", messages=USER).input_tokens
    for usage in (plain.usage, final.usage):
        assert usage.input_tokens + usage.cache_read_input_tokens == prompt
        assert usage.input_tokens > 0


def test_stop_sequences_and_prefilled_turns(client):
    whole = client.messages.create(**ASK).content[0].text
    stop = whole[3:5]
    cut = client.messages.create(**ASK, stop_sequences=[stop])
    assert (cut.stop_reason, cut.stop_sequence) == ("stop_sequence", stop)
    assert cut.content[0].text == whole[: whole.index(stop)]
    go_on = [*USER, {"role": "assistant", "content": whole[:4]}]
    assert client.messages.create(**ASK | {"messages": go_on}).content[0].text


@pytest.mark.parametrize("choice", [{"type": "any"}, {"type": "tool", "name": "weather"}])
def test_a_tool_that_must_be_called_is_called_with_what_its_schema_wants(client, choice):
    how = ASK | {"tools": [TOOL], "tool_choice": choice | {"disable_parallel_tool_use": True}, "max_tokens": 600}
    plain = client.messages.create(**how)
    (call,) = plain.content
    assert (call.type, call.name, plain.stop_reason) == ("tool_use", "weather", "tool_use")
    assert set(call.input) == {"city"}
    with client.messages.stream(**how) as stream:
        snapshots = [event.snapshot for event in stream if event.type == "input_json"]
        final = stream.get_final_message()
    assert final.stop_reason == "tool_use"
    assert final.content[0].input == call.input == snapshots[-1]
    result = {"type": "tool_result", "tool_use_id": call.id, "content": [{"type": "text", "text": "5 degrees"}]}
    turns = [*USER, {"role": "assistant", "content": plain.content}, {"role": "user", "content": [result]}]
    assert client.messages.create(**how | {"messages": turns, "tool_choice": {"type": "auto"}}).usage.output_tokens > 0


def test_an_answer_may_be_given_a_form(client):
    class Page(pydantic.BaseModel):
        bound: bool

    # Sampled: a random model that is greedy may go on with white space for ever.
    sampled = ASK | {"max_tokens": 600, "extra_body": {"temperature": 1.5}}
    parsed = client.messages.parse(**sampled, output_format=Page)
    assert isinstance(parsed.parsed_output, Page)
    form = {"format": {"type": "json_schema", "schema": SCHEMA}}
    plain = client.messages.create(**sampled, output_config=form)
    assert set(json.loads(plain.content[0].text)) == {"city"}


def test_thinking_is_taken_by_a_model_that_cannot(client):
    how = ASK | {"max_tokens": 30}
    for thinking in ({"type": "disabled"}, {"type": "adaptive"}):
        assert client.messages.create(**how, thinking=thinking).content[0].type == "text"


def test_beta_clients_are_served_too(client):
    answer = client.beta.messages.create(**ASK, betas=["context-management-2025-06-27"])
    assert answer.content[0].text == client.messages.create(**ASK).content[0].text


def test_errors_arrive_as_the_clients_own_exceptions(client, roomy_server):
    with pytest.raises(anthropic.BadRequestError, match="temperature") as caught:
        client.messages.create(**ASK | {"extra_body": {"temperature": -1}})
    assert caught.value.body["error"]["type"] == "invalid_request_error"
    assert caught.value.request_id == caught.value.body["request_id"]
    with pytest.raises(anthropic.NotFoundError, match="claude-9"):
        client.messages.create(**ASK | {"model": "claude-9"})
    image = {"type": "image", "source": {"type": "url", "url": "https://example.org/x.png"}}
    with pytest.raises(anthropic.BadRequestError, match="takes no images"):
        client.messages.create(**ASK | {"messages": [{"role": "user", "content": [image]}]})
    with (
        pytest.raises(anthropic.BadRequestError),
        client.messages.stream(**ASK | {"extra_body": {"top_p": 7}}) as stream,
    ):
        stream.until_done()
    for how in ({"api_key": "wrong"}, {"api_key": None, "auth_token": "wrong"}):
        with as_client(roomy_server, **how) as stranger, pytest.raises(anthropic.AuthenticationError):
            stranger.messages.create(**ASK)
    with as_client(roomy_server, api_key=None, auth_token="sesame") as friend:
        assert friend.messages.count_tokens(model="tiny", messages=USER).input_tokens > 0
    with pytest.raises(anthropic.NotFoundError):
        client.messages.batches.list()
