"""Leases: record which server writes each running response, and which one changes a conversation.

A server that ends stops renewing its leases.
"""

from __future__ import annotations

import hashlib
import uuid
from collections.abc import Callable, Collection

from sqlalchemy import Connection, delete, insert, select, text, update

from holdfast.server.conversations.database import Database, leases
from holdfast.server.conversations.values import ConversationBusy

LEASE_SECONDS = 15.0
"""Seconds for which a lease holds without renewal.

This also allows for the clocks of servers with one database, which may differ by half of it.
"""
RENEW_SECONDS = 1.0
"""Seconds between two renewals. A server checks at the same interval which of its responses others cancelled."""
BUSY = "another response or edit of this conversation is in progress; try again when it has ended"
"""Message of ConversationBusy."""
KEPT_SECONDS = 100 * LEASE_SECONDS
"""Seconds for which the lease of an ended server stays in the table."""

_BY = leases.c
_LOCK = text(
    "INSERT INTO leases (response, server, seen, cancelled) VALUES (:key, :server, :now, false) "
    "ON CONFLICT (response) DO UPDATE SET server = excluded.server, seen = excluded.seen "
    "WHERE leases.server = excluded.server OR leases.seen < :ended"
)
"""Takes a conversation's lease, unless a server that runs holds it."""


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

    def begin(self, db: Connection, response: str) -> None:
        """Record that this server writes a response, within the transaction that stores the response's beginning."""
        db.execute(insert(leases).values(response=response, server=self.server, seen=self._now(), cancelled=False))

    def end(self, db: Connection, response: str) -> None:
        """Remove a lease, within the transaction that stores a response's end or deletes it."""
        db.execute(delete(leases).where(_BY.response == response))

    def lock(self, key: str) -> None:
        """Take the lease of a conversation. Raises ConversationBusy if another server holds it."""
        now = self._now()
        given = {"key": key, "server": self.server, "now": now, "ended": now - LEASE_SECONDS}
        with self._database.write(lasting=False) as db:
            if not db.execute(_LOCK, given).rowcount:
                raise ConversationBusy(BUSY)

    def unlock(self, key: str) -> None:
        """Give up the lease of a conversation, if this server holds it."""
        with self._database.write(lasting=False) as db:
            db.execute(delete(leases).where(_BY.response == key, _BY.server == self.server))

    def held(self, db: Connection, responses: Collection[str]) -> set[str]:
        """Return the given responses that another server is writing."""
        other = _BY.response.in_(responses), _BY.server != self.server, _BY.seen >= self._now() - LEASE_SECONDS
        return {*db.execute(select(_BY.response).where(*other)).scalars()} if responses else set()

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
            db.execute(delete(leases).where(_BY.seen < self._now() - KEPT_SECONDS))
            going = select(_BY.response).where(*mine, ~_BY.cancelled)
            return {*responses} - {*db.execute(going).scalars()}
