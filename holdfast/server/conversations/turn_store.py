"""Stored turns: a response, its input, and its tokens. Turns form a tree and never change."""

from __future__ import annotations

import threading
from array import array
from collections import OrderedDict
from typing import Any

from msgspec import Raw, Struct
from msgspec.json import decode
from sqlalchemy import Column, Connection, bindparam, delete, insert, literal, select, update

from holdfast.server.conversations.conversation_store import advance, append, check_present
from holdfast.server.conversations.database import Database, threads, turns
from holdfast.server.conversations.encoded import tokens_from_bytes
from holdfast.server.conversations.leases import Leases
from holdfast.server.conversations.prepared import Prepared, parameters
from holdfast.server.conversations.space import SIZE, Space
from holdfast.server.conversations.stream_records import StreamRecords
from holdfast.server.conversations.values import GOOD, RUNNING, Conflict, Context, Item, NotFound, Turn, check_context
from holdfast.server.replies import encode

CACHED_TURNS = 1024
CACHED_TOKENS = 1 << 21
CACHED_BYTES = 256 << 20
"""Limits of the cached contexts: their number, their tokens in total (some tens of MB), and their bytes of messages.

A message that several contexts share counts once for each of them.
"""
FETCHED = 8
"""Number of turns of a chain that are fetched at once."""


def _visible(*columns: Column[Any]) -> Prepared:
    """Return the query of some columns of a visible turn."""
    return Prepared(
        select(*columns)
        .join(threads, threads.c.id == turns.c.thread)
        .where(
            turns.c.id == bindparam("id"),
            turns.c.tenant == bindparam("tenant"),
            turns.c.visible,
            threads.c.active >= bindparam("oldest"),
        )
    )


_HERE, _RESPONSE, _INPUT = _visible(turns.c.thread), _visible(turns.c.response), _visible(turns.c.input)
_EXISTS = Prepared(select(turns.c.id).where(turns.c.id == bindparam("id")))
_STORED = Prepared(select(turns.c.response).where(turns.c.id == bindparam("id")))
_TAKE_OUT = Prepared(delete(turns).where(turns.c.id == bindparam("id")).returning(SIZE))
_INSERT_TURN = Prepared(insert(turns).values(parameters(turns)))


class _Answered(Struct):
    """Fields of a response that a later turn builds on. Other fields are skipped."""

    output: Raw


class TurnStore:
    """Turns of a store. Each method is one transaction, except `chain`, which runs within its caller's transaction.

    Raises NotFound for a response that does not exist.
    """

    def __init__(self, database: Database, space: Space, leases: Leases, streams: StreamRecords) -> None:
        self.cache = ContextCache()
        self._leases, self._streams = leases, streams
        self._database = database
        self._space = space

    def context(self, tenant: str, response: str) -> Context:
        """Return the context of a turn after this response."""
        with self._database.read() as db:
            self._find(db, _HERE, tenant, response)
            return self.chain(db, response)

    def context_before(self, response: str) -> Context:
        """Return the context that a stored turn was begun with."""
        with self._database.read() as db:
            turn = db.execute(select(turns).where(turns.c.id == response)).one_or_none()
            if turn is None:
                raise NotFound("response", response)
            if turn.parent is not None:
                return self.chain(db, turn.parent)
            return Context(thread=turn.thread, items=decode(turn.history, type=list[Item]), size=len(turn.history))

    def response(self, tenant: str, response: str) -> tuple[dict[str, Any], bool]:
        """Return a response as the API shows it, and whether another server is writing it."""
        with self._database.read() as db:
            found = decode(self._find(db, _RESPONSE, tenant, response), type=dict[str, Any])
            return found, found["status"] in RUNNING and bool(self._leases.held(db, [response]))

    def input(self, tenant: str, response: str) -> list[Item]:
        """Return the input items of a response, in order."""
        with self._database.read() as db:
            return decode(self._find(db, _INPUT, tenant, response), type=list[Item])

    def commit(self, turn: Turn, *, begun: bool = False) -> None:
        """Store a turn, and append its items to its conversation if it has one.

        `begun` means that the beginning of this turn was stored earlier and is replaced now. Does nothing if exactly
        this turn is stored: a database may have committed it although its answer was lost. Raises Conflict if the
        parent, the conversation or that beginning was deleted or has changed.
        """
        status, context, encoded = turn.response["status"], turn.context, turn.encoded
        thread = context.thread or turn.conversation or turn.id
        with self._database.write() as db:
            replaced, stored = 0, _STORED.value(db, id=turn.id)
            if stored == encoded.response:
                return
            if begun:
                found = _TAKE_OUT.value(db, id=turn.id)
                if found is None:
                    raise Conflict("the response was deleted while it was written")
                replaced = found
                self._leases.end_own(db, turn.id)
            elif stored is not None:
                raise Conflict("another server has stored this response")
            if turn.recorded:
                self._streams.end(db, turn.id)
            if status in RUNNING:
                self._leases.begin(db, turn.id, turn.recipe)
            if context.parent is not None and _EXISTS.value(db, id=context.parent) is None:
                raise Conflict("the previous response was deleted while this one was written")
            if status in GOOD and turn.branch:
                check_present(db, turn)
            elif status in GOOD and turn.conversation is not None:
                advance(db, turn)
                append(db, turn.conversation, encoded.items)
            _INSERT_TURN.run(
                db, id=turn.id, thread=thread, tenant=turn.tenant, parent=context.parent, visible=turn.visible,
                status=status, response=encoded.response, input=encoded.input, history=encoded.history,
                start=encoded.start, tokens=encoded.tokens, characters=turn.characters, digest=turn.digest,
            )  # fmt: skip
            self._space.grown(db, thread, turn.tenant, encoded.size - replaced)
        if status in GOOD:
            self.cache.add(
                Context(
                    thread=thread, parent=turn.id, status=status,
                    items=[*context.items, *turn.input, *turn.response["output"]],
                    tokens=turn.tokens, characters=turn.characters, digest=turn.digest,
                    size=context.size + encoded.said,
                )
            )  # fmt: skip

    def run(self, response: str) -> None:
        """Mark a queued response as in progress, for readers at other servers."""
        with self._database.write() as db:
            row = db.execute(select(turns).where(turns.c.id == response, turns.c.status == "queued")).one_or_none()
            if row is None:
                return
            running = encode(decode(row.response, type=dict[str, Any]) | {"status": "in_progress"})
            db.execute(update(turns).where(turns.c.id == response).values(status="in_progress", response=running))
            self._space.grown(db, row.thread, row.tenant, len(running) - len(row.response))

    def delete(self, tenant: str, response: str) -> None:
        """Delete a response. Its turn stays, invisible, while other turns build on it."""
        with self._database.write() as db:
            thread = self._find(db, _HERE, tenant, response)
            db.execute(update(turns).where(turns.c.id == response).values(visible=False))
            self._leases.end(db, response)
            self.cache.remove(response)
            self._space.prune(db, thread, response)

    def chain(self, db: Connection, last: str) -> Context:
        """Return all items and tokens from a thread's first turn up to the turn `last`. Raises ThreadTooLarge."""
        cached = self.cache.get(last)
        if cached is not None:
            check_context(cached.size)
            return cached
        chain = select(turns, literal(0).label("depth")).where(turns.c.id == last).cte("chain", recursive=True)
        chain = chain.union_all(select(turns, chain.c.depth + 1).join(chain, turns.c.id == chain.c.parent))
        said: list[Item] = []
        tokens = array("I")
        size = 0
        rows = db.execute(select(chain).order_by(chain.c.depth.desc()).execution_options(yield_per=FETCHED))
        for row in rows:
            output = decode(row.response, type=_Answered).output
            size += len(row.history) + len(row.input) + len(output)
            check_context(size)
            said += [*decode(row.history), *decode(row.input), *decode(output)]
            del tokens[row.start :]
            tokens += tokens_from_bytes(row.tokens)
        context = Context(  # The last row is the turn's own.
            thread=row.thread, parent=last, status=row.status,
            items=said, tokens=tokens, characters=row.characters, digest=row.digest, size=size,
        )  # fmt: skip
        if context.status in GOOD:
            self.cache.add(context)
        return context

    def _find(self, db: Connection, query: Prepared, tenant: str, response: str) -> Any:
        """Return a column of a visible turn of this tenant, in a thread that is not too old. Raises NotFound."""
        found = query.value(db, id=response, tenant=tenant, oldest=self._space.oldest())
        if found is None:
            raise NotFound("response", response)
        return found


class ContextCache:
    """Cache of recent turns' contexts, so that the next turn need not read its whole chain.

    The least recently used context is dropped first. Methods may be called from several threads.
    """

    def __init__(self) -> None:
        self.contexts: OrderedDict[str, Context] = OrderedDict()
        """Contexts by the id of their last turn, the least recently used first."""
        self._tokens = self._bytes = 0
        self._lock = threading.RLock()

    def get(self, turn: str) -> Context | None:
        """Return the context that ends with this turn, if it is cached."""
        with self._lock:
            context = self.contexts.get(turn)
            if context is not None:
                self.contexts.move_to_end(turn)
            return context

    def add(self, context: Context) -> None:
        """Cache a context, and drop the least recently used ones beyond the limits."""
        assert context.parent is not None
        with self._lock:
            self.remove(context.parent)
            self.contexts[context.parent] = context
            self._tokens += len(context.tokens)
            self._bytes += context.size
            while self._full:
                self.remove(next(iter(self.contexts)))

    @property
    def _full(self) -> bool:
        over = self._tokens > CACHED_TOKENS or self._bytes > CACHED_BYTES
        return bool(self.contexts) and (over or len(self.contexts) > CACHED_TURNS)

    def remove(self, turn: str) -> None:
        """Drop the context that ends with this turn, if it is cached."""
        with self._lock:
            context = self.contexts.pop(turn, None)
            if context is not None:
                self._tokens -= len(context.tokens)
                self._bytes -= context.size
