"""RowKind: memory of padded rows as the scheduler uses it. RowBatch: which sequences share the batch."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

from holdfast.lm.memory.block_pool import BlockPool
from holdfast.lm.memory.row_pool import RowPool, RowState
from holdfast.lm.scheduler.entries import Entry
from holdfast.lm.scheduler.part import Part
from holdfast.lm.scheduler.queues import Queues
from holdfast.lm.scheduler.results import Submitted
from holdfast.lm.scheduler.row_builder import RowBatch, RowBuilder, state_of
from holdfast.lm.types import RowPlan, RowResult, StepPlan, StepResult, idle_tokens

TRIES = 3
"""A sequence that is lost this often while no other has a state does not fit the device."""


class RowKind:
    """Rows of a padded batch: running sequences share one batch, and states may be lost (`kind.MemoryKind`)."""

    block_pools: tuple[BlockPool, ...] = ()

    def __init__(self, pool: RowPool, *, longest: int, prefill_ahead: int = 0) -> None:
        """`longest` is the most positions of a row.

        `prefill_ahead` is the most sequences that are prefilled and wait for a place in the batch.
        """
        self.memory = pool
        self.prefill_ahead = prefill_ahead
        self.parts: tuple[Part, ...] = (ForwardCount(),)
        self._longest = longest

    def state(self, name: str, root: bytes | None) -> RowState:
        """The state of a new sequence. See `MemoryKind.state`."""
        return RowState(self.memory, root, name)

    def builder(self, queues: Queues, number: int, now: float) -> RowBuilder:
        """A plan under construction. See `MemoryKind.builder`."""
        return RowBuilder(RowBatch(queues, self.memory), number, now, self._longest)

    def mark_lost(
        self, result: StepResult, in_flight: Iterable[Submitted], entries: Mapping[str, Entry], next_step: int
    ) -> Collection[Entry]:
        """Let plans in flight give no token for the lost sequences. Returns these sequences.

        A sequence that a later plan has already started again is not lost.
        """
        names = result.part(RowResult).lost
        if not names:
            return ()
        for submitted in in_flight:
            for entry in submitted.sampling:
                if entry.id in names and state_of(entry).since <= result.step:
                    entry.lost_before = next_step
        found = [entries[name] for name in names if name in entries]
        lost = [entry for entry in found if state_of(entry).since <= result.step]
        alone = len(names) == 1 == self.memory.rows + len(self.memory.ahead)
        for entry in lost:
            state_of(entry).lost_alone += alone
        return lost

    def settle(self, result: StepResult, lost: Collection[Entry], queues: Queues) -> Collection[Entry]:
        """Let the lost sequences wait, with nothing computed, and use less memory after a loss.

        A sequence that is lost several times while it runs alone can never go on.
        """
        names = result.part(RowResult).lost
        if not names:
            self.memory.recover()
            return ()
        self.memory.shrink()
        batch = RowBatch(queues, self.memory)
        batch.lose_ended(names)
        alive = [entry for entry in lost if not entry.sequence.ended]
        for entry in alive:
            batch.lose(entry)
        return [entry for entry in alive if state_of(entry).lost_alone >= TRIES]


class ForwardCount(Part):
    """Counts the forwards of padded rows, and the tokens in them that belong to no request."""

    name = "forwards"

    def __init__(self) -> None:
        self._forwards = self._idle_tokens = 0

    def planned(self, plan: StepPlan) -> None:
        self._forwards += len(plan.part(RowPlan).forwards)
        self._idle_tokens += idle_tokens(plan)

    def stats(self) -> Mapping[str, int]:
        return {"forwards": self._forwards, "idle_tokens": self._idle_tokens}
