"""Readiness: whether new requests should be sent to this server now, and the reason why not."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Sequence

from holdfast.cluster.replicas import Replicas
from holdfast.lm.config import EngineConfig
from holdfast.lm.types import SchedulerStats
from holdfast.server.conversations.store import AsyncStore, Store
from holdfast.server.protocol import ApiError
from holdfast.server.service import Admission, AnyEngine, trouble

ALIVE, READY = "/health/live", "/health/ready"
"""Paths of the routes that say whether the process runs, and whether it should get requests."""
WARM_SECONDS = 60.0
"""Seconds after its start from which a server is ready though an engine still warms up: one that gets requests all the
same has no pause for it."""


class Readiness:
    """Looks at the engines and the store.

    Kernels are compiled before a server has an engine (`engine.client.warming`). An engine serves from then on. It is
    at its full speed once it has captured the rest of its graphs and pinned its host tier, which it does in the next
    seconds, while nobody waits. Until then a new server is not ready.
    """

    def __init__(
        self,
        admissions: Sequence[Admission],
        clients: Sequence[AnyEngine],
        store: AsyncStore | None,
        seconds: float,
    ) -> None:
        """`seconds` is the time that engines, and then the store, have for an answer."""
        self._admissions, self._clients, self._store, self._seconds = admissions, clients, store, seconds
        self._warm_at: float | None = time.monotonic() + WARM_SECONDS
        """When the engines count as warm in any case; None once they are."""

    async def trouble(self) -> str | None:
        """Return the reason why this server should get no requests, in a few words; None if it should."""
        if (reason := await trouble(self._admissions, self._clients, self._seconds)) is not None:
            return reason
        if any(isinstance(client, Replicas) and not client.serving for client in self._clients):
            return "no replica serves"
        if self._warm_at is not None and await self._warming():
            return "warming up"
        if await asleep(self._clients, self._seconds):
            return "asleep"
        return None if self._store is None else await self._trouble_of(self._store)

    async def _warming(self) -> bool:
        """Whether an engine is not yet as fast as it will be. Once none was, it is never asked again."""
        if self._warm_at is not None and time.monotonic() < self._warm_at:
            asked = (client.health(timeout=self._seconds) for client in self._clients)
            for stats in await asyncio.gather(*asked, return_exceptions=True):
                if isinstance(stats, SchedulerStats) and stats.warming:
                    return True
        self._warm_at = None
        return False

    async def _trouble_of(self, store: AsyncStore) -> str | None:
        """Return the reason why the store cannot be used. A failed write counts until a later one succeeds."""
        works = store.read(reads) if store.up else store.run(writes)
        try:
            await asyncio.wait_for(works, self._seconds)
        except TimeoutError:
            return "store hangs"
        except ApiError:
            return "store fails"
        return None


async def asleep(clients: Sequence[AnyEngine], seconds: float) -> bool:
    """Whether an engine sleeps. One that does not answer within `seconds` is not counted."""
    configs = [getattr(each, "config", None) for each in clients]
    able = [
        each
        for each, config in zip(clients, configs, strict=True)
        if isinstance(config, EngineConfig) and config.enable_sleep_mode
    ]
    found = await asyncio.gather(*(client.health(timeout=seconds) for client in able), return_exceptions=True)
    return any(isinstance(stats, SchedulerStats) and stats.sleep_level for stats in found)


def reads(store: Store) -> None:
    """Read from the database."""
    store.leases.elsewhere("")


def writes(store: Store) -> None:
    """Write to the database and to its disk, and undo that."""
    key = f"readiness-{uuid.uuid4().hex}"
    store.leases.lock(key)
    store.leases.unlock(key)
