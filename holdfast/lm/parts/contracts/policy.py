"""ContractPolicy: steps that keep the accepted contracts, and give others what is left."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from holdfast.core.cost import CostModel
from holdfast.lm.memory.sequence_cache import Found
from holdfast.lm.parts.contracts.admission import ContractAdmission
from holdfast.lm.parts.contracts.forecast import Prices, Room
from holdfast.lm.parts.contracts.lateness import Lateness
from holdfast.lm.parts.contracts.order import has_contract
from holdfast.lm.parts.contracts.promises import Promises
from holdfast.lm.scheduler.builder import Policy, PolicyExtension, StepBuilder
from holdfast.lm.scheduler.correction import Correction
from holdfast.lm.scheduler.entries import Entry
from holdfast.lm.types import StepPlan, StepResult

PAUSE = 1.0
"""Seconds after which no stream was waiting for the next step, whatever was computed before."""
WATCHED = 8
"""While no contract is open, one step in this many is measured, so that the price of a step is known to new ones."""


class Progress:
    """When the steps in flight end, and how far measured times are from predicted ones."""

    def __init__(self, cost: CostModel, lateness: Lateness, stages: int = 1) -> None:
        """Notes the `lateness` of steps while contracts are open.

        `cost` is that of a step through all `stages` of a pipeline.
        """
        self._predictor, self._lateness = cost.predictor(), lateness
        self._passes = 1 + 2 * (stages - 1) * max(cost.shares(stages)) if stages > 1 else 1.0
        """Longest time between two tokens of a stream, in times of a step through all stages.

        A stream is in every step of as many as there are stages, or once in twice as many while others join and end.
        The steps between leave the last stage one after the other, by the time of the slowest stage, and its own
        passes all stages.
        """
        self._corrections = {prompts: Correction(cost.deviation) for prompts in (False, True)}
        """Corrections of steps of decodes alone (False) and of steps with prompts (True)."""
        self._in_flight: deque[tuple[StepPlan, float, bool]] = deque()
        """The plans in flight, each with the time of planning, and whether a contract was open; the oldest first."""
        self._result_at = 0.0
        """Time of the latest result."""
        self._streaming = False
        """Whether the latest result may have given a token to a sequence with a contract."""

    @property
    def factor(self) -> float:
        """Nearly all streams wait for their next token at most this many times the price of a step."""
        return self._passes * self._step_factor

    @property
    def _step_factor(self) -> float:
        """Nearly all steps take at most this many times their price."""
        return max(correction.factor for correction in self._corrections.values())

    @property
    def usual(self) -> float:
        """Many steps take at most this many times the sum of their prices.

        Long ones and short ones even out, but for one mean deviation: errors of steps near each other are alike.
        """
        return self._passes * max(each.mean * (1 + each.deviation) for each in self._corrections.values())

    @property
    def mean(self) -> float:
        """Steps take this many times their price on average."""
        return max(correction.mean for correction in self._corrections.values())

    def planned(self, plan: StepPlan, now: float, *, closely: bool) -> None:
        """Note a plan, which is in flight from now on. If it is watched `closely`, this policy has predicted it."""
        self._in_flight.append((plan, now, closely))

    def ended(self, plan: StepPlan, result: StepResult, now: float) -> None:
        """Note the result of the oldest plan in flight, and learn from it if it was watched."""
        _, planned, closely = self._in_flight.popleft()
        before, self._result_at = self._result_at, now
        streaming, self._streaming = self._streaming, closely
        if plan.step % WATCHED and not closely:
            return
        spans = spans_of(plan)
        if closely and streaming and any(stop - start == 1 for start, stop in spans):
            predicted = self.factor * plan.forecast.predicted / self.mean
            self._lateness.add(now - max(before, planned - PAUSE) - predicted)
        seconds = self._predictor.segments(spans) if spans else 0.0
        if seconds and result.seconds:
            prompts = plan.num_tokens > len(spans)
            self._corrections[prompts].update(result.seconds / seconds)

    def free_at(self, now: float, apart: float) -> float:
        """When the steps in flight end at the latest, with `apart` seconds of other work in them."""
        if not self._in_flight:
            return now
        at = self._result_at
        for plan, planned, closely in self._in_flight:
            price = plan.forecast.predicted / self.mean if closely else self._predictor.segments(spans_of(plan))
            at = max(at, planned) + self._step_factor * price
        return max(now, at + apart)


def spans_of(plan: StepPlan) -> list[tuple[int, int]]:
    """The positions [start, stop) of each segment of a plan."""
    columns = plan.columns
    return list(zip(columns.column("start"), columns.column("stop"), strict=True))


class ContractPolicy(PolicyExtension):
    """Plans as another policy while no contract is open. Otherwise plans what the forecasts count on.

    1. Rows and blocks of accepted sequences: sequences without a contract are preempted for them.
    2. A token of each accepted sequence that decodes.
    3. The prompts of accepted sequences, by their due times, as far as the bound allows.
    4. Only if none is left of these: tokens and prompts of all others, within the bound, and no longer than the first
       tokens of this step may take.

    So an accepted sequence waits for nothing but the accepted ones that its forecast knows.
    """

    def __init__(
        self, inner: Policy, promises: Promises, admission: ContractAdmission, prices: Prices, progress: Progress
    ) -> None:
        """`inner` plans steps without contracts."""
        super().__init__(inner)
        self._promises, self._admission = promises, admission
        self._prices, self._progress = prices, progress

    def step_bound(self, step: StepBuilder) -> float:
        return min(self.inner.step_bound(step), self._promises.bound)

    def plan(self, step: StepBuilder) -> None:
        if not len(self._promises):
            self.inner.plan(step)
            return
        start, factor = self._progress.free_at(step.now, step.seconds_apart), self._progress.factor
        self._loosen(step, start, factor)
        limit = self._promises.bound / factor
        waiting = [entry for entry in step.waiting if has_contract(entry)]
        self._make_room(step, len(waiting))
        room = self._decode(step)
        self._start(step, waiting)
        if self._prefill(step, room, limit) and has_others(step):
            slack = self._admission.slack(step.sampling, room.seconds, start=start, factor=factor)
            self._add_others(step, room, min(limit, slack))
        step.pace = None
        step.budget = 0
        step.predicted = room.seconds * self._progress.mean

    def spare(self, running: Iterable[Entry]) -> float:
        """See `Policy.spare`. 0 with an open contract: forecasts count on steps that follow each other at once."""
        return 0.0 if len(self._promises) else super().spare(running)

    def note_waits(self, count: int, late: int) -> None:
        if not len(self._promises):  # otherwise steps follow the contracts and not the target
            super().note_waits(count, late)

    def _loosen(self, step: StepBuilder, start: float, factor: float) -> None:
        """Raise the bound if the contract that asked for it has ended, and the others are kept without it."""
        promises = self._promises
        if promises.is_loose:
            bound = self._admission.find_bound(self._admission.queue(step.pool, start), start=start, factor=factor)
            promises.loosen(bound)

    def _start(self, step: StepBuilder, waiting: Iterable[Entry]) -> None:
        """Start accepted sequences that wait. They join after the decodes, which wait for no copies from the host."""
        step.pace = compute_nothing
        for entry in waiting:
            step.budget = self._prices.ceiling
            step.admit(lambda first, entry=entry: first is entry)  # type: ignore[misc]

    def _make_room(self, step: StepBuilder, rows: int) -> None:
        """Preempt sequences without a contract until the accepted ones have these rows, and all their blocks."""
        pool, running = step.pool, step.running
        if not rows and (not len(running) or has_contract(running.last())):
            return
        short = self._promises.outstanding(pool) + (step.headroom if rows else 0)
        for entry in tuple(reversed(running)):
            if has_contract(entry) or (step.free_rows >= rows and pool.available >= short):
                return
            if entry.next_step <= step.number:
                step.preempt(entry)

    def _decode(self, step: StepBuilder) -> Room:
        """Plan a token of each accepted sequence. Returns the room of the step."""
        ready = [entry for entry in step.running if has_contract(entry) and is_ready(entry, step)]
        step.budget = len(ready)
        step.decode()
        # Each may need a block soon. If there are too few, this asks for copies of idle state to the host.
        step.pool.admits(Found(), len(ready) * step.pool.block_size, 0)
        return Room(self._prices, step.num_tokens, self._prices.decodes(planned_contexts(step.sampling)))

    def _prefill(self, step: StepBuilder, room: Room, limit: float) -> bool:
        """Plan prompts of accepted sequences within `limit` seconds. Returns whether none of them lacks anything."""
        step.pace = lambda start, stop: room.take(start, stop, limit)
        for entry in tuple(step.running):
            if not has_contract(entry):
                break
            if not entry.decoding:
                step.budget = self._prices.ceiling - step.num_tokens
                step.compute(entry)
                if not entry.decoding:
                    return False
        return not any(has_contract(entry) for entry in step.waiting)

    def _add_others(self, step: StepBuilder, room: Room, limit: float) -> None:
        """Fill the step up to `limit` seconds with sequences without a contract, in their order."""
        ceiling = self._prices.ceiling
        step.budget = self._most_decodes(step, room, limit)
        before = len(step.sampling)
        if step.budget:
            step.decode()
        room.decode(len(step.sampling) - before, self._prices.decodes(planned_contexts(step.sampling[before:])))
        step.pace = lambda start, stop: room.take(start, stop, limit)
        step.budget = ceiling - step.num_tokens
        step.displace()
        step.prefill()
        step.budget = min(step.budget, ceiling - step.num_tokens)
        step.admit(lambda entry: blocks_of(entry, step) <= self._spare(step))

    def _spare(self, step: StepBuilder) -> int:
        """Number of blocks that no accepted sequence will need."""
        return step.pool.available - self._promises.outstanding(step.pool) - step.headroom

    def _most_decodes(self, step: StepBuilder, room: Room, limit: float) -> int:
        """Number of decodes of other sequences that the step has time for."""
        contexts = [
            entry.cache.planned + 1 for entry in step.running if not has_contract(entry) and is_ready(entry, step)
        ]
        low, high = 0, min(len(contexts), self._prices.ceiling - step.num_tokens)
        while low < high:
            middle = (low + high + 1) // 2
            if room.with_decodes(middle, self._prices.decodes(contexts[:middle])) <= limit:
                low = middle
            else:
                high = middle - 1
        return low


def has_others(step: StepBuilder) -> bool:
    """Whether a step could hold sequences without a contract. They come after all others in their queues."""
    running = len(step.running) and not has_contract(step.running.last())
    return running or any(not has_contract(entry) for entry in step.waiting)


def compute_nothing(start: int, stop: int) -> int:
    """The pace of a step that starts sequences, and computes none of them yet."""
    return 0


def is_ready(entry: Entry, step: StepBuilder) -> bool:
    """Whether a running sequence can be decoded in this step."""
    return entry.decoding and entry.next_step <= step.number


def planned_contexts(entries: Iterable[Entry]) -> list[int]:
    """The contexts of sequences that a step decodes."""
    return [entry.cache.planned for entry in entries]


def blocks_of(entry: Entry, step: StepBuilder) -> int:
    """Number of blocks that a waiting sequence would take."""
    return step.pool.needed(entry.cache.match(entry.sequence.tokens), entry.sequence.length)
