"""AdapterTable: the adapters that requests have loaded, for all servers that share engines and a store."""

from __future__ import annotations

from typing import NamedTuple

from sqlalchemy import delete, insert, select

from holdfast.server.conversations.database import Database, adapters


class StoredAdapter(NamedTuple):
    """One adapter that all servers of a model serve."""

    name: str
    path: str
    """Directory of the adapter, which all engines see at the same path."""
    tenant: str | None
    """Tenant that it belongs to; None: all tenants may use it."""
    version: str
    """Random name of this load. Another load under the same name has another one."""


class AdapterTable:
    """Adapters by the model that they are for. Each method is one transaction."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def all(self, model: str) -> list[StoredAdapter]:
        """Return all adapters of a model, by name."""
        columns = (adapters.c.name, adapters.c.path, adapters.c.tenant, adapters.c.version)
        with self._database.read() as db:
            rows = db.execute(select(*columns).where(adapters.c.model == model).order_by(adapters.c.name))
            return [StoredAdapter(*row) for row in rows]

    def put(self, model: str, adapter: StoredAdapter) -> None:
        """Store an adapter, in place of one with the same name."""
        with self._database.write() as db:
            db.execute(delete(adapters).where(adapters.c.model == model, adapters.c.name == adapter.name))
            db.execute(insert(adapters).values(model=model, **adapter._asdict()))

    def remove(self, model: str, name: str) -> None:
        """Remove an adapter, if it is stored."""
        with self._database.write() as db:
            db.execute(delete(adapters).where(adapters.c.model == model, adapters.c.name == name))
