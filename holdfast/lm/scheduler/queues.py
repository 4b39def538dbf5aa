"""Queues: the waiting and the running sequences, and the rows that running ones use."""

from __future__ import annotations

from holdfast.lm.memory.protocol import AnyMemory, Found
from holdfast.lm.memory.turns import Departure
from holdfast.lm.scheduler.entries import NO_ROW, Entry, RankedQueue
from holdfast.lm.scheduler.order import Order
from holdfast.lm.scheduler.part import Hooks, Part
from holdfast.lm.types import BlockCopy


class Queues:
    """Holds every sequence that has not ended. A sequence waits, is swapping in, is prefilled ahead, or runs.

    A running sequence has a row, and room in memory for all its planned positions. A sequence that is swapping in has
    its row and its blocks too; copies from the host fill the blocks while others run. A sequence that was prefilled
    ahead has its row, and waits for a place in the batch of a memory whose running sequences share one.
    """

    def __init__(
        self,
        pool: AnyMemory,
        max_sequences: int,
        headroom: float,
        order: Order,
        stages: int,
        hooks: Hooks,
        prefill_ahead: int = 0,
    ) -> None:
        """At most `max_sequences` run, and `prefill_ahead` more have rows while they wait for a place."""
        self.pool = pool
        self.max_sequences = max_sequences
        self.prefill_ahead = prefill_ahead
        self.hooks = hooks
        """The parts that are notified of each change."""
        self.order = order
        self.stages = stages
        """Number of pipeline stages that a step passes, and thus of steps that are computed at a time."""
        self.waiting = waiting = order.queue()
        self.contenders = waiting if order.displaces and isinstance(waiting, RankedQueue) else None
        """The waiting sequences, if the order lets them displace running ones."""
        self.held: dict[Entry, Part] = {}
        """The sequences that a part holds, each with the part. They are not in `waiting`."""
        self.running = RankedQueue()
        self.swapping_in: list[Entry] = []
        self.prefilled = RankedQueue()
        """Sequences that were prefilled ahead and wait for a place in the batch."""
        self.awaits = -1
        """Number of a plan. The next plan's segments wait for the copies from the host up to this plan's. -1: none."""
        self.headroom = int(pool.num_blocks * headroom)
        """Blocks that admission leaves to running sequences."""
        self.free_rows = list(range(max_sequences + prefill_ahead - 1, -1, -1))
        """Rows that no sequence uses."""
        self.preemptions = 0
        self.suspensions = 0
        """Number of `preemptions` whose state the host tier keeps or may keep."""
        self.unreported: list[str] = []
        """Ids of preempted sequences that no plan has reported yet. Always the same list."""
        self.prefix_queries = 0
        self.prefix_hits = 0
        self.prefix_hits_on_host = 0
        """Number of tokens among `prefix_hits` that only the host had when their sequence started."""
        self.recovered = 0

    @property
    def num_waiting(self) -> int:
        """Sequences that wait, also those that parts hold."""
        return len(self.waiting) + len(self.held)

    @property
    def seconds_apart(self) -> float:
        """Predicted seconds of the parts' own work in the steps in flight."""
        return sum(part.seconds_in_flight for part in self.hooks.seconds_in_flight)

    def make_room(self, blocks: int, now: float) -> bool:
        """Let the first part that can make this many more blocks available do it. Returns whether one did."""
        return any(part.make_room(blocks, now) for part in self.hooks.make_room)

    def add(self, entry: Entry) -> None:
        """Let a sequence wait."""
        self._ask(entry, None)

    def hold(self, entry: Entry, part: Part) -> None:
        """Let a part hold an entry of the waiting queue. The other parts do not know it from then on."""
        self.waiting.remove(entry)
        self.held[entry] = part
        for other in self.hooks.left:
            if other is not part:
                other.left(entry)

    def release(self, entry: Entry, part: Part) -> None:
        """Let an entry that the part holds wait, unless another part holds it."""
        holder = self.held.pop(entry)
        assert holder is part
        self._ask(entry, part)

    def _ask(self, entry: Entry, holder: Part | None) -> None:
        """Add an entry to the waiting queue, or let the first part that wants it hold it. `holder` is not asked."""
        asked = [] if holder is None else [holder]
        for part in self.hooks.queued:
            if part is holder:
                continue
            if part.queued(entry):
                self.held[entry] = part
                for other in asked:
                    other.left(entry)
                return
            asked.append(part)
        self.waiting.add(entry)

    def is_held_back(self, entry: Entry, now: float) -> bool:
        """Whether a part now holds this entry of the waiting queue, which could start otherwise."""
        for part in self.hooks.starting:
            if part.starting(entry, now):
                self.hold(entry, part)
                return True
        return False

    def _leave(self, entry: Entry) -> None:
        """Remove an entry that waits, or that a part holds."""
        if (holder := self.held.pop(entry, None)) is not None:
            holder.left(entry)
            return
        self.waiting.remove(entry)
        for part in self.hooks.left:
            part.left(entry)

    def start(self, entry: Entry, found: Found, now: float) -> tuple[BlockCopy, ...]:
        """Move a waiting entry to `swapping_in`, with blocks for all its known positions, kept ones included.

        Returns the copies that fill its blocks from the host.
        """
        self.waiting.remove(entry)
        cache, sequence = entry.cache, entry.sequence
        copies = cache.allocate(found, sequence.length, now)
        entry.row = self.free_rows.pop()
        cache.occupy(entry.row)
        entry.decoding = False
        entry.decode_limit = entry.next_check = 0
        self.swapping_in.append(entry)
        self.recovered += sum(stop - start for start, stop in cache.missing(sequence.length)[:-1])
        if sequence.scheduled_at is None:
            sequence.scheduled_at = now
            sequence.cached_tokens = found.positions(self.pool.block_size)
            self.prefix_queries += len(sequence.tokens)
            self.prefix_hits += sequence.cached_tokens
            self.order.started(entry)
            # The last block may be full only in part.
            on_host = min(len(found.host) * self.pool.block_size, sequence.cached_tokens)
            self.prefix_hits_on_host += on_host
            sequence.cached_by_tier = on_host, 0, 0
        for part in self.hooks.started:
            part.started(entry)
        return copies

    def join(self, entry: Entry) -> None:
        """Move an entry from `swapping_in` to running. The next plan waits for its copies that are not complete."""
        self.swapping_in.remove(entry)
        self.awaits = max(self.awaits, entry.swap_in_step)
        entry.swap_in_step = -1
        self.running.add(entry)

    def join_ready(self) -> None:
        """Let the sequences run whose state has come from the host. If nothing runs, all do: the next step waits."""
        idle = not self.running
        for entry in tuple(self.swapping_in):
            entry.swap_in_step = self.pool.copies.swap_in_step(entry.cache.blocks)
            if idle or entry.swap_in_step < 0:
                self.join(entry)

    def prefill(self, entry: Entry) -> None:
        """Move an entry from `swapping_in` to `prefilled`."""
        self.swapping_in.remove(entry)
        self.prefilled.add(entry)

    def place(self, entry: Entry) -> None:
        """Move an entry from `prefilled` to running, because the batch has a place for it."""
        self.prefilled.remove(entry)
        self.running.add(entry)

    def stop(self, entry: Entry, now: float) -> None:
        """Remove an entry that has ended from its queue, and free its memory and its row.

        The row is not free yet if the batch still computes it: see `SequenceState.end`.
        """
        tokens, request = entry.sequence.tokens, entry.sequence.request
        departure = Departure(request.id, request.identity.tenant, request.pause, len(request.prompt))
        if entry.row == NO_ROW:
            self._leave(entry)
            entry.cache.end(tokens, now, departure)
            return
        self._vacate(entry)
        if entry.cache.end(tokens, now, departure):
            self.free_rows.append(entry.row)
        entry.row = NO_ROW

    def report_preempted(self) -> tuple[str, ...]:
        """Return the ids of the sequences preempted since the last plan was made, so that a plan reports each once."""
        reported = tuple(self.unreported)
        self.unreported.clear()
        return reported

    def preempt(self, entry: Entry, now: float) -> None:
        """Move a running or prefilled entry back to waiting.

        It keeps its rank, so it resumes before new work of its class. The memory says what stays of its state
        (`SequenceState.suspend`); the rest is computed again.
        """
        self._vacate(entry)
        self.suspensions += entry.cache.suspend(entry.sequence.tokens, now)
        self._wait_again(entry)

    def lose(self, entry: Entry) -> None:
        """Move an entry that has a row back to waiting, because its state, which memory has given up, is lost."""
        self._vacate(entry)
        self._wait_again(entry)

    def _wait_again(self, entry: Entry) -> None:
        self.free_rows.append(entry.row)
        entry.row = NO_ROW
        entry.decoding = False
        entry.sequence.preemptions += 1
        self.preemptions += 1
        self.add(entry)

    def _vacate(self, entry: Entry) -> None:
        """Remove an entry that has a row from its queue."""
        for part in self.hooks.stopped:
            part.stopped(entry)
        if entry.swap_in_step >= 0:
            self.join(entry)  # its blocks are written by others only after its copies
        ahead = self.prefilled and any(other is entry for other in self.prefilled)
        (self.prefilled if ahead else self.running).remove(entry)
