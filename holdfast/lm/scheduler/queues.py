"""Queues: the sequences that wait and those that run, and the rows that the latter stand in."""

from __future__ import annotations

from holdfast.lm.memory.block_pool import BlockPool
from holdfast.lm.memory.sequence_cache import Found
from holdfast.lm.scheduler.entries import NO_ROW, Entry, RankedQueue
from holdfast.lm.scheduler.order import Order
from holdfast.lm.types import BlockCopy


class Queues:
    """All that a step is decided from. A sequence waits, or runs: then it has a row, and blocks for what is planned.

    Between the two it may arrive: it has its row and its blocks, and copies from the host fill these beside the steps
    of those that run.
    """

    def __init__(
        self, pool: BlockPool, max_sequences: int, headroom: float, order: Order, micro_batches: int = 1
    ) -> None:
        self.pool = pool
        self.order = order
        self.micro_batches = micro_batches
        """Steps in flight at once that share no sequence whose token is being sampled."""
        self.waiting = waiting = order.queue()
        self.contenders = waiting if order.displaces and isinstance(waiting, RankedQueue) else None
        """Those who wait, where they may displace those who run."""
        self.running = RankedQueue()
        self.swapping_in: list[Entry] = []
        self.awaits = -1
        """The next plan's segments must wait for the copies from the host of plans up to this one."""
        self.headroom = int(pool.num_blocks * headroom)
        """Blocks that admission leaves to running sequences."""
        self.rows = list(range(max_sequences - 1, -1, -1))
        """Rows that nobody stands in."""
        self.preemptions = 0
        self.prefix_queries = 0
        self.prefix_hits = 0
        self.prefix_hits_on_host = 0
        self.recovered = 0

    def start(self, entry: Entry, found: Found, now: float) -> tuple[BlockCopy, ...]:
        """Move a waiting entry to those that arrive, with blocks for all its known positions, those found among them.

        Gives the copies that bring them in from the host.
        """
        self.waiting.remove(entry)
        cache, sequence = entry.cache, entry.sequence
        copies = cache.allocate(found, sequence.length, now)
        entry.row = self.rows.pop()
        entry.decoding = False
        entry.decode_limit = entry.next_check = 0
        self.swapping_in.append(entry)
        self.recovered += sum(stop - start for start, stop in cache.missing(sequence.length)[:-1])
        if sequence.scheduled_at is None:
            sequence.scheduled_at = now
            sequence.cached_tokens = len(found) * self.pool.block_size
            self.prefix_queries += len(sequence.tokens)
            self.prefix_hits += sequence.cached_tokens
            self.order.started(entry)
            self.prefix_hits_on_host += len(found.host) * self.pool.block_size
        return copies

    def join(self, entry: Entry) -> None:
        """Move an entry that arrives to running; what is still on its way to its blocks, the next plan waits for."""
        self.swapping_in.remove(entry)
        self.awaits = max(self.awaits, entry.swap_in_step)
        entry.swap_in_step = -1
        self.running.add(entry)

    def stop(self, entry: Entry, now: float) -> None:
        """Take an entry out of the queue that it is in, and give back its blocks and its row."""
        if entry.row == NO_ROW:
            self.waiting.remove(entry)
            return
        if entry.swap_in_step >= 0:
            self.join(entry)  # whoever gets its blocks writes to them after its copies have
        self.running.remove(entry)
        entry.cache.free(now)
        self.rows.append(entry.row)
        entry.row = NO_ROW

    def preempt(self, entry: Entry, now: float) -> None:
        """Send a running entry back to waiting, with its rank, so it resumes before new work of its class.

        Its full blocks are idle: where there is a host tier they go there (Pensieve §4.3.5) and come back when it is
        admitted again. What was given up meanwhile, and its last block, are computed again.
        """
        self.stop(entry, now)
        entry.sequence.preemptions += 1
        self.preemptions += 1
        self.waiting.add(entry)
