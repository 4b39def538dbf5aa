"""KeptRaySpawner: engines on a Ray cluster that outlive this server. A server that starts again finds them by name."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

import msgspec
from ray.exceptions import RayError

from holdfast.cluster.attach_spawner import Attacher
from holdfast.cluster.local_spawner import with_own_files
from holdfast.cluster.ray_cluster import RayCluster, answer, one_line
from holdfast.cluster.ray_host import About
from holdfast.cluster.ray_keeper import Order, Served
from holdfast.cluster.ray_places import Places
from holdfast.engine.checkpoint import Checkpoint, for_other_hosts
from holdfast.engine.client.client import EngineClient
from holdfast.engine.client.connection import EngineStartError
from holdfast.engine.messages import Attached

ATTACH_SECONDS = 30.0
"""Seconds for an engine that runs to welcome this server."""


class KeptRaySpawner:
    """Attaches to the engines of a name, and starts those that do not run. Only a drained replica ends its engine."""

    kind = "ray"
    lasting = True
    most: int | None = None  # Unknown: Ray may add nodes for replicas that wait.

    def __init__(self, cluster: RayCluster, name: str, seconds: float) -> None:
        """`name` identifies the engines. Without a server for `seconds`, an engine ends itself.

        Raises EngineStartError if Ray does not answer.
        """
        self._cluster, self._seconds = cluster, seconds
        self._engines = Places(name)
        try:
            self._key = self._engines.key()
        except (RayError, RuntimeError) as error:
            raise EngineStartError(f"Ray does not give the key of the engines: {one_line(error)}") from error
        self._attacher = Attacher()
        self._keepers: dict[int, Any] = {}
        """Actor of each replica."""
        self._places: dict[int, str] = {}

    def place(self, number: int) -> str:
        """See `Spawner.place`."""
        return self._places.get(number, f"no Ray node with {self._cluster.room.words} yet")

    async def first(self, count: int, most: int) -> Sequence[int]:
        """See `Spawner.first`. An earlier server may have added replicas."""
        try:
            running = await asyncio.to_thread(self._engines.numbers)
        except RayError as error:
            raise EngineStartError(f"Ray does not say which engines run: {one_line(error)}") from error
        return [*range(count), *(number for number in running if count <= number < most)]

    async def start(self, number: int, on_progress: Callable[[str], None]) -> EngineClient:
        """See `Spawner.start`. Waits until a node has room."""
        on_progress(f"waiting for a Ray node with {self._cluster.room.words}")
        try:
            keeper = await asyncio.to_thread(self._engines.keeper, number, self._cluster.room, self._seconds)
            about = About(*await answer(keeper.about.remote()))
            await self._cluster.check(about, keeper)
            self._keepers[number], self._places[number] = keeper, about.place
            on_progress(f"starting the engine on {about.place}, or attaching to it")
            return await self._attach(number, keeper, about)
        except (RayError, OSError) as error:
            raise EngineStartError(f"Ray could not start replica {number}: {one_line(error)}") from error

    async def _attach(self, number: int, keeper: Any, about: About) -> EngineClient:
        asked = await self._asked()
        config = await asyncio.to_thread(self._cluster.config_on, about, asked)
        order = Order(asked, with_own_files(config, number), self._key)
        served = Served(*await answer(keeper.serve.remote(order)))
        if served.error:
            raise EngineStartError(f"{about.place}: {served.error}")

        def here(welcome: Attached) -> Attached:
            """Name the model as this host does: a model of the hub is in another directory on the node."""
            config = replace(welcome.config, model=asked.model, revision=asked.revision)
            return msgspec.structs.replace(welcome, config=config)

        try:
            async with asyncio.timeout(ATTACH_SECONDS):
                return await self._attacher.attach(number, served.address, self._key, here=here)
        except TimeoutError:
            raise EngineStartError(f"{about.place}: the engine did not answer for {ATTACH_SECONDS:g} s") from None

    async def stop(self, number: int, engine: EngineClient) -> None:
        """See `Spawner.stop`. Ends the engine of a drained replica, even if other servers are attached to it."""
        keeper, ended = self._keepers.pop(number, None), engine.dead.is_set()
        await engine.close()
        self._places.pop(number, None)
        if keeper is not None and not ended:  # An engine that is only lost to this server may serve others.
            with suppress(RayError):
                await answer(keeper.end.remote())

    async def leave(self, number: int, engine: EngineClient) -> None:
        """See `Spawner.leave`. The engine goes on."""
        await engine.close()

    async def close(self) -> None:
        """See `Spawner.close`. Engines go on."""
        await asyncio.to_thread(self._cluster.leave)
        self._attacher.close()

    async def _asked(self) -> Any:
        """Return the configuration of all engines. Paths and commits in it hold on every host. Raises OSError."""
        config = self._cluster.config
        try:
            return for_other_hosts(config, await asyncio.to_thread(Checkpoint.of, config))
        except ValueError as error:
            raise EngineStartError(str(error)) from error
