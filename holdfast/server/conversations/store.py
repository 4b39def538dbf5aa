"""The persistent store: turns with their raw tokens, conversations with their items, in SQLite or PostgreSQL."""

from __future__ import annotations

import sys
import time
from array import array
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import msgspec
from sqlalchemy import Connection, Row, bindparam, delete, func, insert, literal, select, update
from sqlalchemy.engine import Engine
from sqlalchemy.exc import SQLAlchemyError

from holdfast.server.conversations.database import connect
from holdfast.server.conversations.schema import conversations, items, migrate, threads, turns
from holdfast.server.conversations.space import Space
from holdfast.server.conversations.values import GOOD, Bounds, Context, Gone, Item, Page, StoreError, Turn

WARM_TURNS = 1024
WARM_TOKENS = 1 << 21
"""Contexts that are held in memory, and their tokens in all: some tens of MB."""

# What every turn asks, made once.
_VISIBLE = (
    select(turns)
    .join(threads, threads.c.id == turns.c.thread)
    .where(
        turns.c.id == bindparam("id"),
        turns.c.tenant == bindparam("tenant"),
        turns.c.visible,
        threads.c.active >= bindparam("oldest"),
    )
)
_OWN = (
    select(conversations)
    .join(threads, threads.c.id == conversations.c.thread)
    .where(
        conversations.c.id == bindparam("id"),
        conversations.c.tenant == bindparam("tenant"),
        threads.c.active >= bindparam("oldest"),
    )
)
_EXISTS = select(turns.c.id).where(turns.c.id == bindparam("id"))
_INSERT_TURN = insert(turns)

_encode = msgspec.json.Encoder().encode
_decode = msgspec.json.decode


class Store:
    """Synchronous and for one thread at a time: `Keeper` takes it off the event loop.

    Each method is one transaction, which is committed whole or not at all: a process that dies leaves the last
    turn that was committed. Every method takes the tenant, and finds nothing of another's.
    """

    def __init__(self, engine: Engine, bounds: Bounds, now: Callable[[], float] = time.time) -> None:
        """Use `open` instead."""
        self._engine = engine
        self._space = Space(bounds, now)
        self._now = now
        self._warm: OrderedDict[str, Context] = OrderedDict()
        """What the turns of late build on, so that the next one need not read its whole chain; turns never change."""
        self._warm_tokens = 0

    @classmethod
    def open(cls, where: str, bounds: Bounds, now: Callable[[], float] = time.time) -> Store:
        """Open or make the store at `where`: a file for SQLite, a database's URL, or `memory`.

        An older schema is brought up to date. Raises StoreError.
        """
        shown = where if "://" not in where else where.partition("://")[0] + " database"
        try:
            store = cls(connect(where), bounds, now)
            with store._write() as db:
                migrate(db)
            with store._write() as db:
                store._space.drop_old(db)
        except ModuleNotFoundError as error:
            raise StoreError(f"the {shown} needs the package {error.name}; pip install 'holdfast[postgres]'") from None
        except (SQLAlchemyError, OSError, ValueError) as error:
            reason = str(getattr(error, "orig", None) or error).partition("\n")[0]
            raise StoreError(f"the conversation store {shown} cannot be opened: {reason}") from None
        return store

    def close(self) -> None:
        """Let go of the database."""
        self._engine.dispose()

    # Turns

    def context(self, tenant: str, response: str) -> Context | None:
        """What a turn after this response builds on; None where there is no such response."""
        with self._read() as db:
            row = self._turn(db, tenant, response)
            return None if row is None else self._chain(db, row)

    def response(self, tenant: str, response: str) -> dict[str, Any] | None:
        """A response as the API shows it."""
        with self._read() as db:
            row = self._turn(db, tenant, response)
            return None if row is None else _decode(row.response)

    def input(self, tenant: str, response: str) -> list[Item] | None:
        """The input items of a response, in their order."""
        with self._read() as db:
            row = self._turn(db, tenant, response)
            return None if row is None else _decode(row.input)

    def commit(self, turn: Turn, *, begun: bool = False) -> None:
        """Store a turn, and with a conversation append its items there. `begun` is one that replaces its beginning.

        Raises Gone when the parent, the conversation or the beginning is no longer what it was.
        """
        status, context = turn.response["status"], turn.context
        thread = context.thread or turn.conversation or turn.id
        with self._write() as db:
            if begun and not db.execute(delete(turns).where(turns.c.id == turn.id)).rowcount:
                raise Gone("the response was deleted while it was written")
            start = self._shared(db, turn)
            row = {
                "response": _encode(turn.response),
                "input": _encode(turn.input),
                "history": _encode([] if context.parent else context.items),
                "tokens": _packed(turn.tokens[start:]),
            }
            size = sum(map(len, row.values()))
            if status in GOOD and turn.conversation is not None:
                self._advance(db, turn)
                size += self._append(db, turn.conversation, [*turn.input, *turn.response["output"]])
            fixed = {
                "id": turn.id, "thread": thread, "tenant": turn.tenant, "parent": context.parent,
                "visible": turn.visible, "status": status, "start": start, "characters": turn.characters,
                "digest": turn.digest,
            }  # fmt: skip
            db.execute(_INSERT_TURN, fixed | row)
            self._space.grown(db, thread, turn.tenant, size)
        if status in GOOD:
            said = [*context.items, *turn.input, *turn.response["output"]]
            self._warm_up(
                Context(
                    thread=thread, parent=turn.id, status=status,
                    items=said, tokens=turn.tokens, characters=turn.characters, digest=turn.digest,
                )
            )  # fmt: skip

    def delete_response(self, tenant: str, response: str) -> bool:
        """Delete a response; whether there was one. What others build on stays, unseen, for as long as they do."""
        with self._write() as db:
            row = self._turn(db, tenant, response)
            if row is None:
                return False
            db.execute(update(turns).where(turns.c.id == response).values(visible=False))
            self._forget(response)
            self._space.prune(db, row.thread)
            return True

    # Conversations

    def create_conversation(
        self, tenant: str, conversation: str, metadata: Mapping[str, str], first: Sequence[Item]
    ) -> dict[str, Any]:
        """Begin a conversation with these items. Returns it as the API shows it."""
        encoded = _encode(metadata)
        with self._write() as db:
            db.execute(
                insert(conversations).values(
                    id=conversation, thread=conversation, tenant=tenant, created=int(self._now()), metadata=encoded
                )
            )
            size = self._append(db, conversation, first)
            self._space.grown(db, conversation, tenant, len(encoded) + size)
            row = self._conversation(db, tenant, conversation)
            assert row is not None
            return _shown(row)

    def conversation(self, tenant: str, conversation: str) -> dict[str, Any] | None:
        """A conversation as the API shows it."""
        with self._read() as db:
            row = self._conversation(db, tenant, conversation)
            return None if row is None else _shown(row)

    def update_conversation(self, tenant: str, conversation: str, metadata: Mapping[str, str]) -> dict[str, Any] | None:
        """Replace its metadata."""
        with self._write() as db:
            row = self._conversation(db, tenant, conversation)
            if row is None:
                return None
            values = {"metadata": _encode(metadata)}
            db.execute(update(conversations).where(conversations.c.id == conversation).values(values))
            return _shown(row) | {"metadata": dict(metadata)}

    def delete_conversation(self, tenant: str, conversation: str) -> bool:
        """Delete a conversation and its items; whether there was one. Its responses can still be found by their ids."""
        with self._write() as db:
            row = self._conversation(db, tenant, conversation)
            if row is None:
                return False
            db.execute(delete(items).where(items.c.conversation == conversation))
            db.execute(delete(conversations).where(conversations.c.id == conversation))
            self._space.prune(db, row.thread)
            return True

    def conversation_context(self, tenant: str, conversation: str) -> Context | None:
        """What a turn in this conversation builds on; None where there is no such conversation."""
        with self._read() as db:
            row = self._conversation(db, tenant, conversation)
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
        """Some of its items; None where there is no such conversation. Raises LookupError for an unknown `after`."""
        with self._read() as db:
            if self._conversation(db, tenant, conversation) is None:
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
        with self._read() as db:
            if self._conversation(db, tenant, conversation) is None:
                return None
            found = db.execute(
                select(items.c.item).where(items.c.conversation == conversation, items.c.id == item)
            ).scalar()
            return None if found is None else _decode(found)

    def add_items(self, tenant: str, conversation: str, new: Sequence[Item]) -> bool:
        """Append items by hand; whether there is such a conversation."""
        with self._write() as db:
            row = self._conversation(db, tenant, conversation)
            if row is None:
                return False
            self._edited(db, conversation)
            size = self._append(db, conversation, new)
            self._space.grown(db, row.thread, tenant, size)
            return True

    def delete_item(self, tenant: str, conversation: str, item: str) -> dict[str, Any] | None:
        """Take an item out; the conversation as the API shows it, None where there is no such item."""
        with self._write() as db:
            row = self._conversation(db, tenant, conversation)
            if row is None:
                return None
            this = (items.c.conversation == conversation, items.c.id == item)
            if not db.execute(delete(items).where(*this)).rowcount:
                return None
            self._edited(db, conversation)
            self._space.prune(db, row.thread)
            return _shown(row)

    # Inside a transaction

    @contextmanager
    def _read(self) -> Iterator[Connection]:
        with self._engine.connect() as db, db.begin():
            yield db

    @contextmanager
    def _write(self) -> Iterator[Connection]:
        with self._engine.connect().execution_options(holdfast_write=True) as db, db.begin():
            yield db

    def _turn(self, db: Connection, tenant: str, response: str) -> Row[Any] | None:
        """A turn that may be seen: visible, of this tenant, in a thread that is not too old."""
        return db.execute(_VISIBLE, {"id": response, "tenant": tenant, "oldest": self._space.oldest()}).one_or_none()

    def _conversation(self, db: Connection, tenant: str, conversation: str) -> Row[Any] | None:
        return db.execute(_OWN, {"id": conversation, "tenant": tenant, "oldest": self._space.oldest()}).one_or_none()

    def _chain(self, db: Connection, last: Row[Any]) -> Context:
        """The items and tokens from a thread's first turn to this one."""
        warm = self._warm.get(last.id)
        if warm is not None:
            self._warm.move_to_end(last.id)
            return warm
        chain = select(turns, literal(0).label("depth")).where(turns.c.id == last.id).cte("chain", recursive=True)
        chain = chain.union_all(select(turns, chain.c.depth + 1).join(chain, turns.c.id == chain.c.parent))
        said: list[Item] = []
        tokens = array("I")
        for row in db.execute(select(chain).order_by(chain.c.depth.desc())):
            said += [*_decode(row.history), *_decode(row.input), *_decode(row.response)["output"]]
            del tokens[row.start :]
            tokens += _unpacked(row.tokens)
        context = Context(
            thread=last.thread, parent=last.id, status=last.status,
            items=said, tokens=tokens, characters=last.characters, digest=last.digest,
        )  # fmt: skip
        if last.status in GOOD:
            self._warm_up(context)
        return context

    def _warm_up(self, context: Context) -> None:
        """Remember what a turn after this one builds on, in place of what was not asked for longest."""
        assert context.parent is not None
        self._forget(context.parent)
        self._warm[context.parent] = context
        self._warm_tokens += len(context.tokens)
        while self._warm_tokens > WARM_TOKENS or len(self._warm) > WARM_TURNS:
            self._forget(next(iter(self._warm)))

    def _forget(self, turn: str) -> None:
        context = self._warm.pop(turn, None)
        if context is not None:
            self._warm_tokens -= len(context.tokens)

    def _shared(self, db: Connection, turn: Turn) -> int:
        """How many of a turn's first tokens are its parent's. Raises Gone when the parent is no more."""
        parent, known = turn.context.parent, turn.context.tokens
        if parent is None:
            return 0
        if db.execute(_EXISTS, {"id": parent}).scalar() is None:
            raise Gone("the previous response was deleted while this one was written")
        if turn.known == len(known) or turn.tokens[: len(known)] == known:
            return len(known)
        pairs = enumerate(zip(turn.tokens, known, strict=False))
        return next((at for at, (one, other) in pairs if one != other), min(len(turn.tokens), len(known)))

    def _append(self, db: Connection, conversation: str, new: Sequence[Item]) -> int:
        """Add items at a conversation's end. Returns their size in bytes."""
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

    def _advance(self, db: Connection, turn: Turn) -> None:
        """Make a turn its conversation's head. Raises Gone when the conversation is not where the turn began.

        Without a head it is where its items are the same. The update comes first, as it keeps other servers out.
        """
        columns, parent, here = conversations.c, turn.context.parent, items.c.conversation == turn.conversation
        unmoved = columns.head.is_(None) if parent is None else columns.head == parent
        moved = update(conversations).where(columns.id == turn.conversation, unmoved).values(head=turn.id)
        same = bool(db.execute(moved).rowcount)
        if same and parent is None:
            listed = db.execute(select(items.c.id).where(here).order_by(items.c.position)).scalars().all()
            same = listed == [item["id"] for item in turn.context.items]
        if not same:
            raise Gone("the conversation was deleted, edited or went on while this response was written")

    def _edited(self, db: Connection, conversation: str) -> None:
        """From here on no turn stands for the whole of a conversation; nobody else changes it before the commit."""
        db.execute(update(conversations).where(conversations.c.id == conversation).values(head=None))


def _shown(row: Row[Any]) -> dict[str, Any]:
    return {"id": row.id, "object": "conversation", "created_at": row.created, "metadata": _decode(row.metadata)}


def _packed(tokens: Sequence[int]) -> bytes:
    """Token ids as 32-bit little-endian numbers."""
    packed = array("I", tokens)
    if sys.byteorder == "big":
        packed.byteswap()
    return packed.tobytes()


def _unpacked(data: bytes) -> array[int]:
    numbers = array("I", data)
    if sys.byteorder == "big":
        numbers.byteswap()
    return numbers
