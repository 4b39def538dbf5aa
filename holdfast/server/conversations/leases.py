"""Leases: record which server writes each running response. A server that ends stops renewing its leases."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Collection

from sqlalchemy import Connection, delete, insert, select, update

from holdfast.server.conversations.database import Database, leases

LEASE_SECONDS = 15.0
"""Seconds for which a lease holds without renewal.

This also allows for the clocks of servers with one database, which may differ by half of it.
"""
RENEW_SECONDS = 1.0
"""Seconds between two renewals. A server checks at the same interval which of its responses others cancelled."""
KEPT_SECONDS = 100 * LEASE_SECONDS
"""Seconds for which the lease of an ended server stays in the table."""

_BY = leases.c


class Leases:
    """Leases of all servers with one database. Each response that is stored before its end has a lease."""

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
        with self._database.write() as db:
            db.execute(update(leases).where(*mine).values(seen=self._now()))
            db.execute(delete(leases).where(_BY.seen < self._now() - KEPT_SECONDS))
            going = select(_BY.response).where(*mine, ~_BY.cancelled)
            return {*responses} - {*db.execute(going).scalars()}
