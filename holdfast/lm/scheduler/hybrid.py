"""HybridKind: memory of models with attention and recurrent layers, as the scheduler uses it."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from functools import partial

from holdfast.lm.memory.block_pool import BlockPool
from holdfast.lm.memory.hybrid_cache import HybridCache
from holdfast.lm.memory.state_pool import StatePool
from holdfast.lm.scheduler.entries import Entry
from holdfast.lm.scheduler.paged import PagedBuilder
from holdfast.lm.scheduler.part import Part
from holdfast.lm.scheduler.queues import Queues
from holdfast.lm.scheduler.results import Submitted
from holdfast.lm.types import StepResult


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
        self.parts: tuple[Part, ...] = (SnapshotCount(states),)
        self._by_layer = by_layer
        self._forks = forks

    def builder(self, queues: Queues, number: int, now: float) -> PagedBuilder:
        """A plan under construction. See `MemoryKind.builder`."""
        return PagedBuilder(queues, number, now, by_layer=self._by_layer, states=partial(self.states.plan, now))

    def state(self, name: str, root: bytes | None) -> HybridCache:
        """The blocks and the recurrent state of a new sequence. See `MemoryKind.state`."""
        return HybridCache(self.memory, self.states, root, forks=self._forks)

    def mark_lost(
        self, result: StepResult, in_flight: Iterable[Submitted], entries: Mapping[str, Entry], next_step: int
    ) -> Collection[Entry]:
        """No sequence: the memory of all blocks and states is allocated before the first step."""
        return ()

    def settle(self, result: StepResult, lost: Collection[Entry], queues: Queues) -> Collection[Entry]:
        """No sequence ends: one that fits the pool always fits the device."""
        return ()


class SnapshotCount(Part):
    """Counts the snapshots of recurrent states, and the sequences that began with one."""

    name = "snapshots"

    def __init__(self, states: StatePool) -> None:
        self._states = states

    def stats(self) -> Mapping[str, int]:
        return self._states.stats()
