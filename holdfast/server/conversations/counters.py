"""Counters: number of threads, conversations, items and bytes of each tenant, kept by the database's own triggers.

Triggers count within the transaction that changes the rows, whichever server runs it. A server of an older version,
which knows nothing of counters, keeps them right, too.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import Any, NamedTuple

import sqlalchemy
from sqlalchemy import BigInteger, Boolean, Column, Connection, Integer, Row, Table, func, insert, select, text, update

from holdfast.server.conversations.database import NAME, conversations, items, tables, threads
from holdfast.server.conversations.transactions import SHARDS

PIECE = 2000
"""Maximum number of rows that one transaction counts. It takes some 20 ms."""

counters = Table(
    "counters",
    tables,
    Column("tenant", NAME, primary_key=True),
    Column("shard", Integer, primary_key=True),
    Column("threads", BigInteger, nullable=False),
    Column("conversations", BigInteger, nullable=False),
    Column("items", BigInteger, nullable=False),
    Column("bytes", BigInteger, nullable=False),
)
"""Counters. A tenant's numbers are the sums over its shards."""

upkeep = Table(
    "upkeep",
    tables,
    Column("task", NAME, primary_key=True),
    Column("cursor", NAME, nullable=False),
    Column("done", Boolean, nullable=False),
)
"""Work through all rows of a table, in the order of their keys. `cursor` is the last key that was worked on."""

ADD = """
    ON CONFLICT (tenant, shard) DO UPDATE SET
    threads = counters.threads + excluded.threads, conversations = counters.conversations + excluded.conversations,
    items = counters.items + excluded.items, bytes = counters.bytes + excluded.bytes
"""
COLUMNS = "counters (tenant, shard, threads, conversations, items, bytes)"
_COUNT = text(f"INSERT INTO {COLUMNS} VALUES (:tenant, 0, :threads, :conversations, :items, :bytes) {ADD}")
_NOTHING = {"threads": 0, "conversations": 0, "items": 0, "bytes": 0}


class Counted(NamedTuple):
    """Columns of a table whose rows are counted, in SQL. `{row}` is the changed row."""

    key: str
    """Column in whose order the rows of an older store are counted."""
    tenant: str
    amounts: tuple[str, str, str, str]
    """Number of threads, conversations, items and bytes in one row."""


COUNTED = {
    "threads": Counted("id", "{row}.tenant", ("1", "0", "0", "{row}.bytes")),
    "conversations": Counted("id", "{row}.tenant", ("0", "1", "0", "0")),
    "items": Counted(
        "conversation",
        "(SELECT c.tenant FROM conversations AS c WHERE c.id = {row}.conversation)",
        ("0", "0", "1", "0"),
    ),
}
EVENTS = {"insert": ("new",), "delete": ("old",), "update": ("old", "new")}
"""By kind of change, the rows that it removes from the counters (`old`) and adds to them (`new`)."""


class Held(NamedTuple):
    """Number of stored objects of one tenant, and their size in bytes."""

    threads: int
    conversations: int
    items: int
    bytes: int


def create(db: Connection) -> None:
    """Create the counters with their triggers, unless they exist.

    The tables have no version in `versions`, because an older server works on a database that has them.
    """
    if sqlalchemy.inspect(db).has_table(counters.name):
        return
    counters.create(db)
    upkeep.create(db, checkfirst=True)
    make = _postgresql if db.dialect.name == "postgresql" else _sqlite
    for name, counted in COUNTED.items():
        begin_task(db, name, name)
        for event in EVENTS if name == "threads" else ("insert", "delete"):
            make(db, name, counted, event)


def begin_task(db: Connection, task: str, table: str) -> None:
    """Record a task over all rows of a table. In an empty table it is done at once."""
    there = db.execute(text(f"SELECT 1 FROM {table} LIMIT 1")).first()
    db.execute(insert(upkeep).values(task=task, cursor="", done=there is None))


def _sqlite(db: Connection, name: str, counted: Counted, event: str) -> None:
    """Create a trigger that counts each changed row, if the row's key was reached by the first count."""
    body = ""
    for row in EVENTS[event]:
        sign, tenant = "-" if row == "old" else "", counted.tenant.format(row=row)
        amounts = ", ".join(f"{sign}{amount.format(row=row)}" for amount in counted.amounts)
        body += f"INSERT INTO {COLUMNS} SELECT {tenant}, 0, {amounts} WHERE {tenant} IS NOT NULL {ADD};"
    first = EVENTS[event][0]
    reached = (
        f"EXISTS (SELECT 1 FROM upkeep AS u WHERE u.task = '{name}' AND (u.done OR u.cursor >= {first}.{counted.key}))"
    )
    db.exec_driver_sql(f"CREATE TRIGGER count_{event}_{name} AFTER {event} ON {name} WHEN {reached} BEGIN {body} END")


def _postgresql(db: Connection, name: str, counted: Counted, event: str) -> None:
    """Create a trigger that counts the rows of a statement whose keys were reached by the first count."""
    parts = []
    for row in EVENTS[event]:
        sign = "-" if row == "old" else ""
        amounts = ", ".join(
            f"{sign}{amount.format(row='r')} AS {column}"
            for amount, column in zip(counted.amounts, _NOTHING, strict=True)
        )
        parts.append(f"SELECT {counted.tenant.format(row='r')} AS tenant, {amounts}, r.{counted.key} FROM {row}_rows r")
    sums = ", ".join(f"sum({column})" for column in _NOTHING)
    function, tables = f"count_{event}_{name}", " ".join(f"{row} TABLE AS {row}_rows" for row in EVENTS[event])
    db.exec_driver_sql(
        f"CREATE FUNCTION {function}() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN "
        f"INSERT INTO {COLUMNS} SELECT changed.tenant, pg_backend_pid() %% {SHARDS}, {sums} "
        f"FROM ({' UNION ALL '.join(parts)}) AS changed, upkeep AS u WHERE changed.tenant IS NOT NULL "
        f"AND u.task = '{name}' AND (u.done OR u.cursor >= changed.{counted.key}) GROUP BY 1, 2 ORDER BY 1 {ADD}; "
        "RETURN NULL; END $$"
    )
    db.exec_driver_sql(
        f"CREATE TRIGGER {function} AFTER {event} ON {name} REFERENCING {tables} "
        f"FOR EACH STATEMENT EXECUTE FUNCTION {function}()"
    )


def held(db: Connection) -> dict[str, Held]:
    """Return what each tenant holds. Rows of an older store are missing until they are counted."""
    columns = counters.c
    sums = (func.sum(columns[name]).label(name) for name in _NOTHING)
    rows = db.execute(select(columns.tenant, *sums).group_by(columns.tenant))
    return {row.tenant: Held(**{name: int(row._mapping[name]) for name in _NOTHING}) for row in rows}


def sums(db: Connection) -> Held:
    """Return what all tenants hold together. It takes some 0.1 ms for each thousand tenants."""
    columns = (func.coalesce(func.sum(counters.c[name]), 0) for name in _NOTHING)
    return Held(*map(int, db.execute(select(*columns)).one()))


def complete(db: Connection) -> bool:
    """Whether all rows are counted. They are not in an older store, nor in one that no server has opened yet."""
    if not sqlalchemy.inspect(db).has_table(counters.name):
        return False
    return all(db.execute(select(upkeep.c.done).where(upkeep.c.task.in_(COUNTED))).scalars())


def recount(db: Connection) -> Held:
    """Return what the store holds by reading all rows, which takes seconds for each million."""

    def number(table: Table) -> int:
        return int(db.execute(select(func.count()).select_from(table)).scalar_one())

    size = db.execute(select(func.coalesce(func.sum(threads.c.bytes), 0))).scalar_one()
    return Held(number(threads), number(conversations), number(items), int(size))


def count_piece(db: Connection) -> bool:
    """Count some rows of an older store, within the caller's transaction. Returns whether there may be more."""
    for name, rows in (("threads", _threads), ("conversations", _conversations), ("items", _items)):
        task = locked_task(db, name, lock=name)
        if task.done:
            continue
        found = rows(db, task.cursor)
        sums: dict[str, Counter[str]] = defaultdict(Counter)
        for row in found:
            if row.tenant is not None:  # Items without a conversation belong to nobody.
                sums[row.tenant].update({column: int(row._mapping.get(column, 0)) for column in _NOTHING})
        for tenant, amounts in sorted(sums.items()):
            db.execute(_COUNT, {"tenant": tenant, **_NOTHING, **amounts})
        end_piece(db, name, found[-1].key if found else task.cursor, done=len(found) < PIECE)
        return True
    return False


def locked_task(db: Connection, task: str, lock: str = "") -> Row[tuple[str, str, bool]]:
    """Return a task, which no other server works on until the transaction ends.

    In PostgreSQL, no row of the table `lock` changes meanwhile, if there is one and the task has not ended.
    """
    row = db.execute(select(upkeep).where(upkeep.c.task == task).with_for_update()).one()
    if lock and not row.done and db.dialect.name == "postgresql":
        db.exec_driver_sql(f"LOCK TABLE {lock} IN SHARE ROW EXCLUSIVE MODE")
    return row


def end_piece(db: Connection, task: str, cursor: str, *, done: bool) -> None:
    """Record up to which key a task has come."""
    db.execute(update(upkeep).where(upkeep.c.task == task).values(cursor=cursor, done=done))


def _threads(db: Connection, cursor: str) -> Sequence[Any]:
    c = threads.c
    query = select(c.id.label("key"), c.tenant, c.bytes, sqlalchemy.literal(1).label("threads"))
    return db.execute(query.where(c.id > cursor).order_by(c.id).limit(PIECE)).all()


def _conversations(db: Connection, cursor: str) -> Sequence[Any]:
    c = conversations.c
    query = select(c.id.label("key"), c.tenant, sqlalchemy.literal(1).label("conversations"))
    return db.execute(query.where(c.id > cursor).order_by(c.id).limit(PIECE)).all()


def _items(db: Connection, cursor: str) -> Sequence[Any]:
    """Return the number of items of some conversations, each with its tenant."""
    key, count = items.c.conversation.label("key"), func.count().label("items")
    piece = select(key, count).where(key > cursor).group_by(key).order_by(key).limit(PIECE).subquery()
    query = select(piece.c.key, conversations.c.tenant, piece.c["items"]).join_from(
        piece, conversations, conversations.c.id == piece.c.key, isouter=True
    )
    return db.execute(query.order_by(piece.c.key)).all()
