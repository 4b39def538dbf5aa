"""Routes that load and unload LoRA adapters while the server runs, as vLLM's, and that publish versions of weights."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Annotated, Any, ClassVar

from fastapi import FastAPI, Request, Response
from msgspec import Meta

from holdfast.engine.client.client import AdapterError
from holdfast.engine.client.connection import EngineDead
from holdfast.server.adapter_versions import AdapterVersions, Version, check_expected
from holdfast.server.protocol import ApiError, RequestBody, invalid
from holdfast.server.routes.generation import read_request
from holdfast.server.routes.http import JSON, described, query_integer, tenant_of
from holdfast.server.service import HIDDEN, Admission, Service, engine_dead
from holdfast.server.version_files import VersionFiles

RESERVED = "ft:"
"""Prefix of the names of tuning jobs' adapters."""
MOST_VERSIONS = 999_999_999
"""Largest number of a version that a client may expect."""
MOST_UPLOADS = 8
"""Most bodies with weights that are received at a time."""


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


class WeightsRequest(RequestBody, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """Body of POST /v1/adapters/{name}/weights, unless it is the weights themselves."""

    lora_path: str
    """Directory in PEFT's format: relative to --adapter-root, or absolute and below it."""
    expected_version: Annotated[int, Meta(ge=1, le=MOST_VERSIONS)] | None = None
    """Number that the adapter's present version must have."""


WEIGHTS = described(WeightsRequest)
WEIGHTS["requestBody"]["content"]["application/octet-stream"] = {"schema": {"type": "string", "format": "binary"}}


def add_adapter_routes(app: FastAPI, service: Service, versions: AdapterVersions, files: VersionFiles) -> None:
    """Add POST /v1/load_lora_adapter, /v1/unload_lora_adapter and /v1/adapters/{name}/weights, and GET of an adapter.

    An adapter that an API key loads belongs to that key. An adapter that an operator loads is for all keys, like the
    adapters loaded at the start. On a server with at most one key, that key may change all adapters.
    All servers of the same engines serve the adapter.
    """
    client = service.client
    uploads = Admission(MOST_UPLOADS, max(1, int(MOST_UPLOADS * service.config.share)), "uploads of weights")

    def check_on() -> None:
        if not client.info.adapter_slots:
            raise ApiError("this server serves no adapters; start it with --max-adapters", code="adapters_off")

    def check_name(wanted: LoadRequest, request: Request) -> None:
        """Raises ApiError if this key may not give an adapter this name."""
        name = wanted.lora_name
        if name.startswith(RESERVED):
            reason = f"adapter {name[:128]}: names that begin with {RESERVED} are those of tuning jobs' results"
            raise invalid(reason, "lora_name", "invalid_adapter")
        if name.startswith(HIDDEN):
            reason = f"adapter {name[:128]}: names that begin with {HIDDEN} are those of sampling sessions"
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
        await versions.publish(wanted.lora_name, str(directory), owner_of(request), replace=replace)
        return Response(f"Success: LoRA adapter '{wanted.lora_name}' added successfully.", media_type="text/plain")

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
        last = versions.current(wanted.lora_name) if wanted.lora_name in client.adapters else None
        try:
            await client.unload_adapter(wanted.lora_name)
        except AdapterError as error:
            if error.missing:
                raise not_loaded(wanted.lora_name) from None
            raise invalid(str(error), "lora_name", "invalid_adapter") from None
        except EngineDead as error:
            raise engine_dead(error) from None
        service.own.pop(wanted.lora_name, None)
        if last is not None:
            await versions.unloaded(wanted.lora_name, last)
        return Response(f"Success: LoRA adapter '{wanted.lora_name}' removed successfully.", media_type="text/plain")

    @app.post("/v1/adapters/{name:path}/weights", openapi_extra=WEIGHTS)
    async def publish(request: Request, name: str) -> Response:
        """Publish a version of a served adapter's weights. Running requests keep theirs, and new ones take this one."""
        check_on()
        check_served(name, request)
        if not is_weights(request):
            wanted = await read_request(request, service, WeightsRequest)
            directory = await asyncio.to_thread(below, service.config.adapter_root, wanted.lora_path)
            check_served(name, request)
            expected, place = wanted.expected_version, str(directory)
            version = await versions.publish(name, place, owner_of(request), replace=True, expected=expected)
            return JSON(described_version(name, version))
        expected = query_integer(request, "expected_version", 1, MOST_VERSIONS)
        check_expected(name, versions.current(name).number, expected)
        before, declared = Path(versions.current(name).directory), request.headers.get("content-length", "")
        with uploads.admit(1, tenant_of(request)):
            length = int(declared[:20]) if declared.isascii() and declared.isdigit() else None
            received = await files.receive(before, length, request.stream())
            try:
                check_served(name, request)
            except ApiError:
                await files.drop(received)
                raise
            version = await versions.publish_body(name, received, owner_of(request), expected)
        return JSON(described_version(name, version))

    @app.get("/v1/adapters/{name:path}")
    async def adapter(request: Request, name: str) -> Response:
        """A served adapter, with the versions that requests use."""
        check_on()
        if name not in client.adapters or name not in service.models(tenant_of(request)):
            raise not_loaded(name)
        listed = versions.versions(name)
        return JSON({"id": name, "object": "adapter", **listed[0], "versions": listed})

    def check_served(name: str, request: Request) -> None:
        """Raises ApiError unless an adapter of this name is served, and this key may change it."""
        if name.startswith(RESERVED) and name in service.models(tenant_of(request)):
            reason = f"{name[:128]} came from a tuning job, whose adapters do not change; load its files by a new name"
            raise invalid(reason, "name", "invalid_adapter")
        if name not in client.adapters:
            raise not_loaded(name)
        check_change(name, request)


def owner_of(request: Request) -> str | None:
    """Return the tenant to which an adapter that this request loads belongs; None if it is for all."""
    return None if request.state.all_adapters else tenant_of(request)


def is_weights_path(path: str) -> bool:
    """Whether weights may be sent to a path as a binary body."""
    return path.startswith("/v1/adapters/") and path.endswith("/weights")


def is_weights(request: Request) -> bool:
    """Whether the body of a request is the weights themselves."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    return kind == "application/octet-stream"


def described_version(name: str, version: Version) -> dict[str, Any]:
    """Return a published version as the answer to its request."""
    return {"id": name, "object": "adapter.version", **version.shown(current=True)}


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
