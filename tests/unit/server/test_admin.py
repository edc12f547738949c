"""The operator's routes: there only if asked for, for admins only, and they do what they say."""

from __future__ import annotations

import asyncio
import json

import pytest

from octavo.server.admin import ROUTES
from octavo.server.options import ServerOptions

pytestmark = pytest.mark.anyio
PATH = "/v1/completions"
BODY = {"prompt": [20, 21, 22], "max_tokens": 4}
ADMIN = ServerOptions(enable_admin=True)


async def running(server, **extra):
    task = asyncio.create_task(server.send(PATH, BODY | extra))
    while not server.service.client.num_live:
        await asyncio.sleep(0.005)
    return task


async def test_the_routes_are_there_only_if_asked_for(serve):
    server = await serve()
    for method, path in ROUTES:
        assert (await server.http.request(method, path)).status_code == 404
    assert (await server.get("/load")).json() == {"server_load": 0}


async def test_they_take_an_admins_key_where_keys_are_asked_for(serve, tmp_path):
    file = tmp_path / "keys.json"
    file.write_text(json.dumps([{"name": "a", "key": "ka", "admin": True}, {"name": "b", "key": "kb"}]))
    server = await serve(options=ServerOptions(enable_admin=True, api_keys_file=str(file), api_keys=("own",)))
    for key, status in (("ka", 200), ("own", 200), ("kb", 403), ("kc", 401)):
        response = await server.get("/is_sleeping", headers={"authorization": f"Bearer {key}"})
        assert response.status_code == status
    refused = await server.http.post("/sleep", headers={"x-api-key": "kb"})
    assert (refused.status_code, refused.json()["error"]["code"]) == (403, "admin_only")


async def test_pause_holds_requests_and_resume_serves_them(serve):
    server = await serve(options=ADMIN)
    assert (await server.send("/pause")).json() == {"status": "paused"}
    assert (await server.get("/is_paused")).json() == {"is_paused": True}
    task = await running(server)
    await asyncio.sleep(0.05)
    assert not task.done()
    assert (await server.get("/load")).json() == {"server_load": 1}
    assert (await server.send("/resume")).json() == {"status": "resumed"}
    assert (await task).status_code == 200
    assert (await server.get("/is_paused")).json() == {"is_paused": False}


async def test_requests_are_aborted_by_id_or_all_of_them(serve):
    server = await serve("a long story of pages", delay=0.02, options=ADMIN)
    tasks = [
        asyncio.create_task(server.send(PATH, BODY | {"max_tokens": 50}, headers={"x-request-id": f"r-{i}"}))
        for i in range(3)
    ]
    while server.service.client.num_live < 3:
        await asyncio.sleep(0.005)
    assert (await server.send("/abort_requests", {"request_ids": ["r-1", "other"]})).json() == {"num_aborted": 1}
    assert (await tasks[1]).json()["choices"][0]["finish_reason"] == "abort"
    assert (await server.send("/abort_requests")).json() == {"num_aborted": 2}
    assert [(await task).json()["choices"][0]["finish_reason"] for task in tasks] == ["abort"] * 3


async def test_the_prefix_cache_can_be_emptied(serve):
    server = await serve(options=ADMIN)
    body = {"prompt": list(range(20, 60)), "max_tokens": 1}

    async def cached() -> int:
        usage = (await server.ask(PATH, body))["usage"]
        return (usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0)

    assert [await cached(), await cached()] == [0, 32]
    assert (await server.send("/reset_prefix_cache")).json() == {"status": "reset"}
    assert await cached() == 0


async def test_an_engine_that_cannot_sleep_says_so(serve):
    server = await serve(options=ADMIN)
    response = await server.send("/sleep")
    assert response.status_code == 500
    assert "cannot sleep" in response.json()["error"]["message"]
    await server.ask(PATH, BODY)


@pytest.mark.parametrize(
    ("path", "field"),
    [
        ("/sleep?level=0", "level"),
        ("/sleep?level=x", "level"),
        ("/sleep?mode=keep", "mode"),
        ("/pause?mode=later", "mode"),
        ("/pause?clear_cache=1", "clear_cache"),
        ("/wake_up?tags=weights&tags=soul", "tags"),
    ],
)
async def test_wrong_parameters_are_named(serve, path, field):
    server = await serve(options=ADMIN)
    await server.refused(path, field=field)


async def test_a_wrong_body_is_refused(serve):
    server = await serve(options=ADMIN)
    for raw in ("[]", "{", '{"request_ids": 3}'):
        response = await server.send("/abort_requests", raw=raw)
        assert response.status_code == 400


async def test_the_server_tells_its_configuration_without_keys(serve):
    server = await serve(options=ServerOptions(enable_admin=True, api_keys=("sesame",), ssl_keyfile_password="secret"))
    response = await server.get("/server_info", headers={"authorization": "Bearer sesame"})
    info = response.json()
    assert info["model"]["max_model_len"] == 256
    assert info["server"]["port"] == 8000
    assert info["stats"]["running"] == 0
    assert "sesame" not in response.text
    assert "secret" not in response.text


async def test_reload_reads_the_keys_again_and_tells_what_is_wrong(serve, tmp_path):
    file = tmp_path / "keys.yaml"
    file.write_text("- {name: a, key: old, admin: true}")
    server = await serve(options=ServerOptions(enable_admin=True, api_keys_file=str(file)))
    file.write_text("- {name: a}")
    response = await server.send("/reload", headers={"authorization": "Bearer old"})
    assert response.status_code == 400
    assert "needs one of" in response.json()["error"]["message"]
    file.write_text("- {name: a, key: new}")
    assert (await server.send("/reload", headers={"authorization": "Bearer old"})).status_code == 200
    assert (await server.get("/version", headers={"authorization": "Bearer old"})).status_code == 401
    assert (await server.get("/version", headers={"authorization": "Bearer new"})).status_code == 200
