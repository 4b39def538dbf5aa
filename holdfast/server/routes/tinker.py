"""Routes of Tinker's protocol for training: sessions, models, calls, futures and checkpoints."""

from __future__ import annotations

import math
from collections.abc import AsyncGenerator, Awaitable, Callable
from datetime import UTC, datetime
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.responses import StreamingResponse

from holdfast.server.protocol import ApiError, Body
from holdfast.server.routes.http import JSON, described, encoding_of, query_integer, read_body, read_parsed, tenant_of
from holdfast.server.service import Service
from holdfast.server.tinker.checkpoints import archive
from holdfast.server.tinker.protos import MEDIA, require
from holdfast.server.tinker.requests import (
    CreateModel,
    CreateSession,
    FinishSession,
    Heartbeat,
    KeepFor,
    LoadWeights,
    OfCall,
    OfModel,
    OptimStep,
    RetrieveFuture,
    SaveForSampler,
    SaveWeights,
    WeightsInfo,
)  # fmt: skip
from holdfast.server.tinker.training import Training
from holdfast.server.tinker.values import PLACES, Checkpoint, Future, Model

API = "/api/v1"
FORWARD = f"{API}/forward_backward"
POLL_SECONDS = 25.0
"""Seconds for which retrieve_future waits for a result. The SDK gives up after 45 s and asks again."""
INLINE_BYTES = 4 << 20
"""Size of a result in bytes from which a client that asks for metadata gets the size first."""
CHUNK_SHARE = 0.6
"""Share of the largest body that the SDK's estimate of a request may have. The estimate can be too low."""
MOST_LISTED = 1000
FORWARD_BODY = {
    "requestBody": {"required": True, "content": {MEDIA: {"schema": {"type": "string", "format": "binary"}}}}
}


def add_client_routes(app: FastAPI, training: Training, service: Service) -> None:
    """Add what the SDK asks for at its start, and its sessions."""
    config = service.config

    @app.get(f"{API}/healthz")
    async def health() -> dict[str, Any]:
        """Whether the server answers."""
        return {"status": "ok"}

    @app.post(f"{API}/client/config")
    async def client_config() -> dict[str, Any]:
        """Settings for the client: how it cuts and compresses requests."""
        require()
        return {
            "pjwt_auth_enabled": False,
            "credential_default_source": "api_key",
            "parallel_fwdbwd_chunks": True,
            "proto_compress_fwdbwd": find_spec("zstandard") is not None,
            "fwdbwd_max_chunk_bytes_count": min(5_000_000, math.floor(CHUNK_SHARE * config.max_body_bytes)),
            "sample_use_retrieve_futures": False,
            "custom_loss_server_side": False,
        }

    @app.post(f"{API}/client/dynamic_config")
    async def dynamic_config() -> dict[str, Any]:
        """Settings for the client that it reads again every few minutes."""
        return {"refresh_interval_sec": 300, "sample_cancel_enabled": True, "sample_cancel_max_batch_size": 64}

    @app.get(f"{API}/get_server_capabilities")
    async def capabilities() -> dict[str, Any]:
        """The models that can be trained and sampled."""
        return {"supported_models": [training.capability()]}

    @app.post(f"{API}/telemetry")
    async def telemetry(request: Request) -> dict[str, Any]:
        """Take events of the SDK. They are dropped."""
        await read_body(request, config)
        return {"status": "accepted"}

    @app.post(f"{API}/create_session", openapi_extra=described(CreateSession))
    async def create_session(request: Request) -> Response:
        """Create a session, which owns models and sampling sessions."""
        wanted = await read_parsed(request, service, CreateSession)
        session = await training.sessions.create(
            tenant_of(request), name=wanted.display_name, metadata=wanted.user_metadata, tags=wanted.tags,
            sdk=wanted.sdk_version,
        )  # fmt: skip
        return JSON({"type": "create_session", "session_id": session.id})

    @app.post(f"{API}/session_heartbeat", openapi_extra=described(Heartbeat))
    async def heartbeat(request: Request) -> Response:
        """Show that a session's client runs; 410 once the session is finished."""
        wanted = await read_parsed(request, service, Heartbeat)
        await training.sessions.beat(tenant_of(request), wanted.session_id)
        return JSON({"type": "session_heartbeat"})

    @app.get(f"{API}/sessions")
    async def sessions(request: Request) -> Response:
        """List the ids of sessions, newest first."""
        offset, limit = page_of(request)
        found = await training.sessions.page(tenant_of(request), offset=offset, limit=limit)
        return JSON({"sessions": [session.id for session in found]})

    @app.get(f"{API}/sessions/{{session_id}}")
    async def session(request: Request, session_id: str) -> Response:
        """A session, with the ids of its models."""
        found = await training.sessions.find(tenant_of(request), session_id)
        models, samplers = await training.sessions.models(found.id), await training.sessions.samplers(found.id)
        shown = {"user_metadata": texts(found.metadata), "display_name": found.name}
        return JSON({"training_run_ids": models, "sampler_ids": samplers, **shown})

    @app.post(f"{API}/sessions/{{session_id}}/finish", openapi_extra=described(FinishSession))
    async def finish(request: Request, session_id: str) -> Response:
        """Finish a session. Its models are unloaded; their checkpoints stay."""
        wanted = await read_parsed(request, service, FinishSession)
        await training.finish_session(tenant_of(request), session_id, wanted.reason.type)
        return Response(status_code=204)


def add_model_routes(app: FastAPI, training: Training, service: Service) -> None:
    """Add the routes that create, train, save and load models."""
    config = service.config

    def add_call(path: str, shape: type[Body], work: Callable[[Body, str], Awaitable[Future]], about: str) -> None:
        """Add a route whose result the client retrieves later. `about` describes it in the API's documentation."""

        @app.post(f"{API}/{path}", name=path, description=about, openapi_extra=described(shape))
        async def call(request: Request) -> Response:
            return promised(await work(await read_parsed(request, service, shape), tenant_of(request)))

    async def unload(wanted: OfModel, tenant: str) -> Future:
        return await training.unload(tenant, wanted.model_id)

    async def save_external(wanted: OfCall, tenant: str) -> Future:
        reason = "save_weights_external is not supported; save_weights_for_sampler writes PEFT's format"
        return await training.refuse(wanted, tenant, reason)

    add_call("create_model", CreateModel, training.create, "Create a LoRA adapter to be trained.")
    add_call("unload_model", OfModel, unload, "End a model. Its checkpoints stay.")
    add_call(
        "optim_step", OptimStep, training.optimize, "Update a model by Adam from the gradients since the last one."
    )
    add_call("save_weights", SaveWeights, training.save, "Save a model's parameters and moments as a checkpoint.")
    add_call(
        "save_weights_for_sampler", SaveForSampler, training.save_for_sampler,
        "Save a model's adapter as a checkpoint to sample with.",
    )  # fmt: skip
    add_call(
        "save_weights_external", OfCall, save_external,
        "Not supported. The request fails in its turn, so that later ones go on.",
    )  # fmt: skip
    add_call("load_weights", LoadWeights, training.load, "Load a checkpoint into a model, or create a model from one.")

    @app.post(FORWARD, openapi_extra=FORWARD_BODY)
    async def forward_backward(request: Request) -> Response:
        """Compute log probabilities of targets and, unless `forward_only`, add to the gradients of a loss."""
        kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if kind != MEDIA:
            reason = f"content-type is {kind[:64]!r}; send a ForwardBackwardRequest as {MEDIA}"
            raise ApiError(reason, status=415, code="unsupported_media_type")
        body, encoding = await read_body(request, config), encoding_of(request)
        return promised(await training.forward(body, tenant_of(request), encoding=encoding))

    @app.post(f"{API}/get_info", openapi_extra=described(OfModel))
    async def get_info(request: Request) -> Response:
        """A model's base model, rank and modules."""
        wanted = await read_parsed(request, service, OfModel)
        return JSON(info_of(await training.model(tenant_of(request), wanted.model_id), training.tokenizer))

    @app.post(f"{API}/retrieve_future", openapi_extra=described(RetrieveFuture))
    async def retrieve_future(request: Request) -> Response:
        """The result of an earlier request; 408 if it has not ended within 25 s."""
        wanted = await read_parsed(request, service, RetrieveFuture)
        future = await training.futures.wait(tenant_of(request), wanted.request_id, POLL_SECONDS, training.lost)
        if training.lost(future):
            raise ApiError("the server that sampled this has ended; ask again", status=410, code="future_lost")
        return await outcome_of(training, future, metadata_only=wanted.allow_metadata_only)


def add_checkpoint_routes(app: FastAPI, training: Training, service: Service) -> None:
    """Add the routes that list models and checkpoints, and manage checkpoints."""
    runs = f"{API}/training_runs"
    one = f"{runs}/{{model_id}}/checkpoints/{{place}}/{{name}}"

    @app.get(runs)
    async def training_runs(request: Request) -> Response:
        """List the models that were created, newest first."""
        offset, limit = page_of(request)
        found, total = await training.page(tenant_of(request), offset=offset, limit=limit)
        shown = [await run_of(training, model, used) for model, used in found]
        return JSON({"training_runs": shown, "cursor": {"offset": offset, "limit": limit, "total_count": total}})

    @app.get(f"{runs}/{{model_id}}")
    async def training_run(request: Request, model_id: str) -> Response:
        """A model, with its newest checkpoints."""
        model = await training.model(tenant_of(request), model_id)
        return JSON(await run_of(training, model, await training.used(model)))

    @app.get(f"{runs}/{{model_id}}/checkpoints")
    async def checkpoints_of(request: Request, model_id: str) -> Response:
        """List the checkpoints of a model, newest first."""
        model = await training.model(tenant_of(request), model_id)
        found, _ = await training.checkpoints.page(model.tenant, model=model.id, limit=MOST_LISTED)
        return JSON({"checkpoints": [shown_checkpoint(each) for each in found], "cursor": None})

    @app.get(f"{API}/checkpoints")
    async def checkpoints(request: Request) -> Response:
        """List the checkpoints of all models, newest first."""
        offset, limit = page_of(request)
        found, total = await training.checkpoints.page(tenant_of(request), offset=offset, limit=limit)
        cursor = {"offset": offset, "limit": limit, "total_count": total}
        return JSON({"checkpoints": [shown_checkpoint(each) for each in found], "cursor": cursor})

    @app.post(f"{API}/weights_info", openapi_extra=described(WeightsInfo))
    async def weights_info(request: Request) -> Response:
        """The base model and rank of a checkpoint."""
        wanted = await read_parsed(request, service, WeightsInfo)
        checkpoint = await training.checkpoints.find(tenant_of(request), wanted.tinker_path, "tinker_path")
        model = await training.model(checkpoint.tenant, checkpoint.model)
        parts = {"train_unembed": False, "train_mlp": model.mlp, "train_attn": model.attn}
        return JSON({"base_model": model.base, "is_lora": True, "lora_rank": model.rank, **parts})

    @app.delete(one)
    async def delete(request: Request, model_id: str, place: str, name: str) -> Response:
        """Delete a checkpoint."""
        await training.checkpoints.drop(await training.checkpoints.own(tenant_of(request), model_id, place, name))
        return Response(status_code=204)

    @app.post(f"{one}/publish")
    async def publish(request: Request, model_id: str, place: str, name: str) -> Response:
        """Let every API key of this server load a checkpoint."""
        found = await training.checkpoints.own(tenant_of(request), model_id, place, name)
        await training.checkpoints.publish(found, True)
        return Response(status_code=204)

    @app.delete(f"{one}/publish")
    async def unpublish(request: Request, model_id: str, place: str, name: str) -> Response:
        """Let only the key's own tenant load a checkpoint again."""
        found = await training.checkpoints.own(tenant_of(request), model_id, place, name)
        await training.checkpoints.publish(found, False)
        return Response(status_code=204)

    @app.put(f"{one}/ttl", openapi_extra=described(KeepFor))
    async def keep_for(request: Request, model_id: str, place: str, name: str) -> Response:
        """Set after how many seconds a checkpoint is deleted; null: never."""
        wanted = await read_parsed(request, service, KeepFor)
        found = await training.checkpoints.own(tenant_of(request), model_id, place, name)
        await training.checkpoints.keep_for(found, wanted.ttl_seconds)
        return Response(status_code=204)

    @app.get(f"{one}/archive")
    async def download(request: Request, model_id: str, place: str, name: str) -> Response:
        """The files of a checkpoint as a tar archive."""
        found = await training.checkpoints.own(tenant_of(request), model_id, place, name)

        async def pieces() -> AsyncGenerator[bytes, None]:
            parts = archive(Path(found.directory))
            while (piece := await training.checkpoints.on_disk(lambda: next(parts, None))) is not None:
                yield piece

        headers = {"content-disposition": f'attachment; filename="{found.name}.tar"'}
        return StreamingResponse(pieces(), media_type="application/x-tar", headers=headers)


def promised(future: Future) -> Response:
    """Return the answer to a request whose result the client retrieves later."""
    return JSON({"request_id": future.id, "model_id": future.item})


async def outcome_of(training: Training, future: Future, *, metadata_only: bool) -> Response:
    """Return the answer to a client that retrieves a request's result."""
    if future.state == "pending":
        return JSON({"type": "try_again", "request_id": future.id, "queue_state": "active"}, 408)
    if future.state == "failed":
        return JSON({"error": future.error, "category": future.category or "unknown"})
    body, media = await training.result(future)
    if metadata_only and len(body) > INLINE_BYTES:
        return JSON({"status": "complete_metadata", "response_payload_size": len(body)})
    return Response(body, media_type=media)


def page_of(request: Request) -> tuple[int, int]:
    """Return the offset and the length of the page that a client asks for. Raises ApiError."""
    offset, limit = query_integer(request, "offset", 0, 10**9 - 1), query_integer(request, "limit", 1, MOST_LISTED)
    return offset or 0, 20 if limit is None else limit


def info_of(model: Model, tokenizer: str) -> dict[str, Any]:
    """Return Tinker's description of a model. `trained_modules` is Holdfast's own field."""
    return {
        "type": "get_info",
        "model_id": model.id,
        "model_data": {"arch": "", "model_name": model.base, "tokenizer_id": tokenizer},
        "model_name": model.base,
        "optimizer_config": {"type": "adamw"},
        "is_lora": True,
        "lora_rank": model.rank,
        "trained_modules": list(model.modules),
    }


async def run_of(training: Training, model: Model, used: float) -> dict[str, Any]:
    """Return Tinker's training run, which is a model with its newest checkpoints."""
    found, _ = await training.checkpoints.page(model.tenant, model=model.id, limit=MOST_LISTED)
    newest = {kind: next((shown_checkpoint(each) for each in found if each.kind == kind), None) for kind in PLACES}
    return {
        "training_run_id": model.id,
        "base_model": model.base,
        "model_owner": model.tenant,
        "is_lora": True,
        "corrupted": model.status == "failed",
        "lora_rank": model.rank,
        "last_request_time": time_of(used),
        "last_checkpoint": newest["training"],
        "last_sampler_checkpoint": newest["sampler"],
        "user_metadata": texts(model.metadata),
    }


def shown_checkpoint(checkpoint: Checkpoint) -> dict[str, Any]:
    """Return Tinker's checkpoint object."""
    return {
        "checkpoint_id": f"{PLACES[checkpoint.kind]}/{checkpoint.name}",
        "checkpoint_type": checkpoint.kind,
        "time": time_of(checkpoint.created),
        "tinker_path": checkpoint.path,
        "size_bytes": checkpoint.bytes,
        "public": checkpoint.public,
        "user_metadata": checkpoint.metadata,
        "expires_at": None if checkpoint.expires is None else time_of(checkpoint.expires),
    }


def time_of(seconds: float) -> str:
    """Return a time as text, in UTC."""
    return datetime.fromtimestamp(seconds, UTC).isoformat()


def texts(metadata: Any) -> dict[str, str] | None:
    """Return metadata with all values as texts, as the SDK reads them."""
    return None if metadata is None else {name: str(value) for name, value in metadata.items()}
