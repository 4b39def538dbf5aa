"""EngineKeeper: the actor on a Ray node whose engine listens at an address, and outlives the servers that attach."""

from __future__ import annotations

import asyncio
import hashlib
import os
import socket
import time
from contextlib import suppress
from dataclasses import fields
from typing import NamedTuple

import ray
from ray.util.placement_group import remove_placement_group

from holdfast.cluster.ray_host import About, about_this_node
from holdfast.cluster.shared_directory import read_mark
from holdfast.engine.client.client import EngineClient
from holdfast.engine.client.connection import HEALTH_SECONDS, EngineDead, EngineStartError
from holdfast.lm.config import EngineConfig

CHECK_SECONDS = 5.0
"""Seconds between two counts of the attached servers."""
FAILED_SECONDS = 60.0
"""Seconds without another try after which a keeper ends whose engine has never been ready."""
MOST_SILENCES = 6
"""Number of checks in a row without an answer, of HEALTH_SECONDS each, after which an engine is killed."""


class Order(NamedTuple):
    """An engine that a server needs."""

    asked: EngineConfig
    """The configuration that is equal for all engines of the server."""
    config: EngineConfig
    """The configuration with this engine's share of its node."""
    key: str
    """The secret key that the engine shares with its servers."""


class Served(NamedTuple):
    """The answer to an Order."""

    address: str
    """Address at which the engine listens; empty if it does not run."""
    error: str
    """The reason why the engine does not run, or does not fit the order, in one line; empty if it does."""


class EngineKeeper:
    """Actor with an engine process. It starts one on request, and ends itself when no server is attached for long.

    All calls run on the actor's event loop. Several servers may call at the same time.
    """

    def __init__(self, seconds: float) -> None:
        """`seconds` is the time without any attached server after which the keeper ends its engine and itself."""
        self._seconds = seconds
        self._lock = asyncio.Lock()
        """Held while an engine starts."""
        self._served: tuple[EngineClient, Order, str] | None = None
        """The last engine that was ready, its order, and its address; None before the first."""
        self._seen = time.monotonic()
        """Time of the last sign of a server."""
        self._silences = 0
        """Number of checks in a row that the engine did not answer."""
        self._watching = asyncio.get_running_loop().create_task(self._watch())

    async def about(self) -> About:
        """Return the properties of the node."""
        return about_this_node(os.getpid(), "")

    async def mark(self, path: str) -> str:
        """Return the mark of a shared directory as this node sees it; empty if there is none."""
        return await asyncio.to_thread(read_mark, path)

    async def serve(self, order: Order) -> Served:
        """Return the address of the engine, which is started if it does not run. Waits until it accepts requests."""
        async with self._lock:
            self._seen = time.monotonic()
            if self._served is not None and not self._served[0].dead.is_set():
                return self._running(order)
            try:
                return await self._start(order)
            finally:
                self._seen = time.monotonic()

    async def servers(self) -> int:
        """Return the number of servers that are attached to the engine; 0 if it does not answer, or does not run."""
        if self._served is not None:
            with suppress(EngineDead, TimeoutError):
                return await self._served[0].count_clients(CHECK_SECONDS)
        return 0

    async def end(self) -> None:
        """End the engine, give the resources back to Ray, and so end this actor."""
        if self._served is not None:
            await self._served[0].close()
        group = ray.util.get_current_placement_group()
        assert group is not None
        await asyncio.to_thread(remove_placement_group, group)

    def _running(self, order: Order) -> Served:
        """Return the address of the engine that runs, or the first option in which it differs from the order."""
        assert self._served is not None
        _, before, address = self._served
        for field in fields(EngineConfig):
            mine, wanted = getattr(before.asked, field.name), getattr(order.asked, field.name)
            if mine != wanted:
                return Served(
                    "",
                    f"the engine that runs has {field.name} {mine}, and this server asks for {wanted}; end the engines "
                    "first (holdfast ray end), or choose another name for ray_keep",
                )
        return Served(address, "")

    async def _start(self, order: Order) -> Served:
        """Start an engine, in place of one that has ended."""
        if self._served is not None:
            await self._served[0].close()
        host = about_this_node(0, "").host
        address = f"{host}:{free_port(host)}"
        try:
            engine = await EngineClient.start(
                order.config,
                priced=True,
                chunk_secret=hashlib.sha256(order.key.encode()).digest(),
                listen=address,
                listen_key=order.key,
            )
        except EngineStartError as error:
            return Served("", str(error))
        self._served, self._silences = (engine, order, address), 0
        return Served(address, "")

    async def _watch(self) -> None:
        """End the keeper once no server has been attached for the given time, and kill an engine that hangs."""
        while time.monotonic() < self._seen + self._patience:
            await asyncio.sleep(CHECK_SECONDS)
            if self._lock.locked():
                self._seen = time.monotonic()
            elif self._served is not None:
                await self._check(self._served[0])
        await self.end()

    @property
    def _patience(self) -> float:
        """Seconds without a server after which this keeper ends."""
        return self._seconds if self._served is not None else min(self._seconds, FAILED_SECONDS)

    async def _check(self, engine: EngineClient) -> None:
        with suppress(EngineDead):
            try:
                if await engine.count_clients(HEALTH_SECONDS):
                    self._seen = time.monotonic()
                self._silences = 0
            except TimeoutError:
                self._silences, self._seen = self._silences + 1, time.monotonic()
                if self._silences >= MOST_SILENCES:
                    engine.kill()


def free_port(host: str) -> int:
    """Return a TCP port at which nothing listens now."""
    family = socket.AF_INET6 if host.startswith("[") else socket.AF_INET
    with socket.socket(family) as probe:
        probe.bind((host.strip("[]"), 0))
        return int(probe.getsockname()[1])
