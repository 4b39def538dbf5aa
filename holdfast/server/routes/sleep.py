"""Routes that put the engine to sleep and wake it up, as in vLLM."""

from __future__ import annotations

from collections.abc import Awaitable
from typing import cast

from fastapi import FastAPI, Request, Response

from holdfast.cluster.replicas import Replicas
from holdfast.core.sleep import LEVELS, MODES, TAGS, MemoryTag
from holdfast.engine.client.client import EngineClient
from holdfast.engine.client.connection import EngineDead, SleepError
from holdfast.server.config import ServerConfig
from holdfast.server.protocol import ApiError, invalid
from holdfast.server.routes.http import query_integer
from holdfast.server.routes.operators import check_operator
from holdfast.server.service import Service, engine_dead


def add_sleep_routes(app: FastAPI, service: Service, config: ServerConfig) -> None:
    """Add POST /sleep, POST /wake_up and GET /is_sleeping. The first two are for operators."""

    def engine() -> EngineClient:
        """Return the engine. Raises ApiError if it cannot sleep."""
        client = service.client
        if isinstance(client, Replicas):
            raise ApiError("several engines serve here, and none of them sleeps", status=409, code="sleep_mode_off")
        if not client.config.enable_sleep_mode:
            reason = "sleep mode is off: start the server with --enable-sleep-mode"
            raise ApiError(reason, status=409, code="sleep_mode_off")
        return client

    @app.post("/sleep")
    async def sleep(request: Request) -> Response:
        """Return the device's memory. The answer comes once that is done.

        `level` 1 keeps the weights on the host, and 2 drops them. `mode` says what happens to requests that run: they
        are ended (`abort`), waited for (`wait`), or suspended until the engine is awake (`keep`).
        """
        check_operator(request, config)
        level = query_integer(request, "level", LEVELS[0], LEVELS[-1]) or LEVELS[0]
        mode = request.query_params.get("mode", MODES[0])
        if mode not in MODES:
            raise invalid(f"mode is {mode[:32]!r}; it must be one of {', '.join(MODES)}", "mode")
        return await done(engine().sleep(level, mode))

    @app.post("/wake_up")
    async def wake_up(request: Request) -> Response:
        """Take memory back: that of `tags` (`weights`, `kv_cache`; the parameter may be repeated), or all of it."""
        check_operator(request, config)
        tags = request.query_params.getlist("tags")
        for tag in tags:
            if tag not in TAGS:
                raise invalid(f"tags has {tag[:32]!r}; it may have {' and '.join(TAGS)}", "tags")
        return await done(engine().wake_up([cast(MemoryTag, tag) for tag in dict.fromkeys(tags)]))

    @app.get("/is_sleeping")
    async def is_sleeping() -> dict[str, bool]:
        """Whether the engine sleeps, falls asleep or wakes up, and takes no requests."""
        try:
            return {"is_sleeping": await service.is_sleeping()}
        except TimeoutError:
            reason = "the engine does not answer, so its state is not known"
            raise ApiError(reason, status=503, code="engine_unavailable", retry_after=1) from None


async def done(change: Awaitable[None]) -> Response:
    """Wait for a change, and return vLLM's empty answer. Raises ApiError with the reason if there is none."""
    try:
        await change
    except SleepError as error:
        raise ApiError(str(error), status=409, code="sleep_refused") from None
    except EngineDead as error:
        raise engine_dead(error) from None
    return Response()
