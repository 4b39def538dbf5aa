"""POST /invocations: the only route that SageMaker calls. The body's fields say which route answers it, as in vLLM."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.routing import APIRoute
from starlette.types import Message, Receive

from holdfast.server.embeddings import EmbeddingRequest
from holdfast.server.protocol import ApiError, ChatRequest, CompletionRequest, read_object
from holdfast.server.routes.http import SMALL, decompress, described, encoding_of, read_body
from holdfast.server.service import LARGE, Service
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

BODIES = (ChatRequest, CompletionRequest, EmbeddingRequest, RerankRequest, ScoreRequest)
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
        body, encoding = await read_body(request, service.config), encoding_of(request)

        def target() -> str:
            return route_of(read_object(decompress(body, encoding, service.config)))

        small = len(body) < SMALL and not encoding
        path = target() if small else await service.off_loop(LARGE if encoding else len(body), target)
        request.scope["path"] = path  # From here on it is a request of that route: for errors, usage and metrics.
        return await endpoints[path](Request(request.scope, replayed(body, request.receive)))


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


def replayed(body: bytes, receive: Receive) -> Receive:
    """Return a source of messages that gives a body once more, and then those of `receive`."""
    first: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def next_message() -> Message:
        return first.pop() if first else await receive()

    return next_message
