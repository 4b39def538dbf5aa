"""Spawner: starts and stops the engine processes of replicas, on this machine or on others."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

from holdfast.cluster.attach_spawner import AttachSpawner
from holdfast.cluster.config import ClusterConfig
from holdfast.cluster.local_spawner import LocalSpawner
from holdfast.engine.address import read_key
from holdfast.engine.client.client import EngineClient
from holdfast.engine.client.connection import EngineStartError
from holdfast.engine.spawn import EngineProcess
from holdfast.lm.config import EngineConfig


class Spawner(Protocol):
    """Starts and stops engines that all serve the same model with the same configuration.

    A number stands for a place, for example a GPU, and belongs to one replica at a time. It may be reused after `stop`.
    All methods are called on the API process's event loop. Calls for different numbers may overlap.
    """

    kind: str
    """Kind of spawner for display: "local", "ray" or "attached"."""
    lasting: bool
    """Whether its engines outlive this server, so that other servers can adopt their requests."""

    @property
    def most(self) -> int | None:
        """Maximum number of replicas at the same time; None if it is unknown. It may change."""

    def place(self, number: int) -> str:
        """Return the place of a replica for display, for example "cpu", "cuda:1" or "node 10.0.0.7"."""

    async def first(self, count: int, most: int) -> Sequence[int]:
        """Return the numbers to start with, in order: the first `count`, and others below `most` whose engine runs.

        Raises EngineStartError.
        """

    async def start(self, number: int, on_progress: Callable[[str], None]) -> EngineClient:
        """Start an engine, and wait until it accepts requests. `on_progress` receives the name of each stage.

        Raises EngineStartError with the reason in one line. If the wait ends early, for example by cancellation, the
        engine is stopped.
        """

    async def stop(self, number: int, engine: EngineClient) -> None:
        """Stop an engine at once, and free its place. The engine must have no requests left, or be dead.

        Does not raise if the engine is already gone.
        """

    async def leave(self, number: int, engine: EngineClient) -> None:
        """Give up an engine because this server ends. One that outlives servers goes on, and any other is stopped.

        Does not raise if the engine is already gone.
        """

    async def close(self) -> None:
        """Stop processes that belong to no replica. Called after all replicas were stopped, possibly more than once."""


def make_spawner(
    config: EngineConfig,
    cluster: ClusterConfig,
    process: EngineProcess | None = None,
    ledger: str = "",
    *,
    tuning_state: str | None = None,
) -> Spawner:
    """Create the spawner for this configuration. `process` and `ledger` are for LocalSpawner.

    `tuning_state` is for engines on Ray: the server's directory of tuning jobs. Raises EngineStartError.
    """
    if cluster.engines:
        return AttachSpawner(cluster.addresses, key_in(cluster.engine_key))
    if cluster.ray is None:
        return LocalSpawner(config, cluster.most, process, ledger)
    from holdfast.cluster.ray_cluster import RayCluster  # Ray is an extra, and takes a second to import.

    shared = Path(tuning_state) if config.tuning and tuning_state is not None else None
    members = RayCluster(config, cluster.ray, cluster.ray_cpus, shared)
    if cluster.ray_keep is None:
        from holdfast.cluster.ray_spawner import RaySpawner

        return RaySpawner(members)
    from holdfast.cluster.ray_kept import KeptRaySpawner

    return KeptRaySpawner(members, cluster.ray_keep, cluster.ray_keep_seconds)


def key_in(path: str | None) -> str:
    """The key in a file; empty without a file. Raises EngineStartError for a file that holds none."""
    try:
        return read_key(path)
    except (ValueError, OSError) as error:
        raise EngineStartError(str(error)) from error
