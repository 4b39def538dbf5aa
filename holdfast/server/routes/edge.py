"""The outermost layer. Gives every request an id, strips the proxy's path, and logs it, even if it is refused."""

from __future__ import annotations

import logging
import time
import uuid
from collections.abc import Collection
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from holdfast.server.replies import RequestUsage
from holdfast.server.tracing import Tracing

MAX_ID = 128
"""Maximum number of characters of a client's request id."""
MAX_SHOWN = 256
"""Maximum number of characters of a path in the log."""
LEFT = 499
"""Logged status of a request whose client disconnected before its answer began."""

log = logging.getLogger("holdfast.requests")


class Edge:
    """Wraps the application. Each answer has the header x-request-id, with the client's id or a new one."""

    def __init__(
        self, app: ASGIApp, root_path: str = "", quiet: Collection[str] = (), tracing: Tracing | None = None
    ) -> None:
        """`root_path` is removed from the beginning of paths. Requests for `quiet` paths are logged at debug level.

        With `tracing`, each request that generates gets a span.
        """
        self.tracing = tracing
        self.app = app
        self.root_path = root_path
        self.quiet = quiet

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        scope = self.without_root(scope)
        id = request_id(scope)
        state: dict[str, Any] = scope.setdefault("state", {})
        began, status, size = time.monotonic(), LEFT, 0
        span = None
        if self.tracing is not None:
            span = self.tracing.begin(scope["method"], scope["path"], scope["headers"], id.decode())

        async def sent(message: Message) -> None:
            nonlocal status, size
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message.get("headers", ()), (b"x-request-id", id)]
            else:
                size += len(message.get("body", b""))
            await send(message)

        try:
            await self.app(scope, receive, sent)
        finally:
            seconds = time.monotonic() - began
            if self.tracing is not None and span is not None:
                self.tracing.end(span, status, state.get("usage"), seconds)
            level = logging.DEBUG if scope["path"] in self.quiet else logging.INFO
            if log.isEnabledFor(level):
                log.log(level, line(scope, state, id, status, size, seconds))

    def without_root(self, scope: Scope) -> Scope:
        """Return the scope without the root path, which the proxy may already have removed."""
        root = self.root_path
        if not root or not f"{scope['path']}/".startswith(f"{root}/"):
            return scope
        return {**scope, "path": scope["path"][len(root) :] or "/"}


def request_id(scope: Scope) -> bytes:
    """Return the client's id if it is short and visible ASCII; otherwise a new one."""
    given = dict(scope["headers"]).get(b"x-request-id", b"")
    if 0 < len(given) <= MAX_ID and all(0x21 <= byte <= 0x7E for byte in given):
        return bytes(given)
    return uuid.uuid4().hex.encode()


def line(scope: Scope, state: dict[str, Any], id: bytes, status: int, size: int, seconds: float) -> str:
    """Return one line of the log, without texts or secrets. A key is shown by its name."""
    path = "".join(each if each.isprintable() and each != " " else "?" for each in scope["path"][:MAX_SHOWN])
    parts = [f"{scope['method']} {path} {status} {seconds:.3f}s bytes={size}"]
    usage = state.get("usage")
    if isinstance(usage, RequestUsage):
        parts.append(f"in={usage.prompt_tokens} cached={usage.cached_tokens} out={usage.completion_tokens}")
    if client := scope.get("client"):
        parts.append(f"client={client[0]}")
    if key := state.get("key"):
        parts.append(f"key={key}")
    return " ".join([*parts, f"id={id.decode()}"])
