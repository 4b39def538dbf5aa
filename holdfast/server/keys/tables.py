"""Keys in the store's database. Each method of `KeyTable` is one transaction."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from sqlalchemy import (
    BigInteger,
    Column,
    Connection,
    Float,
    Integer,
    PrimaryKeyConstraint,
    Row,
    String,
    Table,
    insert,
    or_,
    select,
    update,
)

from holdfast.server.conversations.database import NAME, Database, MigrationStep, tables
from holdfast.server.keys.values import Key, Limits, Secret

keys = Table(
    "api_keys",
    tables,
    Column("name", NAME, primary_key=True),
    Column("tenant", NAME, nullable=False),
    Column("scopes", String(64), nullable=False),
    Column("created", Float, nullable=False),
    Column("expires", Float),
    Column("revoked", Float),
    *(Column(field.name, BigInteger) for field in fields(Limits)),
)
"""Keys. A revoked key stays, so that its name is never given to another one."""

secrets = Table(
    "api_key_secrets",
    tables,
    Column("digest", NAME, primary_key=True),
    Column("key", NAME, nullable=False, index=True),
    Column("created", Float, nullable=False),
    Column("until", Float),
)
"""Digests of the keys' secrets."""

versions = Table("api_keys_version", tables, Column("id", Integer, primary_key=True), Column("version", BigInteger))
"""One row with the number of changes to keys. Servers read the keys again when it has changed."""

usage = Table(
    "key_usage",
    tables,
    Column("kind", String(16), nullable=False),
    Column("key", NAME, nullable=False),
    Column("model", String(255), nullable=False),
    Column("width", Integer, nullable=False),
    Column("start", BigInteger, nullable=False),
    *(Column(name, BigInteger, nullable=False) for name in ("requests", "prompt", "cached", "output")),
    PrimaryKeyConstraint("width", "start", "kind", "key", "model"),
)
"""Requests and tokens by key and model, in buckets of `width` seconds that begin at `start`."""

counts = Table(
    "key_counts",
    tables,
    Column("key", NAME, primary_key=True),
    Column("server", NAME, primary_key=True),
    Column("requests", BigInteger, nullable=False),
    Column("tokens", BigInteger, nullable=False),
    Column("seen", Float, nullable=False, index=True),
)
"""Requests and tokens that each server process has charged to each key since the process started."""

months = Table(
    "key_months",
    tables,
    Column("month", String(7), primary_key=True),
    Column("key", NAME, primary_key=True),
    Column("tokens", BigInteger, nullable=False),
)
"""Prompt and output tokens of each key by month, as in 2026-11."""


def _create(db: Connection) -> None:
    for table in (keys, secrets, versions, usage, counts, months):
        table.create(db)


STEPS: tuple[MigrationStep, ...] = (_create,)
"""Migration steps of keys and their usage. They follow those of jobs (`server.schema`)."""


@dataclass(frozen=True, slots=True)
class Snapshot:
    """All secrets by digest, at one version of the keys."""

    version: int
    secrets: Mapping[str, Secret]


NO_KEYS = Snapshot(0, {})


class KeyTable:
    """The keys of a store. Every method raises ValueError with a message for the operator."""

    def __init__(self, database: Database, now: Callable[[], float] = time.time) -> None:
        self._database = database
        self._now = now

    def add(self, key: Key, digest: str) -> None:
        """Add a key with its first secret."""
        with self._database.write() as db:
            if (found := db.execute(select(keys).where(keys.c.name == key.name)).one_or_none()) is not None:
                state = "is revoked, and its name is not given again" if found.revoked else "exists"
                raise ValueError(f"a key named {key.name} {state}; choose another name")
            values = {name: getattr(key, name) for name in ("name", "tenant", "created", "expires", "revoked")}
            limits = {field.name: getattr(key.limits, field.name) for field in fields(Limits)}
            db.execute(insert(keys).values(**values, **limits, scopes=",".join(key.scopes)))
            self._add_secret(db, key.name, digest)

    def rotate(self, name: str, digest: str, overlap: float, expires: float | None = None) -> Key:
        """Give a key another secret. Earlier secrets end after `overlap` seconds, or sooner if they would have anyway.

        `expires` is the key's new expiry; None keeps the old one.
        """
        with self._database.write() as db:
            key, end = self._valid(db, name, or_expired=expires is not None), self._now() + overlap
            longer = or_(secrets.c.until.is_(None), secrets.c.until > end)
            db.execute(update(secrets).where(secrets.c.key == name, longer).values(until=end))
            if expires is not None:
                db.execute(update(keys).where(keys.c.name == name).values(expires=expires))
                key = replace(key, expires=expires)
            self._add_secret(db, name, digest)
            return key

    def revoke(self, name: str) -> Key:
        """Revoke a key with all its secrets."""
        with self._database.write() as db:
            key = replace(self._valid(db, name, or_expired=True), revoked=self._now())
            db.execute(update(keys).where(keys.c.name == name).values(revoked=key.revoked))
            self._changed(db)
            return key

    def limit(self, name: str, changes: Mapping[str, int | None]) -> Key:
        """Change some limits of a key, by field of `Limits`."""
        with self._database.write() as db:
            key = self._valid(db, name, or_expired=True)
            key = replace(key, limits=replace(key.limits, **changes))
            db.execute(update(keys).where(keys.c.name == name).values(**changes))
            self._changed(db)
            return key

    def all(self) -> list[Key]:
        """Return all keys in the order of their names, revoked ones included."""
        with self._database.read() as db:
            return [_key(row) for row in db.execute(select(keys).order_by(keys.c.name))]

    def snapshot(self, version: int = -1) -> Snapshot | None:
        """Return all secrets; None if the keys still have this version."""
        with self._database.read() as db:
            current = db.execute(select(versions.c.version)).scalar() or 0
            if current == version:
                return None
            by_name = {row.name: _key(row) for row in db.execute(select(keys))}
            found = db.execute(select(secrets))
            return Snapshot(current, {row.digest: Secret(by_name[row.key], row.until) for row in found})

    def _valid(self, db: Connection, name: str, *, or_expired: bool = False) -> Key:
        """Return a key that may still be changed."""
        row = db.execute(select(keys).where(keys.c.name == name)).one_or_none()
        if row is None:
            raise ValueError(f"there is no key named {name[:80]}; holdfast keys list shows all")
        key = _key(row)
        if key.revoked is not None:
            raise ValueError(f"the key {name} is revoked; add another one")
        if not or_expired and not key.valid(self._now()):
            raise ValueError(f"the key {name} has expired; give it a later end with --expires")
        return key

    def _add_secret(self, db: Connection, name: str, digest: str) -> None:
        held = db.execute(select(secrets.c.key).where(secrets.c.digest == digest)).scalar()
        if held is not None:
            raise ValueError(f"this secret is already that of the key {held}")
        db.execute(insert(secrets).values(digest=digest, key=name, created=self._now(), until=None))
        self._changed(db)

    def _changed(self, db: Connection) -> None:
        if not db.execute(update(versions).values(version=versions.c.version + 1)).rowcount:
            db.execute(insert(versions).values(id=1, version=1))


def _key(row: Row[Any]) -> Key:
    limits = Limits(**{field.name: getattr(row, field.name) for field in fields(Limits)})
    return Key(
        name=row.name, tenant=row.tenant, scopes=tuple(row.scopes.split(",")), created=row.created,
        expires=row.expires, revoked=row.revoked, limits=limits,
    )  # fmt: skip
