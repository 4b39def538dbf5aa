"""Routes of scores, rankings and pooled vectors. Paths are vLLM's; the ranking is also Jina's and Cohere's."""

from __future__ import annotations

from fastapi import FastAPI, Request, Response

from holdfast.server.label_scores import ScoringRequest, score_items
from holdfast.server.replies import RequestUsage
from holdfast.server.routes.generation import named_by, read_request
from holdfast.server.routes.http import JSON, described, tenant_of, while_connected
from holdfast.server.service import Service
from holdfast.server.similarity import PoolingRequest, RerankRequest, ScoreRequest, pool, rerank, score


def add_similarity_routes(app: FastAPI, service: Service) -> None:
    """Add POST /pooling, /score, /v1/score, /rerank, /v1/rerank, /v2/rerank and /generative_scoring."""

    @app.post("/pooling", openapi_extra=described(PoolingRequest))
    async def pooling(request: Request) -> Response:
        """One vector for each input."""
        wanted = await read_request(request, service, PoolingRequest)
        request.state.usage = usage = RequestUsage()
        pooled = pool(service, wanted, tenant_of(request), usage, named_by(request, wanted.request_id))
        return JSON(await while_connected(request.receive, pooled))

    @app.post("/score", openapi_extra=described(ScoreRequest))
    @app.post("/v1/score", openapi_extra=described(ScoreRequest))
    async def scores(request: Request) -> Response:
        """The similarity of pairs of texts."""
        wanted = await read_request(request, service, ScoreRequest)
        request.state.usage = usage = RequestUsage()
        scored = score(service, wanted, tenant_of(request), usage, named_by(request, wanted.request_id))
        return JSON(await while_connected(request.receive, scored))

    @app.post("/rerank", openapi_extra=described(RerankRequest))
    @app.post("/v2/rerank", openapi_extra=described(RerankRequest))
    @app.post("/v1/rerank", openapi_extra=described(RerankRequest))
    async def ranking(request: Request) -> Response:
        """Documents in the order of their similarity to a query."""
        wanted = await read_request(request, service, RerankRequest)
        request.state.usage = usage = RequestUsage()
        ranked = rerank(service, wanted, tenant_of(request), usage, named_by(request, wanted.request_id))
        return JSON(await while_connected(request.receive, ranked))

    @app.post("/generative_scoring", openapi_extra=described(ScoringRequest))
    async def generative_scoring(request: Request) -> Response:
        """The probability of a token after a query and each of several items."""
        wanted = await read_request(request, service, ScoringRequest)
        request.state.usage = usage = RequestUsage()
        scored = score_items(service, wanted, tenant_of(request), usage, named_by(request, wanted.request_id))
        return JSON(await while_connected(request.receive, scored))
