"""Stored conversations: a list of items that turns extend and clients may edit."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from msgspec.json import decode
from sqlalchemy import ColumnElement, Connection, bindparam, delete, func, insert, select, update

from holdfast.server.conversations import list_rows, search_index
from holdfast.server.conversations.database import Database, conversations, items, threads
from holdfast.server.conversations.encoded import EncodedItem, encoded_items
from holdfast.server.conversations.prepared import Prepared, parameters
from holdfast.server.conversations.space import Space
from holdfast.server.conversations.values import Context, ConversationBusy, Item, NotFound, Turn, check_context
from holdfast.server.replies import encode

_OWN = Prepared(
    select(conversations)
    .join(threads, threads.c.id == conversations.c.thread)
    .where(
        conversations.c.id == bindparam("id"),
        conversations.c.tenant == bindparam("tenant"),
        threads.c.active >= bindparam("oldest"),
    )
)

_LAST = Prepared(select(func.max(items.c.position)).where(items.c.conversation == bindparam("conversation")))
_ADD = Prepared(insert(items).values(parameters(items)))
_LISTED = Prepared(
    select(items.c.id).where(items.c.conversation == bindparam("conversation")).order_by(items.c.position)
)
_PRESENT = Prepared(select(conversations.c.id).where(conversations.c.id == bindparam("conversation")))
_HERE = update(conversations).where(conversations.c.id == bindparam("conversation"))
_MOVE = Prepared(_HERE.where(conversations.c.head == bindparam("parent")).values(head=bindparam("head")))
_MOVE_FIRST = Prepared(_HERE.where(conversations.c.head.is_(None)).values(head=bindparam("head")))

PAGE_BYTES = 8 << 20
"""Maximum size of a page of items in bytes, except that a page holds at least one item."""


class ConversationStore:
    """Conversations of a store. Each method is one transaction. Raises NotFound for an object that does not exist."""

    def __init__(self, database: Database, space: Space, chain: Callable[[Connection, str], Context]) -> None:
        """`chain` reads the context that ends with a turn."""
        self._database = database
        self._space = space
        self._chain = chain

    def create(
        self, tenant: str, conversation: str, metadata: Mapping[str, str], first: Sequence[Item]
    ) -> dict[str, Any]:
        """Create a conversation with these items. Returns it in the API's shape."""
        encoded = encode(metadata)
        with self._database.write() as db:
            row = {"id": conversation, "thread": conversation, "tenant": tenant, "created": int(self._space.now())}
            db.execute(insert(conversations).values(**row, metadata=encoded))
            search_index.add_conversation(db, tenant, conversation, encoded)
            new = encoded_items(first)
            self._space.grown(db, conversation, tenant, len(encoded) + size_of(new))
            append(db, conversation, new)
            return _shown(self.find(db, tenant, conversation))

    def get(self, tenant: str, conversation: str) -> dict[str, Any]:
        """Return a conversation in the API's shape."""
        with self._database.read() as db:
            return _shown(self.find(db, tenant, conversation))

    def update(self, tenant: str, conversation: str, metadata: Mapping[str, str]) -> dict[str, Any]:
        """Replace the metadata. Returns the conversation in the API's shape."""
        with self._database.write() as db:
            row = self.find(db, tenant, conversation)
            encoded = encode(metadata)
            db.execute(update(conversations).where(conversations.c.id == conversation).values(metadata=encoded))
            search_index.replace_metadata(db, conversation, row.metadata, encoded)
            return _shown(row) | {"metadata": dict(metadata)}

    def delete(self, tenant: str, conversation: str) -> None:
        """Delete a conversation and its items. Its responses keep their ids."""
        with self._database.write() as db:
            row = self.find(db, tenant, conversation)
            search_index.remove_conversation(db, conversation, row.metadata)
            here = items.c.conversation == conversation
            freed = db.execute(delete(items).where(here).returning(func.length(items.c.item))).scalars().all()
            db.execute(delete(conversations).where(conversations.c.id == conversation))
            self._space.prune(db, row.thread, row.head, sum(freed))

    def context(self, tenant: str, conversation: str) -> Context:
        """Return the context of a new turn in this conversation. Raises ThreadTooLarge."""
        with self._database.read() as db:
            row = self.find(db, tenant, conversation)
            if row.head is not None:
                return self._chain(db, row.head)
            here = items.c.conversation == conversation
            size = int(db.execute(select(func.sum(func.length(items.c.item))).where(here)).scalar() or 0)
            check_context(size)
            query = select(items.c.item).where(here).order_by(items.c.position)
            return Context(thread=row.thread, items=[decode(item) for (item,) in db.execute(query)], size=size)

    def items(
        self, tenant: str, conversation: str, *, limit: int, newest_first: bool, after: str | None = None
    ) -> tuple[list[Item], bool]:
        """Return a page of items, and whether there are more. A page of large items is shorter than `limit`."""
        here, position = items.c.conversation == conversation, items.c.position
        with self._database.read() as db:
            self.find(db, tenant, conversation)
            query = select(position, func.length(items.c.item)).where(here)
            if after is not None:
                where = db.execute(select(position).where(here, items.c.id == after)).scalar()
                if where is None:
                    raise NotFound("item", after, "after")
                query = query.where(position < where if newest_first else position > where)
            order = position.desc() if newest_first else position
            rows = db.execute(query.order_by(order).limit(limit + 1)).all()
            count = fitting([size for _, size in rows[:limit]], PAGE_BYTES)
            if not count:
                return [], False
            ends = sorted((rows[0][0], rows[count - 1][0]))
            page = select(items.c.item).where(here, position.between(*ends)).order_by(order)
            return [decode(item) for (item,) in db.execute(page)], len(rows) > count

    def item(self, tenant: str, conversation: str, item: str) -> Item:
        """Return one item of a conversation."""
        this = (items.c.conversation == conversation, items.c.id == item)
        with self._database.read() as db:
            self.find(db, tenant, conversation, item)
            found = db.execute(select(items.c.item).where(*this)).scalar()
            if found is None:
                raise NotFound("item", item)
            return decode(found, type=Item)

    def add_items(self, tenant: str, conversation: str, new: Sequence[Item]) -> None:
        """Append a client's items."""
        with self._database.write() as db:
            row = self.find(db, tenant, conversation)
            self._clear_head(db, conversation)
            size = append(db, conversation, encoded_items(new))
            self._space.grown(db, row.thread, tenant, size)
            self._space.prune(db, row.thread, row.head)

    def delete_item(self, tenant: str, conversation: str, item: str) -> dict[str, Any]:
        """Remove an item. Returns the conversation in the API's shape."""
        with self._database.write() as db:
            row = self.find(db, tenant, conversation, item)
            freed = remove(db, conversation, items.c.id == item)
            if not freed:
                raise NotFound("item", item)
            self._clear_head(db, conversation)
            self._space.prune(db, row.thread, row.head, freed)
            return _shown(row)

    def find(self, db: Connection, tenant: str, conversation: str, item: str | None = None) -> Any:
        """Return a conversation's row. Raises NotFound, which names `item` if the client asked for an item."""
        row = _OWN.first(db, id=conversation, tenant=tenant, oldest=self._space.oldest())
        if row is None:
            raise NotFound("conversation", conversation) if item is None else NotFound("item", item)
        return row

    def _clear_head(self, db: Connection, conversation: str) -> None:
        """Clear a conversation's head after an edit, because its items no longer equal any turn's.

        The update also locks the row against other writers until the commit.
        """
        db.execute(update(conversations).where(conversations.c.id == conversation).values(head=None))


def fitting(sizes: Sequence[int], most: int) -> int:
    """Return how many leading items fit in `most` in total; at least one if there are any."""
    total = 0
    for count, size in enumerate(sizes):
        total += size
        if total > most and count:
            return count
    return len(sizes)


def append(db: Connection, conversation: str, new: Sequence[EncodedItem]) -> int:
    """Add items at a conversation's end, within the caller's transaction. Returns their size in bytes.

    The conversation's thread is stored, or else the list of conversations reads the preview from the items each time.
    """
    if not new:
        return 0
    last = _LAST.value(db, conversation=conversation)
    first = 0 if last is None else last + 1
    rows = [
        {"conversation": conversation, "position": position, "id": item.id, "item": item.data}
        for position, item in enumerate(new, first)
    ]
    _ADD.run_many(db, rows)
    search_index.add_items(db, conversation, [(position, item.words) for position, item in enumerate(new, first)])
    if first < list_rows.FIRST_ITEMS:
        list_rows.note_preview(db, conversation)
    return size_of(new)


def size_of(new: Sequence[EncodedItem]) -> int:
    """Return the size of items in bytes, as they are stored."""
    return sum(len(item.data) for item in new)


def remove(db: Connection, conversation: str, *which: ColumnElement[bool]) -> int:
    """Remove items of a conversation within the caller's transaction. Returns their size in bytes."""
    there = delete(items).where(items.c.conversation == conversation, *which)
    rows = [(row.position, row.item) for row in db.execute(there.returning(items.c.position, items.c.item))]
    search_index.remove_items(db, conversation, rows)
    return sum(len(item) for _, item in rows)


def advance(db: Connection, turn: Turn) -> None:
    """Make a turn its conversation's head, within the caller's transaction.

    Raises ConversationBusy if the conversation has changed since the turn began: its head, or its items if it has no
    head. The update comes first because it locks the row against other servers.
    """
    parent, here = turn.context.parent, {"conversation": turn.conversation}
    if parent is not None:
        same = bool(_MOVE.run(db, head=turn.id, parent=parent, **here).rowcount)
    else:
        same = bool(_MOVE_FIRST.run(db, head=turn.id, **here).rowcount)
        listed = [id for (id,) in _LISTED.run(db, **here)]
        same = same and listed == [item["id"] for item in turn.context.items]
    if not same:
        raise ConversationBusy("the conversation was deleted, edited or went on while this response was written")


def check_present(db: Connection, turn: Turn) -> None:
    """Raise ConversationBusy if a branch's conversation was deleted while the branch was written."""
    if _PRESENT.value(db, conversation=turn.conversation) is None:
        raise ConversationBusy("the conversation was deleted while this response was written")


def _shown(row: Any) -> dict[str, Any]:
    return {"id": row.id, "object": "conversation", "created_at": row.created, "metadata": decode(row.metadata)}
