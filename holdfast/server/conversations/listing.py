"""Lists a tenant's conversations, the latest first, and searches them. Each call is one bounded read."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from msgspec import Struct, field
from msgspec.json import decode
from sqlalchemy import ColumnElement, Connection, Row, and_, func, or_, select

from holdfast.server.conversations.database import Database, conversations, items, threads
from holdfast.server.conversations.space import Space
from holdfast.server.conversations.values import NotFound

SCANNED = 100
"""Conversations that a search reads at once."""
SCANNED_BYTES = 8 << 20
"""A search ends its page behind the batch with which it has read so much, so that no read keeps others waiting."""
PREVIEW = 120
"""Most characters of a conversation's beginning, or of what a search found."""


class _Part(Struct):
    text: str = ""


class _Said(Struct):
    """What of an item is looked at. Other fields are skipped."""

    role: str = ""
    content: list[_Part] = field(default_factory=list)
    output: str = ""
    arguments: str = ""

    def text(self) -> str:
        """All that a reader sees of it."""
        return "\n".join([*(part.text for part in self.content), *filter(None, (self.arguments, self.output))])


class Listing:
    """The list of a store's conversations. Raises NotFound for a cursor that is no conversation of the tenant."""

    def __init__(self, database: Database, space: Space) -> None:
        self._database = database
        self._space = space

    def page(self, tenant: str, *, limit: int, after: str | None = None) -> tuple[list[dict[str, Any]], bool]:
        """Conversations by their last activity, the latest first, behind `after`; and whether there are more.

        Each is as the API shows it, with `active_at` and the beginning of its first message.
        """
        with self._database.read() as db:
            rows = self._rows(db, tenant, limit + 1, after)
            first = _firsts(db, [row.id for row in rows[:limit]])
        return [_entry(row, first.get(row.id, "")) for row in rows[:limit]], len(rows) > limit

    def search(
        self, tenant: str, wanted: str, *, limit: int, after: str | None = None
    ) -> tuple[list[dict[str, Any]], str | None, bool]:
        """Conversations whose metadata or items have `wanted` in them, in any case; each with the `match`.

        Returns those of a page, the last conversation that was looked at, and whether there are more to look at. A page
        can be short, or empty, because a search reads only so much at once.
        """
        wanted, found, size = wanted.casefold(), list[dict[str, Any]](), 0
        with self._database.read() as db:
            while True:
                rows = self._rows(db, tenant, SCANNED + 1, after)
                batch = rows[:SCANNED]
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
                if len(rows) <= SCANNED or size >= SCANNED_BYTES:
                    return found, after, len(rows) > SCANNED

    def _rows(self, db: Connection, tenant: str, limit: int, after: str | None) -> Sequence[Row[Any]]:
        """Conversations behind a cursor, with the time of their last activity."""
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
    """The beginning of what the user says first in each conversation, of its first two items."""
    query = select(items.c.conversation, items.c.item).where(items.c.conversation.in_(ids), items.c.position < 2)
    begun: dict[str, str] = {}
    for conversation, item in db.execute(query.order_by(items.c.conversation, items.c.position)):
        said = decode(item, type=_Said)
        if said.role != "system":
            begun.setdefault(conversation, said.text()[:PREVIEW])
    return begun


def _said(db: Connection, ids: Sequence[str]) -> tuple[dict[str, list[str]], int]:
    """The texts of conversations in their order, and how many bytes were read."""
    here = items.c.conversation.in_(ids)
    query = select(items.c.conversation, items.c.item, func.length(items.c.item)).where(here)
    texts: dict[str, list[str]] = {}
    size = 0
    for conversation, item, length in db.execute(query.order_by(items.c.conversation, items.c.position)):
        texts.setdefault(conversation, []).append(decode(item, type=_Said).text())
        size += length
    return texts, size


def _around(text: str, wanted: str) -> str | None:
    """Some of the text around what is wanted; None if it is not in it."""
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
