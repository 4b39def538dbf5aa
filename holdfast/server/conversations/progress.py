"""Progress: the responses that this server writes now, and the records by which others can write its streams."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager, suppress
from functools import partial

from holdfast.server.conversations.store import STORE_UNAVAILABLE, AsyncStore, Store
from holdfast.server.conversations.stream_records import IN_PROGRESS, ResponseInProgress, StreamRecord
from holdfast.server.conversations.values import ConversationBusy
from holdfast.server.protocol import ApiError

PASSING = frozenset({"queue_full", "no_replica", "engine_dead", STORE_UNAVAILABLE, ConversationBusy.code})
"""Codes of errors that this server has for now. Another server, or this one later, may write the response."""


class Progress:
    """The stored responses that this server writes now."""

    def __init__(self, store: AsyncStore, on_record: Callable[[], None]) -> None:
        """`on_record` is called when a record is stored, from which time on this server must renew its lease."""
        self.store = store
        self.recorded: set[str] = set()
        """Ids of the streams in progress that have a record."""
        self._written: set[str] = set()
        """Ids of the responses in progress."""
        self._given_up: dict[str, Callable[[Store], None]] = {}
        """Write that the store lacks yet for each record that this server has given up, by id."""
        self._on_record = on_record

    @asynccontextmanager
    async def noted(self, id: str) -> AsyncGenerator[None, None]:
        """Note a response while it is written. Raises ApiError if it is in progress already."""
        self.check(id)
        self._written.add(id)
        try:
            yield
        finally:
            self._written.discard(id)
            self.recorded.discard(id)

    def check(self, id: str) -> None:
        """Raises ApiError 409 if a response is in progress."""
        if id in self._written:
            retry = ResponseInProgress.retry_after
            raise ApiError(IN_PROGRESS, status=409, code=ResponseInProgress.code, retry_after=retry)

    async def begin(self, record: StreamRecord) -> None:
        """Store the record of a stream. Raises ApiError."""
        self.recorded.add(record.response)
        self._on_record()
        self._given_up.pop(record.response, None)
        await self.store.run(partial(_begin, record))

    async def take(self, tenant: str, id: str, *, ended: bool = False) -> bool:
        """Take over the record of a stream, which this server then writes. Returns False if there is no record.

        `ended` means that its server is known to have ended. Raises ApiError 409 if another server writes the response.
        """
        taken = await self.store.run(partial(_take, tenant, id, ended))
        if taken:
            self._given_up.pop(id, None)
            self.recorded.add(id)
            self._on_record()
        return taken

    async def drop(self, id: str) -> None:
        """Remove the record of a stream that will not be stored."""
        await self._give_up(id, partial(_drop, id))

    async def leave(self, id: str) -> None:
        """Let any server write a stream that this one cannot write now."""
        await self._give_up(id, partial(_leave, id))

    async def _give_up(self, id: str, work: Callable[[Store], None]) -> None:
        self.recorded.discard(id)
        self._given_up[id] = work
        with suppress(ApiError):  # The store failed. `settle` tries again.
            await self.settle()

    async def settle(self) -> None:
        """Give up the records that the store could not let go earlier. Raises ApiError."""
        for id, work in [*self._given_up.items()]:
            await self.store.run(work)
            self._given_up.pop(id, None)


def _begin(record: StreamRecord, store: Store) -> None:
    store.streams.begin(record)


def _take(tenant: str, id: str, ended: bool, store: Store) -> bool:
    return store.streams.take(tenant, id, ended=ended)


def _leave(id: str, store: Store) -> None:
    store.streams.leave(id)


def _drop(id: str, store: Store) -> None:
    store.streams.drop(id)
