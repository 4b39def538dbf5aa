"""Connections to remote servers: real ones of the official SDK, and hostile ones."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
import uvicorn

pytest.importorskip("mcp", reason="the SDK of MCP is not installed")

from mcp.server import MCPServer

from holdfast.server.remote_tools import session as sessions
from holdfast.server.remote_tools.hosts import AllowedHosts
from holdfast.server.remote_tools.session import Session
from holdfast.server.remote_tools.values import RemoteFault, RemoteServer, Result, read_server

ALLOWED = AllowedHosts.read(["localhost:*"])
Send = Callable[[dict[str, Any]], Awaitable[None]]


@asynccontextmanager
async def serving(app: Any) -> AsyncIterator[int]:
    """Serve an ASGI application on a free port."""
    server = uvicorn.Server(uvicorn.Config(app, port=0, log_config=None, ws="none", timeout_graceful_shutdown=0))
    task = asyncio.create_task(server.serve())
    while not server.started:
        await asyncio.sleep(0.005)
    try:
        yield int(server.servers[0].sockets[0].getsockname()[1])
    finally:
        server.should_exit = True
        await task


def real() -> MCPServer:
    made = MCPServer("test")

    @made.tool()
    def add(a: int, b: int) -> str:
        """Add two numbers."""
        return str(a + b)

    @made.tool()
    async def slow() -> str:
        await asyncio.sleep(60)
        return ""

    @made.tool()
    def large(size: int) -> str:
        return "x" * size

    return made


def answering(status: int, headers: dict[str, str], body: bytes) -> Any:
    """An application that gives every request the same answer."""

    async def app(scope: Any, receive: Any, send: Send) -> None:
        if scope["type"] == "http":
            given = [(name.encode(), value.encode()) for name, value in headers.items()]
            await send({"type": "http.response.start", "status": status, "headers": given})
            await send({"type": "http.response.body", "body": body})

    return app


def session_to(url: str, seconds: float = 20, **fields: Any) -> Session:
    return Session(RemoteServer("test", url, **fields), ALLOWED, seconds)


async def fault_of(session: Session) -> RemoteFault:
    with pytest.raises(RemoteFault) as caught:
        await session.list_tools()
    await session.close()
    return caught.value


@pytest.mark.parametrize(
    ("transport", "path"), [("streamable_http_app", "/mcp"), ("sse_app", "/sse")], ids=["streamable", "events"]
)
async def test_tools_of_either_protocol_are_listed_and_called(transport: str, path: str) -> None:
    async with serving(getattr(real(), transport)()) as port:
        session = session_to(f"http://localhost:{port}{path}")
        listed = await session.list_tools()
        results = await asyncio.gather(*(session.call("add", {"a": n, "b": 1}) for n in range(3)))
        failed = await session.call("add", {"a": "no number"})
        await session.close()
    assert [tool["name"] for tool in listed] == ["add", "slow", "large"]
    assert listed[0]["input_schema"]["required"] == ["a", "b"]
    assert results == [Result("1"), Result("2"), Result("3")]
    assert failed.output is None and failed.error is not None
    assert failed.error["type"] == "mcp_tool_execution_error"


async def test_a_call_that_takes_too_long_is_a_fault_and_the_others_go_on() -> None:
    async with serving(real().streamable_http_app()) as port:
        session = session_to(f"http://localhost:{port}/mcp")
        await session.list_tools()
        session._seconds = 0.2
        calling = asyncio.create_task(session.call("slow", {}))
        await asyncio.sleep(0)  # it has that limit, and the others have one that a busy machine keeps
        session._seconds = 200.0
        quick = await session.call("add", {"a": 1, "b": 1})
        (slow,) = await asyncio.gather(calling, return_exceptions=True)
        await session.close()
    assert isinstance(slow, RemoteFault) and slow.code == 504
    assert quick == Result("2")


async def test_a_result_beyond_the_limit_is_a_fault() -> None:
    async with serving(real().streamable_http_app()) as port:
        session = session_to(f"http://localhost:{port}/mcp")
        with pytest.raises(RemoteFault, match=f"at most {sessions.MOST_OUTPUT} are taken"):
            await session.call("large", {"size": sessions.MOST_OUTPUT + 1})
        await session.close()


async def test_only_tools_that_the_request_allows_count_toward_the_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sessions, "MOST_TOOLS", 2)
    async with serving(real().streamable_http_app()) as port:
        url = f"http://localhost:{port}/mcp"
        assert "choose some with allowed_tools" in (await fault_of(session_to(url))).message
        given = {"server_label": "test", "server_url": url, "allowed_tools": ["add"]}
        session = Session(read_server(given, "t"), ALLOWED, 20)
        assert [tool["name"] for tool in await session.list_tools()] == ["add"]
        await session.close()


async def test_headers_are_sent_with_each_request() -> None:
    seen = []
    inner = real().streamable_http_app()

    async def app(scope: Any, receive: Any, send: Send) -> None:
        if scope["type"] == "http":
            seen.append(dict(scope["headers"]).get(b"authorization"))
        await inner(scope, receive, send)

    async with serving(app) as port:
        session = session_to(f"http://localhost:{port}/mcp", headers={"Authorization": "Bearer secret"})
        await session.call("add", {"a": 1, "b": 1})
        await session.close()
    assert set(seen) == {b"Bearer secret"}


@pytest.mark.parametrize(
    ("status", "headers", "body", "code", "message"),
    [
        (401, {}, b"", 401, "Http status code: 401 (Unauthorized)"),
        (404, {}, b"", 404, "Http status code: 404 (Not Found)"),
        (500, {"content-type": "application/json"}, b"{", 500, "Http status code: 500 (Internal Server Error)"),
        (200, {"content-type": "text/html"}, b"<html>", -32600, "Unexpected content type: text/html"),
        (200, {"content-type": "application/json", "content-encoding": "gzip"}, b"", 502, "compressed"),
    ],
)
async def test_what_is_no_server_is_a_fault(
    status: int, headers: dict[str, str], body: bytes, code: int, message: str
) -> None:
    async with serving(answering(status, headers, body)) as port:
        fault = await fault_of(session_to(f"http://localhost:{port}/mcp"))
    assert fault.code == code
    assert message in fault.message


async def test_a_reply_beyond_the_limit_is_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sessions, "MOST_REPLY", 1000)
    body = json.dumps({"jsonrpc": "2.0", "id": 1, "result": {"x": "y" * 1000}}).encode()
    async with serving(answering(200, {"content-type": "application/json"}, body)) as port:
        fault = await fault_of(session_to(f"http://localhost:{port}/mcp", seconds=5))
    assert fault.code in (502, -32700)


@pytest.mark.parametrize("kind", ["application/json", "text/event-stream"])
async def test_a_reply_that_takes_long_to_decode_is_not_decoded(kind: str) -> None:
    body = json.dumps({"jsonrpc": "2.0", "id": 1, "result": {"x": [[]] * sessions.MOST_MARKS}}).encode()
    body = b"event: message\ndata: " + body + b"\n\n" if kind == "text/event-stream" else body
    async with serving(answering(200, {"content-type": kind}, body)) as port:
        fault = await fault_of(session_to(f"http://localhost:{port}/mcp", seconds=5))
    assert fault.code in (502, -32700, -32000)


async def test_many_events_of_a_stream_may_have_more_marks_together() -> None:
    async def pieces() -> AsyncIterator[bytes]:
        for _ in range(4):
            yield b"data: [" + b"[]," * (sessions.MOST_MARKS // 3)
            yield b"0]\r\n\r\n"

    body = sessions.Bounded(pieces(), events=True)
    assert len([piece async for piece in body]) == 8
    with pytest.raises(Exception, match="brackets, commas and quotes"):
        _ = [piece async for piece in sessions.Bounded(pieces(), events=False)]


async def test_the_next_address_is_tried_if_one_takes_no_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    async def resolved(host: str, port: int) -> list[str]:
        return ["127.0.0.2", "127.0.0.1"]

    monkeypatch.setattr(sessions, "resolved", resolved)
    async with serving(real().streamable_http_app()) as port:
        session = session_to(f"http://localhost:{port}/mcp")
        assert len(await session.list_tools()) == 3
        await session.close()


async def test_a_redirect_to_another_host_is_not_followed() -> None:
    hits = []

    async def other(scope: Any, receive: Any, send: Send) -> None:
        hits.append(scope["type"])

    async with serving(other) as target:
        headers = {"location": f"http://127.0.0.1:{target}/mcp"}
        async with serving(answering(307, headers, b"")) as port:
            await fault_of(session_to(f"http://localhost:{port}/mcp"))
    assert "http" not in hits


async def test_a_name_that_means_a_private_address_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    async def resolved(host: str, port: int) -> list[str]:
        return ["127.0.0.1"]

    monkeypatch.setattr(sessions, "resolved", resolved)
    session = Session(RemoteServer("test", "http://sea.example/mcp"), AllowedHosts.read(["sea.example"]), 5)
    fault = await fault_of(session)
    assert (fault.code, "no public address" in fault.message) == (403, True)


async def test_the_connection_goes_to_the_address_that_was_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    async def resolved(host: str, port: int) -> list[str]:
        asked.append(host)
        return ["127.0.0.1"]

    hosts: list[bytes] = []

    async def app(scope: Any, receive: Any, send: Send) -> None:
        if scope["type"] == "http":
            hosts.append(dict(scope["headers"])[b"host"])
            await answering(401, {}, b"")(scope, receive, send)

    monkeypatch.setattr(sessions, "resolved", resolved)
    async with serving(app) as port:
        allowed = AllowedHosts.read(["sea.example:*", "127.0.0.0/8"])
        fault = await fault_of(Session(RemoteServer("test", f"http://sea.example:{port}/mcp"), allowed, 60))
    assert fault.code == 401
    assert set(asked) == {"sea.example"} and set(hosts) == {f"sea.example:{port}".encode()}


async def test_a_server_that_says_nothing_costs_the_time_limit() -> None:
    async def app(scope: Any, receive: Any, send: Send) -> None:
        if scope["type"] == "http":
            await asyncio.sleep(60)

    async with serving(app) as port:
        session = session_to(f"http://localhost:{port}/mcp", seconds=0.2)
        with pytest.raises(RemoteFault, match=r"the list of tools took more than 0\.2 s"):
            await session.list_tools()
        session.abort()


async def test_a_server_that_is_gone_is_a_fault() -> None:
    fault = await fault_of(session_to("http://localhost:9/mcp"))
    assert (fault.code, fault.message) == (502, "the server cannot be reached")
