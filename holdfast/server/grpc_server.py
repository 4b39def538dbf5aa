"""GrpcServer: turns each call over gRPC into a request to an ASGI application. Needs the extra holdfast[grpc]."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Awaitable, Callable, MutableMapping, Sequence
from functools import partial
from typing import Any
from urllib.parse import unquote

from holdfast.files.regular import read_bytes
from holdfast.server.address import authority
from holdfast.server.config import ServerConfig
from holdfast.server.connection import MAX_HEADER_BYTES, connection_limit
from holdfast.server.protocol import ApiError, invalid
from holdfast.server.service import internal

Event = MutableMapping[str, Any]
Application = Callable[
    [MutableMapping[str, Any], Callable[[], Awaitable[Event]], Callable[[Event], Awaitable[None]]], Awaitable[None]
]
"""An ASGI application: called with a scope, `receive` and `send`."""
CODES = {
    401: "UNAUTHENTICATED",
    403: "PERMISSION_DENIED",
    404: "NOT_FOUND",
    408: "DEADLINE_EXCEEDED",
    413: "RESOURCE_EXHAUSTED",
    429: "RESOURCE_EXHAUSTED",
    503: "UNAVAILABLE",
}
"""gRPC's status code by HTTP status. Any other one below 500 is INVALID_ARGUMENT, and from 500 on INTERNAL."""
MAX_DETAILS = 1024
"""Maximum number of characters of an error's message. All metadata of an answer must fit into the client's limit."""
IDLE_SECONDS = 300
"""Time in seconds that a connection is kept without a call. Clients open another one by themselves."""
HTTP_ONLY = ("content-type", "content-length")
"""Headers of answers that gRPC does not send."""


class Answer:
    """Collects the answer of an ASGI application."""

    def __init__(self) -> None:
        self.status = 500
        self.headers: tuple[tuple[str, str], ...] = ()
        """Headers of the answer that gRPC sends as trailing metadata."""
        self.body = b""

    async def send(self, event: Event) -> None:
        """Take an event of the application."""
        if event["type"] == "http.response.start":
            self.status = event["status"]
            headers = [(name.decode("latin-1").lower(), value.decode("latin-1")) for name, value in event["headers"]]
            self.headers = tuple(header for header in headers if header[0] not in HTTP_ONLY)
        else:
            self.body += event.get("body", b"")

    @property
    def error(self) -> ApiError | None:
        """The error that the application answered with; None if it answered with a result."""
        if self.status < 400:
            return None
        error = json.loads(self.body)["error"]
        return ApiError(error["message"], status=self.status, code=error["code"])


class GrpcServer:
    """Listens for calls next to the HTTP server, with its certificate and within its limits."""

    def __init__(self, app: Application, config: ServerConfig, *, unary: Sequence[str], streams: Sequence[str]) -> None:
        """Bind the address. `unary` and `streams` are the paths of the methods. Raises OSError."""
        os.environ.setdefault("GRPC_VERBOSITY", "NONE")  # It would log a line for each message at fault.
        import grpc

        self._grpc, self._app, self._config = grpc, app, config
        limit = connection_limit(config)
        self._server = grpc.aio.server(
            maximum_concurrent_rpcs=limit,
            options=[
                ("grpc.max_receive_message_length", config.max_body_bytes),
                ("grpc.max_send_message_length", -1),
                ("grpc.max_metadata_size", MAX_HEADER_BYTES),
                ("grpc.max_allowed_incoming_connections", limit),
                ("grpc.server_handshake_timeout_ms", int(config.header_seconds * 1000)),
                ("grpc.max_connection_idle_ms", IDLE_SECONDS * 1000),
                ("grpc.keepalive_time_ms", int(config.write_seconds * 1000)),  # Finds clients that are gone.
                ("grpc.so_reuseport", 0),  # Otherwise a second server would get a share of the calls.
            ],
        )
        for path in unary:
            self._add(path, grpc.stream_unary_rpc_method_handler(partial(self._unary, path)))
        for path in streams:
            self._add(path, grpc.stream_stream_rpc_method_handler(partial(self._stream, path)))
        self._bind()

    def _add(self, path: str, handler: Any) -> None:
        _, service, name = path.split("/")
        self._server.add_generic_rpc_handlers((self._grpc.method_handlers_generic_handler(service, {name: handler}),))

    def _bind(self) -> None:
        """Bind the address, with TLS if a certificate is configured. Raises OSError."""
        config, port = self._config, self._config.grpc_port
        assert port is not None
        address = authority(config.host, port)
        try:
            if config.ssl_certfile is None:
                self._server.add_insecure_port(address)
                return
            chain = read_bytes(config.ssl_certfile)
            key = chain if config.ssl_keyfile is None else read_bytes(config.ssl_keyfile)
            credentials = self._grpc.ssl_server_credentials([(key, chain)])
            self._server.add_secure_port(address, credentials)
        except RuntimeError:
            raise OSError(f"cannot listen on {address}; choose another --grpc-port or --host") from None

    async def start(self) -> None:
        """Begin to answer calls."""
        await self._server.start()

    async def close(self, seconds: float) -> None:
        """Refuse new calls, wait up to the time limit until those in progress have ended, and cancel the rest.

        A call that comes at this moment may end as CANCELLED. So the applications must have refused calls before.
        """
        await self._server.stop(seconds)

    async def _unary(self, path: str, requests: object, context: Any) -> bytes:
        """Answer a call of one message with one message."""
        answer = Answer()

        async def receive() -> Event:
            body = await self._read(context)
            if body is None:
                raise invalid("the call has no message")
            return {"type": "http.request", "body": body}

        await self._request(path, context, receive, answer.send)
        context.set_trailing_metadata(answer.headers)
        await self._check(answer, context)
        return answer.body

    async def _stream(self, path: str, requests: object, context: Any) -> None:
        """Answer a call of many messages with many."""
        answer = Answer()

        async def receive() -> Event:
            body = await self._read(context, within=False)
            return {"type": "http.request", "body": body or b"", "more_body": body is not None}

        async def send(event: Event) -> None:
            if event.get("more_body"):
                await context.write(event["body"])
            else:
                await answer.send(event)

        await self._request(path, context, receive, send)
        context.set_trailing_metadata(answer.headers)
        await self._check(answer, context)

    async def _request(self, path: str, context: Any, receive: Any, send: Any) -> None:
        """Run the application. It answers each error of its own, so any other is unexpected."""
        try:
            await self._app(self._scope(path, context), receive, send)
        except Exception as error:
            await context.abort(self._grpc.StatusCode.INTERNAL, internal(error).message)

    async def _check(self, answer: Answer, context: Any) -> None:
        """End a call with the error of its answer, if there is one."""
        if (error := answer.error) is not None:
            await context.abort(self._code(error), error.message[:MAX_DETAILS].encode(errors="replace").decode())

    def _code(self, error: ApiError) -> Any:
        name = CODES.get(error.status, "INVALID_ARGUMENT" if error.status < 500 else "INTERNAL")
        return self._grpc.StatusCode["DEADLINE_EXCEEDED" if error.code == "timeout" else name]

    async def _read(self, context: Any, *, within: bool = True) -> bytes | None:
        """Return the next message of a call; None if there is no further one. Raises ApiError 408 after a time limit.

        The messages of a stream have none, so `within` is false for them.
        """
        seconds = self._config.body_seconds
        try:
            async with asyncio.timeout(seconds if within else None):
                body = await context.read()
        except TimeoutError:
            reason = f"the message has not arrived within {seconds:g} s (--body-seconds)"
            raise ApiError(reason, status=408, code="body_timeout") from None
        return None if body is self._grpc.aio.EOF else body

    def _scope(self, path: str, context: Any) -> dict[str, Any]:
        """Return the scope of a request. The metadata of the call are its headers."""
        headers = [
            (name.encode("latin-1"), value if isinstance(value, bytes) else value.encode("latin-1", "replace"))
            for name, value in context.invocation_metadata()
        ]
        return {
            "type": "http",
            "method": "POST",
            "path": path,
            "headers": headers,
            "query_string": b"",
            "client": client_of(context.peer()),
        }


def client_of(peer: str) -> tuple[str, int] | None:
    """Return the address of a call's client, which gRPC gives as `ipv4:127.0.0.1:5000`; None if it has none."""
    family, _, place = unquote(peer).partition(":")
    host, _, port = place.rpartition(":")
    return (host.strip("[]"), int(port)) if family in ("ipv4", "ipv6") and port.isdigit() else None
