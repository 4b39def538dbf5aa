"""The persistent store, in SQLite or PostgreSQL: turns with their raw tokens, and conversations with their items."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from sqlalchemy.exc import SQLAlchemyError

from holdfast.server.conversations.conversation_store import ConversationStore
from holdfast.server.conversations.database import Database, DatabaseFailed, migrate
from holdfast.server.conversations.space import Space
from holdfast.server.conversations.turn_store import TurnStore
from holdfast.server.conversations.values import Bounds, Conflict, NotFound, StoreError, ThreadTooLarge
from holdfast.server.protocol import ApiError

log = logging.getLogger(__name__)

T = TypeVar("T")


class Store:
    """The store, synchronous and for one thread at a time. `AsyncStore` takes it off the event loop.

    Each method of its two parts is one transaction, committed whole or not at all: when the process dies, the last
    committed turn stays. Every method takes the tenant, and finds nothing of another tenant.
    """

    def __init__(self, database: Database, bounds: Bounds, now: Callable[[], float] = time.time) -> None:
        """Use `open` instead."""
        self.database = database
        self.space = Space(bounds, now)
        self.turns = TurnStore(database, self.space)
        self.conversations = ConversationStore(database, self.space, self.turns.chain)

    @classmethod
    def open(cls, where: str, bounds: Bounds, now: Callable[[], float] = time.time) -> Store:
        """Open or create the store at `where`: a file for SQLite, a database's URL, or `memory`.

        Migrates an older schema. Raises StoreError.
        """
        shown = where if "://" not in where else where.partition("://")[0] + " database"
        try:
            store = cls(Database(where), bounds, now)
            with store.database.write() as db:
                migrate(db)
            with store.database.write() as db:
                store.space.drop_old(db)
        except ModuleNotFoundError as error:
            raise StoreError(f"the {shown} needs the package {error.name}; pip install 'holdfast[postgres]'") from None
        except (SQLAlchemyError, OSError, ValueError) as error:
            reason = str(getattr(error, "orig", None) or error).partition("\n")[0]
            raise StoreError(f"the conversation store {shown} cannot be opened: {reason}") from None
        return store

    def close(self) -> None:
        """Close the database."""
        self.database.close()


class AsyncStore:
    """A store for coroutines: one thread runs the calls, in order, so the event loop never waits for the disk."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="holdfast-store")

    async def run(self, work: Callable[[Store], T], param: str | None = None) -> T:
        """The result of `work`. Cancelling the caller does not stop the work: it still completes.

        Raises ApiError where the store refuses or the database fails, for example on a full disk; then nothing of the
        work is stored. `param` is the request's parameter that names the object to be found, if there is one.
        """
        try:
            return await asyncio.get_running_loop().run_in_executor(self._thread, work, self._store)
        except NotFound as error:
            raise not_found(error.kind, error.id, error.param or param) from None
        except Conflict as error:
            raise ApiError(str(error), status=409, code="conflict") from None
        except ThreadTooLarge as error:
            raise ApiError(str(error), code="conversation_too_large") from None
        except DatabaseFailed as error:
            log.error("the conversation store failed: %s", error.orig)
            reason = "the conversation store cannot be used now; nothing of this request was stored"
            raise ApiError(reason, status=503, code="store_unavailable") from None

    def close(self) -> None:
        """Finish the work at hand and close the store."""
        self._thread.submit(self._store.close)
        self._thread.shutdown()


def not_found(kind: str, id: str, param: str | None = None) -> ApiError:
    """The 404 of an object that does not exist or belongs to another tenant."""
    return ApiError(f"{kind} {id[:64]!r} was not found", status=404, param=param, code=f"{kind}_not_found")
