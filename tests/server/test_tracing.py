"""Spans of OpenTelemetry: their contents and parents, and that nothing is imported without them."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import httpx
import pytest
from fake_engine import FakeClient
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode

from holdfast.server import app as server_app
from holdfast.server.config import ServerConfig
from tests.served import environment

Http = Callable[..., httpx.AsyncClient]
HELLO = {"model": "tiny", "messages": [{"role": "user", "content": "hello"}], "temperature": 0.5}
TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


@pytest.fixture
def exporter(monkeypatch: pytest.MonkeyPatch) -> InMemorySpanExporter:
    exporter = InMemorySpanExporter()
    monkeypatch.setattr(server_app, "exporter_to", lambda endpoint: exporter)
    return exporter


async def spans(http: Http, exporter: InMemorySpanExporter, *asked: tuple[str, Any, dict[str, str]]) -> Any:
    """Return the spans of these requests, each a path, a body, and headers."""
    async with http(otlp_traces_endpoint="http://localhost:4318") as api:
        for path, body, headers in asked:
            await api.post(path, json=body, headers=headers)
        await api.get("/v1/models")
        api._transport.app.state.tracing.close()  # type: ignore[attr-defined]
    return exporter.get_finished_spans()


async def test_a_span_has_model_tokens_and_latencies(
    http: Http, exporter: InMemorySpanExporter, client: FakeClient
) -> None:
    client.cached = 3
    headers = {"traceparent": f"00-{TRACE}-{PARENT}-01", "x-request-id": "mine"}
    (span,) = await spans(http, exporter, ("/v1/chat/completions", HELLO | {"max_tokens": 9}, headers))
    assert span.name == "chat tiny" and span.kind is SpanKind.SERVER
    assert span.context.trace_id == int(TRACE, 16) and span.parent.span_id == int(PARENT, 16)
    reported = dict(span.attributes)
    assert 0 < reported.pop("gen_ai.latency.time_to_first_token") <= reported.pop("gen_ai.latency.e2e")
    assert reported == {
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": "holdfast",
        "gen_ai.request.id": "mine",
        "gen_ai.request.model": "tiny",
        "gen_ai.request.temperature": 0.5,
        "gen_ai.request.top_p": 1.0,
        "gen_ai.request.top_k": 0,
        "gen_ai.request.max_tokens": 9,
        "gen_ai.request.n": 1,
        "gen_ai.response.model": "tiny",
        "gen_ai.response.finish_reasons": ("stop",),
        "gen_ai.usage.input_tokens": len("<user>hello"),
        "gen_ai.usage.output_tokens": 4,
        "gen_ai.usage.cache_read.input_tokens": 3,
        "gen_ai.usage.prompt_tokens": len("<user>hello"),
        "gen_ai.usage.completion_tokens": 4,
        "gen_ai.latency.time_in_queue": 0.5,
        "http.request.method": "POST",
        "http.response.status_code": 200,
        "url.path": "/v1/chat/completions",
    }


async def test_each_route_that_generates_has_spans_streamed_refused_or_failed(
    http: Http, exporter: InMemorySpanExporter, client: FakeClient
) -> None:
    found: list[ReadableSpan] = await spans(
        http,
        exporter,
        ("/v1/completions", {"model": "tiny", "prompt": "x", "stream": True}, {}),
        ("/v1/responses", {"model": "tiny", "input": "x"}, {}),
        ("/v1/messages", {"model": "tiny", "max_tokens": 5, "messages": HELLO["messages"]}, {}),
        ("/v1/chat/completions", {"model": "other", "messages": HELLO["messages"]}, {}),
    )
    assert [(span.name, span.parent) for span in found] == [
        ("text_completion tiny", None), ("chat tiny", None), ("chat tiny", None), ("chat", None)
    ]  # fmt: skip
    assert [(span.attributes or {}).get("gen_ai.usage.output_tokens") for span in found] == [4, 4, 4, None]
    assert (found[-1].attributes or {})["http.response.status_code"] == 404
    assert all(span.status.status_code is StatusCode.UNSET for span in found)


async def test_a_failure_of_the_server_is_an_error(
    http: Http, exporter: InMemorySpanExporter, client: FakeClient
) -> None:
    client.refuse = RuntimeError("broken")
    (span,) = await spans(http, exporter, ("/v1/chat/completions", HELLO, {}))
    assert span.status.status_code is StatusCode.ERROR


@pytest.fixture
def collector() -> Iterator[tuple[str, list[tuple[str, bytes]]]]:
    """The address of a collector, and the paths and bodies that it has received."""
    received: list[tuple[str, bytes]] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            received.append((self.path, self.rfile.read(int(self.headers["content-length"]))))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *args: Any) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}", received
        server.shutdown()
        thread.join()


async def test_spans_reach_a_collector_before_the_server_ends(
    listening: Any, collector: tuple[str, list[tuple[str, bytes]]]
) -> None:
    url, received = collector
    async with listening(otlp_traces_endpoint=url) as server, httpx.AsyncClient(base_url=server.url) as api:
        assert (await api.post("/v1/chat/completions", json=HELLO)).status_code == 200
    (path, body) = received[0]
    sent = ExportTraceServiceRequest.FromString(body)  # type: ignore[attr-defined]
    assert path == "/v1/traces"
    assert [span.name for span in sent.resource_spans[0].scope_spans[0].spans] == ["chat tiny"]


def test_a_server_that_does_not_trace_imports_none_of_it() -> None:
    # FastAPI imports OpenTelemetry's interface by itself if it is installed.
    code = "import sys, holdfast.server.app; assert not [name for name in sys.modules if 'opentelemetry.sdk' in name]"
    subprocess.run([sys.executable, "-c", code], check=True, env=environment())


def test_a_wrong_address_is_refused_at_the_start() -> None:
    with pytest.raises(ValueError, match="otlp_traces_endpoint is localhost:4317; it must look like"):
        ServerConfig(otlp_traces_endpoint="localhost:4317")
