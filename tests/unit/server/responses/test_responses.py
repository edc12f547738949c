"""The routes of the Responses API over a scripted engine."""

from __future__ import annotations

import pytest

from octavo.server.options import ServerOptions

pytestmark = pytest.mark.anyio
PATH = "/v1/responses"
TOOL = {"type": "function", "name": "look", "parameters": {"type": "object", "properties": {}}}


def text_of(response):
    return "".join(part["text"] for item in response["output"] for part in item.get("content", ()))


async def test_an_answer_has_the_shape_that_clients_expect(serve, tokenizer):
    server = await serve("It is Paris.")
    answer = await server.ask(PATH, {"model": "tiny-alias", "input": "hi", "metadata": {"a": "b"}, "user": "u"})
    assert (answer["object"], answer["status"], answer["model"]) == ("response", "completed", "tiny-alias")
    assert answer["id"].startswith("resp_")
    assert text_of(answer) == "It is Paris."
    assert answer["metadata"] == {"a": "b"}
    assert (answer["error"], answer["incomplete_details"], answer["previous_response_id"]) == (None, None, None)
    assert answer["text"]["format"] == {"type": "text"}
    assert answer["usage"]["input_tokens"] == len(tokenizer.encode_chat([{"role": "user", "content": "hi"}]))
    assert answer["usage"]["output_tokens"] == len(tokenizer.encode("It is Paris.")) + 1


async def test_a_stream_ends_with_what_a_plain_answer_is(serve):
    server = await serve("It is Paris.")
    body = {"input": "hi", "include": ["message.output_text.logprobs"], "top_logprobs": 2}
    plain = await server.ask(PATH, body)
    events = await server.events(PATH, body)
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    assert "".join(event["delta"] for event in events if event["type"] == "response.output_text.delta") == text_of(
        plain
    )
    streamed = events[-1]["response"]
    assert events[-1]["type"] == "response.completed"
    changing = ("id", "created_at", "completed_at", "output", "usage")
    assert {key: value for key, value in streamed.items() if key not in changing} == {
        key: value for key, value in plain.items() if key not in changing
    }
    (part,), (plain_part,) = (answer["output"][0]["content"] for answer in (streamed, plain))
    assert part == plain_part
    assert bytes(byte for entry in part["logprobs"] for byte in entry["bytes"]).decode() == "It is Paris."
    assert all(len(entry["top_logprobs"]) == 2 for entry in part["logprobs"])


async def test_previous_responses_are_what_the_model_sees_first(serve, tokenizer):
    server = await serve("yes")
    first = await server.ask(PATH, {"input": "one", "instructions": "Be brief."})
    second = await server.ask(PATH, {"input": "two", "previous_response_id": first["id"]})
    third = {"input": "three", "previous_response_id": second["id"], "instructions": "Be loud."}
    messages = [
        {"role": "system", "content": "Be loud."},
        {"role": "user", "content": "one"},
        {"role": "assistant", "content": "yes"},
        {"role": "user", "content": "two"},
        {"role": "assistant", "content": "yes"},
        {"role": "user", "content": "three"},
    ]
    count = len(tokenizer.encode_chat(messages))
    assert (await server.ask(PATH, third))["usage"]["input_tokens"] == count
    counted = await server.ask(f"{PATH}/input_tokens", third)
    assert counted == {"object": "response.input_tokens", "input_tokens": count}


async def test_a_stored_response_is_given_again_until_it_is_deleted(serve):
    server = await serve("yes")
    made = await server.ask(PATH, {"input": "hi"})
    place = f"{PATH}/{made['id']}"
    assert (await server.get(place)).json() == made
    events = await server.events(PATH, {"input": "hi"})
    assert (await server.get(f"{PATH}/{events[0]['response']['id']}")).json() == events[-1]["response"]
    deleted = await server.http.delete(place)
    assert deleted.json() == {"object": "response", "id": made["id"], "deleted": True}
    for response in (
        await server.get(place),
        await server.http.delete(place),
        await server.get(f"{place}/input_items"),
    ):
        assert (response.status_code, response.json()["error"]["code"]) == (404, "response_not_found")
    await server.refused(
        PATH, {"input": "x", "previous_response_id": made["id"]}, field="previous_response_id", status=404
    )


async def test_a_conversation_with_a_gap_is_refused(serve):
    server = await serve("yes")
    first = await server.ask(PATH, {"input": "one"})
    second = await server.ask(PATH, {"input": "two", "previous_response_id": first["id"]})
    await server.http.delete(f"{PATH}/{first['id']}")
    body = {"input": "three", "previous_response_id": second["id"]}
    message = await server.refused(PATH, body, field="previous_response_id", status=404)
    assert first["id"] in message


async def test_what_is_not_to_be_stored_is_not(serve):
    server = await serve("yes")
    made = await server.ask(PATH, {"input": "hi", "store": False})
    assert made["store"] is False
    assert (await server.get(f"{PATH}/{made['id']}")).status_code == 404


async def test_each_key_sees_its_own_responses_only(serve):
    server = await serve("yes", options=ServerOptions(api_keys=("a", "b")))
    mine, other = {"authorization": "Bearer a"}, {"authorization": "Bearer b"}
    made = await server.ask(PATH, {"input": "hi"}, headers=mine)
    place = f"{PATH}/{made['id']}"
    for ask in (server.get(place, headers=other), server.http.delete(place, headers=other)):
        assert (await ask).status_code == 404
    assert (await server.send(f"{place}/cancel", headers=other)).status_code == 404
    body = {"input": "x", "previous_response_id": made["id"]}
    assert (await server.send(PATH, body, headers=other)).status_code == 404
    assert (await server.send(PATH, body, headers=mine)).status_code == 200
    # The same key by the other header is the same owner.
    assert (await server.get(place, headers={"x-api-key": "a"})).json() == made


async def test_input_items_are_listed_in_pages(serve):
    server = await serve("yes")
    given = [{"role": "user", "content": f"m{number}"} for number in range(5)]
    place = f"{PATH}/{(await server.ask(PATH, {'input': given}))['id']}/input_items"
    listed = (await server.get(place)).json()
    said = [item["content"][0]["text"] for item in listed["data"]]
    assert said == ["m4", "m3", "m2", "m1", "m0"]
    assert (listed["object"], listed["has_more"]) == ("list", False)
    page = (await server.get(place, params={"order": "asc", "limit": 2})).json()
    assert [item["content"][0]["text"] for item in page["data"]] == ["m0", "m1"]
    assert (page["first_id"], page["last_id"], page["has_more"]) == (page["data"][0]["id"], page["data"][1]["id"], True)
    after = {"order": "asc", "limit": 9, "after": page["last_id"]}
    page = (await server.get(place, params=after)).json()
    assert [item["content"][0]["text"] for item in page["data"]] == ["m2", "m3", "m4"]
    assert not page["has_more"]
    for query in ({"limit": 0}, {"limit": 101}, {"limit": "x"}, {"order": "up"}, {"after": "nobody"}):
        assert (await server.get(place, params=query)).json()["error"]["param"] == next(iter(query))


async def test_truncation_drops_the_oldest_turns_and_keeps_the_system(serve, tokenizer):
    server = await serve("yes", max_model_len=128)
    given = [{"role": "system", "content": "Be brief."}]
    for number in range(12):
        given.append({"role": "user", "content": f"question number {number}"})
        given.append({"role": "assistant", "content": f"answer number {number}"})
    given.append({"role": "user", "content": "last"})
    body = {"input": given, "max_output_tokens": 16}
    await server.refused(PATH, body, field="input")
    answer = await server.ask(PATH, body | {"truncation": "auto"})
    used = answer["usage"]["input_tokens"]
    fitting = [given[:1] + given[start:] for start in range(1, len(given), 2)]
    sizes = [len(tokenizer.encode_chat(messages)) for messages in fitting]
    assert used == max(size for size in sizes if size <= 128 - 16)
    counted = await server.ask(f"{PATH}/input_tokens", {"input": given, "truncation": "auto"})
    assert counted["input_tokens"] == max(size for size in sizes if size <= 127)
    await server.refused(PATH, {"input": "word " * 500, "truncation": "auto"}, field="input")


async def test_an_answer_at_its_limit_is_incomplete_and_can_be_gone_on_from(serve):
    server = await serve([40] * 50)
    answer = await server.ask(PATH, {"input": "hi", "max_output_tokens": 4})
    assert (answer["status"], answer["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
    assert answer["usage"]["output_tokens"] == 4
    assert (await server.events(PATH, {"input": "hi", "max_output_tokens": 4}))[-1]["type"] == "response.incomplete"
    then = {"input": "go on", "previous_response_id": answer["id"], "max_output_tokens": 4}
    assert (await server.ask(PATH, then))["previous_response_id"] == answer["id"]


async def test_an_engine_failure_in_the_middle_ends_the_stream_with_what_failed(serve):
    server = await serve([40] * 50, fail_at_step=3)
    events = await server.events(PATH, {"input": "hi", "max_output_tokens": 40})
    assert events[0]["type"] == "response.created"
    assert events[-1]["type"] == "response.failed"
    assert events[-1]["response"]["error"]["message"]


async def test_a_store_that_fails_leaves_the_server_alive(serve):
    server = await serve("yes")
    server.service.response_store._connection.execute("PRAGMA query_only = ON")
    response = await server.send(PATH, {"input": "hi"})
    assert (response.status_code, response.json()["error"]["code"]) == (500, "response_store_failed")
    events = await server.events(PATH, {"input": "hi"})
    assert events[-1]["response"]["error"]["code"] == "response_store_failed"
    assert (await server.send(PATH, {"input": "hi", "background": True})).status_code == 500
    assert text_of(await server.ask(PATH, {"input": "hi", "store": False})) == "yes"


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({}, "input"),
        ({"input": []}, "input"),
        ({"input": 5}, "input"),
        ({"input": [5]}, "input[0]"),
        ({"input": [{"role": "system", "content": "only"}]}, "input"),
        ({"input": "x", "max_output_tokens": 0}, "max_output_tokens"),
        ({"input": "x", "max_output_tokens": 9999}, "max_output_tokens"),
        ({"input": "x", "temperature": -1}, "temperature"),
        ({"input": "x", "top_logprobs": 1000}, "top_logprobs"),
        ({"input": "x", "include": ["x.y"]}, "include[0]"),
        ({"input": "x", "background": True, "store": False}, "background"),
        ({"input": "x", "metadata": {"a": 5}}, "metadata[...]"),
        ({"input": "x", "metadata": {"k" * 65: "v"}}, "metadata"),
        ({"input": "x", "metadata": {str(number): "v" for number in range(17)}}, "metadata"),
        ({"input": "x", "max_tool_calls": 0}, "max_tool_calls"),
        ({"input": "x", "truncation": "some"}, "truncation"),
        ({"input": "x", "reasoning": {"effort": "extreme"}}, "reasoning.effort"),
        ({"input": "x", "text": {"format": {"type": "xml"}}}, "text.format.type"),
        ({"input": "x", "text": {"format": {"type": "json_schema", "name": "n"}}}, "text.format.schema"),
        ({"input": "x", "conversation": "conv_1"}, "conversation"),
        ({"input": "x", "prompt": {"id": "p"}}, "prompt"),
        ({"input": "x", "tools": [5]}, "tools[0]"),
        ({"input": "x", "tools": [{"name": "f"}]}, "tools[0].type"),
        ({"input": "x", "tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"input": "x", "tools": [{"type": "function"}]}, "tools[0].name"),
        ({"input": "x", "tools": [{"type": "function", "name": "a b"}]}, "tools[0].name"),
        ({"input": "x", "tools": [TOOL, TOOL]}, "tools[1].name"),
        ({"input": "x", "tool_choice": "required"}, "tool_choice"),
        ({"input": "x", "tool_choice": "perhaps"}, "tool_choice"),
        ({"input": "x", "tools": [TOOL], "tool_choice": {"type": "function", "name": "g"}}, "tool_choice.name"),
        ({"input": "x", "tools": [TOOL], "tool_choice": {"type": "web_search"}}, "tool_choice.type"),
        (
            {"input": "x", "tools": [TOOL], "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [{}]}},
            "tool_choice.tools[0].name",
        ),
        ({"input": "x", "stream": "yes"}, "stream"),
        ({"input": "x", "priority": 2**40}, "priority"),
        (
            {"input": "x", "structured_outputs": {"regex": "a"}, "text": {"format": {"type": "json_object"}}},
            "text.format",
        ),
    ],
)
async def test_wrong_bodies_are_refused_by_the_name_of_the_field(serve, body, field):
    server = await serve()
    await server.refused(PATH, body, field=field)


async def test_an_unknown_response_or_previous_one_is_not_found(serve):
    server = await serve()
    for response in (
        await server.get(f"{PATH}/resp_x"),
        await server.get(f"{PATH}/resp_x?stream=true"),
        await server.send(f"{PATH}/resp_x/cancel"),
    ):
        assert (response.status_code, response.json()["error"]["param"]) == (404, "id")
    body = {"input": "x", "previous_response_id": "resp_x"}
    await server.refused(PATH, body, field="previous_response_id", status=404)
    await server.refused(f"{PATH}/input_tokens", body, field="previous_response_id", status=404)
