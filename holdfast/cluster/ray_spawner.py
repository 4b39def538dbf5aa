"""RaySpawner: engines on the nodes of a Ray cluster, each in an actor. Ray only finds nodes with room for them.

The API process is a driver of the cluster. There is only one, because its router must see every request to know which
engine has which state.
"""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import signal
import socket
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from holdfast.cluster.local_spawner import CPU_CACHE_GB, CPU_HOST_TIER_GB, HOST_TIER_GB, with_own_files
from holdfast.cluster.shared_directory import mark, read_mark
from holdfast.engine.client.client import EngineClient
from holdfast.engine.client.connection import EngineStartError
from holdfast.engine.client.warming import started_warm
from holdfast.engine.curve import LOST
from holdfast.engine.spawn import Link, Remote
from holdfast.lm.config import EngineConfig

try:
    import ray
    from ray.exceptions import ActorUnavailableError, RayActorError, RayError

    from holdfast.cluster.ray_host import About, EngineHost, version
except ImportError as error:
    raise EngineStartError(f"Ray cannot be imported ({error}); install it: pip install 'holdfast[ray]'") from error

NAMESPACE = "holdfast"
POLL_SECONDS = 0.5
"""Seconds between two checks of a waiting thread whether its engine was killed."""
REACH_SECONDS = 10.0
CALLS = 4
"""Number of calls that an actor can answer at the same time. One of them waits for the engine's end."""


class RaySpawner:
    """Starts engines on a Ray cluster. A process has at most one RaySpawner."""

    kind = "ray"
    most: int | None = None  # Unknown: Ray may add nodes for replicas that wait.

    def __init__(self, config: EngineConfig, address: str, cpus: float, shared: Path | None = None) -> None:
        """Join a Ray cluster.

        `address` is host:port, or "auto". With "auto", the process joins the cluster on this host, or starts one if
        there is none. If the process already belongs to a cluster, `address` is ignored, and the process stays in that
        cluster after the engines have ended.

        Each engine gets `cpus` CPUs, and one GPU per rank if the cluster has GPUs. `shared` is a directory that all
        nodes must see at the same path, if there is one. Raises EngineStartError.
        """
        self._config, self._cpus = config, cpus
        self._marks = () if shared is None else (marked(shared),)
        self._actors: dict[int, Any] = {}
        self._places: dict[int, str] = {}
        self._secret = secrets.token_bytes(32)
        self._kept = tempfile.TemporaryDirectory(prefix="holdfast-profiles-")
        self._joined = not ray.is_initialized()
        if self._joined:
            join(address)
        self._reach: str = ray.util.get_node_ip_address()
        gpus = ray.cluster_resources().get("GPU", 0)
        self._gpus = config.layout.ranks if gpus and config.device != "cpu" else 0
        if config.device == "cuda" and not gpus:
            self._leave()
            raise EngineStartError("device is cuda, and no node of the Ray cluster has a GPU")

    def place(self, number: int) -> str:
        """See `Spawner.place`."""
        return self._places.get(number, f"no Ray node with {self._needs} yet")

    @property
    def _needs(self) -> str:
        gpus = f" and {self._gpus} GPU{'s' * (self._gpus > 1)}" if self._gpus else ""
        return f"{self._cpus:g} CPU{'s' * (self._cpus != 1)}{gpus}"

    async def start(self, number: int, on_progress: Callable[[str], None]) -> EngineClient:
        """See `Spawner.start`. Waits until a node has room."""
        began = time.monotonic()
        on_progress(f"waiting for a Ray node with {self._needs}")
        actor = (
            ray.remote(EngineHost)
            # Spread over the nodes, so that the loss of a node costs as few replicas as possible.
            .options(num_cpus=self._cpus, num_gpus=self._gpus, max_concurrency=CALLS, scheduling_strategy="SPREAD")
            .remote("cuda" if self._gpus else "cpu")
        )
        try:
            client = await self._start_in(actor, number, began, on_progress)
        except BaseException as error:
            self._places.pop(number, None)
            with suppress(RayError):
                ray.kill(actor)
            if isinstance(error, RayError | OSError):
                raise EngineStartError(f"Ray could not start replica {number}: {one_line(error)}") from error
            raise
        self._actors[number] = actor
        return client

    async def _start_in(
        self, actor: Any, number: int, began: float, on_progress: Callable[[str], None]
    ) -> EngineClient:
        about = About(*await answer(actor.about.remote()))
        if about.version != version():
            raise EngineStartError(f"{about.place} has {about.version}, and this host has {version()}")
        for path in self._marks:
            if not (here := read_mark(str(path))) or await answer(actor.mark.remote(str(path))) != here:
                raise EngineStartError(
                    f"{about.place} does not see {path.parent} as this host does; put it on a file system that all "
                    "hosts mount at this path"
                )
        self._places[number] = about.place
        process = RayProcess(actor, about, self._reach, began)
        start = EngineClient.start(
            with_own_files(self._share(about), number),
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
        if (actor := self._actors.pop(number, None)) is not None:
            with suppress(RayError):
                ray.kill(actor)  # This frees its CPUs and GPUs.

    async def close(self) -> None:
        """See `Spawner.close`. Also ends a cluster that was started here."""
        await asyncio.to_thread(self._leave)
        self._kept.cleanup()

    def _leave(self) -> None:
        if self._joined:
            ray.shutdown()

    def _share(self, about: About) -> EngineConfig:
        """Return the configuration of an engine on this node, with its share of the node's cores and free memory."""
        config, free = self._config, about.free_gb
        changes: dict[str, object] = {"device": "cuda" if self._gpus else "cpu"}
        if config.tuning:
            changes["tuning_mirror"] = "off"  # A lost node would take states in its memory with it.
        if config.prefix_sharing and not config.chunk_host:  # State moves between the engines.
            changes["chunk_host"] = f"[{about.address}]" if ":" in about.address else about.address
        if not self._gpus:
            changes["threads"] = config.threads or max(1, int(self._cpus))
            changes["cache_gb"] = min(CPU_CACHE_GB, free / 4) if config.cache_gb is None else config.cache_gb
        if config.host_cache_gb == "auto" and config.prefix_sharing:
            gpus = next((each["Resources"].get("GPU", 0) for each in ray.nodes() if each["NodeID"] == about.node), 0)
            engines = int(gpus) // self._gpus if self._gpus else 1
            changes["host_cache_gb"] = min(HOST_TIER_GB if self._gpus else CPU_HOST_TIER_GB, free / 4 / max(1, engines))
        return replace(config, **changes)  # type: ignore[arg-type]

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
            except (RayActorError, RuntimeError):
                break
        return -signal.SIGKILL if self._killed.is_set() else LOST

    def kill(self) -> None:
        """See `Process.kill`. Kills the actor, too."""
        self._killed.set()
        with suppress(RayError, RuntimeError):
            ray.kill(self._actor)


def join(address: str) -> None:
    """Let this process join a cluster, as `RaySpawner` describes. Raises EngineStartError."""
    if address != "auto":
        check_reachable(address)
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # For a cluster that is started here.
    try:
        ray.init(address=None if address == "auto" else address, namespace=NAMESPACE, logging_level=logging.WARNING)
    except (OSError, ValueError, RuntimeError, RayError) as error:
        raise EngineStartError(f"there is no Ray cluster at {address}: {one_line(error)}") from error


def check_reachable(address: str) -> None:
    """Raises EngineStartError if nothing listens at the address. Ray itself would retry for minutes."""
    host, port = address.rsplit(":", 1)
    try:
        socket.create_connection((host.strip("[]"), int(port)), REACH_SECONDS).close()
    except OSError as error:
        raise EngineStartError(f"there is no Ray cluster at {address}: {one_line(error)}") from error


def marked(directory: Path) -> Path:
    """Mark a directory that all nodes must see. Returns the path of its mark. Raises EngineStartError."""
    try:
        return mark(directory)
    except OSError as error:
        raise EngineStartError(f"the directory {directory} cannot be used: {error.strerror}") from error


async def answer(call: Any) -> Any:
    """Wait for the result of an actor call. Raises the actor's exceptions, and RayError."""
    return await asyncio.wrap_future(call.future())


def one_line(error: Exception) -> str:
    """Return an error's message in one line. Ray's messages may have many lines."""
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= 400 else f"{text[:400]}…"
