"""Access: finds the key of each request, and refuses requests without one or beyond the key's scopes."""

from __future__ import annotations

import asyncio
import re
from collections import Counter

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from holdfast.server.config import ServerConfig
from holdfast.server.connection import connection_limit
from holdfast.server.inference.protobufs import HEALTH, SERVICE
from holdfast.server.keys.accounts import Accounts
from holdfast.server.keys.limits import Charge
from holdfast.server.keys.ring import KeyRing
from holdfast.server.keys.usage_table import Used
from holdfast.server.keys.values import ADAPTERS, OPERATOR, USE, Key
from holdfast.server.protocol import ApiError
from holdfast.server.readiness import ALIVE, READY
from holdfast.server.replies import RequestUsage
from holdfast.server.routes.http import JSON, error_body
from holdfast.server.routes.inference import LIVE as INFERENCE_LIVE
from holdfast.server.routes.inference import READY as INFERENCE_READY
from holdfast.server.routes.page import is_page

OPEN_PATHS = (
    "/health", "/ping", ALIVE, READY, INFERENCE_LIVE, INFERENCE_READY,
    f"{SERVICE}/ServerLive", f"{SERVICE}/ServerReady", f"{HEALTH}/Check",
)  # fmt: skip
"""Paths that need no API key."""
UNSCOPED = (
    "/", "/v1", "/version", "/metrics", "/load", "/is_sleeping", "/openapi.json", "/v1/models", "/v2",
    f"{SERVICE}/ServerMetadata",
)  # fmt: skip
"""Paths that any key may read."""
OPERATED = ("/replicas", "/v1/engine", "/v1/organization", "/sleep", "/wake_up")
"""Beginnings of the paths whose routes ask for an operator themselves."""
ADAPTER_PATHS = ("/v1/load_lora_adapter", "/v1/unload_lora_adapter", "/v1/adapters", "/v1/fine_tuning")
"""Beginnings of the paths for which a key needs the scope `adapters`."""

TRAINING_PATHS = tuple(
    f"/api/v1/{name}"
    for name in (
        "create_model", "unload_model", "get_info", "forward_backward", "optim_step", "load_weights", "save_weights",
        "save_weights_for_sampler", "save_weights_external", "weights_info", "training_runs", "checkpoints",
    )
)  # fmt: skip
"""Beginnings of the paths of Tinker's protocol for which a key needs the scope `adapters`."""
TINKER = "/api/v1"
"""Beginning of all paths of Tinker's protocol. Sessions and futures are for keys that train or generate."""

METERED = {
    "/v1/chat/completions": "completions",
    "/v1/completions": "completions",
    "/v1/responses": "completions",
    "/v1/responses/compact": "completions",
    "/v1/messages": "completions",
    "/v1/messages/batches": "completions",
    "/v1/batches": "completions",
    "/api/chat": "completions",
    "/api/generate": "completions",
    "/api/embed": "embeddings",
    "/api/embeddings": "embeddings",
    "/generative_scoring": "completions",
    "/pooling": "embeddings",
    "/score": "embeddings",
    "/v1/score": "embeddings",
    "/rerank": "embeddings",
    "/v1/rerank": "embeddings",
    "/v2/rerank": "embeddings",
    "/v1/embeddings": "embeddings",
    "/invocations": "completions",
    "/api/v1/asample": "completions",
}
"""Paths whose POST requests are limited and counted, each with its kind of usage.

A batch counts as one request. Its lines are counted when they are answered. A sample is counted when it has ended.
An invocation has the kind of the route that answers it; the one here is for a body of no route.
"""
INFERENCE = re.compile(rf"/v2/models/[^/]+(?:/versions/[^/]+)?/infer|{re.escape(SERVICE)}/ModelInfer")
"""Paths whose POST requests are limited, but not counted: applications compute no tokens."""
BYTES_PER_TOKEN = 4
"""Number of bytes of a request's body that are estimated as one prompt token, until the tokens are counted."""
KEY_HEADERS = (b"x-api-key", b"api-key")
"""Headers with a key, besides a bearer token: of clients of Anthropic's API, and of Azure's."""
BATCH_PATHS = ("/v1/batches", "/v1/messages/batches")
"""Paths whose POST requests create batches."""


def secret_of(scope: Scope) -> bytes:
    """Return the secret that a request sends; empty if it sends none."""
    headers = dict(scope["headers"])
    scheme, _, given = headers.get(b"authorization", b"").partition(b" ")
    if scheme.lower() != b"bearer":
        given = next((headers[name] for name in KEY_HEADERS if name in headers), b"")
    return bytes(given.strip())


class Access:
    """Chooses the check of a request: of its key if this server has keys, and otherwise of what sent it.

    The first key in the store makes a running server ask for keys.
    """

    def __init__(self, app: ASGIApp, ring: KeyRing, keyed: ASGIApp, unkeyed: ASGIApp) -> None:
        self.app, self.ring, self.keyed, self.unkeyed = app, ring, keyed, unkeyed

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] == ALIVE:  # No key, and so no store, decides about a process.
            await self.app(scope, receive, send)
            return
        await self.ring.refresh()
        await (self.keyed if self.ring.keyed else self.unkeyed)(scope, receive, send)


class KeyCheck:
    """Requires a key with the scope that the path needs, and sets the request's tenant.

    If there are several keys, each may use only its share of the connections. Without this limit, one key with slow
    requests or slow readers could occupy all connections.
    """

    def __init__(self, app: ASGIApp, ring: KeyRing, config: ServerConfig, in_progress: Counter[str]) -> None:
        """`in_progress` is shared by all checks of a server."""
        self.app = app
        self.ring = ring
        self.most = max(1, int(connection_limit(config) * config.share))
        """Maximum number of requests in progress per key."""
        self.in_progress = in_progress
        """Number of requests in progress, by the name of the key. A key without one has no entry."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        key = self.ring.find(secret_of(scope))
        if key is not None:
            await self._with_key(key, scope, receive, send)
        elif scope["path"] in OPEN_PATHS or is_page(scope):
            scope.setdefault("state", {}).update(tenant="", key="", operator=False, all_adapters=False, keyed=True)
            await self.app(scope, receive, send)
        else:
            reason = "a valid API key is needed: Authorization: Bearer KEY, x-api-key: KEY, or api-key: KEY"
            error = ApiError(reason, status=401, code="invalid_api_key")
            await refuse(error, scope, receive, send, {"www-authenticate": "Bearer"})

    async def _with_key(self, key: Key, scope: Scope, receive: Receive, send: Send) -> None:
        operator = OPERATOR in key.scopes
        scope.setdefault("state", {}).update(
            tenant=key.tenant, key=key.name, api_key=key, operator=operator,
            all_adapters=operator or len(self.ring.names) == 1, keyed=True,
        )  # fmt: skip
        if (error := self.refusal(key, scope)) is not None:
            await refuse(error, scope, receive, send)
            return
        self.in_progress[key.name] += 1
        try:
            await self.app(scope, receive, send)
        finally:
            self.in_progress[key.name] -= 1
            if not self.in_progress[key.name]:
                del self.in_progress[key.name]

    def refusal(self, key: Key, scope: Scope) -> ApiError | None:
        """Return the error for a request that its key may not send now; None if it may."""
        needed = scopes_for(scope["method"], scope["path"])
        if needed and not set(needed) & set(key.scopes):
            reason = f"this API key has no permission for this: it needs the scope {needed[0]}"
            return ApiError(reason, status=403, code="insufficient_permissions")
        if self.in_progress[key.name] >= self.most:
            reason = f"this API key has {self.most} requests in progress, its share of the server's connections"
            return ApiError(f"{reason}; try again", status=429, code="rate_limit_exceeded", retry_after=1)
        return None


class Meter:
    """Holds requests to the limits of their keys, and counts their usage. It works inside `KeyCheck`."""

    def __init__(self, app: ASGIApp, accounts: Accounts) -> None:
        self.app = app
        self.accounts = accounts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = scope["path"]
        inference = INFERENCE.fullmatch(path) is not None
        if scope["method"] != "POST" or not (inference or path in METERED):
            await self.app(scope, receive, send)
            return
        key: Key = scope["state"]["api_key"]
        try:
            charge = await self.accounts.admit(key, None if inference else estimated_tokens(scope))
        except ApiError as error:
            await refuse(error, scope, receive, send, self.accounts.headers(key))
            return

        computed = True

        async def sent(message: Message) -> None:
            nonlocal computed
            if message["type"] == "http.response.start":
                computed = message["status"] < 400
                limits = self.accounts.headers(key).items()
                message["headers"] = [*message["headers"], *((name.encode(), text.encode()) for name, text in limits)]
            await send(message)

        try:
            await self.app(scope, receive, sent)
        finally:
            self._end(charge, scope, computed=computed)

    def _end(self, charge: Charge, scope: Scope, *, computed: bool) -> None:
        """Settle a charge. A background response ends after its HTTP request. Nothing is computed for a refused one."""
        state = scope["state"]
        usage: RequestUsage = (state.get("usage") if computed else None) or RequestUsage()
        background: asyncio.Task[None] | None = state.get("background")
        kind = METERED.get(scope["path"], "")
        if background is None:
            self._settle(charge, kind, usage)
        else:
            background.add_done_callback(lambda task: self._settle(charge, kind, usage))

    def _settle(self, charge: Charge, kind: str, usage: RequestUsage) -> None:
        model = "" if usage.wanted is None else usage.wanted.model
        used = Used(1, usage.prompt_tokens, usage.cached_tokens, usage.completion_tokens)
        self.accounts.settle(charge, kind, model, used)


def estimated_tokens(scope: Scope) -> int:
    """Return the estimated number of a request's prompt tokens, from the declared length of its body.

    A batch has none itself, because its lines are counted when they are answered.
    """
    if scope["path"] in BATCH_PATHS:
        return 0
    declared = dict(scope["headers"]).get(b"content-length", b"0")
    return int(declared[:20]) // BYTES_PER_TOKEN if declared.isdigit() else 0


async def refuse(
    error: ApiError, scope: Scope, receive: Receive, send: Send, headers: dict[str, str] | None = None
) -> None:
    """Answer a request with an error in the form of its path's protocol."""
    await JSON(error_body(error, scope), error.status, {**error.headers, **(headers or {})})(scope, receive, send)


def scopes_for(method: str, path: str) -> tuple[str, ...]:
    """Return the scopes of which a request needs one; empty if any key may send it."""
    if path in OPEN_PATHS or path in UNSCOPED or below(path, OPERATED):
        return ()
    models = path.startswith("/v1/models/")
    if below(path, (*ADAPTER_PATHS, *TRAINING_PATHS)) or (models and method == "DELETE"):
        return ADAPTERS, OPERATOR
    if below(path, (TINKER,)):
        return USE, ADAPTERS, OPERATOR
    return () if models or path.startswith("/page/") else (USE,)


def below(path: str, places: tuple[str, ...]) -> bool:
    """Whether a path is one of these places or below one."""
    return any(path == place or path.startswith(f"{place}/") for place in places)
