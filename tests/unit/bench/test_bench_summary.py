"""Figures of a served load, worked out by hand."""

from __future__ import annotations

import asyncio
import json
import time
from typing import cast

import numpy as np
import pytest
import uvloop

from octavo.bench.serve import arrival_times, replay, request_bodies
from octavo.bench.sse_client import Answer, Client
from octavo.bench.summary import read_goals, read_percentiles, summarize
from octavo.bench.workload import Work
from octavo.errors import ConfigError
from octavo.tokenizer import Tokenizer

FIRST = Answer(started=10.0, arrivals=[10.1, 10.2, 10.4], ended=10.4, num_prompt=7, num_output=4)
SECOND = Answer(started=10.2, arrivals=[10.5], ended=10.5, num_prompt=3, num_output=1)
FAILED = Answer(started=10.4, arrivals=[10.45], ended=10.6, num_prompt=9, num_output=9, error="HTTP status 500: no")


def test_figures_are_those_worked_out_by_hand() -> None:
    figures = summarize([FIRST, SECOND, FAILED], duration=2.0, percentiles=(50, 99.9), goals={})
    assert (figures["completed"], figures["failed"], figures["errors"]) == (2, 1, {"HTTP status 500: no": 1})
    assert (figures["total_input_tokens"], figures["total_output_tokens"]) == (10, 5)
    assert figures["request_throughput"] == 1.0
    assert figures["output_throughput"] == 2.5
    assert figures["total_token_throughput"] == 7.5
    assert figures["mean_ttft_ms"] == pytest.approx(200)
    assert figures["std_ttft_ms"] == pytest.approx(100)
    assert figures["p50_ttft_ms"] == pytest.approx(200)
    assert figures["p99.9_ttft_ms"] == pytest.approx(299.8)
    # 300 ms for the three tokens behind the first; an answer of one token has none.
    assert figures["mean_tpot_ms"] == pytest.approx(100)
    assert figures["median_itl_ms"] == pytest.approx(150)
    assert figures["mean_e2el_ms"] == pytest.approx(350)
    assert "request_goodput" not in figures


def test_request_that_ends_as_another_starts_is_not_open_with_it() -> None:
    assert summarize([FIRST, SECOND, FAILED], duration=1, percentiles=(), goals={})["max_concurrent_requests"] == 2


def test_goodput_counts_requests_that_meet_every_goal() -> None:
    def goodput(*goals: str) -> float:
        figures = summarize([FIRST, SECOND, FAILED], duration=2.0, percentiles=(), goals=read_goals(goals))
        return float(figures["request_goodput"])

    assert goodput("ttft:301", "e2el:401") == 1.0
    assert goodput("ttft:301", "e2el:350") == 0.5
    assert goodput("tpot:99") == 0.5, "an answer of one token has no tpot to miss"


def test_metric_without_values_is_none() -> None:
    figures = summarize([SECOND], duration=1.0, percentiles=(99,), goals={})
    assert figures["mean_itl_ms"] is figures["p99_tpot_ms"] is None
    assert figures["mean_ttft_ms"] == pytest.approx(300)


@pytest.mark.parametrize("text", ["ttft", "itl:5", "ttft:-1", "ttft:fast", "e2el:nan"])
def test_bad_goals_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="goodput"):
        read_goals([text])


@pytest.mark.parametrize("text", ["", "101", "-1", "half", "nan"])
def test_bad_percentiles_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="metric_percentiles"):
        read_percentiles(text)


def test_arrivals_are_a_seeded_poisson_process() -> None:
    times = arrival_times(4000, request_rate=20.0, seed=1)
    gaps = np.diff(times)
    assert times[0] == 0.0
    assert gaps.mean() == pytest.approx(1 / 20, rel=0.05)
    assert gaps.std() == pytest.approx(1 / 20, rel=0.1), "as wide as its mean, which an even pace is not"
    assert arrival_times(4000, request_rate=20.0, seed=1) == times
    assert arrival_times(3, request_rate=float("inf")) == [0.0, 0.0, 0.0]
    with pytest.raises(ConfigError, match="request_rate is nan"):
        arrival_times(1, request_rate=float("nan"))


def test_no_request_is_sent_before_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    read, clock = time.perf_counter, [0.0]

    def noted() -> float:
        clock.append(read())
        return clock[-1]

    class Instant:
        async def post(self, body: bytes) -> Answer:
            return Answer(started=noted(), ended=clock[-1])

    # Fractions of milliseconds, which uvloop's timers do not have.
    arrivals = [0.0013 * number for number in range(60)]
    monkeypatch.setattr(time, "perf_counter", noted)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        answers, _ = runner.run(replay(cast(Client, Instant()), [b""] * len(arrivals), arrivals))
    started = clock[1]
    assert all(answer.started >= started + arrival for answer, arrival in zip(answers, arrivals, strict=True))


def test_bodies_ask_for_what_the_work_says() -> None:
    class Letters:
        def decode(self, ids: list[int]) -> str:
            return "".join(map(chr, ids))

    work = [Work([97, 98], 7), Work([99], 8, "text")]
    common = {"model": "m", "stream": True, "stream_options": {"include_usage": True}, "temperature": 0.5}
    made = request_bodies(work, endpoint="/v1/completions", model="m", temperature=0.5, ignore_eos=True)
    assert [json.loads(body) for body in made] == [
        common | {"prompt": [97, 98], "max_tokens": 7, "ignore_eos": True},
        common | {"prompt": "text", "max_tokens": 8, "ignore_eos": True},
    ]
    tokenizer = cast(Tokenizer, Letters())
    made = request_bodies(work, endpoint="/v1/chat/completions", model="m", tokenizer=tokenizer, temperature=0.5)
    assert [json.loads(body) for body in made] == [
        common | {"messages": [{"role": "user", "content": "ab"}], "max_completion_tokens": 7},
        common | {"messages": [{"role": "user", "content": "text"}], "max_completion_tokens": 8},
    ]


def test_chat_without_text_or_tokenizer_is_refused() -> None:
    with pytest.raises(ConfigError, match="give a tokenizer"):
        request_bodies([Work([1], 1)], endpoint="/v1/chat/completions", model="m")
    with pytest.raises(ConfigError, match="endpoint is '/generate'"):
        request_bodies([Work([1], 1)], endpoint="/generate", model="m")
