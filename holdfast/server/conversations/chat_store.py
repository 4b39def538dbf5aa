"""Stored chat completions: each with the messages that it answers, in a thread of its own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from msgspec.json import decode
from sqlalchemy import Connection, Row, and_, insert, or_, select, update

from holdfast.server.conversations.database import Database, chats, threads
from holdfast.server.conversations.space import Space
from holdfast.server.conversations.values import NotFound
from holdfast.server.replies import encode

Completion = dict[str, Any]
Labels = Mapping[str, str]

READ_AT_ONCE = 64
MOST_READ = 10_000
"""Maximum number of completions that one listing by metadata reads. A page may then be shorter, with more to come."""


class ChatStore:
    """Chat completions of a store. Each method is one transaction. Raises NotFound for one that does not exist."""

    def __init__(self, database: Database, space: Space) -> None:
        self._database, self._space = database, space

    def keep(self, tenant: str, completion: Completion, messages: Sequence[Any], labels: Labels) -> None:
        """Store a completion, the messages that it answers, and its metadata. Raises ThreadTooLarge."""
        blobs = {"completion": encode(completion), "messages": encode(messages), "labels": encode(labels)}
        id = completion["id"]
        fixed = {"id": id, "thread": id, "tenant": tenant, "created": completion["created"]}
        with self._database.write() as db:
            db.execute(insert(chats).values(**fixed, **blobs, model=completion["model"]))
            self._space.grown(db, id, tenant, sum(map(len, blobs.values())))

    def get(self, tenant: str, id: str) -> Completion:
        """Return a completion, with its metadata."""
        with self._database.read() as db:
            return _shown(self._find(db, tenant, id))

    def messages(self, tenant: str, id: str) -> list[dict[str, Any]]:
        """Return the messages that a completion answers, each with an id."""
        with self._database.read() as db:
            said = decode(self._find(db, tenant, id).messages, type=list[dict[str, Any]])
        return [{**message, "id": f"{id}-{number}"} for number, message in enumerate(said)]

    def label(self, tenant: str, id: str, labels: Labels) -> Completion:
        """Replace the metadata of a completion, and return it."""
        with self._database.write() as db:
            row, new = self._find(db, tenant, id), encode(labels)
            db.execute(update(chats).where(chats.c.id == id).values(labels=new))
            self._space.grown(db, row.thread, tenant, len(new) - len(row.metadata))
            return decode(row.completion, type=Completion) | {"metadata": dict(labels)}

    def delete(self, tenant: str, id: str) -> None:
        """Delete a completion."""
        with self._database.write() as db:
            self._space.remove(db, self._find(db, tenant, id).thread)

    def page(
        self, tenant: str, *, limit: int, newest_first: bool, after: str | None, model: str | None, labels: Labels
    ) -> tuple[list[Completion], bool]:
        """Return completions of a model, if one is given, whose metadata has these labels; and whether there are more.

        They are in the order of their creation, which their ids give within a second. Raises NotFound for `after`.
        """
        by = chats.c
        wanted = select(chats).join(threads, threads.c.id == by.thread)
        wanted = wanted.where(by.tenant == tenant, threads.c.active >= self._space.oldest())
        if model is not None:
            wanted = wanted.where(by.model == model)
        found: list[Completion] = []
        with self._database.read() as db:
            if after is not None:
                last = self._find(db, tenant, after, "after")
                created, id = (by.created < last.created, by.id < after) if newest_first else (
                    by.created > last.created, by.id > after
                )  # fmt: skip
                wanted = wanted.where(or_(created, and_(by.created == last.created, id)))
            ends = [column.desc() if newest_first else column.asc() for column in (by.created, by.id)]
            rows = db.execute(wanted.order_by(*ends).limit(MOST_READ).execution_options(yield_per=READ_AT_ONCE))
            for row in rows:
                own = decode(row.metadata, type=dict[str, str])
                if labels.items() <= own.items():
                    found.append(_shown(row))
                if len(found) > limit:
                    break
        return found[:limit], len(found) > limit

    def _find(self, db: Connection, tenant: str, id: str, param: str | None = None) -> Row[Any]:
        """Return a completion of this tenant that is not too old. Raises NotFound."""
        wanted = select(chats).join(threads, threads.c.id == chats.c.thread)
        own = chats.c.id == id, chats.c.tenant == tenant, threads.c.active >= self._space.oldest()
        row = db.execute(wanted.where(*own)).one_or_none()
        if row is None:
            raise NotFound("completion", id, param)
        return row


def _shown(row: Row[Any]) -> Completion:
    return decode(row.completion, type=Completion) | {"metadata": decode(row.metadata)}
