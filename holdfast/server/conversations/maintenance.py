"""Work of an operator on a store: a check of the whole file, and a copy while servers use it."""

from __future__ import annotations

import os
import sqlite3
from contextlib import closing
from pathlib import Path

from holdfast.files.regular import open_regular
from holdfast.server.conversations import counters
from holdfast.server.conversations.counters import Held
from holdfast.server.conversations.database import FAILURES, Database, is_store, reason_of, shown, sqlite_path
from holdfast.server.conversations.values import StoreError


def check(where: str) -> Held:
    """Read a whole SQLite store, and compare the counters with the rows. Returns what it holds. Raises StoreError."""
    path = existing(where, "check", "pg_amcheck")
    database = Database(str(path))
    try:
        database.check()
        with database.read() as db:
            if not is_store(db):
                raise StoreError(f"{path} is a SQLite file, but no conversation store")
            found = counters.recount(db)
            counted = counters.sums(db) if counters.complete(db) else found
        if counted != found:
            raise ValueError(f"its counters say {_listed(counted)}, and it has {_listed(found)}")
        return found
    except (*FAILURES, ValueError) as error:
        reason = reason_of(error)
        raise StoreError(f"the conversation store {path} is not whole: {reason}") from None
    finally:
        database.close()


def backup(where: str, target: Path) -> int:
    """Copy a SQLite store to a new file, as it is at one moment. Servers may read and write meanwhile.

    Returns the size of the copy in bytes. Raises StoreError, also if there is such a file already.
    """
    path = existing(where, "backup", "pg_dump")
    part = target.with_name(f"{target.name}.part")
    if target.exists():
        raise StoreError(f"{target} exists; name a new file for the backup")
    try:
        part.unlink(missing_ok=True)  # A backup that was killed left it.
        os.close(open_regular(part, os.O_RDWR | os.O_CREAT | os.O_EXCL))
        with closing(sqlite3.connect(path)) as source, closing(sqlite3.connect(part)) as copy:
            source.backup(copy)  # All pages in one step: several steps would begin again at each write of a server.
        part.rename(target)
    except (OSError, sqlite3.Error) as error:
        part.unlink(missing_ok=True)
        raise StoreError(f"the conversation store {path} cannot be copied to {target}: {error}") from None
    return target.stat().st_size


def existing(where: str, verb: str, other: str) -> Path:
    """Return the file of a SQLite store. Raises StoreError, which names the program that does this in PostgreSQL."""
    path = sqlite_path(where)
    if path is None:
        raise StoreError(f"{verb} is for a SQLite file, and the store is {shown(where)}; for PostgreSQL, use {other}")
    if not path.is_file():
        raise StoreError(f"there is no conversation store {path}")
    return path


def _listed(held: Held) -> str:
    return ", ".join(f"{number} {name}" for name, number in held._asdict().items())
