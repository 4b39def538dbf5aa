"""The routes: OpenAI's API, health and metrics over one EngineClient. The only module that knows FastAPI."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import logging
from collections.abc import AsyncGenerator, Coroutine, Sequence
from contextlib import aclosing
from typing import Any, TypeVar

import msgspec
from fastapi import FastAPI, Request, Response
from fastapi.responses import StreamingResponse
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Receive, Scope, Send

from holdfast.core.version import __version__
from holdfast.engine.client import EngineClient, EngineDead
from holdfast.server.config import ServerConfig
from holdfast.server.metrics import CONTENT_TYPE
from holdfast.server.protocol import ApiError, ChatRequest, CompletionRequest, parse
from holdfast.server.replies import DONE, ChatShape, Shape, TextShape, encode, event
from holdfast.server.service import Answer, Service, unknown_model

OPEN_PATHS = ("/health",)
"""What needs no API key."""

log = logging.getLogger("holdfast.server")
T = TypeVar("T")


def create_app(client: EngineClient, config: ServerConfig) -> FastAPI:
    """The HTTP application over a started engine. `app.state.service` is its Service."""
    service = Service(client, config)
    app = FastAPI(
        title="Holdfast",
        version=__version__,
        summary="OpenAI's API over a model that holds each conversation's state",
        redoc_url=None,
    )
    app.state.service = service
    app.add_middleware(KeyCheck, keys=config.api_key)
    add_error_handlers(app, service)
    add_model_routes(app, service)
    add_generation_routes(app, service)
    add_watch_routes(app, service)
    return app


def add_generation_routes(app: FastAPI, service: Service) -> None:
    """POST /v1/chat/completions and /v1/completions."""
    limit = int(service.config.max_body_mb * 1e6)
    model = service.client.info.model

    @app.post("/v1/chat/completions", openapi_extra=described(ChatRequest))
    async def chat_completions(request: Request) -> Response:
        """One answer to a conversation; with `stream`, as it is written."""
        wanted = parse(await read_body(request, limit), ChatRequest)
        return await respond(request, service.answer(wanted, tenant_of(request)), ChatShape(model, wanted))

    @app.post("/v1/completions", openapi_extra=described(CompletionRequest))
    async def completions(request: Request) -> Response:
        """Continuations of one or several prompts, given as text or token ids."""
        wanted = parse(await read_body(request, limit), CompletionRequest)
        return await respond(request, service.answer(wanted, tenant_of(request)), TextShape(model, wanted))


def add_model_routes(app: FastAPI, service: Service) -> None:
    """GET /, /v1/models and /v1/models/{id}."""
    info = service.client.info
    card = {
        "id": info.model,
        "object": "model",
        "created": service.started_at,
        "owned_by": "holdfast",
        "max_model_len": info.max_model_len,
    }

    @app.get("/")
    async def root() -> dict[str, Any]:
        """What this is, and where to go on."""
        return {
            "name": "Holdfast",
            "model": info.model,
            "api": "OpenAI's: POST /v1/chat/completions, POST /v1/completions, GET /v1/models",
            "docs": "/docs",
            "health": "/health",
            "metrics": "/metrics",
        }

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        """The one model that is served."""
        return {"object": "list", "data": [card]}

    @app.get("/v1/models/{model:path}")
    async def model(model: str) -> dict[str, Any]:
        """The served model by its name."""
        if model != info.model:
            raise unknown_model(model, info.model)
        return card


def add_watch_routes(app: FastAPI, service: Service) -> None:
    """GET /health and /metrics: both ask the engine, within a time limit."""

    @app.get("/health")
    async def health() -> Response:
        """200 after a round trip through the engine; 503 when it does not answer, or when the server drains."""
        if service.traffic.draining:
            return JSON({"status": "draining"}, 503)
        try:
            await service.client.health(timeout=service.config.health_seconds)
        except EngineDead:
            return JSON({"status": "engine dead"}, 503)
        except TimeoutError:
            return JSON({"status": "engine hangs"}, 503)
        return JSON({"status": "ok"})

    @app.get("/metrics")
    async def metrics() -> Response:
        """Prometheus' text format."""
        try:
            stats = await service.client.health(timeout=service.config.health_seconds)
        except (EngineDead, TimeoutError):
            stats = None
        return Response(service.metrics.exposition(stats), media_type=CONTENT_TYPE)


def add_error_handlers(app: FastAPI, service: Service) -> None:
    """Every error leaves in OpenAI's shape, and generation's are counted."""

    def reply(request: Request, error: ApiError) -> Response:
        if request.method == "POST" and request.url.path.startswith("/v1/"):
            outcome = "refused" if error.status < 500 else "unavailable" if error.status == 503 else "failed"
            service.metrics.outcome(request.url.path, outcome)
        headers = {} if error.retry_after is None else {"retry-after": str(error.retry_after)}
        return JSON(error.body(), error.status, headers)

    @app.exception_handler(ApiError)
    async def refused(request: Request, error: ApiError) -> Response:
        return reply(request, error)

    @app.exception_handler(HTTPException)
    async def not_routed(request: Request, error: HTTPException) -> Response:
        path = request.url.path[:128]
        message = {
            404: f"there is no {path}; GET / lists what there is",
            405: f"{path} does not take {request.method}",
        }.get(error.status_code, str(error.detail))
        response = JSON(ApiError(message, code=NOT_ROUTED.get(error.status_code)).body(), error.status_code)
        response.headers.update(error.headers or {})
        return response

    @app.exception_handler(ClientDisconnect)
    async def left(request: Request, error: ClientDisconnect) -> Response:
        return Response(status_code=499)  # nobody reads it

    @app.exception_handler(Exception)
    async def failed(request: Request, error: Exception) -> Response:
        return reply(request, internal(error))


NOT_ROUTED = {404: "not_found", 405: "method_not_allowed"}


class JSON(Response):
    """A JSON body, encoded by msgspec."""

    media_type = "application/json"

    def __init__(self, body: Any, status: int = 200, headers: dict[str, str] | None = None) -> None:
        super().__init__(encode(body), status, headers)


class EventStream(StreamingResponse):
    """Server-sent events whose source is closed however the response ends: done, failed, or left by the client."""

    media_type = "text/event-stream"

    def __init__(self, first: bytes, rest: AsyncGenerator[bytes, None]) -> None:
        async def body() -> AsyncGenerator[bytes, None]:
            yield first
            async for chunk in rest:
                yield chunk

        super().__init__(body(), headers={"cache-control": "no-cache", "x-accel-buffering": "no"})
        self.rest = rest

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await while_connected(receive, self.stream_response(send))
        except ClientDisconnect:
            pass
        finally:
            await self.rest.aclose()


class KeyCheck:
    """Lets a request pass when it brings one of the keys, and derives its tenant from that key."""

    def __init__(self, app: ASGIApp, keys: Sequence[str]) -> None:
        self.app = app
        self.keys = [key.encode() for key in keys]
        self.tenants = [hashlib.sha256(b"holdfast tenant\0" + key).hexdigest() for key in self.keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        tenant = "" if not self.keys else self.tenant(scope)
        if tenant is None and scope["path"] not in OPEN_PATHS:
            error = ApiError("a valid API key is needed: Authorization: Bearer KEY", status=401, code="invalid_api_key")
            await JSON(error.body(), 401, {"www-authenticate": "Bearer"})(scope, receive, send)
            return
        scope.setdefault("state", {})["tenant"] = tenant or ""
        await self.app(scope, receive, send)

    def tenant(self, scope: Scope) -> str | None:
        """The tenant of the key that the request brings; None when it brings none of ours."""
        scheme, _, given = dict(scope["headers"]).get(b"authorization", b"").partition(b" ")
        if scheme.lower() != b"bearer":
            return None
        # Every key is compared, each in constant time: how long it takes tells nothing about any of them.
        matches = [hmac.compare_digest(given.strip(), key) for key in self.keys]
        return self.tenants[matches.index(True)] if any(matches) else None


def tenant_of(request: Request) -> str:
    """Whose prefixes the request may share."""
    tenant: str = request.state.tenant
    return tenant


async def read_body(request: Request, limit: int) -> bytes:
    """The request's body of at most `limit` bytes. Raises ApiError 413 for more, before it is all read."""
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > limit:
            raise ApiError(
                f"the body is larger than {limit} bytes; send less, or raise the server's --max-body-mb",
                status=413,
                code="body_too_large",
            )
    return bytes(body)


async def while_connected(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """Run `work` and cancel it when the client leaves. Raises ClientDisconnect then."""

    async def leave() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass

    leaving = asyncio.create_task(leave())
    working = asyncio.create_task(work)
    try:
        await asyncio.wait({leaving, working}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientDisconnect
        return working.result()
    finally:
        leaving.cancel()
        working.cancel()
        await asyncio.gather(leaving, working, return_exceptions=True)


async def respond(request: Request, answer: Answer, shape: Shape) -> Response:
    """The answer whole, or as a stream that begins once there is something to send: a refusal has its own status."""
    if not answer.wanted.stream:
        return JSON(await while_connected(request.receive, whole(answer, shape)))
    stream = events(answer, shape)

    async def begin() -> bytes:
        return await anext(stream)

    return EventStream(await while_connected(request.receive, begin()), stream)


async def whole(answer: Answer, shape: Shape) -> msgspec.Struct:
    """Gather all choices of an answer into one completion."""
    texts: list[list[str]] = [[] for _ in range(answer.num_choices)]
    reasons = [""] * answer.num_choices
    async with aclosing(answer.deltas()) as deltas:
        async for choice, delta in deltas:
            texts[choice].append(delta.text)
            reasons[choice] = delta.finish_reason or reasons[choice]
    return shape.whole(["".join(parts) for parts in texts], reasons, answer.usage)


async def events(answer: Answer, shape: Shape) -> AsyncGenerator[bytes, None]:
    """The answer as server-sent events. Once the first is out, an error is an event and ends the stream."""
    begun = False
    try:
        async with aclosing(answer.deltas()) as deltas:
            async for choice, delta in deltas:
                for chunk in shape.chunks(choice, delta.text, delta.finish_reason):
                    yield event(chunk)
                    begun = True
        if answer.wanted.stream_options.include_usage:
            yield event(shape.usage(answer.usage))
        yield DONE
    except Exception as error:
        if not begun:
            raise
        answer.service.metrics.outcome(answer.wanted.route, "failed")
        refusal = error if isinstance(error, ApiError) else internal(error)
        yield event(refusal.body())


def internal(error: Exception) -> ApiError:
    """What clients see of an error that nobody foresaw; its trace goes to the log."""
    log.error("a request failed", exc_info=error)
    return ApiError("the server failed on this request", status=500, type="server_error", code="internal_error")


def described(shape: type[msgspec.Struct]) -> dict[str, Any]:
    """A request body for /docs, which cannot see it: the routes read it themselves, to refuse by name."""
    _, components = msgspec.json.schema_components([shape], ref_template="{name}")
    body = components[shape.__name__]
    body["properties"]["stream_options"] = components["StreamOptions"]
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": body}}}}
