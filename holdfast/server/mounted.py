"""Mounted: the HTTP application within a server that is not ours, such as Ray Serve's, with its clients and store."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from holdfast.cluster.config import ClusterConfig
from holdfast.core.config import AppConfig
from holdfast.engine.client.connection import EngineDead
from holdfast.lm.config import EngineConfig
from holdfast.server.app import create_app
from holdfast.server.config import ServerConfig
from holdfast.server.run import Engines, close_store, end_work, log_as, open_store, start, start_jobs

Scope = MutableMapping[str, Any]

log = logging.getLogger("holdfast.server")


class Mounted:
    """An ASGI application between `start` and `close`, for one event loop.

    Connections, and time limits on them, are the other server's.
    """

    def __init__(self, engine: EngineConfig, config: ServerConfig, cluster: ClusterConfig) -> None:
        """Arguments are as for `server.run.run`. Starts nothing yet."""
        self._engine, self._config, self._cluster = engine, config, cluster
        self._engines = Engines(None)
        self._app: Any = refuse_all
        self._open: list[Any] = []
        """The state of the application between `start` and `close`; otherwise empty."""
        self._held = contextlib.ExitStack()

    async def start(self) -> None:
        """Open the store, start the engines or attach to them, and continue jobs. Then requests are accepted.

        Raises EngineStartError, StoreError.
        """
        log_as(self._config)
        store = self._held.enter_context(contextlib.closing(open_store(self._config)))
        try:
            self._engines = await start(
                self._engine, AppConfig(), None, self._cluster,
                threads=None, on_progress=log.info, tuning_state=self._config.tuning_state,
            )  # fmt: skip
            app = create_app(self._engines.model, self._config, store)
        except BaseException:
            await asyncio.gather(*(client.close() for client in self._engines.all))
            self._held.close()
            raise
        self._app = app
        self._open.append(app.state)
        await start_jobs(app.state.jobs)

    async def __call__(
        self,
        scope: Scope,
        receive: Callable[[], Awaitable[Scope]],
        send: Callable[[Scope], Awaitable[None]],
    ) -> None:
        """Answer a request, as ASGI defines it. Routes begin after the path at which this application is mounted.

        No client counts as a program on this machine, which could be an operator without a key: requests come through
        the other server, and may be anybody's.
        """
        if scope["type"] == "http":
            root: str = scope.get("root_path", "")
            path = scope["path"].removeprefix(root) or "/"
            scope = {**scope, "path": path, "root_path": "", "client": None}
        await self._app(scope, receive, send)

    async def check_health(self) -> None:
        """Raises EngineDead if this application will not serve again, so that another one is to take its place.

        While an engine starts again, requests wait, and /health says so. That is no such case.
        """
        for client in self._engines.all:
            if client.dead.is_set():
                raise EngineDead(client.reason)

    async def close(self) -> None:
        """End the requests, and leave engines and store. May be called in any state, and more than once."""
        self._app = refuse_all
        while self._open:
            state = self._open.pop()
            if state.adapter_versions is not None:
                await state.adapter_versions.close()
            await end_work(state.admissions, state.jobs, self._engines)
            await close_store(state.responses, state.accounts, state.tracing)
            self._held.close()


async def refuse_all(scope: Scope, receive: Any, send: Callable[[Scope], Awaitable[None]]) -> None:
    """Answer 503 to a request that comes before the start or after the end."""
    await send({"type": "http.response.start", "status": 503, "headers": [(b"retry-after", b"1")]})
    await send({"type": "http.response.body", "body": b""})
