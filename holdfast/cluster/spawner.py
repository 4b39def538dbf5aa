"""Where replicas come from: starts and ends engine processes, on this machine or on others."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from holdfast.cluster.config import ClusterConfig
from holdfast.cluster.local_spawner import LocalSpawner
from holdfast.core.config import EngineConfig
from holdfast.engine.client.client import EngineClient
from holdfast.engine.spawn import EngineProcess


class Spawner(Protocol):
    """Starts and ends engines that all serve the same model with the same configuration.

    A number names a place, such as a GPU, and belongs to one replica at a time: it is given again after `stop`. All
    methods are called on the event loop of the API process, and calls for different numbers may overlap.
    """

    kind: str
    """How replicas run, for people: "local", "ray"."""

    @property
    def most(self) -> int | None:
        """How many replicas there is room for at a time; None: no bound is known. It may change while they run."""

    def place(self, number: int) -> str:
        """Where the replica of this number runs, or would, for people: "cpu", "cuda:1", "node 10.0.0.7"."""

    async def start(self, number: int, on_progress: Callable[[str], None]) -> EngineClient:
        """Start an engine and wait until it takes requests. `on_progress` gets the name of each stage.

        Raises EngineStartError with the reason in one line. If the wait ends early, for whatever reason, so does what
        was started.
        """

    async def stop(self, number: int, engine: EngineClient) -> None:
        """End an engine, at once, and free its place. No request runs there any more, or the engine has died.

        Does not raise for an engine that is gone.
        """

    async def close(self) -> None:
        """End what belongs to no replica, after all of them were stopped. May be called more than once."""


def make_spawner(config: EngineConfig, cluster: ClusterConfig, process: EngineProcess | None = None) -> Spawner:
    """Where the replicas of this configuration come from. `process` is for LocalSpawner. Raises EngineStartError."""
    if cluster.ray is None:
        return LocalSpawner(config, cluster.most, process)
    from holdfast.cluster.ray_spawner import RaySpawner  # Ray is an extra, and takes a second to import

    return RaySpawner(config, cluster.ray, cluster.ray_cpus)
