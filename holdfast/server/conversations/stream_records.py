"""Stream records: the recipes of streamed responses in progress, so that another server can write them again.

A streamed response is stored when it ends. Until then the store has only its recipe. If its server and its engine end
together, another server computes it again, and sends the events that its client has not seen.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from sqlalchemy import Connection, bindparam, delete, exists, select, text, update

from holdfast.server.conversations.database import NAME, Database, leases, streams
from holdfast.server.conversations.leases import Leases
from holdfast.server.conversations.prepared import Prepared
from holdfast.server.conversations.values import Conflict

KEPT_SECONDS = 600.0
"""Seconds for which the recipes of an ended server stay. A client that comes later finds no response."""

NOBODY = ""
"""Stands for the server of a record that any server may take. Its lease says when the last record was left."""

_BY = streams.c
_BEGIN = Prepared(
    text(
        "INSERT INTO streams (response, tenant, server, parent, recipe) "
        "VALUES (:response, :tenant, :server, :parent, :recipe) "
        "ON CONFLICT (response) DO NOTHING"
    ).bindparams(bindparam("tenant", type_=NAME))
)
_END = Prepared(delete(streams).where(_BY.response == bindparam("id")))


class ResponseInProgress(Conflict):
    """A server that runs is writing the response. It will be stored, or can be asked for again, within moments."""

    code = "response_in_progress"
    retry_after = 1


IN_PROGRESS = "this response is being written for another connection; try again when it has ended"
"""Message of ResponseInProgress."""


class StreamRecord(NamedTuple):
    """Row of the store for a streamed response in progress."""

    response: str
    """Id of the response."""
    tenant: str
    recipe: bytes
    """The response before its first token (`recipe.Recipe`)."""
    parent: str | None
    """Id of the turn that the response builds on; None for a first turn, and after a client edited the items."""


class StreamRecords:
    """Records of all servers with one database.

    A record belongs to the server that writes the response. Its writes do not wait for the disk: a record is of use
    while other servers run, so it need not outlive a loss of power.
    """

    def __init__(self, database: Database, leases: Leases, now: Callable[[], float]) -> None:
        self._database, self._leases, self._now = database, leases, now

    def begin(self, record: StreamRecord) -> None:
        """Record that this server writes a response. Raises ResponseInProgress if there is a record of it."""
        with self._database.write(lasting=False) as db:
            self._leases.attend(db)
            if not _BEGIN.run(db, **record._asdict(), server=self._leases.server).rowcount:
                raise ResponseInProgress(IN_PROGRESS)

    def find(self, tenant: str, response: str) -> StreamRecord | None:
        """Return the record of a tenant's response, if there is one."""
        columns = (getattr(_BY, name) for name in StreamRecord._fields)
        with self._database.read() as db:
            row = db.execute(select(*columns).where(_BY.response == response, _BY.tenant == tenant)).one_or_none()
            return None if row is None else StreamRecord(*row)

    def take(self, tenant: str, response: str, *, ended: bool = False) -> bool:
        """Give this server the record of a response. Returns False if there is none.

        `ended` means that its server is known to have ended. Raises ResponseInProgress if another server writes it.
        """
        own = self._leases.server
        with self._database.write(lasting=False) as db:
            found = select(_BY.server).where(_BY.response == response, _BY.tenant == tenant)
            server = db.execute(found).scalar()
            if server is None:
                return False
            if not (ended or server in (own, NOBODY)) and self._leases.attended(db, server):
                raise ResponseInProgress(IN_PROGRESS)
            self._leases.attend(db)
            # In PostgreSQL, another server may have taken it since it was read.
            taken = update(streams).where(_BY.response == response, _BY.server == server).values(server=own)
            if not db.execute(taken).rowcount:
                raise ResponseInProgress(IN_PROGRESS)
            return True

    def end(self, db: Connection, response: str) -> None:
        """Remove a record, within the transaction that stores the response."""
        _END.run(db, id=response)

    def drop(self, response: str) -> None:
        """Remove this server's record of a response that will not be stored."""
        with self._database.write(lasting=False) as db:
            db.execute(delete(streams).where(_BY.response == response, _BY.server == self._leases.server))

    def leave(self, response: str) -> None:
        """Let any server take this server's record."""
        with self._database.write(lasting=False) as db:
            own = _BY.response == response, _BY.server == self._leases.server
            if db.execute(update(streams).where(*own).values(server=NOBODY)).rowcount:
                self._leases.attend(db, NOBODY)

    def drop_old(self) -> None:
        """Remove the records of servers that ended long ago, and those that were left long ago."""
        seen = leases.c.response == _BY.server, leases.c.seen >= self._now() - KEPT_SECONDS
        with self._database.write(lasting=False) as db:
            db.execute(delete(streams).where(~exists().where(*seen)))
