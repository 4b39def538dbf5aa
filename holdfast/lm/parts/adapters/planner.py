"""AdapterPart: lets sequences wait for their adapters, without holding others up and without starving."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import replace

from holdfast.core.types import Identity
from holdfast.lm.parts.adapters.pool import AdapterPool
from holdfast.lm.parts.adapters.values import AdapterLoad, AdapterPlan, AdapterResult
from holdfast.lm.parts.planning import Planning
from holdfast.lm.scheduler.entries import Entry, Rank, RankedQueue
from holdfast.lm.scheduler.part import Part, PartQueues, PartStep
from holdfast.lm.types import PartPlan, StepPlan, StepResult


class AdapterPart(Part):
    """Handles the sequences that have an adapter. It holds each of them until its adapter is in a slot.

    A held sequence takes neither a row nor blocks, and sequences that rank after it start. Adapters are loaded in the
    rank order of the held sequences: into empty slots, or in place of idle adapters that no sequence of an earlier rank
    waits for.

    If no such slot is left, the first held sequence reserves one: that of the adapter which the fewest sequences use.
    Sequences that use this adapter and rank after the held one do not start from then on. Finitely many rank before it,
    and all of them end, so it gets the slot in the end.
    """

    name = "adapters"
    waits_for = "adapter loading"

    def __init__(self, pool: AdapterPool) -> None:
        self.pool = pool
        """The adapters that are known, and the slots of the device."""
        self.retired: deque[str] = deque()
        """Adapters that were forgotten. The reader takes them out."""
        self.refused: deque[tuple[str, str]] = deque()
        """Requests that ended because their adapter could not be loaded, each with it. The reader takes them out."""
        self._queues: PartQueues
        self._slots: dict[Entry, int] = {}
        """The slot of each running sequence that has an adapter."""
        self._held: set[Entry] = set()
        """The waiting sequences that this part holds."""
        self._retiring: set[str] = set()
        """Adapters that are to be forgotten once no request names them."""
        self._by_adapter: dict[str, RankedQueue] = {}
        """The waiting sequences of each adapter that has any, held or not."""
        self._complete: list[int] = []
        """Slots with loads that are complete, for the next plan (`AdapterPlan.complete`)."""
        self._reserved: str | None = None
        """The adapter whose slot the first held sequence reserves."""
        self._reserved_at: Rank = ()
        """That sequence's rank."""

    def add(self, adapter: str) -> None:
        """Let requests name this adapter, a content id, from now on."""
        self._retiring.discard(adapter)
        self.pool.add(adapter)

    def remove(self, adapter: str) -> None:
        """Forget an adapter once the requests that name it have ended; `retired` says when."""
        self._retiring.add(adapter)
        self._retire(adapter)

    def attach(self, queues: PartQueues) -> None:
        self._queues = queues

    def base_identity(self, identity: Identity) -> Identity:
        return replace(identity, adapter="") if identity.adapter in self.pool else identity

    def added(self, entry: Entry) -> None:
        if adapter := adapter_of(entry):
            self.pool.users[adapter] += 1

    def ended(self, entry: Entry) -> None:
        if adapter := adapter_of(entry):
            self.pool.users[adapter] -= 1
            self._retire(adapter)

    def queued(self, entry: Entry) -> bool:
        adapter = adapter_of(entry)
        if not adapter:
            return False
        self._by_adapter.setdefault(adapter, RankedQueue()).add(entry)
        if self._may_start(entry):
            return False
        self._held.add(entry)
        return True

    def left(self, entry: Entry) -> None:
        if not (adapter := adapter_of(entry)):
            return
        queue = self._by_adapter[adapter]
        queue.remove(entry)
        if not queue:
            del self._by_adapter[adapter]
        self._held.discard(entry)

    def started(self, entry: Entry) -> None:
        if adapter := adapter_of(entry):
            self.left(entry)
            self._slots[entry] = self.pool.pin(adapter)

    def stopped(self, entry: Entry) -> None:
        if adapter := adapter_of(entry):
            self.pool.unpin(adapter)
            del self._slots[entry]

    def finish(self, step: PartStep) -> PartPlan | None:
        """The loads of the plan, the slot of each segment's adapter, and the slots that are complete now."""
        if not (self._by_adapter or self.pool.pinned):
            return None
        loads = self._begin_loads(step.number) if step.planned or not step.in_flight else ()
        slots = tuple([self._slots.get(entry, -1) for entry in step.planned]) if self._slots else ()
        if not any(slot >= 0 for slot in slots):
            slots = ()
        if not (loads or slots):
            return None
        complete, self._complete = tuple(self._complete), []
        return AdapterPlan(loads, slots, complete)

    @property
    def wants_step(self) -> bool:
        return self.pool.loading

    def apply(self, plan: StepPlan, result: StepResult, now: float) -> Iterable[Entry]:
        """Note which loads are complete, and end the sequences that wait for a lost adapter."""
        done = result.part(AdapterResult)
        failed = self._finish_loads(done.loaded, done.lost)
        self.refused += [(entry.id, adapter_of(entry)) for entry in failed]
        return failed

    def stats(self) -> Mapping[str, float]:
        pool = self.pool
        return {"adapters_known": len(pool), "adapters_resident": pool.resident, "adapter_loads": pool.loads}

    def _begin_loads(self, step: int) -> tuple[AdapterLoad, ...]:
        """The loads to begin with the plan of this number, for the sequences that are held."""
        begun: list[AdapterLoad] = []
        while (first := self._first_held()) is not None:
            taken = self.pool.load(adapter_of(first), step, spared=lambda other: self._is_wanted(other, first.rank))
            if taken is None:
                self._reserve(first)
                return tuple(begun)
            load, loser = taken
            begun.append(load)
            if loser is not None:
                self._settle(loser)
        self._reserve(None)
        return tuple(begun)

    def _finish_loads(self, step: int, lost: tuple[str, ...]) -> list[Entry]:
        """Note that the loads up to this plan's are complete, except for those of lost adapters.

        Returns the sequences that wait for a lost adapter: they can never run.
        """
        failed: list[Entry] = []
        for adapter in lost:
            self.pool.fail_load(adapter)
            failed += self._by_adapter.get(adapter, ())
        for adapter, slot in self.pool.finish_loads(step):
            self._complete.append(slot)
            self._settle(adapter)
        return failed

    def _may_start(self, entry: Entry) -> bool:
        adapter = adapter_of(entry)
        if self.pool.slot(adapter) is None:
            return False
        return adapter != self._reserved or entry.rank < self._reserved_at

    def _first_held(self) -> Entry | None:
        """The first in rank of the held sequences whose adapter is not being loaded."""
        firsts = [
            queue.first()
            for adapter, queue in self._by_adapter.items()
            if self.pool.slot(adapter) is None and not self.pool.is_loading(adapter)
        ]
        return min((entry for entry in firsts if entry is not None), key=lambda entry: entry.rank, default=None)

    def _is_wanted(self, adapter: str, rank: Rank) -> bool:
        """Whether a sequence before this rank waits for an adapter."""
        queue = self._by_adapter.get(adapter)
        first = queue.first() if queue is not None else None
        return first is not None and first.rank < rank

    def _reserve(self, entry: Entry | None) -> None:
        """Reserve a slot for this held sequence, in place of an earlier reservation; None reserves none."""
        before, pinned = (self._reserved, self._reserved_at), self.pool.pinned
        if entry is None:
            self._reserved, self._reserved_at = None, ()
        else:
            self._reserved_at = entry.rank
            if self._reserved not in pinned:
                self._reserved = min(pinned, key=lambda adapter: pinned[adapter], default=None)
        if (self._reserved, self._reserved_at) != before:
            for adapter in (before[0], self._reserved):
                if adapter is not None:
                    self._settle(adapter)

    def _settle(self, adapter: str) -> None:
        """Let the sequences of an adapter wait, or hold them, by the present state of its slot."""
        for entry in self._by_adapter.get(adapter, ()):
            if self._may_start(entry):
                if entry in self._held:
                    self._held.remove(entry)
                    self._queues.release(entry, self)
            elif entry not in self._held:
                self._held.add(entry)
                self._queues.hold(entry, self)

    def _retire(self, adapter: str) -> None:
        """Forget an adapter that is to be forgotten, if no request names it now."""
        if adapter in self._retiring and not self.pool.users[adapter]:
            self._retiring.discard(adapter)
            if adapter in self.pool:
                self.pool.remove(adapter)
            self.retired.append(adapter)


def adapter_of(entry: Entry) -> str:
    """The content id of a sequence's adapter; empty: it has none."""
    return entry.sequence.request.identity.adapter


def make_parts(planning: Planning) -> tuple[AdapterPart, ...]:
    """The part of a scheduler whose device has slots for adapters."""
    slots = planning.shape.adapter_slots
    return (AdapterPart(AdapterPool(slots)),) if slots else ()
