"""The store's database: its location, its tables, its transactions, and the migration of older schemas."""

from __future__ import annotations

import logging
import math
import os
import shutil
import sqlite3
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, closing, contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import quote

import msgspec
import sqlalchemy
from sqlalchemy import (
    BigInteger,
    Boolean,
    Column,
    Connection,
    Dialect,
    Float,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    String,
    Table,
    TypeDecorator,
    UniqueConstraint,
    event,
    func,
    insert,
    select,
)
from sqlalchemy.engine import Engine
from sqlalchemy.exc import ArgumentError, SQLAlchemyError
from sqlalchemy.pool import StaticPool

from holdfast.files.regular import file_fault, open_regular
from holdfast.server.conversations.transactions import (
    Alone,
    Current,
    Flush,
    LogFlush,
    NoFlush,
    ServerFlush,
    restart_log,
)
from holdfast.server.conversations.write_lock import FileLock, NoLock, WriteLock

MEMORY = "memory"
MEMORY_BYTES = 8 << 30
"""Maximum number of bytes of tokens and items in a store in memory, if none is configured."""
MIGRATION_LOCK = 0x486F6C6466617374
"""Key of PostgreSQL's advisory lock that a server holds while it migrates: `Holdfast` in ASCII."""
BUSY_SECONDS = 5.0
"""Seconds that a write waits for the lock of another program."""
LOG_PAGES = 16_384
"""Number of pages in SQLite's write-ahead log (64 MiB) after which a turn itself moves them into the file.

Upkeep moves them earlier, so that no turn waits for it.
"""
SWITCH_PAUSE = 0.01
"""Seconds between two tries to switch a file to writing ahead."""
POSTGRESQL_TIMES = {
    "connect_timeout": "4", "tcp_user_timeout": "5000", "keepalives_idle": "4", "keepalives_interval": "2",
    "keepalives_count": "2",
}  # fmt: skip
"""Times after which libpq gives up a connection whose host has vanished, unless the URL gives others.

All are in seconds but `tcp_user_timeout`, which is in ms. Without them, a query over a connection that is half open
waits for a quarter of an hour.
"""
FAILURES = (SQLAlchemyError, msgspec.MsgspecError, OSError)
"""Exceptions of a database that is full, locked, damaged or unreachable."""

log = logging.getLogger("holdfast.server")


class Name(TypeDecorator[str]):
    """Column type of ids.

    PostgreSQL refuses a NUL. A NUL in a client's id becomes a character that no stored id has.
    """

    impl = String(64)
    cache_ok = True

    def process_bind_param(self, value: str | None, dialect: Dialect) -> str | None:
        """Return the id with each NUL replaced."""
        return None if value is None else value.replace("\0", "\ufffd")


NAME = Name()
tables = MetaData()

versions = Table("versions", tables, Column("version", Integer, primary_key=True))
"""One row for each migration step that was applied; the highest is the database's version."""

threads = Table(
    "threads",
    tables,
    Column("id", NAME, primary_key=True),
    Column("tenant", NAME, nullable=False),
    Column("active", Float, nullable=False, index=True),
    Column("bytes", BigInteger, nullable=False),
)
"""Threads: a first turn or a conversation, with all turns that follow.

A thread is kept or dropped whole. `active` is the time of its last turn.
"""

by_tenant = Index("threads_by_tenant", threads.c.tenant, threads.c.active)
"""Index that finds the thread of a tenant that has been idle longest."""

turns = Table(
    "turns",
    tables,
    Column("id", NAME, primary_key=True),
    Column("thread", NAME, nullable=False, index=True),
    Column("tenant", NAME, nullable=False),
    Column("parent", NAME, index=True),
    Column("visible", Boolean, nullable=False),
    Column("status", String(16), nullable=False),
    Column("response", LargeBinary, nullable=False),
    Column("input", LargeBinary, nullable=False),
    Column("history", LargeBinary, nullable=False),
    Column("start", Integer, nullable=False),
    Column("tokens", LargeBinary, nullable=False),
    Column("characters", Integer, nullable=False),
    Column("digest", LargeBinary, nullable=False),
)
"""Turns: a response and its input. The tokens of a turn are its parent's first `start` tokens, then its own.

A turn is not visible if it was deleted or created with store: false. It stays while other turns build on it.
"""

conversations = Table(
    "conversations",
    tables,
    Column("id", NAME, primary_key=True),
    Column("thread", NAME, nullable=False, index=True),
    Column("tenant", NAME, nullable=False),
    Column("created", Integer, nullable=False),
    Column("metadata", LargeBinary, nullable=False),
    Column("head", NAME),
)
"""Conversations. `head` is the turn whose context and output are the items; null after a client edited the items."""

items = Table(
    "items",
    tables,
    Column("conversation", NAME, primary_key=True),
    Column("position", Integer, primary_key=True),
    Column("id", NAME, nullable=False),
    Column("item", LargeBinary, nullable=False),
    UniqueConstraint("conversation", "id"),
)


leases = Table(
    "leases",
    tables,
    Column("response", NAME, primary_key=True),
    Column("server", NAME, nullable=False),
    Column("seen", Float, nullable=False),
    Column("cancelled", Boolean, nullable=False),
)
"""Leases: responses that are being written, each with its server.

The server renews `seen`, and stops a response that is `cancelled`.
"""

recipes = Table(
    "recipes",
    tables,
    Column("response", NAME, primary_key=True),
    Column("recipe", LargeBinary, nullable=False),
)
"""Recipes: responses that another server can write if theirs ends (`recipe.Recipe`). Each has a lease."""

streams = Table(
    "streams",
    tables,
    Column("response", NAME, primary_key=True),
    Column("tenant", NAME, nullable=False),
    Column("server", NAME, nullable=False),
    Column("parent", NAME),
    Column("recipe", LargeBinary, nullable=False),
)
"""Streams: recipes of streamed responses that are not stored yet, each with the server that writes it.

`parent` is the turn before, as in `turns`. The lease under the server's own name says whether it runs.
"""

adapters = Table(
    "adapters",
    tables,
    Column("model", String(1024), primary_key=True),
    Column("name", String(1024), primary_key=True),
    Column("path", String, nullable=False),
    Column("tenant", NAME),
    Column("version", NAME, nullable=False),
)
"""Adapters that requests have loaded, for all servers with shared engines. `tenant` is null if all may use it."""

adapter_numbers = Table(
    "adapter_numbers",
    tables,
    Column("model", String(1024), primary_key=True),
    Column("name", String(1024), primary_key=True),
    Column("number", Integer, nullable=False),
)
"""Numbers of the adapters' present versions. A row of `adapters` without one has version 1."""

key_streams = Table(
    "key_streams",
    tables,
    Column("key", NAME, primary_key=True),
    Column("server", NAME, primary_key=True),
    Column("streams", Integer, nullable=False),
    Column("seen", Float, nullable=False),
)
"""Requests in progress of each key at each server, for keys whose number is limited. The server renews `seen`."""

chats = Table(
    "chats",
    tables,
    Column("id", NAME, primary_key=True),
    Column("thread", NAME, nullable=False, index=True),
    Column("tenant", NAME, nullable=False),
    Column("created", Integer, nullable=False),
    Column("model", String(256), nullable=False),
    Column("metadata", LargeBinary, nullable=False, key="labels"),
    Column("completion", LargeBinary, nullable=False),
    Column("messages", LargeBinary, nullable=False),
)
"""Chat completions with `store: true`, each in a thread of its own, with the messages that it answers."""

chats_by_creation = Index("chats_by_creation", chats.c.tenant, chats.c.created, chats.c.id)


def _turns(db: Connection) -> None:
    threads.create(db)
    turns.create(db)


def _conversations(db: Connection) -> None:
    conversations.create(db)
    items.create(db)


def _by_tenant(db: Connection) -> None:
    by_tenant.create(db, checkfirst=True)  # A new table already has its index.


MigrationStep = Callable[[Connection], None]
"""A migration step, run within a transaction."""
STEPS: tuple[MigrationStep, ...] = (_turns, _conversations, _by_tenant)
"""Migration steps. Step i takes a database from version i to i + 1.

When a table changes later, the step that created it keeps the old form. The steps of files and batches
(`server.jobs.tables`) follow these, so any later step is added at the end of that list.

A step only adds: tables, indexes, and columns that are nullable or have a default in the database. So a server of the
version before works on the new schema, and servers can be upgraded one after another. A release adds at most one step.
"""
NEWER_VERSIONS = 1
"""How many versions newer than the known ones a schema may be."""


def is_store(db: Connection) -> bool:
    """Whether a store's tables were created in this database, of whatever version."""
    return sqlalchemy.inspect(db).has_table(versions.name)


def migrate(db: Connection, more: Sequence[MigrationStep] = ()) -> None:
    """Apply the missing steps of `STEPS` and `more`, within the caller's transaction: all or none.

    Other servers that start on the same database wait until the transaction ends. A schema that is one version newer
    is used as it is, because steps only add. Raises ValueError for one that is newer still.
    """
    steps = (*STEPS, *more)
    if db.dialect.name == "postgresql":  # In SQLite the transaction itself keeps other writers out.
        db.execute(select(func.pg_advisory_xact_lock(MIGRATION_LOCK)))
    versions.create(db, checkfirst=True)
    version = db.execute(select(func.max(versions.c.version))).scalar() or 0
    if version > len(steps) + NEWER_VERSIONS:
        raise ValueError(
            f"its schema has version {version} and this Holdfast knows up to {len(steps)}, and works with "
            f"{len(steps) + NEWER_VERSIONS}; use a newer Holdfast"
        )
    if version > len(steps):
        log.warning(
            "the store's schema has version %d and this Holdfast knows %d: it reads and writes what it knows, which is "
            "meant for the time of an upgrade",
            version,
            len(steps),
        )
    for number, step in enumerate(steps[version:], version + 1):
        step(db)
        db.execute(insert(versions).values(version=number))
    # These have no version, because an older server does not mind them.
    for table in (leases, recipes, streams, adapters, adapter_numbers, key_streams, chats):
        table.create(db, checkfirst=True)


def data_directory() -> Path:
    """Return Holdfast's directory within the user's data directory."""
    given = os.environ.get("XDG_DATA_HOME")
    return (Path(given) if given else Path.home() / ".local" / "share") / "holdfast"


def place(store: str | None) -> str:
    """Return the location of the configured store, by default a file in the data directory."""
    return store or str(data_directory() / "conversations.sqlite")


def default_bytes(where: str) -> float:
    """Return the maximum number of bytes of a store without a configured one; `math.inf` for any number.

    In a SQLite file it is a tenth of the disk, as short messages take six times their size there, with all indexes.
    """
    path = sqlite_path(where)
    if path is None:
        return MEMORY_BYTES if where == MEMORY or where.startswith("sqlite") else math.inf
    there = next((folder for folder in (path, *path.parents) if folder.exists()), Path("/"))
    return shutil.disk_usage(there).total / 10


def sqlite_path(where: str) -> Path | None:
    """Return the file of a SQLite store; None for a store in memory or in PostgreSQL. Raises ValueError."""
    if "://" not in where:
        return None if where in (MEMORY, "", ":memory:") else Path(where).expanduser()
    try:
        url = sqlalchemy.make_url(where)
    except ArgumentError:
        return None
    in_file = url.drivername.startswith("sqlite") and url.database not in (None, "", ":memory:")
    return Path(url.database or "").expanduser() if in_file else None


def reason_of(error: BaseException) -> str:
    """Return the reason of one of FAILURES for display: the first line of what the database itself says."""
    if isinstance(error, OSError):
        return file_fault(error)
    return str(getattr(error, "orig", None) or error).partition("\n")[0]


def shown(where: str) -> str:
    """Return a store's location without a password, for display."""
    try:
        return sqlalchemy.make_url(where).render_as_string(hide_password=True) if "://" in where else where
    except ArgumentError:
        return "a database"


class Database:
    """A SQLite or PostgreSQL database."""

    def __init__(self, where: str) -> None:
        """Connect to a SQLite file, a database's URL, or `memory`. Raises ValueError, OSError, SQLAlchemyError."""
        self.engine = _connect(where)
        self.single = isinstance(self.engine.pool, StaticPool)
        """Whether there is only one connection, which one thread uses at a time."""
        self._lock, flush = _means(self.engine)
        self._alone = Alone(self.engine, self._lock, flush)
        self._current = Current(self._alone)

    def read(self) -> AbstractContextManager[Connection]:
        """Begin a read-only transaction. Within `shared`, the read sees what this thread has written."""
        return self._current.scope.read()

    def write(self, *, lasting: bool = True) -> AbstractContextManager[Connection]:
        """Begin a transaction that takes the write lock at its beginning.

        Its commit is on the disk before this returns. If it is not `lasting`, the next lasting commit takes it to the
        disk: until then it survives the end of the server, but not a loss of power. Raises FlushFailed if the commit
        may not be on the disk. Within `shared`, it is a part of that transaction, and is committed with it.
        """
        return self._current.scope.write(lasting=lasting)

    @contextmanager
    def shared(self) -> Iterator[None]:
        """Begin a transaction that all writes of this thread share. It ends like one of `write`, lasting if one is."""
        with self._alone.shared() as shared, self._current.within(shared):
            yield

    def check(self) -> None:
        """Read a whole SQLite file, some 10 s for each GB. Raises ValueError or SQLAlchemyError if it is damaged."""
        if self.engine.dialect.name == "sqlite":
            with self.read() as db:
                found = db.exec_driver_sql("PRAGMA quick_check(1)").scalar_one()
            if found != "ok":
                raise ValueError(f"the file is damaged ({found}); restore a backup, or move it away to begin a new one")

    def make_room(self, error: Exception) -> bool:
        """After a failed write, move SQLite's write-ahead log into the database file to free the log's space.

        Returns False if this failed, or if the error is not one of a full or broken disk.
        """
        code = getattr(getattr(error, "orig", None), "sqlite_errorcode", 0) & 0xFF
        if code not in (sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR):
            return False
        try:
            restart_log(self.engine)
        except (sqlite3.Error, SQLAlchemyError):
            return False
        return True

    def move_log(self) -> int:
        """Copy SQLite's write-ahead log into the database file. Nobody waits for anybody meanwhile.

        Returns the number of pages of the log. Pages that are written meanwhile stay in the log. It begins anew with
        the first write after a call during which nothing was written. Raises OSError.
        """
        if self.single:  # A store in memory has no log.
            return 0
        try:
            with closing(self.engine.raw_connection()) as connection:
                _, pages, _ = connection.cursor().execute("PRAGMA wal_checkpoint(PASSIVE)").fetchone()
                return int(pages)
        except sqlite3.Error as error:  # The driver's own errors are not among FAILURES.
            raise OSError(f"the write-ahead log cannot be moved into the file: {error}") from error

    def close(self) -> None:
        """Close all connections."""
        self.engine.dispose()
        self._lock.close()


def _means(engine: Engine) -> tuple[WriteLock, Flush]:
    """Return the lock of all writers, and what makes commits last, for this kind of database."""
    if engine.dialect.name == "postgresql":
        return NoLock(), ServerFlush()
    if engine.url.database is None:
        return NoLock(), NoFlush()
    path = Path(engine.url.database)
    return FileLock(path), LogFlush(path, engine)


def _connect(where: str) -> Engine:
    url = sqlalchemy.make_url(where) if "://" in where else sqlalchemy.URL.create("sqlite", database=where)
    in_memory = url.drivername.startswith("sqlite") and url.database in (None, "", ":memory:")
    if where == MEMORY or in_memory:
        engine = sqlalchemy.create_engine(
            "sqlite://", poolclass=StaticPool, connect_args={"check_same_thread": False}, hide_parameters=True
        )
    elif url.drivername.startswith("sqlite"):
        path = Path(url.database or "").expanduser()
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        # Only the owner may read it. SQLite gives its other files the same permissions.
        os.close(open_regular(path, os.O_RDWR | os.O_CREAT))
        engine = sqlalchemy.create_engine(
            url.set(database=str(path)),
            connect_args={"timeout": BUSY_SECONDS, "check_same_thread": False},
            hide_parameters=True,  # Messages of errors reach the log, and parameters hold texts.
        )
    else:
        if url.drivername in ("postgres", "postgresql"):
            url = url.set(drivername="postgresql+psycopg")
        if not url.drivername.startswith("postgresql"):
            raise ValueError(f"{url.drivername} is not supported; give sqlite:///FILE or postgresql://…")
        given = {name: value for name, value in POSTGRESQL_TIMES.items() if name not in url.query}
        url = url.update_query_dict(given)
        engine = sqlalchemy.create_engine(url, pool_pre_ping=True, hide_parameters=True)
    if engine.dialect.name == "sqlite":
        _prepare_sqlite(engine)
    return engine


def switch_to_wal(connection: sqlite3.Connection) -> None:
    """Let a connection write ahead of its file. Raises sqlite3.OperationalError.

    SQLite does not wait for another process that switches the same file, so this tries again for BUSY_SECONDS.
    """
    deadline = time.monotonic() + BUSY_SECONDS
    while True:
        try:
            connection.execute("PRAGMA journal_mode=WAL")
            return
        except sqlite3.OperationalError as error:
            if "locked" not in str(error) or time.monotonic() >= deadline:
                raise
            time.sleep(SWITCH_PAUSE)


def _prepare_sqlite(engine: Engine) -> None:
    """Turn on write-ahead logging, and send BEGIN explicitly. Commits are flushed by `LogFlush`."""

    @event.listens_for(engine, "do_connect")
    def connecting(dialect: Dialect, record: Any, given: list[Any], options: dict[str, Any]) -> None:
        # A file that was moved away is not made anew: it would be empty, while other connections use the old one.
        if engine.url.database is not None:
            given[0], options["uri"] = f"file:{quote(os.fsencode(given[0]))}?mode=rw", True

    @event.listens_for(engine, "connect")
    def connected(connection: Any, record: Any) -> None:
        connection.isolation_level = None  # Python's own BEGIN would leave reads outside the transaction.
        switch_to_wal(connection)
        for pragma in ("secure_delete=ON", f"wal_autocheckpoint={LOG_PAGES}", "synchronous=NORMAL"):
            connection.execute(f"PRAGMA {pragma}")

    @event.listens_for(engine, "begin")
    def begin(db: Connection) -> None:
        # A writer takes its lock at once. If it read first, another writer could commit before it gets the lock.
        db.exec_driver_sql("BEGIN IMMEDIATE" if db.get_execution_options().get("holdfast_write") else "BEGIN")
