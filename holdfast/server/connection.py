"""One HTTP connection with limits. uvicorn limits the idle time between requests; this module adds all other limits."""

from __future__ import annotations

import asyncio
import logging
import resource
from typing import Any

import httptools
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle

from holdfast.server.config import ServerConfig
from holdfast.server.protocol import ApiError
from holdfast.server.replies import encode

MAX_HEADER_BYTES = 64 * 1024
UPLOAD_RATE = 256 * 1024
"""Minimum average rate in bytes per second for a long body. Each body also has the configured `body_seconds`.

Routes without uploads refuse a long body by its declared length, before they receive any of it.
"""
PIECE_BYTES = 1024
"""Maximum number of bytes given to the parser at once, except in declared bodies. It limits requests parsed ahead."""
READ_BYTES = 16 * 1024
"""Minimum number of bytes of an answer that a client must read within the time limit."""
LINGER_SECONDS = 2.0
"""Seconds in which the rest of a refused request is read and dropped. Without this, a reset may overtake the answer."""
LINGER_BYTES = 32 << 20
"""Maximum number of bytes that are read and dropped within LINGER_SECONDS."""
UNREAD_SECONDS = 0.02
"""Seconds of waiting before a connection may be closed to make room. Its last bytes may not have been read earlier."""
RESERVED_FILES = 96
"""Number of open files that connections leave free for other uses."""
LOG_SECONDS = 10.0
CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
CHUNKED = b"\r\ntransfer-encoding: chunked\r\n"

log = logging.getLogger("holdfast.server")


class Connections:
    """State that all connections of a server share: their limits, and which of them wait for a request."""

    def __init__(self, config: ServerConfig) -> None:
        self.config = config
        self.limit = connection_limit(config)
        self.open: set[Connection] = set()
        """Open connections. uvicorn's own set also has connections that close in the current turn of the loop."""
        self.waiting: dict[Connection, float] = {}
        """Start of each connection's wait for a request, by the loop's clock. The longest wait is first."""
        self.upgraded: set[object] = set()
        """Connections that have become WebSockets."""
        self.held_bytes = 0
        """Number of bytes of messages that are being received over WebSockets."""
        self.next_log = 0.0
        self.closing = False
        """Whether the server will end soon, so that each answer is the last one on its connection."""

    def leave(self) -> None:
        """Let each connection end with its next answer, which has the header `Connection: close`."""
        self.closing = True
        for connection in self.open:
            connection.announce_end()

    def end_idle(self) -> None:
        """End the connections without a request, and each other one after the answer in progress."""
        for connection in [*self.open]:
            connection.shutdown()

    @property
    def begun(self) -> bool:
        """Whether the server has the request of each open connection: none is new, or in the middle of a head."""
        return all(connection.busy or connection.idle for connection in self.open)

    @property
    def busy(self) -> bool:
        """Whether a request is being answered."""
        return any(connection.busy for connection in self.open)

    def make_room(self, new: Connection, now: float) -> bool:
        """Return whether a new connection may stay. May close the connections that have waited longest."""
        if self.full and now >= self.next_log:
            self.next_log = now + LOG_SECONDS
            log.warning(
                "%d connections are open, which is the limit (--max-connections, and %d below the limit of open files);"
                " those that have waited longest for a request are closed",
                self.limit,
                RESERVED_FILES,
            )
        while self.full and self.waiting:
            longest, since = next(iter(self.waiting.items()))
            if now - since < UNREAD_SECONDS:
                break
            self.forget(longest)
            longest.transport.abort()
        room = not self.full
        self.open.add(new)
        return room

    @property
    def full(self) -> bool:
        """Whether as many connections are open as may be, WebSockets included."""
        return len(self.open) + len(self.upgraded) >= self.limit

    def forget(self, connection: Connection) -> None:
        """Remove a connection from `open` and `waiting`."""
        self.open.discard(connection)
        self.waiting.pop(connection, None)


def connection_limit(config: ServerConfig) -> int:
    """Return the maximum number of open connections.

    This is the configured number, or less if the limit of open files is lower. HTTP and gRPC have as many each.
    """
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    if files == resource.RLIM_INFINITY:
        return config.max_connections
    protocols = 1 if config.grpc_port is None else 2
    return min(config.max_connections, max(1, (files - RESERVED_FILES) // protocols))


class Connection(HttpToolsProtocol):
    """uvicorn's HTTP protocol, with limits on header and trailer bytes, requests parsed ahead, and waiting times."""

    def __init__(self, *args: Any, shared: Connections, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.shared = shared
        self.active: RequestResponseCycle | None = None
        """Request that is being answered. `cycle` is the request that was parsed last."""
        self.in_head = True
        self.progress = False
        self.declared = 0
        """Number of bytes that are still missing of a body with a content-length."""
        self.received = 0
        """Number of body bytes received of the request that was parsed last."""
        self.since = 0.0
        """Time at which the wait for the head or body began, by the loop's clock."""
        self.unfinished = 0
        """Approximate number of bytes since the last body byte or the last end of a request."""
        self.held = b""
        self.keep_alive = True
        self.gone = False
        """Whether the connection has become a WebSocket, which another protocol serves."""
        self.ending = False
        self.dropped = 0
        self.awaited: str | None = None
        self.reading: asyncio.TimerHandle | None = None
        self.writing: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.flow = Flow(transport)
        if self.shared.make_room(self, self.loop.time()):
            self.watch()
        else:
            self.refuse(ApiError("too many connections; try again", status=503, code="overloaded", retry_after=1))

    def connection_lost(self, exc: Exception | None) -> None:
        self.ending = True
        self.shared.forget(self)
        self.stop_timers()
        self._unset_keepalive_if_required()
        self.cut()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self.ending:
            self.dropped += len(data)
            if self.dropped > LINGER_BYTES:
                self.transport.abort()
            return
        if self.held:
            self.held += data
            return
        end = 0
        while end < len(data):
            if self.pipeline:
                self.held = data[end:]
                self.hold(True)
                break
            piece = data[end : end + min(max(PIECE_BYTES, self.declared), MAX_HEADER_BYTES)]
            end += len(piece)
            self.progress = False
            self.feed(piece)
            if self.gone or self.ending or self.transport.is_closing():
                return
            if self.progress:
                self.unfinished = len(piece) if self.in_head else 0  # the next head may be most of the piece
            else:
                self.unfinished += len(piece)
            if self.unfinished > MAX_HEADER_BYTES:
                limit = f"headers and trailers may have {MAX_HEADER_BYTES} bytes"
                self.refuse(ApiError(limit, status=431, code="headers_too_large"))
                return
        if not self.busy:
            self.in_head = True
        self.watch()

    def on_message_begin(self) -> None:
        self.in_head = True
        super().on_message_begin()

    def on_header(self, name: bytes, value: bytes) -> None:
        if self.in_head:  # Trailers, which follow a body, are dropped.
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self.in_head = False
        if self.refuses_upgrade:
            return
        super().on_headers_complete()
        if self.upgrades:
            return
        # uvicorn would keep the connection open after answering a request whose body was not read to its end.
        self.keep_alive, self.cycle.keep_alive = self.cycle.keep_alive, False
        knows_chunks = self.parser.get_http_version() != "1.0"
        self.cycle.transport = (CycleTransport if knows_chunks else ChunklessTransport)(self)  # type: ignore[assignment]
        self.declared = int(dict(self.headers).get(b"content-length", 0))
        self.received = 0

    def on_body(self, body: bytes) -> None:
        self.progress = True
        self.declared = max(0, self.declared - len(body))
        self.received += len(body)
        super().on_body(body)

    def on_message_complete(self) -> None:
        if self.refuses_upgrade:
            return
        self.progress = True
        if self.upgrades:
            return
        if not self.cycle.response_started:
            self.cycle.keep_alive = self.keep_alive and not self.shared.closing
        super().on_message_complete()

    @property
    def upgrades(self) -> bool:
        """Whether the request that is being parsed asks for a WebSocket."""
        return bool(self.parser.should_upgrade()) and self._should_upgrade()

    def _should_upgrade(self) -> bool:
        """Whether a request begins a WebSocket if it asks for one: a GET without a body (RFC 6455, 4.1).

        Any other one is answered as a request, because the protocol of WebSockets would wait for its body without end.
        """
        if self.parser.get_method() != b"GET":
            return False
        given = dict(self.headers)
        has_body = b"transfer-encoding" in given or given.get(b"content-length", b"0").strip(b"0")
        return not has_body and super()._should_upgrade()

    @property
    def refuses_upgrade(self) -> bool:
        """Whether the request that is being parsed asks for another protocol that it does not get, such as HTTP/2.

        Its body follows nevertheless (RFC 9110, 7.8), but the parser ends the message with its headers.
        """
        asks = bool(self.parser.should_upgrade()) and self.parser.get_method() != b"CONNECT"
        return asks and not self._should_upgrade()

    def feed(self, data: bytes) -> None:
        """Parse data, as uvicorn does it. A request whose upgrade is refused is parsed again, without asking for it."""
        self._unset_keepalive_if_required()
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserError:
            self.send_400_response("Invalid HTTP request received.")
        except httptools.HttpParserUpgrade as upgrade:
            if self._should_upgrade():
                self.handle_websocket_upgrade()
            elif self.refuses_upgrade:
                line = b"%b %b HTTP/1.1\r\n" % (self.parser.get_method(), self.url)
                lines = [b"%b: %b\r\n" % header for header in self.headers if header[0] != b"upgrade"]
                self.parser = httptools.HttpRequestParser(self)
                self.parser.set_dangerous_leniencies(lenient_data_after_close=True)
                self.feed(b"".join([line, *lines, b"\r\n", data[upgrade.args[0] :]]))

    def handle_websocket_upgrade(self) -> None:
        if self.busy:
            self.refuse(ApiError("a WebSocket cannot begin while an answer is in progress", code="invalid_http"))
            return
        self.gone = True
        self.stop_timers()
        self.shared.forget(self)
        super().handle_websocket_upgrade()

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        self.active = cycle
        super()._start_asgi_task(cycle, app)

    def on_response_complete(self) -> None:
        if self.ending:
            return
        super().on_response_complete()
        if self.held and not self.pipeline:
            data, self.held = self.held, b""
            self.hold(False)
            self.data_received(data)
        else:
            self.watch()

    def send_400_response(self, msg: str) -> None:
        self.refuse(ApiError(msg, code="invalid_http"))

    def announce_end(self) -> None:
        """End this connection after the answer that is awaited, unless that has begun and so cannot announce it."""
        if self.busy and self.active is self.cycle and not self.cycle.response_started:
            self.cycle.keep_alive = False

    def shutdown(self) -> None:
        self.keep_alive = False
        super().shutdown()

    def timeout_keep_alive_handler(self) -> None:
        self.end()

    def pause_writing(self) -> None:
        super().pause_writing()
        self.await_reader()

    def resume_writing(self) -> None:
        super().resume_writing()
        if self.writing is not None and not self.ending:
            self.writing.cancel()

    @property
    def busy(self) -> bool:
        """Whether a request is being answered."""
        return self.active is not None and not self.active.response_complete

    @property
    def idle(self) -> bool:
        """Whether all requests so far were answered, at least one, and nothing of another one has come."""
        return self.active is not None and self.active.response_complete and not (self.unfinished or self.held)

    def watch(self) -> None:
        """Start or stop the timer for the client's next data."""
        if self.busy:
            self.shared.waiting.pop(self, None)
            assert self.active is not None
            awaited = "body" if self.active.more_body and not self.active.response_started else None
        else:
            self.shared.waiting.setdefault(self, self.loop.time())
            awaited = "head" if self.in_head else None
        if awaited == self.awaited:
            return
        self.awaited = awaited
        if self.reading is not None:
            self.reading.cancel()
        if awaited is not None:
            config = self.shared.config
            seconds = config.header_seconds if awaited == "head" else config.body_seconds
            self.since = self.loop.time()
            self.reading = self.loop.call_later(seconds, self.late, awaited, seconds)

    def late(self, awaited: str, seconds: float) -> None:
        """End the connection because data is late. A body gets more time the more of it was received."""
        allowed = self.shared.config.body_seconds + self.received / UPLOAD_RATE
        if awaited == "body" and (left := self.since + allowed - self.loop.time()) > 0:
            self.reading = self.loop.call_later(left, self.late, awaited, allowed)
        elif awaited == "head" and not self.unfinished:
            self.end()
        else:
            reason = f"the request's {awaited} has not arrived within {seconds:g} s"
            self.refuse(ApiError(reason, status=408, code="request_timeout"))

    def await_reader(self) -> None:
        """Start the timer within which the client must read more of its answer."""
        if self.writing is not None:
            self.writing.cancel()
        size = self.transport.get_write_buffer_size()
        self.writing = self.loop.call_later(self.shared.config.write_seconds, self.stalled, size)

    def stalled(self, before: int) -> None:
        """Disconnect a client that has read too little in time."""
        if self.transport.get_write_buffer_size() > before - READ_BYTES:
            self.transport.abort()
        else:
            self.await_reader()

    def refuse(self, error: ApiError) -> None:
        """Answer with an error from outside the application, if no answer has begun, and close."""
        if self.ending:
            return
        if not self.busy or (self.active is self.cycle and not self.cycle.response_started):
            asked = "" if self.active is None or self.active.response_complete else self.active.scope["path"]
            body = encode(error.body_for(asked))
            retry = b"" if error.retry_after is None else b"retry-after: %d\r\n" % error.retry_after
            head = b"content-type: application/json\r\ncontent-length: %d\r\nconnection: close\r\n" % len(body)
            self.transport.write(STATUS_LINE[error.status] + head + retry + b"\r\n" + body)
        self.cut()
        self.end(unread=True)

    def cut(self) -> None:
        """Make the application see that the client has disconnected."""
        self.pipeline.clear()
        for cycle in (self.active, self.cycle):
            if cycle is not None and not cycle.response_complete:
                cycle.disconnected = True
                cycle.message_event.set()

    def end(self, *, unread: bool = False) -> None:
        """Close once all output is sent. With `unread`, first drop further received data for a while."""
        if self.ending or self.transport.is_closing():
            return
        self.ending = True
        self.held = b""
        self.stop_timers()
        self.shared.waiting.setdefault(self, self.loop.time())
        if unread:
            self.hold(False)
            if self.transport.can_write_eof():  # Not possible with TLS.
                self.transport.write_eof()
            self.reading = self.loop.call_later(LINGER_SECONDS, self.close)
        else:
            self.close()

    def close(self) -> None:
        """Close the connection once all output is sent. Aborts if the client does not read it in time."""
        self.transport.close()
        self.await_reader()

    def hold(self, held: bool) -> None:
        """Stop or resume reading from the socket."""
        assert isinstance(self.flow, Flow)
        self.flow.held = held
        if held:
            self.flow.pause_reading()
        else:
            self.flow.resume_reading()

    def stop_timers(self) -> None:
        for timer in (self.reading, self.writing):
            if timer is not None:
                timer.cancel()


class Flow(FlowControl):
    """uvicorn's flow control. While `held`, reading stays paused."""

    held = False

    def resume_reading(self) -> None:
        if not self.held:
            super().resume_reading()


class CycleTransport:
    """Transport for one request's cycle. Its `close` lets the client receive the answer before the connection ends."""

    def __init__(self, connection: Connection) -> None:
        self.connection = connection

    def write(self, data: bytes) -> None:
        if not self.connection.ending:
            self.connection.transport.write(data)

    def is_closing(self) -> bool:
        return self.connection.ending or self.connection.transport.is_closing()

    def close(self) -> None:
        cycle = self.connection.cycle
        self.connection.end(unread=cycle.more_body or cycle is not self.connection.active)


class ChunklessTransport(CycleTransport):
    """Transport for one request's cycle in HTTP/1.0, which knows no chunks: the end of the connection ends an answer.

    uvicorn writes the head of an answer at once, and then each chunk at once.
    """

    def __init__(self, connection: Connection) -> None:
        super().__init__(connection)
        self.chunked: bool | None = None
        """Whether uvicorn writes the answer in chunks; None before its head."""

    def write(self, data: bytes) -> None:
        if data == CONTINUE:
            return
        if self.chunked is None:
            self.chunked = CHUNKED in data
            data = data.replace(CHUNKED, b"\r\n", 1)
        elif self.chunked and data:
            size, _, rest = data.partition(b"\r\n")
            data = rest[: int(size, 16)]
        super().write(data)
