"""AdapterTable: the adapters that requests have loaded, for all servers that share engines and a store."""

from __future__ import annotations

from typing import NamedTuple

from sqlalchemy import and_, delete, func, insert, select

from holdfast.server.conversations.database import Database, adapter_numbers, adapters
from holdfast.server.conversations.values import Conflict


class StoredAdapter(NamedTuple):
    """One adapter that all servers of a model serve."""

    name: str
    path: str
    """Directory of the adapter, which all engines see at the same path."""
    tenant: str | None
    """Tenant that it belongs to; None: all tenants may use it."""
    version: str
    """Random name of this load. Another load under the same name has another one."""
    number: int = 1
    """Number of this version of the adapter's weights."""


class VersionConflict(Conflict):
    """The version of an adapter is not the one that a client expects."""

    code = "version_conflict"


class AdapterTable:
    """Adapters by the model that they are for. Each method is one transaction."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def all(self, model: str) -> list[StoredAdapter]:
        """Return all adapters of a model, by name."""
        columns = (adapters.c.name, adapters.c.path, adapters.c.tenant, adapters.c.version)
        number = func.coalesce(adapter_numbers.c.number, 1)
        same = and_(adapter_numbers.c.model == adapters.c.model, adapter_numbers.c.name == adapters.c.name)
        found = select(*columns, number).outerjoin(adapter_numbers, same)
        with self._database.read() as db:
            rows = db.execute(found.where(adapters.c.model == model).order_by(adapters.c.name))
            return [StoredAdapter(*row) for row in rows]

    def directories(self) -> list[str]:
        """Return the directories of the adapters of all models."""
        with self._database.read() as db:
            return [*db.execute(select(adapters.c.path)).scalars()]

    def put(self, model: str, adapter: StoredAdapter, before: int = 0, expected: int | None = None) -> int:
        """Store the next version of an adapter, in place of one with the same name. Returns its number.

        `before` is the number of the version before if the store has none: 0 for a new name. Raises VersionConflict if
        a version before has another number than `expected`.
        """
        own = adapters.c.model == model, adapters.c.name == adapter.name
        numbered = adapter_numbers.c.model == model, adapter_numbers.c.name == adapter.name
        with self._database.write() as db:
            number = db.execute(select(adapter_numbers.c.number).where(*numbered)).scalar() or before
            if expected is not None and number != expected:
                reason = f"adapter {adapter.name[:128]} has version {number}, and expected_version is {expected}"
                raise VersionConflict(f"{reason}; another client came first")
            db.execute(delete(adapters).where(*own))
            db.execute(delete(adapter_numbers).where(*numbered))
            fields = {"name": adapter.name, "path": adapter.path, "tenant": adapter.tenant, "version": adapter.version}
            db.execute(insert(adapters).values(model=model, **fields))
            db.execute(insert(adapter_numbers).values(model=model, name=adapter.name, number=number + 1))
        return number + 1

    def remove(self, model: str, name: str) -> None:
        """Remove an adapter, if it is stored."""
        with self._database.write() as db:
            for table in (adapters, adapter_numbers):
                db.execute(delete(table).where(table.c.model == model, table.c.name == name))
