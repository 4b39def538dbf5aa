"""Transactions of the store: one for each read and write, or one that many writes share.

Writes that share a transaction are savepoints in it, so one that fails takes back its own changes only. They share its
lock, its commit and its flush of the disk. That is group commit (DeWitt et al., Implementation Techniques for Main
Memory Database Systems, 1984, section 3).
"""

from __future__ import annotations

import os
import sqlite3
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, closing, contextmanager
from pathlib import Path
from typing import Protocol

from sqlalchemy import Connection
from sqlalchemy.engine import Engine
from sqlalchemy.exc import SQLAlchemyError

from holdfast.files.regular import open_regular
from holdfast.server.conversations.prepared import run_sql
from holdfast.server.conversations.write_lock import WriteLock

SHARDS = 16
"""Number of rows of a tenant's counters in PostgreSQL. Two servers that write at once seldom wait for the same one."""
SHARED_LOCK = 0x486F6C64
"""First key of PostgreSQL's advisory locks of shared transactions: `Hold` in ASCII. The second is the shard."""


class FlushFailed(OSError):
    """A transaction was committed, but may not be on the disk."""


class Flush(Protocol):
    """Makes the commits of one kind of database last."""

    def begin_shared(self, db: Connection) -> None:
        """Prepare a transaction that many writes will share."""

    def before_commit(self, db: Connection, *, lasting: bool) -> None:
        """Set within the transaction whether its commit must be on the disk."""

    def after_commit(self, *, lasting: bool) -> None:
        """Return once the commit is on the disk, if it must be. Raises FlushFailed."""


class NoFlush:
    """Commits of a store in memory."""

    def begin_shared(self, db: Connection) -> None:
        pass

    def before_commit(self, db: Connection, *, lasting: bool) -> None:
        pass

    def after_commit(self, *, lasting: bool) -> None:
        pass


class ServerFlush(NoFlush):
    """Commits in PostgreSQL, which flushes by itself."""

    def begin_shared(self, db: Connection) -> None:
        """Let no other server change the same counters before the commit.

        A transaction of many turns changes the counters of several tenants, in any order. If two of them changed the
        same rows, each could wait for the other.
        """
        run_sql(db, f"SELECT pg_advisory_xact_lock({SHARED_LOCK}, pg_backend_pid() % {SHARDS})")

    def before_commit(self, db: Connection, *, lasting: bool) -> None:
        if not lasting:
            db.exec_driver_sql("SET LOCAL synchronous_commit TO OFF")


class LogFlush(NoFlush):
    """Commits in a SQLite file, whose write-ahead log this flushes after the commit.

    So the next process writes meanwhile, and one flush serves all commits before it. Before SQLite overwrites pages of
    the log, it flushes them and the database file itself (`synchronous=NORMAL`).
    """

    def __init__(self, database: Path, engine: Engine) -> None:
        self._log = database.with_name(f"{database.name}-wal")
        self._engine = engine

    def after_commit(self, *, lasting: bool) -> None:
        if not lasting:
            return
        try:
            log = open_regular(self._log, os.O_RDWR)
            try:
                os.fdatasync(log)
            finally:
                os.close(log)
        except OSError as error:
            self._move(error)
            if isinstance(error, FileNotFoundError):  # Somebody removed the log: new connections make a new one.
                self._engine.dispose()

    def _move(self, error: OSError) -> None:
        """After a failed flush, move the log into the file. Raises FlushFailed if this fails, too.

        The system forgets which pages failed, so a second flush would succeed without having written them.
        """
        try:
            busy = restart_log(self._engine)
        except (sqlite3.Error, SQLAlchemyError):
            busy = True
        if busy:
            raise FlushFailed(f"the write-ahead log cannot be flushed: {error}") from error


def restart_log(engine: Engine) -> bool:
    """Move SQLite's write-ahead log into the file, so that it begins anew. Returns whether others kept it from that.

    Raises sqlite3.Error, or SQLAlchemyError if there is no connection.
    """
    with closing(engine.raw_connection()) as connection:
        busy, _, _ = connection.cursor().execute("PRAGMA wal_checkpoint(RESTART)").fetchone()
        return bool(busy)


class Scope(Protocol):
    """Where the reads and writes of a thread run."""

    def read(self) -> AbstractContextManager[Connection]:
        """Begin a read."""

    def write(self, *, lasting: bool) -> AbstractContextManager[Connection]:
        """Begin a write. Its changes are taken back if the context raises."""


class Alone:
    """Each read and each write is a transaction of its own."""

    def __init__(self, engine: Engine, lock: WriteLock, flush: Flush) -> None:
        # In PostgreSQL, all queries of a read must see the same snapshot. SQLite does this by default.
        isolation = {"isolation_level": "REPEATABLE READ"} if engine.dialect.name == "postgresql" else {}
        self._reading = engine.execution_options(**isolation)
        self._writing = engine.execution_options(holdfast_write=True)
        self._lock = lock
        self._flush = flush

    @contextmanager
    def read(self) -> Iterator[Connection]:
        with self._reading.connect() as db, db.begin():
            yield db

    @contextmanager
    def write(self, *, lasting: bool) -> Iterator[Connection]:
        with self._transaction(lambda: lasting) as db:
            yield db

    @contextmanager
    def shared(self) -> Iterator[Shared]:
        """Begin a transaction for many writes. It is on the disk before this returns, if one of them must last."""
        with self._transaction(lambda: shared.lasting) as db:
            self._flush.begin_shared(db)
            shared = Shared(db)
            yield shared

    @contextmanager
    def _transaction(self, lasting: Callable[[], bool]) -> Iterator[Connection]:
        """Begin a transaction. Its commit is on the disk before this returns, if `lasting` then says so."""
        with self._lock.held(), self._writing.connect() as db, db.begin():
            yield db
            lasts = lasting()
            self._flush.before_commit(db, lasting=lasts)
        self._flush.after_commit(lasting=lasts)


class Shared:
    """Writes are savepoints of one transaction, and reads see what was written before in it."""

    def __init__(self, db: Connection) -> None:
        self._db = db
        self.lasting = False
        """Whether one of the writes must be on the disk before it is answered."""

    @contextmanager
    def read(self) -> Iterator[Connection]:
        yield self._db

    @contextmanager
    def write(self, *, lasting: bool) -> Iterator[Connection]:
        run_sql(self._db, "SAVEPOINT one_write")
        try:
            yield self._db
        except Exception:
            run_sql(self._db, "ROLLBACK TO SAVEPOINT one_write")
            raise
        run_sql(self._db, "RELEASE SAVEPOINT one_write")
        self.lasting = self.lasting or lasting


class Current(threading.local):
    """The scope of each thread."""

    def __init__(self, scope: Scope) -> None:
        """`scope` is that of every thread at first."""
        self.scope = scope

    @contextmanager
    def within(self, scope: Scope) -> Iterator[None]:
        """Change this thread's scope within the context."""
        before, self.scope = self.scope, scope
        try:
            yield
        finally:
            self.scope = before
