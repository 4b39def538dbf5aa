"""Access: finds the key of each request, and refuses requests without one or beyond the key's scopes."""

from __future__ import annotations

from collections import Counter

from starlette.types import ASGIApp, Receive, Scope, Send

from holdfast.server.config import ServerConfig
from holdfast.server.connection import connection_limit
from holdfast.server.keys.ring import KeyRing
from holdfast.server.keys.values import ADAPTERS, OPERATOR, USE, Key
from holdfast.server.protocol import ApiError
from holdfast.server.routes.http import JSON
from holdfast.server.routes.inference import LIVE, READY
from holdfast.server.routes.page import is_page

OPEN_PATHS = ("/health", LIVE, READY)
"""Paths that need no API key."""
UNSCOPED = ("/", "/v1", "/version", "/metrics", "/openapi.json", "/v1/models", "/v2")
"""Paths that any key may read."""
OPERATED = ("/replicas", "/v1/engine", "/v1/organization")
"""Beginnings of the paths whose routes ask for an operator themselves."""
ADAPTER_PATHS = ("/v1/load_lora_adapter", "/v1/unload_lora_adapter", "/v1/fine_tuning")
"""Beginnings of the paths for which a key needs the scope `adapters`."""


def secret_of(scope: Scope) -> bytes:
    """Return the secret that a request sends; empty if it sends none."""
    headers = dict(scope["headers"])
    scheme, _, given = headers.get(b"authorization", b"").partition(b" ")
    if scheme.lower() != b"bearer":
        given = headers.get(b"x-api-key", b"")  # Clients of Anthropic's API send the key in this header.
    return bytes(given.strip())


class Access:
    """Chooses the check of a request: of its key if this server has keys, and otherwise of what sent it.

    The first key in the store makes a running server ask for keys.
    """

    def __init__(self, app: ASGIApp, ring: KeyRing, keyed: ASGIApp, unkeyed: ASGIApp) -> None:
        self.app, self.ring, self.keyed, self.unkeyed = app, ring, keyed, unkeyed

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        await self.ring.refresh()
        await (self.keyed if self.ring.keyed else self.unkeyed)(scope, receive, send)


class KeyCheck:
    """Requires a key with the scope that the path needs, and sets the request's tenant.

    If there are several keys, each may use only its share of the connections. Without this limit, one key with slow
    requests or slow readers could occupy all connections.
    """

    def __init__(self, app: ASGIApp, ring: KeyRing, config: ServerConfig) -> None:
        self.app = app
        self.ring = ring
        self.most = max(1, int(connection_limit(config) * config.share))
        """Maximum number of requests in progress per key."""
        self.in_progress: Counter[str] = Counter()
        """Number of requests in progress, by the name of the key. A key without one has no entry."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        key = self.ring.find(secret_of(scope))
        if key is not None:
            await self._with_key(key, scope, receive, send)
        elif scope["path"] in OPEN_PATHS or is_page(scope):
            scope.setdefault("state", {}).update(tenant="", key="", operator=False, all_adapters=False, keyed=True)
            await self.app(scope, receive, send)
        else:
            reason = "a valid API key is needed: Authorization: Bearer KEY, or x-api-key: KEY"
            error = ApiError(reason, status=401, code="invalid_api_key")
            await refuse(error, scope, receive, send, {"www-authenticate": "Bearer"})

    async def _with_key(self, key: Key, scope: Scope, receive: Receive, send: Send) -> None:
        operator = OPERATOR in key.scopes
        scope.setdefault("state", {}).update(
            tenant=key.tenant, key=key.name, operator=operator,
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


async def refuse(
    error: ApiError, scope: Scope, receive: Receive, send: Send, headers: dict[str, str] | None = None
) -> None:
    """Answer a request with an error in the form of its path's protocol."""
    await JSON(error.body_for(scope["path"]), error.status, {**error.headers, **(headers or {})})(scope, receive, send)


def scopes_for(method: str, path: str) -> tuple[str, ...]:
    """Return the scopes of which a request needs one; empty if any key may send it."""
    if path in OPEN_PATHS or path in UNSCOPED or below(path, OPERATED):
        return ()
    models = path.startswith("/v1/models/")
    if below(path, ADAPTER_PATHS) or (models and method == "DELETE"):
        return ADAPTERS, OPERATOR
    return () if models or path.startswith("/page/") else (USE,)


def below(path: str, places: tuple[str, ...]) -> bool:
    """Whether a path is one of these places or below one."""
    return any(path == place or path.startswith(f"{place}/") for place in places)
