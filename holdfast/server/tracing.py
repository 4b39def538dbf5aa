"""Tracing: an OpenTelemetry span for each request that generates, if a collector is configured.

The attributes follow OpenTelemetry's conventions for generative AI, and vLLM's names for latencies. OpenTelemetry is
imported only if tracing is on.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from holdfast.core.version import __version__
from holdfast.server.replies import RequestUsage

if TYPE_CHECKING:
    from opentelemetry.sdk.trace.export import SpanExporter
    from opentelemetry.trace import Span

OPERATIONS = {
    "/v1/chat/completions": "chat",
    "/v1/completions": "text_completion",
    "/v1/embeddings": "embeddings",
    "/v1/messages": "chat",
    "/v1/responses": "chat",
}
"""Operation name in the conventions, by path."""
REQUESTED = {"temperature": "temperature", "top_p": "top_p", "top_k": "top_k", "most_tokens": "max_tokens", "n": "n"}
"""Name in the conventions of each request field that a span reports."""


def exporter_to(endpoint: str) -> SpanExporter:
    """Create an exporter that sends spans to a collector, by OTLP over HTTP. The default path is /v1/traces."""
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

    whole = endpoint if urlsplit(endpoint).path.strip("/") else f"{endpoint.rstrip('/')}/v1/traces"
    return OTLPSpanExporter(endpoint=whole)


class Tracing:
    """Creates the spans of one server. A background thread sends them."""

    def __init__(self, exporter: SpanExporter) -> None:
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
        from opentelemetry.trace import SpanKind, Status, StatusCode
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        # Values from the environment, for example OTEL_SERVICE_NAME, override these.
        resource = Resource({"service.name": "holdfast", "service.version": __version__}).merge(Resource.create())
        self._provider = TracerProvider(resource=resource)
        self._provider.add_span_processor(BatchSpanProcessor(exporter))
        self._tracer = self._provider.get_tracer("holdfast", __version__)
        self._parents = TraceContextTextMapPropagator()
        self._kind, self._failed = SpanKind.SERVER, Status(StatusCode.ERROR)

    def begin(self, method: str, path: str, headers: list[tuple[bytes, bytes]], id: str) -> Span | None:
        """Begin a request's span, below the caller's (traceparent). Returns None if the request does not generate."""
        if method != "POST" or path not in OPERATIONS:
            return None
        carrier = {name.decode("latin-1"): value.decode("latin-1") for name, value in headers}
        attributes = {
            "gen_ai.operation.name": OPERATIONS[path],
            "gen_ai.provider.name": "holdfast",
            "gen_ai.request.id": id,
            "http.request.method": method,
            "url.path": path,
        }
        return self._tracer.start_span(
            OPERATIONS[path],
            context=self._parents.extract(carrier),
            kind=self._kind,
            attributes=attributes,
            start_time=time.time_ns(),
        )

    def end(self, span: Span, status: int, usage: RequestUsage | None, seconds: float) -> None:
        """End a request's span. `usage` is None if the request was refused before it ran."""
        span.set_attribute("http.response.status_code", status)
        span.set_attribute("gen_ai.latency.e2e", seconds)
        if status >= 500:
            span.set_status(self._failed)
        if usage is not None:
            if usage.wanted is not None:
                model = usage.wanted.model
                span.update_name(f"{span.attributes['gen_ai.operation.name']} {model}")  # type: ignore[attr-defined]
                span.set_attributes({"gen_ai.request.model": model, "gen_ai.response.model": model})
            span.set_attributes(attributes_of(usage))
        span.end(time.time_ns())

    def close(self) -> None:
        """Send the remaining spans."""
        self._provider.shutdown()


def attributes_of(usage: RequestUsage) -> dict[str, Any]:
    """Return the attributes of a request that ran: token counts, latencies in seconds, and sampling."""
    attributes: dict[str, Any] = {
        "gen_ai.usage.input_tokens": usage.prompt_tokens,
        "gen_ai.usage.output_tokens": usage.completion_tokens,
        "gen_ai.usage.cache_read.input_tokens": usage.cached_tokens,
        # vLLM's names for the same counts.
        "gen_ai.usage.prompt_tokens": usage.prompt_tokens,
        "gen_ai.usage.completion_tokens": usage.completion_tokens,
    }
    if usage.queued is not None:
        attributes["gen_ai.latency.time_in_queue"] = usage.queued
    if usage.ttft is not None:
        attributes["gen_ai.latency.time_to_first_token"] = usage.ttft
    if usage.finish_reasons:
        attributes["gen_ai.response.finish_reasons"] = sorted(usage.finish_reasons)
    for field, name in REQUESTED.items() if usage.wanted is not None else ():
        if (value := getattr(usage.wanted, field)) is not None:
            attributes[f"gen_ai.request.{name}"] = value
    return attributes
