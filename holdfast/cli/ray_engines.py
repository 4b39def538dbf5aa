"""`holdfast ray`: lists the engines on a Ray cluster that outlive their servers, and ends them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from holdfast.cli.flags import CommandError
from holdfast.cluster.config import AUTO, KEPT, ClusterConfig
from holdfast.core.config import option

ACTIONS = ("list", "end")
"""Values of ACTION."""
NOTICE_SECONDS = 12.0
"""Seconds in which an engine notices that a server was killed."""
WAIT_SECONDS = 1.0


@dataclass(frozen=True, kw_only=True)
class RayConfig:
    """Options of `holdfast ray`. Raises ValueError for an address that is none."""

    ray: str = option(AUTO, "address of the Ray cluster, host:port; default: the one that runs on this host")

    def __post_init__(self) -> None:
        ClusterConfig(ray=self.ray)


async def run(config: RayConfig, action: str | None, name: str | None) -> int:
    """Do what ACTION says. Returns the exit code.

    Raises ValueError for bad usage, EngineStartError without a cluster, and CommandError if there is nothing to end.
    """
    if action not in ACTIONS:
        raise ValueError(f"ACTION is {action or 'missing'}; it must be one of {', '.join(ACTIONS)}")
    if action == "list" and name is not None:
        raise ValueError(f"list takes no NAME, and {name} is given")
    kept = ClusterConfig(ray=config.ray, ray_keep=name or KEPT).ray_keep
    from holdfast.cluster.ray_cluster import visiting  # Ray is an extra, and takes a second to import.
    from holdfast.cluster.ray_places import Places, kept_engines

    with visiting(config.ray):
        if action == "list":
            for engine in await kept_engines():
                print(f"{engine.name}  {engine.place}")
            return 0
        places = Places(str(kept))
        await no_servers(places.servers)
        ended = await places.end()
    if not ended:
        raise CommandError(f"no engine is named {kept}-0 or so; holdfast ray list shows all")
    print(f"ended {', '.join(ended)}")
    return 0


async def no_servers(count: Callable[[], Awaitable[int]]) -> None:
    """Wait for the engines to notice that their servers have ended. Raises CommandError if they have not."""
    until = time.monotonic() + NOTICE_SECONDS
    while attached := await count():
        if time.monotonic() >= until:
            raise CommandError(
                f"{attached} server{'s are' if attached > 1 else ' is'} attached to these engines, and would start "
                "them again; end servers first"
            )
        await asyncio.sleep(WAIT_SECONDS)
