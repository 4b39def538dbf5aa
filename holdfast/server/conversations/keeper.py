"""Keeper: a store behind an event loop, which never waits for the disk."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from holdfast.server.conversations.store import Store

T = TypeVar("T")


class Keeper:
    """A store behind an event loop: one thread does what is asked, in its order."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="holdfast-store")

    async def __call__(self, work: Callable[[Store], T]) -> T:
        """The result of `work`. Who is cancelled meanwhile does not stop it: it is done whole."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, work, self._store)

    def close(self) -> None:
        """Finish what was asked and close the store."""
        self._thread.submit(self._store.close)
        self._thread.shutdown()
