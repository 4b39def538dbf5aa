"""TenantPart: a tenant's sequences beyond a limit wait until others of its own have ended."""

from __future__ import annotations

from collections import Counter, defaultdict

from holdfast.lm.parts.planning import Planning
from holdfast.lm.parts.tenants.options import TenantOptions
from holdfast.lm.scheduler.entries import Entry, RankedQueue
from holdfast.lm.scheduler.part import Part, PartQueues


class TenantPart(Part):
    """At most `most` sequences of one tenant have a row at a time.

    A sequence is held when it would start and its tenant has that many. When one of them stops, the first held sequence
    of the tenant in rank waits like any other again.
    """

    name = "tenants"
    waits_for = "tenant limit"

    def __init__(self, most: int) -> None:
        self._most = most
        self._queues: PartQueues
        self._running: Counter[str] = Counter()
        """Number of sequences with a row, by tenant."""
        self._held: dict[Entry, RankedQueue] = {}
        """The waiting sequences that this part holds, each with all of its tenant."""
        self._waiting: defaultdict[str, RankedQueue] = defaultdict(RankedQueue)
        """The held sequences of each tenant."""

    def attach(self, queues: PartQueues) -> None:
        self._queues = queues

    def starting(self, entry: Entry, now: float) -> bool:
        if self._running[tenant_of(entry)] < self._most:
            return False
        self._held[entry] = self._waiting[tenant_of(entry)]
        self._held[entry].add(entry)
        return True

    def left(self, entry: Entry) -> None:
        if entry in self._held:
            self._held.pop(entry).remove(entry)

    def started(self, entry: Entry) -> None:
        self._running[tenant_of(entry)] += 1

    def stopped(self, entry: Entry) -> None:
        tenant = tenant_of(entry)
        self._running[tenant] -= 1
        first = self._waiting[tenant].first()
        if first is not None:
            self.left(first)
            self._queues.release(first, self)
        elif not self._running[tenant]:
            del self._running[tenant], self._waiting[tenant]


def tenant_of(entry: Entry) -> str:
    """A sequence's tenant."""
    return entry.sequence.request.identity.tenant


def make_parts(planning: Planning) -> tuple[TenantPart, ...]:
    """The part of a scheduler whose configuration limits tenants."""
    most = planning.config.part(TenantOptions).max_tenant_sequences
    return () if most is None else (TenantPart(most),)
