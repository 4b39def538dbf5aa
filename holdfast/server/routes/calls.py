"""The methods of the Open Inference Protocol over gRPC, as an ASGI application: bodies are protobuf messages.

`server.grpc_server` turns each call into a request to it. So keys, limits, logs and errors are those of HTTP.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from functools import partial
from typing import Any

from fastapi import FastAPI
from starlette.requests import ClientDisconnect, Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from holdfast.server.grpc_server import Answer
from holdfast.server.inference import protobufs, protocol
from holdfast.server.inference.protobufs import HEALTH, SERVICE
from holdfast.server.inference.service import App, Applications
from holdfast.server.protocol import ApiError
from holdfast.server.routes.access import refuse
from holdfast.server.routes.http import read_body, tenant_of
from holdfast.server.service import internal, trouble

INFER, STREAM = f"{SERVICE}/ModelInfer", f"{SERVICE}/ModelStreamInfer"
MOST_OF_STREAM = 64
"""Maximum number of requests of one stream whose answers are not sent yet. Further ones are not read meanwhile."""

Method = Callable[[Any], Awaitable[Any]]


class Unkeyed:
    """Sets the state of requests to a server without keys.

    No web site can make a browser send a gRPC request, so nothing else is checked, unlike for HTTP.
    """

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        scope.setdefault("state", {}).update(tenant="", key="", operator=False, all_adapters=True, keyed=False)
        await self.app(scope, receive, send)


class Calls:
    """Answers each request with the protobuf message of its method."""

    def __init__(self, applications: Applications, http: FastAPI, guard: Callable[[ASGIApp], ASGIApp]) -> None:
        """`http` is the application for HTTP, whose limits and whose engines' `admissions` and `clients` are shared.

        `guard` returns an application with checks of keys and limits around another one.
        """
        self._applications, self._http = applications, http
        self.entry = guard(self)
        """Application that checks each request before this one answers it."""
        self._methods: dict[str, tuple[str, Method]] = {
            f"{SERVICE}/{name}": (f"{name}Request", method)
            for name, method in (
                ("ServerLive", self._live),
                ("ServerReady", self._ready),
                ("ModelReady", self._model_ready),
                ("ServerMetadata", self._server_metadata),
                ("ModelMetadata", self._metadata),
                ("ModelConfig", self._config),
                ("ModelStatistics", self._statistics),
                ("RepositoryIndex", self._index),
            )
        } | {f"{HEALTH}/Check": ("HealthCheckRequest", self._check)}

    @property
    def unary(self) -> Sequence[str]:
        """Paths of the methods that answer one message with one."""
        return *self._methods, INFER

    @property
    def streams(self) -> Sequence[str]:
        """Paths of the methods that answer many messages with many."""
        return (STREAM,)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = Request({**scope, "app": self._http}, receive)
        try:
            if scope["path"] == STREAM:
                await self._stream(request, send)
                return
            body = await read_body(request, self._applications.config)
            if scope["path"] == INFER:
                answer = await self._infer(body, tenant_of(request))
            else:
                name, method = self._methods[scope["path"]]
                answer = (await method(protobufs.decode(name, body))).SerializeToString()
        except ApiError as error:
            await refuse(error, scope, receive, send)
        except ClientDisconnect:
            return  # The client has left and reads nothing.
        except Exception as error:
            await refuse(internal(error), scope, receive, send)
        else:
            await send({"type": "http.response.start", "status": 200, "headers": []})
            await send({"type": "http.response.body", "body": answer})

    async def _infer(self, body: bytes, tenant: str) -> bytes:
        """Run an application once. Raises ApiError."""
        applications = self._applications
        message = await applications.off_loop(len(body), partial(protobufs.decode, "ModelInferRequest", body))
        app = applications.find(message.model_name, message.model_version or None)
        with applications.counted(app, ClientDisconnect):
            wanted = await applications.off_loop(len(body), partial(protobufs.read_call, message, app.info))
            outputs = await applications.infer(app, wanted, tenant)
            size = sum(len(tensor.data) for tensor in outputs.values())
            return await applications.off_loop(size, partial(protobufs.reply, wanted, app.info, outputs))

    async def _stream(self, request: Request, send: Send) -> None:
        """Run the requests of a stream side by side, and send their answers in the requests' order."""
        pending = asyncio.Queue[asyncio.Task[bytes] | None](MOST_OF_STREAM)

        async def write() -> None:
            while (task := await pending.get()) is not None:
                await send({"type": "http.response.body", "body": await task, "more_body": True})

        await send({"type": "http.response.start", "status": 200, "headers": []})
        async with asyncio.TaskGroup() as group:
            group.create_task(write())
            async for body in messages(request.receive):
                await pending.put(group.create_task(self._one_of_stream(request.scope, body)))
            await pending.put(None)
        await send({"type": "http.response.body", "body": b""})

    async def _one_of_stream(self, scope: Scope, body: bytes) -> bytes:
        """Answer one request of a stream, with its own check of keys and limits. An error becomes an answer."""
        answer = Answer()
        inner = {key: value for key, value in scope.items() if key != "state"} | {"path": INFER}
        await self.entry(inner, partial(whole, body), answer.send)
        if answer.error is None:
            return protobufs.stream_reply(answer.body)
        try:
            id = protobufs.decode("ModelInferRequest", body).id
        except ApiError:
            id = ""
        return protobufs.stream_error(answer.error, id)

    def _find(self, message: Any) -> App:
        """Return the application that a request names. Raises ApiError 404."""
        return self._applications.find(message.name, message.version or None)

    async def _live(self, message: Any) -> Any:
        return protobufs.from_fields("ServerLiveResponse", {"live": True})

    async def _ready(self, message: Any) -> Any:
        return protobufs.from_fields("ServerReadyResponse", {"ready": await self._trouble() is None})

    async def _trouble(self) -> str | None:
        state = self._http.state
        return await trouble(state.admissions, state.clients, self._applications.config.health_seconds)

    async def _model_ready(self, message: Any) -> Any:
        """Whether an application accepts requests. An unknown one does not, as at Triton."""
        try:
            app = self._find(message)
        except ApiError:
            return protobufs.from_fields("ModelReadyResponse", {})
        reason = await trouble([app.admission], [app.client], self._applications.config.health_seconds)
        return protobufs.from_fields("ModelReadyResponse", {"ready": reason is None})

    async def _server_metadata(self, message: Any) -> Any:
        return protobufs.from_fields("ServerMetadataResponse", protocol.server_metadata())

    async def _metadata(self, message: Any) -> Any:
        app = self._find(message)
        return protobufs.from_fields("ModelMetadataResponse", protocol.metadata(app.info))

    async def _config(self, message: Any) -> Any:
        app = self._find(message)
        return protobufs.from_fields("ModelConfigResponse", {"config": protocol.configuration(app.info)})

    async def _statistics(self, message: Any) -> Any:
        """Statistics of the named application; of all, if the request names none."""
        applications = self._applications
        named = [self._find(message)] if message.name else applications.apps.values()
        stats = [await applications.statistics(each) for each in named]
        return protobufs.from_fields("ModelStatisticsResponse", {"model_stats": stats})

    async def _index(self, message: Any) -> Any:
        return protobufs.from_fields("RepositoryIndexResponse", {"models": self._applications.index()})

    async def _check(self, message: Any) -> Any:
        """gRPC's health check, of the whole server or of the protocol's service."""
        if message.service not in ("", SERVICE[1:]):
            reason = f"the service {message.service[:128]!r} is not served here; this server has {SERVICE[1:]}"
            raise ApiError(reason, status=404, code="service_not_found")
        status = "SERVING" if await self._trouble() is None else "NOT_SERVING"
        return protobufs.from_fields("HealthCheckResponse", {"status": status})


async def messages(receive: Receive) -> AsyncIterator[bytes]:
    """Yield the messages of a stream until its client ends it."""
    while (event := await receive())["type"] == "http.request" and event["more_body"]:
        yield event["body"]


async def whole(body: bytes) -> Message:
    """Receive one body."""
    return {"type": "http.request", "body": body}
