"""Metrics of several API processes become one: the engine's newest word, and the sum of what each counts."""

from __future__ import annotations

from octavo.engine.info import ModelInfo
from octavo.engine.messages import Stats
from octavo.metrics import EngineMetrics
from octavo.metrics_merge import Snapshot, freeze, merged

INFO = ModelInfo(model="m", served_names=("m",), max_model_len=64, vocab_size=100)


def process(stats: Stats, *first_tokens: float) -> Snapshot:
    metrics = EngineMetrics(INFO)
    metrics.stats = stats
    for seconds in first_tokens:
        metrics._first_token.observe(seconds)
    return Snapshot(stats.steps, 0, freeze(metrics.engine_families()), freeze(metrics.own_families()))


def test_the_engines_counters_are_the_newest_and_the_processes_own_are_added() -> None:
    old = process(Stats(steps=3, running=5, prompt_tokens=10), 0.002, 0.2)
    new = process(Stats(steps=9, running=0, prompt_tokens=70), 0.002)
    families = merged([old, new])
    values = {(sample.name, sample.labels.get("le")): sample.value for family in families for sample in family.samples}
    assert values["octavo:num_requests_running", None] == 0
    assert values["octavo:prompt_tokens_total", None] == 70
    assert values["octavo:time_to_first_token_seconds_count", None] == 3
    assert values["octavo:time_to_first_token_seconds_bucket", "0.005"] == 2
    assert values["octavo:time_to_first_token_seconds_bucket", "+Inf"] == 3
    names = [family.name for family in families]
    assert len(set(names)) == len(names)
