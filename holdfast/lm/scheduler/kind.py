"""MemoryKind: a kind of memory as the scheduler uses it. It brings the builder of plans, and rules for its queues."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Protocol

from holdfast.lm.memory.block_pool import BlockPool
from holdfast.lm.memory.protocol import AnyMemory, AnyState
from holdfast.lm.scheduler.builder import StepBuilder
from holdfast.lm.scheduler.entries import Entry
from holdfast.lm.scheduler.part import Part
from holdfast.lm.scheduler.queues import Queues
from holdfast.lm.scheduler.results import Submitted
from holdfast.lm.types import StepResult


class MemoryKind(Protocol):
    """One kind of memory: paged blocks, with recurrent states or without, or rows of a padded batch.

    They are `paged.PagedKind`, `hybrid.HybridKind` and `row_kind.RowKind`.

    A model that keeps state in two kinds at once has a kind of its own, which holds both: its memory and its states
    answer for both (there is room if both have it; the found state is what both have), and its builder plans for both.
    """

    @property
    def memory(self) -> AnyMemory:
        """The memory of all sequences."""
        ...

    @property
    def block_pools(self) -> Collection[BlockPool]:
        """The pools of paged blocks in it, for whatever handles blocks by number: maps, moves to other engines."""
        ...

    @property
    def prefill_ahead(self) -> int:
        """Most sequences that have a row while they wait for a place in the batch that running sequences share."""
        ...

    @property
    def parts(self) -> tuple[Part, ...]:
        """The parts that the kind itself adds to every step, before all others."""
        ...

    def state(self, name: str, root: bytes | None) -> AnyState:
        """The state of the new sequence with this id.

        `root` starts its chain of digests (`Identity.root`); None: it shares nothing.
        """
        ...

    def builder(self, queues: Queues, number: int, now: float) -> StepBuilder:
        """The plan of step `number` under construction, at time `now` in seconds."""
        ...

    def mark_lost(
        self, result: StepResult, in_flight: Iterable[Submitted], entries: Mapping[str, Entry], next_step: int
    ) -> Collection[Entry]:
        """The sequences whose state the device has lost, as a result says that is about to be read.

        `in_flight` are the plans whose results are still to come, this result's included: those before `next_step` may
        give no token for these sequences (`Entry.lost_before`).
        """
        ...

    def settle(self, result: StepResult, lost: Collection[Entry], queues: Queues) -> Collection[Entry]:
        """Let the `lost` sequences wait, once the rest of the result is read. Returns those that can never go on."""
        ...
