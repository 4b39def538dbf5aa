"""Routes of Tinker's protocol that sample: sampling sessions, and samples as futures."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI, Request, Response

from holdfast.server.routes.http import JSON, described, read_parsed, tenant_of
from holdfast.server.routes.tinker import API
from holdfast.server.service import Service
from holdfast.server.tinker.protos import require
from holdfast.server.tinker.requests import CancelFuture
from holdfast.server.tinker.sample_requests import CreateSamplingSession, JoinSamplingSession, Sample
from holdfast.server.tinker.sampling import Samplers

SAMPLE = f"{API}/asample"


def add_sampling_routes(app: FastAPI, samplers: Samplers, service: Service) -> None:
    """Add POST create_sampling_session, join_sampling_session, asample and cancel_future, and GET samplers/{id}."""

    @app.post(f"{API}/create_sampling_session", openapi_extra=described(CreateSamplingSession))
    async def create(request: Request) -> Response:
        """Create a sampling session: with the base model, or with weights that a model has saved."""
        require()
        sampler = await samplers.create(await read_parsed(request, service, CreateSamplingSession), tenant_of(request))
        return JSON({"type": "create_sampling_session", "sampling_session_id": sampler.id})

    @app.post(f"{API}/join_sampling_session", openapi_extra=described(JoinSamplingSession))
    async def join(request: Request) -> Response:
        """Give a copy of a sampling client a number, from which it counts its samples."""
        wanted = await read_parsed(request, service, JoinSamplingSession)
        number = await samplers.join(tenant_of(request), wanted.sampling_session_id)
        return JSON({"type": "join_sampling_session", "client_counter": number})

    @app.get(f"{API}/samplers/{{sampler_id}}")
    async def sampler(request: Request, sampler_id: str) -> dict[str, Any]:
        """A sampling session."""
        found = await samplers.get(tenant_of(request), sampler_id)
        return {"sampler_id": found.id, "base_model": found.base, "model_path": found.path}

    @app.post(f"{API}/cancel_future", openapi_extra=described(CancelFuture))
    async def cancel(request: Request) -> Response:
        """Abort a sample whose result nobody wants any more. Other requests go on."""
        await samplers.cancel(tenant_of(request), (await read_parsed(request, service, CancelFuture)).request_id)
        return Response(status_code=204)

    @app.post(SAMPLE, openapi_extra=described(Sample))
    async def sample(request: Request) -> Response:
        """Begin to sample. The result is a future, under the same id if the request is sent again."""
        require()
        wanted = await read_parsed(request, service, Sample)
        future, usage, task = await samplers.sample(wanted, tenant_of(request))
        request.state.usage = usage
        if task is not None:
            request.state.background = task
        ids = [f"{future.id}:{number}" for number in range(wanted.num_samples)]
        return JSON({"request_id": future.id, "sample_sequence_ids": ids})
