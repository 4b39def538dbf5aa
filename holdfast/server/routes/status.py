"""Routes for models, health and metrics."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI, Response

from holdfast.engine.client import EngineDead
from holdfast.server.conversations.store import AsyncStore
from holdfast.server.metrics import CONTENT_TYPE
from holdfast.server.routes.http import JSON
from holdfast.server.service import Service, unknown_model


def add_model_routes(app: FastAPI, service: Service) -> None:
    """GET /, /v1/models and /v1/models/{id}."""
    info = service.client.info
    card = {
        "id": info.model,
        "object": "model",
        "created": service.started_at,
        "owned_by": "holdfast",
        "max_model_len": info.max_model_len,
        "stateful": True,
    }

    @app.get("/")
    async def root() -> dict[str, Any]:
        """This server's name, model and main paths."""
        return {
            "name": "Holdfast",
            "model": info.model,
            "api": "OpenAI's: /v1/responses, /v1/conversations, /v1/chat/completions, /v1/completions, /v1/models",
            "schema": "/openapi.json",
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


def add_status_routes(app: FastAPI, service: Service, store: AsyncStore) -> None:
    """GET /health and /metrics. Both ask the engine, within a time limit."""

    @app.get("/health")
    async def health() -> Response:
        """200 after a round trip through the engine; 503 if it does not answer, or if the server drains.

        A store that fails is told, but is still a 200: requests that store nothing are served.
        """
        if service.admission.draining:
            return JSON({"status": "draining"}, 503)
        try:
            await service.client.health(timeout=service.config.health_seconds)
        except EngineDead:
            return JSON({"status": "engine dead"}, 503)
        except TimeoutError:
            return JSON({"status": "engine hangs"}, 503)
        return JSON({"status": "ok" if store.up else "store fails"})

    @app.get("/metrics")
    async def metrics() -> Response:
        """Prometheus' text format."""
        try:
            stats = await service.client.health(timeout=service.config.health_seconds)
        except (EngineDead, TimeoutError):
            stats = None
        return Response(service.metrics.exposition(stats), media_type=CONTENT_TYPE)
