"""Preemption: which running sequences lose their rows and blocks, and to which."""

from __future__ import annotations

from collections.abc import Callable

from holdfast.lm.memory.protocol import AnyState
from holdfast.lm.scheduler.entries import Entry
from holdfast.lm.scheduler.queues import Queues
from holdfast.lm.types import TableWrite


class Preemption:
    """Finds rows and blocks for one step by preempting the sequences that rank last.

    A victim always ranks after the sequence that it makes room for, so the first in rank is never preempted. A sequence
    that sits the step out (`Entry.next_step`) is never a victim.
    """

    __slots__ = ("_now", "_number", "_preempted", "_queues", "_writes")

    def __init__(self, queues: Queues, number: int, now: float, writes: list[TableWrite], preempted: list[str]) -> None:
        """`number` is the step's and `now` its time in seconds.

        New blocks are added to `writes`, and the ids of victims to `preempted`.
        """
        self._preempted = preempted
        self._queues = queues
        self._number = number
        self._now = now
        self._writes = writes

    def displace(self, budget: int, due: Callable[[Entry], bool] | None = None) -> None:
        """Preempt running sequences for waiting ones of a higher class, if the order displaces at all.

        With `due`, only due sequences displace others. Parts give up memory before anyone is preempted.

        Goes through the waiting sequences by rank while the `budget` has room for them after the decodes. Preempts the
        last in rank until each finds a row and blocks. Victims wait like any preempted sequence.
        """
        queues, pool, running = self._queues, self._queues.pool, self._queues.running
        if not queues.contenders:
            return
        rows, spare = len(queues.free_rows), pool.available - queues.headroom
        room = max(1, budget - len(running))
        for entry in queues.contenders:
            sequence = entry.sequence
            if due is not None and not due(entry):
                continue
            if room <= 0 or sequence.in_flight or not running or entry.rank > running.last().rank:
                return
            needed = pool.needed(entry.cache.match(sequence.tokens), sequence.length)
            if spare < needed:
                before = pool.available
                queues.make_room(needed - spare, self._now)
                spare += pool.available - before
            victims: list[Entry] = []
            freed: list[AnyState] = []
            for other in reversed(running):
                if (rows and spare >= needed) or other.rank < entry.rank:
                    break
                if other.sequence.request.priority > sequence.request.priority and other.next_step <= self._number:
                    spare += pool.freed_by(other.cache, freed)
                    victims.append(other)
                    freed.append(other.cache)
                    rows += 1
            if not rows or spare < needed:
                return
            for victim in victims:
                self._preempt(victim)
            rows, spare, room = rows - 1, spare - needed, room - sequence.length

    def grow(self, entry: Entry) -> bool:
        """Give a running sequence one more block, preempting the last in rank if none is free.

        False if the sequence must wait for a later step: it ranks last itself, a part is about to give lent blocks
        back, or idle state is about to make room in the host tier. The first in rank always finds a block in the end,
        as the pool can hold any sequence alone.
        """
        queues, pool = self._queues, self._queues.pool
        while not pool.can_grow(entry.cache):
            if queues.make_room(1, self._now):
                continue
            if pool.lent or pool.can_swap_out:
                return False
            victim = next(other for other in reversed(queues.running) if other.next_step <= self._number)
            if victim is entry:
                return False
            self._preempt(victim)
        self._add_block(entry)
        return True

    def grow_to(self, entry: Entry, positions: int) -> None:
        """Give a running sequence blocks for this many positions, as far as `grow` finds them."""
        while entry.cache.capacity < positions and self.grow(entry):
            pass

    def grow_freely(self, entry: Entry, positions: int) -> None:
        """Give a running sequence blocks for this many positions, as far as free blocks last; preempts nothing."""
        while entry.cache.capacity < positions and self._queues.pool.can_grow(entry.cache):
            self._add_block(entry)

    def _add_block(self, entry: Entry) -> None:
        blocks = entry.cache.blocks
        entry.cache.grow(self._now)
        if blocks:
            self._writes.append(TableWrite(entry.row, len(blocks) - 1, (blocks[-1],)))

    def _preempt(self, victim: Entry) -> None:
        self._queues.preempt(victim, self._now)
        self._preempted.append(victim.id)
