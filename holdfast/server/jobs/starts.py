"""Starts: stores which lines begin, before the engine gets them. What follows from it is in `attempt_table`."""

from __future__ import annotations

import asyncio

from holdfast.server.conversations.store import AsyncStore
from holdfast.server.jobs.attempt_table import AttemptTable
from holdfast.server.jobs.files import persist

GATHER_SECONDS = 0.01
"""Starts that come within this time are stored together, so that the disk's flush does not bound lines a second."""


class Starts:
    """The lines that are about to begin. `run` stores them."""

    def __init__(self, store: AsyncStore) -> None:
        self._store = store
        self._waiting: list[tuple[tuple[str, int], asyncio.Future[None]]] = []
        """Each line, by its batch and its number, with what is done once it is stored."""
        self._came = asyncio.Event()

    async def note(self, batch: str, number: int) -> None:
        """Return once it is stored that a line begins, however often the store fails before."""
        stored: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append(((batch, number), stored))
        self._came.set()
        await stored

    async def run(self) -> None:
        """Store starts as they come, until it is cancelled."""
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
