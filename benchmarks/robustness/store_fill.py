"""Fills an empty store with millions of conversations: the database's own SQL makes the rows that the API would store.

Half of the conversations belong to one tenant, and the others to a thousand tenants. Each conversation has a title and
two messages, and one in ten has a turn. The words are drawn from 20,000, the common ones more often, and two messages
in 20,000 have the same text. Indexes are built at the end by sorting, and counters are counted then. A fill is whole
or leaves nothing: a SQLite file is filled under another name, and PostgreSQL is filled within one transaction.
"""

from __future__ import annotations

import itertools
import os
import random
import sqlite3
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from sqlalchemy import Connection, Table, text
from sqlalchemy.dialects.sqlite.base import SQLiteDialect

from holdfast.server.conversations.counters import counters
from holdfast.server.conversations.database import conversations, items, threads, turns
from holdfast.server.conversations.list_rows import PREVIEW, listed
from holdfast.server.conversations.search_index import CONVERSATIONS, PLACES, indexed
from holdfast.server.conversations.store import Store
from holdfast.server.conversations.words import joined, words_of

LARGE = "large"
OTHERS = 1000
"""Number of the other tenants."""
RARE = "quokka"
"""Word in one of 10,000 conversations."""
DAY = 86400.0
TEXTS = 20_000
"""Number of texts from which a message's text is drawn."""
TOKENS = 100
"""Number of tokens of a turn. All have the id 1."""
SORT_BYTES = 1 << 30
"""Memory in which an index is sorted, and the size of SQLite's page cache, in bytes."""
HASH_SIZE = 1 << 27
"""Bytes of words that FTS5 collects in memory before it writes them."""
FTS_DEFAULT = 1 << 20
"""FTS5's own number of these bytes."""


def name(number: int) -> str:
    """Return the id of a conversation. The ids are in no order, as real ones."""
    return f"conv_{number * 2654435761 % (1 << 32):08x}{number:08x}"


def tenant_of(number: int) -> str:
    """Return the tenant of a conversation."""
    return LARGE if number % 2 == 0 else f"tenant{number // 2 % OTHERS}"


class Writer:
    """Draws texts of a number of words."""

    def __init__(self, draw: random.Random, words: int) -> None:
        self._draw = draw
        letters = "abcdefghijklmnopqrstuvwxyz"
        known = ["the", *("".join(draw.choices(letters, k=draw.randint(3, 9))) for _ in range(20_000))]
        weights = list(itertools.accumulate(1 / (rank + 1) for rank in range(len(known))))
        self.texts = [" ".join(draw.choices(known, cum_weights=weights, k=words)) for _ in range(TEXTS)]

    def message(self, id: str, role: str) -> dict[str, Any]:
        """Return a message with one of the texts."""
        content = [{"type": "input_text", "text": self._draw.choice(self.texts)}]
        return {"id": id, "type": "message", "role": role, "content": content}


class Dialect(NamedTuple):
    """Expressions that two kinds of SQL write differently."""

    hex8: str
    """Eight hexadecimal digits of `{x}`."""
    blob: str
    """Bytes of the text `{x}`."""
    numbers: str
    """Subquery of the numbers `n` from 0 on, below `{end}`."""
    tokens: str
    """Bytes of TOKENS tokens."""
    floor: str
    """The whole number below `{x}`."""


SQLITE = Dialect(
    "printf('%08x', {x})",
    "CAST({x} AS BLOB)",
    "(WITH RECURSIVE k (n) AS (SELECT 0 WHERE {end} > 0 UNION ALL SELECT n + 1 FROM k WHERE n + 1 < {end}) "
    "SELECT n FROM k)",
    f"X'{'01000000' * TOKENS}'",
    "CAST({x} AS INTEGER)",
)
POSTGRESQL = Dialect(
    "lpad(to_hex({x}), 8, '0')",
    "convert_to({x}, 'UTF8')",
    "(SELECT n FROM generate_series(0::bigint, {end} - 1) AS n)",
    f"'\\x{'01000000' * TOKENS}'::bytea",
    "floor({x})::bigint",
)


class Rows(NamedTuple):
    """SQL of the rows of each table: expressions of a conversation's number `n` and of its texts."""

    sql: Dialect
    count: int
    """Number of conversations."""
    began: float
    """Time of the first conversation's last activity. The others follow 1 ms after each other."""

    @property
    def id(self) -> str:
        """Id of a conversation: `name`."""
        scattered = self.sql.hex8.format(x="(n * 2654435761) & 4294967295")
        return f"'conv_' || {scattered} || {self.sql.hex8.format(x='n')}"

    @property
    def tenant(self) -> str:
        """Tenant of a conversation: `tenant_of`."""
        return f"CASE WHEN n % 2 = 0 THEN '{LARGE}' ELSE 'tenant' || (n / 2 % {OTHERS}) END"

    @property
    def tenant_number(self) -> str:
        """Number of a conversation's tenant in the index of a search."""
        return f"CASE WHEN n % 2 = 0 THEN 1 ELSE n / 2 % {OTHERS} + 2 END"

    @property
    def active(self) -> str:
        """Time of a conversation's last activity in seconds."""
        return f"({self.began!r} + CAST(n AS FLOAT) / 1000)"

    @property
    def title(self) -> str:
        """A conversation's metadata as text."""
        return "'{\"title\":\"number ' || n || '\"}'"

    @property
    def rare(self) -> str:
        """Text at the end of the first message."""
        return f"CASE WHEN n % 10000 = 0 THEN ' {RARE}' ELSE '' END"

    def message(self, place: int) -> str:
        """Return one of the two messages as text."""
        role, said = (("user", f"asked.said || {self.rare}"), ("assistant", "answered.said"))[place]
        before = f'_{place}","type":"message","role":"{role}","content":[{{"type":"input_text","text":"'
        return f"""'{{"id":"msg_' || n || '{before}' || {said} || '"}}]}}'"""

    @property
    def response(self) -> str:
        """A turn's response as text."""
        fields = '","status":"completed","created_at":0,"metadata":{},"output":['
        return f"""'{{"id":"resp_' || n || '{fields}' || {self.message(1)} || ']}}'"""

    @property
    def source(self) -> str:
        """All conversations with their texts, in the order of their creation."""
        return self.texts(f"{self.sql.numbers.format(end=self.count)} AS numbers")

    @staticmethod
    def texts(numbers: str) -> str:
        """Return conversations `n` with their texts."""
        asked = f"asked.number = ((n * 2654435761) & 4294967295) / 4096 % {TEXTS}"
        answered = f"answered.number = ((n * 2246822519) & 4294967295) / 4096 % {TEXTS}"
        return (
            f"{numbers} CROSS JOIN fill_texts AS asked CROSS JOIN fill_texts AS answered WHERE {asked} AND {answered}"
        )

    def by_tenant(self, order: str) -> Iterator[str]:
        """Yield conversations with their texts, one tenant after another, each in the order of creation."""
        yield self.texts(
            f"(SELECT 2 * n AS n FROM {self.sql.numbers.format(end=(self.count + 1) // 2)} AS k) AS numbers"
        )
        each = f"(SELECT number - 2 AS own FROM search_tenants WHERE number > 1 ORDER BY {order} LIMIT {OTHERS})"
        several = self.sql.numbers.format(end=self.count // (2 * OTHERS) + 1)
        n = f"2 * own + 1 + {2 * OTHERS} * n"
        yield self.texts(
            f"(SELECT {n} AS n FROM {each} AS others CROSS JOIN {several} AS k WHERE {n} < {self.count}) AS numbers"
        )

    def of_tables(self) -> Iterator[tuple[Table, str]]:
        """Yield each table with the query of its rows, in the order of its columns."""
        blob, title, first, second = self.sql.blob, self.title, self.message(0), self.message(1)
        created = self.sql.floor.format(x=self.active)
        of_turn = f"length({self.response}) + length({first}) + 2 + 2 + {4 * TOKENS}"  # With the brackets of two lists.
        size = f"length({title}) + length({first}) + length({second}) + CASE WHEN n % 10 = 0 THEN {of_turn} ELSE 0 END"
        head = "CASE WHEN n % 10 = 0 THEN 'resp_' || n END"
        own = f"{self.id}, {self.tenant}"
        yield threads, f"SELECT {own}, {self.active}, {size} FROM {self.source}"
        about = f"{created}, {blob.format(x=title)}"
        yield conversations, f"SELECT {self.id}, {self.id}, {self.tenant}, {about}, {head} FROM {self.source}"
        item = f"CASE place WHEN 0 THEN {first} ELSE {second} END"
        yield (
            items,
            (
                f"SELECT {self.id}, place, 'msg_' || n || '_' || place, {blob.format(x=item)} "
                f"FROM {self.texts(f'{self.sql.numbers.format(end=self.count)} AS numbers CROSS JOIN fill_places')}"
            ),
        )
        tenth = f"(SELECT 10 * n AS n FROM {self.sql.numbers.format(end=(self.count + 9) // 10)} AS k) AS numbers"
        asked, nothing, empty = f"'[' || {first} || ']'", blob.format(x="''"), blob.format(x="'[]'")
        yield (
            turns,
            (
                f"SELECT 'resp_' || n, {own}, NULL, TRUE, 'completed', {blob.format(x=self.response)}, "
                f"{blob.format(x=asked)}, {empty}, 0, {self.sql.tokens}, 0, {nothing} FROM {self.texts(tenth)}"
            ),
        )
        yield indexed, f"SELECT n + 1, {self.id}, {self.tenant_number} FROM {self.source}"
        said = blob.format(x=f"substr(asked.said || {self.rare}, 1, {PREVIEW})")
        for source in self.by_tenant("tenant"):
            yield listed, f"SELECT {self.tenant}, {self.active}, {self.id}, {self.id}, {about}, {said} FROM {source}"

    def documents(self, words: Sequence[str]) -> Iterator[str]:
        """Yield queries of the documents of a search, in the order of their numbers. `words` is for each place."""
        number = f"({self.tenant_number} * {CONVERSATIONS} + n + 1) * {PLACES} + place"
        said = "CASE place " + " ".join(f"WHEN {place} THEN {each}" for place, each in enumerate(words)) + " END"
        for source in self.by_tenant("number"):
            documents = source.replace(" AS numbers", " AS numbers CROSS JOIN fill_documents", 1)
            yield f"SELECT {number}, {said} FROM {documents}"


def fill(where: str, count: int, writer: Writer, opened: Callable[[str], Store]) -> float:
    """Fill a store that `opened` opens, unless it has `count` conversations. Returns the seconds that this took.

    Raises ValueError if it has others.
    """
    file = None if "://" in where else Path(where)
    if file is None or file.exists():
        with closing(opened(where)) as store:
            there = stored(store)
            if there == count:
                return 0.0
            if there:
                raise ValueError(
                    f"the store has {there:,} conversations, and {count:,} are wanted; begin with an empty one"
                )
            if file is None:
                began = time.perf_counter()
                fill_postgresql(store, count, writer)
                return time.perf_counter() - began
    began = time.perf_counter()
    assert file is not None
    building = file.with_name(f"{file.name}.filling")
    for each in building.parent.glob(f"{building.name}*"):  # Files of a fill that was ended.
        each.unlink()
    opened(str(building)).close()
    fill_sqlite(building, count, writer)
    for end in ("-wal", "-shm"):
        file.with_name(f"{file.name}{end}").unlink(missing_ok=True)
    building.replace(file)
    for each in building.parent.glob(f"{building.name}*"):  # Files of locks.
        each.unlink()
    return time.perf_counter() - began


def stored(store: Store) -> int:
    """Return the number of conversations."""
    with store.database.read() as db:
        return int(db.execute(text("SELECT count(*) FROM search_conversations")).scalar_one())


def fill_sqlite(file: Path, count: int, writer: Writer) -> None:
    """Fill a SQLite file that nobody else uses, and that is lost if this ends early."""
    rows = Rows(SQLITE, count, time.time() - DAY)
    with closing(sqlite3.connect(file, isolation_level=None)) as db:
        for setting in ("journal_mode=OFF", "synchronous=OFF", "temp_store=FILE", f"cache_size=-{SORT_BYTES >> 10}"):
            db.execute(f"PRAGMA {setting}")
        _set_fts(db, hashsize=HASH_SIZE, automerge=8)
        db.execute("CREATE TEMP TABLE fill_texts (number INTEGER PRIMARY KEY, said TEXT, words TEXT)")
        db.executemany(
            "INSERT INTO fill_texts VALUES (?, ?, ?)",
            [(number, said, joined(words_of(said))) for number, said in enumerate(writer.texts)],
        )
        db.execute("CREATE TEMP TABLE fill_places AS SELECT 0 AS place UNION ALL SELECT 1")
        db.execute("CREATE TEMP TABLE fill_documents AS SELECT * FROM fill_places UNION ALL SELECT 2")
        db.execute("BEGIN")
        db.executemany("INSERT INTO search_tenants (tenant) VALUES (?)", [(each,) for each in tenants_of(count)])
        triggers = db.execute("SELECT name, sql FROM sqlite_schema WHERE type = 'trigger'").fetchall()
        for trigger, _ in triggers:
            db.execute(f"DROP TRIGGER {trigger}")
        for table, query in rows.of_tables():
            if table is listed:  # Its rows are in the order of its key.
                db.execute(f"INSERT INTO listed {query}")
            else:
                with _sorted_later(db, table):
                    db.execute(f"INSERT INTO {table.name} {query}")
        for query in rows.documents(("n || ' number'", f"asked.words || {rows.rare}", "answered.words")):
            db.execute(f"INSERT INTO search_text (rowid, words) {query}")
        db.execute(f"INSERT INTO {COUNTED}")
        for _, sql in triggers:
            db.execute(sql)
        db.execute("COMMIT")
        _set_fts(db, hashsize=FTS_DEFAULT, automerge=0)
        db.execute("PRAGMA journal_mode=WAL")
    with file.open("rb") as written:  # Or else the first flush of a turn would take as long as the whole file.
        os.fsync(written.fileno())


COUNTED = f"""{counters.name} (tenant, shard, threads, conversations, items, bytes)
    SELECT tenant, 0, count(*), count(*), 2 * count(*), sum(bytes) FROM threads GROUP BY tenant"""
"""Counters of all tenants, from the threads. Each conversation is a thread, and has two items."""


def tenants_of(count: int) -> list[str]:
    """Return the tenants of a number of conversations, in the order of their first ones."""
    return [LARGE, *(f"tenant{number}" for number in range(min(OTHERS, count // 2)))]


def _set_fts(db: sqlite3.Connection, **settings: int) -> None:
    db.executemany("INSERT INTO search_text (search_text, rank) VALUES (?, ?)", settings.items())


@contextmanager
def _sorted_later(db: sqlite3.Connection, table: Table) -> Iterator[None]:
    """Let a table of SQLite be without its indexes within the context, and then sort them.

    SQLite cannot drop the index of a key. So a table without keys takes the table's place meanwhile. At the end the
    schema gets the table's own statement, and the indexes get the names that SQLite gives to those of keys.
    """
    name = table.name
    own = db.execute("SELECT name, sql FROM sqlite_schema WHERE tbl_name = ? AND type = 'index'", (name,)).fetchall()
    keys = {index: _columns(db, index) for index, sql in own if sql is None}
    (statement,) = db.execute("SELECT sql FROM sqlite_schema WHERE name = ?", (name,)).fetchone()
    db.execute(f"DROP TABLE {name}")
    sqlite = SQLiteDialect()
    columns = ", ".join(
        f"{column.name} INTEGER PRIMARY KEY" if column is table.autoincrement_column
        else f"{column.name} {column.type.compile(sqlite)}"
        for column in table.columns
    )  # fmt: skip
    db.execute(f"CREATE TABLE {name} ({columns})")
    yield
    for number, (_, columns) in enumerate(keys.items()):
        db.execute(f"CREATE UNIQUE INDEX fill_{name}_{number} ON {name} ({columns})")
    for _, sql in own:
        if sql is not None:
            db.execute(sql)
    if table.autoincrement_column is not None:
        db.execute(f"INSERT INTO sqlite_sequence SELECT '{name}', max({table.autoincrement_column.name}) FROM {name}")
    db.execute("PRAGMA writable_schema=ON")
    db.execute("UPDATE sqlite_schema SET sql = ? WHERE name = ?", (statement, name))
    for number, index in enumerate(keys):
        db.execute("UPDATE sqlite_schema SET name = ?, sql = NULL WHERE name = ?", (index, f"fill_{name}_{number}"))
    db.execute("PRAGMA writable_schema=RESET")


def _columns(db: sqlite3.Connection, index: str) -> str:
    return ", ".join(column for _, _, column in db.execute(f"PRAGMA index_info({index})"))


def fill_postgresql(store: Store, count: int, writer: Writer) -> None:
    """Fill an empty PostgreSQL database. With `wal_level=minimal` its log does not get the rows."""
    rows = Rows(POSTGRESQL, count, time.time() - DAY)
    filled = [threads, conversations, items, turns, indexed, listed]
    names = [*(table.name for table in filled), "search_text"]
    with store.database.engine.begin() as db:
        for setting in (
            f"maintenance_work_mem TO '{SORT_BYTES >> 20}MB'", "work_mem TO '256MB'", "synchronous_commit TO OFF",
            "max_parallel_maintenance_workers TO 0", "max_parallel_workers_per_gather TO 0",
        ):  # fmt: skip
            _run(db, f"SET LOCAL {setting}")
        _run(db, "CREATE TEMP TABLE fill_texts (number bigint PRIMARY KEY, said text, words text[]) ON COMMIT DROP")
        db.execute(
            text("INSERT INTO fill_texts VALUES (:number, :said, :words)"),
            [{"number": n, "said": said, "words": sorted(words_of(said))} for n, said in enumerate(writer.texts)],
        )
        for table, most in (("fill_places", 1), ("fill_documents", 2)):
            _run(db, f"CREATE TEMP TABLE {table} ON COMMIT DROP AS SELECT * FROM generate_series(0, {most}) AS place")
        for table in ("fill_texts", "fill_places", "fill_documents"):
            _run(db, f"ANALYZE {table}")
        _run(db, f"TRUNCATE {', '.join(names)}")
        db.execute(
            text("INSERT INTO search_tenants (tenant) VALUES (:tenant)"), [{"tenant": t} for t in tenants_of(count)]
        )
        again = [statement for each in names for statement in _dropped(db, each)]
        for table, query in rows.of_tables():
            _run(db, f"INSERT INTO {table.name} {query}")
        of_tenant = f"array['#' || ({rows.tenant_number})"
        rare = f"CASE WHEN n % 10000 = 0 THEN array['{RARE}'] END"
        said = [f"{of_tenant}] || {each}" for each in (f"asked.words || {rare}", "answered.words")]
        for query in rows.documents((f"{of_tenant}, 'number', n::text]", *said)):
            made = f"SELECT number, array_to_tsvector(words) FROM ({query}) AS made (number, words)"
            _run(db, f"INSERT INTO search_text {made}")
        for statement in again:
            _run(db, statement)
        _run(db, f"INSERT INTO {COUNTED}")
        last = "SELECT setval(pg_get_serial_sequence('search_conversations', 'number'), max(number)) FROM "
        _run(db, f"{last} search_conversations")
    with store.database.engine.connect().execution_options(isolation_level="AUTOCOMMIT") as db:
        db.exec_driver_sql("VACUUM (ANALYZE)")
        db.exec_driver_sql("CHECKPOINT")


def _dropped(db: Connection, table: str) -> list[str]:
    """Drop a table's keys and indexes, and let its triggers rest. Returns the statements that undo this."""
    of_table = f"'{table}'::regclass"
    found = f"FROM pg_constraint WHERE conrelid = {of_table} AND contype IN ('p', 'u')"
    keys = _run(db, f"SELECT conname, pg_get_constraintdef(oid) {found}")
    for key, _ in keys:
        _run(db, f"ALTER TABLE {table} DROP CONSTRAINT {key}")
    indexes = _run(
        db, f"SELECT indexrelid::regclass, pg_get_indexdef(indexrelid) FROM pg_index WHERE indrelid = {of_table}"
    )
    for index, _ in indexes:
        _run(db, f"DROP INDEX {index}")
    _run(db, f"ALTER TABLE {table} DISABLE TRIGGER USER")
    return [
        *(f"ALTER TABLE {table} ADD CONSTRAINT {key} {definition}" for key, definition in keys),
        *(definition for _, definition in indexes),
        f"ALTER TABLE {table} ENABLE TRIGGER USER",
    ]


def _run(db: Connection, statement: str) -> list[Any]:
    """Execute a statement as it is, with its percent signs. Returns its rows."""
    driver: Any = db.connection.dbapi_connection
    with driver.cursor() as cursor:
        cursor.execute(statement)
        return list(cursor.fetchall()) if cursor.description else []
