"""Progress: the responses that this server writes now, and the records by which others can write its streams."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager, suppress
from functools import partial

from holdfast.server.conversations.store import STORE_UNAVAILABLE, AsyncStore, Store
from holdfast.server.conversations.stream_records import IN_PROGRESS, ResponseInProgress, StreamRecord
from holdfast.server.protocol import ApiError

PASSING = frozenset({"queue_full", "no_replica", "engine_dead", STORE_UNAVAILABLE})
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
        await self.store.run(partial(_begin, record))

    async def take(self, tenant: str, id: str, *, ended: bool = False) -> bool:
        """Take over the record of a stream, which this server then writes. Returns False if there is no record.

        `ended` means that its server is known to have ended. Raises ApiError 409 if another server writes the response.
        """
        taken = await self.store.run(partial(_take, tenant, id, ended))
        if taken:
            self.recorded.add(id)
            self._on_record()
        return taken

    async def drop(self, id: str) -> None:
        """Remove the record of a stream that will not be stored."""
        self.recorded.discard(id)
        with suppress(ApiError):  # The store failed. The record is dropped some time after this server's end.
            await self.store.run(partial(_drop, id))


def _begin(record: StreamRecord, store: Store) -> None:
    store.streams.begin(record)


def _take(tenant: str, id: str, ended: bool, store: Store) -> bool:
    return store.streams.take(tenant, id, ended=ended)


def _drop(id: str, store: Store) -> None:
    store.streams.drop(id)
