"""Places: the engines on a Ray cluster that outlive servers, found by name.

Ray itself holds what must be known by all: an actor's name is taken once, and its key-value store gives the first
writer's value to everybody. So several servers may start the same engines at the same time, and each is started once.
"""

from __future__ import annotations

import asyncio
import logging
import re
from contextlib import suppress
from typing import Any, NamedTuple

import ray
import zmq
from ray.exceptions import RayError
from ray.experimental.internal_kv import (
    _internal_kv_del,
    _internal_kv_get,
    _internal_kv_list,
    _internal_kv_put,
)
from ray.util.placement_group import PlacementGroup, placement_group_table, remove_placement_group

from holdfast.cluster.ray_cluster import NAMESPACE, Room, answer, one_line
from holdfast.cluster.ray_host import About
from holdfast.cluster.ray_keeper import EngineKeeper

STORE = NAMESPACE.encode()
"""Namespace of our keys in Ray's key-value store."""
END_SECONDS = 30.0
"""Seconds that engines have to write state to lower tiers and end. Then their actors are killed."""
ASK_SECONDS = 5.0
POLL_SECONDS = 0.1
ENDED_GROUPS = ("REMOVED", "INFEASIBLE")
"""States of a placement group in which no actor can be put there."""

log = logging.getLogger("holdfast.cluster")


class Kept(NamedTuple):
    """An engine that outlives servers, for display."""

    name: str
    """Name of the engine: that of `--ray-keep`, a hyphen and the number of the replica."""
    place: str
    """The node; the reason if the node does not answer."""


class Places:
    """The kept engines of one name. Calls wait for Ray's head, and may be made in any thread."""

    def __init__(self, name: str) -> None:
        self._name = name

    def key(self) -> str:
        """Return the secret key that these engines share with their servers. The first call of all draws it."""
        drawn = zmq.curve_keypair()[1]
        return self._first(f"{self._name}/key", drawn).decode()

    def keeper(self, number: int, room: Room, seconds: float) -> Any:
        """Return the actor of a number, which is created unless it exists. It may still wait for room.

        `seconds` is the argument of EngineKeeper. Raises RayError.
        """
        name = f"{self._name}-{number}"
        with suppress(ValueError):
            return ray.get_actor(name, namespace=NAMESPACE)
        options = room.options(self._group(number, room))
        return (
            ray.remote(EngineKeeper)
            .options(name=name, namespace=NAMESPACE, lifetime="detached", get_if_exists=True, **options)
            .remote(seconds)
        )

    def numbers(self) -> list[int]:
        """Return the numbers of the actors that exist."""
        found = (re.fullmatch(rf"{re.escape(self._name)}-(\d+)", name) for name in actor_names())
        return sorted(int(each[1]) for each in found if each)

    async def servers(self) -> int:
        """Return the largest number of servers that are attached to one of the engines."""
        counts = [0]
        for number in await asyncio.to_thread(self.numbers):
            with suppress(ValueError, RayError, TimeoutError):
                keeper = ray.get_actor(f"{self._name}-{number}", namespace=NAMESPACE)
                counts.append(await asyncio.wait_for(answer(keeper.servers.remote()), 2 * ASK_SECONDS))
        return max(counts)

    async def end(self) -> list[str]:
        """End all engines of this name, and free their resources. Returns their names.

        Also frees the resources of actors that were killed.
        """
        numbers = await asyncio.to_thread(self._reserved)
        await asyncio.gather(*map(self._end_one, numbers))
        await asyncio.to_thread(_internal_kv_del, f"{self._name}/", del_by_prefix=True, namespace=STORE)
        return [f"{self._name}-{number}" for number in numbers]

    async def _end_one(self, number: int) -> None:
        """Let an engine end, or kill its actor if that takes too long."""
        name = f"{self._name}-{number}"
        with suppress(ValueError, RayError, TimeoutError):
            keeper = ray.get_actor(name, namespace=NAMESPACE)
            async with asyncio.timeout(END_SECONDS):
                await answer(keeper.end.remote())
                while name in await asyncio.to_thread(actor_names):
                    await asyncio.sleep(POLL_SECONDS)
        with suppress(ValueError, RayError):
            ray.kill(ray.get_actor(name, namespace=NAMESPACE))
        for group in self._known_group(number):
            remove_placement_group(group)

    def _reserved(self) -> list[int]:
        """Return the numbers of the actors that exist, and of those that have left reserved resources."""
        keys = _internal_kv_list(f"{self._name}/", namespace=STORE)
        groups = (re.fullmatch(rf"{re.escape(self._name)}/(\d+)/group", key.decode()) for key in keys)
        left = {int(each[1]) for each in groups if each}
        return sorted({*self.numbers(), *(number for number in left if self._known_group(number))})

    def _group(self, number: int, room: Room) -> PlacementGroup:
        """Return the reserved resources of a number, which outlive this process and the actor in them."""
        if known := self._known_group(number):
            return known[0]
        mine, where = room.reserve("detached"), f"{self._name}/{number}/group"
        first = self._first(where, bytes.fromhex(mine.id.hex()))
        if first.hex() == mine.id.hex():
            return mine
        remove_placement_group(mine)  # Another server was faster.
        return group_of(first)

    def _known_group(self, number: int) -> list[PlacementGroup]:
        """Return the resources that are reserved for a number, as a list of one; an empty list if there are none."""
        where = f"{self._name}/{number}/group"
        known = _internal_kv_get(where, namespace=STORE)
        if known is None:
            return []
        if placement_group_table(group_of(known)).get("state", "REMOVED") in ENDED_GROUPS:
            _internal_kv_del(where, namespace=STORE)
            return []
        return [group_of(known)]

    @staticmethod
    def _first(where: str, value: bytes) -> bytes:
        """Store a value unless there is one. Returns the stored one."""
        _internal_kv_put(where, value, overwrite=False, namespace=STORE)
        stored: bytes = _internal_kv_get(where, namespace=STORE)
        return stored


def group_of(id: bytes) -> PlacementGroup:
    """Return the placement group with an id."""
    return PlacementGroup(ray.PlacementGroupID(id))


def actor_names() -> list[str]:
    """Return the names of all actors in our namespace."""
    return [each["name"] for each in ray.util.list_named_actors(all_namespaces=True) if each["namespace"] == NAMESPACE]


async def kept_engines() -> list[Kept]:
    """Return all kept engines of the cluster, of all names."""
    return [Kept(name, await place_of(name)) for name in sorted(await asyncio.to_thread(actor_names))]


async def place_of(name: str) -> str:
    """Return the node of a kept engine as text, or why it is not known."""
    try:
        keeper = ray.get_actor(name, namespace=NAMESPACE)
        return About(*await asyncio.wait_for(answer(keeper.about.remote()), ASK_SECONDS)).place
    except TimeoutError:
        return "it waits for room, or its node does not answer"
    except (ValueError, RayError) as error:
        return one_line(error)
