"""Spawner: starts and ends the engine processes of replicas, on this machine or on others."""

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

    A number stands for a place, such as a GPU, and belongs to one replica at a time. It is used again after `stop`. All
    methods are called on the event loop of the API process, and calls for different numbers may overlap.
    """

    kind: str
    """Kind of spawner for display: "local" or "ray"."""

    @property
    def most(self) -> int | None:
        """Maximum number of replicas at a time. None: unknown. It may change while they run."""

    def place(self, number: int) -> str:
        """Return the place of a replica for display, for example "cpu", "cuda:1" or "node 10.0.0.7"."""

    async def start(self, number: int, on_progress: Callable[[str], None]) -> EngineClient:
        """Start an engine and wait until it accepts requests. `on_progress` gets the name of each stage.

        Raises EngineStartError with the reason in one line. If the wait ends early for any reason, the started engine
        ends as well.
        """

    async def stop(self, number: int, engine: EngineClient) -> None:
        """End an engine at once, and free its place. Either it has no requests left, or it has died.

        Does not raise if the engine is already gone.
        """

    async def close(self) -> None:
        """End processes that belong to no replica, after all replicas were stopped. May be called more than once."""


def make_spawner(
    config: EngineConfig, cluster: ClusterConfig, process: EngineProcess | None = None, ledger: str = ""
) -> Spawner:
    """Create the spawner for this configuration. `process` and `ledger` are for LocalSpawner.

    Raises EngineStartError.
    """
    if cluster.ray is None:
        return LocalSpawner(config, cluster.most, process, ledger)
    from holdfast.cluster.ray_spawner import RaySpawner  # Ray is an extra, and takes a second to import.

    return RaySpawner(config, cluster.ray, cluster.ray_cpus)
