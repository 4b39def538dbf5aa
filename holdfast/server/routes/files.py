"""Routes of OpenAI's Files API: inputs and results of batches and tuning jobs."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import IO, Any
from urllib.parse import quote

from fastapi import FastAPI, Request, Response
from fastapi.responses import StreamingResponse
from starlette.background import BackgroundTask

from holdfast.server.config import ServerConfig
from holdfast.server.conversations.protocol import item_list
from holdfast.server.jobs.files import PIECE, Files
from holdfast.server.routes.http import JSON, page_query, tenant_of

UPLOAD = "/v1/files"
MOST_LISTED = 10_000
FORM = {
    "type": "object",
    "required": ["file", "purpose"],
    "properties": {
        "file": {"type": "string", "format": "binary"},
        "purpose": {"type": "string", "enum": ["batch", "fine-tune"]},
        "expires_after[anchor]": {"type": "string", "enum": ["created_at"]},
        "expires_after[seconds]": {"type": "integer", "minimum": 3600, "maximum": 2592000},
    },
}


def add_file_routes(app: FastAPI, files: Files, config: ServerConfig) -> None:
    """Add the routes under /v1/files."""
    described = {"requestBody": {"required": True, "content": {"multipart/form-data": {"schema": FORM}}}}

    @app.post(UPLOAD, openapi_extra=described)
    async def upload(request: Request) -> Response:
        """Upload a file for batches or tuning."""
        declared = request.headers.get("content-length", "")
        length = int(declared[:20]) if declared.isascii() and declared.isdigit() else None
        kind = request.headers.get("content-type", "")
        file = await files.receive(tenant_of(request), kind, length, request.stream())
        return JSON(file.shown())

    @app.get("/v1/files")
    async def listing(request: Request) -> Response:
        """List the files, newest first unless `order=asc`; with `purpose`, only the files for it."""
        query = page_query(request, most=MOST_LISTED, default=MOST_LISTED)
        purpose = request.query_params.get("purpose")
        found, more = await files.page(tenant_of(request), **query._asdict(), purpose=purpose)
        return JSON(item_list([file.shown() for file in found], more))

    @app.get("/v1/files/{file_id}")
    async def retrieve(request: Request, file_id: str) -> Response:
        """The metadata of a file."""
        return JSON((await files.get(tenant_of(request), file_id)).shown())

    @app.get("/v1/files/{file_id}/content")
    async def content(request: Request, file_id: str) -> Response:
        """The bytes of a file."""
        file, opened = await files.open(tenant_of(request), file_id)
        headers = {
            "content-length": str(file.bytes),
            "content-disposition": f"attachment; filename*=utf-8''{quote(file.name)}",
            "x-content-type-options": "nosniff",
        }
        closing = BackgroundTask(opened.close)
        return StreamingResponse(
            pieces_of(files, opened), media_type="application/octet-stream", headers=headers, background=closing
        )

    @app.delete("/v1/files/{file_id}")
    async def delete(request: Request, file_id: str) -> dict[str, Any]:
        """Delete a file; 409 while a batch reads it."""
        await files.delete(tenant_of(request), file_id)
        return {"id": file_id, "object": "file", "deleted": True}


async def pieces_of(files: Files, opened: IO[bytes]) -> AsyncGenerator[bytes, None]:
    """Yield the bytes of an open file. Closes it at the end, also if the client disconnects."""
    with opened:
        while piece := await files.on_disk(lambda: opened.read(PIECE)):
            yield piece
