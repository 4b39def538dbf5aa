"""Routes of stored chat completions. Paths and fields are OpenAI's."""

from __future__ import annotations

import re
from typing import Any

from fastapi import FastAPI, Request, Response

from holdfast.server.chats import ChatUpdate, StoredChats
from holdfast.server.config import ServerConfig
from holdfast.server.conversations.protocol import item_list
from holdfast.server.protocol import ChatRequest, parse
from holdfast.server.routes.http import JSON, described, page, page_query, read_decoded, tenant_of

LABEL = re.compile(r"metadata\[(.{1,64})\]")
"""Query parameter that asks for completions with a value in their metadata."""


def add_chat_store_routes(app: FastAPI, chats: StoredChats, config: ServerConfig) -> None:
    """Add the routes of stored chat completions: list, get, update, delete and messages."""
    one, store = f"{ChatRequest.route}/{{completion_id}}", chats.store

    @app.get(ChatRequest.route)
    async def listing(request: Request) -> Response:
        """List the stored chat completions, oldest first unless `order=desc`."""
        tenant, query = tenant_of(request), page_query(request, order="asc")
        model = request.query_params.get("model")
        given = [(LABEL.fullmatch(name), value) for name, value in request.query_params.items()]
        labels = {name[1]: value for name, value in given if name is not None}
        found, more = await store.read(
            lambda store: store.chats.page(tenant, **query._asdict(), model=model, labels=labels)
        )
        return JSON(item_list(found, more))

    @app.get(one)
    async def retrieve(request: Request, completion_id: str) -> Response:
        """A stored chat completion."""
        tenant = tenant_of(request)
        return JSON(await store.read(lambda store: store.chats.get(tenant, completion_id)))

    @app.post(one, openapi_extra=described(ChatUpdate))
    async def update(request: Request, completion_id: str) -> Response:
        """Replace the metadata of a stored chat completion."""
        tenant, wanted = tenant_of(request), parse(await read_decoded(request, config), ChatUpdate)
        return JSON(await store.run(lambda store: store.chats.label(tenant, completion_id, wanted.metadata)))

    @app.delete(one)
    async def delete(request: Request, completion_id: str) -> dict[str, Any]:
        """Delete a stored chat completion."""
        tenant = tenant_of(request)
        await store.run(lambda store: store.chats.delete(tenant, completion_id))
        return {"object": "chat.completion.deleted", "id": completion_id, "deleted": True}

    @app.get(f"{one}/messages")
    async def messages(request: Request, completion_id: str) -> Response:
        """The messages that a stored chat completion answers."""
        tenant = tenant_of(request)
        found = await store.read(lambda store: store.chats.messages(tenant, completion_id))
        return JSON(page(request, found, order="asc"))
