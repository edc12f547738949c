"""`octavo serve` of a tiny random model, driven by OpenAI's own client through the Responses API."""

from __future__ import annotations

import json
import signal
import time

import pytest

openai = pytest.importorskip("openai")
pydantic = pytest.importorskip("pydantic")

ASK = {"model": "tiny", "input": "How many pages?", "max_output_tokens": 24, "temperature": 0.0}
SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string", "enum": ["Oslo", "Rome"]}},
    "required": ["city"],
    "additionalProperties": False,
}
TOOL = {"type": "function", "name": "weather", "parameters": SCHEMA, "strict": True}


def as_client(url, key="sesame"):
    return openai.OpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0)


@pytest.fixture
def client(roomy_server):
    with as_client(roomy_server.url) as client:
        yield client


def test_plain_answers_and_the_two_kinds_of_streams_agree(client):
    plain = client.responses.create(**ASK)
    assert plain.output_text
    assert plain.status in ("completed", "incomplete")
    events = list(client.responses.create(**ASK, stream=True))
    assert "".join(e.delta for e in events if e.type == "response.output_text.delta") == plain.output_text
    assert events[-1].response.output_text == plain.output_text
    assert [event.sequence_number for event in events] == list(range(len(events)))
    with client.responses.stream(**ASK) as stream:
        snapshots = [event.snapshot for event in stream if event.type == "response.output_text.delta"]
    assert snapshots[-1] == plain.output_text
    assert plain.usage.total_tokens == plain.usage.input_tokens + plain.usage.output_tokens
    count = client.responses.input_tokens.count(model="tiny", input=ASK["input"])
    assert count.input_tokens == plain.usage.input_tokens


def test_stored_responses_are_gone_on_from_listed_and_deleted(client):
    first = client.responses.create(**ASK)
    then = client.responses.create(**ASK | {"input": "And then?"}, previous_response_id=first.id)
    by_hand = [{"role": "user", "content": ASK["input"]}, *first.output, {"role": "user", "content": "And then?"}]
    again = client.responses.create(**ASK | {"input": by_hand}, store=False)
    assert then.usage.input_tokens == again.usage.input_tokens > first.usage.input_tokens
    assert then.output_text == again.output_text
    assert client.responses.retrieve(first.id).output_text == first.output_text
    items = list(client.responses.input_items.list(again.id if again.store else then.id))
    assert items[0].content[0].text == "And then?"
    client.responses.delete(first.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(first.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(again.id)


def test_input_items_are_paged_by_the_client(client):
    given = [{"role": "user", "content": f"m{number}"} for number in range(7)]
    made = client.responses.create(**ASK | {"input": given})
    listed = list(client.responses.input_items.list(made.id, limit=3, order="asc"))
    assert [item.content[0].text for item in listed] == [item["content"] for item in given]


@pytest.mark.parametrize("choice", ["required", {"type": "function", "name": "weather"}])
def test_a_tool_that_must_be_called_is_called_with_what_its_schema_wants(client, choice):
    how = ASK | {"tools": [TOOL], "tool_choice": choice, "parallel_tool_calls": False, "max_output_tokens": 600}
    how |= {"temperature": 1.5, "extra_body": {"seed": 3}}  # greedy, a random model may never leave white space
    plain = client.responses.create(**how)
    (call,) = plain.output
    assert (call.type, call.name, plain.status) == ("function_call", "weather", "completed")
    assert set(json.loads(call.arguments)) == {"city"}
    with client.responses.stream(**how) as stream:
        final = stream.get_final_response()
    assert final.output[0].arguments == call.arguments
    assert final.output[0].parsed_arguments == json.loads(call.arguments)
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "5 degrees"}
    then = client.responses.create(**ASK | {"input": [result]}, previous_response_id=plain.id, tools=[TOOL])
    assert then.usage.input_tokens > plain.usage.input_tokens


def test_an_answer_may_be_given_a_form(client):
    class Page(pydantic.BaseModel):
        bound: bool

    # Sampled: a random model that is greedy may go on with white space for ever.
    sampled = ASK | {"max_output_tokens": 600, "temperature": 1.5}
    parsed = client.responses.parse(**sampled, text_format=Page)
    assert isinstance(parsed.output_parsed, Page)
    with client.responses.stream(**sampled, text_format=Page) as stream:
        assert isinstance(stream.get_final_response().output_parsed, Page)


def test_logprobs_are_those_of_the_text(client):
    how = ASK | {"include": ["message.output_text.logprobs"], "top_logprobs": 2}
    (part,) = client.responses.create(**how).output[0].content
    assert bytes(byte for entry in part.logprobs for byte in entry.bytes).decode(errors="replace") == part.text
    assert all(len(entry.top_logprobs) == 2 for entry in part.logprobs)


def test_a_background_response_is_waited_for_streamed_again_and_cancelled(client):
    made = client.responses.create(**ASK, background=True)
    assert made.status == "queued"
    deadline = time.monotonic() + 120
    while (found := client.responses.retrieve(made.id)).status in ("queued", "in_progress"):
        assert time.monotonic() < deadline
        time.sleep(0.1)
    assert found.output_text == client.responses.create(**ASK).output_text
    events = list(client.responses.retrieve(made.id, stream=True))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    rest = list(client.responses.retrieve(made.id, stream=True, starting_after=3))
    assert [event.sequence_number for event in rest] == [event.sequence_number for event in events[4:]]
    long = client.responses.create(
        **ASK | {"max_output_tokens": 1500}, background=True, extra_body={"ignore_eos": True}
    )
    assert client.responses.cancel(long.id).status == "cancelled"
    with pytest.raises(openai.BadRequestError):
        client.responses.cancel(client.responses.create(**ASK).id)


def test_errors_arrive_as_the_clients_own_exceptions(client, roomy_server):
    with pytest.raises(openai.BadRequestError) as caught:
        client.responses.create(**ASK | {"temperature": -1})
    assert caught.value.param == "temperature"
    with pytest.raises(openai.NotFoundError) as missing:
        client.responses.create(**ASK, previous_response_id="resp_x")
    assert missing.value.code == "response_not_found"
    with pytest.raises(openai.BadRequestError, match="web_search"):
        client.responses.create(**ASK, tools=[{"type": "web_search"}])
    with pytest.raises(openai.BadRequestError), client.responses.stream(**ASK | {"top_p": 7}) as stream:
        stream.until_done()
    with as_client(roomy_server.url, key="wrong") as stranger, pytest.raises(openai.AuthenticationError):
        stranger.responses.create(**ASK)


def test_responses_survive_a_restart_of_the_server(roomy_server, tmp_path):
    command = [*roomy_server.process.args, "--response-store", str(tmp_path / "responses.db")]
    found = []
    for number in range(2):
        server = type(roomy_server)(command, tmp_path / f"{number}.log")
        url = server.ready.split("/v1")[0].rpartition(" ")[2]
        try:
            with as_client(url) as client:
                if number == 0:
                    made = client.responses.create(**ASK)
                found.append(client.responses.retrieve(made.id).output_text)
                assert client.responses.create(**ASK, previous_response_id=made.id).output_text
            server.process.send_signal(signal.SIGTERM)
            assert server.wait(60) == 0
        finally:
            server.stop()
    assert found == [made.output_text] * 2
