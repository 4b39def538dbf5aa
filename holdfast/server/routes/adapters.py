"""Routes that load and unload LoRA adapters while the server runs. Paths and fields are vLLM's."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import ClassVar

from fastapi import FastAPI, Request, Response

from holdfast.engine.client.client import AdapterError
from holdfast.engine.client.connection import EngineDead
from holdfast.server.protocol import ApiError, RequestBody, invalid
from holdfast.server.routes.generation import read_request
from holdfast.server.routes.http import described, tenant_of
from holdfast.server.service import Service, engine_dead
from holdfast.server.shared_adapters import SharedAdapters

RESERVED = "ft:"
"""Prefix of the names of tuning jobs' adapters."""


class LoadRequest(RequestBody, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """Body of POST /v1/load_lora_adapter."""

    harmless: ClassVar[tuple[str, ...]] = ("base_model_name", "is_3d_lora_weight")

    lora_name: str
    lora_path: str
    """Directory in PEFT's format: relative to --adapter-root, or absolute and below it."""
    load_inplace: bool = False
    """Whether to replace a loaded adapter that has this name."""


class UnloadRequest(RequestBody, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """Body of POST /v1/unload_lora_adapter."""

    harmless: ClassVar[tuple[str, ...]] = ("lora_int_id",)

    lora_name: str


def add_adapter_routes(app: FastAPI, service: Service, shared: SharedAdapters) -> None:
    """Add POST /v1/load_lora_adapter and /v1/unload_lora_adapter.

    An adapter that an API key loads belongs to that key. An adapter that an operator loads is for all keys, like the
    adapters loaded at the start. On a server with at most one key, that key may change all adapters.
    All servers of the same engines serve the adapter.
    """
    client = service.client

    def check_on() -> None:
        if not client.info.adapter_slots:
            raise ApiError("this server serves no adapters; start it with --max-adapters", code="adapters_off")

    def check_name(wanted: LoadRequest, request: Request) -> None:
        """Raises ApiError if this key may not give an adapter this name."""
        name = wanted.lora_name
        if name.startswith(RESERVED):
            reason = f"adapter {name[:128]}: names that begin with {RESERVED} are those of tuning jobs' results"
            raise invalid(reason, "lora_name", "invalid_adapter")
        tenant, all_adapters = tenant_of(request), request.state.all_adapters
        if name not in client.adapters or service.may_change(name, tenant, all_adapters=all_adapters):
            return
        if wanted.load_inplace and name in service.models(tenant):
            raise not_yours(name)
        raise ApiError(f"adapter {name[:128]}: the name {name[:128]} is taken", code="invalid_adapter")

    def check_change(name: str, request: Request) -> None:
        """Raises ApiError if the adapter is loaded and this key may not unload it."""
        tenant = tenant_of(request)
        if name not in client.adapters or service.may_change(name, tenant, all_adapters=request.state.all_adapters):
            return
        raise not_yours(name) if name in service.models(tenant) else not_loaded(name)

    @app.post("/v1/load_lora_adapter", openapi_extra=described(LoadRequest))
    async def load(request: Request) -> Response:
        """Read an adapter, check it, and serve it under its name."""
        wanted = await read_request(request, service, LoadRequest)
        check_on()
        directory = await asyncio.to_thread(below, service.config.adapter_root, wanted.lora_path)
        check_name(wanted, request)  # Checked last, so that no other request takes the name meanwhile.
        replace = wanted.load_inplace and wanted.lora_name in client.adapters
        try:
            loaded = await client.load_adapter(wanted.lora_name, str(directory), replace=replace)
        except AdapterError as error:
            raise ApiError(f"adapter {wanted.lora_name[:128]}: {error}", code="invalid_adapter") from None
        except EngineDead as error:
            raise engine_dead(error) from None
        tenant, for_all = tenant_of(request), request.state.all_adapters
        service.belongs(loaded.name, tenant, all_adapters=for_all)
        await shared.put(loaded.name, str(directory), None if for_all else tenant)
        return Response(f"Success: LoRA adapter '{loaded.name}' added successfully.", media_type="text/plain")

    @app.post("/v1/unload_lora_adapter", openapi_extra=described(UnloadRequest))
    async def unload(request: Request) -> Response:
        """Refuse new requests for an adapter, and answer once the running ones have ended."""
        wanted = await read_request(request, service, UnloadRequest)
        check_on()
        if wanted.lora_name in service.tuned:
            service.check_model(wanted.lora_name, tenant_of(request))
            reason = f"{wanted.lora_name[:128]} came from a tuning job; DELETE /v1/models/NAME deletes it"
            raise invalid(reason, "lora_name", "invalid_adapter")
        check_change(wanted.lora_name, request)
        try:
            await client.unload_adapter(wanted.lora_name)
        except AdapterError as error:
            if error.missing:
                raise not_loaded(wanted.lora_name) from None
            raise invalid(str(error), "lora_name", "invalid_adapter") from None
        except EngineDead as error:
            raise engine_dead(error) from None
        service.own.pop(wanted.lora_name, None)
        await shared.remove(wanted.lora_name)
        return Response(f"Success: LoRA adapter '{wanted.lora_name}' removed successfully.", media_type="text/plain")


def not_yours(name: str) -> ApiError:
    """Return the error for changing an adapter that is for all keys."""
    reason = f"the adapter {name[:128]!r} is for all keys; it needs an operator's key (--operator-key) to change it"
    return ApiError(reason, status=403, param="lora_name", code="operator_only")


def not_loaded(name: str) -> ApiError:
    """Return the error for an adapter that does not exist or belongs to another key. Both look the same to a client."""
    reason = f"the adapter {name[:128]!r} is not loaded"
    return ApiError(reason, status=404, param="lora_name", code="model_not_found")


def below(root: str | None, path: str) -> Path:
    """Return the resolved path of the directory that a client names.

    Raises ApiError 403 unless it is below `root`.
    """
    if root is not None and "\0" not in path:
        base = Path(root).resolve()
        try:
            found = (base / path).resolve()
        except (OSError, RuntimeError):  # The name is too long, or links form a loop.
            found = base
        if found != base and found.is_relative_to(base):
            return found
    allowed = "--adapter-root is not set" if root is None else "it must lie below --adapter-root"
    raise ApiError(
        f"adapters cannot be loaded from there: {allowed}", status=403, param="lora_path", code="path_not_allowed"
    )
