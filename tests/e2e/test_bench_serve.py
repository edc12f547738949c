"""`octavo bench serve` against a real server over a scripted engine."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

OCTAVO = str(Path(sys.executable).with_name("octavo"))
SMALL = ["--input-len", "40", "--vocab-size", "500"]


def bench(url: str, *flags: str) -> tuple[int, dict[str, Any], str]:
    """(exit code, figures, stderr)."""
    command = [OCTAVO, "bench", "serve", "--base-url", url, *SMALL, "--json", *flags]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    return done.returncode, json.loads(done.stdout or "{}"), done.stderr


def test_served_load_is_counted_to_the_token(scripted_server, read_metric, tmp_path):
    server = scripted_server(delay=0.005)
    file = tmp_path / "served.json"
    flags = ["--num-prompts", "48", "--output-len", "20", "--ignore-eos", "--output-json", str(file)]
    code, figures, errors = bench(server.url, *flags, "--max-concurrency", "16", "--goodput", "e2el:60000")
    assert (code, errors) == (0, "")
    assert json.loads(file.read_text()) == figures
    assert (figures["completed"], figures["failed"], figures["errors"]) == (48, 0, {})
    assert (figures["total_input_tokens"], figures["total_output_tokens"]) == (48 * 40, 48 * 20)
    assert figures["model_id"] == "scripted"
    assert figures["max_concurrent_requests"] == 16
    assert figures["request_goodput"] == figures["request_throughput"]
    # The engine takes 5 ms for each of a request's 20 steps, so no honest clock sees less, however busy the machine.
    assert figures["mean_ttft_ms"] >= 5
    assert figures["mean_e2el_ms"] >= 100
    assert figures["mean_e2el_ms"] == pytest.approx(figures["mean_ttft_ms"] + 19 * figures["mean_tpot_ms"], rel=1e-6)
    # One short warm-up request of 8 tokens was answered too.
    assert read_metric(server.url, "generation_tokens_total") == 48 * 20 + 8


def test_requests_arrive_at_the_asked_rate(scripted_server):
    server = scripted_server(delay=0.0)
    code, figures, _ = bench(server.url, "--num-prompts", "30", "--output-len", "2", "--request-rate", "20")
    assert code == 0
    # 29 gaps of 50 ms on average; the draws of seed 0 are fixed, so only a floor is asked for.
    from octavo.bench.serve import arrival_times

    assert figures["duration"] >= arrival_times(30, request_rate=20.0)[-1]
    assert figures["request_rate"] == 20.0


def test_some_failures_are_counted_and_told_and_all_are_an_error(scripted_server):
    server = scripted_server(delay=0.02, max_num_seqs=1)
    code, _, errors = bench(server.url, "--num-prompts", "2", "--output-len", "9999")
    assert code == 1
    assert "2 failed: HTTP status 400" in errors
    assert errors.splitlines()[-1].startswith("Error: all 2 requests failed")
    code, _, errors = bench(server.url, "--num-prompts", "2", "--model", "other")
    assert code == 1
    assert "does not answer a first request: HTTP status 404" in errors


def test_chat_of_a_real_model_is_measured_with_its_tokenizer(tiny_server, tiny_model):
    flags = ["--endpoint", "/v1/chat/completions", "--tokenizer", str(tiny_model), "--api-key", "sesame"]
    command = [OCTAVO, "bench", "serve", "--base-url", tiny_server.url, *flags, "--num-prompts", "6", "--ignore-eos"]
    done = subprocess.run(
        [*command, "--input-len", "20", "--output-len", "9", "--metric-percentiles", "95"],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert (done.returncode, done.stderr) == (0, "")
    totals = dict(line.rsplit(None, 1) for line in done.stdout.split("\n\n")[0].splitlines())
    assert (totals["completed"], totals["output tokens"]) == ("6", str(6 * 9))
    assert int(totals["input tokens"]) > 6 * 9, "the chat template adds to the prompt"
    table = done.stdout.split("\n\n")[1].split()
    assert table[:4] == ["MS", "MEAN", "MEDIAN", "P95"]
    assert {"TTFT", "TPOT", "ITL", "E2EL"} <= set(table)
