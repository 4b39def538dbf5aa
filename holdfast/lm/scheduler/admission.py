"""Admission: whether a waiting sequence starts, and with which room in memory."""

from __future__ import annotations

import sys

from holdfast.lm.memory.protocol import Found
from holdfast.lm.scheduler.entries import Entry
from holdfast.lm.scheduler.queues import Queues
from holdfast.lm.types import BlockCopy, TableWrite

NO_LIMIT = sys.maxsize
"""More positions than any sequence lacks."""


class Admission:
    """Gives waiting sequences rows and blocks for one step, and lets those run whose state is there."""

    __slots__ = ("_now", "_number", "_queues", "_swap_in", "_writes")

    def __init__(
        self, queues: Queues, number: int, now: float, writes: list[TableWrite], swap_in: list[BlockCopy]
    ) -> None:
        """`number` is the step's and `now` its time in seconds.

        Block tables are added to `writes`, and the copies from the host that the step begins to `swap_in`.
        """
        self._queues = queues
        self._number = number
        self._now = now
        self._writes = writes
        self._swap_in = swap_in

    def start(self, entry: Entry, *, most: int, at_once: bool) -> bool:
        """Start a waiting sequence if blocks for all its known positions are free after the headroom is set aside.

        The sequence starts only if it lacks at most `most` positions. The state that the host keeps of it is copied in.
        With `at_once` this step waits for the copies; otherwise the sequence runs once they are complete.

        While nothing runs, no headroom is set aside, so every sequence that fits the pool starts in the end. A
        preempted sequence waits until its tokens in flight are known, because its old row holds them.
        """
        queues, sequence = self._queues, entry.sequence
        pool = queues.pool
        reserved = queues.headroom if queues.running else 0
        if sequence.in_flight or (pool.available <= reserved and not pool.lent):
            return False
        found: Found = entry.cache.match(sequence.tokens if entry.uses_kept else sequence.tokens[:1])
        if sequence.length - found.positions(pool.block_size) > most:
            return False
        if found.host and self._swap_in and len(self._swap_in) + len(found.host) > pool.max_copies:
            return False  # copies run one after the other: a step begins no more than one sequence needs
        while not pool.admits(found, sequence.length, reserved):
            short = pool.needed(found, sequence.length) + reserved - pool.available
            if not queues.make_room(short, self._now):
                return False
        copies = queues.start(entry, found, self._now)
        pool.copies.start_swap_in([copy.target for copy in copies], self._number)
        self._swap_in += copies
        if entry.cache.blocks:
            self._writes.append(TableWrite(entry.row, 0, tuple(entry.cache.blocks)))
        entry.swap_in_step = pool.copies.swap_in_step(found.shared if not copies else entry.cache.blocks)
        if entry.swap_in_step < 0 or at_once:
            queues.join(entry)
        return True
