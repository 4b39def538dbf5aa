"""Slabs: how much of the cache is lent to training, and what training gives up when inference needs memory."""

from __future__ import annotations

from collections.abc import Iterable

from holdfast.lm.memory.protocol import AnyMemory
from holdfast.lm.parts.tuning.tuner import Tuner
from holdfast.lm.parts.tuning.values import NO_SLICE, TrainingAction, TrainingSlice
from holdfast.lm.scheduler.entries import Entry
from holdfast.lm.types import BlockMove, TableWrite

QUIET_SECONDS = 1.0
"""Seconds for which training gets no blocks after it gave some up, unless nothing runs or waits."""
PIECES = 64
"""Blocks are lent and taken back in pieces of 1/64 of the cache. A plan moves one piece at most."""
SPARE = 16
"""While sequences run, 1/16 of the cache stays available in addition to the headroom when blocks are lent."""
YIELDS: tuple[TrainingAction, ...] = ("release", "drop", "offload")
"""Actions that free memory, the cheapest first: give up kept activations, the micro-batch, the place on the device."""


class Slabs:
    """Lends the cache's highest blocks to training, and takes them back.

    Training gets the blocks for its job's next step, while as many are available apart from the headroom of running
    sequences. Before a request would wait for blocks, and before any would be preempted, training yields. It first
    gives up unused blocks, then kept activations, then the micro-batch under way. These are free in the same plan,
    because the device computed their contents earlier. In the end the job's vectors go to the host; their blocks are
    free in the next plan.
    """

    def __init__(self, pool: AnyMemory, tuner: Tuner, headroom: int) -> None:
        """`headroom` is the number of blocks that stay available for running sequences."""
        self._pool, self._tuner, self._headroom = pool, tuner, headroom
        self._piece = max(1, pool.num_blocks // PIECES)
        self._quiet_until = 0.0
        self.slice: TrainingSlice = NO_SLICE
        """Slice of the plan under construction."""
        self.waits = False
        """Whether training lacks blocks because copies between the tiers are under way."""

    @property
    def lent(self) -> int:
        """Number of blocks that training has."""
        return self._pool.lent

    def begin(self) -> None:
        """Begin a plan."""
        self.slice, self.waits = NO_SLICE, False
        self._tuner.begin()

    def lend(
        self, entries: Iterable[Entry], *, busy: bool, now: float
    ) -> tuple[tuple[BlockMove, ...], list[TableWrite]]:
        """Bring the number of lent blocks closer to the needs of training.

        To be called before anything else of the plan. `entries` are the sequences that have blocks; `busy`: any runs or
        waits. Returns the block moves, and the new places for block tables.
        """
        pool, wanted = self._pool, self._wanted(busy, now)
        if wanted + self._piece < pool.lent or (pool.lent and not wanted):
            self._reclaim(pool.lent - max(wanted, self._tuner.held))
        moves: tuple[BlockMove, ...] = ()
        before = -1
        while before < pool.lent < wanted and not moves:  # one call moves, as no move may follow another
            before = pool.lent
            moves = pool.lend(wanted - before, now, most_moves=self._piece)
        self._tuner.lent = pool.lent
        self.waits = pool.lent < wanted and bool(pool.copies.under_way)
        return moves, self._write(entries, dict(moves)) if moves else []

    def settle(self) -> None:
        """Take everything back if training has ended, or is paused. A job that rests on the device keeps its place."""
        tuner = self._tuner
        if not (tuner.runs or tuner.leaves or tuner.in_flight):
            self._reclaim(self._pool.lent - (tuner.held if tuner.rests else 0))

    def yield_for(self, short: int, now: float) -> bool:
        """Make `short` more blocks available, if training can give up as many now. Returns whether it did.

        If training can do so only by leaving the device, it does, and the blocks are free in the next plan.
        """
        pool, tuner = self._pool, self._tuner
        if short <= 0 or not pool.lent:
            return False
        self._quiet_until = now + QUIET_SECONDS
        if pool.lent - tuner.held < short and not self.slice:
            for action in YIELDS:
                left = tuner.held_after(action)
                if left is not None and (action == "offload" or pool.lent - left >= short):
                    self.slice = tuner.act(action)
                    break
        unused = pool.lent - tuner.held
        self._reclaim(min(unused, -(-short // self._piece) * self._piece))
        return unused >= short

    def train(self, seconds: float, *, at_least_one: bool = False) -> bool:
        """Add a slice to the plan under construction, unless it has one. Returns whether it did."""
        if self.slice:
            return False
        self.slice = self._tuner.next_slice(seconds, at_least_one=at_least_one) or NO_SLICE
        return bool(self.slice)

    def _wanted(self, busy: bool, now: float) -> int:
        """Number of blocks that training should have."""
        pool, held = self._pool, self._tuner.held
        needs = self._tuner.needs
        if not needs.least:
            return held
        if busy and now < self._quiet_until:
            return max(held, min(pool.lent, needs.most))
        room = pool.lent + pool.available
        if busy:
            room -= self._headroom + pool.num_blocks // SPARE
        for blocks in (needs.most, needs.least):
            if blocks <= min(room, self._tuner.max_blocks):
                return max(held, blocks)
        return held

    def _reclaim(self, count: int) -> None:
        if count > 0:
            self._pool.reclaim(count)
            self._tuner.lent = self._pool.lent

    def _write(self, entries: Iterable[Entry], places: dict[int, int]) -> list[TableWrite]:
        """The writes that put the new places into block tables."""
        writes = []
        for entry in entries:
            cache = entry.cache
            moved = [index for index, block in enumerate(cache.blocks) if block in places]
            cache.move(places)
            if moved:
                first, stop = moved[0], moved[-1] + 1
                writes.append(TableWrite(entry.row, first, tuple(cache.blocks[first:stop])))
        return writes
