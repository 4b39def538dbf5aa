"""Responses over a WebSocket: many turns over one connection, in the form of OpenAI's WebSocket mode.

Each `response.create` runs as a POST to /v1/responses of its own through the whole application, with the headers of the
connection. So the checks of keys and origins, the limits, usage and logs are those of HTTP, and are written once.
Responses that are not stored can be continued on the connection that made them.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

import msgspec
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from holdfast.server.conversations.memory import TurnMemory
from holdfast.server.protocol import ApiError, invalid, read_object
from holdfast.server.replies import encode
from holdfast.server.routes.edge import without_azure, without_root
from holdfast.server.sockets import CHECK, OpenSockets

log = logging.getLogger("holdfast.server")

PATH = "/v1/responses"
MOST_SECONDS = 3600.0
"""Maximum age of a connection. It ends after the responses in progress."""
SMALL = 1 << 14
"""Number of characters from which an event is read outside the event loop."""
MOST_LANES = 8
"""Maximum number of responses in progress on one connection. Each lane has one."""
MOST_QUEUED = 16
"""Maximum number of further responses that wait on one connection."""
MOST_QUEUED_BYTES = 8 << 20
"""Maximum number of bytes of the events that wait on one connection."""
MOST_LANE_NAME = 64
ENDED = 1000
"""Code with which a connection that is too old is closed."""
DROPPED = (
    b"upgrade", b"connection", b"accept-encoding", b"content-length", b"content-type", b"transfer-encoding",
    b"idempotency-key",
)  # fmt: skip
"""Headers of a handshake that its requests do not have."""


class _Continued(msgspec.Struct):
    previous_response_id: Any = None


class Sockets:
    """The outermost layer: serves WebSockets, and lets everything else pass."""

    def __init__(self, app: ASGIApp, root_path: str, sockets: OpenSockets) -> None:
        self._app, self._root, self._sockets = app, root_path, sockets

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "websocket":
            await self._app(scope, receive, send)
            return
        await receive()  # The handshake.
        scope = without_azure(without_root(scope, self._root))
        path = scope["path"]
        if path.rstrip("/") != PATH:
            await refuse(ApiError(f"there is no WebSocket at {path[:128]}", status=404, code="not_found"), send)
            return
        state, refusal = await self._admitted(scope)
        tenant = str(state.get("tenant", ""))
        try:
            if refusal is not None:
                raise refusal
            self._sockets.open(tenant)
        except ApiError as error:
            await refuse(error, send)
            return
        try:
            await send({"type": "websocket.accept"})
            await Socket(self._app, scope, f"{self._root}{PATH}", send, self._sockets).run(receive)
        finally:
            self._sockets.close(tenant)

    async def _admitted(self, scope: Scope) -> tuple[Mapping[str, Any], ApiError | None]:
        """Return the state of a request with the handshake's headers, and the error if it is refused."""
        inner = request_scope(scope, "GET", f"{self._root}{PATH}{CHECK}")
        inner["state"]["handshake"] = True
        status, body = 500, b""

        async def sent(message: Message) -> None:
            nonlocal status, body
            if message["type"] == "http.response.start":
                status = message["status"]
            body += message.get("body", b"")

        await self._app(inner, _no_body, sent)
        if status == 404:  # No response has this id, and its key may look for it.
            return inner["state"], None
        with suppress(msgspec.MsgspecError, KeyError, TypeError):
            error = msgspec.json.decode(body)["error"]
            return inner["state"], ApiError(error["message"], status=status, code=error["code"])
        return inner["state"], ApiError("the server failed on this request", status=500, code="internal_error")


class Socket:
    """One open connection. Each lane answers its turns one after another, and lanes run side by side."""

    def __init__(self, app: ASGIApp, scope: Scope, path: str, send: Send, sockets: OpenSockets) -> None:
        self._app, self._scope, self._path, self._send, self._sockets = app, scope, path, send, sockets
        self._memory = TurnMemory()
        self._lanes: dict[str, asyncio.Queue[bytes]] = {}
        """Turns that wait, by lane. A lane ends when it has none."""
        self._tasks: set[asyncio.Task[None]] = set()
        self._queued = 0
        """Number of bytes of the turns that wait."""
        self._sending = asyncio.Lock()
        self._gone = asyncio.Event()
        """Set once the client has left."""

    async def run(self, receive: Receive) -> None:
        """Answer turns until the client leaves, or until the connection is too old."""
        end = time.monotonic() + MOST_SECONDS
        try:
            while True:
                try:
                    async with asyncio.timeout(end - time.monotonic()):
                        message = await receive()
                except TimeoutError:
                    await self._expire()
                    return
                if message["type"] == "websocket.disconnect":
                    return
                await self._take(message.get("text") or message.get("bytes") or b"")
        except OSError:  # The client has left.
            return
        finally:
            self._gone.set()
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _expire(self) -> None:
        """Let the responses in progress end, and close."""
        await asyncio.gather(*self._tasks, return_exceptions=True)
        reason = f"the connection is {MOST_SECONDS / 60:g} minutes old, which is the limit; open a new one"
        await self._fail(ApiError(reason, code="websocket_connection_limit_reached"), None)
        with suppress(Exception):
            await self._send({"type": "websocket.close", "code": ENDED})

    async def _take(self, message: str | bytes) -> None:
        """Put a client's event into its lane, or answer with an error."""
        if len(message) < SMALL:
            lane, body = _read(message)
        else:
            lane, body = await asyncio.to_thread(_read, message)
        if isinstance(body, ApiError):
            await self._fail(body, lane)
            return
        name = lane or ""
        queue = self._lanes.get(name)
        waiting = sum(each.qsize() for each in self._lanes.values())
        full = waiting >= MOST_QUEUED or (waiting and self._queued + len(body) > MOST_QUEUED_BYTES)
        if full or (queue is None and len(self._lanes) >= MOST_LANES):
            reason = f"at most {MOST_LANES} responses run on a connection, and {MOST_QUEUED} wait"
            reason += f", with {MOST_QUEUED_BYTES} bytes"
            await self._fail(ApiError(reason, status=429, code="rate_limit_exceeded", retry_after=1), lane)
            return
        if queue is None:
            queue = self._lanes[name] = asyncio.Queue()
            task = asyncio.create_task(self._run_lane(lane))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        self._queued += len(body)
        queue.put_nowait(body)

    async def _run_lane(self, lane: str | None) -> None:
        queue = self._lanes[lane or ""]
        try:
            while not queue.empty():
                self._sockets.answering += 1
                body = queue.get_nowait()
                self._queued -= len(body)
                try:
                    await self._answer(body, lane)
                finally:
                    self._sockets.answering -= 1
        finally:
            del self._lanes[lane or ""]

    async def _answer(self, body: bytes, lane: str | None) -> None:
        """Run a turn as a request of its own, and send its events."""
        reply = Reply(lambda event: self._event(event, lane))
        scope = request_scope(self._scope, "POST", self._path, body)
        scope["state"]["memory"] = self._memory
        given = [{"type": "http.request", "body": body, "more_body": False}]

        async def receive() -> Message:
            if given:
                return given.pop()
            await self._gone.wait()
            return {"type": "http.disconnect"}

        try:
            await self._app(scope, receive, reply.take)
        except Exception as error:  # The connection has other turns.
            if self._gone.is_set() and isinstance(error, OSError):
                return
            log.error("a turn on a WebSocket failed", exc_info=error)
        if not 200 <= reply.status < 400:
            self._forget_previous(body)
            await self._event(reply.error(), lane)

    def _forget_previous(self, body: bytes) -> None:
        """Forget the turn that a failed one went on from, as the OpenResponses specification demands."""
        previous = msgspec.json.decode(body, type=_Continued).previous_response_id
        if isinstance(previous, str):
            self._memory.forget(previous)

    async def _fail(self, error: ApiError, lane: str | None) -> None:
        await self._event({"type": "error", "status": error.status, **error.body()}, lane)

    async def _event(self, event: Mapping[str, Any], lane: str | None) -> None:
        """Send one event. A client that reads slowly holds up its own connection only."""
        text = encode(event if lane is None else {**event, "stream_id": lane}).decode()
        try:
            async with self._sending:
                await self._send({"type": "websocket.send", "text": text})
        except OSError:
            self._gone.set()
            raise


class Reply:
    """The answer to one request, as it comes: server-sent events, or an error as JSON."""

    def __init__(self, emit: Callable[[Mapping[str, Any]], Any]) -> None:
        self._emit = emit
        self.status = 0
        self.headers: dict[str, str] = {}
        self._rest = b""

    async def take(self, message: Message) -> None:
        """Take the next message of the application, and emit the events that are complete."""
        if message["type"] == "http.response.start":
            self.status = message["status"]
            self.headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in message["headers"]}
            return
        self._rest += message.get("body", b"")
        if self.status >= 400:
            return
        *whole, self._rest = self._rest.split(b"\n\n")
        for event in whole:
            for line in event.split(b"\n"):
                if line.startswith(b"data: {"):
                    await self._emit(msgspec.json.decode(line[len(b"data: ") :]))

    def error(self) -> dict[str, Any]:
        """Return the event of an answer that is an error, with the headers that say when to try again."""
        try:
            error = msgspec.json.decode(self._rest)["error"]
        except (msgspec.MsgspecError, KeyError, TypeError):
            error = ApiError("the server failed on this request", status=500, code="internal_error").body()["error"]
        kept = ("retry-after", "retry-after-ms", "x-request-id")
        headers = {name: self.headers[name] for name in kept if name in self.headers}
        return {"type": "error", "status": self.status or 500, "error": {**error, "headers": headers}}


def _read(message: str | bytes) -> tuple[str | None, bytes | ApiError]:
    """Return the lane of a client's event, and the body of the request that it stands for, or what is wrong with it."""
    lane = None
    try:
        event = read_object(message.encode() if isinstance(message, str) else message, "the event")
        lane = _lane_of(event)
        return lane, encode(_body_of(event))
    except ApiError as error:
        return lane, error


def _lane_of(event: Mapping[str, Any]) -> str | None:
    lane = event.get("stream_id")
    if lane is not None and (not isinstance(lane, str) or not 0 < len(lane) <= MOST_LANE_NAME):
        raise invalid(f"stream_id must be a string of 1 to {MOST_LANE_NAME} characters", "stream_id")
    return lane


def _body_of(event: Mapping[str, Any]) -> dict[str, Any]:
    """Return the body of the request that an event stands for. Raises ApiError."""
    kind = event.get("type")
    if kind != "response.create":
        shown = kind[:64] if isinstance(kind, str) else "missing"
        raise invalid(f"type is {shown}; supported: response.create", "type", "unsupported_parameter")
    if event.get("background"):
        raise invalid("background is not supported over a WebSocket", "background", "unsupported_parameter")
    if event.get("generate") is False:
        raise invalid("generate: false is not supported yet; leave it out", "generate", "unsupported_parameter")
    left_out = ("type", "stream_id", "generate", "background", "stream")
    return {name: value for name, value in event.items() if name not in left_out} | {"stream": True}


def request_scope(scope: Scope, method: str, path: str, body: bytes = b"") -> Scope:
    """Return the scope of a request with the headers of a handshake."""
    kept = [
        (name, value)
        for name, value in scope["headers"]
        if name not in DROPPED and not name.startswith(b"sec-websocket-")
    ]
    length = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())] if body else []
    return {
        "type": "http",
        "app": scope["app"],
        "asgi": scope["asgi"],
        "http_version": "1.1",
        "method": method,
        "scheme": "https" if scope.get("scheme") == "wss" else "http",
        "path": path,
        "raw_path": path.encode(),
        "root_path": scope.get("root_path", ""),
        "query_string": b"",
        "headers": [*kept, *length],
        "client": scope.get("client"),
        "server": scope.get("server"),
        "state": dict(scope.get("state", {})),
    }


async def _no_body() -> Message:
    return {"type": "http.request", "body": b"", "more_body": False}


async def refuse(error: ApiError, send: Send) -> None:
    """Refuse a handshake with an HTTP answer."""
    headers = {"content-type": "application/json", **error.headers}
    encoded = [(name.encode(), value.encode()) for name, value in headers.items()]
    await send({"type": "websocket.http.response.start", "status": error.status, "headers": encoded})
    await send({"type": "websocket.http.response.body", "body": encode(error.body())})
