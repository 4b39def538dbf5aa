"""Routes of OpenAI's Conversations: stored items that turns build on."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI, Request, Response

from holdfast.server.conversations.protocol import (
    ConversationRequest,
    ConversationUpdate,
    ItemsRequest,
    new_id,
    read_items,
)
from holdfast.server.conversations.replies import item_list
from holdfast.server.conversations.service import Responses, not_found, store_refusals
from holdfast.server.protocol import parse
from holdfast.server.routes.http import JSON, described, page_query, read_body, tenant_of


def add_conversation_routes(app: FastAPI, responses: Responses) -> None:
    """Everything under /v1/conversations."""
    store = responses.store
    add_item_routes(app, responses)

    @app.post("/v1/conversations", openapi_extra=described(ConversationRequest))
    async def create(request: Request) -> Response:
        """Begin a conversation, with up to 20 items."""
        tenant, limit = tenant_of(request), int(responses.service.config.max_body_mb * 1e6)
        wanted = parse(await read_body(request, limit) or b"{}", ConversationRequest)
        first, id = read_items(wanted.items, "items"), new_id("conv")
        with store_refusals():
            return JSON(await store.run(lambda store: store.conversations.create(tenant, id, wanted.metadata, first)))

    @app.get("/v1/conversations/{conversation_id}")
    async def retrieve(request: Request, conversation_id: str) -> Response:
        """A conversation without its items."""
        tenant = tenant_of(request)
        found = await store.run(lambda store: store.conversations.get(tenant, conversation_id))
        return JSON(existing(found, conversation_id))

    @app.post("/v1/conversations/{conversation_id}", openapi_extra=described(ConversationUpdate))
    async def update(request: Request, conversation_id: str) -> Response:
        """Replace a conversation's metadata."""
        tenant, limit = tenant_of(request), int(responses.service.config.max_body_mb * 1e6)
        wanted = parse(await read_body(request, limit), ConversationUpdate)
        found = await store.run(lambda store: store.conversations.update(tenant, conversation_id, wanted.metadata))
        return JSON(existing(found, conversation_id))

    @app.delete("/v1/conversations/{conversation_id}")
    async def delete(request: Request, conversation_id: str) -> dict[str, Any]:
        """Delete a conversation and its items; its responses stay."""
        tenant = tenant_of(request)
        with responses.lock(tenant, conversation_id):
            if not await store.run(lambda store: store.conversations.delete(tenant, conversation_id)):
                raise not_found("conversation", conversation_id)
        return {"id": conversation_id, "object": "conversation.deleted", "deleted": True}


def add_item_routes(app: FastAPI, responses: Responses) -> None:
    """Everything under /v1/conversations/{id}/items."""
    store = responses.store

    @app.post("/v1/conversations/{conversation_id}/items", openapi_extra=described(ItemsRequest))
    async def add(request: Request, conversation_id: str) -> Response:
        """Append up to 20 items."""
        tenant, limit = tenant_of(request), int(responses.service.config.max_body_mb * 1e6)
        wanted = parse(await read_body(request, limit), ItemsRequest)
        new = read_items(wanted.items, "items")
        with responses.lock(tenant, conversation_id), store_refusals():
            if not await store.run(lambda store: store.conversations.add_items(tenant, conversation_id, new)):
                raise not_found("conversation", conversation_id)
        return JSON(item_list(new, has_more=False))

    @app.get("/v1/conversations/{conversation_id}/items")
    async def listing(request: Request, conversation_id: str) -> Response:
        """The items, newest first unless `order=asc`."""
        tenant, query = tenant_of(request), page_query(request)
        try:
            page = await store.run(
                lambda store: store.conversations.items(
                    tenant, conversation_id, limit=query.limit, newest_first=query.newest_first, after=query.after
                )
            )
        except LookupError as error:
            raise not_found("item", str(error.args[0]), "after") from None
        found = existing(page, conversation_id)
        return JSON(item_list(found.items, found.has_more))

    @app.get("/v1/conversations/{conversation_id}/items/{item_id}")
    async def retrieve(request: Request, conversation_id: str, item_id: str) -> Response:
        """One item."""
        tenant = tenant_of(request)
        found = await store.run(lambda store: store.conversations.item(tenant, conversation_id, item_id))
        return JSON(existing(found, item_id, "item"))

    @app.delete("/v1/conversations/{conversation_id}/items/{item_id}")
    async def delete(request: Request, conversation_id: str, item_id: str) -> Response:
        """Remove one item. Returns the conversation."""
        tenant = tenant_of(request)
        with responses.lock(tenant, conversation_id):
            found = await store.run(lambda store: store.conversations.delete_item(tenant, conversation_id, item_id))
        return JSON(existing(found, item_id, "item"))


def existing(found: Any, id: str, kind: str = "conversation") -> Any:
    """Return `found`. Raises ApiError 404 if it is None."""
    if found is None:
        raise not_found(kind, id)
    return found
