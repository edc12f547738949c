"""What is logged of requests, as text and as JSON, and what is not."""

from __future__ import annotations

import json
import logging

import pytest

from octavo import logs
from octavo.server.options import ServerOptions

pytestmark = pytest.mark.anyio
PATH = "/v1/completions"
BODY = {"prompt": "a secret plan", "max_tokens": 4}


@pytest.fixture
def written(caplog):
    """Log lines as a server writes them: `written("json")` are those so far."""
    lines: dict[str, list[str]] = {"json": [], "text": []}

    class Written(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            lines["json"].append(logs.JsonFormatter().format(record))
            lines["text"].append(logs.TextFormatter().format(record))

    handler = Written()
    for name in ("octavo.access", "octavo.requests"):
        caplog.set_level("INFO", logger=name)
        logging.getLogger(name).addHandler(handler)
    yield lines.__getitem__
    for name in ("octavo.access", "octavo.requests"):
        logging.getLogger(name).removeHandler(handler)


async def test_a_finished_request_is_one_line_with_its_tokens_and_times(serve, written) -> None:
    server = await serve("yes", options=ServerOptions(access_log=True, api_keys=("k",)))
    answer = await server.send(PATH, BODY, headers={"authorization": "Bearer k", "x-request-id": "r-1"})
    usage = answer.json()["usage"]
    (line,) = written("json")
    entry = json.loads(line)
    assert (entry["method"], entry["path"], entry["status"], entry["key"]) == ("POST", PATH, 200, "api-key-1")
    assert (entry["prompt_tokens"], entry["generated_tokens"]) == (usage["prompt_tokens"], usage["completion_tokens"])
    assert 0 < entry["ttft_s"] <= entry["duration_s"]
    assert entry["finish_reasons"] == {answer.json()["choices"][0]["finish_reason"]: 1}
    assert entry["model"] == "tiny"
    (text,) = written("text")
    assert f"POST {PATH} 200 in " in text
    assert text.endswith("key api-key-1 [r-1]")
    assert entry["request_id"] == "r-1"
    assert "secret" not in line + text


async def test_a_refused_request_and_other_routes_are_lines_too(serve, written) -> None:
    server = await serve("yes", options=ServerOptions(access_log=True))
    await server.send(PATH, raw="{")
    await server.get("/health")
    entries = [json.loads(line) for line in written("json")]
    assert [(entry["path"], entry["status"]) for entry in entries] == [(PATH, 400), ("/health", 200)]
    assert "prompt_tokens" not in entries[1]


async def test_nothing_is_logged_without_the_flags(serve, written) -> None:
    server = await serve("yes")
    await server.ask(PATH, BODY)
    assert written("text") == []


async def test_prompts_are_logged_only_if_asked_for_and_cut(serve, written) -> None:
    server = await serve("yes", options=ServerOptions(log_requests=True, max_log_len=8))
    await server.ask(PATH, BODY | {"temperature": 0.5})
    (line,) = written("json")
    entry = json.loads(line)
    assert entry["prompts"] == ["a secret"]
    assert entry["prompt_lengths"] == [13]
    assert entry["params"]["temperature"] == 0.5
    assert entry["request_id"]


def test_a_line_of_a_request_carries_its_id_and_an_error_its_traceback() -> None:
    mark = logs.request_id.set("r-7")
    try:
        try:
            raise ValueError("broken")
        except ValueError:
            import sys

            record = logging.LogRecord("octavo.x", logging.ERROR, "", 0, "it \n failed: %s", ("é",), sys.exc_info())
        entry = json.loads(logs.JsonFormatter().format(record))
        text = logs.TextFormatter().format(record)
    finally:
        logs.request_id.reset(mark)
    assert entry["message"] == "it \n failed: é"
    assert (entry["level"], entry["logger"], entry["request_id"]) == ("error", "octavo.x", "r-7")
    assert "ValueError: broken" in entry["exception"]
    assert text.splitlines()[1].endswith("[r-7]")
