"""Mounted: the HTTP application within another server, such as Ray Serve's, with its engines, store and jobs."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from holdfast.cluster.config import ClusterConfig
from holdfast.core.config import AppConfig, EngineConfig
from holdfast.engine.client.connection import EngineDead
from holdfast.server.app import create_app
from holdfast.server.config import ServerConfig
from holdfast.server.run import Engines, close_store, end_work, log_as, open_store, start, start_jobs
from holdfast.server.service import trouble

Scope = MutableMapping[str, Any]

log = logging.getLogger("holdfast.server")


class Mounted:
    """An ASGI application with a `start` and a `close`, which also start and end its engines, store and jobs.

    Use it on one event loop. The other server is responsible for connections and their time limits.
    """

    def __init__(
        self,
        engine: EngineConfig | None,
        config: ServerConfig,
        apps: AppConfig,
        cluster: ClusterConfig,
        *,
        threads: int | None = None,
    ) -> None:
        """Parameters are those of `run.run`. Starts nothing yet."""
        self.engine, self.config, self.apps, self.cluster, self.threads = engine, config, apps, cluster, threads
        self._engines = Engines(None)
        self._app: Any = None
        self._open = False
        """Whether anything needs to be closed."""
        self._held = contextlib.ExitStack()

    async def start(self) -> None:
        """Start the engines, and continue jobs. If an engine cannot start, none runs.

        Requests are accepted afterwards. Raises EngineStartError, StoreError.
        """
        log_as(self.config)
        store = None if self.engine is None else self._held.enter_context(contextlib.closing(open_store(self.config)))
        try:
            self._engines = await start(
                self.engine, self.apps, None, self.cluster, threads=self.threads, on_progress=log.info
            )
            self._app = create_app(self._engines.model, self.config, store, self._engines.apps)
        except BaseException:
            await asyncio.gather(*(client.close() for client in self._engines.all))
            self._held.close()
            raise
        self._open = True
        await start_jobs(self._app.state.jobs)

    async def __call__(
        self,
        scope: Scope,
        receive: Callable[[], Awaitable[Scope]],
        send: Callable[[Scope], Awaitable[None]],
    ) -> None:
        """Answer an ASGI request. If the application is mounted below a path, its routes begin after that path.

        No client counts as a program on this machine, which could be an operator without a key, because clients of the
        other server may be anywhere.
        """
        if scope["type"] == "http":
            root: str = scope.get("root_path", "")
            path = scope["path"].removeprefix(root) or "/"
            scope = {**scope, "path": path, "root_path": "", "client": None}
        await self._app(scope, receive, send)

    async def check_health(self) -> None:
        """Raises EngineDead if this application cannot serve again and must be replaced.

        It can while replicas restart: requests wait, and /health reports the state.
        """
        for client in self._engines.all:
            if client.dead.is_set():
                raise EngineDead(client.reason)
        if (reason := await trouble([], self._engines.apps, self.config.health_seconds)) is not None:
            raise EngineDead(reason)

    async def close(self) -> None:
        """End everything. Requests in progress end with an error. May be called in any state, and more than once."""
        if not self._open:
            return
        self._open = False
        state = self._app.state
        await end_work(state.admissions, state.jobs, self._engines)
        await close_store(state.responses, state.tracing)
        self._held.close()
