"""Stored conversations: a list of items that turns extend and clients may edit."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec
from sqlalchemy import Connection, Row, bindparam, delete, func, insert, select, update

from holdfast.server.conversations.database import Database, conversations, items, threads, turns
from holdfast.server.conversations.space import Space
from holdfast.server.conversations.values import Conflict, Context, Item, Page, Turn

# The query of every turn in a conversation, built once.
_OWN = (
    select(conversations)
    .join(threads, threads.c.id == conversations.c.thread)
    .where(
        conversations.c.id == bindparam("id"),
        conversations.c.tenant == bindparam("tenant"),
        threads.c.active >= bindparam("oldest"),
    )
)

_encode = msgspec.json.Encoder().encode
_decode = msgspec.json.decode


class ConversationStore:
    """The conversations of a store. Each method is one transaction."""

    def __init__(
        self,
        database: Database,
        space: Space,
        chain: Callable[[Connection, Row[Any]], Context],
        now: Callable[[], float],
    ) -> None:
        """`chain` reads the context that ends with a turn."""
        self._database = database
        self._space = space
        self._chain = chain
        self._now = now

    def create(
        self, tenant: str, conversation: str, metadata: Mapping[str, str], first: Sequence[Item]
    ) -> dict[str, Any]:
        """Begin a conversation with these items. Returns it as the API shows it."""
        encoded = _encode(metadata)
        with self._database.write() as db:
            db.execute(
                insert(conversations).values(
                    id=conversation, thread=conversation, tenant=tenant, created=int(self._now()), metadata=encoded
                )
            )
            size = append(db, conversation, first)
            self._space.grown(db, conversation, tenant, len(encoded) + size)
            row = self._find(db, tenant, conversation)
            assert row is not None
            return _shown(row)

    def get(self, tenant: str, conversation: str) -> dict[str, Any] | None:
        """A conversation as the API shows it."""
        with self._database.read() as db:
            row = self._find(db, tenant, conversation)
            return None if row is None else _shown(row)

    def update(self, tenant: str, conversation: str, metadata: Mapping[str, str]) -> dict[str, Any] | None:
        """Replace the metadata. Returns the conversation as the API shows it."""
        with self._database.write() as db:
            row = self._find(db, tenant, conversation)
            if row is None:
                return None
            values = {"metadata": _encode(metadata)}
            db.execute(update(conversations).where(conversations.c.id == conversation).values(values))
            return _shown(row) | {"metadata": dict(metadata)}

    def delete(self, tenant: str, conversation: str) -> bool:
        """Delete a conversation and its items. Returns whether it existed. Its responses keep their ids."""
        with self._database.write() as db:
            row = self._find(db, tenant, conversation)
            if row is None:
                return False
            db.execute(delete(items).where(items.c.conversation == conversation))
            db.execute(delete(conversations).where(conversations.c.id == conversation))
            self._space.prune(db, row.thread)
            return True

    def context(self, tenant: str, conversation: str) -> Context | None:
        """What a turn in this conversation builds on; None if there is no such conversation."""
        with self._database.read() as db:
            row = self._find(db, tenant, conversation)
            if row is None:
                return None
            if row.head is not None:
                head = db.execute(select(turns).where(turns.c.id == row.head)).one()
                return self._chain(db, head)
            rows = db.execute(
                select(items.c.item).where(items.c.conversation == conversation).order_by(items.c.position)
            )
            return Context(thread=row.thread, items=[_decode(item) for (item,) in rows])

    def items(
        self, tenant: str, conversation: str, *, limit: int, newest_first: bool, after: str | None = None
    ) -> Page | None:
        """A page of items; None if there is no such conversation. Raises LookupError for an unknown `after`."""
        with self._database.read() as db:
            if self._find(db, tenant, conversation) is None:
                return None
            query = select(items.c.item).where(items.c.conversation == conversation)
            position = items.c.position
            if after is not None:
                where = db.execute(
                    select(position).where(items.c.conversation == conversation, items.c.id == after)
                ).scalar()
                if where is None:
                    raise LookupError(after)
                query = query.where(position < where if newest_first else position > where)
            query = query.order_by(position.desc() if newest_first else position).limit(limit + 1)
            found = [_decode(item) for (item,) in db.execute(query)]
            return Page(found[:limit], len(found) > limit)

    def item(self, tenant: str, conversation: str, item: str) -> Item | None:
        """One item of a conversation."""
        with self._database.read() as db:
            if self._find(db, tenant, conversation) is None:
                return None
            found = db.execute(
                select(items.c.item).where(items.c.conversation == conversation, items.c.id == item)
            ).scalar()
            return None if found is None else _decode(found)

    def add_items(self, tenant: str, conversation: str, new: Sequence[Item]) -> bool:
        """Append a client's items. Returns whether the conversation exists."""
        with self._database.write() as db:
            row = self._find(db, tenant, conversation)
            if row is None:
                return False
            self._clear_head(db, conversation)
            size = append(db, conversation, new)
            self._space.grown(db, row.thread, tenant, size)
            return True

    def delete_item(self, tenant: str, conversation: str, item: str) -> dict[str, Any] | None:
        """Remove an item. Returns the conversation as the API shows it; None if there is no such item."""
        with self._database.write() as db:
            row = self._find(db, tenant, conversation)
            if row is None:
                return None
            this = (items.c.conversation == conversation, items.c.id == item)
            if not db.execute(delete(items).where(*this)).rowcount:
                return None
            self._clear_head(db, conversation)
            self._space.prune(db, row.thread)
            return _shown(row)

    def _find(self, db: Connection, tenant: str, conversation: str) -> Row[Any] | None:
        return db.execute(_OWN, {"id": conversation, "tenant": tenant, "oldest": self._space.oldest()}).one_or_none()

    def _clear_head(self, db: Connection, conversation: str) -> None:
        """No turn stands for the edited items. The update also keeps other writers out until the commit."""
        db.execute(update(conversations).where(conversations.c.id == conversation).values(head=None))


def append(db: Connection, conversation: str, new: Sequence[Item]) -> int:
    """Add items at a conversation's end, within the caller's transaction. Returns their size in bytes."""
    if not new:
        return 0
    here = items.c.conversation == conversation
    last = db.execute(select(func.max(items.c.position)).where(here)).scalar()
    rows = [
        {"conversation": conversation, "position": position, "id": item["id"], "item": _encode(item)}
        for position, item in enumerate(new, 0 if last is None else last + 1)
    ]
    db.execute(insert(items), rows)
    return sum(len(row["item"]) for row in rows)


def advance(db: Connection, turn: Turn) -> None:
    """Make a turn its conversation's head, within the caller's transaction.

    Raises Conflict if the conversation has changed since the turn began: its head or, where it has none, its items.
    The update comes first because it keeps other servers out.
    """
    columns, parent, here = conversations.c, turn.context.parent, items.c.conversation == turn.conversation
    unmoved = columns.head.is_(None) if parent is None else columns.head == parent
    moved = update(conversations).where(columns.id == turn.conversation, unmoved).values(head=turn.id)
    same = bool(db.execute(moved).rowcount)
    if same and parent is None:
        listed = db.execute(select(items.c.id).where(here).order_by(items.c.position)).scalars().all()
        same = listed == [item["id"] for item in turn.context.items]
    if not same:
        raise Conflict("the conversation was deleted, edited or went on while this response was written")


def _shown(row: Row[Any]) -> dict[str, Any]:
    return {"id": row.id, "object": "conversation", "created_at": row.created, "metadata": _decode(row.metadata)}
