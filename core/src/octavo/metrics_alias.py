"""Our metrics once more under the names that dashboards for another server query (`--metrics-alias`).

What we call octavo:NAME is called vllm:NAME there, with the same labels, so one rule does nearly all of it. Beside it
stand names that older dashboards use, one label of another name, and the counter of HTTP responses of their web
framework, which has no prefix and groups statuses.
"""

from __future__ import annotations

from collections import Counter as Tally
from collections.abc import Iterable, Iterator

from prometheus_client import generate_latest
from prometheus_client.core import CounterMetricFamily, Metric

PREFIX = "octavo:"
ALIASES = {"vllm": "vllm:"}
"""Value of --metrics-alias -> prefix."""

OLD_NAMES = {
    "kv_cache_usage_perc": "gpu_cache_usage_perc",
    "prefix_cache_queries": "gpu_prefix_cache_queries",
    "prefix_cache_hits": "gpu_prefix_cache_hits",
    "inter_token_latency_seconds": "time_per_output_token_seconds",
}
LABELS = {"num_kv_blocks": "num_gpu_blocks"}
HTTP_REQUESTS = PREFIX + "http_requests"


class Families:
    """Metric families as `generate_latest` reads them: something with `collect`."""

    def __init__(self, families: Iterable[Metric]) -> None:
        self._families = families

    def collect(self) -> Iterable[Metric]:
        return self._families


def exposition(families: Iterable[Metric], *, alias: str | None = None) -> bytes:
    """The text that Prometheus scrapes; with an alias each family comes twice."""
    families = list(families)
    if alias is not None:
        families += [again for family in families for again in aliased(family, ALIASES[alias])]
    return generate_latest(Families(families))


def aliased(family: Metric, prefix: str) -> Iterator[Metric]:
    """The family under its other names; nothing for one that is not ours."""
    if family.name == HTTP_REQUESTS:
        yield grouped_responses(family)
    elif family.name.startswith(PREFIX):
        name = family.name.removeprefix(PREFIX)
        yield renamed(family, prefix + name)
        if name in OLD_NAMES:
            yield renamed(family, prefix + OLD_NAMES[name])


def renamed(family: Metric, name: str) -> Metric:
    """A copy of the family with another name."""
    copy = Metric(name, family.documentation, family.type, family.unit)
    for sample in family.samples:
        suffix = sample.name.removeprefix(family.name)
        labels = {LABELS.get(label, label): value for label, value in sample.labels.items()}
        copy.samples.append(sample._replace(name=name + suffix, labels=labels))
    return copy


def grouped_responses(family: Metric) -> Metric:
    """HTTP responses by method and class of status: 200 counts as 2xx."""
    counts: Tally[tuple[str, str]] = Tally()
    for sample in family.samples:
        if sample.name.endswith("_total"):
            counts[sample.labels["method"], sample.labels["status"][0] + "xx"] += sample.value  # type: ignore[assignment]
    copy = CounterMetricFamily("http_requests", family.documentation, labels=("method", "status"))
    for labels, value in counts.items():
        copy.add_metric(labels, value)
    return copy
