"""RayCluster: this process's membership of a Ray cluster, the room of a replica there, and Ray's errors in one line."""

from __future__ import annotations

import asyncio
import logging
import os
import re
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from holdfast.cluster.local_spawner import CPU_CACHE_GB, CPU_HOST_TIER_GB, HOST_TIER_GB
from holdfast.cluster.shared_directory import mark, read_mark
from holdfast.engine.client.connection import EngineStartError
from holdfast.lm.config import EngineConfig

try:
    import ray
    from ray.exceptions import OutOfMemoryError, RayError
    from ray.util.placement_group import PlacementGroup, placement_group
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    from holdfast.cluster.ray_host import About, version
except ImportError as error:
    raise EngineStartError(f"Ray cannot be imported ({error}); install it: pip install 'holdfast[ray]'") from error

NAMESPACE = "holdfast"
REACH_SECONDS = 10.0
LINE_LIMIT = 400
"""Maximum number of characters of an error in one line."""
CAUSE = re.compile(r"^(?:\w+\.)*\w*(?:Error|Exception): .*$", re.MULTILINE)
"""The last line of a Python traceback, which names the exception."""
ADDRESS = re.compile(r"\bip[=:] ?([\w.:]+)")
"""The node's IP address in Ray's own errors."""
EXIT = re.compile(r"Worker exit type: (\w+)")
OUT_OF_MEMORY = ("NODE_OUT_OF_MEMORY", "low on memory")
"""Texts by which Ray says that its memory monitor has ended a process."""


@dataclass(frozen=True, slots=True)
class Room:
    """Resources of one replica. They are one bundle of a placement group, so all are on one node."""

    cpus: float
    gpus: int
    """Number of GPUs, one for each rank; 0 on a CPU."""

    @property
    def words(self) -> str:
        """The resources as text."""
        gpus = f" and {self.gpus} GPU{'s' * (self.gpus > 1)}" if self.gpus else ""
        return f"{self.cpus:g} CPU{'s' * (self.cpus != 1)}{gpus}"

    def reserve(self, lifetime: str | None = None) -> PlacementGroup:
        """Ask Ray for the resources. Returns at once. With `lifetime` "detached" they outlive this process.

        Ray gives each group to the node that has most room left, so the loss of a node costs few replicas.
        """
        bundle = {name: amount for name, amount in (("CPU", self.cpus), ("GPU", self.gpus)) if amount}
        return placement_group([bundle or {"memory": 1}], strategy="STRICT_PACK", lifetime=lifetime)

    def options(self, group: PlacementGroup) -> dict[str, Any]:
        """The options of an actor that takes all resources of a reserved group."""
        strategy = PlacementGroupSchedulingStrategy(placement_group=group)
        return {"num_cpus": self.cpus, "num_gpus": self.gpus, "scheduling_strategy": strategy}


class RayCluster:
    """This process as a member of a Ray cluster. A process has at most one."""

    def __init__(self, config: EngineConfig, address: str, cpus: float, shared: Path | None = None) -> None:
        """Join a Ray cluster.

        `address` is host:port, or "auto". With "auto", the process joins the cluster on this host, or starts one if
        there is none. If the process already belongs to a cluster, `address` is ignored, and `leave` does nothing.

        Each engine gets `cpus` CPUs, and one GPU per rank if the cluster has GPUs. `shared` is a directory that all
        nodes must see at the same path, if there is one. Raises EngineStartError.
        """
        self.config = config
        """Configuration that all engines share."""
        self._marks = () if shared is None else (marked(shared),)
        self._joined = not ray.is_initialized()
        if self._joined:
            join(address)
        try:
            self.room = room_of(config, cpus, [node["Resources"] for node in ray.nodes() if node["Alive"]])
        except EngineStartError:
            self.leave()
            raise
        self.reach: str = ray.util.get_node_ip_address()
        """IP address of this host, as the nodes see it."""

    async def check(self, about: About, actor: Any) -> None:
        """Raises EngineStartError if a node has other versions, or does not see a directory as this host does."""
        if about.version != version():
            raise EngineStartError(f"{about.place} has {about.version}, and this host has {version()}")
        for path in self._marks:
            if not (here := read_mark(str(path))) or await answer(actor.mark.remote(str(path))) != here:
                raise EngineStartError(
                    f"{about.place} does not see {path.parent} as this host does; put it on a file system that all "
                    "hosts mount at this path"
                )

    def config_on(self, about: About, config: EngineConfig) -> EngineConfig:
        """Return the configuration of an engine on a node, with its share of the node's cores and free memory."""
        free, gpus = about.free_gb, self.room.gpus
        changes: dict[str, object] = {"device": "cuda" if gpus else "cpu"}
        if config.tuning:
            changes["tuning_mirror"] = "off"  # A lost node would take states in its memory with it.
        if config.prefix_sharing and not config.chunk_host:  # State moves between the engines.
            changes["chunk_host"] = about.host
        if not gpus:
            changes["threads"] = config.threads or max(1, int(self.room.cpus))
            changes["cache_gb"] = min(CPU_CACHE_GB, free / 4) if config.cache_gb is None else config.cache_gb
        if config.host_cache_gb == "auto" and config.prefix_sharing:
            there = next((each["Resources"].get("GPU", 0) for each in ray.nodes() if each["NodeID"] == about.node), 0)
            engines = int(there) // gpus if gpus else 1
            changes["host_cache_gb"] = min(HOST_TIER_GB if gpus else CPU_HOST_TIER_GB, free / 4 / max(1, engines))
        return replace(config, **changes)  # type: ignore[arg-type]

    def leave(self) -> None:
        """Leave the cluster, and end one that was started here."""
        if self._joined:
            ray.shutdown()


def room_of(config: EngineConfig, cpus: float, nodes: list[dict[str, float]]) -> Room:
    """Return the room of a replica. `nodes` has the resources of each node.

    All ranks of an engine share the memory of one host. Raises EngineStartError if no node has enough GPUs.
    """
    largest, ranks = int(max((node.get("GPU", 0) for node in nodes), default=0)), config.layout.ranks
    if config.device == "cuda" and not largest:
        raise EngineStartError("device is cuda, and no node of the Ray cluster has a GPU")
    if config.device == "cpu" or not largest:
        return Room(cpus, 0)
    if ranks > largest:
        raise EngineStartError(
            f"tp is {config.tp} and pp is {config.pp}, so a replica needs {ranks} GPUs of one node, and the largest "
            f"node of the Ray cluster has {largest}: ranks of one engine cannot run on different hosts; choose a "
            "smaller tp or pp, or add a larger node first"
        )
    return Room(cpus, ranks)


@contextmanager
def visiting(address: str) -> Iterator[None]:
    """Be a member of a cluster that runs, within the context. Raises EngineStartError."""
    join(address, new=False)
    try:
        yield
    finally:
        ray.shutdown()


def join(address: str, *, new: bool = True) -> None:
    """Let this process join a cluster, as `RayCluster` describes. Without `new`, none is started.

    Raises EngineStartError.
    """
    if address != "auto":
        check_reachable(address)
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # For a cluster that is started here.
    try:
        where = None if address == "auto" and new else address
        ray.init(address=where, namespace=NAMESPACE, logging_level=logging.WARNING)
    except (OSError, ValueError, RuntimeError, RayError) as error:
        what = "this host cannot join the" if "Version mismatch" in str(error) else "there is no"
        raise EngineStartError(f"{what} Ray cluster at {address}: {one_line(error)}") from error


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


def out_of_memory(error: Exception) -> bool:
    """Whether Ray's memory monitor has ended the process of an actor."""
    return isinstance(error, OutOfMemoryError) or any(text in str(error) for text in OUT_OF_MEMORY)


def one_line(error: Exception) -> str:
    """Return the reason of an error in one line. A traceback that Ray passes on is cut to its exception."""
    text = str(error)
    found = ADDRESS.search(text) if isinstance(error, RayError) else None
    where = f"on {found[1]}: " if found else ""
    if out_of_memory(error):
        return f"{where}the node was low on memory, so Ray ended the engine's process"
    if named := CAUSE.findall(text):
        return shortened(f"{where}{with_hint(named[-1])}")
    if ended := EXIT.search(text):
        return f"{where}the engine's Ray process has ended ({ended[1]}); the logs of its node may say why"
    return shortened(where + (" ".join(text.split()) or type(error).__name__))


def with_hint(cause: str) -> str:
    """Add what to do to an exception of a node that lacks a module of Holdfast, or has another version of it."""
    if cause.startswith(("ModuleNotFoundError", "ImportError", "AttributeError")) and "holdfast" in cause:
        return f"{cause}; install Holdfast there, in the same version as here ({version()})"
    return cause


def shortened(text: str) -> str:
    """Return a text, cut at LINE_LIMIT."""
    return text if len(text) <= LINE_LIMIT else f"{text[:LINE_LIMIT]}…"
