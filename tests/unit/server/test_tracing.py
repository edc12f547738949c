"""Spans of requests, as an exporter in memory gets them."""

from __future__ import annotations

import sys

import pytest

from octavo.errors import ConfigError
from octavo.server.options import ServerOptions
from octavo.server.tracing import open_tracer, trace_exchanges

pytestmark = pytest.mark.anyio
PATH = "/v1/completions"
BODY = {"prompt": [20, 21, 22], "max_tokens": 3, "temperature": 0.5, "n": 2, "ignore_eos": True}
TRACE, PARENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"


@pytest.fixture
def exporter():
    pytest.importorskip("opentelemetry.sdk")
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    return InMemorySpanExporter()


@pytest.fixture
async def traced(serve, exporter):
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor

    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    server = await serve("a long story of pages", options=ServerOptions(api_keys=("sesame",)))
    server.service.observers.append(trace_exchanges(provider))
    server.http.headers["authorization"] = "Bearer sesame"
    return server


async def test_a_request_is_a_span_under_its_callers_with_usage_parameters_and_times(traced, exporter):
    headers = {"traceparent": f"00-{TRACE}-{PARENT}-01", "x-request-id": "r-1"}
    answer = (await traced.send(PATH, BODY, headers=headers)).json()
    (span,) = exporter.get_finished_spans()
    assert span.name == "llm_request"
    assert span.kind.name == "SERVER"
    assert format(span.context.trace_id, "032x") == TRACE
    assert format(span.parent.span_id, "016x") == PARENT
    found = dict(span.attributes)
    assert found["gen_ai.usage.prompt_tokens"] == answer["usage"]["prompt_tokens"] == 3
    assert found["gen_ai.usage.completion_tokens"] == answer["usage"]["completion_tokens"] == 6
    assert (found["gen_ai.usage.num_sequences"], found["gen_ai.request.n"]) == (2, 2)
    assert (found["gen_ai.request.temperature"], found["gen_ai.request.max_tokens"]) == (0.5, 3)
    assert (found["gen_ai.request.id"], found["gen_ai.response.model"]) == ("r-1", "tiny")
    assert found["gen_ai.response.finish_reasons"] == ("length", "length")
    assert found["http.response.status_code"] == 200
    first, total = found["gen_ai.latency.time_to_first_token"], found["gen_ai.latency.e2e"]
    assert 0 < first <= total
    assert 0 <= found["gen_ai.latency.time_in_queue"] <= first
    assert found["gen_ai.latency.time_in_model_inference"] >= found["gen_ai.latency.time_in_model_decode"]
    assert span.end_time - span.start_time == pytest.approx(total * 1e9, rel=0.01)
    (event,) = span.events
    assert (event.name, span.start_time <= event.timestamp <= span.end_time) == ("first_token", True)
    assert "sesame" not in span.to_json()


async def test_without_a_callers_trace_a_span_is_a_root_and_a_broken_header_is_ignored(traced, exporter):
    for headers in ({}, {"traceparent": "nonsense"}):
        await traced.send(PATH, BODY, headers=headers)
    assert [span.parent for span in exporter.get_finished_spans()] == [None, None]


async def test_streams_are_traced_and_what_does_not_use_the_model_is_not(traced, exporter):
    await traced.get("/health")
    await traced.send(PATH, raw="{")
    assert exporter.get_finished_spans() == ()
    await traced.stream(PATH, BODY)
    (span,) = exporter.get_finished_spans()
    assert span.attributes["gen_ai.usage.completion_tokens"] == 6


def test_without_the_extra_the_flag_is_refused_with_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.http.trace_exporter", None)
    with pytest.raises(ConfigError, match=r"octavo\[otel\]"):
        open_tracer("http://127.0.0.1:4318/v1/traces")


def test_the_tracer_of_the_flag_names_the_service():
    pytest.importorskip("opentelemetry.exporter.otlp.proto.http")
    provider = open_tracer("http://127.0.0.1:9/v1/traces")
    assert provider.resource.attributes["service.name"] == "octavo"
    provider.shutdown()
