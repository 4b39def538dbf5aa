"""StepBuilder: one StepPlan in the making, and the verbs with which a policy makes it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable

from holdfast.core.columns import Columns
from holdfast.lm.scheduler.entries import Entry, RankedQueue
from holdfast.lm.scheduler.queues import Queues
from holdfast.lm.types import PENDING, BlockCopy, Sampling, Segment, StepPlan, StepResult, TableWrite

ROWS_OWN = (PENDING,)
"""The token of a decode: what its row sampled last."""


class Policy(ABC):
    """Chooses what runs in a step: sets its budget, then calls its verbs in an order of its own."""

    @abstractmethod
    def plan(self, step: StepBuilder) -> None:
        """Plan a step."""

    def observe(self, plan: StepPlan, result: StepResult) -> None:  # noqa: B027  most policies have nothing to learn
        """See what a step took, in the order of the plans."""


def anyone(entry: Entry) -> bool:
    """Admits whoever is first."""
    return True


class StepBuilder:
    """Plans segments while the budget lasts; what is planned cannot be taken back.

    Every verb goes through the sequences in rank order. There are no phases: a sequence that lacks only the token which
    its row sampled last is decoded, one that lacks more is prefilled, whether its tokens came from a client or from
    before a preemption.
    """

    def __init__(self, queues: Queues, number: int, now: float) -> None:
        self.budget = 0
        """Tokens that may still be planned."""
        self.num_tokens = 0
        """Tokens planned so far."""
        self.pace: Callable[[int, int], int] | None = None
        """Where a policy bounds prefill work by more than tokens: how much of [start, stop) the step may compute."""
        self.sampling: list[Entry] = []
        """Whose token each sampling segment samples, in plan order."""
        self._queues = queues
        self._number = number
        self._now = now
        self._ids: list[str] = []
        self._rows: list[int] = []
        self._starts: list[int] = []
        self._stops: list[int] = []
        self._tokens: list[tuple[int, ...]] = []
        self._samplings: list[Sampling | None] = []
        self._writes: list[TableWrite] = []
        self._preempted: list[str] = []
        self._swap_in: list[BlockCopy] = []
        idle = not queues.running
        for entry in tuple(queues.swapping_in):
            entry.swap_in_step = queues.pool.swap_in_step(entry.cache.blocks)
            if idle or entry.swap_in_step < 0:
                queues.join(entry)

    @property
    def number(self) -> int:
        """The step's number."""
        return self._number

    @property
    def now(self) -> float:
        """When it is planned, in seconds."""
        return self._now

    @property
    def micro_batches(self) -> int:
        """Stages of the pipeline that steps pass; 1 without one."""
        return self._queues.micro_batches

    @property
    def running(self) -> RankedQueue:
        """The running sequences, to look at."""
        return self._queues.running

    @property
    def crowded(self) -> bool:
        """Whether more rows are taken than free."""
        return len(self._queues.running) + len(self._queues.swapping_in) > len(self._queues.rows)

    def blocks_for(self, positions: int) -> int:
        """Blocks that hold this many positions."""
        return self._queues.pool.blocks_for(positions)

    @property
    def num_blocks(self) -> int:
        """Blocks of the device in all."""
        return self._queues.pool.num_blocks

    def displace(self) -> None:
        """Where the order is one that displaces, suspend running sequences for waiting ones of a higher class.

        A waiting sequence displaces the last in rank, and only such as rank behind it: so the first of all is never
        displaced. As many make way as it takes for those ahead to find rows and blocks, and no more than the budget
        has room for beside the decodes. They come back as any that was preempted, with what is kept of their state.
        """
        queues, pool, running = self._queues, self._queues.pool, self._queues.running
        if not queues.contenders:
            return
        rows, spare = len(queues.rows), pool.available - queues.headroom
        room = max(1, self.budget - len(running))
        for entry in queues.contenders:
            sequence = entry.sequence
            if room <= 0 or sequence.in_flight or not running or entry.rank > running.last().rank:
                return
            kept = entry.cache.match(sequence.tokens).device.values()
            needed = pool.blocks_for(sequence.length) - len(kept) + pool.pinned_by(kept)
            victims: list[Entry] = []
            for other in reversed(running):
                if (rows and spare >= needed) or other.rank < entry.rank:
                    break
                if other.sequence.request.priority > sequence.request.priority and other.planned_in != self._number:
                    victims.append(other)
                    rows += 1
                    spare += len(other.cache.blocks)
            if not rows or spare < needed:
                return
            for victim in victims:
                queues.preempt(victim, self._now)
                self._preempted.append(victim.id)
            rows, spare, room = rows - 1, spare - needed, room - sequence.length

    def decode(self) -> None:
        """Plan every running sequence whose row is fed, preempting those that rank below it for its blocks.

        Where steps in flight are micro-batches of a pipeline, a sequence whose token is still on its way sits out, and
        a step takes no more than its share: else all decodes would gather in one, and the others would stand empty.
        """
        number, room, parts = self._number, self.budget, self._queues.micro_batches
        if parts > 1:
            room = min(room, -(-len(self._queues.running) // parts))
        chosen: list[Entry] = []
        starts: list[int] = []
        for entry in self._queues.running:
            if not entry.decoding or entry.planned_in == number:
                continue
            cache = entry.cache
            start = cache.planned
            stop = start + 1
            if parts > 1 and entry.sequence.in_flight:
                continue
            if len(chosen) >= room:
                break
            if stop > entry.decode_limit and not self._go_further(entry, stop):
                continue
            chosen.append(entry)
            starts.append(start)
            cache.planned = stop
            entry.sequence.length = stop + 1
            entry.planned_in = number
        self._ids += [entry.id for entry in chosen]
        self._rows += [entry.row for entry in chosen]
        self._starts += starts
        self._stops += [start + 1 for start in starts]
        self._tokens += [ROWS_OWN] * len(chosen)
        self._samplings += [entry.sampling for entry in chosen]
        self.sampling += chosen
        self.num_tokens += len(chosen)
        self.budget -= len(chosen)

    def prefill(self) -> None:
        """Plan the next chunk of every running sequence whose row is not fed."""
        for entry in self._queues.running:
            if self.budget <= 0:
                return
            if not entry.decoding and entry.planned_in != self._number:
                self._chunk(entry)

    def admit(self, allow: Callable[[Entry], bool] = anyone, *, whole: bool = False) -> None:
        """Start waiting sequences as long as the first of them finds a row and blocks, and plan their first chunks.

        It must be allowed, too; and if prompts are to be computed `whole`, the budget must hold all that it lacks.
        """
        while self.budget > 0 and self._queues.rows:
            entry = self._queues.waiting.first()
            if entry is None or not allow(entry) or not self._start(entry, whole):
                return
            if entry.swap_in_step < 0:
                self._chunk(entry)

    def finish(self, in_flight: bool) -> StepPlan | None:
        """The plan, or None if there is nothing to do; `in_flight` says whether a plan is, whose result will come.

        If not, and nothing can run before idle state has made room or state has come in, it is one without segments.
        """
        queues, pool = self._queues, self._queues.pool
        if not self._ids and in_flight:
            return None
        ready = pool.allocatable
        swap_out = pool.swap_out(self._number, self._now)
        if not self._ids and not pool.swapping_out and pool.allocatable == ready and not queues.swapping_in:
            return None
        awaits = queues.awaits
        if self._ids:  # otherwise the next plan has to wait
            pool.finish_swap_in(awaits)
            queues.awaits = -1
        return StepPlan(
            self._number,
            Columns(Segment, (self._ids, self._rows, self._starts, self._stops, self._tokens, self._samplings)),
            tuple(self._writes),
            tuple(self._preempted),
            tuple(self._swap_in),
            swap_out,
            awaits,
        )

    def _chunk(self, entry: Entry) -> None:
        """Plan of a sequence what it lacks, as far as the budget goes: a segment for each range."""
        sequence, cache = entry.sequence, entry.cache
        for start, end in cache.missing(sequence.length):
            stop = min(end, start + self.budget)
            if self.pace is not None and (most := start + self.pace(start, stop)) < stop:
                stop, self.budget = most, most - start
            if start == stop:
                break
            last = stop == sequence.length
            self._ids.append(entry.id)
            self._rows.append(entry.row)
            self._starts.append(start)
            self._stops.append(stop)
            self._tokens.append(tuple(sequence.tokens[start:stop]))
            self._samplings.append(entry.sampling if last else None)
            cache.plan(start, stop)
            self.num_tokens += stop - start
            self.budget -= stop - start
            if last:
                self.sampling.append(entry)
                sequence.length += 1
                entry.decoding = True
        cache.cache_blocks(sequence.tokens)
        entry.planned_in = self._number

    def _start(self, entry: Entry, whole: bool) -> bool:
        """Admit the first waiting sequence if all its known positions fit beside the headroom.

        When nothing runs the headroom serves nobody, so whatever fits the pool is never starved. A preempted sequence
        waits until the tokens in flight for it are known, as the row that they are in is no longer its own.
        """
        queues, sequence = self._queues, entry.sequence
        pool = queues.pool
        spare = pool.available - (queues.headroom if queues.running else 0)
        if sequence.in_flight or spare <= 0:
            return False
        found = entry.cache.match(sequence.tokens)
        if whole and sequence.length - len(found) * pool.block_size > self.budget:
            return False
        if found.host and self._swap_in and len(self._swap_in) + len(found.host) > pool.max_copies:
            return False  # they come one after the other: a step begins no more of them than one sequence needs
        kept = found.device.values()
        fresh = pool.blocks_for(sequence.length) - len(kept)
        if fresh + pool.pinned_by(kept) > spare or not pool.fits(fresh, kept):
            return False
        copies = queues.start(entry, found, self._now)
        pool.start_swap_in([copy.target for copy in copies], self._number)
        self._swap_in += copies
        self._writes.append(TableWrite(entry.row, 0, tuple(entry.cache.blocks)))
        # Beside others it comes in under their steps, which would otherwise wait for it; alone it starts at once.
        entry.swap_in_step = pool.swap_in_step(kept if not copies else entry.cache.blocks)
        if entry.swap_in_step < 0 or whole or not self._ids:
            queues.join(entry)
        return True

    def _go_further(self, entry: Entry, stop: int) -> bool:
        """Whether a running sequence may be planned up to `stop`: it has not reached its limit, and finds a block."""
        if stop >= entry.limit or (stop > entry.cache.capacity and not self._grow(entry)):
            return False
        entry.decode_limit = min(entry.cache.capacity, entry.limit - 1)
        return True

    def _grow(self, entry: Entry) -> bool:
        """Give a running sequence one more block.

        If need be, the last in rank loses its own; never one that ranks higher, and never one that this step has
        planned. If there is none to lose any, the sequence keeps what it has and waits for the next step: the first in
        rank always finds blocks, as a sequence that would not fit the pool alone is refused when it is added. With a
        host tier nobody loses blocks while idle state can make room: the sequence waits until that is copied.
        """
        queues = self._queues
        pool = queues.pool
        while not pool.allocatable:
            if pool.can_swap_out:
                return False
            victim = next(other for other in reversed(queues.running) if other.planned_in != self._number)
            if victim is entry:
                return False
            queues.preempt(victim, self._now)
            self._preempted.append(victim.id)
        blocks = entry.cache.blocks
        entry.cache.grow(self._now)
        self._writes.append(TableWrite(entry.row, len(blocks) - 1, (blocks[-1],)))
        return True
