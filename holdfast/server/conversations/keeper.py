"""Keeper: a store behind an event loop, which never waits for the disk."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from holdfast.server.conversations.database import DatabaseFailed
from holdfast.server.conversations.store import Store
from holdfast.server.protocol import ApiError

log = logging.getLogger(__name__)

T = TypeVar("T")


class Keeper:
    """A store behind an event loop: one thread does what is asked, in its order."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="holdfast-store")

    async def __call__(self, work: Callable[[Store], T]) -> T:
        """The result of `work`. Who is cancelled meanwhile does not stop it: it is done whole.

        Raises ApiError where the database fails, as for want of room on its disk; then nothing of it is done.
        """
        try:
            return await asyncio.get_running_loop().run_in_executor(self._thread, work, self._store)
        except DatabaseFailed as error:
            log.error("the conversation store failed: %s", error.orig)
            raise ApiError(
                "the conversation store cannot be used now; nothing of this request was stored",
                status=503, type="server_error", code="store_unavailable",
            ) from None  # fmt: skip

    def close(self) -> None:
        """Finish what was asked and close the store."""
        self._thread.submit(self._store.close)
        self._thread.shutdown()
