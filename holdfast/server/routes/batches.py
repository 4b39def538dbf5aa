"""Routes of OpenAI's Batches API, and a stream of batch events."""

from __future__ import annotations

from fastapi import FastAPI, Request, Response

from holdfast.server.config import ServerConfig
from holdfast.server.conversations.protocol import event_bytes, item_list
from holdfast.server.jobs.batches import Batches, BatchRequest
from holdfast.server.protocol import parse
from holdfast.server.routes.http import JSON, described, page_query, read_body, start_stream, tenant_of
from holdfast.server.service import internal


def add_batch_routes(app: FastAPI, batches: Batches, config: ServerConfig) -> None:
    """Add the routes under /v1/batches."""

    @app.post("/v1/batches", openapi_extra=described(BatchRequest))
    async def create(request: Request) -> Response:
        """Create a batch of requests from an uploaded file. Returns before any of them runs."""
        wanted = parse(await read_body(request, config), BatchRequest)
        return JSON((await batches.create(wanted, tenant_of(request))).shown())

    @app.get("/v1/batches")
    async def listing(request: Request) -> Response:
        """List the batches, newest first."""
        query = page_query(request)
        found, more = await batches.page(tenant_of(request), limit=query.limit, after=query.after)
        return JSON(item_list([batch.shown() for batch in found], more))

    @app.get("/v1/batches/events")
    async def events(request: Request) -> Response:
        """Server-sent events of all batches of the key, from now on: `batch.updated` and `batch.line`."""
        following = batches.events(tenant_of(request))
        return await start_stream(
            request, following, lambda error: event_bytes({"type": "error", **internal(error).body()})
        )

    @app.get("/v1/batches/{batch_id}")
    async def retrieve(request: Request, batch_id: str) -> Response:
        """The current state of a batch."""
        return JSON((await batches.retrieve(tenant_of(request), batch_id)).shown())

    @app.post("/v1/batches/{batch_id}/cancel")
    async def cancel(request: Request, batch_id: str) -> Response:
        """Stop a batch. Finished answers go to its output file."""
        return JSON((await batches.cancel(tenant_of(request), batch_id)).shown())
