"""The persistent store, in SQLite or PostgreSQL: turns with their raw tokens, and conversations with their items."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from holdfast.server.conversations import counters, search_index
from holdfast.server.conversations.adapter_table import AdapterTable
from holdfast.server.conversations.chat_store import ChatStore
from holdfast.server.conversations.conversation_store import ConversationStore
from holdfast.server.conversations.database import FAILURES, Database, MigrationStep, migrate, reason_of
from holdfast.server.conversations.leases import Leases
from holdfast.server.conversations.listing import Listing
from holdfast.server.conversations.space import Space
from holdfast.server.conversations.tree import Tree
from holdfast.server.conversations.turn_store import TurnStore
from holdfast.server.conversations.upkeep import Upkeep
from holdfast.server.conversations.values import Bounds, Conflict, NotFound, StoreError, ThreadTooLarge
from holdfast.server.metrics import Metrics
from holdfast.server.protocol import ApiError
from holdfast.server.time_spent import current

log = logging.getLogger(__name__)

T = TypeVar("T")

READERS = 4
"""Number of threads that read, so that a search holds up no other read."""


class Store:
    """Synchronous store for one writing and some reading threads. `AsyncStore` runs it off the event loop.

    Each method of its parts is one transaction, which is committed whole or not at all. If the process dies, all
    committed turns stay. Every method takes the tenant, and finds only this tenant's objects.
    """

    def __init__(self, database: Database, bounds: Bounds, now: Callable[[], float] = time.time) -> None:
        """Internal; call `open` to get a store."""
        self.database = database
        self.space = Space(bounds, now)
        self.leases = Leases(database, now)
        self.turns = TurnStore(database, self.space, self.leases)
        self.conversations = ConversationStore(database, self.space, self.turns.chain)
        self.adapters = AdapterTable(database)
        self.chats = ChatStore(database, self.space)
        self.listing = Listing(database, self.space)
        self.tree = Tree(database, self.space, self.turns.cache, self.leases, self.conversations.find, self.turns.chain)

    @classmethod
    def open(
        cls,
        where: str,
        bounds: Bounds,
        now: Callable[[], float] = time.time,
        more: Sequence[MigrationStep] = (),
        additions: Sequence[MigrationStep] = (),
    ) -> Store:
        """Open or create the store at `where`: a file for SQLite, a database's URL, or `memory`.

        Migrates an older schema, including the steps of `more`. Each of `additions` then creates what may be missing
        and what an older server does not mind. Reads no table whole, so a damaged page is found only
        when it is used, or by `Database.check`. Raises StoreError.
        """
        shown = where if "://" not in where else where.partition("://")[0] + " database"
        try:
            store = cls(Database(where), bounds, now)
            with store.database.write() as db:
                migrate(db, more)
                for create in (counters.create, search_index.create, *additions):
                    create(db)
            with store.database.write() as db:
                store.space.drop_old(db)
        except ModuleNotFoundError as error:
            raise StoreError(f"the {shown} needs the package {error.name}; pip install 'holdfast[postgres]'") from None
        except (*FAILURES, ValueError) as error:
            reason = reason_of(error)
            raise StoreError(f"the conversation store {shown} cannot be opened: {reason}") from None
        return store

    def close(self) -> None:
        """Close the database."""
        self.database.close()


class AsyncStore:
    """Store for coroutines. Runs each call in a thread, so the event loop never waits for the disk.

    One thread writes, in the order of the calls. Others read, so a read does not wait for a write.
    """

    def __init__(self, store: Store, metrics: Metrics | None = None) -> None:
        self._store = store
        self._metrics = metrics or Metrics()
        self._metrics.store_up.set(1)
        self._metrics.store_bytes.set_function(store.space.bytes)
        self._writer = ThreadPoolExecutor(max_workers=1, thread_name_prefix="holdfast-store")
        self._reader = self._writer
        if not store.database.single:
            self._reader = ThreadPoolExecutor(max_workers=READERS, thread_name_prefix="holdfast-store-reads")
        self._failing: set[ThreadPoolExecutor] = set()
        self._upkeep = Upkeep(store.database, self._writer)

    @property
    def server(self) -> str:
        """Name of this server in the store's leases."""
        return self._store.leases.server

    @property
    def up(self) -> bool:
        """Whether both the last read and the last write reached a working database."""
        return not self._failing

    async def read(self, work: Callable[[Store], T], param: str | None = None) -> T:
        """Run `work`, which only reads, and return its result. Raises ApiError like `run`."""
        return await self._call(self._reader, work, param)

    async def run(self, work: Callable[[Store], T], param: str | None = None) -> T:
        """Run `work` and return its result. If the caller is cancelled, the work still completes.

        Raises ApiError if the store refuses the work or the database fails, for example on a full disk. Then nothing of
        the work is stored. `param` is the request's parameter that names the object, if there is one.
        """

        def write(store: Store) -> T:
            try:
                return work(store)
            except FAILURES as error:
                if not store.database.make_room(error):
                    raise
                return work(store)

        try:
            return await self._call(self._writer, write, param)
        finally:
            self._upkeep.wake()

    async def _call(self, thread: ThreadPoolExecutor, work: Callable[[Store], T], param: str | None) -> T:
        began, outcome = time.perf_counter(), "refused"
        try:
            result = await asyncio.get_running_loop().run_in_executor(thread, work, self._store)
            outcome = "ok"
            return result
        except asyncio.CancelledError:
            outcome = "left"
            raise
        except NotFound as error:
            raise not_found(error.kind, error.id, error.param or param) from None
        except Conflict as error:
            raise ApiError(str(error), status=409, code=error.code) from None
        except ThreadTooLarge as error:
            raise ApiError(str(error), code="conversation_too_large") from None
        except FAILURES as error:
            outcome = "failed"
            log.error("the conversation store failed: %s", getattr(error, "orig", None) or error)
            reason = "the conversation store cannot be used now; nothing of this request was stored"
            raise ApiError(reason, status=503, code="store_unavailable") from None
        finally:
            if outcome == "failed":
                self._failing.add(thread)
            elif outcome != "left":
                self._failing.discard(thread)
            self._metrics.store_up.set(self.up)
            self._metrics.store_operations.labels(outcome).inc()
            seconds = time.perf_counter() - began
            self._metrics.store_seconds.observe(seconds)
            current().add("store", seconds)

    def close(self) -> None:
        """Finish the current work and close the store."""
        self._upkeep.close()
        if self._reader is not self._writer:
            self._reader.shutdown()
        self._writer.submit(self._store.close)
        self._writer.shutdown()


def not_found(kind: str, id: str, param: str | None = None) -> ApiError:
    """Return the 404 error for an object that does not exist or belongs to another tenant."""
    return ApiError(f"{kind} {id[:64]!r} was not found", status=404, param=param, code=f"{kind}_not_found")
