"""Bulk rows for a store of millions of conversations: drawn messages, written past the API into the schema's tables.

Half of the conversations belong to one tenant, and the others to a thousand tenants. Each conversation has a title and
two messages, and one in ten has a turn. The words are drawn from 20,000, the common ones more often. Each batch is one
transaction, so a filling that was stopped goes on with the next one.
"""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from sqlalchemy import Connection, func, insert, select, text
from sqlalchemy.schema import CreateIndex

from holdfast.server.conversations.database import conversations, items, threads, turns
from holdfast.server.conversations.search_index import CONVERSATIONS, PLACES, WORDS_INDEX, indexed, tenants
from holdfast.server.conversations.store import Store
from holdfast.server.conversations.words import joined, words_of
from holdfast.server.replies import encode

LARGE = "large"
OTHERS = 1000
AT_ONCE = 20_000
"""Number of conversations that one transaction stores."""
RARE = "quokka"
"""Word in one of 10,000 conversations."""
DAY = 86400.0
TEXTS = 20_000
"""Number of texts from which a message's text is drawn."""
SQLITE_FILLING = (
    "PRAGMA synchronous=OFF", "PRAGMA secure_delete=OFF", "PRAGMA cache_size=-1500000",
    "PRAGMA wal_autocheckpoint=100000", "INSERT INTO search_text (search_text, rank) VALUES ('hashsize', 134217728)",
    "INSERT INTO search_text (search_text, rank) VALUES ('automerge', 8)",
)  # fmt: skip
"""Settings of the filling connection: nothing is flushed, and the index's words are sorted in memory."""
HASH_SIZE = 1 << 20
"""FTS5's own `hashsize` in bytes."""


def name(number: int) -> str:
    """Return the id of a conversation. The ids are in no order, as real ones."""
    return f"conv_{number * 2654435761 % (1 << 32):08x}{number:08x}"


def tenant_of(number: int) -> str:
    """Return the tenant of a conversation."""
    return LARGE if number % 2 == 0 else f"tenant{number // 2 % OTHERS}"


class Text(NamedTuple):
    """A text and its words, as the index of a search holds them."""

    said: str
    words: frozenset[str]


class Writer:
    """Draws messages of a number of words."""

    def __init__(self, draw: random.Random, words: int) -> None:
        self._draw = draw
        letters = "abcdefghijklmnopqrstuvwxyz"
        known = ["the", *("".join(draw.choices(letters, k=draw.randint(3, 9))) for _ in range(20_000))]
        weights = list(itertools.accumulate(1 / (rank + 1) for rank in range(len(known))))
        said = (" ".join(draw.choices(known, cum_weights=weights, k=words)) for _ in range(TEXTS))
        self._texts = [Text(each, frozenset(words_of(each))) for each in said]

    def text(self) -> Text:
        """Return one of the texts."""
        return self._draw.choice(self._texts)

    def message(self, id: str, role: str) -> dict[str, Any]:
        """Return a message with one of the texts."""
        return message(id, role, self.text().said)


def message(id: str, role: str, said: str) -> dict[str, Any]:
    """Return a message in the API's shape."""
    return {"id": id, "type": "message", "role": role, "content": [{"type": "input_text", "text": said}]}


class Rows(NamedTuple):
    """Rows of some conversations, by table, each with all columns in the table's order."""

    threads: list[tuple[Any, ...]]
    conversations: list[tuple[Any, ...]]
    items: list[tuple[Any, ...]]
    turns: list[tuple[Any, ...]]
    search_conversations: list[tuple[Any, ...]]
    documents: list[tuple[int, Sequence[str]]]
    """Number and words of each document of the index."""


def rows_of(numbers: Iterable[int], writer: Writer, now: float) -> Rows:
    """Return the rows that the API's calls would have stored for these conversations, in the order of their ids."""
    rows = Rows([], [], [], [], [], [])
    for number in sorted(numbers, key=name):
        id, tenant, title = name(number), tenant_of(number), f"number {number}"
        of_tenant = 1 if tenant == LARGE else int(tenant.removeprefix("tenant")) + 2
        first = (of_tenant * CONVERSATIONS + number + 1) * PLACES
        asked, answered = writer.text(), writer.text()
        rare = (RARE,) if number % 10_000 == 0 else ()
        said = [
            message(f"msg_{number}_0", "user", " ".join((asked.said, *rare))),
            message(f"msg_{number}_1", "assistant", answered.said),
        ]
        blobs = [encode(each) for each in said]
        rows.documents.append((first, ("number", str(number))))
        rows.documents.append((first + 1, (*asked.words, *rare)))
        rows.documents.append((first + 2, tuple(answered.words)))
        active = now - DAY + number / 1000
        rows.threads.append((id, tenant, active, sum(map(len, blobs))))
        head = f"resp_{number}" if number % 10 == 0 else None
        rows.conversations.append((id, id, tenant, int(now), encode({"title": title}), head))
        rows.items.extend((id, at, each["id"], blob) for at, (each, blob) in enumerate(zip(said, blobs, strict=True)))
        rows.search_conversations.append((number + 1, id, of_tenant))
        if head is not None:
            answer = {"id": head, "status": "completed", "created_at": 0, "metadata": {}, "output": said[1:]}
            rows.turns.append(
                (head, id, tenant, None, True, "completed", encode(answer), encode(said[:1]), b"[]", 0,
                 b"\0" * 400, 0, b"")
            )  # fmt: skip
    return rows


TABLES = (threads, conversations, items, turns, indexed)


def fill(store: Store, count: int, writer: Writer, report: Callable[[int], None] = lambda there: None) -> float:
    """Store conversations until there are `count`. Returns the seconds that this took.

    `report` is called with the number of conversations after each transaction.
    """
    began, there = time.perf_counter(), stored(store)
    if there < count:
        make = SqliteFilling if store.database.engine.dialect.name == "sqlite" else PostgresFilling
        filling = make(store)
        for first in range(there, count, AT_ONCE):
            last = min(count, first + AT_ONCE)
            filling.put(rows_of(range(first, last), writer, time.time()))
            report(last)
        filling.finish()
    return time.perf_counter() - began


def stored(store: Store) -> int:
    """Return the number of conversations that fillings have stored. Gives the tenants their numbers at first."""
    with store.database.write() as db:
        there = int(db.execute(select(func.max(indexed.c.number))).scalar() or 0)
        if not there:
            names = [LARGE, *(f"tenant{number}" for number in range(OTHERS))]
            db.execute(insert(tenants), [{"number": number, "tenant": each} for number, each in enumerate(names, 1)])
    return there


class SqliteFilling:
    """Fills a SQLite file over one connection that flushes nothing."""

    def __init__(self, store: Store) -> None:
        self._connection = store.database.engine.raw_connection()
        for setting in SQLITE_FILLING:
            self._connection.cursor().execute(setting)

    def put(self, rows: Rows) -> None:
        """Store rows in one transaction."""
        cursor = self._connection.cursor()
        cursor.execute("BEGIN IMMEDIATE")
        for table, some in zip(TABLES, rows, strict=False):
            places = ", ".join("?" * len(table.columns))
            cursor.executemany(f"INSERT INTO {table.name} VALUES ({places})", some)
        documents = sorted((number, joined(words)) for number, words in rows.documents)
        cursor.executemany("INSERT INTO search_text (rowid, words) VALUES (?, ?)", documents)
        cursor.execute("COMMIT")

    def finish(self) -> None:
        """Bring the file to the state of one that a server wrote, and gather the statistics of its indexes."""
        cursor = self._connection.cursor()
        cursor.execute("INSERT INTO search_text (search_text, rank) VALUES ('hashsize', ?)", (HASH_SIZE,))
        cursor.execute("INSERT INTO search_text (search_text, rank) VALUES ('automerge', 0)")
        cursor.execute("PRAGMA analysis_limit=1000")
        cursor.execute("ANALYZE")
        cursor.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
        self._connection.invalidate()  # No other user gets a connection that flushes nothing.
        self._connection.close()


class PostgresFilling:
    """Fills a PostgreSQL database by COPY, without the indexes that no constraint needs."""

    def __init__(self, store: Store) -> None:
        self._engine = store.database.engine
        with self._engine.begin() as db:
            for index in self._indexes():
                index.drop(db, checkfirst=True)
            db.execute(text("DROP INDEX IF EXISTS search_words"))

    def _indexes(self) -> Iterator[Any]:
        for table in (threads, conversations, items, turns):
            yield from table.indexes

    def put(self, rows: Rows) -> None:
        """Store rows in one transaction."""
        with self._engine.begin() as db:
            db.exec_driver_sql("SET LOCAL synchronous_commit TO OFF")
            for table, some in zip(TABLES, rows, strict=False):
                self._copy(db, table.name, [column.name for column in table.columns], some)
            documents = sorted((number, _vector(number, words)) for number, words in rows.documents)
            self._copy(db, "search_text", ["number", "words"], documents)

    def _copy(self, db: Connection, table: str, columns: Sequence[str], rows: Iterable[tuple[Any, ...]]) -> None:
        driver = db.connection.dbapi_connection
        assert driver is not None
        with driver.cursor() as cursor, cursor.copy(f"COPY {table} ({', '.join(columns)}) FROM STDIN") as copy:
            for row in rows:
                copy.write_row(row)

    def finish(self) -> None:
        """Create the indexes, let the sequences go on after the last numbers, and gather statistics."""
        with self._engine.begin() as db:
            db.exec_driver_sql("SET LOCAL maintenance_work_mem TO '512MB'")
            db.exec_driver_sql("SET LOCAL max_parallel_maintenance_workers TO 0")
            for index in self._indexes():
                db.execute(CreateIndex(index))
            db.exec_driver_sql(WORDS_INDEX)
            for table in (indexed, tenants):
                last = db.execute(select(func.max(table.c.number))).scalar_one()
                moved = text(f"SELECT setval(pg_get_serial_sequence('{table.name}', 'number'), :last)")
                db.execute(moved, {"last": last})
        with self._engine.connect().execution_options(isolation_level="AUTOCOMMIT") as db:
            db.exec_driver_sql("VACUUM (ANALYZE)")
            db.exec_driver_sql("CHECKPOINT")


def _vector(number: int, words: Iterable[str]) -> str:
    """Return a document as PostgreSQL writes it. The words are of letters and digits, which need no quotes."""
    return " ".join(sorted({f"'#{number // (PLACES * CONVERSATIONS)}'", *words}))
