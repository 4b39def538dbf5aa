"""The outermost layer. Gives every request an id, strips the proxy's path, and logs it, even if it is refused."""

from __future__ import annotations

import logging
import math
import re
import time
import uuid
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from holdfast.engine.logs import fields
from holdfast.server.replies import RequestUsage
from holdfast.server.sockets import CHECK
from holdfast.server.time_spent import TimeSpent, watched
from holdfast.server.tracing import Tracing

AZURE = re.compile(
    r"/openai/(?:deployments/(?P<deployment>.+?)/(?P<route>chat/completions|completions|embeddings|responses)"
    r"|(?:v1/)?(?P<other>(?!deployments/).+))",
    re.DOTALL,
)
"""Paths of Azure's clients. Their query `api-version` has no effect."""
MAX_ID = 128
"""Maximum number of characters of a client's request id."""
MAX_SHOWN = 256
"""Maximum number of characters of a path in the log."""
UPGRADED = 101
"""Logged status of a WebSocket's handshake that is accepted."""
LEFT = 499
"""Logged status of a request whose client disconnected before its answer began."""

MAX_TENANT = 16
"""Number of a tenant's characters in the log. The tenant of a configured key is a digest of the key."""

log = logging.getLogger("holdfast.requests")
slow_log = logging.getLogger("holdfast.slow")


class Edge:
    """Wraps the application. Each answer has the header x-request-id, with the client's id or a new one."""

    def __init__(
        self,
        app: ASGIApp,
        root_path: str = "",
        quiet: Collection[str] = (),
        tracing: Tracing | None = None,
        slow_seconds: float = math.inf,
    ) -> None:
        """`root_path` is removed from the beginning of paths. Requests for `quiet` paths are logged at debug level.

        With `tracing`, each request that generates gets a span. One that takes longer than `slow_seconds` has a line
        in the log of slow requests.
        """
        self.slow_seconds = slow_seconds
        self.tracing = tracing
        self.app = app
        self.root_path = root_path
        self.quiet = quiet

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        scope = without_azure(without_root(scope, self.root_path))
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
                shown = state.get("request_id", id.decode()).encode()
                message["headers"] = [*message.get("headers", ()), (b"x-request-id", shown)]
            else:
                size += len(message.get("body", b""))
            await send(message)

        with watched() as spent:
            try:
                await self.app(scope, receive, sent)
            finally:
                seconds = time.monotonic() - began
                if self.tracing is not None and span is not None:
                    self.tracing.end(span, status, state.get("usage"), seconds)
                if state.get("handshake"):  # Nothing is missing: a connection begins, or its headers are refused.
                    scope = {**scope, "path": scope["path"].removesuffix(CHECK)}
                    status, size = (UPGRADED, 0) if status == 404 else (status, size)
                self.note(Ended(scope, state, id.decode(), status, size, seconds), spent)

    def note(self, ended: Ended, spent: TimeSpent) -> None:
        """Write the line of an ended request, and another one if it was slow."""
        level = logging.DEBUG if ended.scope["path"] in self.quiet else logging.INFO
        if log.isEnabledFor(level):
            log.log(level, ended.line, extra=fields(message=ended.title, **ended.fields))
        if ended.seconds > self.slow_seconds:
            parts = slow_fields(ended, spent)
            slow_log.warning(slow_line(ended, parts), extra=fields(**ended.fields, **parts))


def without_root(scope: Scope, root: str) -> Scope:
    """Return the scope without the root path, which the proxy may already have removed."""
    if not root or not f"{scope['path']}/".startswith(f"{root}/"):
        return scope
    return {**scope, "path": scope["path"][len(root) :] or "/"}


def without_azure(scope: Scope) -> Scope:
    """Return the scope with OpenAI's path if it has Azure's, such as `/openai/v1/models` or the older `/openai/models`.

    A deployment in the path becomes the state's `deployment`. It names the model.
    """
    found = AZURE.fullmatch(scope["path"])
    if found is None:
        return scope
    deployment, route = found["deployment"], found["route"] or found["other"]
    state = scope.get("state", {}) | ({} if deployment is None else {"deployment": deployment})
    return {**scope, "path": f"/v1/{route}", "state": state}


def request_id(scope: Scope) -> bytes:
    """Return the client's id if it is short and visible ASCII; otherwise a new one."""
    return (given_id(scope) or uuid.uuid4().hex).encode()


def given_id(scope: Scope) -> str:
    """Return the id in the header `x-request-id` if it is short and visible ASCII; otherwise an empty string."""
    given = dict(scope["headers"]).get(b"x-request-id", b"")
    is_id = 0 < len(given) <= MAX_ID and all(0x21 <= byte <= 0x7E for byte in given)
    return given.decode() if is_id else ""


@dataclass(frozen=True, slots=True)
class Ended:
    """One request that has ended, for the log. It shows no text and no secret. A key is shown by its name."""

    scope: Scope
    state: dict[str, Any]
    """The state that the layers inside have set: tenant, key, usage."""
    id: str
    status: int
    size: int
    """Number of bytes of the answer's body."""
    seconds: float

    @property
    def path(self) -> str:
        """The path, shortened, without characters that could begin a line or a field of their own."""
        return "".join(each if each.isprintable() and each != " " else "?" for each in self.scope["path"][:MAX_SHOWN])

    @property
    def usage(self) -> RequestUsage:
        """The token counts and times of the request; empty if it was refused before it ran."""
        usage = self.state.get("usage")
        return usage if isinstance(usage, RequestUsage) else RequestUsage()

    @property
    def title(self) -> str:
        """Method, path and status."""
        return f"{self.scope['method']} {self.path} {self.status}"

    @property
    def line(self) -> str:
        """One line of text."""
        parts = [f"{self.title} {self.seconds:.3f}s bytes={self.size}"]
        usage = self.state.get("usage")
        if isinstance(usage, RequestUsage):
            parts.append(f"in={usage.prompt_tokens} cached={usage.cached_tokens} out={usage.completion_tokens}")
        if client := self.scope.get("client"):
            parts.append(f"client={client[0]}")
        if key := self.state.get("key"):
            parts.append(f"key={key}")
        return " ".join([*parts, f"id={self.id}"])

    @property
    def fields(self) -> dict[str, Any]:
        """The values of the line as fields of a JSON object, with times in seconds. Unknown values are left out."""
        usage, client = self.usage, self.scope.get("client")
        ran = "usage" in self.state
        found = {
            "request": self.id,
            "method": self.scope["method"],
            "route": getattr(self.scope.get("route"), "path", None),
            "path": self.path,
            "status": self.status,
            "seconds": round(self.seconds, 6),
            "bytes": self.size,
            "client": client[0] if client else None,
            "key": self.state.get("key") or None,
            "tenant": self.state.get("tenant", "")[:MAX_TENANT] or None,
            "model": usage.wanted.model if usage.wanted is not None else None,
            "prompt_tokens": usage.prompt_tokens if ran else None,
            "cached_tokens": usage.cached_tokens if ran else None,
            "completion_tokens": usage.completion_tokens if ran else None,
            "queue_seconds": rounded(usage.queued),
            "ttft_seconds": rounded(usage.ttft),
        }
        return {name: value for name, value in found.items() if value is not None}


def rounded(seconds: float | None) -> float | None:
    """Return a time with microseconds."""
    return None if seconds is None else round(seconds, 6)


def slow_fields(ended: Ended, spent: TimeSpent) -> dict[str, Any]:
    """Return the parts of a slow request's time in seconds, the longest one, and what it shared or lost."""
    parts = {part: round(seconds, 6) for part, seconds in spent.seconds.items() if seconds}
    host, disk, remote = ended.usage.cached_by_tier
    return {
        "message": f"slow request: {ended.title}",
        "parts": {**parts, "rest": round(spent.rest(ended.seconds), 6)},
        "held_by": spent.longest(ended.seconds),
        "preemptions": spent.preemptions,
        "tokens_from_host": host,
        "tokens_from_disk": disk,
        "tokens_from_remote": remote,
    }


def slow_line(ended: Ended, found: dict[str, Any]) -> str:
    """Return one line of text about a slow request, from its `slow_fields`."""
    parts = " ".join(f"{part}={seconds:.3f}s" for part, seconds in found["parts"].items())
    return f"slow request: {ended.line} {parts} preemptions={found['preemptions']}; most: {found['held_by']}"
