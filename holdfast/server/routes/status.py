"""Routes for models, health and metrics."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI, Request, Response
from prometheus_client import CollectorRegistry, generate_latest

from holdfast.cluster.replicas import Replicas
from holdfast.core.version import __version__
from holdfast.engine.client.connection import EngineDead
from holdfast.lm.types import SchedulerStats
from holdfast.server.conversations.store import not_found
from holdfast.server.inference.service import Applications
from holdfast.server.metrics import CONTENT_TYPE
from holdfast.server.protocol import ApiError
from holdfast.server.readiness import ALIVE, READY, Readiness, asleep
from holdfast.server.replica_metrics import describe
from holdfast.server.replies import rfc3339
from holdfast.server.routes.http import JSON, VERSION, listed, query_integer, tenant_of
from holdfast.server.routes.operators import is_operator
from holdfast.server.routes.page import index, wants_page
from holdfast.server.service import Service, trouble


def add_model_routes(app: FastAPI, service: Service) -> None:
    """Add GET /v1/models and /v1/models/{id}."""
    client = service.client

    def card(name: str, tenant: str) -> dict[str, Any]:
        adapted = {"parent": client.info.model, "root": name} if service.adapter_of(name, tenant) else {}
        return {
            "id": name,
            "object": "model",
            "created": service.started_at,
            "owned_by": "holdfast",
            "max_model_len": client.info.max_model_len,
            "stateful": True,
            **adapted,
        }

    def model_info(name: str) -> dict[str, Any]:
        """Return Anthropic's model object."""
        return {
            "id": name,
            "type": "model",
            "display_name": name,
            "created_at": rfc3339(service.started_at),
            "lifecycle": "active",
            "max_input_tokens": client.info.max_model_len,
            "max_tokens": client.info.max_model_len,
        }

    @app.get("/v1/models")
    @app.get("/v1/models/", include_in_schema=False)
    @app.head("/v1/models", include_in_schema=False)
    async def models(request: Request) -> dict[str, Any]:
        """The served model and its adapters: those for all keys and those of this key.

        With the header `anthropic-version`, the list has the form of Anthropic's API.
        """
        tenant = tenant_of(request)
        names = service.models(tenant)
        if VERSION in request.headers:
            return info_page(request, [model_info(name) for name in names])
        return {"object": "list", "data": [card(name, tenant) for name in names]}

    @app.get("/v1/models/{model:path}")
    async def model(request: Request, model: str) -> dict[str, Any]:
        """The served model or one of its adapters."""
        tenant = tenant_of(request)
        if VERSION in request.headers:
            service.check_model(model, tenant)
            return model_info(model)
        return card(model, tenant)


def info_page(request: Request, infos: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the page of Anthropic's list that `limit`, `after_id` and `before_id` ask for. Raises ApiError."""
    query, limit = request.query_params, query_integer(request, "limit", 1, 1000) or 20
    ids = [info["id"] for info in infos]
    for name in ("after_id", "before_id"):
        if name in query and query[name] not in ids:
            raise not_found("model", query[name], name)
    begin = ids.index(query["after_id"]) + 1 if "after_id" in query else 0
    end = ids.index(query["before_id"]) if "before_id" in query else len(ids)
    if "before_id" in query:
        return listed(infos[max(begin, end - limit) : end], end - limit > begin)
    return listed(infos[begin : begin + limit], begin + limit < end)


def add_root_routes(app: FastAPI, service: Service | None, applications: Applications) -> None:
    """Add GET / and /version."""
    served: dict[str, Any] = {}
    apis = []
    if service is not None:
        served["model"] = service.client.info.model
        apis.append(
            "OpenAI's: /v1/responses, /v1/conversations, /v1/chat/completions, /v1/completions, /v1/files, "
            "/v1/batches, /v1/fine_tuning/jobs, /v1/models"
        )
        apis.append("vLLM's: /tokenize, /detokenize, /score, /rerank, /generative_scoring, /pooling, /load, /version")
        apis.append("Ollama's: /api/chat, /api/generate, /api/tags")
    if applications.apps:
        served["applications"] = list(applications.apps)
        apis.append("Open Inference Protocol: /v2, /v2/models/{name}, /v2/models/{name}/infer")

    @app.get("/")
    @app.head("/", include_in_schema=False)
    async def root(request: Request) -> Response:
        """The server's name, models and main paths. A browser gets the page instead."""
        if wants_page(request):
            return index(request)
        listed = {
            "name": "Holdfast",
            **served,
            "api": "; ".join(apis),
            "schema": "/openapi.json",
            "docs": "/docs",
            "health": "/health",
            "metrics": "/metrics",
        }
        return JSON(listed, headers={"vary": "accept"})

    @app.get("/version")
    async def version() -> dict[str, Any]:
        """The version of Holdfast."""
        return {"version": __version__}


def add_status_routes(
    app: FastAPI,
    service: Service | None,
    applications: Applications,
    registry: CollectorRegistry,
    operators: CollectorRegistry,
    readiness: Readiness,
) -> None:
    """Add GET /health, /health/live, /health/ready, /load and /metrics.

    All but /health/live query the engines, within a time limit.

    `operators` holds the metrics of each replica and of each key.
    """

    @app.get(ALIVE)
    @app.head(ALIVE, include_in_schema=False)
    async def alive() -> dict[str, Any]:
        """Always 200: the process runs. It looks at nothing else, so a failing engine or store restarts no server."""
        return {"status": "alive"}

    @app.get(READY)
    @app.head(READY, include_in_schema=False)
    async def ready() -> Response:
        """200 if this server should get requests; 503 with the reason otherwise.

        Reasons are that it drains, that no engine serves, or that the store cannot be reached.
        """
        if (reason := await readiness.trouble()) is not None:
            return JSON({"status": "not ready", "reason": reason}, 503)
        return JSON({"status": "ready"})

    @app.get("/ping")
    @app.head("/ping", include_in_schema=False)
    @app.post("/ping")
    @app.get("/health")
    @app.head("/health", include_in_schema=False)
    async def health(request: Request) -> Response:
        """200 if each engine answers; 503 if one does not, or if the server drains.

        With replicas, one that answers is enough. For operators, the body has the state of each replica. If the store
        or the remote cache fails, the status is still 200, because some or all requests can be served, and the body
        reports the failure. So it is while the engine sleeps: the body says `asleep`.
        """
        state = request.app.state
        client = service.client if service is not None and isinstance(service.client, Replicas) else None
        listed: dict[str, Any] = {}
        if client is not None and service is not None and is_operator(request, service.config):
            listed = {"replicas": [describe(replica) for replica in client.members]}
        if (reason := await trouble(state.admissions, state.clients, applications.config.health_seconds)) is not None:
            return JSON({"status": reason, **listed}, 503)
        responses = state.responses
        status = "ok" if client is None or len(client.serving) == len(client.members) else "degraded"
        if responses is not None and not responses.store.up:
            status = "store fails"
        elif service is not None and service.client.config.remote_cache is not None:
            stats = await stats_of(service)
            status = "remote cache fails" if stats is not None and stats.remote_down else status
        if status == "ok" and await asleep(state.clients, applications.config.health_seconds):
            status = "asleep"
        return JSON({"status": status, **listed})

    @app.get("/load")
    async def load() -> dict[str, int]:
        """The number of requests that the engines compute, or that wait there, as in vLLM.

        It counts those of all servers of these engines, and each choice of a request. 503 if no engine answers.
        """
        count = sum(each.admission.in_progress for each in applications.apps.values())
        if service is not None:
            if (stats := await stats_of(service)) is None:
                reason = "the engine does not answer, so its load is not known"
                raise ApiError(reason, status=503, code="engine_unavailable", retry_after=1)
            count += stats.running + stats.waiting
        return {"server_load": count}

    @app.get("/metrics")
    async def metrics(request: Request) -> Response:
        """Metrics in Prometheus' text format. With keys, those of each replica and key are for operators."""
        if service is not None:
            service.metrics.stats = await stats_of(service)
        await applications.scrape()
        shown = generate_latest(registry)
        if request.state.operator or not request.state.keyed:
            shown += generate_latest(operators)
        return Response(shown, media_type=CONTENT_TYPE)


async def stats_of(service: Service) -> SchedulerStats | None:
    """Return the scheduler's state; None if the engine does not answer in time."""
    try:
        return await service.client.health(timeout=service.config.health_seconds)
    except (EngineDead, TimeoutError):
        return None
