"""Routes for operators: list the replicas, add one, and drain one."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI, Request

from holdfast.cluster.replicas import Replicas
from holdfast.server.config import ServerConfig
from holdfast.server.protocol import ApiError
from holdfast.server.replica_metrics import describe
from holdfast.server.routes.activity import check_operator


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
