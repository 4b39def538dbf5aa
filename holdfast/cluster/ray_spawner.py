"""RaySpawner: engines on the nodes of a Ray cluster, each in an actor. Ray only finds nodes with room for them.

The engines end with this process. `ray_kept` has engines that outlive it.
"""

from __future__ import annotations

import asyncio
import secrets
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import ray
from ray.exceptions import ActorUnavailableError, RayActorError, RayError
from ray.util.placement_group import PlacementGroup, remove_placement_group

from holdfast.cluster.local_spawner import with_own_files
from holdfast.cluster.ray_cluster import RayCluster, answer, one_line, out_of_memory
from holdfast.cluster.ray_host import About, EngineHost
from holdfast.engine.client.client import EngineClient
from holdfast.engine.client.connection import EngineStartError
from holdfast.engine.client.warming import started_warm
from holdfast.engine.curve import LOST
from holdfast.engine.spawn import Link, Remote

POLL_SECONDS = 0.5
"""Seconds between two checks of a waiting thread whether its engine was killed."""
CALLS = 4
"""Number of calls that an actor can answer at the same time. One of them waits for the engine's end."""


class Placed(NamedTuple):
    """An actor, and the placement group with its resources."""

    actor: Any
    group: PlacementGroup

    def end(self) -> None:
        """Kill the actor, and free its resources. Does not raise if Ray cannot be reached."""
        with suppress(RayError, RuntimeError):
            ray.kill(self.actor)
            remove_placement_group(self.group)


class RaySpawner:
    """Starts engines on a Ray cluster. A process has at most one RaySpawner."""

    kind = "ray"
    lasting = False
    most: int | None = None  # Unknown: Ray may add nodes for replicas that wait.

    def __init__(self, cluster: RayCluster) -> None:
        """Start engines in this cluster. `close` leaves it."""
        self._cluster = cluster
        self._placed: dict[int, Placed] = {}
        self._places: dict[int, str] = {}
        self._secret = secrets.token_bytes(32)
        self._kept = tempfile.TemporaryDirectory(prefix="holdfast-profiles-")

    def place(self, number: int) -> str:
        """See `Spawner.place`."""
        return self._places.get(number, f"no Ray node with {self._cluster.room.words} yet")

    async def first(self, count: int, most: int) -> Sequence[int]:
        """See `Spawner.first`."""
        return range(count)

    async def start(self, number: int, on_progress: Callable[[str], None]) -> EngineClient:
        """See `Spawner.start`. Waits until a node has room."""
        began = time.monotonic()
        on_progress(f"waiting for a Ray node with {self._cluster.room.words}")
        placed = await asyncio.to_thread(self._reserve, number)  # Ray may wait for its head, and streams must not.
        try:
            client = await self._start_in(placed.actor, number, began, on_progress)
        except BaseException as error:
            self._places.pop(number, None)
            await asyncio.to_thread(placed.end)
            if isinstance(error, RayError | OSError):
                raise EngineStartError(f"Ray could not start replica {number}: {one_line(error)}") from error
            raise
        self._placed[number] = placed
        return client

    def _reserve(self, number: int) -> Placed:
        """Ask for an actor with a replica's resources. It may still wait for room. Raises EngineStartError."""
        room = self._cluster.room
        try:
            group = room.reserve()
            host = ray.remote(EngineHost).options(max_concurrency=CALLS, **room.options(group))
            return Placed(host.remote("cuda:0" if room.gpus else "cpu"), group)
        except RayError as error:
            raise EngineStartError(f"Ray could not start replica {number}: {one_line(error)}") from error

    async def _start_in(
        self, actor: Any, number: int, began: float, on_progress: Callable[[str], None]
    ) -> EngineClient:
        about = About(*await answer(actor.about.remote()))
        await self._cluster.check(about, actor)
        self._places[number] = about.place
        process = RayProcess(actor, about, self._cluster.reach, began)
        config = await asyncio.to_thread(self._cluster.config_on, about, self._cluster.config)
        start = EngineClient.start(
            with_own_files(config, number),
            on_progress=on_progress,
            process=process,
            priced=number == 0,
            chunk_secret=self._secret,
        )
        client = await started_warm(start)
        try:
            await self._fetch_profile(client, actor, number)
        except BaseException:
            await client.close()
            raise
        return client

    async def stop(self, number: int, engine: EngineClient) -> None:
        """See `Spawner.stop`."""
        await engine.close()
        self._places.pop(number, None)
        if (placed := self._placed.pop(number, None)) is not None:
            await asyncio.to_thread(placed.end)

    async def leave(self, number: int, engine: EngineClient) -> None:
        """See `Spawner.leave`."""
        await self.stop(number, engine)

    async def close(self) -> None:
        """See `Spawner.close`. Also ends a cluster that was started here."""
        await asyncio.to_thread(self._cluster.leave)
        self._kept.cleanup()

    async def _fetch_profile(self, client: EngineClient, actor: Any, number: int) -> None:
        """Copy the engine's cost profile to a file on this host, because the router prices requests with it."""
        path = client.info.profile_path
        if path and not Path(path).exists():
            here = Path(self._kept.name) / f"{number}.json"
            here.write_bytes(await answer(actor.profile.remote(path)))
            client.info = replace(client.info, profile_path=str(here))


class RayProcess:
    """An engine process on a Ray node, with the interface of `spawn.Process`."""

    def __init__(self, actor: Any, about: About, reach: str, began: float) -> None:
        """`reach` is this host's address as the node sees it. `began` is the time at which the start began."""
        self.began = began
        self.remote: Remote | None = Remote(about.place, reach, about.key)
        self.pid = about.pid
        self._actor, self._killed = actor, threading.Event()

    def connect(self, link: Link) -> None:
        """See `Process.connect`."""
        self._actor.connect.remote(link.address, link.client_key)

    def wait(self) -> int:
        """See `Process.wait`."""
        ended = self._actor.wait.remote()
        while not self._killed.is_set():
            try:
                if ray.wait([ended], timeout=POLL_SECONDS)[0]:
                    return int(ray.get(ended))
            except ActorUnavailableError:  # The network may recover. If not, the link's heartbeats report the loss.
                self._killed.wait(POLL_SECONDS)
                ended = self._actor.wait.remote()
            except RayActorError as error:
                return -signal.SIGKILL if self._killed.is_set() or out_of_memory(error) else LOST
            except RuntimeError:
                break
        return -signal.SIGKILL if self._killed.is_set() else LOST

    def kill(self) -> None:
        """See `Process.kill`. Kills the actor, too."""
        self._killed.set()
        with suppress(RayError, RuntimeError):
            ray.kill(self._actor)
