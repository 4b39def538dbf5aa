"""Routes of OpenAI's Conversations: stored items that turns build on."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI, Request, Response

from holdfast.server.conversations.items import new_id, read_items
from holdfast.server.conversations.protocol import (
    ConversationRequest,
    ConversationUpdate,
    ItemsRequest,
    item_list,
)  # fmt: skip
from holdfast.server.conversations.service import Responses
from holdfast.server.protocol import parse
from holdfast.server.routes.http import JSON, described, page_query, read_body, tenant_of


def add_conversation_routes(app: FastAPI, responses: Responses) -> None:
    """Everything under /v1/conversations."""
    store, config = responses.store, responses.service.config
    add_item_routes(app, responses)

    @app.post("/v1/conversations", openapi_extra=described(ConversationRequest))
    async def create(request: Request) -> Response:
        """Begin a conversation, with up to 20 items."""
        tenant = tenant_of(request)
        wanted = parse(await read_body(request, config) or b"{}", ConversationRequest)
        first, id = read_items(wanted.items, "items"), new_id("conv")
        return JSON(await store.run(lambda store: store.conversations.create(tenant, id, wanted.metadata, first)))

    @app.get("/v1/conversations/{conversation_id}")
    async def retrieve(request: Request, conversation_id: str) -> Response:
        """A conversation without its items."""
        tenant = tenant_of(request)
        return JSON(await store.read(lambda store: store.conversations.get(tenant, conversation_id)))

    @app.post("/v1/conversations/{conversation_id}", openapi_extra=described(ConversationUpdate))
    async def update(request: Request, conversation_id: str) -> Response:
        """Replace a conversation's metadata."""
        tenant = tenant_of(request)
        wanted = parse(await read_body(request, config), ConversationUpdate)
        found = await store.run(lambda store: store.conversations.update(tenant, conversation_id, wanted.metadata))
        return JSON(found)

    @app.delete("/v1/conversations/{conversation_id}")
    async def delete(request: Request, conversation_id: str) -> dict[str, Any]:
        """Delete a conversation and its items; its responses stay."""
        tenant = tenant_of(request)
        with responses.lock(tenant, conversation_id):
            await store.run(lambda store: store.conversations.delete(tenant, conversation_id))
        return {"id": conversation_id, "object": "conversation.deleted", "deleted": True}


def add_item_routes(app: FastAPI, responses: Responses) -> None:
    """Everything under /v1/conversations/{id}/items."""
    store, config = responses.store, responses.service.config

    @app.post("/v1/conversations/{conversation_id}/items", openapi_extra=described(ItemsRequest))
    async def add(request: Request, conversation_id: str) -> Response:
        """Append up to 20 items."""
        tenant = tenant_of(request)
        wanted = parse(await read_body(request, config), ItemsRequest)
        new = read_items(wanted.items, "items")
        with responses.lock(tenant, conversation_id):
            await store.run(lambda store: store.conversations.add_items(tenant, conversation_id, new))
        return JSON(item_list(new, has_more=False))

    @app.get("/v1/conversations/{conversation_id}/items")
    async def listing(request: Request, conversation_id: str) -> Response:
        """The items, newest first unless `order=asc`."""
        tenant, query = tenant_of(request), page_query(request)
        page = await store.read(lambda store: store.conversations.items(tenant, conversation_id, **query._asdict()))
        return JSON(item_list(*page))

    @app.get("/v1/conversations/{conversation_id}/items/{item_id}")
    async def retrieve(request: Request, conversation_id: str, item_id: str) -> Response:
        """One item."""
        tenant = tenant_of(request)
        return JSON(await store.read(lambda store: store.conversations.item(tenant, conversation_id, item_id)))

    @app.delete("/v1/conversations/{conversation_id}/items/{item_id}")
    async def delete(request: Request, conversation_id: str, item_id: str) -> Response:
        """Remove one item. Returns the conversation."""
        tenant = tenant_of(request)
        with responses.lock(tenant, conversation_id):
            found = await store.run(lambda store: store.conversations.delete_item(tenant, conversation_id, item_id))
        return JSON(found)
