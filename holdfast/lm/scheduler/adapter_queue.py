"""AdapterQueue: lets waiting sequences wait for their adapters, without holding others up and without starving."""

from __future__ import annotations

from collections.abc import Iterator

from holdfast.lm.memory.adapter_pool import AdapterPool
from holdfast.lm.scheduler.entries import Entry, Rank, RankedQueue
from holdfast.lm.scheduler.order import TenantQueue
from holdfast.lm.types.adapters import AdapterLoad


class AdapterQueue:
    """The waiting sequences that have an adapter. Those whose adapter is in a slot are in the `waiting` queue as well.

    The others are held: they take neither rows nor blocks, and those behind them start. In rank order their adapters
    are loaded into empty slots, or in place of idle adapters that nothing ahead of them waits for.

    If no such slot is left, the adapter of the first held sequence reserves one: of the adapter that fewest sequences
    use, those that rank behind it do not start any more. Finitely many rank ahead of it, and all of them end, so it
    gets the slot in the end.
    """

    def __init__(self, pool: AdapterPool, waiting: RankedQueue | TenantQueue) -> None:
        self.pool = pool
        self._waiting = waiting
        self._by_adapter: dict[str, RankedQueue] = {}
        """The waiting sequences of each adapter that has any, held or not."""
        self._reserved: str | None = None
        """The adapter whose slot the first held sequence reserves."""
        self._reserved_at: Rank = ()
        """That sequence's rank."""

    @property
    def in_use(self) -> bool:
        """Whether any sequence with an adapter waits or runs."""
        return bool(self._by_adapter or self.pool.pinned)

    @property
    def held(self) -> Iterator[Entry]:
        """The sequences that wait for their adapters."""
        return (entry for queue in self._by_adapter.values() for entry in queue if entry.held)

    @property
    def num_held(self) -> int:
        """How many sequences wait for their adapters."""
        return sum(entry.held for queue in self._by_adapter.values() for entry in queue)

    def add(self, entry: Entry) -> None:
        """Add a waiting sequence with an adapter."""
        self._by_adapter.setdefault(entry.adapter, RankedQueue()).add(entry)
        entry.held = not self._may_start(entry)
        if not entry.held:
            self._waiting.add(entry)

    def remove(self, entry: Entry) -> None:
        """Remove a sequence that starts or ends."""
        queue = self._by_adapter[entry.adapter]
        queue.remove(entry)
        if not queue:
            del self._by_adapter[entry.adapter]
        if not entry.held:
            self._waiting.remove(entry)
        entry.held = False

    def start(self, entry: Entry) -> None:
        """A sequence runs from now on; its adapter is in a slot."""
        self.remove(entry)
        entry.slot = self.pool.pin(entry.adapter)

    def stop(self, entry: Entry) -> None:
        """A running sequence has ended, or waits again."""
        self.pool.unpin(entry.adapter)
        entry.slot = -1

    def loads(self, step: int) -> tuple[AdapterLoad, ...]:
        """The loads to begin with the plan of this number, for the sequences that are held."""
        begun: list[AdapterLoad] = []
        while (first := self._first_held()) is not None:
            taken = self.pool.load(first.adapter, step, spared=lambda other: self._is_wanted(other, first.rank))
            if taken is None:
                self._reserve(first)
                return tuple(begun)
            load, loser = taken
            begun.append(load)
            if loser is not None:
                self._settle(loser)
        self._reserve(None)
        return tuple(begun)

    def finish_loads(self, step: int, lost: tuple[str, ...] = ()) -> list[Entry]:
        """Note that the loads up to this plan's are complete, but for those of adapters that are lost.

        Returns the sequences that wait for a lost adapter: they can never run.
        """
        failed: list[Entry] = []
        for adapter in lost:
            self.pool.fail_load(adapter)
            failed += self._by_adapter.get(adapter, ())
        for adapter in self.pool.finish_loads(step):
            self._settle(adapter)
        return failed

    def _may_start(self, entry: Entry) -> bool:
        if self.pool.slot(entry.adapter) is None:
            return False
        return entry.adapter != self._reserved or entry.rank < self._reserved_at

    def _first_held(self) -> Entry | None:
        """The first in rank of the sequences that no load was begun for."""
        firsts = [
            queue.first()
            for adapter, queue in self._by_adapter.items()
            if self.pool.slot(adapter) is None and not self.pool.is_loading(adapter)
        ]
        return min((entry for entry in firsts if entry is not None), key=lambda entry: entry.rank, default=None)

    def _is_wanted(self, adapter: str, rank: Rank) -> bool:
        """Whether a sequence ahead of this rank waits for an adapter."""
        queue = self._by_adapter.get(adapter)
        first = queue.first() if queue is not None else None
        return first is not None and first.rank < rank

    def _reserve(self, entry: Entry | None) -> None:
        """Reserve a slot for this held sequence, instead of another; None reserves none."""
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
        """Put the sequences of an adapter into the waiting queue, or hold them, as it stands with its slot now."""
        for entry in self._by_adapter.get(adapter, ()):
            held = not self._may_start(entry)
            if held != entry.held:
                entry.held = held
                (self._waiting.remove if held else self._waiting.add)(entry)
