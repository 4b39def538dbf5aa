"""Leases: record which server writes each running response, which one changes a conversation, and which ones run.

A server that ends stops renewing its leases. Another one then takes over the responses that have a recipe.
"""

from __future__ import annotations

import hashlib
import uuid
from collections.abc import Callable, Collection

from sqlalchemy import Connection, bindparam, delete, insert, select, text, update

from holdfast.server.conversations.database import Database, leases, recipes
from holdfast.server.conversations.prepared import Prepared, parameters
from holdfast.server.conversations.values import Conflict, ConversationBusy

LEASE_SECONDS = 15.0
"""Seconds for which a lease holds without renewal.

This also allows for the clocks of servers with one database, which may differ by half of it.
"""
RENEW_SECONDS = 1.0
"""Seconds between two renewals. A server checks at the same interval which of its responses others cancelled."""
MOST_LEFT = 64
"""Most responses that a server takes over at a time."""
TAKEN_OVER = "another server has taken over this response, because this one did not renew its lease in time"
"""Message of the Conflict."""
BUSY = "another response or edit of this conversation is in progress; try again when it has ended"
"""Message of ConversationBusy."""
KEPT_SECONDS = 100 * LEASE_SECONDS
"""Seconds for which the lease of an ended server stays in the table."""

_BY = leases.c
_LOCK = Prepared(
    text(
        "INSERT INTO leases (response, server, seen, cancelled) VALUES (:key, :server, :now, false) "
        "ON CONFLICT (response) DO UPDATE SET server = excluded.server, seen = excluded.seen "
        "WHERE leases.server = excluded.server OR leases.seen < :ended OR leases.server = :former"
    )
)
"""Takes a conversation's lease, unless a server that runs holds it, or `former` does."""
_UNLOCK = Prepared(delete(leases).where(_BY.response == bindparam("key"), _BY.server == bindparam("server")))
_ATTEND = Prepared(
    text(
        "INSERT INTO leases (response, server, seen, cancelled) VALUES (:server, :server, :now, false) "
        "ON CONFLICT (response) DO UPDATE SET seen = excluded.seen WHERE leases.seen < :due"
    )
)
"""Takes or renews a server's lease under its own name, if that is due."""

_BEGIN = Prepared(insert(leases).values(parameters(leases)))
_KEEP = Prepared(insert(recipes).values(parameters(recipes)))
_END = Prepared(delete(leases).where(_BY.response == bindparam("id")))
_END_OWN = Prepared(delete(leases).where(_BY.response == bindparam("id"), _BY.server == bindparam("own")))
_FORGET = Prepared(delete(recipes).where(recipes.c.response == bindparam("id")))


def conversation_key(tenant: str, conversation: str) -> str:
    """Return the key of a conversation's lease. A tenant that names another's conversation gets a key of its own."""
    return hashlib.sha256(f"{tenant}\0{conversation}".encode()).hexdigest()


class Leases:
    """Leases of all servers with one database. Each response that is stored before its end has a lease.

    The lock of a conversation does not wait for the disk: a loss of power ends the servers that hold locks, too.
    """

    def __init__(self, database: Database, now: Callable[[], float]) -> None:
        self.server = uuid.uuid4().hex
        """Unique id of this server among those with the same database."""
        self._database = database
        self._now = now

    def begin(self, db: Connection, response: str, recipe: bytes = b"") -> None:
        """Record that this server writes a response, within the transaction that stores the response's beginning.

        With a `recipe`, another server can write it if this one ends.
        """
        _BEGIN.run(db, response=response, server=self.server, seen=self._now(), cancelled=False)
        if recipe:
            _KEEP.run(db, response=response, recipe=recipe)

    def attend(self, db: Connection, server: str | None = None) -> None:
        """Record within a transaction that a server runs, by default this one. `renew` keeps that true."""
        now = self._now()
        name = self.server if server is None else server
        _ATTEND.run(db, server=name, now=now, due=now - RENEW_SECONDS)

    def attended(self, db: Connection, server: str) -> bool:
        """Whether a server that called `attend` still runs."""
        ended = self._now() - LEASE_SECONDS
        return db.execute(select(_BY.server).where(_BY.response == server, _BY.seen >= ended)).first() is not None

    def end(self, db: Connection, response: str) -> None:
        """Remove a lease, within the transaction that deletes a response."""
        _END.run(db, id=response)
        _FORGET.run(db, id=response)

    def end_own(self, db: Connection, response: str) -> None:
        """Remove a lease, within the transaction that stores a response's end. Raises Conflict if it is not ours."""
        if not _END_OWN.run(db, id=response, own=self.server).rowcount:
            raise Conflict(TAKEN_OVER)
        _FORGET.run(db, id=response)

    def release(self, server: str) -> None:
        """Let the leases of a server end now, because it has ended. If it has not, it renews them."""
        with self._database.write() as db:
            ended = self._now() - 2 * LEASE_SECONDS
            db.execute(update(leases).where(_BY.server == server, _BY.seen > ended).values(seen=ended))

    def leave(self, response: str) -> None:
        """Let this server's lease of a response end now, so that another server takes it over.

        It is nobody's then, so that a renewal under way leaves it as it is.
        """
        with self._database.write() as db:
            own = _BY.response == response, _BY.server == self.server
            db.execute(update(leases).where(*own).values(server="", seen=self._now() - 2 * LEASE_SECONDS))

    def left(self) -> list[tuple[str, bytes]]:
        """Return the responses that no server writes now, oldest first, each with its recipe."""
        with self._database.read() as db:
            both = select(_BY.response, recipes.c.recipe).join(recipes, recipes.c.response == _BY.response)
            rows = db.execute(both.where(_BY.seen < self._now() - LEASE_SECONDS).order_by(_BY.seen).limit(MOST_LEFT))
            return [(row.response, row.recipe) for row in rows]

    def take_over(self, response: str) -> bool:
        """Take the lease of a response that no server writes now. Returns False if another server was faster."""
        free = _BY.response == response, _BY.seen < self._now() - LEASE_SECONDS
        with self._database.write() as db:
            taken = update(leases).where(*free).values(server=self.server, seen=self._now())
            return bool(db.execute(taken).rowcount)

    def lock(self, key: str, former: str = "") -> None:
        """Take the lease of a conversation. Raises ConversationBusy if another server holds it.

        A `former` server, which has ended, loses the lease.
        """
        now = self._now()
        ended = now - LEASE_SECONDS
        given = {"key": key, "server": self.server, "now": now, "ended": ended, "former": former}
        with self._database.write(lasting=False) as db:
            if not _LOCK.run(db, **given).rowcount:
                raise ConversationBusy(BUSY)

    def unlock(self, key: str) -> None:
        """Give up the lease of a conversation, if this server holds it."""
        with self._database.write(lasting=False) as db:
            _UNLOCK.run(db, key=key, server=self.server)

    def held(self, db: Connection, responses: Collection[str]) -> set[str]:
        """Return the given responses that another server is writing, or will take over."""
        if not responses:
            return set()
        other = _BY.response.in_(responses), _BY.server != self.server, _BY.seen >= self._now() - LEASE_SECONDS
        left = select(recipes.c.response).where(recipes.c.response.in_(responses))
        return {*db.execute(select(_BY.response).where(*other)).scalars(), *db.execute(left).scalars()}

    def elsewhere(self, response: str) -> bool:
        """Whether another server writes a response."""
        with self._database.read() as db:
            return bool(self.held(db, [response]))

    def cancel(self, response: str) -> None:
        """Ask the server that writes a response to stop it."""
        with self._database.write() as db:
            db.execute(update(leases).where(_BY.response == response).values(cancelled=True))

    def renew(self, responses: Collection[str]) -> set[str]:
        """Renew the leases of this server's responses. Returns the cancelled and deleted responses, which must stop."""
        mine = _BY.server == self.server, _BY.response.in_(responses)
        with self._database.write(lasting=False) as db:
            db.execute(update(leases).where(*mine).values(seen=self._now()))
            old = select(_BY.response).where(_BY.seen < self._now() - KEPT_SECONDS)
            for table in (recipes, leases):
                db.execute(delete(table).where(table.c.response.in_(old)))
            going = select(_BY.response).where(*mine, ~_BY.cancelled)
            return {*responses} - {*db.execute(going).scalars()}
