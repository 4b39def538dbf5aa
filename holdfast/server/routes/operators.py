"""Routes for operators: the engine's activity as server-sent events; the list of replicas, adding and draining."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI, Request, Response

from holdfast.cluster.replicas import Replicas
from holdfast.engine.client.client import EngineClient
from holdfast.server.address import loopback
from holdfast.server.config import ServerConfig
from holdfast.server.protocol import ApiError
from holdfast.server.replica_metrics import describe
from holdfast.server.replies import event
from holdfast.server.routes.http import start_stream
from holdfast.server.service import Service
from holdfast.server.viewers import Viewers

FORWARDED = ("forwarded", "x-forwarded-for", "x-forwarded-host", "via")
"""Headers by which a proxy shows that it forwards the request of another host."""


def add_activity_routes(app: FastAPI, service: Service, config: ServerConfig) -> None:
    """Add GET /v1/engine/events."""
    known: dict[str, Viewers] = {}

    @app.get("/v1/engine/events")
    async def events(request: Request, replica: str = "") -> Response:
        """The engine's steps as server-sent events: `engine` once, then `activity`. For operators only.

        With several replicas: the steps of the named replica, or of the first one that serves.
        """
        named = check_operator(request, config)
        name, engine = engine_of(service.client, replica)
        if name not in known or known[name].client is not engine:  # The replica has been restarted.
            known[name] = Viewers(engine, name, lambda: names_of(service.client))
        viewers = known[name]
        return await start_stream(
            request, viewers.events(named=named), lambda error: event({"message": str(error)}, "error")
        )


def engine_of(client: EngineClient | Replicas, name: str) -> tuple[str, EngineClient]:
    """Return the name and engine of a serving replica, by default the first one.

    Raises ApiError 404 if there is no such replica.
    """
    if isinstance(client, Replicas):
        for each in client.members:
            if each.engine is not None and each.serves and name in ("", each.name):
                return each.name, each.engine
        raise ApiError(f"no replica {name[:64]} serves", status=404, code="replica_not_found")
    if name:
        raise ApiError(f"there is no replica {name[:64]}: one engine serves", status=404, code="replica_not_found")
    return "", client


def names_of(client: EngineClient | Replicas) -> list[str]:
    """Return the names of the replicas that serve; an empty list if there are no replicas."""
    if not isinstance(client, Replicas):
        return []
    return [each.name for each in client.members if each.engine is not None and each.serves]


def check_operator(request: Request, config: ServerConfig) -> bool:
    """Return whether the request has an operator's key. Raises ApiError if it may not see operators' data.

    Returns False for a request from this machine to a server without keys, which needs none. The error is 401 if only
    an operator's key is configured, and otherwise 403.
    """
    if request.state.operator:
        return True
    keyed = request.state.keyed
    if keyed and (config.operator_key or not config.api_key):
        reason = "this needs an operator's key (--operator-key, or holdfast keys add NAME --scope operator)"
        raise ApiError(reason, status=403, code="operator_only")
    if config.operator_key:
        raise ApiError("this needs an operator's key: Authorization: Bearer KEY", status=401, code="invalid_api_key")
    if keyed:
        reason = "this is for operators; start the server with --operator-key, or add a key with the scope operator"
        raise ApiError(reason, status=403, code="operator_only")
    here = request.client is not None and loopback(request.client.host)
    if not here or config.root_path or any(name in request.headers for name in FORWARDED):
        reason = "without keys this is for programs on this machine; start the server with --operator-key for others"
        raise ApiError(reason, status=403, code="operator_only")
    return False


def is_operator(request: Request, config: ServerConfig) -> bool:
    """Whether a request may see operators' data."""
    try:
        check_operator(request, config)
    except ApiError:
        return False
    return True


def add_replica_routes(app: FastAPI, replicas: Replicas, config: ServerConfig) -> None:
    """Add GET and POST /replicas, and POST /replicas/{name}/drain. All are for operators."""

    @app.get("/replicas")
    async def listed(request: Request) -> dict[str, Any]:
        """List the replicas, each with its name, state, host, process and number of requests."""
        check_operator(request, config)
        data = [
            {**describe(replica), "pid": None if replica.engine is None else replica.engine.pid}
            for replica in replicas.members
        ]
        return {"object": "list", "data": data}

    @app.post("/replicas")
    async def add(request: Request) -> dict[str, Any]:
        """Start one more replica, up to --max-replicas. It serves once its state is `ready`."""
        check_operator(request, config)
        try:
            return describe(replicas.fleet.add())
        except ValueError as error:
            raise ApiError(str(error), status=409, code="too_many_replicas") from None

    @app.post("/replicas/{name}/drain")
    async def drain(request: Request, name: str) -> dict[str, Any]:
        """Remove a replica. It gets no new requests, and its running ones finish there or on other replicas."""
        check_operator(request, config)
        try:
            replicas.fleet.drain(name)
        except KeyError:
            raise ApiError(f"there is no replica {name[:64]}", status=404, code="replica_not_found") from None
        except ValueError as error:
            raise ApiError(str(error), status=409, code="last_replica") from None
        return {"name": name, "state": "draining"}
