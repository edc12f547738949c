"""Grammars that are wrong, and answers that follow right ones, over HTTP with a real (random) model: such a model never
ends by itself, so whatever ends an answer is the grammar."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from invariants import strict

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
MESSAGES = [{"role": "user", "content": "hi"}]


def children(pid: int) -> dict[int, str]:
    """The processes that a process has started: their commands by id."""
    pids = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return {int(each): Path(f"/proc/{each}/cmdline").read_text().replace("\0", " ") for each in pids}


def grammar_processes(server: Any) -> list[int]:
    engines = [each for each, command in children(server.pid).items() if "spawn_main" in command]
    found = [child for engine in engines for child in children(engine).items()]
    return [each for each, command in found if "octavo.structured.process" in command]


@pytest.fixture
def http(tiny_server, invariants) -> Iterator[httpx.Client]:
    """A client, after which the invariants are asserted."""
    headers = {"authorization": "Bearer sesame"}
    with httpx.Client(base_url=tiny_server.url, headers=headers, timeout=120) as client:
        yield client
    invariants.url(tiny_server.url, key="sesame")


def refused(http: httpx.Client, path: str, body: dict[str, Any], field: str) -> None:
    """400 naming the field, also as a stream, and never an answer without the grammar; the next request is served."""
    for stream in (False, True):
        response = http.post(path, json=body | {"max_tokens": 4, "stream": stream})
        assert response.status_code == 400, response.text
        assert strict(response.content)["error"]["param"].startswith(field), response.text
    assert http.post(COMPLETIONS, json={"prompt": "next", "max_tokens": 1}).status_code == 200


@pytest.mark.parametrize(
    "schema",
    [
        {"properties": {"foo": "bar"}},
        {"type": "no such type"},
        {"type": "object", "required": "foo"},
        {"items": 7},
        {"$ref": "#/nowhere"},
    ],
)
def test_case_C11_an_ill_formed_schema_is_refused_and_others_go_on(http, schema):
    body = {"prompt": "x", "stream": True, "max_tokens": 150, "ignore_eos": True}
    with http.stream("POST", COMPLETIONS, json=body) as response:
        lines = response.iter_lines()
        next(lines)
        refused(http, COMPLETIONS, {"prompt": "x", "structured_outputs": {"json": schema}}, "structured_outputs")
        form = {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}
        refused(http, CHAT, {"messages": MESSAGES, "response_format": form}, "response_format")
        assert [line for line in lines if line][-1] == "data: [DONE]"


@pytest.mark.parametrize(
    "wrong",
    [
        {"grammar": "Root ::= [^"},
        {"grammar": "root ::= missing"},
        {"grammar": ""},
        {"json": {"type": "string", "pattern": "\\q("}},
        {"json": '{"type": '},
        {"choice": []},
    ],
)
def test_case_C12_a_grammar_that_cannot_be_read_is_refused_and_never_dropped(http, wrong):
    refused(http, COMPLETIONS, {"prompt": "x", "structured_outputs": wrong}, "structured_outputs")
    refused(http, CHAT, {"messages": MESSAGES, "structured_outputs": wrong}, "structured_outputs")


@pytest.mark.parametrize("regex", ["(", "a{9,1}", "[z-a]", "\\", "(?<=a)b"])
def test_case_C13_a_regex_that_cannot_be_compiled_fails_its_own_request_only(http, regex):
    refused(http, COMPLETIONS, {"prompt": "x", "structured_outputs": {"regex": regex}}, "structured_outputs")


@pytest.mark.parametrize(
    ("form", "allowed"),
    [
        ({"choice": ["a", "b"]}, ("a", "b")),
        ({"regex": "[0-9]{3}"}, None),
        ({"json": {"type": "boolean"}}, ("true", "false")),
        ({"json": {"enum": ["你好"]}}, ('"你好"',)),
    ],
)
def test_case_C14_an_answer_ends_where_its_grammar_ends(http, form, allowed):
    body = {"prompt": "x", "structured_outputs": form, "max_tokens": 60, "logprobs": 2}
    answer = strict(http.post(COMPLETIONS, json=body).content)
    (choice,) = answer["choices"]
    assert choice["finish_reason"] == "stop"
    assert answer["usage"]["completion_tokens"] < 60
    assert choice["text"] in allowed if allowed else len(choice["text"]) == 3 and choice["text"].isdigit()
    streamed = http.post(COMPLETIONS, json=body | {"stream": True, "seed": 1}).text.split("\n\n")
    chunks = [strict(event.removeprefix("data: ").encode()) for event in streamed if event and "[DONE]" not in event]
    reasons = [c["finish_reason"] for chunk in chunks for c in chunk["choices"] if c["finish_reason"]]
    assert reasons == ["stop"]


def test_case_C15_a_grammar_that_has_ended_goes_before_min_tokens(http):
    body = {"prompt": "x", "structured_outputs": {"json": {"type": "boolean"}}, "min_tokens": 64, "max_tokens": 100}
    (choice,) = strict(http.post(COMPLETIONS, json=body).content)["choices"]
    assert (choice["text"] in ("true", "false"), choice["finish_reason"]) == (True, "stop")
    # Nothing that the grammar allows is left: the request's own error, and others are served.
    impossible = {"prompt": "x", "structured_outputs": {"choice": ["a", "b"]}, "allowed_token_ids": [100]}
    response = http.post(COMPLETIONS, json=impossible)
    assert response.status_code in (400, 500)
    assert "forbidden" in strict(response.content)["error"]["message"]


@pytest.mark.parametrize("schema", [{"not": {}}, {"type": "object", "properties": {"x": {"not": {}}}}])
def test_case_C16_what_no_grammar_can_hold_to_is_named(http, schema):
    refused(http, COMPLETIONS, {"prompt": "x", "structured_outputs": {"json": schema}}, "structured_outputs")


def test_the_first_request_with_a_grammar_finds_its_process_there(octavo_serve, tiny_model):
    server = octavo_serve(
        str(tiny_model), "--port", "0", "--platform", "cpu", "--num-kv-blocks", "64", "--threads", "1"
    )
    deadline = time.monotonic() + 60
    while not (before := grammar_processes(server)):
        assert time.monotonic() < deadline, "nothing has started it"
        time.sleep(0.05)
    body = {"prompt": "x", "structured_outputs": {"choice": ["a", "b"]}}
    assert httpx.post(f"{server.url}/v1/completions", json=body, timeout=120).status_code == 200
    assert grammar_processes(server) == before
