"""The metrics follow requests and the engine's counters."""

from __future__ import annotations

import pytest
from prometheus_client import CollectorRegistry, Histogram, generate_latest

from octavo.engine.frontend import Frontend, Request
from octavo.engine.info import ModelInfo
from octavo.engine.messages import Stats
from octavo.errors import EngineError, RequestError
from octavo.metrics import COUNTERS, GAUGES, EngineMetrics, TokenHistogram, token_buckets
from octavo.outputs import CompletionOutput, RequestMetrics, RequestOutput
from octavo.sampling.params import SamplingParams

INFO = ModelInfo(model="m", served_names=("shown", "alias"), max_model_len=64, vocab_size=100)
LABELS = {"model_name": "shown", "engine": "0"}


def arrived(metrics: EngineMetrics, n: int = 1) -> Request:
    frontend = Frontend(None, INFO)
    prepared = frontend.door.prepare([5, 6, 7], SamplingParams(n=n, max_tokens=9))
    request = frontend.add(prepared, request_id="r")
    metrics.on_arrival(request)
    return request


def value(metrics: EngineMetrics, name: str, **labels: str) -> float | None:
    return metrics.registry.get_sample_value(f"octavo:{name}", {**LABELS, **labels})


def test_every_gauge_and_counter_shows_its_field_of_the_stats() -> None:
    metrics = EngineMetrics(INFO)
    fields = [field for field, _ in (*GAUGES.values(), *COUNTERS.values())]
    assert len(set(fields)) == len(fields)
    metrics.stats = Stats(**{field: number for number, field in enumerate(fields, start=1)})
    shown = [value(metrics, name) for name in GAUGES] + [value(metrics, f"{name}_total") for name in COUNTERS]
    assert shown == list(range(1, len(fields) + 1))


def test_accepted_drafts_are_shown_in_all_and_by_position() -> None:
    metrics = EngineMetrics(INFO)
    metrics.stats = Stats(spec_drafts=5, spec_draft_tokens=15, spec_accepted=(4, 2, 1))
    name = "spec_decode_num_accepted_tokens"
    assert value(metrics, f"{name}_total") == 7
    assert [value(metrics, f"{name}_per_pos_total", position=str(place)) for place in range(3)] == [4, 2, 1]


def test_token_histogram_shows_what_prometheus_own_would() -> None:
    values = [(0.0005, 1), (0.002, 3), (0.03, 2), (0.0300001, 5), (1000.0, 4)]
    bounds = (0.002, 0.03, 0.5)
    registry, theirs = CollectorRegistry(), CollectorRegistry()
    ours = TokenHistogram("gaps", "Text.", bounds, tuple(LABELS.values()))
    registry.register(ours)
    other = Histogram("octavo:gaps", "Text.", tuple(LABELS), buckets=bounds, registry=theirs).labels(**LABELS)
    for number, times in values:
        ours.observe(number, times)
        for _ in range(times):
            other.observe(number)

    def shown(one: CollectorRegistry) -> list[str]:
        lines = generate_latest(one).decode().splitlines()
        return [line for line in lines if "_created" not in line and "_sum" not in line]

    assert shown(registry) == shown(theirs)
    total = registry.get_sample_value("octavo:gaps_sum", LABELS)
    assert total == pytest.approx(sum(number * times for number, times in values))


def test_a_request_is_counted_once_in_each_histogram() -> None:
    metrics = EngineMetrics(INFO)
    request = arrived(metrics)
    answer = request.answers[0]
    for tokens, reason in (([8], None), ([9, 10], "length")):
        answer.num_tokens += len(tokens)
        answer.finished = request.ended = reason is not None
        output = CompletionOutput(0, "", tokens, finish_reason=reason)
        metrics.on_item(request, RequestOutput("r", None, [5, 6, 7], [output], request.ended))
    for name in (
        "time_to_first_token_seconds",
        "e2e_request_latency_seconds",
        "request_time_per_output_token_seconds",
        "request_prompt_tokens",
        "request_params_n",
    ):
        assert value(metrics, f"{name}_count") == 1, name
    assert value(metrics, "inter_token_latency_seconds_count") == 2
    assert value(metrics, "request_prompt_tokens_sum") == 3
    assert value(metrics, "request_generation_tokens_sum") == 3
    assert value(metrics, "request_params_max_tokens_sum") == 9
    assert value(metrics, "request_success_total", finished_reason="length") == 1
    assert value(metrics, "request_success_total", finished_reason="stop") == 0


def test_the_times_of_a_request_follow_its_way_through_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter((100.0, 105.0, 112.0))
    monkeypatch.setattr("octavo.metrics.time.monotonic", lambda: next(clock))
    metrics = EngineMetrics(INFO)
    request = arrived(metrics)
    request.admitted_at, request.num_cached_tokens = 102.0, 1
    answer = request.answers[0]
    for tokens, reason in (([8], None), ([9], "length")):
        answer.num_tokens += len(tokens)
        request.ended = reason is not None
        item = RequestOutput("r", None, [5, 6, 7], [CompletionOutput(0, "", tokens, finish_reason=reason)])
        metrics.on_item(request, item)
    assert item.metrics == RequestMetrics(total=12.0, queue=2.0, prefill=3.0, decode=7.0, first_token=5.0)
    for name, expected in (("queue", 2.0), ("prefill", 3.0), ("decode", 7.0), ("inference", 10.0)):
        assert value(metrics, f"request_{name}_time_seconds_sum") == expected
    assert value(metrics, "request_prefill_kv_computed_tokens_sum") == 2
    assert value(metrics, "request_max_num_generation_tokens_sum") == 2


def test_a_request_that_never_ran_has_no_time_but_its_total() -> None:
    metrics = EngineMetrics(INFO)
    request = arrived(metrics)
    request.ended = True
    item = RequestOutput("r", None, [5], [CompletionOutput(0, "", [], finish_reason="abort")], True)
    metrics.on_item(request, item)
    assert item.metrics is not None
    assert (item.metrics.queue, item.metrics.prefill, item.metrics.decode) == (None, None, None)
    assert value(metrics, "request_queue_time_seconds_count") == 0


def test_failed_answers_are_errors_and_wrong_requests_are_not() -> None:
    metrics = EngineMetrics(INFO)
    for error in (EngineError("broken"), RequestError("wrong")):
        request = arrived(metrics, n=2)
        request.ended = True
        metrics.on_item(request, error)
    assert value(metrics, "request_success_total", finished_reason="error") == 2


def test_two_engines_share_nothing() -> None:
    one, two = EngineMetrics(INFO), EngineMetrics(INFO, engine="1")
    arrived(one)
    assert b'octavo:request_params_n_count{engine="0",model_name="shown"} 1.0' in one.render()
    assert b'octavo:request_params_n_count{engine="1",model_name="shown"} 0.0' in two.render()


def test_token_buckets_end_at_the_context_length() -> None:
    assert token_buckets(64) == [1, 2, 5, 10, 20, 50, 64]
    assert token_buckets(1) == [1]
