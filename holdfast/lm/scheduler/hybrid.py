"""HybridKind: memory of models with attention and recurrent layers, as the scheduler uses it."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from functools import partial

from holdfast.lm.memory.block_pool import BlockPool
from holdfast.lm.memory.hybrid_cache import HybridCache
from holdfast.lm.memory.state_pool import StatePool
from holdfast.lm.scheduler.entries import Entry
from holdfast.lm.scheduler.paged import PagedBuilder
from holdfast.lm.scheduler.part import Part, PartQueues
from holdfast.lm.scheduler.queues import Queues
from holdfast.lm.scheduler.results import Submitted
from holdfast.lm.types import StatePlan, StepPlan, StepResult


class HybridKind:
    """Paged blocks, and a recurrent state for each row (`kind.MemoryKind`).

    The memory is the pool of blocks: there is room for a sequence if its blocks have room, as each row has a slot for
    its state. Plans are those over paged blocks, with the copies of states that begin and end sequences (`StatePlan`).
    A plan has at most one segment for a row.
    """

    prefill_ahead = 0

    def __init__(self, pool: BlockPool, states: StatePool, *, by_layer: bool = False, forks: bool = True) -> None:
        """`by_layer`: a sequence whose state comes from the host joins others at once (`PagedBuilder`).

        `forks`: prefills may be cut where a known prefix ends, to save the state there. The policy must cut prompts.
        """
        self.memory = pool
        self.block_pools = (pool,)
        self.states = states
        self.parts: tuple[Part, ...] = (SnapshotPart(states),)
        self._by_layer = by_layer
        self._forks = forks

    def builder(self, queues: Queues, number: int, now: float) -> PagedBuilder:
        """A plan under construction. See `MemoryKind.builder`."""
        return PagedBuilder(queues, number, now, by_layer=self._by_layer, states=partial(self.states.plan, now))

    def state(self, name: str, root: bytes | None) -> HybridCache:
        """The blocks and the recurrent state of a new sequence. See `MemoryKind.state`."""
        return HybridCache(self.memory, self.states, root, forks=self._forks, name=name)

    def mark_lost(
        self, result: StepResult, in_flight: Iterable[Submitted], entries: Mapping[str, Entry], next_step: int
    ) -> Collection[Entry]:
        """No sequence: the memory of all blocks and states is allocated before the first step."""
        return ()

    def settle(self, result: StepResult, lost: Collection[Entry], queues: Queues) -> Collection[Entry]:
        """No sequence ends: one that fits the pool always fits the device."""
        return ()


class SnapshotPart(Part):
    """Lets a sequence wait while another computes the beginning of its prompt, and counts the snapshots.

    A recurrent state is kept only at some positions. So of several requests with one new prefix, each would compute it.
    A sequence waits instead if one that ranks before it will save a state from which it could start further on
    (`StatePool.coming`). It waits for that state alone, or until its maker stops.
    """

    name = "snapshots"
    waits_for = "shared prefix"

    def __init__(self, states: StatePool) -> None:
        self.states = states
        """The snapshots."""
        self._queues: PartQueues
        self._running: dict[str, Entry] = {}
        """The sequences with a row, by id."""
        self._held: dict[Entry, bytes] = {}
        """The waiting sequences that this part holds, each with the state that it waits for, as in `coming`."""

    def attach(self, queues: PartQueues) -> None:
        self._queues = queues

    def starting(self, entry: Entry, now: float) -> bool:
        sequence, coming = entry.sequence, self.states.coming
        if not coming or sequence.in_flight or not entry.uses_kept:
            return False
        state = entry.cache.match(sequence.tokens).coming
        if state and self._running[coming[state]].rank < entry.rank:
            self._held[entry] = state
        return entry in self._held

    def left(self, entry: Entry) -> None:
        self._held.pop(entry, None)

    def started(self, entry: Entry) -> None:
        self._running[entry.id] = entry

    def stopped(self, entry: Entry) -> None:
        del self._running[entry.id]

    def advance(self, now: float) -> None:
        for entry in [entry for entry, state in self._held.items() if state not in self.states.coming]:
            del self._held[entry]
            self._queues.release(entry, self)

    def apply(self, plan: StepPlan, result: StepResult, now: float) -> Iterable[Entry]:
        """Note that the plan's copies of states to the host or from there are complete."""
        copies = plan.part(StatePlan)
        if copies.uses_host:
            self.states.end_copies()
        return ()

    @property
    def wants_step(self) -> bool:
        return self.states.wants_copies

    @property
    def has_work(self) -> bool:
        """Whether others want copies of snapshots on the host."""
        return self.states.wants_copies

    def stats(self) -> Mapping[str, int]:
        return self.states.stats()
