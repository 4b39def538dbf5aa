"""Routes of the Open Inference Protocol for cell applications, as clients of KServe and Triton use them."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI, Request, Response
from starlette.requests import ClientDisconnect

from holdfast.server.inference import protocol
from holdfast.server.inference.protocol import JSON_LENGTH, InferenceRequest
from holdfast.server.inference.service import App, Applications
from holdfast.server.protocol import RequestBody, parse
from holdfast.server.routes.http import (
    JSON,
    compress,
    decompress,
    described,
    encoding_of,
    read_body,
    read_decoded,
    tenant_of,
    while_connected,
)
from holdfast.server.service import LARGE, trouble

LIVE, READY = "/v2/health/live", "/v2/health/ready"


class IndexRequest(RequestBody, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """Body of a request for the index. `ready` has no effect, because all models are ready."""

    ready: bool = False


def add_inference_routes(app: FastAPI, applications: Applications) -> None:
    """Add the routes under /v2: server, health, models, inference, and Triton's index, configuration and statistics."""
    config = applications.config

    @app.get("/v2")
    async def server() -> dict[str, Any]:
        """The server's name, version and protocol extensions."""
        return protocol.server_metadata()

    @app.get(LIVE)
    @app.head(LIVE, include_in_schema=False)
    async def live() -> dict[str, Any]:
        """Always true: the server answers."""
        return {"live": True}

    @app.get(READY)
    @app.head(READY, include_in_schema=False)
    async def ready() -> Response:
        """200 if the server accepts requests and each engine answers; otherwise 503."""
        if (reason := await trouble(app.state.admissions, app.state.clients, config.health_seconds)) is not None:
            return JSON({"ready": False, "error": reason}, 503)
        return JSON({"ready": True})

    @app.post("/v2/repository/index")
    async def index(request: Request) -> Response:
        """All applications, with their states."""
        body = await read_decoded(request, config)
        if body:
            parse(body, IndexRequest)
        return JSON(applications.index())

    @app.get("/v2/models/stats")
    async def statistics() -> Response:
        """Statistics of each application since the server started."""
        return JSON({"model_stats": [await applications.statistics(each) for each in applications.apps.values()]})

    for prefix in ("/v2/models/{name}", "/v2/models/{name}/versions/{version}"):

        @app.get(prefix, name=f"metadata {prefix}")
        async def metadata(name: str, version: str | None = None) -> Response:
            """The inputs and outputs of an application."""
            return JSON(protocol.metadata(applications.find(name, version).info))

        @app.get(f"{prefix}/ready", name=f"ready {prefix}")
        async def model_ready(name: str, version: str | None = None) -> Response:
            """200 if the application accepts requests and its engine answers; otherwise 503."""
            each = applications.find(name, version)
            reason = await trouble([each.admission], [each.client], config.health_seconds)
            if reason is not None:
                return JSON({"name": name, "ready": False, "error": reason}, 503)
            return JSON({"name": name, "ready": True})

        @app.get(f"{prefix}/config", name=f"config {prefix}")
        async def configuration(name: str, version: str | None = None) -> Response:
            """The configuration of an application, in Triton's form."""
            return JSON(protocol.configuration(applications.find(name, version).info))

        @app.get(f"{prefix}/stats", name=f"stats {prefix}")
        async def model_statistics(name: str, version: str | None = None) -> Response:
            """Statistics of an application since the server started."""
            return JSON({"model_stats": [await applications.statistics(applications.find(name, version))]})

        @app.post(f"{prefix}/infer", name=f"infer {prefix}", openapi_extra=described(InferenceRequest))
        async def infer(request: Request, name: str, version: str | None = None) -> Response:
            """Run an application once."""
            each = applications.find(name, version)
            with applications.counted(each, ClientDisconnect):
                return await answer(request, each, applications)


async def answer(request: Request, app: App, applications: Applications) -> Response:
    """Read a request, run it, and encode its outputs in the requested form. Raises ApiError."""
    config, headers = applications.config, request.headers
    body, encoding = await read_body(request, config), encoding_of(request)

    def read() -> protocol.Wanted:
        return protocol.read_request(decompress(body, encoding, config), headers.get(JSON_LENGTH), app.info)

    wanted = await applications.off_loop(LARGE if encoding else len(body), read)
    outputs = await while_connected(request.receive, applications.infer(app, wanted, tenant_of(request)))

    def write() -> Response:
        content, kind = protocol.reply(wanted, app.info, outputs)
        content, encoding = compress(content, headers.get("accept-encoding", ""))
        return Response(content, headers={**kind, **encoding})

    return await applications.off_loop(sum(len(tensor.data) for tensor in outputs.values()), write)
