"""Route of embeddings."""

from __future__ import annotations

from fastapi import FastAPI, Request, Response

from holdfast.server.embeddings import EmbeddingRequest, embed
from holdfast.server.replies import RequestUsage
from holdfast.server.routes.generation import read_request
from holdfast.server.routes.http import JSON, described, tenant_of, while_connected
from holdfast.server.service import Service


def add_embedding_route(app: FastAPI, service: Service) -> None:
    """Add POST /v1/embeddings."""

    @app.post("/v1/embeddings", openapi_extra=described(EmbeddingRequest))
    async def embeddings(request: Request) -> Response:
        """A vector for each input, from an embedding model."""
        wanted = await read_request(request, service, EmbeddingRequest)
        request.state.usage = usage = RequestUsage()
        return JSON(await while_connected(request.receive, embed(service, wanted, tenant_of(request), usage)))
