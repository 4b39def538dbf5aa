"""An HTTP transport that notes when data arrives, at about half of the processor time of httpx's own.

A load client reads hundreds of streams at once. If each chunk takes it 100 µs, chunks that come together are seen up to
milliseconds apart, and the times between tokens are the client's. Here the time is noted as soon as the socket has
data, and httptools parses the response.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator, Callable
from typing import Any

import httptools
import httpx

ARRIVED = "arrived"
"""Extension of a response: a function that returns when the data that was read last came, on the monotonic clock."""


def arrived_of(response: httpx.Response) -> Callable[[], float]:
    """The function that returns when the data that was read last came. Other transports know only the time now."""
    found: Callable[[], float] = response.extensions.get(ARRIVED, time.monotonic)
    return found


class StreamTransport(httpx.AsyncBaseTransport):
    """Sends HTTP/1.1 requests without TLS, each over a connection of its own or one that an ended response has left."""

    def __init__(self) -> None:
        self._idle: dict[tuple[str, int], list[_Connection]] = {}

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        """Send a request. Raises httpx's errors, as its own transport does."""
        timeout: dict[str, float | None] = request.extensions.get("timeout", {})
        place = request.url.host, request.url.port or 80
        body = await request.aread()
        connection = self._left(place) or await _connected(place, timeout.get("connect"))
        try:
            connection.send(request, body)
            await connection.head(timeout.get("read"))
        except BaseException:
            connection.close()
            raise
        stream = _Body(connection, timeout.get("read"), lambda: self._idle.setdefault(place, []).append(connection))
        extensions = {"http_version": b"HTTP/1.1", ARRIVED: stream.arrived}
        return httpx.Response(connection.status, headers=connection.headers, stream=stream, extensions=extensions)

    async def aclose(self) -> None:
        for connections in self._idle.values():
            for connection in connections:
                connection.close()
        self._idle.clear()

    def _left(self, place: tuple[str, int]) -> _Connection | None:
        """A connection that an ended response has left, if the server has not closed it."""
        left = self._idle.get(place, [])
        while left:
            connection = left.pop()
            if not connection.lost:
                return connection
        return None


async def _connected(place: tuple[str, int], timeout: float | None) -> _Connection:
    try:
        async with asyncio.timeout(timeout):
            _, connection = await asyncio.get_running_loop().create_connection(_Connection, *place)
    except TimeoutError:
        raise httpx.ConnectTimeout(f"no connection to {place[0]}:{place[1]} within {timeout} s") from None
    except OSError as error:
        raise httpx.ConnectError(str(error)) from error
    return connection


class _Connection(asyncio.Protocol):
    """One connection, with the response that it receives. httptools calls the methods that begin with `on_`."""

    def __init__(self) -> None:
        self.lost = False
        """Whether the connection is closed."""
        self._transport: asyncio.Transport | None = None
        self._error: Exception | None = None
        self._came = asyncio.Event()
        self._begin()

    def _begin(self) -> None:
        """Forget the response before."""
        self._parser = httptools.HttpResponseParser(self)
        self.status, self.headers = 0, list[tuple[bytes, bytes]]()
        self.received: deque[tuple[float, bytes]] = deque()
        """Pieces of the body that were not read yet, each with its time of arrival."""
        self.whole = False
        """Whether the response has ended."""
        self.kept = False
        """Whether the connection may serve another request after it."""
        self._now = 0.0
        self._headed = False

    def send(self, request: httpx.Request, body: bytes) -> None:
        """Write a request to the connection."""
        self._begin()
        target = request.url.raw_path
        lines = [request.method.encode() + b" " + target + b" HTTP/1.1"]
        lines += [name + b": " + value for name, value in request.headers.raw]
        assert self._transport is not None
        self._transport.write(b"\r\n".join([*lines, b"", body]))

    async def head(self, timeout: float | None) -> None:
        """Wait until the status and the headers are there."""
        while not self._headed:
            await self._more(timeout)

    async def piece(self, timeout: float | None) -> tuple[float, bytes] | None:
        """The next piece of the body, with its time of arrival; None at the end."""
        while not self.received:
            if self.whole:
                return None
            await self._more(timeout)
        return self.received.popleft()

    async def _more(self, timeout: float | None) -> None:
        """Wait for data. Raises an httpx error if none will come, or none comes in time."""
        if self._error is not None:
            raise self._error
        self._came.clear()
        try:
            if timeout is None:
                await self._came.wait()
            else:
                async with asyncio.timeout(timeout):
                    await self._came.wait()
        except TimeoutError:
            raise httpx.ReadTimeout(f"nothing came within {timeout} s") from None

    def close(self) -> None:
        """Close the connection."""
        self.lost = True
        if self._transport is not None:
            self._transport.close()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport  # type: ignore[assignment]

    def data_received(self, data: bytes) -> None:
        self._now = time.monotonic()
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._error = httpx.RemoteProtocolError(str(error))
            self.close()
        self._came.set()

    def connection_lost(self, reason: Exception | None) -> None:
        self.lost = True
        if self._error is None:
            self._error = httpx.RemoteProtocolError(f"the server closed the connection: {reason or 'no reason given'}")
        if self._headed and not self.whole and not self._counted():
            self.whole = True  # the end of the connection is that of the body
        self._came.set()

    def _counted(self) -> bool:
        """Whether the response says how long its body is, as a number or in chunks."""
        return any(name.lower() in (b"content-length", b"transfer-encoding") for name, _ in self.headers)

    def on_header(self, name: bytes, value: bytes) -> None:
        self.headers.append((name, value))

    def on_headers_complete(self) -> None:
        self.status, self._headed = self._parser.get_status_code(), True

    def on_body(self, body: bytes) -> None:
        self.received.append((self._now, body))

    def on_message_complete(self) -> None:
        self.whole, self.kept = True, self._parser.should_keep_alive()


class _Body(httpx.AsyncByteStream):
    """The body of a response."""

    def __init__(self, connection: _Connection, timeout: float | None, leave: Callable[[], Any]) -> None:
        """`leave` takes the connection back once the body has been read whole."""
        self._connection, self._timeout, self._leave = connection, timeout, leave
        self._at = 0.0

    def arrived(self) -> float:
        """When the piece that was read last came."""
        return self._at

    async def __aiter__(self) -> AsyncIterator[bytes]:
        while (piece := await self._connection.piece(self._timeout)) is not None:
            self._at, data = piece
            yield data

    async def aclose(self) -> None:
        connection = self._connection
        if connection.whole and connection.kept and not connection.received and not connection.lost:
            self._leave()
        else:
            connection.close()
