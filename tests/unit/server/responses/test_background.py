"""Responses that run without the client that asked for them."""

from __future__ import annotations

import asyncio
import json

import pytest

from octavo.server.options import ServerOptions

pytestmark = pytest.mark.anyio
PATH = "/v1/responses"
LONG = {"input": "hi", "background": True, "max_output_tokens": 150}


async def ended(server, id, **how):
    """The response when it is over."""
    for _ in range(2000):
        response = (await server.get(f"{PATH}/{id}", **how)).json()
        if response["status"] not in ("queued", "in_progress"):
            return response
        await asyncio.sleep(0.01)
    raise AssertionError("it does not end")


async def begun(server, id):
    while server.service.background[id].response.status == "queued":
        await asyncio.sleep(0.002)


async def forgotten(server):
    """Wait until no run is kept any more: it is stored a moment before."""
    async with asyncio.timeout(5):
        while server.service.background:
            await asyncio.sleep(0.002)


async def test_it_is_queued_runs_and_is_completed_without_its_client(serve):
    server = await serve([40] * 150, delay=0.01)
    made = await server.ask(PATH, LONG | {"max_output_tokens": 149})
    assert (made["status"], made["background"], made["output"]) == ("queued", True, [])
    await begun(server, made["id"])
    assert (await server.get(f"{PATH}/{made['id']}")).json()["status"] == "in_progress"
    body = {"input": "x", "previous_response_id": made["id"], "max_output_tokens": 2}
    response = await server.send(PATH, body)
    assert (response.status_code, response.json()["error"]["param"]) == (400, "previous_response_id")
    done = await ended(server, made["id"])
    assert (done["status"], done["usage"]["output_tokens"]) == ("incomplete", 149)
    await forgotten(server)
    assert (await server.ask(PATH, body))["status"] == "incomplete"


async def test_its_events_can_be_followed_from_any_number_while_it_runs_and_later(serve):
    server = await serve([40] * 150, delay=0.002)
    made = await server.ask(PATH, LONG)
    place = f"{PATH}/{made['id']}?stream=true"
    live = await server.replay(place)
    assert [event["sequence_number"] for event in live] == list(range(len(live)))
    assert [event["type"].removeprefix("response.") for event in live[:3]] == ["created", "queued", "in_progress"]
    assert live[-1]["type"] == "response.incomplete"
    assert await server.replay(place) == live
    assert await server.replay(f"{place}&starting_after=5") == live[6:]
    assert await server.replay(f"{place}&starting_after={len(live)}") == []
    for query in ("starting_after=x", "starting_after=-5", f"starting_after={'9' * 5000}"):
        assert (await server.get(f"{place}&{query}")).json()["error"]["param"] == "starting_after"


async def test_a_stream_may_be_left_and_taken_up_again(serve):
    server = await serve([40] * 150, delay=0.002)
    events = []
    async with server.http.stream("POST", PATH, json=LONG | {"stream": True}) as response:
        async for line in response.aiter_lines():
            if line.startswith("data: "):
                events.append(json.loads(line.removeprefix("data: ")))
            if len(events) == 6:
                break
    id = events[0]["response"]["id"]
    rest = await server.replay(f"{PATH}/{id}?stream=true&starting_after=5")
    whole = events[:6] + rest
    assert [event["sequence_number"] for event in whole] == list(range(len(whole)))
    assert whole[-1]["response"]["usage"]["output_tokens"] == 150


async def test_it_can_be_cancelled_and_then_stays_so(serve):
    server = await serve([40] * 150, delay=0.005)
    made = await server.ask(PATH, LONG)
    await begun(server, made["id"])
    follower = asyncio.create_task(server.replay(f"{PATH}/{made['id']}?stream=true"))
    await asyncio.sleep(0.05)
    cancelled = (await server.send(f"{PATH}/{made['id']}/cancel")).json()
    assert (cancelled["status"], cancelled["error"]) == ("cancelled", None)
    assert (await follower)[-1]["type"] == "response.cancelled"
    assert (await server.get(f"{PATH}/{made['id']}")).json() == cancelled
    assert (await server.send(f"{PATH}/{made['id']}/cancel")).json() == cancelled
    await server.refused(PATH, {"input": "x", "previous_response_id": made["id"]}, field="previous_response_id")
    await server.settled()


async def test_only_background_responses_are_cancelled_or_streamed_again(serve):
    server = await serve("yes")
    id = (await server.ask(PATH, {"input": "hi"}))["id"]
    assert (await server.send(f"{PATH}/{id}/cancel")).status_code == 400
    assert (await server.get(f"{PATH}/{id}?stream=true")).json()["error"]["param"] == "stream"


async def test_deleting_one_that_runs_ends_it(serve):
    server = await serve([40] * 150, delay=0.005)
    made = await server.ask(PATH, LONG)
    assert (await server.http.delete(f"{PATH}/{made['id']}")).status_code == 200
    assert (await server.get(f"{PATH}/{made['id']}")).status_code == 404
    await server.settled()


async def test_an_input_that_the_engine_refuses_makes_it_fail(serve):
    server = await serve(max_model_len=64)
    made = await server.ask(PATH, {"input": "word " * 100, "background": True})
    failed = await ended(server, made["id"])
    assert (failed["status"], failed["error"]["code"]) == ("failed", "context_length_exceeded")


async def test_an_engine_failure_makes_it_fail(serve):
    server = await serve([40] * 50, fail_at_step=3)
    made = await server.ask(PATH, LONG | {"max_output_tokens": 40})
    assert (await ended(server, made["id"]))["status"] == "failed"


async def test_a_full_queue_or_a_shutdown_is_told_at_once(serve):
    server = await serve("yes")
    server.service.draining = True
    assert (await server.send(PATH, LONG)).status_code == 503
    server.service.draining = False
    await forgotten(server)


async def test_it_is_the_matter_of_its_key(serve):
    server = await serve([40] * 150, delay=0.005, options=ServerOptions(api_keys=("a", "b")))
    mine, other = {"authorization": "Bearer a"}, {"authorization": "Bearer b"}
    id = (await server.ask(PATH, LONG, headers=mine))["id"]
    assert (await server.get(f"{PATH}/{id}", headers=other)).status_code == 404
    assert (await server.send(f"{PATH}/{id}/cancel", headers=other)).status_code == 404
    assert (await server.send(f"{PATH}/{id}/cancel", headers=mine)).json()["status"] == "cancelled"


async def test_the_limits_of_a_key_count_it_until_it_is_over(serve, folder):
    keys = folder / "keys.json"
    keys.write_text(json.dumps([{"name": "a", "key": "ka", "max_concurrent": 1}]))
    server = await serve([40] * 150, delay=0.005, options=ServerOptions(api_keys_file=str(keys)))
    mine = {"authorization": "Bearer ka"}
    id = (await server.ask(PATH, LONG, headers=mine))["id"]
    assert (await server.send(PATH, {"input": "hi"}, headers=mine)).status_code == 429
    await server.send(f"{PATH}/{id}/cancel", headers=mine)
    assert (await server.send(PATH, {"input": "hi", "max_output_tokens": 2}, headers=mine)).status_code == 200


async def test_after_a_restart_the_finished_are_there_and_the_others_failed(serve, folder):
    options = ServerOptions(response_store=str(folder / "responses.db"))
    server = await serve([40] * 150, delay=0.005, options=options)
    done = await server.ask(PATH, {"input": "hi", "max_output_tokens": 2})
    made = await server.ask(PATH, LONG)
    await begun(server, made["id"])
    # As a crash would: nothing is told to anybody.
    run = server.service.background[made["id"]]
    run._break_off = lambda save, error: asyncio.sleep(0)
    await run.stop()
    server.service.response_store.close()
    again = await serve("yes", options=options)
    assert (await again.get(f"{PATH}/{done['id']}")).json() == done
    failed = (await again.get(f"{PATH}/{made['id']}")).json()
    assert (failed["status"], failed["error"]["code"]) == ("failed", "aborted")
    assert (await again.send(f"{PATH}/{made['id']}/cancel")).json() == failed
    assert (await again.ask(PATH, {"input": "x", "previous_response_id": done["id"]}))["status"] == "completed"


async def test_a_server_that_ends_lets_it_fail_and_remembers(serve, folder):
    options = ServerOptions(response_store=str(folder / "responses.db"))
    server = await serve([40] * 150, delay=0.005, options=options)
    made = await server.ask(PATH, LONG)
    await begun(server, made["id"])
    await server.service.close()
    again = await serve("yes", options=options)
    failed = (await again.get(f"{PATH}/{made['id']}")).json()
    assert (failed["status"], failed["error"]["code"]) == ("failed", "shutting_down")
    assert (await again.replay(f"{PATH}/{made['id']}?stream=true"))[-1]["type"] == "response.failed"
