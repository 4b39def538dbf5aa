"""Lists and searches a tenant's conversations, the latest first. Each call is one bounded read."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain
from typing import Any

from msgspec.json import decode
from sqlalchemy import Connection, Row, literal, or_, select, tuple_

from holdfast.server.conversations import list_rows
from holdfast.server.conversations.database import Database, conversations, items, threads
from holdfast.server.conversations.list_rows import PREVIEW, listed, previews
from holdfast.server.conversations.search_index import (
    PLACES,
    Places,
    complete,
    conversation_places,
    index_of,
    indexed,
    number_of,
    position_of,
    tenant_places,
)
from holdfast.server.conversations.space import Space
from holdfast.server.conversations.values import NotFound
from holdfast.server.conversations.words import item_text, query_of, title_text

SCANNED, BATCH = 512, 64
"""Maximum number of documents that one search reads, and the number of them that is read at once.

A search reads at most BATCH documents of each conversation.
"""
SCANNED_BYTES = 8 << 20
"""Number of bytes after which a search ends its page, because a longer read would delay others."""
END_OF_TIME = 1e300
"""Time after every thread's last activity."""
FETCHED = 8
"""Number of items that are fetched at once."""


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
            first = {row.id: row.preview.decode() for row in rows if row.preview is not None}
            first |= previews(db, [row.id for row in rows[:limit] if row.id not in first])
        return [_entry(row, first.get(row.id, "")) for row in rows[:limit]], len(rows) > limit

    def search(
        self, tenant: str, wanted: str, *, limit: int, after: str | None = None
    ) -> tuple[list[dict[str, Any]], str | None, bool]:
        """Find conversations that have an item or metadata with `wanted`, ignoring case, the newest created first.

        A match begins at the beginning of a word. Returns a page of found conversations, each with its `match`, the id
        of the last conversation that was read, and whether there are more to read. A page can be short or empty,
        because one search reads a bounded number of documents. Raises NotFound for `after`.
        """
        words, wanted = query_of(wanted), wanted.casefold()
        found, size = list[dict[str, Any]](), 0
        with self._database.read() as db:
            index, (first, end) = index_of(db), tenant_places(db, tenant)
            if after is not None:
                end = self._place(db, tenant, after)
            for _ in range(SCANNED // BATCH):
                documents = index.newest(db, words, Places(first, end), BATCH) if words and first < end else ()
                whole, end = _whole(documents)
                for row, texts in self._candidates(db, tenant, whole):
                    after, match = row.id, None
                    for text in texts:
                        size += len(text)
                        match = _around(text, wanted)
                        if match is not None or size >= SCANNED_BYTES:
                            break
                    if match is not None:
                        found.append(_entry(row, "") | {"match": match})
                    if len(found) == limit or size >= SCANNED_BYTES:
                        rest = Places(first, self._place(db, tenant, after))
                        return self._with_previews(db, found), after, bool(index.newest(db, words, rest, 1))
                if len(documents) < BATCH:
                    return self._with_previews(db, found), after, False
            return self._with_previews(db, found), after, True

    def complete(self) -> bool:
        """Whether a search finds all conversations. It does not while an older store is being indexed."""
        with self._database.read() as db:
            return complete(db)

    def _place(self, db: Connection, tenant: str, after: str) -> int:
        """Return the first document of the conversation after which a search continues. Raises NotFound."""
        places = conversation_places(db, after)
        row = db.execute(select(conversations.c.tenant).where(conversations.c.id == after)).one_or_none()
        if places is None or row is None or row.tenant != tenant:
            raise NotFound("conversation", after, "after")
        return places.first

    def _candidates(
        self, db: Connection, tenant: str, documents: Sequence[int]
    ) -> Iterator[tuple[Row[Any], Iterator[str]]]:
        """Yield the conversations of documents, in their order, each with the documents' texts, or none if too old."""
        positions: dict[int, list[int | None]] = {}
        for document in documents:
            positions.setdefault(number_of(document), []).append(position_of(document))
        own = select(conversations, threads.c.active, indexed.c.number).join(
            indexed, indexed.c.conversation == conversations.c.id
        )
        own = own.join(threads, threads.c.id == conversations.c.thread).where(
            indexed.c.number.in_(positions), conversations.c.tenant == tenant
        )
        for row in sorted(db.execute(own).all(), key=lambda row: -row.number):
            if row.active < self._space.oldest():
                yield row, iter(())
                continue
            places = sorted(-1 if place is None else place for place in positions[row.number])
            query = select(items.c.item).where(items.c.conversation == row.id, items.c.position.in_(places))
            ordered = query.order_by(items.c.position).execution_options(yield_per=FETCHED)
            with db.execute(ordered) as said:
                title = [title_text(row.metadata)] if places[0] < 0 else []
                yield row, chain(title, map(item_text, said.scalars()))

    def _with_previews(self, db: Connection, found: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Return entries with the beginnings of their first messages."""
        first = previews(db, [entry["id"] for entry in found])
        return [entry | {"preview": first.get(entry["id"], "")} for entry in found]

    def _rows(self, db: Connection, tenant: str, limit: int, after: str | None) -> Sequence[Row[Any]]:
        """Return conversations after a cursor, with the time of their last activity, and the preview if it is known."""
        id, tenants, active = listed.c.conversation, listed.c.tenant, listed.c.active
        found: Any = select(  # Its type counts the columns, and another query takes its place below.
            id.label("id"), listed.c.created, listed.c.labels.label("metadata"), active, listed.c.preview
        )
        joined = select(conversations, threads.c.active).join(threads, threads.c.id == conversations.c.thread)
        if not list_rows.complete(db):
            id, tenants, active = conversations.c.id, threads.c.tenant, threads.c.active
            found = joined.add_columns(literal(None).label("preview"))
        oldest, latest = self._space.oldest(), END_OF_TIME
        if after is not None:
            own = conversations.c.id == after, conversations.c.tenant == tenant, threads.c.active >= oldest
            cursor = db.execute(joined.where(*own)).one_or_none()
            if cursor is None:
                raise NotFound("conversation", after, "after")
            latest = cursor.active
            found = found.where(or_(active < latest, id > after))
        # One range of an index, in its order. Given `tenant =`, PostgreSQL may read the threads of all tenants by their
        # time, and pass many of them before the first one of an idle tenant. A conversation has the tenant of its
        # thread. Asked for both, PostgreSQL expects few rows, and reads all of them in parallel.
        place = tuple_(tenants, active)
        within = found.where(place >= tuple_(tenant, oldest), place <= tuple_(tenant, latest))
        rows: Sequence[Row[Any]] = db.execute(within.order_by(tenants.desc(), active.desc(), id).limit(limit)).all()
        return rows


def _whole(documents: Sequence[int]) -> tuple[Sequence[int], int]:
    """Return the documents up to the last conversation that they hold whole, and the document before which to go on.

    The last conversation of a full batch may have more documents, so it is left to the next batch. If it fills the
    batch alone, its other documents are skipped.
    """
    last = documents[-1] // PLACES if documents else 0
    if len(documents) < BATCH or documents[0] // PLACES == last:
        return documents, last * PLACES
    return [document for document in documents if document // PLACES > last], (last + 1) * PLACES


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
