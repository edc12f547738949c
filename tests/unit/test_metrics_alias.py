"""The alias shows the series that dashboards for vLLM query, with the same values."""

from __future__ import annotations

import pytest
from prometheus_client import CollectorRegistry, Counter
from prometheus_client.parser import text_string_to_metric_families

from octavo.engine.info import ModelInfo
from octavo.engine.messages import Stats
from octavo.metrics import EngineMetrics
from octavo.metrics_alias import exposition

INFO = ModelInfo(model="m", served_names=("m",), max_model_len=64, vocab_size=100, num_kv_blocks=9)
LABELS = {"model_name": "m", "engine": "0"}

QUERIED = """
num_requests_running num_requests_waiting kv_cache_usage_perc gpu_cache_usage_perc cache_config_info
num_requests_waiting_by_reason prefix_cache_queries_total prefix_cache_hits_total num_preemptions_total
prompt_tokens_total generation_tokens_total request_success_total
time_to_first_token_seconds_bucket inter_token_latency_seconds_bucket time_per_output_token_seconds_bucket
request_time_per_output_token_seconds_bucket e2e_request_latency_seconds_bucket request_queue_time_seconds_sum
request_inference_time_seconds_count request_prefill_time_seconds_bucket request_decode_time_seconds_bucket
request_prompt_tokens_bucket request_generation_tokens_bucket request_params_n_sum request_params_max_tokens_sum
request_max_num_generation_tokens_bucket request_prefill_kv_computed_tokens_bucket
"""
"""Of vLLM's series those that its own and third parties' dashboards query."""


def samples(text: bytes) -> list[tuple[str, dict[str, str], float]]:
    families = text_string_to_metric_families(text.decode())
    return [(s.name, s.labels, s.value) for family in families for s in family.samples]


@pytest.mark.parametrize("name", QUERIED.split())
def test_a_series_that_dashboards_query_is_there_with_their_labels(name: str) -> None:
    found = [
        labels
        for n, labels, _ in samples(exposition(EngineMetrics(INFO).registry.collect(), alias="vllm"))
        if n == f"vllm:{name}"
    ]
    assert found
    assert all(labels.items() >= LABELS.items() for labels in found)


def test_both_names_have_the_same_values_and_without_the_flag_there_is_one() -> None:
    metrics = EngineMetrics(INFO)
    metrics.stats = Stats(running=3, kv_usage=0.5, prompt_tokens=7)
    plain = samples(exposition(metrics.registry.collect()))
    assert not [name for name, _, _ in plain if name.startswith("vllm:")]
    values = {
        (name, *sorted(labels.items())): value
        for name, labels, value in samples(exposition(metrics.registry.collect(), alias="vllm"))
    }
    for name, labels, value in plain:
        if name.startswith("octavo:cache_config"):
            continue
        assert values[name, *sorted(labels.items())] == value
        assert values["vllm:" + name.removeprefix("octavo:"), *sorted(labels.items())] == value
    key = (("engine", "0"), ("model_name", "m"))
    assert values["vllm:gpu_cache_usage_perc", *key] == 0.5
    assert values["vllm:cache_config_info", ("block_size", "16"), key[0], key[1], ("num_gpu_blocks", "9")] == 1


def test_responses_are_grouped_by_class_of_status_as_their_web_framework_counts_them() -> None:
    registry = CollectorRegistry()
    counter = Counter("octavo:http_requests", "Responses.", ("method", "status"), registry=registry)
    for status, times in (("200", 3), ("202", 1), ("503", 2)):
        counter.labels("POST", status).inc(times)
    found = {
        labels["status"]: value
        for name, labels, value in samples(exposition(registry.collect(), alias="vllm"))
        if name == "http_requests_total"
    }
    assert found == {"2xx": 4, "5xx": 2}
