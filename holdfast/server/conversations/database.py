"""Where the store's database is: a SQLite file, PostgreSQL, or memory."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import sqlalchemy
from sqlalchemy import Connection, event
from sqlalchemy.engine import Engine
from sqlalchemy.exc import ArgumentError, OperationalError
from sqlalchemy.pool import StaticPool

MEMORY = "memory"
BUSY_SECONDS = 30.0
DatabaseFailed = OperationalError
"""What a database raises that has no room, is locked or cannot be reached."""


def data_directory() -> Path:
    """Where a user's programs keep their data."""
    given = os.environ.get("XDG_DATA_HOME")
    return (Path(given) if given else Path.home() / ".local" / "share") / "holdfast"


def place(store: str | None) -> str:
    """Where the store is that a configuration asks for."""
    return store or str(data_directory() / "conversations.sqlite")


def shown(where: str) -> str:
    """A place as it may be shown: a URL without its password."""
    try:
        return sqlalchemy.make_url(where).render_as_string(hide_password=True) if "://" in where else where
    except ArgumentError:
        return "a database"


def connect(where: str) -> Engine:
    """An engine for a SQLite file, a database's URL, or `memory`. Raises ValueError, OSError, SQLAlchemyError."""
    if where == MEMORY:
        engine = sqlalchemy.create_engine("sqlite://", poolclass=StaticPool, connect_args={"check_same_thread": False})
    elif "://" not in where:
        path = Path(where).expanduser()
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        # Nobody else's business; SQLite gives its side files the same rights.
        os.close(os.open(path, os.O_RDWR | os.O_CREAT, 0o600))
        engine = sqlalchemy.create_engine(
            sqlalchemy.URL.create("sqlite", database=str(path)),
            connect_args={"timeout": BUSY_SECONDS, "check_same_thread": False},
        )
    else:
        url = sqlalchemy.make_url(where)
        if url.drivername in ("postgres", "postgresql"):
            url = url.set(drivername="postgresql+psycopg")
        if not url.drivername.startswith(("sqlite", "postgresql")):
            raise ValueError(f"{url.drivername} is not supported; give sqlite:///FILE or postgresql://…")
        engine = sqlalchemy.create_engine(url, pool_pre_ping=True)
    if engine.dialect.name == "sqlite":
        _prepare_sqlite(engine)
    return engine


def _prepare_sqlite(engine: Engine) -> None:
    """Write-ahead logging, every commit on the disk, and transactions that begin where we say."""

    @event.listens_for(engine, "connect")
    def connected(connection: Any, record: Any) -> None:
        connection.isolation_level = None  # Python's own BEGIN would leave reads outside the transaction
        for pragma in ("journal_mode=WAL", "synchronous=FULL", "secure_delete=ON"):
            connection.execute(f"PRAGMA {pragma}")

    @event.listens_for(engine, "begin")
    def begin(db: Connection) -> None:
        # A writer takes its lock at once: one that reads first could find that another has written meanwhile.
        db.exec_driver_sql("BEGIN IMMEDIATE" if db.get_execution_options().get("holdfast_write") else "BEGIN")
