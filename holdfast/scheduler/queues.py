"""Queues: the sequences that wait and those that run, each in rank order, and the rows that the latter stand in."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator
from dataclasses import dataclass
from operator import attrgetter

from holdfast.core.types import BlockCopy, Sampling, Sequence
from holdfast.memory.blocks import BlockPool
from holdfast.memory.conversation import Found, Residency
from holdfast.scheduler.priority import Rank

NO_ROW = -1


@dataclass(slots=True, eq=False)
class Entry:
    """A sequence in a queue, with what planning it takes."""

    sequence: Sequence
    id: str
    rank: Rank
    residency: Residency
    sampling: Sampling
    limit: int
    """The sequence ends at this length."""
    ends: frozenset[int]
    """Tokens that end it."""
    row: int = NO_ROW
    """Row of the executor's batch state while it runs."""
    planned_in: int = -1
    """Number of the last step with a segment of it."""


class RankedQueue:
    """Entries in rank order; the common cases, in at the back and out at the front or the back, are cheap."""

    def __init__(self) -> None:
        self._entries: list[Entry] = []

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[Entry]:
        """First rank first. Entries behind the current one may be removed on the way."""
        return iter(self._entries)

    def __reversed__(self) -> Iterator[Entry]:
        return reversed(self._entries)

    def add(self, entry: Entry) -> None:
        insort(self._entries, entry, key=RANK)

    def remove(self, entry: Entry) -> None:
        index = bisect_left(self._entries, entry.rank, key=RANK)
        assert self._entries[index] is entry
        del self._entries[index]

    def first(self) -> Entry | None:
        return self._entries[0] if self._entries else None


RANK = attrgetter("rank")


class Queues:
    """All that a step is decided from. A sequence waits, or runs: then it has a row, and blocks for what is planned."""

    def __init__(self, pool: BlockPool, max_sequences: int, headroom: float, micro_batches: int = 1) -> None:
        self.pool = pool
        self.micro_batches = micro_batches
        """Steps in flight at once that share no sequence whose token is being sampled."""
        self.waiting = RankedQueue()
        self.running = RankedQueue()
        self.growth = int(pool.num_blocks * headroom)
        """Blocks that admission leaves to running sequences."""
        self.rows = list(range(max_sequences - 1, -1, -1))
        """Rows that nobody stands in."""
        self.preemptions = 0
        self.prefix_queries = 0
        self.prefix_hits = 0
        self.recovered = 0

    def start(self, entry: Entry, found: Found, now: float) -> tuple[BlockCopy, ...]:
        """Move a waiting entry to running, with blocks for all its known positions, those found among them.

        Gives the copies that bring them in from the host.
        """
        self.waiting.remove(entry)
        residency, sequence = entry.residency, entry.sequence
        copies = residency.open(found, sequence.length)
        entry.row = self.rows.pop()
        self.running.add(entry)
        self.recovered += sum(stop - start for start, stop in residency.missing(sequence.length)[:-1])
        if sequence.scheduled_at is None:
            sequence.scheduled_at = now
            sequence.cached_tokens = len(found) * self.pool.block_size
            self.prefix_queries += len(sequence.tokens)
            self.prefix_hits += sequence.cached_tokens
        return copies

    def stop(self, entry: Entry) -> None:
        """Take an entry out of the queue that it is in, and give back its blocks and its row."""
        if entry.row == NO_ROW:
            self.waiting.remove(entry)
            return
        self.running.remove(entry)
        entry.residency.release()
        self.rows.append(entry.row)
        entry.row = NO_ROW

    def preempt(self, entry: Entry) -> None:
        """Send a running entry back to waiting, with its rank, so it resumes before new work of its class.

        Its full blocks are idle: where there is a host tier they go there (Pensieve §4.3.5) and come back when it is
        admitted again. What was given up meanwhile, and its last block, are computed again.
        """
        self.stop(entry)
        entry.sequence.preemptions += 1
        self.preemptions += 1
        self.waiting.add(entry)
