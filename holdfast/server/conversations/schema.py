"""The store's tables, and the steps that bring an older database up to date."""

from __future__ import annotations

from collections.abc import Callable

from sqlalchemy import (
    BigInteger,
    Boolean,
    Column,
    Connection,
    Float,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    String,
    Table,
    UniqueConstraint,
    func,
    insert,
    select,
)

NAME = String(64)
tables = MetaData()

versions = Table("versions", tables, Column("version", Integer, primary_key=True))
"""One row for each step that was taken; the highest is the database's version."""

threads = Table(
    "threads",
    tables,
    Column("id", NAME, primary_key=True),
    Column("tenant", NAME, nullable=False),
    Column("active", Float, nullable=False, index=True),
    Column("bytes", BigInteger, nullable=False),
)
"""All that grew from one first turn, or one conversation: kept whole or dropped whole. `active` is its last turn."""

by_tenant = Index("threads_by_tenant", threads.c.tenant, threads.c.active)
"""Finds what a tenant has been idle with for longest."""

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
"""A response and what it was made from. Its tokens are the parent's up to `start`, then its own.

A turn that is not visible was deleted, or never meant to be found, and stays for those that build on it.
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
"""`head` is the turn whose context and output are the conversation's items; none after these were edited by hand."""

items = Table(
    "items",
    tables,
    Column("conversation", NAME, primary_key=True),
    Column("position", Integer, primary_key=True),
    Column("id", NAME, nullable=False),
    Column("item", LargeBinary, nullable=False),
    UniqueConstraint("conversation", "id"),
)


def _turns(db: Connection) -> None:
    threads.create(db)
    turns.create(db)


def _conversations(db: Connection) -> None:
    conversations.create(db)
    items.create(db)


def _by_tenant(db: Connection) -> None:
    by_tenant.create(db, checkfirst=True)  # a new table comes with it


STEPS: tuple[Callable[[Connection], None], ...] = (_turns, _conversations, _by_tenant)
"""Step i takes a database from version i to i + 1. A table that changes later keeps its old form in its old step."""


def migrate(db: Connection) -> None:
    """Take the steps that the database lacks, within the caller's transaction: all or none.

    Raises ValueError for a database that a newer Holdfast wrote.
    """
    versions.create(db, checkfirst=True)
    version = db.execute(select(func.max(versions.c.version))).scalar() or 0
    if version > len(STEPS):
        raise ValueError(
            f"its schema has version {version} and this Holdfast knows up to {len(STEPS)}; use a newer Holdfast"
        )
    for number, step in enumerate(STEPS[version:], version + 1):
        step(db)
        db.execute(insert(versions).values(version=number))
