"""Rows of the list of conversations, kept together in the order of the list by the database's own triggers.

A page of the list reads one row after another here. From the other tables it would read several pages of the disk for
each conversation, because their rows and the entries of their indexes lie in the order of ids. Triggers change the rows
within the transaction of the change itself, so a server of an older version keeps them right, too.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from contextlib import suppress
from typing import NamedTuple

import sqlalchemy
from msgspec import MsgspecError
from msgspec.json import decode
from sqlalchemy import Column, Connection, Float, Integer, LargeBinary, Table, bindparam, func, select, text

from holdfast.server.conversations.counters import begin_task, end_piece, locked_task, upkeep
from holdfast.server.conversations.database import NAME, conversations, items, tables, threads
from holdfast.server.conversations.prepared import Prepared
from holdfast.server.conversations.words import Part, Said

TASK = "list"
"""Name of the task that makes the rows of an older store."""
PIECE = 100
"""Maximum number of conversations for which one transaction of this task makes rows. It takes some 20 ms."""
FIRST_ITEMS = 2
"""Number of leading items of a conversation in which its first message is looked for."""
BEGINNING = 4096
"""Number of bytes that are read for the beginning of an item."""
SURROGATES = r"\ud83d\ude00"
"""Longest encoding of one character in JSON. A cut may leave any part of it."""
TEXT = re.compile(rb'"(?:text|output)":"((?:[^"\\]|\\.)*+)')
"""Pattern of a text within an item. The end of the text may be missing."""
PREVIEW = 120
"""Maximum number of characters in a preview: the beginning of a conversation, or the text around a match."""

listed = Table(
    "listed",
    tables,
    Column("tenant", NAME, primary_key=True),
    Column("active", Float, primary_key=True),
    Column("conversation", NAME, primary_key=True),
    Column("thread", NAME, nullable=False),
    Column("created", Integer, nullable=False),
    Column("metadata", LargeBinary, nullable=False, key="labels"),
    Column("preview", LargeBinary),
    sqlite_with_rowid=False,
)
"""Rows of the list. `preview` is the beginning of the user's first message in UTF-8; null if it must be read anew."""

MADE = (
    "INSERT INTO listed (tenant, active, conversation, thread, created, metadata, preview) "
    "SELECT t.tenant, t.active, c.id, t.id, c.created, c.metadata, CASE WHEN EXISTS "
    f"(SELECT 1 FROM items AS i WHERE i.conversation = c.id AND i.position < {FIRST_ITEMS}) THEN NULL ELSE {{empty}} "
    "END FROM threads AS t JOIN conversations AS c ON c.thread = t.id WHERE "
)
"""Makes the rows of some conversations. The preview of one with items is not read from them in SQL."""
EMPTY = {"sqlite": "X''", "postgresql": "''::bytea"}
"""The empty preview, by kind of database."""
OF_THREAD = "tenant = OLD.tenant AND active = OLD.active AND thread = OLD.id"


class Followed(NamedTuple):
    """A kind of change that the rows follow, in SQL. OLD and NEW are the changed row before and after."""

    change: str
    """Kind of change, and the table; for an update also the column."""
    statement: str
    """Statement that changes the rows of the list. `{here}` finds the row of a conversation."""
    condition: str = "TRUE"
    """Condition under which it is done."""
    conversation: str = ""
    """Id of the conversation that `{here}` finds."""
    thread: str = ""
    """Id of the conversation's thread; empty if it is read from the conversation."""


FOLLOWED = (
    Followed("INSERT ON threads", MADE + "t.id = NEW.id"),
    Followed(
        "UPDATE OF active ON threads",
        f"UPDATE listed SET active = NEW.active WHERE {OF_THREAD}",
        "OLD.active <> NEW.active",
    ),
    Followed("DELETE ON threads", f"DELETE FROM listed WHERE {OF_THREAD}"),
    Followed("INSERT ON conversations", MADE + "c.id = NEW.id"),
    Followed(
        "UPDATE OF metadata ON conversations",
        "UPDATE listed SET metadata = NEW.metadata WHERE {here}",
        conversation="NEW.id",
        thread="NEW.thread",
    ),
    Followed("DELETE ON conversations", "DELETE FROM listed WHERE {here}", conversation="OLD.id", thread="OLD.thread"),
    *(
        Followed(
            f"{change} ON items",
            "UPDATE listed SET preview = NULL WHERE {here}",
            f"{row}.position < {FIRST_ITEMS}",
            conversation=f"{row}.conversation",
        )
        for change, row in (("INSERT", "NEW"), ("DELETE", "OLD"))
    ),
)
"""Changes of other tables. No server changes an item or the thread of a conversation."""
_PLACE = "SELECT t.{column} FROM threads AS t JOIN conversations AS c ON c.thread = t.id WHERE c.id = :conversation"
_NOTE = Prepared(
    text(
        "UPDATE listed SET preview = :preview WHERE conversation = :conversation "
        f"AND tenant = ({_PLACE.format(column='tenant')}) AND active = ({_PLACE.format(column='active')})"
    ).bindparams(bindparam("conversation", type_=NAME), bindparam("preview", type_=LargeBinary))
)
_ADD = text(
    "INSERT INTO listed (tenant, active, conversation, thread, created, metadata, preview) "
    "VALUES (:tenant, :active, :conversation, :thread, :created, :metadata, :preview) ON CONFLICT DO NOTHING"
)
_COMPLETE = Prepared(select(upkeep.c.done).where(upkeep.c.task == bindparam("task")))


def create(db: Connection) -> None:
    """Create the rows with their triggers, unless they exist.

    The table has no version in `versions`, because an older server works on a database that has it.
    """
    if sqlalchemy.inspect(db).has_table(listed.name):
        return
    listed.create(db)
    begin_task(db, TASK, conversations.name)
    make = _postgresql if db.dialect.name == "postgresql" else _sqlite
    for followed in FOLLOWED:
        make(db, followed)


def _name(followed: Followed) -> str:
    """Return the name of a trigger: `list_` with the kind of change and the table."""
    words = followed.change.lower().split()
    return f"list_{words[0]}_{words[-1]}"


def _sqlite(db: Connection, followed: Followed) -> None:
    thread = followed.thread or f"(SELECT c.thread FROM conversations AS c WHERE c.id = {followed.conversation})"
    place = f"FROM threads AS t WHERE t.id = {thread}"
    here = f"tenant = (SELECT t.tenant {place}) AND active = (SELECT t.active {place})"
    statement = followed.statement.format(
        here=f"{here} AND conversation = {followed.conversation}", empty=EMPTY["sqlite"]
    )
    db.exec_driver_sql(
        f"CREATE TRIGGER {_name(followed)} AFTER {followed.change} WHEN {followed.condition} BEGIN {statement}; END"
    )


def _postgresql(db: Connection, followed: Followed) -> None:
    """Create a trigger. It locks the thread, because a row that changes its place meanwhile would not be found.

    A conversation is locked before its thread, as turns do, so that no two transactions wait for each other.
    """
    here = f"tenant = place.tenant AND active = place.active AND conversation = {followed.conversation}"
    statement = followed.statement.format(here=here, empty=EMPTY["postgresql"])
    find = f"threads AS t WHERE t.id = {followed.thread} FOR NO KEY UPDATE"
    if not followed.thread:
        find = "conversations AS c JOIN threads AS t ON t.id = c.thread "
        find += f"WHERE c.id = {followed.conversation} FOR NO KEY UPDATE OF c, t"
    name = _name(followed)
    db.exec_driver_sql(
        f"CREATE FUNCTION {name}() RETURNS trigger LANGUAGE plpgsql AS $$ DECLARE place threads%%ROWTYPE; "
        f"BEGIN {f'SELECT t.* INTO place FROM {find};' if followed.conversation else ''} {statement}; "
        "RETURN NULL; END $$"
    )
    db.exec_driver_sql(
        f"CREATE TRIGGER {name} AFTER {followed.change} FOR EACH ROW WHEN ({followed.condition}) "
        f"EXECUTE FUNCTION {name}()"
    )


def complete(db: Connection) -> bool:
    """Whether all conversations of an older store have a row."""
    return bool(_COMPLETE.value(db, task=TASK))


def note_preview(db: Connection, conversation: str) -> None:
    """Read the preview of a conversation from its items into its row, if its thread is stored."""
    found = previews(db, [conversation]).get(conversation, "")
    _NOTE.run(db, conversation=conversation, preview=found.encode())


def list_piece(db: Connection) -> bool:
    """Make rows for some conversations of an older store, in the caller's transaction.

    Returns whether there may be more. In PostgreSQL nobody changes these conversations meanwhile.
    """
    task = locked_task(db, TASK)
    if task.done:
        return False
    columns = conversations.c
    query = select(conversations, threads.c.active).join(threads, threads.c.id == columns.thread)
    query = query.where(columns.id > task.cursor).order_by(columns.id).limit(PIECE)
    rows = db.execute(query.with_for_update(of=[conversations, threads], key_share=True)).all()
    first = previews(db, [row.id for row in rows])
    made = [
        {
            "tenant": row.tenant, "active": row.active, "conversation": row.id, "thread": row.thread,
            "created": row.created, "metadata": row.metadata, "preview": first.get(row.id, "").encode(),
        }
        for row in rows
    ]  # fmt: skip
    if made:
        db.execute(_ADD, made)
    end_piece(db, TASK, rows[-1].id if rows else task.cursor, done=len(rows) < PIECE)
    return True


def previews(db: Connection, ids: Sequence[str]) -> dict[str, str]:
    """Return the beginning of the user's first message in each conversation, from its first items."""
    if not ids:
        return {}
    beginning = func.substr(items.c.item, 1, BEGINNING, type_=LargeBinary)
    first = items.c.position < FIRST_ITEMS
    query = select(items.c.conversation, beginning).where(items.c.conversation.in_(ids), first)
    begun: dict[str, str] = {}
    for conversation, item in db.execute(query.order_by(items.c.conversation, items.c.position)):
        said = beginning_of(item)
        if said.role != "system":
            begun.setdefault(conversation, said.text()[:PREVIEW])
    return begun


def beginning_of(item: bytes) -> Said:
    """Read the beginning of an item. A large item may be cut anywhere."""
    if len(item) < BEGINNING:
        return decode(item, type=Said)
    role = "system" if b'"role":"system"' in item[: BEGINNING // 2] else ""
    found = TEXT.search(item)
    for cut in range(len(SURROGATES) if found else 0):  # A cut may have split the last character.
        with suppress(MsgspecError, UnicodeDecodeError):
            assert found is not None
            kept = found[1][: len(found[1]) - cut]
            return Said(role=role, content=[Part(decode(b'"' + kept + b'"', type=str))])
    return Said(role=role)
