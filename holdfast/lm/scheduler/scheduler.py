"""Scheduler: takes requests, decides steps, and applies their results to the sequences."""

from __future__ import annotations

from collections import abc
from collections.abc import Callable
from typing import Any, TypeVar

from holdfast.core.columns import Columns
from holdfast.core.tokens import VOCABULARY_LIMIT
from holdfast.core.types import FinishReason, Identity, Request, SequenceOutput
from holdfast.lm.limits import RequestLimits
from holdfast.lm.memory.block_pool import BlockPool
from holdfast.lm.memory.lower_tiers import LowerTiers
from holdfast.lm.memory.protocol import AnyMemory, AnyState
from holdfast.lm.memory.sequence_cache import SequenceCache
from holdfast.lm.scheduler.builder import Policy, StepBuilder
from holdfast.lm.scheduler.entries import Entry
from holdfast.lm.scheduler.intake import Intake
from holdfast.lm.scheduler.order import Order, Priority
from holdfast.lm.scheduler.part import Hooks, Part
from holdfast.lm.scheduler.queues import Queues
from holdfast.lm.scheduler.results import Results
from holdfast.lm.scheduler.tuner import Tuner
from holdfast.lm.tiers import TierDone, TierJob
from holdfast.lm.types import SchedulerStats, StepPlan, StepResult
from holdfast.lm.types.tuning import TrainingPlan, TrainingReport

P = TypeVar("P", bound=Part)


class Scheduler:
    """Holds each sequence, with its blocks, from its request to its end.

    `schedule` may be called again before the results of earlier plans are known. Plans must run in the order in which
    they were made, and their results come back to `update` in that order.
    """

    def __init__(
        self,
        policy: Policy,
        pool: AnyMemory,
        parts: abc.Collection[Part] = (),
        *,
        max_sequences: int,
        max_model_len: int,
        vocab_size: int = VOCABULARY_LIMIT,
        eos_token_ids: abc.Collection[int] = (),
        headroom: float = 0.1,
        sharing: bool = False,
        served: Identity | None = None,
        tuner: Tuner | None = None,
        lower: LowerTiers | None = None,
        order: Order | None = None,
        seed: int = 0,
        stages: int = 1,
        make_state: Callable[[Any, bytes | None], AnyState] = SequenceCache,
        make_queues: Callable[[Any, int, float, Order, int, Hooks], Queues] = Queues,
        make_builder: Callable[[Any, int, float], StepBuilder] = StepBuilder,
    ) -> None:
        """`parts` are called in their order. `sharing` lets requests of one identity share the state of equal prefixes.
        `served` names the model, adapter and dtype of the executor; `add` refuses any other, unless a part serves it.
        None refuses nothing. `tuner` has jobs of training; the
        policy says when they run. `lower` are the tiers behind the host tier of `pool`.

        `headroom` is the share of the blocks that admission leaves to running sequences. `order` ranks requests, by
        default by priority class. `seed` makes seeds for requests that bring none. `stages` is the number of stages of
        a pipeline: a sequence sampled in step k may be in step k + stages before the host knows its token, and in no
        step between unless the host knows it. Each step takes its share of the decodes.

        `make_state` makes the state of one sequence, given the pool and the root of its chain of digests
        (`Identity.root`), or None where it shares nothing. `make_queues` and `make_builder` make the queues, and the
        builder of each plan. The three go with the kind of pool.
        """
        hooks, order = Hooks(parts), order or Priority()
        limits = RequestLimits(max_model_len, vocab_size, pool.longest(max_model_len), served)
        self._policy = policy
        self._queues = make_queues(pool, max_sequences, headroom, order, stages, hooks)
        for part in parts:
            part.attach(self._queues)
        self._intake = Intake(
            limits, order, hooks, pool, make_state, eos_token_ids=eos_token_ids, sharing=sharing, seed=seed
        )
        self.tuner = tuner
        """The jobs of training; None where none are taken."""
        if tuner is not None:
            self._queues.serve_training(tuner)
        self._lower = lower
        if lower is not None:
            self._queues.serve_lower_tiers(lower)
        self._make_builder = make_builder
        self._entries: dict[str, Entry] = {}
        self._results = Results(self._queues, self._end)
        self._steps = 0
        self._settled = -1
        """The last plan of which it is known that its copies from the host, and all before, are complete."""
        self._barrier = -1
        """The last plan for which somebody waits so."""
        self._now = 0.0
        """The latest time that any call gave; `abort` gives none."""
        self._tokens_computed = 0
        self._training_tokens, self._training_seconds = 0, 0.0

    @property
    def memory(self) -> AnyMemory:
        """The memory behind the sequences, as it stands with the plans in flight."""
        return self._queues.pool

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
            self._queues.fetch(entry, max(self._now, request.arrival))

    def part(self, kind: type[P]) -> P:
        """The part of this class. Raises LookupError where there is none."""
        for part in self._queues.hooks.parts:
            if isinstance(part, kind):
                return part
        raise LookupError(f"this scheduler has no {kind.__name__}")

    def abort(self, request_id: str) -> None:
        """End a request at once; tokens that steps in flight give for it are dropped. Ignores requests that ended."""
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
        if (lower := self._lower) is not None:
            self._queues.resume_fetched(now)
            lower.flush(not self._entries)
        step = self._make_builder(self._queues, self._steps, now)
        in_flight = step.in_flight = bool(self._results.in_flight)
        step.settles = self._settled < self._barrier
        for part in hooks.begin:
            part.begin(step)
        if not step.postponed:
            self._policy.plan(step)
        plan = step.finish(in_flight=in_flight)
        if plan is not None:
            if lower is not None and plan.copies.swap_in:
                lower.begin_swap_in(plan.step)
            self._results.submitted(self._steps, step.sampling)
            self._steps += 1
            self._tokens_computed += step.num_tokens
            for part in hooks.planned:
                part.planned(plan)
        return plan

    def update(self, plan: StepPlan, result: StepResult, now: float) -> Columns[SequenceOutput]:
        """Apply the result of the oldest plan in flight; returns the new tokens, and which sequences ended.

        Raises RuntimeError if the result is another plan's, or does not hold the tokens that its plan samples.
        """
        submitted = self._results.take(plan, result)
        slice_, report = plan.part(TrainingPlan).slice, result.part(TrainingReport)
        if bool(slice_) != bool(report):
            raise RuntimeError(f"step {plan.step} has slice {slice_ or None}; got {report or None}")
        pool = self._queues.pool
        self._now = now
        pool.finish_swap_out(result.copied.swapped_out)
        pool.copies.finish_swap_in(result.copied.swapped_in)
        if self._lower is not None:
            self._lower.finish_swap_in(result.copied.swapped_in)
        for copy in result.copied.times:
            if copy.inward and isinstance(pool, BlockPool):
                pool.host_link.observe(copy.bytes, copy.seconds)
        self._settled = max(self._settled, result.copied.swapped_in)
        for part in self._queues.hooks.apply:
            for entry in part.apply(plan, result, now):
                self._end(entry, FinishReason.ABORT)
        if self.tuner is not None and self._queues.slabs is not None and report:
            self.tuner.observe(report)
            self._training_tokens += report.tokens
            self._training_seconds += report.seconds
            self._queues.slabs.settle()
        self._policy.observe(plan, result)
        return self._results.apply(submitted, plan, result)

    def tier_jobs(self, now: float) -> abc.Sequence[TierJob]:
        """The jobs of the tiers behind the host that are to begin now; others do them."""
        return self._lower.jobs(now) if self._lower is not None else ()

    def finish_tier_jobs(self, ended: abc.Iterable[TierDone], now: float) -> None:
        """Take note of such jobs that have ended."""
        if self._lower is not None:
            self._lower.done(ended, now)

    @property
    def awaits_tiers(self) -> bool:
        """Whether a request waits for blocks of the tiers behind the host."""
        return self._queues.fetches is not None and len(self._queues.fetches) > 0

    @property
    def _flushes(self) -> bool:
        """Whether nothing is left to do but to copy idle state down, and the tiers behind the device take it."""
        return self._lower is not None and not self._entries and self._lower.can_flush

    def resize_host_tier(self, ready: int, total: int) -> None:
        """The first `ready` blocks of the host tier can be used from now on; in the end `total` will be."""
        host = self._queues.pool.host
        if host is not None:
            host.resize(ready, total)

    @property
    def queues(self) -> Queues:
        """The waiting and the running sequences, to look at."""
        return self._queues

    @property
    def entries(self) -> abc.Mapping[str, Entry]:
        """The sequences that have not ended, by id, to look at."""
        return self._entries

    def has_work(self) -> bool:
        """Whether any request has not ended, any training is left to plan, others wait for copies, or any state is left
        to copy down in a pause."""
        return (
            bool(self._entries)
            or (self.tuner is not None and self.tuner.has_work)
            or bool(self._queues.pool.copies.wanted)
            or self._settled < self._barrier
            or self._flushes
            or any(part.has_work for part in self._queues.hooks.has_work)
        )

    @property
    def pool(self) -> AnyMemory:
        """The memory. Between two plans, others may hold, reserve and fill blocks of its host tier."""
        return self._queues.pool

    def barrier(self) -> int:
        """A mark of what is planned so far, for `passed`. The host tier must be able to swap in."""
        self._barrier = self._steps - 1
        return self._barrier

    def passed(self, barrier: int) -> bool:
        """Whether no plan that was made before this mark reads the host any more."""
        return self._settled >= barrier

    def stats(self) -> SchedulerStats:
        """Queues and memory now, with plans in flight counted as done."""
        queues, pool, lower = self._queues, self._queues.pool, self._lower
        return SchedulerStats(
            waiting=queues.num_waiting,
            running=len(queues.running) + len(queues.swapping_in),
            blocks_total=pool.num_blocks,
            blocks_used=pool.used,
            blocks_cached=pool.cached,
            preemptions=queues.preemptions,
            prefix_queries=queues.prefix_queries,
            prefix_hits=queues.prefix_hits,
            tokens_computed=self._tokens_computed,
            tokens_recovered=queues.recovered,
            host_blocks_total=pool.host.num_blocks if pool.host else 0,
            host_blocks_ready=pool.host.ready if pool.host else 0,
            host_blocks_cached=pool.host.cached if pool.host else 0,
            host_blocks_dropped=pool.host.dropped if pool.host else 0,
            blocks_swapped_in=pool.swapped_in,
            blocks_swapped_out=pool.swapped_out,
            prefix_hits_on_host=queues.prefix_hits_on_host,
            suspensions=queues.preemptions if pool.host else 0,
            tokens_dropped=pool.dropped * pool.block_size,
            blocks_training=queues.lent,
            training_tokens=self._training_tokens,
            training_seconds=self._training_seconds,
            deferred_seconds=self._policy.deferred_seconds,
            prefix_hits_on_disk=queues.prefix_hits_below["disk"],
            prefix_hits_on_remote=queues.prefix_hits_below["remote"],
            **(lower.stats() if lower is not None else {}),
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
        for part in self._queues.hooks.ended:
            part.ended(entry)
