"""A conversation as a tree: its turns with all branches, its current branch, and copies of whole trees."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from msgspec import Raw
from msgspec.json import decode
from sqlalchemy import Connection, Row, func, insert, select, update

from holdfast.server.conversations import search_index
from holdfast.server.conversations.conversation_store import append, remove, size_of
from holdfast.server.conversations.database import Database, conversations, turns
from holdfast.server.conversations.encoded import encoded_items
from holdfast.server.conversations.leases import Leases
from holdfast.server.conversations.space import SIZE, Space
from holdfast.server.conversations.turn_store import ContextCache
from holdfast.server.conversations.values import GOOD, RUNNING, Conflict, Context, Item, NotFound, Turn
from holdfast.server.replies import encode

MOST_BYTES = 64 << 20
"""Maximum size in bytes of a tree that `turns` returns. It is never returned in parts."""
REPORTED_FIELDS = (
    "status", "created_at", "completed_at", "model", "instructions", "temperature", "max_output_tokens", "output",
    "usage", "timings", "error", "incomplete_details", "background", "metadata",
)  # fmt: skip
"""Fields of a turn's response that are part of the turn in the API."""


class Tree:
    """Trees of a store. Each method is one transaction. Raises NotFound for an object that does not exist."""

    def __init__(
        self,
        database: Database,
        space: Space,
        cache: ContextCache,
        leases: Leases,
        find: Callable[[Connection, str, str], Any],
        chain: Callable[[Connection, str], Context],
    ) -> None:
        """`find` returns the row of a tenant's conversation, and `chain` the context that ends with a turn."""
        self._database = database
        self._space = space
        self._cache = cache
        self._leases = leases
        self._find = find
        self._chain = chain

    def turns(self, tenant: str, conversation: str) -> dict[str, Any]:
        """Return all turns, each after its parent, older siblings first, and `head`, the turn to continue from.

        A deleted turn is left out, and its children get its parent. `running` is true if another server is writing the
        turn. Raises Conflict if the tree is too large.
        """
        with self._database.read() as db:
            row = self._find(db, tenant, conversation)
            inside = turns.c.thread == row.thread
            size = db.execute(select(func.sum(SIZE)).where(inside)).scalar() or 0
            if size > MOST_BYTES:
                raise Conflict(f"this conversation has {size} bytes; at most {MOST_BYTES} are shown at once")
            found = db.execute(select(turns).where(inside)).all()
            elsewhere = self._leases.held(db, [turn.id for turn in found if turn.status in RUNNING])
        parents = {turn.id: turn.parent for turn in found}
        hidden = {turn.id for turn in found if not turn.visible}

        def above(turn: str | None) -> str | None:
            while turn in hidden:
                turn = parents.get(turn)
            return turn

        shown = [_shown(turn, above(turn.parent), turn.id in elsewhere) for turn in found if turn.visible]
        shown.sort(key=lambda turn: (turn["created_at"], turn["metadata"].get("sent", ""), turn["id"]))
        children: dict[str | None, list[dict[str, Any]]] = {}
        for turn in shown:
            children.setdefault(turn["parent"], []).append(turn)
        ordered: list[dict[str, Any]] = []
        waiting = children.get(None, [])[::-1]
        while waiting:
            ordered.append(waiting.pop())
            waiting += children.get(ordered[-1]["id"], [])[::-1]
        return {"object": "conversation.tree", "id": conversation, "head": above(row.head), "turns": ordered}

    def move(self, tenant: str, conversation: str, response: str, *, after: bool) -> None:
        """Continue the conversation after or before one of its turns. Its items become the items of that branch.

        Raises Conflict if no turn can follow this one.
        """
        with self._database.write() as db:
            row = self._find(db, tenant, conversation)
            this = (turns.c.id == response, turns.c.thread == row.thread, turns.c.tenant == tenant, turns.c.visible)
            turn = db.execute(select(turns).where(*this)).one_or_none()
            if turn is None:
                raise NotFound("response", response)
            if after and not _goes_on(turn):
                raise Conflict(f"response {response!r} is {turn.status} and has no output; nothing can follow it")
            if not after and turn.parent is None:
                head, branch = None, decode(turn.history, type=list[Item])
            else:
                head = turn.id if after else turn.parent
                branch = list(self._chain(db, head).items)
            db.execute(update(conversations).where(conversations.c.id == conversation).values(head=head))
            freed = remove(db, conversation)
            self._space.grown(db, row.thread, tenant, append(db, conversation, encoded_items(branch)) - freed)
            if row.head != head:
                self._space.prune(db, row.thread, row.head)

    def drop(self, tenant: str, conversation: str) -> None:
        """Delete a conversation with all its turns."""
        with self._database.write() as db:
            row = self._find(db, tenant, conversation)
            for turn in db.execute(select(turns.c.id).where(turns.c.thread == row.thread)).scalars().all():
                self._cache.remove(turn)
            self._space.remove(db, row.thread)

    def restore(
        self, tenant: str, conversation: str, metadata: Mapping[str, str], grown: Sequence[Turn], head: str | None
    ) -> None:
        """Store a new conversation with copied turns. Each turn's context names its parent, which comes earlier."""
        encoded, size = encode(metadata), 0
        with self._database.write() as db:
            row = {"id": conversation, "thread": conversation, "tenant": tenant, "created": int(self._space.now())}
            db.execute(insert(conversations).values(**row, metadata=encoded, head=head))
            search_index.add_conversation(db, tenant, conversation, encoded)
            rows = []
            for turn in grown:
                blobs = {
                    "response": encode(turn.response), "input": encode(turn.input),
                    "history": encode([] if turn.context.parent else turn.context.items), "tokens": b"",
                }  # fmt: skip
                size += sum(map(len, blobs.values()))
                fixed = {
                    "id": turn.id, "thread": conversation, "tenant": tenant, "parent": turn.context.parent,
                    "visible": True, "status": turn.response["status"], "start": 0, "characters": 0, "digest": b"",
                }  # fmt: skip
                rows.append(fixed | blobs)
            if rows:
                db.execute(insert(turns), rows)
            new = [] if head is None else encoded_items(self._chain(db, head).items)
            self._space.grown(db, conversation, tenant, len(encoded) + size + size_of(new))
            append(db, conversation, new)


def _goes_on(turn: Row[Any]) -> bool:
    """Whether a turn can follow this one: it ended normally, or it was stopped after some output."""
    return turn.status in GOOD or (turn.status == "cancelled" and bool(decode(turn.response)["output"]))


def _shown(turn: Row[Any], parent: str | None, running: bool) -> dict[str, Any]:
    response = decode(turn.response, type=dict[str, Any])
    before = {} if turn.parent else {"history": Raw(turn.history)}
    shown = {name: response.get(name) for name in REPORTED_FIELDS}
    return {
        "id": turn.id,
        "object": "conversation.turn",
        "parent": parent,
        **before,
        "input": Raw(turn.input),
        **shown,
        "running": running,
    }
