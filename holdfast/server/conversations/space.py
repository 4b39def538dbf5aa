"""Space accounting: tracks how much each tenant stores, and drops threads to keep the store within its bounds."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from sqlalchemy import (
    ColumnElement,
    Connection,
    Row,
    bindparam,
    delete,
    exists,
    func,
    literal,
    literal_column,
    select,
    text,
    union_all,
    update,
)  # fmt: skip

from holdfast.server.conversations import counters, search_index
from holdfast.server.conversations.database import NAME, chats, conversations, items, threads, turns
from holdfast.server.conversations.prepared import Prepared
from holdfast.server.conversations.values import Bounds, ThreadTooLarge

log = logging.getLogger(__name__)

SHARE, MOST_THREAD = 8, 1 << 30
"""Divisor of the store's size that gives a thread's maximum size, and the maximum whatever the store's size.

They keep one thread from displacing all others.
"""
BATCH = 64
"""Maximum number of threads that one write drops. A longer cleanup would delay turns."""
RECOUNT, RECOUNT_OVER_BOUNDS = 256, 32
"""Number of writes between two counts of the stored sizes: within the bounds, and beyond them.

Counters are read again because other servers may write to the same database. Beyond the bounds this happens sooner,
because others may have dropped threads. Within the bounds only the sum of all counters is read, beyond them each.
"""
LOG_SECONDS = 60.0
"""Minimum number of seconds between two lines of the log about dropped threads."""

_GROW = Prepared(
    text(
        "INSERT INTO threads (id, tenant, active, bytes) VALUES (:id, :tenant, :now, :size) "
        "ON CONFLICT (id) DO UPDATE SET active = excluded.active, bytes = threads.bytes + excluded.bytes "
        "RETURNING bytes"
    ).bindparams(bindparam("id", type_=NAME), bindparam("tenant", type_=NAME))
)
"""Begins a thread, or lets it grow. Its row is the thread's new size."""
_IDLE = (
    select(threads.c.id, threads.c.tenant, threads.c.bytes, threads.c.active)
    .where(threads.c.id != bindparam("spare"))
    .order_by(threads.c.active)
    .limit(1)
)
# The order of `threads_by_tenant`. Given `tenant =` alone, PostgreSQL may pass many threads of other tenants first.
_IDLE_OF = (
    _IDLE.where(threads.c.tenant.between(bindparam("tenant"), bindparam("tenant")))
    .order_by(None)
    .order_by(threads.c.tenant, threads.c.active)
)
SIZE: ColumnElement[int] = sum(
    (func.length(blob) for blob in (turns.c.response, turns.c.input, turns.c.history, turns.c.tokens)),
    literal_column("0"),
)
"""Size of a turn in bytes."""
_CHILD = turns.alias()
_REMOVE = (
    delete(turns)
    .where(
        turns.c.id == bindparam("turn"),
        ~turns.c.visible,
        ~exists().where(_CHILD.c.parent == turns.c.id),
        ~exists().where(conversations.c.thread == turns.c.thread, conversations.c.head == turns.c.id),
    )
    .returning(turns.c.parent, SIZE.label("size"))
)
_INHABITED = union_all(
    *(
        select(literal(1)).where(exists().where(table.c.thread == bindparam("thread")))
        for table in (turns, conversations)
    )
)


@dataclass
class Held:
    """Number and size of threads, of one tenant or of all, at the last count plus this server's changes since."""

    threads: int = 0
    bytes: int = 0

    def add(self, threads: int, size: int) -> None:
        """Add a number of threads and bytes."""
        self.threads += threads
        self.bytes += size


class DropLog:
    """Logs how many threads were dropped and why, one line a minute at most."""

    def __init__(self, bounds: Bounds) -> None:
        self._bounds = bounds
        self._dropped: dict[str, int] = {}
        """Number of dropped threads that no line has reported yet, by reason."""
        self._logged = -math.inf

    def add(self, now: float, *, old: int, displaced: int) -> None:
        """Record threads that were dropped at the time `now`: too old ones, and ones beyond the size or number."""
        days = self._bounds.seconds / 86400
        for number, reason in (
            (old, f"not used for {days:g} days (--store-days)"),
            (displaced, "the longest idle, as the store is full (--store-gb, --store-conversations)"),
        ):
            if number:
                self._dropped[reason] = self._dropped.get(reason, 0) + number
        if self._dropped and now - self._logged >= LOG_SECONDS:
            for reason, number in self._dropped.items():
                log.warning("dropped %d stored conversations: %s", number, reason)
            self._dropped, self._logged = {}, now


class Space:
    """Keeps the store within its bounds, within the store's transactions. A thread is kept or dropped whole.

    Beyond the bounds, the tenant with the most data loses the thread that has been idle longest. So a larger tenant
    cannot displace a smaller one: with n tenants, each can keep an n-th of the store.
    """

    def __init__(self, bounds: Bounds, now: Callable[[], float]) -> None:
        self._bounds = bounds
        self.now = now
        self._total = Held()
        self._held: dict[str, Held] = {}
        """Threads of each tenant, while the store is beyond a bound. Within the bounds, no write counts all tenants."""
        self._log = DropLog(bounds)
        self._writes = RECOUNT
        self._idle_since = -math.inf
        """Time of the last activity of the thread that was idle longest, at the last look. No thread is older now."""

    def bytes(self) -> int:
        """Number of stored bytes of all tenants, at the last count plus this server's changes since."""
        return self._total.bytes

    def oldest(self) -> float:
        """Time before which a thread's last activity is too old for it to be kept or found."""
        return self.now() - self._bounds.seconds

    def grown(self, db: Connection, thread: str, tenant: str, size: int) -> None:
        """Record that a thread is active and grew by `size` bytes, then drop old threads. Raises ThreadTooLarge."""
        now, most = self.now(), int(min(self._bounds.bytes / SHARE, MOST_THREAD))
        whole = _GROW.value(db, id=thread, tenant=tenant, now=now, size=size)
        if size > 0 and whole > most:
            raise ThreadTooLarge(
                f"this conversation takes up more than {most} bytes with all its branches; begin a new one"
            )
        self._change(tenant, int(whole == size), size)  # A thread that was there has some bytes.
        self.drop_old(db, spare=thread)

    def drop_old(self, db: Connection, spare: str = "") -> None:
        """Drop threads that are too old. Beyond the bounds, also drop the longest idle threads of the largest tenants.

        Never drops the thread `spare`.
        """
        self._writes += 1
        if self._writes > (RECOUNT_OVER_BOUNDS if self._over_bounds else RECOUNT):
            total = counters.sums(db)
            self._total, self._held, self._writes = Held(total.threads, total.bytes), {}, 0
        if self._over_bounds and not self._held:
            self._held = {tenant: Held(each.threads, each.bytes) for tenant, each in counters.held(db).items()}
        old = displaced = 0
        for _ in range(BATCH if self._over_bounds or self._idle_since < self.oldest() else 0):
            row = db.execute(_IDLE, {"spare": spare}).first()
            self._idle_since = self.now() if row is None else row.active
            if row is not None and row.active < self.oldest():
                old += 1
            elif (row := self._displaced(db, spare)) is not None:
                displaced += 1
            else:
                break
            self._drop(db, row.id)
            self._change(row.tenant, -1, -row.bytes)
        self._log.add(self.now(), old=old, displaced=displaced)

    def _change(self, tenant: str, threads: int, size: int) -> None:
        """Count a tenant's new or dropped threads and bytes."""
        self._total.add(threads, size)
        if self._held:
            self._held.setdefault(tenant, Held()).add(threads, size)

    def _displaced(self, db: Connection, spare: str) -> Row[Any, Any, Any, Any] | None:
        """Return the thread that is dropped next if a bound is exceeded."""
        for tenant in self._largest():
            row = db.execute(_IDLE_OF, {"spare": spare, "tenant": tenant}).first()
            if row is not None:
                return row
        return None

    @property
    def _over_bounds(self) -> bool:
        return self._total.bytes > self._bounds.bytes or self._total.threads > self._bounds.threads

    def _largest(self) -> list[str]:
        """Return all tenants if a bound is exceeded, else an empty list.

        Tenants with the most bytes come first, or with the most threads if only the bound on threads is exceeded.
        """
        held = self._held
        if self._total.bytes > self._bounds.bytes:
            return sorted(held, key=lambda tenant: -held[tenant].bytes)
        if self._total.threads > self._bounds.threads:
            return sorted(held, key=lambda tenant: -held[tenant].threads)
        return []

    def remove(self, db: Connection, thread: str) -> None:
        """Remove a thread with all its content, at its tenant's request."""
        self._drop(db, thread)
        self._writes = RECOUNT  # The next write counts the sizes again.

    def _drop(self, db: Connection, thread: str) -> None:
        """Remove a thread with all its content."""
        inside = select(conversations.c.id, conversations.c.metadata).where(conversations.c.thread == thread)
        for row in db.execute(inside).all():
            search_index.remove_conversation(db, row.id, row.metadata)
            db.execute(delete(items).where(items.c.conversation == row.id))
        for table in (conversations, turns, chats):
            db.execute(delete(table).where(table.c.thread == thread))
        db.execute(delete(threads).where(threads.c.id == thread))

    def prune(self, db: Connection, thread: str, turn: str | None, freed: int = 0) -> None:
        """Remove a turn if it is invisible and nothing builds on it. Then do the same for its parent, and so on.

        Removes the thread if it is then empty. `freed` is the number of bytes that the caller already removed from the
        thread.
        """
        while turn is not None:
            row = db.execute(_REMOVE, {"turn": turn}).one_or_none()
            if row is None:
                break
            turn, freed = row.parent, freed + row.size
        if db.execute(_INHABITED, {"thread": thread}).first() is None:
            db.execute(delete(threads).where(threads.c.id == thread))
        elif freed:
            db.execute(update(threads).where(threads.c.id == thread).values(bytes=threads.c.bytes - freed))
        else:
            return
        self._writes = RECOUNT  # The next write counts the sizes again.
