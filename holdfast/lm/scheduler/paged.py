"""PagedKind and PagedBuilder: memory of paged blocks as the scheduler uses it, and a plan over it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

from holdfast.lm.memory.block_pool import BlockPool
from holdfast.lm.memory.sequence_cache import SequenceCache
from holdfast.lm.scheduler.admission import NO_LIMIT
from holdfast.lm.scheduler.builder import LAST_SAMPLED, StepBuilder, anyone
from holdfast.lm.scheduler.entries import AWAITED, Entry
from holdfast.lm.scheduler.part import Decode, Part
from holdfast.lm.scheduler.preemption import Preemption
from holdfast.lm.scheduler.queues import Queues
from holdfast.lm.scheduler.results import Submitted
from holdfast.lm.types import PartPlan, StepResult

ROUNDING = 1e-9
"""A step's share of the decodes is full when less than this part of it is left."""


class PagedBuilder(StepBuilder):
    """A plan over paged blocks: decodes and chunks of prompts are computed together, packed, whatever their rows."""

    __slots__ = ("_after_sampling", "_by_layer", "_preemption", "_states")

    def __init__(
        self,
        queues: Queues,
        number: int,
        now: float,
        *,
        by_layer: bool = False,
        states: Callable[[], Sequence[PartPlan]] = tuple,
    ) -> None:
        """`by_layer`: the step that starts a sequence waits for its copies from the host, whatever else it computes.

        `states` makes the part plans of state that is not in blocks, once the rest of the plan is made.
        """
        super().__init__(queues, number, now)
        self._by_layer = by_layer
        self._states = states
        self._after_sampling = number + queues.stages
        """`Entry.next_step` of a sequence for which this step samples one token.

        When that step enters the first stage of a full pipeline, this one has left the last, and its tokens are on the
        device.
        """
        self._preemption = Preemption(queues, number, now, self._writes, self._preempted)

    def _state_plans(self) -> Sequence[PartPlan]:
        return self._states()

    def displace(self) -> None:
        self._preemption.displace(self.budget, self.due)

    def decode(self) -> None:
        """Plan one token of every decoding sequence. Preempts the sequences that rank last if blocks run out.

        In a pipeline a step takes its share of the decodes: by `weigh`, or else by number. Otherwise all decodes would
        gather in one step, and the other steps in the pipeline would be empty. As many consecutive steps as there are
        stages have room for each sequence once, so none is left out.
        """
        number, room, after = self.number, self.budget, self._after_sampling
        stages, weigh, left = self._queues.stages, None, 0.0
        if stages > 1:
            if (weigh := self.weigh) is not None:
                left = sum(weigh(entry) for entry in self.running if entry.decoding) / stages
            else:
                room = min(room, -(-len(self.running) // stages))
        least = ROUNDING * left
        chosen: list[Entry] = []
        starts: list[int] = []
        stops: list[int] = []
        for entry in self.running:
            if entry.next_step > number or not entry.decoding:
                continue
            cache = entry.cache
            start = cache.planned
            stop = start + 1
            if len(chosen) >= room:
                break
            if stop > entry.decode_limit and not self._extend(entry, stop):
                continue
            chosen.append(entry)
            starts.append(start)
            stops.append(stop)
            cache.planned = stop
            entry.sequence.length = stop + 1
            entry.next_step = after
            if weigh is not None:
                left -= weigh(entry)
                if left <= least:
                    break
        self._decodes.append((len(self._ids), len(self.sampling), len(chosen)))
        self._ids += [entry.id for entry in chosen]
        self._rows += [entry.row for entry in chosen]
        self._starts += starts
        self._stops += stops
        self._tokens += [LAST_SAMPLED] * len(chosen)
        self.draws += [entry.sampling for entry in chosen]
        self.sampling += chosen
        self.planned += chosen
        self.num_tokens += len(chosen)
        self.budget -= len(chosen)
        for part in self._queues.hooks.decoded:
            if part.awake:
                part.decoded(self)

    def extend(self, decode: Decode, tokens: Sequence[int]) -> tuple[int, ...]:
        """Append tokens to a decode, as far as budget, free blocks and its limit allow; returns the appended ones.

        With n appended tokens the decode gives between 0 and n + 1. Its positions count as computed only when the
        result accepts them. The sequence sits out every step until then.
        """
        entry, index, place = decode
        stop = self._stops[index]
        added = tuple(tokens[: max(0, min(self.budget, entry.limit - 1 - stop))])
        self._preemption.grow_freely(entry, stop + len(added))
        if added:
            added = added[: entry.cache.draft(self._starts[index], stop + len(added)) - stop]
        if added:
            self._stops[index] += len(added)
            self._tokens[index] += added
            self._samples[place] = 1 + len(added)
            self.num_tokens += len(added)
            self.budget -= len(added)
            entry.sequence.length += len(added)
            entry.next_step = AWAITED
        return added

    def admit(
        self, allow: Callable[[Entry], bool] = anyone, *, whole: bool = False, beyond_budget: bool = False
    ) -> None:
        """Start waiting sequences in rank order and plan their first chunks, until the first of them has to wait.

        A sequence waits if `allow` refuses it, if no row or too few blocks are free, or if the budget is spent. With
        `whole` it also waits if the budget cannot hold all that it lacks. `beyond_budget` starts sequences whether or
        not the budget lasts: `prefill` computes the rest of their prompts in later steps.

        If `due` is set, all due sequences are tried, and none holds up those that rank after it.
        """
        queues = self._queues
        if self.due is not None:
            for ready in [entry for entry in queues.waiting if self.due(entry)]:
                if not queues.free_rows or not (self.budget > 0 or beyond_budget):
                    return
                if allow(ready) and not queues.is_held_back(ready, self.now):
                    at_once = whole or self._by_layer or not self._ids
                    self._begin(ready, most=self.budget if whole else NO_LIMIT, at_once=at_once)
            return
        while (self.budget > 0 or beyond_budget) and queues.free_rows:
            entry = queues.waiting.first()
            if entry is None or not allow(entry):
                return
            if queues.is_held_back(entry, self.now):
                continue
            # With other segments in the step, the copies run while it computes. Otherwise it waits for them.
            at_once = whole or beyond_budget or self._by_layer or not self._ids
            if not self._begin(entry, most=self.budget if whole else NO_LIMIT, at_once=at_once):
                return

    def _begin(self, entry: Entry, *, most: int, at_once: bool) -> bool:
        """Start a waiting sequence if possible. Returns whether it did. Plans its first chunk if its state is there."""
        if not self._start(entry, most=most, at_once=at_once):
            return False
        if entry.swap_in_step < 0:
            self.compute(entry)
        return True

    def compute(self, entry: Entry) -> None:
        """Plan the positions that a sequence lacks, as far as the budget lasts: a segment for each missing range."""
        sequence, cache = entry.sequence, entry.cache
        if sequence.length > cache.capacity:  # tokens that were appended without a draw have no blocks yet
            self._preemption.grow_to(entry, sequence.length)
            if cache.capacity == cache.planned:
                return
        for start, end in cache.missing(sequence.length):
            stop = min(end, start + self.budget, cache.capacity)
            if self.pace is not None and (most := start + self.pace(start, stop)) < stop:
                stop, self.budget = most, most - start
            if stop == sequence.length and not self.draws_left:
                stop -= 1  # the next step computes its last token
            if start == stop:
                break
            entry.next_step = self.number + 1
            last = stop == sequence.length
            self._ids.append(entry.id)
            self.planned.append(entry)
            self._rows.append(entry.row)
            self._starts.append(start)
            self._stops.append(stop)
            self._tokens.append(tuple(sequence.tokens[start:stop]))
            self.draws.append(entry.sampling if last else None)
            cache.plan(start, stop)
            self.num_tokens += stop - start
            self.budget -= stop - start
            if last:
                self.draws_left -= 1
                self.sampling.append(entry)
                sequence.length += 1
                entry.decoding = True
                entry.next_step = self._after_sampling
        cache.cache_blocks(sequence.tokens)

    def _extend(self, entry: Entry, stop: int) -> bool:
        """Whether a running sequence may be planned up to `stop`: it is below its limit and finds a block."""
        if stop >= entry.limit or (stop > entry.cache.capacity and not self._preemption.grow(entry)):
            return False
        entry.decode_limit = min(entry.cache.capacity, entry.limit - 1)
        return True


class PagedKind:
    """Paged blocks: any sequences share a step, and one starts wherever its kept blocks end (`kind.MemoryKind`)."""

    prefill_ahead = 0
    parts: tuple[Part, ...] = ()

    def __init__(self, pool: BlockPool, *, by_layer: bool = False) -> None:
        """`by_layer`: a sequence whose state comes from the host joins others at once (`PagedBuilder`)."""
        self.memory = pool
        self.block_pools = (pool,)
        self._by_layer = by_layer

    def builder(self, queues: Queues, number: int, now: float) -> PagedBuilder:
        """A plan under construction. See `MemoryKind.builder`."""
        return PagedBuilder(queues, number, now, by_layer=self._by_layer)

    def state(self, name: str, root: bytes | None) -> SequenceCache:
        """The block table of a new sequence. See `MemoryKind.state`."""
        return SequenceCache(self.memory, root)

    def mark_lost(
        self, result: StepResult, in_flight: Iterable[Submitted], entries: Mapping[str, Entry], next_step: int
    ) -> Collection[Entry]:
        """No sequence: the memory of all blocks is allocated before the first step, so none is lost."""
        return ()

    def settle(self, result: StepResult, lost: Collection[Entry], queues: Queues) -> Collection[Entry]:
        """No sequence ends: one that fits the pool always fits the device."""
        return ()
