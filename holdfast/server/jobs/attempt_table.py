"""Attempts at batch lines and tuning jobs: how often an engine or a server ended while it had the work.

A row is written before the engine gets the work, and deleted when the work is done. So a row that is still `running`
after its server's end proves that the work was in flight then, in whatever way the server ended.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import TypeVar

from sqlalchemy import Boolean, Column, Connection, Integer, Table, delete, insert, select, update

from holdfast.server.conversations.database import NAME, Database, tables
from holdfast.server.jobs.values import Attempt

T = TypeVar("T")

WHOLE = 0
"""Number that stands for an item as a whole: a tuning job, or a batch whose input is checked. Lines begin at 1."""
AT_ONCE = 500
"""Maximum number of values in one query."""

attempts = Table(
    "attempts",
    tables,
    Column("item", NAME, primary_key=True),
    Column("number", Integer, primary_key=True),
    Column("running", Boolean, nullable=False),
    Column("died", Integer, nullable=False),
    Column("cut", Integer, nullable=False),
)
"""Attempts. `item` is a batch or a tuning job.

`number` is a line of the batch, or the step after which the job wrote the adapter being loaded. `died` and `cut` are
the counts in `Attempt`.
"""

Found = dict[int, Attempt]
"""Attempts at an item, by number."""


class AttemptTable:
    """Attempts at the work of this server. Each method is one transaction."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def begin(self, work: Iterable[tuple[str, int]]) -> None:
        """Record that an engine gets this work, given as pairs of item and number."""
        by_item: dict[str, list[int]] = {}
        for item, number in work:
            by_item.setdefault(item, []).append(number)
        with self._database.write() as db:
            for item, numbers in by_item.items():
                for some in _parts(numbers):
                    these = (attempts.c.item == item) & attempts.c.number.in_(some)
                    known = set(db.execute(select(attempts.c.number).where(these)).scalars())
                    db.execute(update(attempts).where(these).values(running=True))
                    if new := set(some) - known:
                        fresh = {"item": item, "running": True, "died": 0, "cut": 0}
                        db.execute(insert(attempts), [fresh | {"number": number} for number in sorted(new)])

    def end(self, died: Mapping[str, Collection[int]], safe: Mapping[str, Collection[int]]) -> None:
        """Record that engines no longer have this work. `died` ended with its engine; `safe` was taken back before."""
        with self._database.write() as db:
            for ended, deaths in ((died, 1), (safe, 0)):
                for item, numbers in ended.items():
                    for some in _parts(numbers):
                        these = (attempts.c.item == item) & attempts.c.number.in_(some) & attempts.c.running
                        changed = update(attempts).where(these)
                        db.execute(changed.values(running=False, died=attempts.c.died + deaths))

    def clear(self, item: str) -> None:
        """Reset the counts of an item that has progressed. Its engine may still have it."""
        with self._database.write() as db:
            db.execute(update(attempts).where(attempts.c.item == item).values(died=0, cut=0))

    def forget(self, item: str, numbers: Collection[int]) -> None:
        """Delete the attempts at the given numbers of an item, because that work is done."""
        with self._database.write() as db:
            forget(db, item, numbers)

    def found(self, item: str) -> Found:
        """Return the attempts at an item during which an engine or a server ended."""
        with self._database.read() as db:
            return ended_of(db, [item]).get(item, {})


def cut_off(db: Connection, items: Collection[str]) -> dict[str, Found]:
    """Record that the servers of these items ended without a report. Returns all attempts at each item."""
    for some in _parts(items):
        running = attempts.c.item.in_(some) & attempts.c.running
        db.execute(update(attempts).where(running).values(running=False, cut=attempts.c.cut + 1))
    return ended_of(db, items)


def ended_of(db: Connection, items: Collection[str]) -> dict[str, Found]:
    """Return the attempts at each of these items during which an engine or a server ended."""
    found: dict[str, Found] = {}
    for some in _parts(items):
        for row in db.execute(select(attempts).where(attempts.c.item.in_(some), attempts.c.died + attempts.c.cut > 0)):
            found.setdefault(row.item, {})[row.number] = Attempt(died=row.died, cut=row.cut)
    return found


def forget(db: Connection, item: str, numbers: Collection[int] | None = None) -> None:
    """Delete the attempts at finished work: at these numbers of an item, or at all of it."""
    if numbers is None:
        db.execute(delete(attempts).where(attempts.c.item == item))
        return
    for some in _parts(numbers):
        db.execute(delete(attempts).where(attempts.c.item == item, attempts.c.number.in_(some)))


def _parts(all_of_them: Collection[T]) -> Iterable[list[T]]:
    """Split a collection into parts that are small enough for one query."""
    listed = list(all_of_them)
    return (listed[at : at + AT_ONCE] for at in range(0, len(listed), AT_ONCE))
