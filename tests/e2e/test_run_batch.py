"""`octavo run-batch` as a process: killed and taken up again, fed through pipes, and with a real model."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

TESTS = Path(__file__).parents[1]
OCTAVO = str(Path(sys.executable).with_name("octavo"))
ENVIRONMENT = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
NUM_LINES = 60


def lines(count: int, **body: Any) -> list[dict[str, Any]]:
    body = {"max_tokens": 20, "ignore_eos": True} | body
    return [
        {"custom_id": f"line-{i}", "method": "POST", "url": "/v1/completions", "body": {"prompt": [40 + i]} | body}
        for i in range(count)
    ]


def to_jsonl(items: list[dict[str, Any]]) -> str:
    return "".join(json.dumps(item) + "\n" for item in items)


def start(source: str, target: str, *, delay: float, **how: Any) -> subprocess.Popen[str]:
    command = [sys.executable, str(TESTS / "scripted_batch.py"), source, target, json.dumps({"delay": delay})]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen(command, text=True, env=ENVIRONMENT, **(pipes | how))


def test_a_killed_run_is_taken_up_where_it_ended(tmp_path):
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text(to_jsonl(lines(NUM_LINES)))
    run = start(str(source), str(target), delay=0.02)
    deadline = time.monotonic() + 60
    while not target.exists() or target.read_bytes().count(b"\n") < 10:
        assert run.poll() is None, run.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.01)
    run.kill()
    run.communicate()
    before = target.read_text().splitlines()
    assert 10 <= len(before) < NUM_LINES
    with target.open("a") as file:
        file.write('{"id": "batch_req_torn", "custom_id": "line-59", "resp')

    run = start(str(source), str(target), delay=0.0)
    _, said = run.communicate(timeout=60)
    assert run.returncode == 0, said
    assert f"{NUM_LINES - len(before)} answered, 0 refused, {len(before)} were there already" in said
    after = target.read_text().splitlines()
    assert after[: len(before)] == before
    results = [json.loads(line) for line in after]
    assert sorted(result["custom_id"] for result in results) == sorted(line["custom_id"] for line in lines(NUM_LINES))
    for result in results:
        token = 40 + int(result["custom_id"].removeprefix("line-"))
        assert result["response"]["body"]["choices"][0]["token_ids"] == [token] * 20


def test_a_pipe_is_answered_line_by_line_while_it_stays_open():
    run = start("-", "-", delay=0.001)
    assert run.stdin is not None
    assert run.stdout is not None
    for line in lines(3):
        run.stdin.write(json.dumps(line) + "\n")
        run.stdin.flush()
        assert json.loads(run.stdout.readline())["custom_id"] == line["custom_id"]
    run.stdin.write("no JSON\n")
    run.stdin.flush()
    assert json.loads(run.stdout.readline())["error"]["line"] == 4
    rest, said = run.communicate(timeout=60)
    assert (rest, run.returncode) == ("", 0)
    assert "3 answered, 1 refused" in said


def test_files_and_parsers_that_cannot_be_used_are_found_before_a_model_is_loaded(tmp_path):
    good = tmp_path / "in.jsonl"
    good.write_text(to_jsonl(lines(1)))
    other = tmp_path / "notes.txt"
    other.write_text("dear diary\n")
    for source, target, flags, said in (
        (tmp_path / "none.jsonl", tmp_path / "out.jsonl", [], "none.jsonl: No such file"),
        (good, tmp_path / "none" / "out.jsonl", [], "out.jsonl: No such file"),
        (good, other, [], "line 1 is no answer of a batch"),
        ("https://example.org/in.jsonl", tmp_path / "out.jsonl", [], "fetch it first"),
        (good, tmp_path / "out.jsonl", ["--tool-call-parser", "nonesuch"], "nonesuch"),
    ):
        command = [OCTAVO, "run-batch", "-i", str(source), "-o", str(target), *flags, "/no/such/model"]
        result = subprocess.run(command, capture_output=True, text=True, timeout=120, env=ENVIRONMENT)
        assert result.returncode == 1
        assert said in result.stderr
        assert "Traceback" not in result.stderr
    assert other.read_text() == "dear diary\n"


def test_a_real_model_answers_texts_and_conversations(tiny_model, tmp_path):
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    chat = {"messages": [{"role": "user", "content": "How many pages?"}], "max_tokens": 5}
    schema = {"type": "object", "properties": {"n": {"enum": [8]}}, "required": ["n"], "additionalProperties": False}
    tool = {"type": "function", "function": {"name": "fold", "parameters": schema}}
    call = chat | {"tools": [tool], "tool_choice": "required", "parallel_tool_calls": False}
    call |= {"max_tokens": 100, "temperature": 0}
    asked = [
        {"custom_id": "text", "method": "POST", "url": "/v1/completions", "body": {"prompt": "Once", "max_tokens": 5}},
        {"custom_id": "chat", "method": "POST", "url": "/v1/chat/completions", "body": chat},
        {"custom_id": "call", "method": "POST", "url": "/v1/chat/completions", "body": call},
        {"custom_id": "wrong", "method": "POST", "url": "/v1/chat/completions", "body": chat | {"top_p": 7}},
    ]
    source.write_text(to_jsonl(asked))
    flags = ["--model", str(tiny_model), "--platform", "cpu", "--dtype", "float32", "--num-kv-blocks", "64"]
    flags += ["--tool-call-parser", "hermes", "--reasoning-parser", "none"]
    command = [OCTAVO, "run-batch", "--input-file", str(source), "--output-file", str(target), *flags]
    result = subprocess.run(command, capture_output=True, text=True, timeout=240, env=ENVIRONMENT)
    assert result.returncode == 0, result.stderr
    answers = {answer["custom_id"]: answer for answer in map(json.loads, target.read_text().splitlines())}
    assert answers["text"]["response"]["body"]["object"] == "text_completion"
    assert answers["chat"]["response"]["body"]["choices"][0]["message"]["role"] == "assistant"
    (called,) = answers["call"]["response"]["body"]["choices"][0]["message"]["tool_calls"]
    assert (called["function"]["name"], json.loads(called["function"]["arguments"])) == ("fold", {"n": 8})
    assert answers["wrong"]["response"]["status_code"] == 400
    assert answers["wrong"]["response"]["body"]["error"]["param"] == "top_p"
