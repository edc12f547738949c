"""OpenTelemetry traces: one span for each request that uses the model (`pip install octavo[otel]`).

The span is made when the response has ended, with the times that it had, so that serving pays nothing for it. Its
parent is the caller's (W3C `traceparent`). Attributes follow the conventions for generative AI, and vLLM's names for
the engine's times.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from octavo import __version__
from octavo.errors import ConfigError
from octavo.server.exchange import Exchange

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider

TIMES = {
    "queue": "gen_ai.latency.time_in_queue",
    "prefill": "gen_ai.latency.time_in_model_prefill",
    "decode": "gen_ai.latency.time_in_model_decode",
}
"""Field of RequestMetrics -> attribute. Of several prompts the slowest counts."""


def open_tracer(endpoint: str) -> TracerProvider:
    """What sends spans to an OTLP endpoint over HTTP. Raises ConfigError without the extra."""
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError as error:
        raise ConfigError(f"--otlp-traces-endpoint needs pip install 'octavo[otel]' ({error})") from None
    resource = Resource.create({"service.version": __version__})
    if "OTEL_SERVICE_NAME" not in os.environ and "service.name" not in os.environ.get("OTEL_RESOURCE_ATTRIBUTES", ""):
        resource = resource.merge(Resource({"service.name": "octavo"}))
    provider = TracerProvider(resource=resource)
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint=endpoint)))
    return provider


def trace_exchanges(provider: TracerProvider) -> Callable[[Exchange], None]:
    """An observer that makes a span of each exchange which used the model."""
    from opentelemetry.trace import SpanKind, Status, StatusCode
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    tracer = provider.get_tracer("octavo", __version__)
    propagator = TraceContextTextMapPropagator()

    def observe(exchange: Exchange) -> None:
        if not exchange.num_sequences:
            return
        now = time.time_ns()
        duration = time.monotonic() - exchange.started_at
        span = tracer.start_span(
            "llm_request",
            context=propagator.extract({name: value for name, value in exchange.trace.items() if value}),
            kind=SpanKind.SERVER,
            start_time=now - int(duration * 1e9),
            attributes=attributes(exchange, duration),
        )
        if exchange.first_token_at is not None:
            after = int((exchange.first_token_at - exchange.started_at - duration) * 1e9)
            span.add_event("first_token", timestamp=now + after)
        if exchange.status >= 500:
            span.set_status(Status(StatusCode.ERROR))
        span.end(end_time=now)

    return observe


def attributes(exchange: Exchange, duration: float) -> dict[str, Any]:
    """What a span says of its request. No prompts, no answers, no keys."""
    found: dict[str, Any] = {
        "http.request.method": exchange.method,
        "http.route": exchange.path,
        "http.response.status_code": exchange.status or 499,
        "gen_ai.system": "octavo",
        "gen_ai.request.id": exchange.request_id,
        "gen_ai.request.model": exchange.model,
        "gen_ai.response.model": exchange.model,
        "gen_ai.response.finish_reasons": exchange.finish_reasons,
        "gen_ai.usage.num_sequences": exchange.num_sequences,
        "gen_ai.usage.prompt_tokens": exchange.num_prompt_tokens,
        "gen_ai.usage.completion_tokens": exchange.num_generated_tokens,
        "gen_ai.usage.input_tokens": exchange.num_prompt_tokens,
        "gen_ai.usage.output_tokens": exchange.num_generated_tokens,
        "gen_ai.latency.e2e": duration,
    }
    if (params := exchange.params) is not None:
        found |= {
            "gen_ai.request.temperature": params.temperature,
            "gen_ai.request.top_p": params.top_p,
            "gen_ai.request.top_k": params.top_k,
            "gen_ai.request.n": params.n,
        }
        if params.max_tokens is not None:
            found["gen_ai.request.max_tokens"] = params.max_tokens
    if exchange.first_token_at is not None:
        found["gen_ai.latency.time_to_first_token"] = exchange.first_token_at - exchange.started_at
    for field, name in TIMES.items():
        values = [value for metrics in exchange.metrics if (value := getattr(metrics, field)) is not None]
        if values:
            found[name] = max(values)
    prefill, decode = (found.get(TIMES[field]) for field in ("prefill", "decode"))
    if prefill is not None and decode is not None:
        found["gen_ai.latency.time_in_model_inference"] = prefill + decode
    return found
