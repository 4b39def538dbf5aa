"""Queues: the waiting and the running sequences, and the rows that running ones use."""

from __future__ import annotations

from holdfast.lm.memory.adapter_pool import AdapterPool
from holdfast.lm.memory.block_pool import BlockPool
from holdfast.lm.memory.lower_tiers import LowerTiers
from holdfast.lm.memory.protocol import AnyMemory, Found
from holdfast.lm.scheduler.adapter_queue import AdapterQueue
from holdfast.lm.scheduler.entries import NO_ROW, Entry, RankedQueue
from holdfast.lm.scheduler.fetch_queue import NOTHING, FetchQueue
from holdfast.lm.scheduler.order import Order
from holdfast.lm.scheduler.slabs import Slabs
from holdfast.lm.scheduler.tuner import Tuner
from holdfast.lm.tiers import TierName
from holdfast.lm.types import BlockCopy


class Queues:
    """Where every sequence stands. It waits, is swapping in, or runs.

    A running sequence has a row, and blocks for all that is planned. One that is swapping in has its row and its blocks
    too; copies from the host fill the blocks while others run.
    """

    def __init__(self, pool: AnyMemory, max_sequences: int, headroom: float, order: Order, stages: int) -> None:
        self.pool = pool
        self.order = order
        self.stages = stages
        """Stages of the pipeline that a step passes; so many steps are computed at a time."""
        self.waiting = waiting = order.queue()
        self.contenders = waiting if order.displaces and isinstance(waiting, RankedQueue) else None
        """The waiting sequences, if the order lets them displace running ones."""
        self.adapters: AdapterQueue | None = None
        """The waiting sequences that have an adapter; None where none are served."""
        self.slabs: Slabs | None = None
        """The memory of training; None where none is planned."""
        self.fetches: FetchQueue | None = None
        """The waiting sequences whose blocks come from tiers behind the host; None where there are none."""
        self.running = RankedQueue()
        self.swapping_in: list[Entry] = []
        self.forced: set[Entry] = set()
        """Those that run and lack tokens that their grammars force."""
        self.awaits = -1
        """The next plan's segments wait for the copies from the host that plans up to this number began."""
        self.headroom = int(pool.num_blocks * headroom)
        """Blocks that admission leaves to running sequences."""
        self.free_rows = list(range(max_sequences - 1, -1, -1))
        """Rows that no sequence uses."""
        self.preemptions = 0
        self.prefix_queries = 0
        self.prefix_hits = 0
        self.prefix_hits_on_host = 0
        """Of `prefix_hits`, tokens that only the host had when their sequence started, however they came there."""
        self.prefix_hits_below: dict[TierName, int] = {"disk": 0, "remote": 0}
        """Tokens of those that came to the host from the tiers behind it, for that sequence."""
        self.recovered = 0

    def serve_adapters(self, pool: AdapterPool) -> None:
        """Take sequences whose adapters are in this pool, too. To be called before there are any."""
        self.adapters = AdapterQueue(pool, self.waiting)

    def serve_lower_tiers(self, lower: LowerTiers) -> None:
        """Let sequences wait for blocks of these tiers. To be called before there are any."""
        self.fetches = FetchQueue(lower)

    def serve_training(self, tuner: Tuner) -> None:
        """Lend blocks to training. Raises ValueError where state is not paged."""
        if not isinstance(self.pool, BlockPool):
            raise ValueError("training needs a paged cache")
        self.slabs = Slabs(self.pool, tuner, self.headroom)

    @property
    def num_waiting(self) -> int:
        """Sequences that wait, also those that wait for their adapters or for their blocks."""
        held = self.adapters.num_held if self.adapters is not None else 0
        return len(self.waiting) + held + (len(self.fetches) if self.fetches is not None else 0)

    @property
    def lent(self) -> int:
        """Blocks that training has."""
        return self.slabs.lent if self.slabs is not None else 0

    def add(self, entry: Entry) -> None:
        """Let a sequence wait."""
        if self.adapters is not None and entry.adapter:
            self.adapters.add(entry)
        else:
            self.waiting.add(entry)

    def fetch(self, entry: Entry, now: float) -> bool:
        """Let an entry in the waiting queue wait for blocks of lower tiers instead. Returns whether it does."""
        if self.fetches is None or not self.fetches.begin(entry, now):
            return False
        self._leave(entry)
        return True

    def resume_fetched(self, now: float) -> None:
        """Move those back to the waiting queue that have waited for their blocks."""
        if self.fetches is not None:
            for entry in self.fetches.advance(now):
                self.add(entry)

    def _leave(self, entry: Entry) -> None:
        if self.adapters is not None and entry.adapter:
            self.adapters.remove(entry)
        else:
            self.waiting.remove(entry)

    def start(self, entry: Entry, found: Found, now: float) -> tuple[BlockCopy, ...]:
        """Move a waiting entry to `swapping_in`, with blocks for all its known positions, kept ones included.

        Returns the copies that fill its blocks from the host.
        """
        if self.adapters is not None and entry.adapter:
            self.adapters.start(entry)
        else:
            self.waiting.remove(entry)
        cache, sequence = entry.cache, entry.sequence
        copies = cache.allocate(found, sequence.length, now)
        below = self.fetches.settle(entry) if self.fetches is not None else NOTHING
        entry.row = self.free_rows.pop()
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
            for tier, blocks in below.items():
                self.prefix_hits_below[tier] += blocks * self.pool.block_size
            on_host = max(0, len(found.host) - sum(below.values()))
            host, disk, remote = (count * self.pool.block_size for count in (on_host, below["disk"], below["remote"]))
            sequence.cached_by_tier = host, disk, remote
        return copies

    def join(self, entry: Entry) -> None:
        """Move an entry from `swapping_in` to running; the next plan waits for its copies that are not complete."""
        self.swapping_in.remove(entry)
        self.awaits = max(self.awaits, entry.swap_in_step)
        entry.swap_in_step = -1
        self.running.add(entry)

    def stop(self, entry: Entry, now: float) -> None:
        """Remove an entry from its queue, and free its blocks and its row."""
        if entry.row == NO_ROW:
            if self.fetches is None or entry not in self.fetches:
                self._leave(entry)
            if self.fetches is not None:
                self.fetches.settle(entry)
            return
        if self.adapters is not None and entry.adapter:
            self.adapters.stop(entry)
        if entry.swap_in_step >= 0:
            self.join(entry)  # its blocks are written by others only after its copies
        self.running.remove(entry)
        self.forced.discard(entry)
        entry.cache.free(now)
        self.free_rows.append(entry.row)
        entry.row = NO_ROW

    def preempt(self, entry: Entry, now: float) -> None:
        """Move a running entry back to waiting. It keeps its rank, so it resumes before new work of its class.

        Its full blocks become idle: with a host tier they are copied there (Pensieve §4.3.5), and copied back when it
        is admitted again. Blocks that were dropped meanwhile, and its last one, are computed again.
        """
        self.stop(entry, now)
        entry.sequence.preemptions += 1
        entry.fetched = False
        self.preemptions += 1
        self.add(entry)
