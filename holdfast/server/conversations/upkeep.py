"""Upkeep: brings an older store up to date while the server runs, in small transactions between those of turns."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import Executor

from holdfast.server.conversations import counters, search_index
from holdfast.server.conversations.database import FAILURES, Database

log = logging.getLogger(__name__)

SHARE = 0.5
"""Maximum share of the time in which upkeep holds the writing thread. Turns are stored in the rest."""
FAILED_SECONDS = 5.0
"""Seconds after which a piece that failed is tried again."""


def piece(database: Database) -> bool:
    """Do one small transaction of upkeep. Returns whether there may be more to do."""
    with database.write() as db:
        return counters.count_piece(db) or search_index.index_piece(db)


class Upkeep:
    """Thread that does upkeep, piece by piece, through the thread that writes to the store."""

    def __init__(self, database: Database, writer: Executor) -> None:
        """Begin at once. In a store that is up to date, the thread ends after one transaction."""
        self._database = database
        self._writer = writer
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="holdfast-store-upkeep", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        began, pieces = time.monotonic(), 0
        while not self._stopped.is_set():
            took, more = self._piece(lambda: piece(self._database))
            if not more:
                break
            pieces += 1
            self._stopped.wait(took * (1 - SHARE) / SHARE)
        else:
            return
        if pieces:
            log.warning("counted and indexed the store's conversations in %.0f s", time.monotonic() - began)

    def _piece(self, work: Callable[[], bool]) -> tuple[float, bool]:
        """Do one piece. Returns the seconds to count as its time, and whether there may be more."""
        began = time.perf_counter()
        try:
            more = self._writer.submit(work).result()
        except FAILURES as error:
            log.error("upkeep of the conversation store failed: %s", getattr(error, "orig", None) or error)
            return FAILED_SECONDS, True
        except RuntimeError:  # The writing thread was shut down.
            self._stopped.set()
            return 0, True
        return time.perf_counter() - began, more

    def close(self) -> None:
        """End after the current piece. The next start continues."""
        self._stopped.set()
        self._thread.join()
