"""The index of a search: which items hold which words. SQLite's FTS5, or a GIN index in PostgreSQL.

Each item, and each conversation's metadata, is a document. The number of a document is made of its tenant's number,
its conversation's number and its place in the conversation. So the documents of a tenant are one range of numbers,
those of a conversation are a range within it, and a search of one tenant reads no other tenant's documents.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Sequence
from typing import ClassVar, NamedTuple

import sqlalchemy
from sqlalchemy import (
    BigInteger,
    Boolean,
    Column,
    Connection,
    Integer,
    Table,
    Text,
    bindparam,
    delete,
    func,
    insert,
    select,
    text,
)
from sqlalchemy.dialects.postgresql import ARRAY

from holdfast.server.conversations.counters import begin_task, end_piece, locked_task, upkeep
from holdfast.server.conversations.database import NAME, conversations, items, tables
from holdfast.server.conversations.prepared import Prepared
from holdfast.server.conversations.words import item_text, joined, title_text, words_of

PLACES = 1 << 16
"""Number of documents of one conversation: its metadata, and its first 65,535 items. Later items are not indexed."""
CONVERSATIONS = 1 << 31
"""Number of conversations that a tenant's range has room for."""
RECENT = 2000
"""Number of a tenant's newest documents that PostgreSQL reads before it asks its index for all that match."""
TASK = "search"
"""Name of the task that indexes an older store."""
PIECE, PIECE_BYTES = 50, 1 << 18
"""Maximum number of conversations, and bytes of their items, after which a transaction of this task ends."""

WORDS_INDEX = "CREATE INDEX search_words ON search_text USING gin (words) WITH (fastupdate = off)"
"""PostgreSQL's index of words. Without fastupdate no single turn has to sort in the words of many earlier ones."""
APPLIED = 64
"""Number of documents that one transaction brings into SQLite's index. It takes some 5 ms."""
MOST_PENDING = 1024
"""Number of waiting documents from which on a turn itself brings APPLIED of them into the index."""
MERGED_PAGES = 32
"""Number of pages of 4 KiB that one transaction of upkeep merges. It takes some 3 ms."""
MOST_SEGMENTS = 64
"""Number of segments of the index after which they are merged at once, because upkeep has not kept up."""
NUMBER = BigInteger().with_variant(Integer, "sqlite")
"""Column type of numbers that the database gives."""

tenants = Table(
    "search_tenants",
    tables,
    Column("number", NUMBER, primary_key=True, autoincrement=True),
    Column("tenant", NAME, nullable=False, unique=True),
    sqlite_autoincrement=True,
)
"""Numbers of tenants."""

indexed = Table(
    "search_conversations",
    tables,
    Column("number", NUMBER, primary_key=True, autoincrement=True),
    Column("conversation", NAME, nullable=False, unique=True),
    Column("tenant", BigInteger, nullable=False),
    sqlite_autoincrement=True,
)
"""Conversations in the index. The later one was created, the higher is its number. `tenant` is its tenant's number."""

pending = Table(
    "search_pending",
    tables,
    Column("id", NUMBER, primary_key=True, autoincrement=True),
    Column("number", NUMBER, nullable=False, index=True),
    Column("words", Text, nullable=False),
    Column("added", Boolean, nullable=False),
)
"""Documents in SQLite that were added or removed, in this order, and that its index does not know yet."""

_NUMBERS = Prepared(
    select(indexed.c.tenant, indexed.c.number).where(indexed.c.conversation == bindparam("conversation"))
)

Document = tuple[int, Collection[str]]
"""Number of a document, and its words."""


class Places(NamedTuple):
    """Range of documents: from `first` on, before `end`."""

    first: int
    end: int


class TextIndex(ABC):
    """Words of documents, in one kind of database."""

    @abstractmethod
    def create(self, db: Connection) -> None:
        """Create the empty index."""

    @abstractmethod
    def put(self, db: Connection, documents: Sequence[Document]) -> None:
        """Add documents."""

    @abstractmethod
    def remove(self, db: Connection, documents: Sequence[Document]) -> None:
        """Remove documents. Their words are those with which they were added."""

    def prepare(self, db: Connection) -> None:  # noqa: B027
        """Set how the index is kept in order, at each start."""

    def tidy(self, db: Connection) -> bool:
        """Bring a small part of what turns have added into order. Returns whether there may be more to do."""
        return False

    @abstractmethod
    def newest(self, db: Connection, words: Sequence[str], places: Places, limit: int) -> Sequence[int]:
        """Return documents that have all words, the last one maybe as the beginning of a word, highest number first."""


class SqliteIndex(TextIndex):
    """FTS5 table without the texts. It reads the documents of a word in the order of their numbers, and may stop.

    A turn only records its changes in `pending`, and a search reads them from there. Upkeep applies many of them at
    once, because FTS5 writes a segment for each transaction, and merges segments in small steps.
    """

    _APPLY: ClassVar = {
        True: text("INSERT INTO search_text (rowid, words) VALUES (:number, :words)"),
        False: text("INSERT INTO search_text (search_text, rowid, words) VALUES ('delete', :number, :words)"),
    }
    _SET = text("INSERT INTO search_text (search_text, rank) VALUES (:name, :value)")
    _NEWEST = text(
        "SELECT rowid FROM search_text WHERE search_text MATCH :words AND rowid >= :first AND rowid < :end "
        "ORDER BY rowid DESC LIMIT :limit"
    )
    _RECORD = Prepared(insert(pending).values({name: bindparam(name) for name in ("number", "words", "added")}))
    _WAITING = Prepared(
        select(select(func.max(pending.c.id)).scalar_subquery() - select(func.min(pending.c.id)).scalar_subquery())
    )

    def create(self, db: Connection) -> None:
        # `prefix` makes beginnings of words as fast as words. `detail=none` keeps no positions within a document.
        db.exec_driver_sql(
            "CREATE VIRTUAL TABLE search_text USING fts5 (words, content='', detail=none, columnsize=0, "
            "prefix='1 2 3 4 5 6 7 8 9 10', tokenize=\"ascii tokenchars '_'\")"
        )

    def prepare(self, db: Connection) -> None:
        pending.create(db, checkfirst=True)
        settings = {"automerge": 0, "crisismerge": MOST_SEGMENTS}
        db.execute(self._SET, [{"name": name, "value": value} for name, value in settings.items()])

    def put(self, db: Connection, documents: Sequence[Document]) -> None:
        self._record(db, documents, added=True)

    def remove(self, db: Connection, documents: Sequence[Document]) -> None:
        self._record(db, documents, added=False)

    def _record(self, db: Connection, documents: Sequence[Document], *, added: bool) -> None:
        rows = [{"number": number, "words": joined(words), "added": added} for number, words in documents]
        self._RECORD.run_many(db, rows)
        if (self._WAITING.value(db) or 0) > MOST_PENDING:
            self._apply(db)

    def tidy(self, db: Connection) -> bool:
        return self._apply(db) or self._merge(db)

    def _apply(self, db: Connection) -> bool:
        """Bring some of the recorded changes into the index. Returns whether there were any."""
        rows = db.execute(select(pending).order_by(pending.c.id).limit(APPLIED)).all()
        for row in sorted(rows, key=lambda row: row.number):  # FTS5 writes a segment where a number is below the last.
            db.execute(self._APPLY[row.added], {"number": row.number, "words": row.words})
        if rows:
            db.execute(delete(pending).where(pending.c.id <= rows[-1].id))
        return bool(rows)

    def _merge(self, db: Connection) -> bool:
        """Merge some pages of segments. Returns whether there were any to merge."""
        connection = db.connection.dbapi_connection
        assert connection is not None
        before = connection.total_changes
        db.execute(self._SET, {"name": "merge", "value": MERGED_PAGES})
        return bool(connection.total_changes - before > 1)  # FTS5 counts one change if there was nothing to merge.

    def newest(self, db: Connection, words: Sequence[str], places: Places, limit: int) -> Sequence[int]:
        query = " ".join(f'"{word}"' for word in words) + " *"
        within = select(pending).where(pending.c.number >= places.first, pending.c.number < places.end)
        # Sorted here, so that SQLite reads the range of numbers and no other tenant's changes.
        changed = {row.number: row for row in sorted(db.execute(within).all(), key=lambda row: row.id)}
        given = {"words": query, **places._asdict(), "limit": limit + len(changed)}
        found = [number for number in db.execute(self._NEWEST, given).scalars() if number not in changed]
        found += [number for number, row in changed.items() if row.added and _has(row.words, words)]
        return sorted(found, reverse=True)[:limit]


def _has(text: str, words: Sequence[str]) -> bool:
    """Whether a document's joined words include all these, the last one maybe as the beginning of a word."""
    there = text.split(" ")
    return {*words[:-1]} <= {*there} and any(each.startswith(words[-1]) for each in there)


class PostgresIndex(TextIndex):
    """Table of documents with a GIN index. Each document also has its tenant's number as a word."""

    _PUT = text("INSERT INTO search_text (number, words) VALUES (:number, array_to_tsvector(:words))").bindparams(
        sqlalchemy.bindparam("words", type_=ARRAY(Text))
    )
    _REMOVE = text("DELETE FROM search_text WHERE number = :number")
    # The inner query reads the newest documents of the tenant without the GIN index, which does not know their order.
    _RECENT = text(
        "SELECT count(*) AS read, array_agg(number) FILTER (WHERE words @@ CAST(:query AS tsquery)) AS found "
        "FROM (SELECT number, words FROM search_text "
        "WHERE number >= :first AND number < :end ORDER BY number DESC LIMIT :recent) AS newest"
    )
    _ALL = text(
        "SELECT number FROM (SELECT number FROM search_text WHERE words @@ CAST(:query AS tsquery) OFFSET 0) AS found "
        "WHERE number >= :first AND number < :end ORDER BY number DESC LIMIT :limit"
    )

    def create(self, db: Connection) -> None:
        db.exec_driver_sql("CREATE TABLE search_text (number bigint PRIMARY KEY, words tsvector NOT NULL)")
        db.exec_driver_sql(WORDS_INDEX)

    def put(self, db: Connection, documents: Sequence[Document]) -> None:
        rows = [{"number": number, "words": [_tenant_word(number), *words]} for number, words in documents]
        db.execute(self._PUT, rows)

    def remove(self, db: Connection, documents: Sequence[Document]) -> None:
        db.execute(self._REMOVE, [{"number": number} for number, _ in documents])

    def newest(self, db: Connection, words: Sequence[str], places: Places, limit: int) -> Sequence[int]:
        query = " & ".join(f"'{word}'" for word in (_tenant_word(places.first), *words)) + ":*"
        given = {"query": query, "recent": RECENT, **places._asdict()}
        recent = db.execute(self._RECENT, given).one()
        found = sorted(recent.found or (), reverse=True)[:limit]
        if len(found) == limit or recent.read < RECENT:
            return found
        return db.execute(self._ALL, {**given, "limit": limit}).scalars().all()


def _tenant_word(document: int) -> str:
    """Return the word that all documents of a tenant have. No text has it, because `#` is in no word."""
    return f"#{document // (PLACES * CONVERSATIONS)}"


INDEXES: dict[str, TextIndex] = {"sqlite": SqliteIndex(), "postgresql": PostgresIndex()}
"""The index in each kind of database."""


def index_of(db: Connection) -> TextIndex:
    """Return the index in the kind of database that this connection leads to."""
    return INDEXES[db.dialect.name]


def create(db: Connection) -> None:
    """Create the index with its tables, unless they exist. An older server works on a database that has them."""
    if not sqlalchemy.inspect(db).has_table(tenants.name):
        tenants.create(db)
        indexed.create(db)
        index_of(db).create(db)
        begin_task(db, TASK, conversations.name)
    index_of(db).prepare(db)


def tenant_places(db: Connection, tenant: str) -> Places:
    """Return the range of a tenant's documents; an empty one if the tenant has none."""
    number = db.execute(select(tenants.c.number).where(tenants.c.tenant == tenant)).scalar()
    return Places(0, 0) if number is None else _places(number, 0, CONVERSATIONS)


def conversation_places(db: Connection, conversation: str) -> Places | None:
    """Return the range of a conversation's documents; None if it is not indexed."""
    row = _NUMBERS.run(db, conversation=conversation).fetchone()
    if row is None:
        return None
    tenant, number = row
    return _places(tenant, number, 1)


def _places(tenant: int, first: int, count: int) -> Places:
    """Return the range of a number of conversations of a tenant."""
    start = (tenant * CONVERSATIONS + first) * PLACES
    return Places(start, start + count * PLACES)


def number_of(document: int) -> int:
    """Return the number of a document's conversation."""
    return document // PLACES % CONVERSATIONS


def position_of(document: int) -> int | None:
    """Return the position of a document's item; None for a conversation's metadata."""
    return document % PLACES - 1 if document % PLACES else None


def add_conversation(db: Connection, tenant: str, conversation: str, metadata: bytes) -> None:
    """Index a new conversation's metadata. Its items are added later."""
    number = db.execute(select(tenants.c.number).where(tenants.c.tenant == tenant)).scalar()
    if number is None:
        number = _number_tenant(db, tenant)
    row = {"conversation": conversation, "tenant": number}
    own = db.execute(insert(indexed).values(row).returning(indexed.c.number)).scalar_one()
    if own < CONVERSATIONS:
        _put(db, _places(number, own, 1), [(0, words_of(title_text(metadata)))])


def _number_tenant(db: Connection, tenant: str) -> int:
    """Give a tenant a number, unless another server does this at the same time."""
    made = text("INSERT INTO search_tenants (tenant) VALUES (:tenant) ON CONFLICT (tenant) DO NOTHING")
    db.execute(made, {"tenant": tenant})
    return int(db.execute(select(tenants.c.number).where(tenants.c.tenant == tenant)).scalar_one())


def add_items(db: Connection, conversation: str, rows: Iterable[Document]) -> None:
    """Index items: the position and the words of each.

    Does nothing in a conversation that waits to be indexed as a whole.
    """
    places = conversation_places(db, conversation)
    if places is not None:
        _put(db, places, [(position + 1, words) for position, words in rows])


def remove_items(db: Connection, conversation: str, rows: Iterable[tuple[int, bytes]]) -> None:
    """Remove items from the index, given by position."""
    places = conversation_places(db, conversation)
    if places is not None:
        _remove(db, places, [(position + 1, words_of(item_text(item))) for position, item in rows])


def replace_metadata(db: Connection, conversation: str, old: bytes, new: bytes) -> None:
    """Index a conversation's metadata after a change."""
    places = conversation_places(db, conversation)
    if places is not None:
        _remove(db, places, [(0, words_of(title_text(old)))])
        _put(db, places, [(0, words_of(title_text(new)))])


def remove_conversation(db: Connection, conversation: str, metadata: bytes) -> None:
    """Remove a conversation whose items are still stored, with its items."""
    places = conversation_places(db, conversation)
    if places is None:
        return
    query = select(items.c.position, items.c.item).where(items.c.conversation == conversation)
    stored = db.execute(query.execution_options(yield_per=64))
    rows = [(row.position + 1, words_of(item_text(row.item))) for row in stored]
    _remove(db, places, [(0, words_of(title_text(metadata))), *rows])
    db.execute(delete(indexed).where(indexed.c.conversation == conversation))


def _put(db: Connection, places: Places, words: Iterable[Document]) -> None:
    if documents := _documents(places, words):
        index_of(db).put(db, documents)


def _remove(db: Connection, places: Places, words: Iterable[Document]) -> None:
    if documents := _documents(places, words):
        index_of(db).remove(db, documents)


def _documents(places: Places, words: Iterable[Document]) -> list[Document]:
    """Return the documents that have words, in the places that a conversation has. They are given by place."""
    return [(places.first + place, each) for place, each in words if each and place < PLACES]


def complete(db: Connection) -> bool:
    """Whether all conversations of an older store are indexed."""
    return bool(db.execute(select(upkeep.c.done).where(upkeep.c.task == TASK)).scalar())


def index_piece(db: Connection) -> bool:
    """Index some conversations of an older store, in the caller's transaction. Returns whether there may be more."""
    task = locked_task(db, TASK, lock=conversations.name)
    if task.done:
        return False
    columns, size, last = conversations.c, 0, task.cursor
    query = select(conversations).where(columns.id > task.cursor).order_by(columns.id).limit(PIECE)
    found = db.execute(query).all()
    for row in found:
        if conversation_places(db, row.id) is None:
            size += _index(db, row.tenant, row.id, row.metadata)
        last = row.id
        if size > PIECE_BYTES:
            break
    end_piece(db, TASK, last, done=len(found) < PIECE and (not found or last == found[-1].id))
    return True


def _index(db: Connection, tenant: str, conversation: str, metadata: bytes) -> int:
    """Index a stored conversation. Returns the size of its items in bytes."""
    add_conversation(db, tenant, conversation, metadata)
    query = select(items.c.position, items.c.item).where(items.c.conversation == conversation)
    rows = [(row.position, row.item) for row in db.execute(query)]
    add_items(db, conversation, [(position, words_of(item_text(item))) for position, item in rows])
    return sum(len(item) for _, item in rows)
