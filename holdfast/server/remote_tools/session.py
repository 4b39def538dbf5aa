"""Session: one connection to a remote MCP server, by the official SDK. The only module that imports it.

The SDK speaks both protocols, Streamable HTTP and the older one over server-sent events, in all their versions. Each of
its requests passes `Guard`, which checks the host and its address and bounds the reply.
"""

from __future__ import annotations

import asyncio
import json
import logging
import re
from collections.abc import AsyncIterator, Coroutine, Sequence
from contextlib import AbstractAsyncContextManager
from http import HTTPStatus
from typing import Any, TypeVar

import httpx2
from mcp import Client, MCPError
from mcp.client.sse import sse_client
from mcp.client.streamable_http import streamable_http_client
from mcp_types import Implementation

from holdfast.core.version import __version__
from holdfast.server.remote_tools.hosts import PORTS, AllowedHosts, NotAllowed
from holdfast.server.remote_tools.values import MOST_DESCRIPTION, RemoteFault, RemoteServer, Result

MOST_REPLY, MOST_STREAM = 2 << 20, 16 << 20
"""Maximum number of bytes of one HTTP reply of a server, and of one that is a stream of events."""
MOST_MARKS = 1 << 16
"""Maximum number of brackets, braces, commas and quotes in a reply or an event. It bounds the time to decode it."""
MARKS = (b"[", b"{", b",", b'"')
EVENT_END = re.compile(rb"\r?\n\r?\n|\r\r")
MOST_ADDRESSES = 4
"""Maximum number of addresses of a host that are tried."""
MOST_TOOLS = 128
"""Maximum number of tools of one server that the model may call."""
MOST_LISTED = 1024
"""Maximum number of tools that a server may list."""
MOST_SCHEMAS = 256 << 10
"""Maximum number of bytes of the names, descriptions and schemas of one server's tools, as JSON."""
MOST_PAGES = 32
"""Maximum number of pages of a server's list."""
MOST_OUTPUT = 128 << 10
"""Maximum number of characters of a call's output."""
MOST_MESSAGE = 512
"""Maximum number of characters of a server's error message."""
LIST_SECONDS = 20.0
"""Seconds for a server to accept the connection and list its tools, unless a call has less."""
OLDER = (400, 404, 405, 406, 415)
"""Statuses by which a server that knows only the older protocol refuses the newer one."""

PHRASES = {int(status): status.phrase for status in HTTPStatus}

T = TypeVar("T")

for name in ("mcp", "httpx2", "httpcore2"):  # They log URLs of failed requests, which may hold secrets.
    logging.getLogger(name).setLevel(logging.CRITICAL)


class Guard(httpx2.AsyncBaseTransport):  # type: ignore[misc]
    """Sends requests to allowed hosts only, at an address that was checked just before, and bounds the replies.

    The connection is made to the checked address itself, so that the name cannot mean another one a moment later. TLS
    still verifies the name.
    """

    def __init__(self, allowed: AllowedHosts) -> None:
        self._allowed = allowed
        self._inner = httpx2.AsyncHTTPTransport(trust_env=False)
        self.refused = ""
        """Why a request was refused here; empty: none was."""
        self.status = 0
        """Status of the last refused message; 0: none was."""

    async def handle_async_request(self, request: Any) -> Any:
        """Send a request. Raises TransportError if the host or its address is not allowed."""
        host, scheme = request.url.raw_host.decode(), request.url.scheme
        port = request.url.port or PORTS[scheme]
        try:
            self._allowed.check_host(host, port, scheme)
            addresses = self._allowed.reachable(host, await resolved(host, port))
        except NotAllowed as error:
            self.refused = str(error)
            raise httpx2.ConnectError(str(error)) from None
        request.headers["accept-encoding"] = "identity"
        response = await self._send(request, host, addresses[:MOST_ADDRESSES])
        if response.status_code >= 400 and request.method == "POST":  # A server need not take the others.
            self.status = response.status_code
        kind = response.headers.get("content-type", "").partition(";")[0].strip().lower()
        response.stream = Bounded(response.stream, events=kind == "text/event-stream")
        if response.headers.get("content-encoding", "identity") != "identity":
            await response.stream.aclose()
            raise httpx2.DecodingError("the reply is compressed, which was not asked for")
        return response

    async def _send(self, request: Any, host: str, addresses: Sequence[str]) -> Any:
        """Send a request to the first of these addresses that takes the connection. Raises TransportError."""
        for number, address in enumerate(addresses, 1):
            made = httpx2.Request(
                request.method,
                request.url.copy_with(host=address),
                headers=request.headers,
                stream=request.stream,
                extensions={**request.extensions, "sni_hostname": host},
            )
            try:
                return await self._inner.handle_async_request(made)
            except (httpx2.ConnectError, httpx2.ConnectTimeout):
                if number == len(addresses):
                    raise
        raise httpx2.ConnectError(f"{host} has no address")

    async def aclose(self) -> None:
        """Close all connections."""
        await self._inner.aclose()


class Bounded(httpx2.AsyncByteStream):  # type: ignore[misc]
    """A reply's body. Raises DecodingError if it is too large, or if it has too many values to be decoded at once."""

    def __init__(self, inner: Any, *, events: bool) -> None:
        """`events` says that it is a stream of server-sent events, each of which is decoded by itself."""
        self._inner, self._events = inner, events
        self._most = MOST_STREAM if events else MOST_REPLY
        self._marks = 0
        """Number of marks in the event in progress; in the whole reply if it is no stream."""

    async def __aiter__(self) -> AsyncIterator[bytes]:
        size = 0
        async for piece in self._inner:
            size += len(piece)
            if size > self._most:
                raise httpx2.DecodingError(f"the reply has more than {self._most} bytes")
            self._count(piece)
            yield piece

    def _count(self, piece: bytes) -> None:
        for number, part in enumerate(EVENT_END.split(piece) if self._events else [piece]):
            self._marks = (0 if number else self._marks) + sum(map(part.count, MARKS))
            if self._marks > MOST_MARKS:
                raise httpx2.DecodingError(f"the reply has more than {MOST_MARKS} brackets, commas and quotes")

    async def aclose(self) -> None:
        """Close the body."""
        await self._inner.aclose()


async def resolved(host: str, port: int) -> list[str]:
    """Return the addresses of a host. Raises ConnectError."""
    try:
        found = await asyncio.get_running_loop().getaddrinfo(host.strip("[]"), port)
    except OSError:
        raise httpx2.ConnectError(f"{host} is not known") from None
    return list(dict.fromkeys(str(each[4][0]) for each in found))


class Session:
    """One connection to a server, for one response. It is opened at its first use."""

    def __init__(self, server: RemoteServer, allowed: AllowedHosts, seconds: float) -> None:
        """`seconds` is the time limit of a call."""
        self._server, self._allowed, self._seconds = server, allowed, seconds
        self._guard = Guard(allowed)
        self._client: asyncio.Future[Client] | None = None
        self._closing = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        """Task that holds the connection: what the SDK opens must be closed by the task that opened it."""

    async def list_tools(self) -> list[dict[str, Any]]:
        """Return the tools that the request allows, in the shape of an `mcp_list_tools` item. Raises RemoteFault."""
        return await self._bounded(self._list(), min(LIST_SECONDS, self._seconds), "the list of tools")

    async def call(self, name: str, arguments: dict[str, Any]) -> Result:
        """Call a tool. Raises RemoteFault if there is no result."""
        return await self._bounded(self._call(name, arguments), self._seconds, "the call")

    async def close(self) -> None:
        """End the connection."""
        self._closing.set()
        if self._task is not None:
            await asyncio.gather(self._task, return_exceptions=True)
        await self._guard.aclose()

    def abort(self) -> None:
        """End the connection without a word to the server."""
        if self._task is not None:
            self._task.cancel()

    async def _bounded(self, work: Coroutine[Any, Any, T], seconds: float, what: str) -> T:
        """Do work within a time limit, and turn each failure into a RemoteFault."""
        try:
            async with asyncio.timeout(seconds):
                return await work
        except TimeoutError:
            raise RemoteFault(f"{what} took more than {seconds:g} s", code=HTTPStatus.GATEWAY_TIMEOUT) from None
        except RemoteFault:
            raise
        except Exception as error:
            raise self._fault(error) from None

    async def _list(self) -> list[dict[str, Any]]:
        client = await self._connected()
        found: list[dict[str, Any]] = []
        cursor, listed = None, 0
        for _ in range(MOST_PAGES):
            page = await client.list_tools(cursor=cursor)
            listed += len(page.tools)
            if listed > MOST_LISTED:
                raise too_much(f"the server lists {listed} tools or more; at most {MOST_LISTED} are read")
            tools = [_tool(each) for each in page.tools]
            found += filter(self._server.allowed.takes, tools)
            cursor = page.next_cursor
            if not cursor:
                break
        else:
            raise too_much(f"the server's list of tools has more than {MOST_PAGES} pages")
        size = len(json.dumps(found))
        if len(found) > MOST_TOOLS or size > MOST_SCHEMAS:
            counts = f"{len(found)} tools with {size} bytes of schemas"
            limits = f"at most {MOST_TOOLS} with {MOST_SCHEMAS} bytes are taken"
            raise too_much(f"the server lists {counts}; {limits}; choose some with allowed_tools")
        return found

    async def _call(self, name: str, arguments: dict[str, Any]) -> Result:
        client = await self._connected()
        result = await client.call_tool(name, arguments)
        blocks = [each.model_dump(by_alias=True, mode="json", exclude_none=True) for each in result.content]
        text = "\n".join(map(_text, blocks))
        if not blocks and result.structured_content is not None:
            text = json.dumps(result.structured_content, ensure_ascii=False)
        if len(text) > MOST_OUTPUT:
            raise too_much(f"the result has {len(text)} characters; at most {MOST_OUTPUT} are taken")
        if result.is_error:
            content = [{"type": "text", "text": text}]
            return Result(None, {"type": "mcp_tool_execution_error", "content": content})
        return Result(text)

    async def _connected(self) -> Client:
        """Return the open connection. All callers wait for the same opening, which ends once nobody waits for it."""
        if self._client is None:
            self._client = asyncio.get_running_loop().create_future()
            self._task = asyncio.create_task(self._hold(self._client))
        return await asyncio.shield(self._client)

    async def _hold(self, opened: asyncio.Future[Client]) -> None:
        """Open the connection, by the older protocol if the server refuses the newer one, and hold it until `close`."""
        try:
            try:
                await self._hold_by(self._streamable(), opened)
            except Exception:
                if opened.done() or self._guard.status not in OLDER or self._guard.refused:
                    raise
                self._guard.status = 0
                await self._hold_by(self._events(), opened)
        except Exception as error:
            if not opened.done():
                opened.set_exception(self._fault(error))
                opened.exception()  # Nobody may wait for it any more.

    async def _hold_by(self, transport: AbstractAsyncContextManager[Any], opened: asyncio.Future[Client]) -> None:
        about = Implementation(name="holdfast", version=__version__)
        async with Client(transport, client_info=about, cache=None) as client:
            self._guard.status = 0  # An older server refuses the question for its newest protocol.
            opened.set_result(client)
            await self._closing.wait()

    def _streamable(self) -> AbstractAsyncContextManager[Any]:
        http = self._http(headers=dict(self._server.headers))
        found: AbstractAsyncContextManager[Any] = streamable_http_client(self._server.url, http_client=http)
        return found

    def _events(self) -> AbstractAsyncContextManager[Any]:
        found: AbstractAsyncContextManager[Any] = sse_client(
            self._server.url, headers=dict(self._server.headers), httpx_client_factory=self._http
        )
        return found

    def _http(self, headers: dict[str, str] | None = None, timeout: Any = None, auth: Any = None) -> Any:
        """Return a client whose requests pass the guard. The SDK calls this with its own time limits."""
        limit = timeout or httpx2.Timeout(min(LIST_SECONDS, self._seconds), read=self._seconds)
        return httpx2.AsyncClient(headers=headers, timeout=limit, transport=self._guard, trust_env=False)

    def _fault(self, error: BaseException) -> RemoteFault:
        """Return the fault of a failure, with what the guard saw of it. Shows nothing that only this machine knows."""
        while isinstance(error, BaseExceptionGroup):
            error = error.exceptions[0]
        if self._guard.refused:
            return RemoteFault(self._guard.refused, code=HTTPStatus.FORBIDDEN)
        if isinstance(error, RemoteFault):
            return error
        status = error.response.status_code if isinstance(error, httpx2.HTTPStatusError) else self._guard.status
        if status:
            phrase = f" ({PHRASES[status]})" if status in PHRASES else ""
            return RemoteFault(f"Http status code: {status}{phrase}", code=status)
        if isinstance(error, MCPError):
            return RemoteFault(error.message[:MOST_MESSAGE], code=error.code, protocol=True)
        if isinstance(error, httpx2.DecodingError):
            return RemoteFault(str(error), code=HTTPStatus.BAD_GATEWAY)
        if isinstance(error, httpx2.TransportError):
            return RemoteFault("the server cannot be reached", code=HTTPStatus.BAD_GATEWAY)
        return RemoteFault("the server's reply cannot be read", code=HTTPStatus.BAD_GATEWAY)


def too_much(reason: str) -> RemoteFault:
    """Return the fault of a reply that exceeds a limit."""
    return RemoteFault(reason, code=HTTPStatus.BAD_GATEWAY)


def _tool(tool: Any) -> dict[str, Any]:
    """Return a tool in the shape of an `mcp_list_tools` item."""
    hints = tool.annotations
    return {
        "name": tool.name,
        "description": None if tool.description is None else tool.description[:MOST_DESCRIPTION],
        "input_schema": tool.input_schema,
        "annotations": None if hints is None else hints.model_dump(by_alias=True, mode="json", exclude_none=True),
    }


def _text(block: dict[str, Any]) -> str:
    """Return a block of a result as text. An image or other data is named with its type and size."""
    match block:
        case {"type": "text", "text": str(text)} | {"type": "resource", "resource": {"text": str(text)}}:
            return text
        case {"type": "resource_link", "uri": str(uri)}:
            return uri
        case {"data": str(data), "mimeType": str(kind)} | {"resource": {"blob": str(data), "mimeType": str(kind)}}:
            return f"[{kind}, {len(data) * 3 // 4} bytes]"
    return f"[{block.get('type')}]"
