"""Routes of files, batches, message batches and tuning jobs, with the events of batches and the adapters of jobs."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from contextlib import ExitStack
from functools import partial
from typing import IO, Any
from urllib.parse import quote

from fastapi import FastAPI, Request, Response
from fastapi.responses import StreamingResponse
from starlette.background import BackgroundTask

from holdfast.server.config import ServerConfig
from holdfast.server.conversations.protocol import event_bytes, item_list
from holdfast.server.jobs.batches import Batches, BatchRequest
from holdfast.server.jobs.files import PIECE, Files
from holdfast.server.jobs.lines import MAX_LINES
from holdfast.server.jobs.message_batches import CUSTOM_ID, MessageBatches, shown
from holdfast.server.jobs.tuning import Tuning, TuningRequest
from holdfast.server.jobs.values import Batch
from holdfast.server.protocol import parse
from holdfast.server.routes.http import (
    JSON,
    described,
    listed,
    page_query,
    query_integer,
    read_decoded,
    start_stream,
    tenant_of,
)  # fmt: skip
from holdfast.server.service import internal

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
MESSAGE_BATCHES = "/v1/messages/batches"
MESSAGE_BATCH = {
    "type": "object",
    "required": ["custom_id", "params"],
    "properties": {
        "custom_id": {"type": "string", "pattern": CUSTOM_ID},
        "params": {"type": "object", "description": "the body of a POST /v1/messages without stream"},
    },
}
BATCHED = {
    "type": "object",
    "required": ["requests"],
    "properties": {"requests": {"type": "array", "minItems": 1, "maxItems": MAX_LINES, "items": MESSAGE_BATCH}},
}
TUNING = "/v1/fine_tuning/jobs"
MOST_EVENTS = 1000


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
        headers = {"content-disposition": f"attachment; filename*=utf-8''{quote(file.name)}"}
        return sent(files, [opened], file.bytes, headers)

    @app.delete("/v1/files/{file_id}")
    async def delete(request: Request, file_id: str) -> dict[str, Any]:
        """Delete a file; 409 while a batch reads it."""
        await files.delete(tenant_of(request), file_id)
        return {"id": file_id, "object": "file", "deleted": True}


def sent(
    files: Files,
    opened: Sequence[IO[bytes]],
    size: int,
    headers: dict[str, str] | None = None,
    media_type: str = "application/octet-stream",
) -> Response:
    """Return a response that sends open files of `size` bytes in all, one after the other.

    It closes the files, also if the client disconnects.
    """
    closing = ExitStack()
    for file in opened:
        closing.enter_context(file)

    async def pieces() -> AsyncGenerator[bytes, None]:
        with closing:
            for file in opened:
                while piece := await files.on_disk(partial(file.read, PIECE)):
                    yield piece

    return StreamingResponse(
        pieces(),
        media_type=media_type,
        headers={"content-length": str(size), "x-content-type-options": "nosniff", **(headers or {})},
        background=BackgroundTask(closing.close),
    )


def add_batch_routes(app: FastAPI, batches: Batches, config: ServerConfig) -> None:
    """Add the routes under /v1/batches."""

    @app.post("/v1/batches", openapi_extra=described(BatchRequest))
    async def create(request: Request) -> Response:
        """Create a batch of requests from an uploaded file. Returns before any of them runs."""
        wanted = parse(await read_decoded(request, config), BatchRequest)
        return JSON((await batches.create(wanted, tenant_of(request), request.state.key)).shown())

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


def add_message_batch_routes(app: FastAPI, batches: MessageBatches, config: ServerConfig) -> None:
    """Add the routes under /v1/messages/batches. Paths and fields are Anthropic's."""
    one = f"{MESSAGE_BATCHES}/{{batch_id}}"

    def seen(request: Request, batch: Batch) -> dict[str, Any]:
        return shown(batch, url_of(request, config.root_path))

    body = {"requestBody": {"required": True, "content": {"application/json": {"schema": BATCHED}}}}

    @app.post(MESSAGE_BATCHES, openapi_extra=body)
    async def create(request: Request) -> Response:
        """Create a batch of messages. Returns before any of them is answered."""
        body = await read_decoded(request, config)
        return JSON(seen(request, await batches.create(body, tenant_of(request), request.state.key)))

    @app.get(MESSAGE_BATCHES)
    async def listing(request: Request) -> Response:
        """List the batches, newest first."""
        query, limit = request.query_params, query_integer(request, "limit", 1, MOST_EVENTS) or 20
        after, before = query.get("after_id"), query.get("before_id")
        found, more = await batches.page(tenant_of(request), limit=limit, after=after, before=before)
        return JSON(listed([seen(request, batch) for batch in found], more))

    @app.get(one)
    async def retrieve(request: Request, batch_id: str) -> Response:
        """The current state of a batch."""
        return JSON(seen(request, await batches.retrieve(tenant_of(request), batch_id)))

    @app.get(f"{one}/results")
    async def results(request: Request, batch_id: str) -> Response:
        """The results of a batch that has ended, a line of JSON for each request."""
        opened, size = await batches.results(tenant_of(request), batch_id)
        return sent(batches.files, opened, size, media_type="application/x-jsonl")

    @app.post(f"{one}/cancel")
    async def cancel(request: Request, batch_id: str) -> Response:
        """Stop a batch. Messages that are answered already stay in its results."""
        return JSON(seen(request, await batches.cancel(tenant_of(request), batch_id)))

    @app.delete(one)
    async def delete(request: Request, batch_id: str) -> dict[str, Any]:
        """Delete a batch that has ended, with its results."""
        await batches.delete(tenant_of(request), batch_id)
        return {"id": batch_id, "type": "message_batch_deleted"}


def url_of(request: Request, root_path: str) -> str:
    """Return the URL of the message batches, as this client reaches them. A proxy says if that is over TLS."""
    forwarded = request.headers.get("x-forwarded-proto", "")
    scheme = forwarded if forwarded in ("http", "https") else request.url.scheme
    return f"{scheme}://{request.url.netloc}{root_path}{MESSAGE_BATCHES}"


def add_tuning_routes(app: FastAPI, tuning: Tuning, config: ServerConfig) -> None:
    """Add the routes under /v1/fine_tuning/jobs, and DELETE /v1/models/{id}."""

    @app.post(TUNING, openapi_extra=described(TuningRequest))
    async def create(request: Request) -> Response:
        """Create a tuning job from uploaded examples. Returns before they are read."""
        wanted = parse(await read_decoded(request, config), TuningRequest)
        return JSON((await tuning.create(wanted, tenant_of(request))).shown())

    @app.get(TUNING)
    async def listing(request: Request) -> Response:
        """List the jobs, newest first. With `metadata[key]=value`, list only jobs with that metadata."""
        query = page_query(request)
        named = [key for key in request.query_params if key.startswith("metadata[") and key.endswith("]")]
        metadata = {key[len("metadata[") : -1]: request.query_params[key] for key in named}
        found, more = await tuning.page(
            tenant_of(request), limit=query.limit, after=query.after, metadata=metadata
        )  # fmt: skip
        return JSON(item_list([job.shown() for job in found], more))

    @app.get(f"{TUNING}/{{job_id}}")
    async def retrieve(request: Request, job_id: str) -> Response:
        """The current state of a job."""
        return JSON((await tuning.retrieve(tenant_of(request), job_id)).shown())

    @app.get(f"{TUNING}/{{job_id}}/events")
    async def events(request: Request, job_id: str) -> Response:
        """The events of a job, newest first. Each step is an event of type `metrics`."""
        query = page_query(request, most=MOST_EVENTS)
        found, more = await tuning.events(tenant_of(request), job_id, limit=query.limit, after=query.after)
        return JSON(item_list(found, more))

    @app.get(f"{TUNING}/{{job_id}}/checkpoints")
    async def checkpoints(request: Request, job_id: str) -> Response:
        """The adapters that a job has written, newest first."""
        query = page_query(request)
        found, more = await tuning.checkpoints(tenant_of(request), job_id, limit=query.limit, after=query.after)
        return JSON(item_list(found, more))

    @app.get(f"{TUNING}/{{job_id}}/adapter/{{name}}")
    async def adapter(request: Request, job_id: str, name: str) -> Response:
        """A file of the newest adapter in PEFT's format: adapter_config.json or adapter_model.safetensors."""
        opened, size = await tuning.adapter_file(tenant_of(request), job_id, name)
        return sent(tuning.files, [opened], size)

    def add(verb: str) -> None:
        async def ask(request: Request, job_id: str) -> Response:
            return JSON((await tuning.ask(tenant_of(request), job_id, verb)).shown())

        ask.__doc__ = {
            "pause": "Stop a job after the step under way; it can be resumed.",
            "resume": "Go on with a paused job.",
            "cancel": "End a job. The adapters that it has written stay.",
        }[verb]
        app.post(f"{TUNING}/{{job_id}}/{verb}", name=verb)(ask)

    for verb in ("pause", "resume", "cancel"):
        add(verb)

    @app.delete("/v1/models/{model:path}")
    async def delete(request: Request, model: str) -> dict[str, Any]:
        """Delete a tuned model, with its checkpoints."""
        await tuning.delete_model(tenant_of(request), model)
        return {"id": model, "object": "model", "deleted": True}
