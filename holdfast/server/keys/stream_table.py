"""StreamTable: the requests in progress of each key, at all servers with one database."""

from __future__ import annotations

import hashlib

from sqlalchemy import Connection, delete, func, insert, select, update

from holdfast.server.conversations.database import Database, key_streams

SEEN_SECONDS = 10.0
"""Seconds for which the requests of a server count that does not renew them. It has ended."""

_BY = key_streams.c


class StreamTable:
    """Requests in progress by key and server. Each method is one transaction."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def enter(self, server: str, key: str, streams: int, limit: int, now: float) -> bool:
        """Record that a server has this many requests of a key, if all servers together have at most `limit`.

        Returns whether they do. Transactions for one key run one after the other.
        """
        with self._database.write() as db:
            _lock(db, key)
            fresh = _BY.key == key, _BY.server != server, _BY.seen >= now - SEEN_SECONDS
            others = db.execute(select(func.sum(_BY.streams)).where(*fresh)).scalar() or 0
            if others + streams > limit:
                return False
            _put(db, server, key, streams, now)
            return True

    def leave(self, server: str, key: str, streams: int, now: float) -> None:
        """Record that a server has only this many requests of a key left."""
        with self._database.write() as db:
            _lock(db, key)
            _put(db, server, key, streams, now)

    def renew(self, server: str, now: float) -> None:
        """Let the requests of a server count on, and drop those of servers that have ended."""
        with self._database.write() as db:
            db.execute(update(key_streams).where(_BY.server == server).values(seen=now))
            db.execute(delete(key_streams).where(_BY.seen < now - SEEN_SECONDS))


def _lock(db: Connection, key: str) -> None:
    """Let other transactions for this key wait. In SQLite the transaction itself keeps other writers out."""
    if db.dialect.name == "postgresql":
        number = int.from_bytes(hashlib.sha256(key.encode()).digest()[:8], "big", signed=True)
        db.execute(select(func.pg_advisory_xact_lock(number)))


def _put(db: Connection, server: str, key: str, streams: int, now: float) -> None:
    db.execute(delete(key_streams).where(_BY.key == key, _BY.server == server))
    if streams:
        db.execute(insert(key_streams).values(key=key, server=server, streams=streams, seen=now))
