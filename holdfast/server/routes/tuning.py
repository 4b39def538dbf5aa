"""Routes of OpenAI's fine-tuning API, and of the adapters that tuning jobs write."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.responses import StreamingResponse
from starlette.background import BackgroundTask

from holdfast.server.config import ServerConfig
from holdfast.server.conversations.protocol import item_list
from holdfast.server.jobs.tuning import Tuning, TuningRequest
from holdfast.server.protocol import parse
from holdfast.server.routes.files import pieces_of
from holdfast.server.routes.http import JSON, described, page_query, read_body, tenant_of

ROOT = "/v1/fine_tuning/jobs"
MOST_EVENTS = 1000


def add_tuning_routes(app: FastAPI, tuning: Tuning, config: ServerConfig) -> None:
    """Add the routes under /v1/fine_tuning/jobs, and DELETE /v1/models/{id}."""

    @app.post(ROOT, openapi_extra=described(TuningRequest))
    async def create(request: Request) -> Response:
        """Create a tuning job from uploaded examples. Returns before they are read."""
        wanted = parse(await read_body(request, config), TuningRequest)
        return JSON((await tuning.create(wanted, tenant_of(request))).shown())

    @app.get(ROOT)
    async def listing(request: Request) -> Response:
        """List the jobs, newest first. With `metadata[key]=value`, list only jobs with that metadata."""
        query = page_query(request)
        named = [key for key in request.query_params if key.startswith("metadata[") and key.endswith("]")]
        metadata = {key[len("metadata[") : -1]: request.query_params[key] for key in named}
        found, more = await tuning.page(
            tenant_of(request), limit=query.limit, after=query.after, metadata=metadata
        )  # fmt: skip
        return JSON(item_list([job.shown() for job in found], more))

    @app.get(f"{ROOT}/{{job_id}}")
    async def retrieve(request: Request, job_id: str) -> Response:
        """The current state of a job."""
        return JSON((await tuning.retrieve(tenant_of(request), job_id)).shown())

    @app.get(f"{ROOT}/{{job_id}}/events")
    async def events(request: Request, job_id: str) -> Response:
        """The events of a job, newest first. Each step is an event of type `metrics`."""
        query = page_query(request, most=MOST_EVENTS)
        found, more = await tuning.events(tenant_of(request), job_id, limit=query.limit, after=query.after)
        return JSON(item_list(found, more))

    @app.get(f"{ROOT}/{{job_id}}/checkpoints")
    async def checkpoints(request: Request, job_id: str) -> Response:
        """The adapters that a job has written, newest first."""
        query = page_query(request)
        found, more = await tuning.checkpoints(tenant_of(request), job_id, limit=query.limit, after=query.after)
        return JSON(item_list(found, more))

    @app.get(f"{ROOT}/{{job_id}}/adapter/{{name}}")
    async def adapter(request: Request, job_id: str, name: str) -> Response:
        """A file of the newest adapter in PEFT's format: adapter_config.json or adapter_model.safetensors."""
        opened, size = await tuning.adapter_file(tenant_of(request), job_id, name)
        headers = {"content-length": str(size), "x-content-type-options": "nosniff"}
        pieces = pieces_of(tuning.files, opened)
        return StreamingResponse(
            pieces, media_type="application/octet-stream", headers=headers, background=BackgroundTask(opened.close)
        )

    def add(verb: str) -> None:
        async def ask(request: Request, job_id: str) -> Response:
            return JSON((await tuning.ask(tenant_of(request), job_id, verb)).shown())

        ask.__doc__ = {
            "pause": "Stop a job after the step under way; it can be resumed.",
            "resume": "Go on with a paused job.",
            "cancel": "End a job. The adapters that it has written stay.",
        }[verb]
        app.post(f"{ROOT}/{{job_id}}/{verb}", name=verb)(ask)

    for verb in ("pause", "resume", "cancel"):
        add(verb)

    @app.delete("/v1/models/{model:path}")
    async def delete(request: Request, model: str) -> dict[str, Any]:
        """Delete a tuned model, with its checkpoints."""
        await tuning.delete_model(tenant_of(request), model)
        return {"id": model, "object": "model", "deleted": True}
