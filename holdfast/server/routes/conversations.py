"""Routes of OpenAI's Conversations API: stored items that turns build on."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI, Request, Response

from holdfast.server.conversations.items import new_id, read_items
from holdfast.server.conversations.protocol import (
    ConversationRequest,
    ConversationUpdate,
    CopyRequest,
    HeadRequest,
    ItemsRequest,
    WarmRequest,
    item_list,
)  # fmt: skip
from holdfast.server.conversations.service import Responses
from holdfast.server.conversations.values import RUNNING, Turn
from holdfast.server.conversations.words import query_of
from holdfast.server.protocol import invalid, parse
from holdfast.server.routes.http import JSON, described, page_query, read_decoded, tenant_of

MOST_SEARCHED = 200
"""Maximum number of characters of a search text."""


def add_conversation_routes(app: FastAPI, responses: Responses) -> None:
    """Add the routes under /v1/conversations."""
    store, config = responses.store, responses.service.config
    add_item_routes(app, responses)
    add_tree_routes(app, responses)

    @app.get("/v1/conversations")
    async def listing(request: Request) -> Response:
        """List the key's conversations, the latest active first; with `search`, those that contain it, newest first.

        With `search`, a page may be shorter than `limit` although more conversations follow. `incomplete` is true while
        the server still indexes a store of an older version.
        """
        tenant, (limit, _, after) = tenant_of(request), page_query(request)
        wanted = request.query_params.get("search", "").strip()
        if len(wanted) > MOST_SEARCHED:
            raise invalid(f"search has {len(wanted)} characters; at most {MOST_SEARCHED} are searched for", "search")
        if wanted and not query_of(wanted):
            raise invalid(f"search is {wanted!r}, which has no word; give a letter, a number or a symbol", "search")
        if not wanted:
            page = await store.read(lambda store: store.listing.page(tenant, limit=limit, after=after))
            return JSON(item_list(*page))
        found, last, more = await store.read(
            lambda store: store.listing.search(tenant, wanted, limit=limit, after=after)
        )
        complete = await store.read(lambda store: store.listing.complete())
        return JSON(item_list(found, more) | {"last_id": last, "incomplete": not complete})

    @app.post("/v1/conversations", openapi_extra=described(ConversationRequest))
    async def create(request: Request) -> Response:
        """Create a conversation, with up to 20 items."""
        tenant = tenant_of(request)
        wanted = parse(await read_decoded(request, config) or b"{}", ConversationRequest)
        first, id = read_items(wanted.items, "items"), new_id("conv")
        return JSON(await store.run(lambda store: store.conversations.create(tenant, id, wanted.metadata, first)))

    @app.get("/v1/conversations/{conversation_id}")
    async def retrieve(request: Request, conversation_id: str) -> Response:
        """A conversation, without its items."""
        tenant = tenant_of(request)
        return JSON(await store.read(lambda store: store.conversations.get(tenant, conversation_id)))

    @app.post("/v1/conversations/{conversation_id}", openapi_extra=described(ConversationUpdate))
    async def update(request: Request, conversation_id: str) -> Response:
        """Replace a conversation's metadata."""
        tenant = tenant_of(request)
        wanted = parse(await read_decoded(request, config), ConversationUpdate)
        found = await store.run(lambda store: store.conversations.update(tenant, conversation_id, wanted.metadata))
        return JSON(found)

    @app.delete("/v1/conversations/{conversation_id}")
    async def delete(request: Request, conversation_id: str) -> dict[str, Any]:
        """Delete a conversation and its items. With `responses=true`, delete its responses, too."""
        tenant, whole = tenant_of(request), request.query_params.get("responses") == "true"
        async with responses.lock(tenant, conversation_id):
            await store.run(
                lambda store: (store.tree.drop if whole else store.conversations.delete)(tenant, conversation_id)
            )
        return {"id": conversation_id, "object": "conversation.deleted", "deleted": True}


def add_tree_routes(app: FastAPI, responses: Responses) -> None:
    """Add the routes for the turns of a conversation with all branches, its current branch, and copies."""
    store, service = responses.store, responses.service

    @app.post("/v1/conversations/{conversation_id}/warm", openapi_extra=described(WarmRequest))
    async def warm(request: Request, conversation_id: str) -> dict[str, Any]:
        """Announce a turn: state kept on the host comes back to the device, where that costs nobody anything."""
        tenant = tenant_of(request)
        wanted = parse(await read_decoded(request, service.config) or b"{}", WarmRequest)
        adapter = service.adapter_of(wanted.model or service.client.info.model, tenant)
        context = await store.read(lambda store: store.conversations.context(tenant, conversation_id))
        salt = wanted.cache_salt or ""
        service.client.warm(context.tokens, tenant=tenant, adapter=adapter, salt=salt)
        return {"id": conversation_id, "object": "conversation.warmed", "tokens": len(context.tokens)}

    @app.post("/v1/conversations/copies", openapi_extra=described(CopyRequest))
    async def copy(request: Request) -> Response:
        """Create a conversation from turns that this or another server returned, with all branches."""
        tenant, id = tenant_of(request), new_id("conv")
        body = await read_decoded(request, service.config)

        def read() -> tuple[CopyRequest, list[Turn], str | None]:
            wanted = parse(body, CopyRequest)
            return wanted, *wanted.read(tenant, id)

        wanted, grown, head = await service.off_loop(len(body), read)
        await store.run(lambda store: store.tree.restore(tenant, id, wanted.metadata, grown, head))
        return JSON(await store.read(lambda store: store.conversations.get(tenant, id)))

    @app.get("/v1/conversations/{conversation_id}/turns")
    async def turns(request: Request, conversation_id: str) -> Response:
        """All turns of a conversation, each with its parent, and `head`, the turn that it continues from."""
        tenant = tenant_of(request)
        found = await store.read(lambda store: store.tree.turns(tenant, conversation_id))
        for turn in found["turns"]:
            turn["running"] = turn["running"] or responses.running(tenant, turn["id"]) is not None
            if not turn["running"] and turn["status"] in RUNNING:
                turn["status"] = "failed"  # The server that wrote it has ended.
        return JSON(found)

    @app.post("/v1/conversations/{conversation_id}/head", openapi_extra=described(HeadRequest))
    async def head(request: Request, conversation_id: str) -> Response:
        """Continue from another turn: after it (`after`), or instead of it (`before`)."""
        tenant = tenant_of(request)
        wanted = parse(await read_decoded(request, service.config), HeadRequest)
        response = wanted.after or wanted.before
        if response is None or (wanted.after is not None and wanted.before is not None):
            raise invalid("give either after or before", "after")
        after = wanted.after is not None
        async with responses.lock(tenant, conversation_id):
            await store.run(lambda store: store.tree.move(tenant, conversation_id, response, after=after))
        return JSON(await store.read(lambda store: store.conversations.get(tenant, conversation_id)))


def add_item_routes(app: FastAPI, responses: Responses) -> None:
    """Add the routes under /v1/conversations/{id}/items."""
    store, config = responses.store, responses.service.config

    @app.post("/v1/conversations/{conversation_id}/items", openapi_extra=described(ItemsRequest))
    async def add(request: Request, conversation_id: str) -> Response:
        """Append up to 20 items."""
        tenant = tenant_of(request)
        wanted = parse(await read_decoded(request, config), ItemsRequest)
        new = read_items(wanted.items, "items")
        async with responses.lock(tenant, conversation_id):
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
        """Delete one item. Returns the conversation."""
        tenant = tenant_of(request)
        async with responses.lock(tenant, conversation_id):
            found = await store.run(lambda store: store.conversations.delete_item(tenant, conversation_id, item_id))
        return JSON(found)
