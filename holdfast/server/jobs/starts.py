"""Starts: records, before the engine gets a line, that the line begins. `attempt_table` uses these records."""

from __future__ import annotations

import asyncio

from holdfast.server.conversations.store import AsyncStore
from holdfast.server.jobs.attempt_table import AttemptTable
from holdfast.server.jobs.files import persist

GATHER_SECONDS = 0.01
"""Seconds within which starts are collected to be stored together, because each flush of the disk takes time."""


class Starts:
    """Lines that are about to begin. `run` stores them."""

    def __init__(self, store: AsyncStore) -> None:
        self._store = store
        self._waiting: list[tuple[tuple[str, int], asyncio.Future[None]]] = []
        """Batch id and number of each line that is not stored yet, with the future that ends when it is."""
        self._came = asyncio.Event()

    async def note(self, batch: str, number: int) -> None:
        """Record that a line begins, and return once that is stored. Store failures are retried."""
        stored: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append(((batch, number), stored))
        self._came.set()
        await stored

    async def run(self) -> None:
        """Store starts as they come, until cancelled."""
        while True:
            await self._came.wait()
            await asyncio.sleep(GATHER_SECONDS)
            self._came.clear()
            taken, self._waiting = self._waiting, []
            # A line that was cancelled meanwhile does not begin.
            if begun := [line for line, stored in taken if not stored.done()]:
                await persist(lambda: self._store.run(lambda store: AttemptTable(store.database).begin(begun)))
            for _, stored in taken:
                if not stored.done():
                    stored.set_result(None)
