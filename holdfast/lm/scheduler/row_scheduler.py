"""RowScheduler: the scheduler over padded rows, whose states may be lost when a device runs out of memory."""

from __future__ import annotations

from collections import abc
from dataclasses import replace
from functools import partial

from holdfast.core.columns import Columns
from holdfast.core.types import FinishReason, Identity, SequenceOutput
from holdfast.lm.memory.row_pool import RowPool, RowState
from holdfast.lm.scheduler.builder import Policy
from holdfast.lm.scheduler.entries import Entry
from holdfast.lm.scheduler.order import Order
from holdfast.lm.scheduler.part import Hooks, Part
from holdfast.lm.scheduler.results import StepOutputs
from holdfast.lm.scheduler.row_builder import RowBuilder, RowQueues, state_of
from holdfast.lm.scheduler.scheduler import Scheduler
from holdfast.lm.types import RowPlan, RowResult, SchedulerStats, StepPlan, StepResult, idle_tokens

TRIES = 3
"""A sequence that is lost this often while no other has a state does not fit the device."""


class RowScheduler(Scheduler):
    """A `Scheduler` whose plans consist of forwards and of moves of rows."""

    _queues: RowQueues

    def __init__(
        self,
        policy: Policy,
        pool: RowPool,
        parts: abc.Collection[Part] = (),
        *,
        max_sequences: int,
        max_model_len: int,
        vocab_size: int,
        eos_token_ids: abc.Collection[int] = (),
        headroom: float = 0.1,
        sharing: bool = False,
        served: Identity | None = None,
        order: Order | None = None,
        seed: int = 0,
        prefill_ahead: int = 0,
        to_completion: bool = False,
    ) -> None:
        """Takes the arguments of `Scheduler`; `prefill_ahead` and `to_completion` go to `RowQueues`."""

        def make_queues(
            pool: RowPool, rows: int, headroom: float, order: Order, stages: int, hooks: Hooks
        ) -> RowQueues:
            return RowQueues(
                pool, rows, headroom, order, hooks, prefill_ahead=prefill_ahead, to_completion=to_completion
            )

        super().__init__(
            policy,
            pool,
            parts,
            max_sequences=max_sequences,
            max_model_len=max_model_len,
            vocab_size=vocab_size,
            eos_token_ids=eos_token_ids,
            headroom=headroom,
            sharing=sharing,
            served=served,
            order=order,
            seed=seed,
            make_state=RowState,
            make_queues=make_queues,
            make_builder=partial(RowBuilder, longest=max_model_len),
        )
        self._pool = pool
        self._forwards = self._idle_tokens = 0

    def schedule(self, now: float) -> StepPlan | None:
        plan = super().schedule(now)
        if plan is not None:
            self._forwards += len(plan.part(RowPlan).forwards)
            self._idle_tokens += idle_tokens(plan)
        return plan

    def update(self, plan: StepPlan, result: StepResult, now: float) -> Columns[SequenceOutput]:
        """Apply a result (`Scheduler.update`). Sequences whose state was lost wait, with nothing computed.

        After a loss less memory is used. A sequence that is lost several times while it runs alone ends there, with the
        reason `length`.
        """
        lost = self._mark_lost(result)
        names = result.part(RowResult).lost
        alone = len(names) == 1 == self._pool.rows + len(self._pool.ahead)
        outputs = super().update(plan, result, now)
        if not names:
            self._pool.recover()
            return outputs
        self._pool.shrink()
        self._queues.lose_ended(names)
        ended = []
        for entry in lost:
            if entry.sequence.ended:
                continue
            self._queues.lose(entry)
            state_of(entry).lost_alone += alone
            if state_of(entry).lost_alone >= TRIES:
                self._end(entry, FinishReason.LENGTH)
                ended.append(entry)
        return self._with_ends(outputs, ended) if ended else outputs

    def stats(self) -> SchedulerStats:
        """Queues and memory now (`Scheduler.stats`), where blocks are positions."""
        queues, pool = self._queues, self._pool
        stats = super().stats()
        return replace(
            stats,
            running=stats.running + len(queues.prefilled),
            suspensions=queues.suspensions,
            host_blocks_total=pool.shape.host_memory // pool.shape.bytes.position,
            host_blocks_ready=pool.shape.host_memory // pool.shape.bytes.position,
            host_blocks_cached=(pool.host_used + pool.kept.host_bytes) // pool.shape.bytes.position,
            idle_tokens=self._idle_tokens,
            forwards=self._forwards,
            rows_wide=pool.width,
            rows_prefilled=len(queues.prefilled),
            shrinks=pool.shrinks,
        )

    def _with_ends(self, outputs: Columns[SequenceOutput], ended: list[Entry]) -> Columns[SequenceOutput]:
        """The outputs of a step, with the ends of these sequences, to which it may have given a token."""
        given: list[str] = outputs.column("request_id")
        silent = [entry for entry in ended if entry.id not in given]
        more = StepOutputs(self._results, silent, [()] * len(silent)).columns(some_ended=True)
        columns = {name: [*outputs.column(name), *more.column(name)] for name in outputs.by_name}
        for entry in ended:
            columns["finish_reason"][columns["request_id"].index(entry.id)] = entry.sequence.finish_reason
        return Columns(SequenceOutput, **columns)

    def _mark_lost(self, result: StepResult) -> list[Entry]:
        """Let plans in flight give no token for the lost sequences. Returns these sequences.

        A sequence that a later plan has already started again is not lost.
        """
        names = result.part(RowResult).lost
        if not names:
            return []
        for submitted in self._results.in_flight:
            for entry in submitted.sampling:
                if entry.id in names and state_of(entry).since <= result.step:
                    entry.lost_before = self._steps
        lost = [self._entries[name] for name in names if name in self._entries]
        return [entry for entry in lost if state_of(entry).since <= result.step]
