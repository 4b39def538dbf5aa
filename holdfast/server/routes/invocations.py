"""POST /invocations: the only route that SageMaker calls. The body's fields say which route answers it, as in vLLM."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.routing import APIRoute

from holdfast.server.embeddings import VectorRequest
from holdfast.server.protocol import ApiError, ChatRequest, CompletionRequest
from holdfast.server.routes.http import described, read_fields
from holdfast.server.service import Service
from holdfast.server.similarity import QUERIES, RerankRequest, ScoreRequest

PATH = "/invocations"
ROUTES = {
    "messages": "/v1/chat/completions",
    "prompt": "/v1/completions",
    "input": "/v1/embeddings",
    "query": "/rerank",
    **dict.fromkeys(QUERIES, "/score"),
}
"""Route that answers a body, by the field that only bodies of that route have. The first field that is there counts."""

BODIES = (ChatRequest, CompletionRequest, VectorRequest, RerankRequest, ScoreRequest)
JSON_TYPE = "application/json"
Endpoint = Callable[[Request], Awaitable[Response]]


def add_invocation_route(app: FastAPI, service: Service) -> None:
    """Add POST /invocations, over the routes of ROUTES, which must have been added before."""
    posted: dict[str, Endpoint] = {
        route.path: route.endpoint
        for route in app.routes
        if isinstance(route, APIRoute) and "POST" in (route.methods or ())
    }
    endpoints = {path: posted[path] for path in ROUTES.values()}

    @app.post(PATH, openapi_extra={"requestBody": {"required": True, "content": {JSON_TYPE: {"schema": any_body()}}}})
    async def invocations(request: Request) -> Response:
        """A chat, a completion, embeddings, scores or a ranking, in the form of the route that the body is for."""
        path = route_of(await read_fields(request, service))
        request.scope["path"] = path  # From here on it is a request of that route: for errors, usage and metrics.
        return await endpoints[path](request)


def any_body() -> dict[str, Any]:
    """Return the JSON schema of a body of any of the routes."""
    return {"anyOf": [described(shape)["requestBody"]["content"][JSON_TYPE]["schema"] for shape in BODIES]}


def route_of(fields: Collection[str]) -> str:
    """Return the route that takes a body with these fields. Raises ApiError."""
    for name, path in ROUTES.items():
        if name in fields:
            return path
    reason = f"the body has none of the fields that say what it asks for: {', '.join(ROUTES)}"
    raise ApiError(reason, code="missing_required_parameter")
