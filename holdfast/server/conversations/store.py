"""The persistent store, in SQLite or PostgreSQL: turns with their raw tokens, and conversations with their items."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from typing import TypeVar

from holdfast.server.conversations import counters, list_rows, search_index
from holdfast.server.conversations.adapter_table import AdapterTable
from holdfast.server.conversations.chat_store import ChatStore
from holdfast.server.conversations.conversation_store import ConversationStore
from holdfast.server.conversations.database import FAILURES, Database, MigrationStep, migrate, reason_of
from holdfast.server.conversations.group_writer import GroupWriter
from holdfast.server.conversations.items import opening_messages, text_size
from holdfast.server.conversations.leases import Leases
from holdfast.server.conversations.listing import Listing
from holdfast.server.conversations.space import Space
from holdfast.server.conversations.stream_records import StreamRecords
from holdfast.server.conversations.transactions import FlushFailed
from holdfast.server.conversations.tree import Tree
from holdfast.server.conversations.turn_store import TurnStore
from holdfast.server.conversations.upkeep import Upkeep
from holdfast.server.conversations.values import Bounds, Conflict, NotFound, StoreError, ThreadTooLarge, Turn
from holdfast.server.metrics import Metrics
from holdfast.server.protocol import ApiError
from holdfast.server.time_spent import current

log = logging.getLogger(__name__)

T = TypeVar("T")

STORE_UNAVAILABLE = "store_unavailable"
"""Code of the error while the database cannot be used."""
RETRY_SECONDS = 5
"""Seconds after which a client may try again that met a database that cannot be used."""

SMALL = 1 << 14
"""Number of characters below which a turn may be encoded on the event loop."""
READERS = 4
"""Number of threads that read, so that a search holds up no other read."""
WAIT_SECONDS = 30.0
"""Seconds that a write waits for the writes of other processes before it fails."""
NOTHING = "the conversation store cannot be used now; nothing of this request was stored"
UNKNOWN = "the disk of the conversation store failed; this request may be stored or not"


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
        self.streams = StreamRecords(database, self.leases, now)
        self.turns = TurnStore(database, self.space, self.leases, self.streams)
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
                for create in (counters.create, search_index.create, list_rows.create, *additions):
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
        self._writer = GroupWriter(store.database)
        self._reader: GroupWriter | ThreadPoolExecutor = self._writer
        if not store.database.single:
            self._reader = ThreadPoolExecutor(max_workers=READERS, thread_name_prefix="holdfast-store-reads")
        self._failing: dict[str, str] = {}
        """The reason of the last failure of reads or writes, by their kind, while they fail."""
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
        with self._answering("reads", param):
            return await asyncio.wrap_future(self._reader.submit(work, self._store))

    async def run(self, work: Callable[[Store], T], param: str | None = None) -> T:
        """Run `work` and return its result once it is committed. If the caller is cancelled, the work still completes.

        Works of several callers share a transaction, and a work may run again if that fails (`GroupWriter`).

        Raises ApiError if the store refuses the work or the database fails, for example on a full disk. Then nothing of
        the work is stored. `param` is the request's parameter that names the object, if there is one.
        """
        future = self._writer.write(partial(work, self._store))
        overdue = asyncio.get_running_loop().call_later(WAIT_SECONDS, future.cancel)  # Does nothing once it runs.
        try:
            with self._answering("writes", param):
                try:
                    return await asyncio.shield(asyncio.wrap_future(future))
                except asyncio.CancelledError:
                    if future.cancelled():
                        raise TimeoutError(f"other programs have kept its lock for {WAIT_SECONDS:g} s") from None
                    raise
        finally:
            overdue.cancel()
            self._upkeep.wake()

    async def commit(self, turn: Turn, *, begun: bool = False) -> None:
        """Store a turn as `TurnStore.commit` does. Raises ApiError like `run`.

        A small turn is encoded before its transaction, because other turns and other servers wait while that holds the
        lock. A large one would delay the event loop.
        """
        if _is_small(turn):
            _ = turn.encoded
        await self.run(lambda store: store.turns.commit(turn, begun=begun))

    @contextmanager
    def _answering(self, kind: str, param: str | None) -> Iterator[None]:
        """Raise ApiError for what the store or the database raises within the context, and count the call."""
        began, outcome = time.perf_counter(), "refused"
        try:
            yield
            outcome = "ok"
        except asyncio.CancelledError:
            outcome = "left"
            raise
        except NotFound as error:
            raise not_found(error.kind, error.id, error.param or param) from None
        except Conflict as error:
            raise ApiError(str(error), status=409, code=error.code, retry_after=error.retry_after) from None
        except ThreadTooLarge as error:
            raise ApiError(str(error), code="conversation_too_large") from None
        except FAILURES as error:
            outcome = "failed"
            self._note_failure(kind, str(getattr(error, "orig", None) or error))
            reason = UNKNOWN if isinstance(error, FlushFailed) else NOTHING
            raise ApiError(reason, status=503, code=STORE_UNAVAILABLE, retry_after=RETRY_SECONDS) from None
        finally:
            if outcome not in ("failed", "left") and self._failing.pop(kind, None) is not None:
                log.warning("the conversation store works again")
            self._metrics.store_up.set(self.up)
            self._metrics.store_operations.labels(outcome).inc()
            seconds = time.perf_counter() - began
            self._metrics.store_seconds.observe(seconds)
            current().add("store", seconds)

    def _note_failure(self, kind: str, reason: str) -> None:
        """Log a failure, unless the last operation of this kind failed for the same reason."""
        if self._failing.get(kind) != reason:
            log.error("the conversation store failed: %s", reason)
        self._failing[kind] = reason

    def close(self) -> None:
        """Finish the current work and close the store."""
        self._upkeep.close()
        if self._reader is not self._writer:
            self._reader.shutdown()
        self._writer.shutdown()
        self._store.close()


def _is_small(turn: Turn) -> bool:
    """Whether it takes well under a millisecond to encode a turn. Tools and log probabilities may take longer."""
    response, output = turn.response, turn.response["output"]
    if response.get("tools") or any(part.get("logprobs") for item in output for part in item.get("content", ())):
        return False
    before = 0 if turn.context.parent else turn.context.size
    return before + text_size(opening_messages(response.get("instructions")), [*turn.input, *output]) < SMALL


def not_found(kind: str, id: str, param: str | None = None) -> ApiError:
    """Return the 404 error for an object that does not exist or belongs to another tenant."""
    return ApiError(f"{kind} {id[:64]!r} was not found", status=404, param=param, code=f"{kind}_not_found")
