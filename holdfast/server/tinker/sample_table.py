"""SamplerTable: the sampling sessions of clients. Each method is one transaction."""

from __future__ import annotations

from typing import Any, NamedTuple

from sqlalchemy import (
    BigInteger,
    Column,
    Connection,
    Float,
    Integer,
    Row,
    String,
    Table,
    delete,
    insert,
    select,
    update,
)

from holdfast.server.conversations.database import NAME, Database, tables
from holdfast.server.conversations.values import NotFound

samplers = Table(
    "training_samplers",
    tables,
    Column("id", NAME, primary_key=True),
    Column("tenant", NAME, nullable=False),
    Column("session", NAME, nullable=False, index=True),
    Column("seq", BigInteger, nullable=False),
    Column("base", String(512), nullable=False),
    Column("path", String(512)),
    Column("checkpoint", NAME),
    Column("created", Float, nullable=False),
    Column("used", Float, nullable=False, index=True),
    Column("clients", Integer, nullable=False),
)
"""Sampling sessions. Any server may set `used`, the time of the last request, and `clients`."""


class Sampler(NamedTuple):
    """A sampling session: a client that samples from the base model, or from one set of saved weights."""

    id: str
    tenant: str
    session: str
    """The session that it belongs to."""
    seq: int
    """Its number within the session, given by the client."""
    base: str
    """Name of the base model."""
    path: str | None
    """Path of the weights; None for the base model."""
    checkpoint: str | None
    """Id of the weights' checkpoint; None for the base model."""
    created: float
    used: float
    """Time of the last request, to within a minute."""
    clients: int = 0
    """Number of copies of the client that have joined."""


def create_sampler_table(db: Connection) -> None:
    """Create the table, unless it exists. It has no version, because an older server ignores it."""
    samplers.create(db, checkfirst=True)


class SamplerTable:
    """Table of sampling sessions. Raises NotFound for one that does not exist or belongs to another tenant."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def open(self, sampler: Sampler) -> Sampler:
        """Add a sampling session, or return the one that has its id."""
        with self._database.write() as db:
            if (known := _row(db, sampler.id)) is not None:
                return _owned(known, sampler.tenant, sampler.id)
            db.execute(insert(samplers).values(**sampler._asdict()))
            return sampler

    def get(self, tenant: str, id: str) -> Sampler:
        """Return a sampling session."""
        with self._database.read() as db:
            return _owned(_row(db, id), tenant, id)

    def join(self, tenant: str, id: str) -> int:
        """Count one more copy of the client. Returns its number, from 1 on."""
        with self._database.write() as db:
            number = _owned(_row(db, id), tenant, id).clients + 1
            db.execute(update(samplers).where(samplers.c.id == id).values(clients=number))
            return number

    def use(self, id: str, now: float) -> None:
        """Note the time of a request."""
        with self._database.write(lasting=False) as db:
            db.execute(update(samplers).where(samplers.c.id == id).values(used=now))

    def sessions(self) -> list[str]:
        """Return the sessions that have sampling sessions."""
        with self._database.read() as db:
            return [*db.execute(select(samplers.c.session).distinct()).scalars()]

    def of_session(self, session: str) -> list[Sampler]:
        """Return the sampling sessions of a session, the oldest first."""
        with self._database.read() as db:
            own = select(samplers).where(samplers.c.session == session)
            return [Sampler(*row) for row in db.execute(own.order_by(samplers.c.created, samplers.c.seq))]

    def delete(self, ids: list[str]) -> None:
        """Delete sampling sessions."""
        with self._database.write() as db:
            db.execute(delete(samplers).where(samplers.c.id.in_(ids)))


def _row(db: Connection, id: str) -> Row[Any] | None:
    return db.execute(select(samplers).where(samplers.c.id == id)).one_or_none()


def _owned(row: Row[Any] | None, tenant: str, id: str) -> Sampler:
    if row is None or row.tenant != tenant:
        raise NotFound("sampling_session", id, "sampling_session_id")
    return Sampler(**row._mapping)
