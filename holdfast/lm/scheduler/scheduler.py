"""Scheduler: takes requests, decides steps, and applies their results to the sequences."""

from __future__ import annotations

from collections import abc
from typing import Any, TypeVar

from holdfast.core.columns import Columns
from holdfast.core.tokens import VOCABULARY_LIMIT
from holdfast.core.types import FinishReason, Identity, Request, SequenceOutput
from holdfast.lm.limits import RequestLimits
from holdfast.lm.memory.block_pool import BlockPool
from holdfast.lm.memory.protocol import AnyMemory
from holdfast.lm.scheduler.builder import Policy
from holdfast.lm.scheduler.entries import Entry
from holdfast.lm.scheduler.intake import Intake
from holdfast.lm.scheduler.kind import MemoryKind
from holdfast.lm.scheduler.order import Order, Priority
from holdfast.lm.scheduler.part import Hooks, Part
from holdfast.lm.scheduler.queues import Queues
from holdfast.lm.scheduler.results import Results
from holdfast.lm.types import SchedulerStats, StepPlan, StepResult

P = TypeVar("P", bound=Part)

PAUSE_STEPS = 8
"""Number of steps between two answers to whether there may be a pause."""


class Scheduler:
    """Holds each sequence, with its state in memory, from its request to its end.

    `schedule` may be called again before the results of earlier plans are known. Plans must run in the order in which
    they were made, and their results come back to `update` in that order.
    """

    def __init__(
        self,
        policy: Policy,
        kind: MemoryKind,
        parts: abc.Collection[Part] = (),
        *,
        max_sequences: int,
        max_model_len: int,
        vocab_size: int = VOCABULARY_LIMIT,
        eos_token_ids: abc.Collection[int] = (),
        headroom: float = 0.1,
        sharing: bool = False,
        served: Identity | None = None,
        order: Order | None = None,
        seed: int = 0,
        stages: int = 1,
    ) -> None:
        """`kind` is the memory, with the builder of plans over it.

        `parts` are called in their order. `sharing` lets requests of one identity share the state of equal prefixes.

        `served` names the model, adapter and dtype of the executor. `add` refuses any other, unless a part serves it;
        None refuses nothing.

        `headroom` is the share of the blocks that admission leaves to running sequences. `order` ranks requests, by
        default by priority class. `seed` makes seeds for requests that name none.

        `stages` is the number of stages of a pipeline. A sequence sampled in step k may be in step k + stages before
        the host knows its token. It is in an earlier step only once the host knows its token. Each step takes its
        share of the decodes.
        """
        hooks, order = Hooks((*kind.parts, *parts)), order or Priority()
        for part in hooks.extend_order:
            order = part.extend_order(order)
        for part in hooks.extend_policy:
            policy = part.extend_policy(policy)
        limits = RequestLimits(max_model_len, vocab_size, kind.memory.longest(max_model_len), served)
        self._policy = policy
        self._kind = kind
        self._queues = Queues(kind.memory, max_sequences, headroom, order, stages, hooks, kind.prefill_ahead)
        for part in hooks.parts:
            part.attach(self._queues)
        self._intake = Intake(limits, order, hooks, kind, eos_token_ids=eos_token_ids, sharing=sharing, seed=seed)
        self._entries: dict[str, Entry] = {}
        self._results = Results(self._queues, self._end)
        self._steps = 0
        self._now = 0.0
        """The latest time that any call gave; `abort` gives none."""
        self._results_at = 0.0
        """Time of the latest result."""
        self._tokens_computed = 0
        self._paused_at: float | None = None
        """When a pause began that the next step comes after; None if there was none."""

    def add(self, request: Request) -> None:
        """Queue a request. Raises ValueError if it could never run to its end, or if its id is taken."""
        if request.id in self._entries:
            raise ValueError(f"request {request.id} is already being served; give each request an id of its own")
        entry = self._intake.take(request)
        self._entries[request.id] = entry
        if self._queues.num_waiting:
            self._now = max(self._now, request.arrival)
            entry.cache.touch(request.prompt, self._now)  # it will wait: its conversation is active again from now on
        soon = len(self._queues.free_rows) > self._queues.num_waiting
        self._queues.add(entry)
        if soon and entry not in self._queues.held:
            self._queues.is_held_back(entry, max(self._now, request.arrival))

    @property
    def parts(self) -> tuple[Part, ...]:
        """The parts in their order."""
        return self._queues.hooks.parts

    def part(self, kind: type[P]) -> P:
        """The part of this class. Raises LookupError if there is none."""
        for part in self._queues.hooks.parts:
            if isinstance(part, kind):
                return part
        raise LookupError(f"this scheduler has no {kind.__name__}")

    def abort(self, request_id: str) -> None:
        """End a request at once. Tokens that steps in flight give it are dropped. Ignores requests that have ended."""
        if request_id in self._entries:
            self._end(self._entries[request_id], FinishReason.ABORT)

    def abort_all(self) -> None:
        """End every request at once."""
        for name in tuple(self._entries):
            self.abort(name)

    def schedule(self, now: float) -> StepPlan | None:
        """Decide the next step; it counts as submitted. None if nothing can run before a step in flight ends."""
        self._now = now
        hooks = self._queues.hooks
        for part in hooks.advance:
            part.advance(now)
        step = self._kind.builder(self._queues, self._steps, now)
        in_flight = step.in_flight = bool(self._results.in_flight)
        step.results_at = self._results_at
        step.bound = self._policy.step_bound(step)
        if self._paused_at is not None:
            step.reserve(now - self._paused_at)
            self._paused_at = None
        for part in hooks.begin:
            part.begin(step)
        if not step.postponed:
            self._policy.plan(step)
        plan = step.finish(in_flight=in_flight)
        if plan is not None:
            self._results.submitted(self._steps, step.sampling)
            self._steps += 1
            self._tokens_computed += step.num_tokens
            for part in hooks.planned:
                part.planned(plan)
        return plan

    def pause(self, seconds: float, now: float) -> bool:
        """Whether the streams can wait for a pause of so long without a late token, once no step is in flight.

        If so, the next step counts the time since `now` as a part of its own. While a step is in flight, this is found
        out only now and then, because it takes as long as planning does.
        """
        if self._results.in_flight and self._steps % PAUSE_STEPS:
            return False
        allowed = seconds <= self._policy.spare(self._queues.running)
        self._paused_at = now if allowed and not self._results.in_flight else None
        return allowed

    def update(self, plan: StepPlan, result: StepResult, now: float) -> Columns[SequenceOutput]:
        """Apply the result of the oldest plan in flight; returns the new tokens, and which sequences ended.

        Raises RuntimeError if the result is another plan's, or does not hold the tokens that its plan samples.
        """
        lost = self._kind.mark_lost(result, self._results.in_flight, self._entries, self._steps)
        submitted = self._results.take(plan, result)
        self._now = now
        self._results_at = now
        self._queues.pool.copied(result.copied)
        for part in self._queues.hooks.apply:
            for entry in part.apply(plan, result, now):
                self._end(entry, FinishReason.ABORT)
        self._policy.observe(plan, result)
        outputs = self._results.apply(submitted, plan, result)
        misfits = self._kind.settle(result, lost, self._queues)
        for entry in misfits:
            self._end(entry, FinishReason.LENGTH)
        return self._results.with_ends(outputs, misfits) if misfits else outputs

    def note_waits(self, count: int, late: int) -> None:
        """Let the policy learn that clients had `late` of `count` times between two tokens above the latency target."""
        self._policy.note_waits(count, late)

    @property
    def queues(self) -> Queues:
        """The waiting and the running sequences; read only."""
        return self._queues

    @property
    def entries(self) -> abc.Mapping[str, Entry]:
        """The sequences that have not ended, by id; read only."""
        return self._entries

    def has_work(self) -> bool:
        """Whether any request has not ended, a part has work of its own, or others wait for copies to the host tier."""
        return (
            bool(self._entries)
            or any(part.has_work for part in self._queues.hooks.has_work)
            or bool(self._queues.pool.copies.wanted)
        )

    @property
    def pool(self) -> AnyMemory:
        """The memory that holds the sequences' state, with plans in flight counted as done.

        Between two plans, others may hold, reserve and fill blocks of its host tier.
        """
        return self._queues.pool

    @property
    def block_pools(self) -> abc.Collection[BlockPool]:
        """The pools of paged blocks in the memory; none where state is not paged."""
        return self._kind.block_pools

    def stats(self) -> SchedulerStats:
        """Queues and memory now, with plans in flight counted as done."""
        queues = self._queues
        return SchedulerStats(
            waiting=queues.num_waiting,
            running=len(queues.running) + len(queues.swapping_in) + len(queues.prefilled),
            preemptions=queues.preemptions,
            prefix_queries=queues.prefix_queries,
            prefix_hits=queues.prefix_hits,
            tokens_computed=self._tokens_computed,
            tokens_recovered=queues.recovered,
            prefix_hits_on_host=queues.prefix_hits_on_host,
            suspensions=queues.suspensions,
            rows_prefilled=len(queues.prefilled),
            **queues.pool.stats(),
            **self._stats_of_parts(),
        )

    def _stats_of_parts(self) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for part in self._queues.hooks.stats:
            found.update(part.stats())
        return found

    def _end(self, entry: Entry, reason: FinishReason) -> None:
        entry.sequence.finish_reason = reason
        self._results.ended(entry)
        del self._entries[entry.id]
        self._queues.stop(entry, self._now)
        self._policy.ended(entry)
        for part in self._queues.hooks.ended:
            part.ended(entry)
