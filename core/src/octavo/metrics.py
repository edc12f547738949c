"""Prometheus metrics of one engine as its client sees it. Own registry, no globals; docs/serving.md lists them.

Names follow what dashboards for LLM servers already query, under our own prefix. Gauges and counters come from the
engine's `Stats`; histograms from the life of each request, measured on the client's side.
"""

from __future__ import annotations

import itertools
import math
import time
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from octavo.engine.info import ModelInfo
from octavo.engine.messages import Stats
from octavo.errors import RequestError
from octavo.metrics_alias import PREFIX, exposition
from octavo.outputs import RequestMetrics, RequestOutput

if TYPE_CHECKING:
    from octavo.engine.frontend import Request

LABELS = ("model_name", "engine")

FIRST_TOKEN_S = (
    0.001,
    0.005,
    0.01,
    0.02,
    0.04,
    0.06,
    0.08,
    0.1,
    0.25,
    0.5,
    0.75,
    1,
    2.5,
    5,
    7.5,
    10,
    20,
    40,
    80,
    160,
    640,
)
TOKEN_S = (0.002, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80)
REQUEST_S = (0.1, 0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680)
ANSWERS = (1, 2, 5, 10, 20)

GAUGES = {
    "num_requests_running": ("running", "Sequences in the running batch."),
    "num_requests_waiting": ("waiting", "Sequences that wait for a place in the batch."),
    "kv_cache_usage_perc": ("kv_usage", "Share of the KV blocks in use, 0 to 1."),
}
COUNTERS = {
    "prompt_tokens": ("prompt_tokens", "Prompt tokens computed or found in the prefix cache."),
    "generation_tokens": ("generation_tokens", "Tokens generated."),
    "prefix_cache_queries": ("prefix_queries", "Prompt tokens looked up in the prefix cache."),
    "prefix_cache_hits": ("prefix_hits", "Prompt tokens found in the prefix cache."),
    "num_preemptions": ("preemptions", "Sequences preempted for want of KV blocks."),
    "aborts": ("aborts", "Sequences aborted."),
    "engine_steps": ("steps", "Steps of the engine."),
    "grammars_compiled": ("grammars", "Grammars of structured outputs compiled, not found in the cache."),
    "grammar_compile_seconds": ("grammar_seconds", "Seconds that requests waited for those."),
    "spec_decode_num_drafts": ("spec_drafts", "Times that a sequence had draft tokens to check."),
    "spec_decode_num_draft_tokens": ("spec_draft_tokens", "Draft tokens checked."),
}
"""Metric -> field of `Stats`, help. Counters are exposed with `_total`."""

WAITING = "Sequences that wait, by what for: capacity is a place in the batch or KV memory."

ACCEPTED = "Draft tokens that the model said too."
ACCEPTED_AT = "The same, by place behind the last known token."

SLEEP = "1 for the state that the engine is in."
SLEEP_STATES = ("awake", "weights_offloaded", "discard_all")

TIMES = {
    "queue": "Arrival to the first place in the batch.",
    "prefill": "First place in the batch to first token.",
    "decode": "First token to last token.",
    "inference": "First place in the batch to last token.",
}


class StatsCollector(Collector):
    """Reads `owner.stats` when scraped: the engine's counters pass through unchanged."""

    def __init__(self, owner: EngineMetrics) -> None:
        self._owner = owner

    def collect(self) -> Iterator[Metric]:
        stats, labels = self._owner.stats, self._owner.label_values
        for name, (field, text) in GAUGES.items():
            gauge = GaugeMetricFamily(PREFIX + name, text, labels=LABELS)
            gauge.add_metric(labels, getattr(stats, field))
            yield gauge
        for name, (field, text) in COUNTERS.items():
            counter = CounterMetricFamily(PREFIX + name, text, labels=LABELS)
            counter.add_metric(labels, getattr(stats, field))
            yield counter
        accepted = CounterMetricFamily(PREFIX + "spec_decode_num_accepted_tokens", ACCEPTED, labels=LABELS)
        accepted.add_metric(labels, sum(stats.spec_accepted))
        yield accepted
        by_place = CounterMetricFamily(accepted.name + "_per_pos", ACCEPTED_AT, labels=(*LABELS, "position"))
        for place, number in enumerate(stats.spec_accepted):
            by_place.add_metric((*labels, str(place)), number)
        yield by_place
        waiting = GaugeMetricFamily(PREFIX + "num_requests_waiting_by_reason", WAITING, labels=(*LABELS, "reason"))
        waiting.add_metric((*labels, "capacity"), stats.waiting)
        yield waiting
        sleep = GaugeMetricFamily(PREFIX + "engine_sleep_state", SLEEP, labels=(*LABELS, "sleep_state"))
        for level, state in enumerate(SLEEP_STATES):
            sleep.add_metric((*labels, state), float(level == stats.sleep_level))
        yield sleep
        size = {"block_size": str(self._owner.info.block_size), "num_kv_blocks": str(self._owner.info.num_kv_blocks)}
        config = GaugeMetricFamily(PREFIX + "cache_config_info", "Size of the KV cache.", labels=(*LABELS, *size))
        config.add_metric((*labels, *size.values()), 1)
        yield config


class TokenHistogram(Collector):
    """A histogram that counts one value for many tokens at once; prometheus_client's takes microseconds for each."""

    def __init__(self, name: str, text: str, buckets: Sequence[float], label_values: Sequence[str]) -> None:
        self._name, self._text, self._label_values = PREFIX + name, text, label_values
        self._bounds = [*map(float, buckets), math.inf]
        self._counts = [0] * len(self._bounds)
        self._sum = 0.0

    def observe(self, value: float, times: int) -> None:
        self._counts[bisect_left(self._bounds, value)] += times
        self._sum += value * times

    def collect(self) -> Iterator[Metric]:
        up_to = itertools.accumulate(self._counts)
        names = map(floatToGoString, self._bounds)
        buckets = list(zip(names, up_to, strict=True))
        family = HistogramMetricFamily(self._name, self._text, labels=LABELS)
        family.add_metric(self._label_values, buckets, sum_value=self._sum)
        yield family


class EngineMetrics:
    """What one engine did. `stats` is replaced after every step; the on_* methods follow each request."""

    def __init__(self, info: ModelInfo, *, engine: str = "0") -> None:
        self.stats = Stats()
        self.info = info
        self.label_values = (info.served_names[0] if info.served_names else info.model, engine)
        self.registry = CollectorRegistry()
        self._stats_collector = StatsCollector(self)
        self.registry.register(self._stats_collector)
        self._first_token = self._histogram("time_to_first_token_seconds", "Arrival to first token.", FIRST_TOKEN_S)
        self._inter_token = TokenHistogram(
            "inter_token_latency_seconds", "Between two tokens of an answer.", TOKEN_S, self.label_values
        )
        self.registry.register(self._inter_token)
        self._request = self._histogram("e2e_request_latency_seconds", "Arrival to last token.", REQUEST_S)
        self._per_token = self._histogram(
            "request_time_per_output_token_seconds", "Mean time a token after the first, per request.", TOKEN_S
        )
        lengths = token_buckets(info.max_model_len)
        self._prompt_tokens = self._histogram("request_prompt_tokens", "Prompt tokens of a request.", lengths)
        self._generation_tokens = self._histogram(
            "request_generation_tokens", "Tokens of a request's answers.", lengths
        )
        self._max_tokens = self._histogram("request_params_max_tokens", "max_tokens of a request, resolved.", lengths)
        self._n = self._histogram("request_params_n", "Answers asked for.", ANSWERS)
        self._computed = self._histogram(
            "request_prefill_kv_computed_tokens", "Prompt tokens that the prefix cache did not have.", lengths
        )
        self._longest = self._histogram(
            "request_max_num_generation_tokens", "Tokens of a request's longest answer.", lengths
        )
        self._times = {
            name: self._histogram(f"request_{name}_time_seconds", text, REQUEST_S) for name, text in TIMES.items()
        }
        self._success = Counter(
            PREFIX + "request_success",
            "Answers that ended, by reason.",
            (*LABELS, "finished_reason"),
            registry=self.registry,
        )
        for reason in ("stop", "length", "abort", "error", "repetition"):
            self._success.labels(*self.label_values, reason)

    def on_arrival(self, request: Request) -> None:
        """A request passed the door and goes to the engine."""
        request.arrived_at = time.monotonic()
        self._prompt_tokens.observe(len(request.prepared.token_ids))
        self._max_tokens.observe(request.prepared.max_tokens)
        self._n.observe(request.params.n)

    def on_item(self, request: Request, item: RequestOutput | Exception) -> None:
        """A delta of a request, or the error that ended it."""
        now = time.monotonic()
        if isinstance(item, RequestOutput):
            for output in item.outputs:
                answer = request.answers[output.index]
                num_new = len(output.token_ids)
                if num_new:
                    if request.first_token_at is None:
                        request.first_token_at = now
                        self._first_token.observe(now - request.arrived_at)
                    if answer.last_token_at:
                        self._inter_token.observe((now - answer.last_token_at) / num_new, num_new)
                    answer.last_token_at = now
                if output.finish_reason is not None:
                    self._success.labels(*self.label_values, output.finish_reason).inc()
        elif not isinstance(item, RequestError):
            num_open = sum(not answer.finished for answer in request.answers)
            self._success.labels(*self.label_values, "error").inc(num_open)
        if request.ended:
            metrics = self._on_end(request, now)
            if isinstance(item, RequestOutput):
                item.metrics = metrics

    def engine_families(self) -> list[Metric]:
        """What the engine counts: the same for all its clients."""
        return list(self._stats_collector.collect())

    def own_families(self) -> list[Metric]:
        """What this client counts of its own requests."""
        engine = {family.name for family in self.engine_families()}
        return [family for family in self.registry.collect() if family.name not in engine]

    def render(self) -> bytes:
        """The text that Prometheus scrapes."""
        return exposition(self.registry.collect())

    def _on_end(self, request: Request, now: float) -> RequestMetrics:
        self._request.observe(now - request.arrived_at)
        num_tokens = sum(answer.num_tokens for answer in request.answers)
        self._generation_tokens.observe(num_tokens)
        self._longest.observe(max(answer.num_tokens for answer in request.answers))
        self._computed.observe(len(request.prepared.token_ids) - request.num_cached_tokens)
        num_later = num_tokens - len(request.answers)
        if request.first_token_at is not None and num_later > 0:
            self._per_token.observe((now - request.first_token_at) * len(request.answers) / num_later)
        times = times_of(request, now)
        for name, histogram in self._times.items():
            value = getattr(times, name) if name != "inference" else inference_of(times)
            if value is not None:
                histogram.observe(value)
        return times

    def _histogram(self, name: str, text: str, buckets: Sequence[float]) -> Histogram:
        metric = Histogram(PREFIX + name, text, LABELS, buckets=buckets, registry=self.registry)
        return metric.labels(*self.label_values)


def times_of(request: Request, now: float) -> RequestMetrics:
    """Where the time of a request that has just ended went."""
    arrived, admitted, first = request.arrived_at, request.admitted_at, request.first_token_at
    last = max(answer.last_token_at for answer in request.answers)
    return RequestMetrics(
        total=now - arrived,
        queue=None if admitted is None else max(admitted - arrived, 0.0),
        prefill=None if admitted is None or first is None else max(first - admitted, 0.0),
        decode=None if first is None else last - first,
        first_token=None if first is None else first - arrived,
    )


def inference_of(times: RequestMetrics) -> float | None:
    """Seconds between a request's first place in the batch and its last token."""
    return None if times.prefill is None or times.decode is None else times.prefill + times.decode


def token_buckets(longest: int) -> list[float]:
    """1, 2, 5, 10, 20, 50 ... up to `longest`."""
    buckets: list[float] = []
    scale = 1
    while True:
        for digit in (1, 2, 5):
            if digit * scale >= longest:
                return [*buckets, float(longest)]
            buckets.append(float(digit * scale))
        scale *= 10
