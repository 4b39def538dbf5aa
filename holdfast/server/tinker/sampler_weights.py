"""SamplerWeights: serves the saved weights that sampling sessions use, as adapters that lists do not show."""

from __future__ import annotations

import asyncio
import hashlib
from collections import Counter, OrderedDict
from collections.abc import AsyncIterator, Set
from contextlib import asynccontextmanager, suppress

from holdfast.engine.client.client import AdapterError
from holdfast.engine.client.connection import EngineDead
from holdfast.server.protocol import ApiError
from holdfast.server.service import HIDDEN, Service, engine_dead
from holdfast.server.tinker.values import Checkpoint

MOST_LOADED = 64
"""Maximum number of checkpoints that stay known to the engines while nobody samples from them.

The engines bound the memory of adapters themselves. A checkpoint that is unloaded is read again when it is needed.
"""


class SamplerWeights:
    """The checkpoints that this server's sampling sessions use. Each has an adapter, and so a cache, of its own."""

    def __init__(self, service: Service, most: int = MOST_LOADED) -> None:
        self._service, self._most = service, most
        self._users: Counter[str] = Counter()
        """Number of requests that use each adapter. One without requests has no entry."""
        self._loaded: OrderedDict[str, str] = OrderedDict()
        """Checkpoint of each adapter that is loaded, the one used longest ago first."""
        self._changing: dict[str, asyncio.Lock] = {}
        """By adapter, held while it is loaded or unloaded."""
        self._unloading: set[asyncio.Task[None]] = set()

    @asynccontextmanager
    async def served(self, checkpoint: Checkpoint, tenant: str) -> AsyncIterator[str]:
        """Serve a checkpoint to a tenant within the context. Gives the name by which requests ask for it.

        Raises ApiError if it cannot be served.
        """
        name = adapter_name(checkpoint, tenant)
        self._users[name] += 1
        try:
            await self._load(name, checkpoint, tenant)
            yield name
        finally:
            self._users[name] -= 1
            if not self._users[name]:
                del self._users[name]
            self._shrink()

    @property
    def checkpoints(self) -> list[str]:
        """Ids of the checkpoints that are loaded."""
        return [*{*self._loaded.values()}]

    async def drop_deleted(self, deleted: Set[str]) -> None:
        """Unload the checkpoints with these ids, which are deleted. One that a request still uses stays until then."""
        for name in [name for name, checkpoint in self._loaded.items() if checkpoint in deleted]:
            await self._unload(name)

    async def drop(self, checkpoint: Checkpoint, tenant: str) -> None:
        """Unload a checkpoint that no new request uses. Returns when its last request has ended."""
        await self._unload(adapter_name(checkpoint, tenant))

    async def close(self) -> None:
        """Wait for nothing any more: the engines or their other clients go on."""
        for task in self._unloading:
            task.cancel()
        await asyncio.gather(*self._unloading, return_exceptions=True)

    async def _load(self, name: str, checkpoint: Checkpoint, tenant: str) -> None:
        client = self._service.client
        if not client.info.adapter_slots:
            raise ApiError("this server serves no adapters; start it with --max-adapters", code="adapters_off")
        async with self._changing.setdefault(name, asyncio.Lock()):
            if name not in client.adapters:
                try:
                    await client.load_adapter(name, checkpoint.directory)
                except AdapterError as error:
                    raise ApiError(f"{checkpoint.path}: {error}", param="model_path", code="invalid_adapter") from None
                except EngineDead as error:
                    raise engine_dead(error) from None
                self._service.belongs(name, tenant, all_adapters=False)
            self._loaded[name] = checkpoint.id
            self._loaded.move_to_end(name)

    def _shrink(self) -> None:
        """Unload the adapters used longest ago that nobody uses, beyond the limit."""
        idle = [name for name in self._loaded if name not in self._users]
        for name in idle[: max(0, len(self._loaded) - self._most)]:
            del self._loaded[name]
            task = asyncio.create_task(self._unload(name))
            self._unloading.add(task)
            task.add_done_callback(self._unloading.discard)

    async def _unload(self, name: str) -> None:
        async with self._changing.setdefault(name, asyncio.Lock()):
            if name in self._users:  # A request came meanwhile.
                return
            self._loaded.pop(name, None)
            with suppress(AdapterError, EngineDead):
                await self._service.client.unload_adapter(name)
            self._service.own.pop(name, None)
        if name not in self._users:
            self._changing.pop(name, None)


def adapter_name(checkpoint: Checkpoint, tenant: str) -> str:
    """Return the name of a checkpoint's adapter for one tenant. Tenants that share a checkpoint share no adapter."""
    return f"{HIDDEN}{checkpoint.id}:{hashlib.sha256(tenant.encode()).hexdigest()[:8]}"
