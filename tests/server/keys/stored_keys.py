"""Keys of a store, changed by another program than the server, for the tests of keys."""

from __future__ import annotations

import time
from typing import Any

from holdfast.server.conversations.database import Database, migrate
from holdfast.server.keys.tables import KeyTable
from holdfast.server.keys.values import Key, Scope, digest_of, tenant_of_secret
from holdfast.server.schema import SCHEMA


class Stored:
    """The keys of a store."""

    def __init__(self, database: Database) -> None:
        with database.write() as db:
            migrate(db, SCHEMA)
        self.table = KeyTable(database)

    def add(self, name: str, secret: str, *scopes: Scope, tenant: str = "", **more: Any) -> None:
        """Add a key with a secret. Without `tenant`, it has the tenant of the secret."""
        owner = tenant or tenant_of_secret(secret)
        key = Key(name=name, tenant=owner, scopes=scopes or ("use",), created=time.time(), **more)
        self.table.add(key, digest_of(secret.encode()))

    def rotate(self, name: str, secret: str, overlap: float = 0.0) -> None:
        """Give a key another secret."""
        self.table.rotate(name, digest_of(secret.encode()), overlap)


def bearer(key: str) -> dict[str, str]:
    """The header that carries a key."""
    return {"authorization": f"Bearer {key}"}
