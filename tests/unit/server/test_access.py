"""Keys of a file: who gets in, and each limit with its status, headers and error shape."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from octavo.errors import ConfigError
from octavo.server.access import Bucket, Key, KeyRing, Rules, digest_of
from octavo.server.errors import ApiError
from octavo.server.options import ServerOptions

pytestmark = pytest.mark.anyio
PATH, CHAT = "/v1/completions", "/v1/chat/completions"
BODY = {"prompt": [20, 21, 22], "max_tokens": 4}


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def keys_file(folder: Path, text: str, name: str = "keys.yaml") -> Path:
    path = folder / name
    path.write_text(text)
    return path


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


async def server_with(serve, folder: Path, *entries: dict, script: str = "yes", delay: float = 0.0, **options):
    file = keys_file(folder, json.dumps([{"name": "a", "key": "ka"} | entry for entry in entries]))
    return await serve(script, delay=delay, options=ServerOptions(api_keys_file=str(file), **options))


def test_a_bucket_starts_full_refills_and_may_be_overdrawn() -> None:
    clock = Clock()
    bucket = Bucket(60, clock=clock)
    assert bucket.level == 60
    bucket.take(90)
    assert bucket.wait(1) == 31
    clock.now = 31.0
    assert bucket.level == 1
    clock.now = 1000.0
    assert bucket.level == 60


def test_a_key_lets_in_what_its_limits_allow() -> None:
    clock = Clock()
    key = Key(Rules(name="a", key="k", requests_per_minute=2, tokens_per_minute=100, max_concurrent=1), clock=clock)
    key.enter()
    with pytest.raises(ApiError, match="1 requests at a time"):
        key.enter()
    key.leave()
    key.enter()
    key.leave()
    with pytest.raises(ApiError, match="2 requests a minute") as refused:
        key.enter()
    assert refused.value.headers["retry-after"] == "30"
    clock.now = 30.0
    key.enter()
    key.use_tokens(200)
    key.leave()
    clock.now = 60.0
    with pytest.raises(ApiError, match="100 tokens a minute") as refused:
        key.enter()
    assert refused.value.headers["retry-after"] == "31"
    assert key.headers()["x-ratelimit-remaining-tokens"] == "0"


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("keys.yaml", "- {name: a, key: ka}\n- name: b\n  sha256: {}\n"),
        ("keys.yml", "keys:\n- {name: a, key: ka}\n- name: b\n  sha256: {}\n"),
        ("keys.json", '[{"name": "a", "key": "ka"}, {"name": "b", "sha256": "{}"}]'),
        ("keys.jsonl", '{"name": "a", "key": "ka"}\n\n{"name": "b", "sha256": "{}"}\n'),
    ],
)
def test_keys_are_read_from_yaml_json_and_json_lines(tmp_path, name, text) -> None:
    ring = KeyRing(("own",), file=keys_file(tmp_path, text.replace("{}", digest_of("kb").upper()), name))
    found = {secret: ring.find(secret) for secret in (b"ka", b"kb", b"own", b"kc", b"", b"\xff")}
    assert {secret: key and key.name for secret, key in found.items()} == {
        b"ka": "a", b"kb": "b", b"own": "api-key-1", b"kc": None, b"": None, b"\xff": None,
    }  # fmt: skip
    assert found[b"own"].rules.admin
    assert not found[b"ka"].rules.admin


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("- {name: a, key: sesame, key2: x}", "unknown field `key2`"),
        ("- {name: a}", "needs one of"),
        ("- {name: a, key: sesame, sha256: abc}", "needs one of"),
        ("- {name: a, sha256: abc}", "64 hexadecimal digits"),
        ("- {name: '', key: sesame}", "name must not be empty"),
        ("- {name: a, key: ''}", "without space"),
        ("- {name: a, key: sesame, requests_per_minute: 0}", "at least 1"),
        ("- {name: a, key: sesame, max_concurrent: many}", "max_concurrent"),
        ("- {name: a, key: sesame}\n- {name: a, key: other}", "the name of 'a' is there twice"),
        ("- {name: a, key: sesame}\n- {name: b, key: sesame}", "the key of 'b' is there twice"),
        ("[]", "has no keys"),
        ("", "expected `array`"),
        ("- {name: [", "is no YAML (line 1)"),
    ],
)
def test_a_wrong_file_is_refused_without_showing_a_key(tmp_path, text, said) -> None:
    with pytest.raises(ConfigError) as refused:
        KeyRing(file=keys_file(tmp_path, text))
    assert said.lower() in str(refused.value).lower()
    assert "keys.yaml" in str(refused.value)
    assert "sesame" not in str(refused.value)


def test_a_missing_file_is_refused(tmp_path) -> None:
    with pytest.raises(ConfigError, match=r"nothing\.yaml"):
        KeyRing(file=tmp_path / "nothing.yaml")


def test_reading_again_keeps_what_was_used_and_a_wrong_file_changes_nothing(tmp_path) -> None:
    file = keys_file(tmp_path, "- {name: a, key: ka, requests_per_minute: 1}")
    ring = KeyRing(file=file)
    ring.find(b"ka").enter()
    file.write_text("- {name: a, key: new, requests_per_minute: 1, admin: true}")
    ring.reload()
    assert ring.find(b"ka") is None
    key = ring.find(b"new")
    assert (key.num_live, key.rules.admin) == (1, True)
    with pytest.raises(ApiError):
        key.enter()
    file.write_text("- {name: a, key: new, requests_per_minute: 5}")
    ring.reload()
    key.enter()
    file.write_text("nonsense")
    with pytest.raises(ConfigError):
        ring.reload()
    assert ring.find(b"new") is key


async def test_both_headers_open_the_door_and_others_do_not(serve, tmp_path) -> None:
    server = await server_with(serve, tmp_path, {})
    for headers in (bearer("ka"), {"x-api-key": "ka"}):
        assert (await server.send(PATH, BODY, headers=headers)).status_code == 200
    for headers in ({}, bearer("kb"), {"x-api-key": "ka "[::-1]}, {"authorization": "Basic ka"}):
        assert (await server.send(PATH, BODY, headers=headers)).status_code == 401


async def test_a_request_over_the_limit_gets_429_and_says_when_to_come_back(serve, tmp_path) -> None:
    server = await server_with(serve, tmp_path, {"requests_per_minute": 1, "tokens_per_minute": 1000})
    first = await server.send(PATH, BODY, headers=bearer("ka"))
    assert first.status_code == 200
    assert first.headers["x-ratelimit-limit-requests"] == "1"
    assert first.headers["x-ratelimit-remaining-requests"] == "0"
    assert float(first.headers["x-ratelimit-reset-requests"].rstrip("s")) > 50
    # The models can still be listed: only what uses the model counts.
    assert (await server.get("/v1/models", headers=bearer("ka"))).status_code == 200
    for path, body in ((PATH, BODY), (CHAT, {"messages": [{"role": "user", "content": "x"}]})):
        second = await server.send(path, body, headers=bearer("ka"))
        assert second.status_code == 429
        assert 50 <= int(second.headers["retry-after"]) <= 60
        error = second.json()["error"]
        assert set(error) == {"message", "type", "param", "code"}
        assert (error["type"], error["code"]) == ("rate_limit_error", "rate_limit_exceeded")
    rejected = (await server.get("/metrics", headers=bearer("ka"))).text
    assert 'octavo:admission_rejections_total{reason="rate_limit"} 2.0' in rejected


async def test_tokens_of_prompt_and_answer_count(serve, tmp_path) -> None:
    server = await server_with(serve, tmp_path, {"tokens_per_minute": 100}, script="a story")
    answer = await server.send(PATH, BODY, headers=bearer("ka"))
    used = answer.json()["usage"]["total_tokens"]
    assert used > 4
    key = server.service.keys.find(b"ka")
    assert key.headers()["x-ratelimit-remaining-tokens"] in (str(100 - used), str(100 - used + 1))


async def test_requests_at_a_time_are_limited_and_an_ended_one_makes_room(serve, tmp_path) -> None:
    server = await server_with(serve, tmp_path, {"max_concurrent": 1}, script="a long story of pages", delay=0.02)
    running = asyncio.create_task(server.send(PATH, BODY | {"max_tokens": 8}, headers=bearer("ka")))
    key = server.service.keys.find(b"ka")
    while not key.num_live:
        await asyncio.sleep(0.005)
    assert (await server.send(PATH, BODY, headers=bearer("ka"))).status_code == 429
    assert (await running).status_code == 200
    assert (await server.send(PATH, BODY, headers=bearer("ka"))).status_code == 200
    assert key.num_live == 0


async def test_a_key_is_kept_to_its_models_and_priorities(serve, tmp_path) -> None:
    server = await server_with(serve, tmp_path, {"models": ["tiny-alias"], "max_priority": 0})
    for extra, param, code in (
        ({}, "model", "model_not_allowed"),
        ({"model": "tiny"}, "model", "model_not_allowed"),
        ({"model": "tiny-alias", "priority": -1}, "priority", "priority_not_allowed"),
    ):
        response = await server.send(PATH, BODY | extra, headers=bearer("ka"))
        assert response.status_code == 403
        assert (response.json()["error"]["param"], response.json()["error"]["code"]) == (param, code)
    allowed = await server.send(PATH, BODY | {"model": "tiny-alias", "priority": 3}, headers=bearer("ka"))
    assert allowed.status_code == 200


async def test_keys_of_flags_have_no_limits(serve, tmp_path) -> None:
    server = await server_with(serve, tmp_path, {"requests_per_minute": 1}, api_keys=("own",))
    for _ in range(3):
        response = await server.send(PATH, BODY, headers=bearer("own"))
        assert response.status_code == 200
        assert not [name for name in response.headers if name.startswith("x-ratelimit")]


@pytest.mark.parametrize(
    ("options", "extra", "field"),
    [
        ({"max_n": 2}, {"n": 3, "temperature": 1.0}, "n"),
        ({"max_stop_strings": 1}, {"stop": ["a", "b"]}, "stop"),
        ({"max_prompt_tokens": 2}, {}, "prompt"),
    ],
)
async def test_limits_of_the_server_are_errors_that_name_the_field(serve, options, extra, field) -> None:
    server = await serve("yes", options=ServerOptions(**options))
    response = await server.send(PATH, BODY | extra)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == field
    allowed = {"prompt": [20], "max_tokens": 2, "n": 1, "stop": ["a"]}
    assert (await server.send(PATH, allowed)).status_code == 200


@pytest.mark.parametrize("status", [503, 429])
async def test_a_full_queue_has_the_status_that_the_operator_chose(serve, status) -> None:
    options = ServerOptions(max_queue=0, queue_full_status=status)
    server = await serve("a long story of pages", delay=0.02, max_num_seqs=1, options=options)
    running = asyncio.create_task(server.send(PATH, BODY | {"max_tokens": 8}))
    while not server.service.num_live:
        await asyncio.sleep(0.005)
    refused = await server.send(PATH, BODY)
    assert (refused.status_code, refused.json()["error"]["code"]) == (status, "queue_full")
    assert refused.headers["retry-after"] == "1"
    await running
