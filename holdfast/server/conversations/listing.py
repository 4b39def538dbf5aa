"""Lists and searches a tenant's conversations, the latest first. Each call is one bounded read."""

from __future__ import annotations

import re
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from msgspec import MsgspecError, Struct, field
from msgspec.json import decode
from sqlalchemy import ColumnElement, Connection, LargeBinary, Row, and_, func, or_, select

from holdfast.server.conversations.conversation_store import fitting
from holdfast.server.conversations.database import Database, conversations, items, threads
from holdfast.server.conversations.space import Space
from holdfast.server.conversations.values import NotFound

SCANNED = 100
"""Maximum number of conversations that one query of a search reads."""
SCANNED_BYTES = 8 << 20
"""Number of bytes after which a search ends its page, because a longer read would delay others.

A search reads at most this number of bytes of each conversation, too.
"""
FETCHED = 8
"""Number of items that are fetched at once."""
BEGINNING = 4096
"""Number of bytes that are read for the beginning of an item."""
SURROGATES = r"\ud83d\ude00"
"""Longest encoding of one character in JSON. A cut may leave any part of it."""
TEXT = re.compile(rb'"(?:text|output)":"((?:[^"\\]|\\.)*+)')
"""Pattern of a text within an item. The end of the text may be missing."""
PREVIEW = 120
"""Maximum number of characters in a preview: the beginning of a conversation, or the text around a match."""


class _Part(Struct):
    text: str = ""


class _Said(Struct):
    """Fields of an item that a search reads. Other fields are skipped."""

    role: str = ""
    content: list[_Part] = field(default_factory=list)
    output: str = ""
    arguments: str = ""

    def text(self) -> str:
        """Return the whole visible text of the item."""
        return "\n".join([*(part.text for part in self.content), *filter(None, (self.arguments, self.output))])


class Listing:
    """List of a store's conversations. Raises NotFound if a cursor is not the id of a conversation of the tenant."""

    def __init__(self, database: Database, space: Space) -> None:
        self._database = database
        self._space = space

    def page(self, tenant: str, *, limit: int, after: str | None = None) -> tuple[list[dict[str, Any]], bool]:
        """Return conversations after the cursor `after`, the latest active first, and whether there are more.

        Each is in the API's shape, with `active_at` and the beginning of its first message.
        """
        with self._database.read() as db:
            rows = self._rows(db, tenant, limit + 1, after)
            first = _firsts(db, [row.id for row in rows[:limit]])
        return [_entry(row, first.get(row.id, "")) for row in rows[:limit]], len(rows) > limit

    def search(
        self, tenant: str, wanted: str, *, limit: int, after: str | None = None
    ) -> tuple[list[dict[str, Any]], str | None, bool]:
        """Find conversations whose metadata or items contain `wanted`, ignoring case. Each has its `match`.

        Returns a page of found conversations, the id of the last conversation that was read, and whether there are more
        to read. A page can be short or empty, because one search reads only a bounded amount.
        """
        wanted, found, size = wanted.casefold(), list[dict[str, Any]](), 0
        with self._database.read() as db:
            while True:
                rows = self._rows(db, tenant, SCANNED + 1, after)
                sizes = _sizes(db, [row.id for row in rows[:SCANNED]])
                batch = rows[: fitting([sizes.get(row.id, 0) for row in rows[:SCANNED]], SCANNED_BYTES)]
                said, read = _said(db, [row.id for row in batch])
                size += read
                for row in batch:
                    after, texts = row.id, said.get(row.id, [])
                    title = decode(row.metadata, type=dict[str, str])
                    match = next(filter(None, (_around(text, wanted) for text in (*title.values(), *texts))), None)
                    if match is not None:
                        found.append(_entry(row, texts[0][:PREVIEW] if texts else "") | {"match": match})
                        if len(found) == limit:
                            return found, after, row is not rows[-1]
                if len(rows) == len(batch) or size >= SCANNED_BYTES:
                    return found, after, len(rows) > len(batch)

    def _rows(self, db: Connection, tenant: str, limit: int, after: str | None) -> Sequence[Row[Any]]:
        """Return conversations after a cursor, with the time of their last activity."""
        columns, active = conversations.c, threads.c.active
        own: ColumnElement[bool] = and_(
            threads.c.tenant == tenant, columns.tenant == tenant, active >= self._space.oldest()
        )
        listed = select(conversations, active.label("active")).join(threads, threads.c.id == columns.thread)
        if after is not None:
            cursor = db.execute(listed.where(own, columns.id == after)).one_or_none()
            if cursor is None:
                raise NotFound("conversation", after, "after")
            own &= or_(active < cursor.active, and_(active == cursor.active, columns.id > after))
        return db.execute(listed.where(own).order_by(active.desc(), columns.id).limit(limit)).all()


def _firsts(db: Connection, ids: Sequence[str]) -> dict[str, str]:
    """Return the beginning of the user's first message in each conversation, from its first two items."""
    beginning = func.substr(items.c.item, 1, BEGINNING, type_=LargeBinary)
    query = select(items.c.conversation, beginning).where(items.c.conversation.in_(ids), items.c.position < 2)
    begun: dict[str, str] = {}
    for conversation, item in db.execute(query.order_by(items.c.conversation, items.c.position)):
        said = _beginning(item)
        if said.role != "system":
            begun.setdefault(conversation, said.text()[:PREVIEW])
    return begun


def _beginning(item: bytes) -> _Said:
    """Read the beginning of an item. A large item may be cut anywhere."""
    if len(item) < BEGINNING:
        return decode(item, type=_Said)
    role = "system" if b'"role":"system"' in item[: BEGINNING // 2] else ""
    found = TEXT.search(item)
    for cut in range(len(SURROGATES) if found else 0):  # A cut may have split the last character.
        with suppress(MsgspecError, UnicodeDecodeError):
            assert found is not None
            text = found[1][: len(found[1]) - cut]
            return _Said(role=role, content=[_Part(decode(b'"' + text + b'"', type=str))])
    return _Said(role=role)


def _sizes(db: Connection, ids: Sequence[str]) -> dict[str, int]:
    """Return the size in bytes of each conversation's items."""
    here = items.c.conversation.in_(ids)
    query = select(items.c.conversation, func.sum(func.length(items.c.item))).where(here)
    return {conversation: int(size) for conversation, size in db.execute(query.group_by(items.c.conversation))}


def _said(db: Connection, ids: Sequence[str]) -> tuple[dict[str, list[str]], int]:
    """Return the texts of conversations in order, up to SCANNED_BYTES, and the number of bytes read."""
    here = items.c.conversation.in_(ids)
    query = select(items.c.conversation, items.c.item, func.length(items.c.item)).where(here)
    texts: dict[str, list[str]] = {}
    size = 0
    ordered = query.order_by(items.c.conversation, items.c.position).execution_options(yield_per=FETCHED)
    with db.execute(ordered) as found:
        for conversation, item, length in found:
            texts.setdefault(conversation, []).append(decode(item, type=_Said).text())
            size += length
            if size >= SCANNED_BYTES:
                break
    return texts, size


def _around(text: str, wanted: str) -> str | None:
    """Return the text around the first match; None if there is no match."""
    at = text.casefold().find(wanted)
    if at < 0:
        return None
    begin = max(0, at - PREVIEW // 3)
    return ("…" if begin else "") + text[begin : begin + PREVIEW]


def _entry(row: Row[Any], preview: str) -> dict[str, Any]:
    return {
        "id": row.id, "object": "conversation", "created_at": row.created, "active_at": int(row.active),
        "metadata": decode(row.metadata), "preview": preview,
    }  # fmt: skip
