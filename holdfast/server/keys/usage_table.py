"""The usage of keys in the store's database: buckets of minutes and days, months, and what each server has charged."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from sqlalchemy import Connection, Table, delete, func, select
from sqlalchemy.dialects import postgresql, sqlite

from holdfast.server.conversations.database import Database
from holdfast.server.keys.tables import counts, months, usage

DAY, HOUR, MINUTE = 86400, 3600, 60
KEPT_MINUTES = 32 * DAY
"""Seconds for which minutes are kept. Days are kept forever."""
KEPT_COUNTS = HOUR
"""Seconds for which the charges of a server that has ended are kept."""


class Slot(NamedTuple):
    """A minute of one key's requests for one model."""

    kind: str
    key: str
    model: str
    minute: int
    """Beginning of the minute in seconds since 1970."""
    month: str


@dataclass(slots=True)
class Used:
    """Requests and tokens."""

    requests: int = 0
    prompt: int = 0
    cached: int = 0
    output: int = 0

    def add(self, other: Used) -> None:
        """Add another one's numbers."""
        self.requests += other.requests
        self.prompt += other.prompt
        self.cached += other.cached
        self.output += other.output


class Bucketed(NamedTuple):
    """The usage of one key and model in one bucket."""

    start: int
    key: str
    model: str
    used: Used


@dataclass(slots=True)
class Exchanged:
    """State of other servers and of the month, as the store has it."""

    others: Mapping[tuple[str, str], tuple[int, int]] = field(default_factory=dict)
    """Requests and tokens charged since its start, by key and other server."""
    spent: Mapping[str, int] = field(default_factory=dict)
    """Tokens of this month by key."""


class UsageTable:
    """The usage of all keys. Each method is one transaction."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def write(
        self, server: str, used: Mapping[Slot, Used], charged: Mapping[str, tuple[int, int]], now: float, month: str
    ) -> Exchanged:
        """Add usage, record what this server has charged in total, and return what `exchange` does.

        Rows are written in one order by all servers, so that no two of them wait for each other.
        """
        with self._database.write() as db:
            for slot, each in sorted(used.items()):
                numbers = {name: getattr(each, name) for name in ("requests", "prompt", "cached", "output")}
                for width in (MINUTE, DAY):
                    start = slot.minute // width * width
                    place = {"width": width, "start": start, "kind": slot.kind, "key": slot.key, "model": slot.model}
                    _add(db, usage, place, numbers)
            for (in_month, key), tokens in sorted(_by_month(used).items()):
                _add(db, months, {"month": in_month, "key": key}, {"tokens": tokens})
            for key, (requests, tokens) in sorted(charged.items()):
                row = {"requests": requests, "tokens": tokens, "seen": now}
                _put(db, counts, {"key": key, "server": server}, row)
            db.execute(delete(usage).where(usage.c.width == MINUTE, usage.c.start < now - KEPT_MINUTES))
            db.execute(delete(counts).where(counts.c.seen < now - KEPT_COUNTS))
            return _exchange(db, server, month)

    def exchange(self, server: str, month: str) -> Exchanged:
        """Return what other servers have charged, and the tokens of a month."""
        with self._database.read() as db:
            return _exchange(db, server, month)

    def buckets(self, kind: str, width: int, start: int, end: int) -> list[Bucketed]:
        """Return the usage of all keys from `start` to `end`, in buckets of `width` seconds that begin in between."""
        kept = DAY if width == DAY else MINUTE
        first = (usage.c.start - usage.c.start % width).label("first")
        sums = [func.sum(usage.c[name]) for name in ("requests", "prompt", "cached", "output")]
        place = usage.c.kind == kind, usage.c.width == kept, usage.c.start >= start, usage.c.start < end
        groups = first, usage.c.key, usage.c.model
        with self._database.read() as db:
            rows = db.execute(select(*groups, *sums).where(*place).group_by(*groups).order_by(*groups))
            return [Bucketed(int(at), key, model, Used(*map(int, given))) for at, key, model, *given in rows]


def _exchange(db: Connection, server: str, month: str) -> Exchanged:
    others = db.execute(select(counts).where(counts.c.server != server))
    spent = db.execute(select(months.c.key, months.c.tokens).where(months.c.month == month))
    return Exchanged(
        {(row.key, row.server): (row.requests, row.tokens) for row in others}, {row.key: row.tokens for row in spent}
    )


def _by_month(used: Mapping[Slot, Used]) -> dict[tuple[str, str], int]:
    found: dict[tuple[str, str], int] = {}
    for slot, each in used.items():
        place = slot.month, slot.key
        found[place] = found.get(place, 0) + each.prompt + each.output
    return found


def _insert(db: Connection, table: Table) -> Any:
    return (postgresql if db.dialect.name == "postgresql" else sqlite).insert(table)


def _add(db: Connection, table: Table, place: Mapping[str, Any], numbers: Mapping[str, int]) -> None:
    """Add numbers to the row at `place`, or create it."""
    sums = {name: table.c[name] + number for name, number in numbers.items()}
    _upsert(db, table, place, numbers, sums)


def _put(db: Connection, table: Table, place: Mapping[str, Any], values: Mapping[str, Any]) -> None:
    """Set the values of the row at `place`, or create it."""
    _upsert(db, table, place, values, values)


def _upsert(
    db: Connection, table: Table, place: Mapping[str, Any], values: Mapping[str, Any], changed: Mapping[str, Any]
) -> None:
    new = _insert(db, table).values(**place, **values)
    db.execute(new.on_conflict_do_update(index_elements=list(place), set_=dict(changed)))


def total(rows: Iterable[Used]) -> Used:
    """Return the sum of usage."""
    found = Used()
    for each in rows:
        found.add(each)
    return found
