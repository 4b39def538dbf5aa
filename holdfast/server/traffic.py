"""Which requests the server takes: a count of those under way, a limit, and the door that draining closes."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

from holdfast.server.protocol import ApiError

RETRY_SECONDS = 1


class Traffic:
    """Counts choices under way and turns new ones away, before any work is done for them, when there are too many."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        """Most choices under way: those that run and those that may wait."""
        self.under_way = 0
        self.draining = False
        self._idle = asyncio.Event()
        self._idle.set()

    def check(self, choices: int) -> None:
        """Raises ApiError 503 when draining, or when there are too many for this many more."""
        if self.draining:
            raise ApiError(
                "the server is shutting down and takes no new requests; try another one",
                status=503, type="server_error", code="shutting_down", retry_after=5,
            )  # fmt: skip
        if self.under_way + choices > self.limit:
            raise full(self.limit)

    @contextmanager
    def enter(self, choices: int) -> Iterator[None]:
        """Hold a place for each choice. Raises as `check`."""
        self.check(choices)
        self.under_way += choices
        self._idle.clear()
        try:
            yield
        finally:
            self.under_way -= choices
            if not self.under_way:
                self._idle.set()

    async def idle(self) -> None:
        """Wait until nothing is under way."""
        await self._idle.wait()


def full(limit: int) -> ApiError:
    """The refusal of a full queue."""
    return ApiError(
        f"the queue is full ({limit} requests); try again in a moment",
        status=503, type="server_error", code="queue_full", retry_after=RETRY_SECONDS,
    )  # fmt: skip
