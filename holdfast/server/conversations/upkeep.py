"""Upkeep: work on the store in small transactions between those of turns.

It brings an older store up to date. In SQLite it then does what turns would otherwise do: it sorts words into the
index of a search, and moves the write-ahead log into the file.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, Protocol, TypeVar

from holdfast.server.conversations import counters, list_rows, search_index
from holdfast.server.conversations.database import FAILURES, Database

log = logging.getLogger(__name__)

T = TypeVar("T")

SHARE = 0.5
"""Maximum share of the time in which upkeep holds the writing thread. Turns are stored in the rest."""
FAILED_SECONDS = 5.0
"""Seconds after which a piece that failed is tried again."""
TIDY_SECONDS = 1.0
"""Seconds from a write until the index knows its words, together with those of later writes."""
MOVE_SECONDS = 1.0
"""Minimum number of seconds between two moves of the write-ahead log."""
LONG_LOG = 4096
"""Number of pages of the write-ahead log (16 MiB) after which it begins anew. Turns wait some milliseconds for it."""


def piece(database: Database) -> bool:
    """Do one small transaction that brings an older store up to date. Returns whether there may be more to do."""
    with database.write() as db:
        return counters.count_piece(db) or list_rows.list_piece(db) or search_index.index_piece(db)


def tidy(database: Database) -> bool:
    """Do one small transaction on the index of a search. Returns whether there may be more to do."""
    with database.write(lasting=False) as db:
        return search_index.index_of(db).tidy(db)


class Writer(Protocol):
    """The thread that writes to the store."""

    def submit(self, work: Callable[..., T], *given: Any) -> Future[T]:
        """Run a work between two transactions. Raises RuntimeError once the thread was shut down."""


class Upkeep:
    """Thread that does upkeep, piece by piece, through the thread that writes to the store."""

    def __init__(self, database: Database, writer: Writer) -> None:
        """Begin at once. In an up-to-date store in PostgreSQL, the thread ends after one transaction."""
        self._database = database
        self._writer = writer
        self._tidies = database.engine.dialect.name == "sqlite"
        """Whether the database leaves the merging and moving to its users. PostgreSQL has processes for them."""
        self._stopped = threading.Event()
        self._written = threading.Event()
        self._thread = threading.Thread(target=self._run, name="holdfast-store-upkeep", daemon=True)
        self._thread.start()

    def wake(self) -> None:
        """Report that a turn or an edit was stored."""
        self._written.set()

    def _run(self) -> None:
        began, pieces = time.monotonic(), 0
        while not self._stopped.is_set() and self._piece(piece):
            pieces += 1
        if pieces and not self._stopped.is_set():
            log.warning("counted and indexed the store's conversations in %.0f s", time.monotonic() - began)
        if self._tidies:
            self._tidy()

    def _tidy(self) -> None:
        """Bring what was written into the index and into the file, until upkeep is stopped."""
        more, left, moved = True, False, time.monotonic()  # `left`: whether the log may have pages to be moved.
        while not self._stopped.is_set():
            if not more and self._written.wait(MOVE_SECONDS if left else None):
                self._stopped.wait(TIDY_SECONDS)
                self._written.clear()
                more = True
            if more:
                more = self._piece(tidy)
                left = True
            if left and time.monotonic() - moved >= MOVE_SECONDS and not self._stopped.is_set():
                self._move_log()
                moved, left = time.monotonic(), False

    def _move_log(self) -> None:
        pages = self._done(self._database.move_log, 0)
        if pages > LONG_LOG:  # While nobody writes, what is left of the log is moved, too.
            self._done(lambda: self._writer.submit(self._database.move_log).result(), 0)

    def _piece(self, work: Callable[[Database], bool]) -> bool:
        """Do one piece, and leave the thread that writes to turns for a while. Returns whether there may be more."""
        began = time.perf_counter()
        more = self._done(lambda: self._writer.submit(work, self._database).result(), None)
        took = FAILED_SECONDS if more is None else time.perf_counter() - began
        self._stopped.wait(took * (1 - SHARE) / SHARE if more is not False else 0)
        return more is not False

    def _done(self, work: Callable[[], T], failed: T) -> T:
        """Return the result of a piece of work; `failed` if the database fails or upkeep is stopped."""
        try:
            return work()
        except FAILURES as error:
            log.error("upkeep of the conversation store failed: %s", getattr(error, "orig", None) or error)
        except RuntimeError:  # The writing thread was shut down.
            self._stopped.set()
        return failed

    def close(self) -> None:
        """End after the current piece. The next start continues."""
        self._stopped.set()
        self._written.set()
        self._thread.join()
