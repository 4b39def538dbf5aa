"""Routes of OpenAI's Responses, where a turn sends only its new input."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from fastapi import FastAPI, Request, Response

from holdfast.server.conversations.protocol import ResponseRequest
from holdfast.server.conversations.replies import event_bytes, item_list
from holdfast.server.conversations.service import Responses, Writing, not_found
from holdfast.server.protocol import ApiError, parse
from holdfast.server.routes.http import (
    JSON,
    PageQuery,
    described,
    page_query,
    read_body,
    start_stream,
    tenant_of,
    while_connected,
)
from holdfast.server.service import internal


def add_response_routes(app: FastAPI, responses: Responses) -> None:
    """POST, GET, DELETE /v1/responses, cancel and input_items."""
    limit = int(responses.service.config.max_body_mb * 1e6)

    @app.post("/v1/responses", openapi_extra=described(ResponseRequest))
    async def create(request: Request) -> Response:
        """Answer a turn: whole, as a stream, or in the background."""
        wanted = parse(await read_body(request, limit), ResponseRequest)
        if wanted.background:
            background = await responses.start(wanted, tenant_of(request))
            if not wanted.stream:
                return JSON(background.writing.shape.response)
            return await start_stream(request, (event_bytes(event) async for event in background.follow()))
        writing = responses.write(wanted, tenant_of(request))
        if wanted.stream:
            return await start_stream(request, event_stream(writing))
        return JSON(await while_connected(request.receive, whole(writing)))

    @app.get("/v1/responses/{response_id}")
    async def retrieve(request: Request, response_id: str) -> Response:
        """A stored response; with `stream`, the events of a running background response."""
        tenant, query = tenant_of(request), request.query_params
        if query.get("stream") != "true":
            return JSON(await responses.retrieve(tenant, response_id))
        background = responses.running(tenant, response_id)
        if background is None:
            await responses.retrieve(tenant, response_id)
            raise ApiError("only a background response can be streamed, while it is written", param="stream")
        after = query.get("starting_after", "-1")
        if not after.removeprefix("-").isdigit() or len(after) > 9:
            raise ApiError("starting_after must be an integer", param="starting_after", code="invalid_value")
        return await start_stream(request, (event_bytes(event) async for event in background.follow(int(after))))

    @app.delete("/v1/responses/{response_id}")
    async def delete(request: Request, response_id: str) -> dict[str, Any]:
        """Delete a response."""
        await responses.delete(tenant_of(request), response_id)
        return {"id": response_id, "object": "response.deleted", "deleted": True}

    @app.post("/v1/responses/{response_id}/cancel")
    async def cancel(request: Request, response_id: str) -> Response:
        """Stop a background response."""
        return JSON(await responses.cancel(tenant_of(request), response_id))

    @app.get("/v1/responses/{response_id}/input_items")
    async def input_items(request: Request, response_id: str) -> Response:
        """The input items of a response."""
        tenant = tenant_of(request)
        found = await responses.store.run(lambda store: store.turns.input(tenant, response_id))
        if found is None:
            raise not_found("response", response_id)
        return JSON(page(found, page_query(request)))


def page(items: list[dict[str, Any]], query: PageQuery) -> dict[str, Any]:
    """The part of the list that a query asks for."""
    if query.newest_first:
        items = items[::-1]
    if query.after is not None:
        ids = [item["id"] for item in items]
        if query.after not in ids:
            raise not_found("item", query.after, "after")
        items = items[ids.index(query.after) + 1 :]
    return item_list(items[: query.limit], len(items) > query.limit)


async def whole(writing: Writing) -> dict[str, Any]:
    """The response at its end."""
    async with aclosing(writing.events()) as events:
        async for _ in events:
            pass
    return writing.shape.response


async def event_stream(writing: Writing) -> AsyncGenerator[bytes, None]:
    """A response as server-sent events. After the first one, an error ends it with `response.failed`."""
    begun = False
    try:
        async with aclosing(writing.events()) as events:
            async for event in events:
                yield event_bytes(event)
                begun = True
    except Exception as error:
        if not begun:
            raise
        writing.responses.service.metrics.outcome(writing.wanted.route, "failed")
        yield event_bytes(writing.shape.failed(error if isinstance(error, ApiError) else internal(error)))
