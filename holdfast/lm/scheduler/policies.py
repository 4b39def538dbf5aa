"""Stall-free policies: a fixed token budget, one computed once from a latency target, or one computed each step."""

from __future__ import annotations

from collections.abc import Iterable
from copy import copy
from dataclasses import replace
from math import inf
from typing import NamedTuple

from holdfast.core.cost import CostModel, PaddedCost
from holdfast.core.types import BATCH_CLASS
from holdfast.lm.scheduler.builder import Policy, StepBuilder
from holdfast.lm.scheduler.correction import Correction
from holdfast.lm.scheduler.entries import Entry
from holdfast.lm.scheduler.stream_limit import StreamLimit
from holdfast.lm.types import StepPlan, StepResult

REFERENCE_DECODES, REFERENCE_CONTEXT = 32, 4096
"""The decode batch that Sarathi-Serve, Table 3, defines its latency targets by."""
REPORT_GAIN = 1 / 64
"""Weight of one step in the running means that turn reports about tokens into steps."""
REPORTED_SECONDS = 2.0
"""Seconds after a report for which steps are not judged by their results: clients say more, and say it once."""
FIRST_WAY = 0.04
"""Margin assumed for the way to clients when the first of them reports, in times of the mean step. It is given up again
more slowly than it would be learned: a late token breaks the promise, and a short step costs little."""
ROUNDING = 1e-6
"""Relative error of times that makes no step late."""


class FixedBudget(Policy):
    """A policy whose steps all have the same token budget. A configuration can name any such class."""

    chunks = False
    """Whether it cuts prompts into chunks, so that no step needs more than the token budget."""
    unbounded = False
    """Whether it puts any number of whole prompts into a step."""

    def __init__(self, token_budget: int) -> None:
        """A policy that computes prompts whole needs a budget for the longest prompt and all decodes."""
        self.token_budget = checked("token_budget", token_budget)

    @classmethod
    def sized(cls, token_budget: int, capacity: int) -> FixedBudget:
        """The policy for steps of `token_budget`, or of up to `capacity` tokens where it computes prompts whole."""
        return cls(token_budget if cls.chunks else capacity)


class StallFree(FixedBudget):
    """Sarathi-Serve, Algorithm 3: no decode ever waits for a prefill.

    Running decodes come first, then started prefills, then new requests, up to the budget.
    """

    chunks = True

    def plan(self, step: StepBuilder) -> None:
        step.budget = self.token_budget
        step.displace()
        step.decode()
        step.prefill()
        step.admit()


def reference_step(max_sequences: int, max_model_len: int, cache_positions: int | None = None) -> tuple[int, int]:
    """Number and context of the decodes of a full step: 32 at 4,096 tokens, as in Sarathi-Serve, Table 3.

    They are fewer or shorter if the engine's limits are lower: its number of sequences, its longest sequence, and the
    positions of its cache (None: it is no paged cache).
    """
    decodes = min(REFERENCE_DECODES, max_sequences)
    held = REFERENCE_CONTEXT if cache_positions is None else cache_positions // decodes
    return decodes, max(1, min(REFERENCE_CONTEXT, max_model_len, held))


def compute_token_budget(
    cost: CostModel,
    target: float,
    *,
    tile: int,
    ceiling: int,
    max_sequences: int,
    max_model_len: int,
    cache_positions: int | None = None,
) -> int:
    """The token budget of Sarathi-Serve, Algorithm 3, line 2: computed once from a cost profile.

    The largest multiple of `tile`, at most `ceiling`, for which a full step is predicted to end within `target`
    seconds; at least one tile. The step holds the decodes of a `reference_step`, and one prefill chunk that ends at
    their context.
    """
    decodes, context = reference_step(max_sequences, max_model_len, cache_positions)

    def seconds(tokens: int) -> float:
        chunk = tokens - decodes
        return cost.step([(1, context)] * decodes + ([(chunk, max(chunk, context))] if chunk > 0 else []))

    sizes = range(tile, ceiling + 1, tile)
    return max((size for size in sizes if seconds(size) <= target), default=min(tile, ceiling))


class Predicted(NamedTuple):
    """A step in flight with prefill work."""

    seconds: float
    """Seconds that the cost model predicts, before any correction."""
    planned_at: float
    copies: bool
    """Whether it begins copies from the host."""
    cut: bool
    """Whether the target cut it, and no other work was to follow it."""


NO_PROMPT = Predicted(0.0, 0.0, copies=False, cut=False)
"""A step without prefill work, of which nothing is noted."""


class LatencyTarget(Policy):
    """Sarathi-Serve, Algorithm 3, with a budget in seconds, computed for each step.

    Running decodes come first: all streams, and as many batch requests as still meet the target. Then comes as much
    prefill work as the cost model predicts to end within `target`, given the contexts of these decodes and the place of
    each chunk in its prompt. A step cut by this bound is a multiple of the tile size (Sarathi-Serve §4.3). A step may
    always fill the tile it has begun, so prefills go on however tight the target is. While no request streams, a step
    delays nobody and is bounded by the ceiling alone.

    A request waits while the streams would be late with it, now or when their contexts have grown (`StreamLimit`).

    The prediction is corrected by the measured times of steps with prefill work, so that nearly all steps meet the
    target and not just the average one (`Correction`). Steps that copy blocks from the host take longer, and have a
    correction of their own. The margin follows the share of late steps among those that the target cut. Clients report
    how many tokens came late (`note_waits`). Where none does, a step is late by the time between two results.

    `whole`: the model cannot compute prompts in chunks. Then the target bounds how many prompts follow the first one in
    a step.
    """

    def __init__(
        self, cost: CostModel, target: float, *, tile: int, ceiling: int, whole: bool = False, stages: int = 1
    ) -> None:
        """`target` in seconds; `ceiling` is the most tokens of a step, `tile` the tile size of its matrix products.

        In a pipeline of several `stages`, a step has its share of the decodes.
        """
        if not target > 0:
            raise ValueError(f"target is {target} s; it must be above 0")
        if not 1 <= tile <= ceiling:
            raise ValueError(f"tile is {tile}; it must lie between 1 and the ceiling of {ceiling} tokens")
        self.target = target
        self.tile = tile
        self.ceiling = ceiling
        self.whole = whole
        self.correction = Correction(cost.deviation)
        """Correction of steps that begin no copies from the host."""
        self._copying: tuple[Correction, ...] = ()
        """Correction of steps that begin copies from the host; empty before any was measured."""
        self._cost, self._predictor = cost, cost.predictor()
        self._apart = isinstance(cost, PaddedCost)
        """Whether each chunk is a forward of its own, so that it fills tiles alone."""
        self.streams = StreamLimit(self._predictor, tile=tile, stages=stages, padded=self._apart)
        self._decodes = 0
        """Decodes of the step under construction."""
        self._attention = 0.0
        """Predicted seconds of attention in the step under construction."""
        self._bound = inf
        """Most seconds that a stream may wait for this step."""
        self._cut = False
        """Whether the target has left out a part of a prompt from the step under construction."""
        self._predicted: dict[int, Predicted] = {}
        """Each step in flight with prefill work, by number."""
        self._alone = stages == 1
        """Whether one step follows the other, so that the time between two results is that of a step."""
        self._measured: tuple[Predicted, float] | None = None
        """The step whose result came last, and its measured seconds.

        None if it had no prefill work, or if parts had work after it or after the step before.
        """
        self._seconds_apart = 0.0
        """Seconds that the device spent on work of parts after the step whose result came last."""
        self._results_at = 0.0
        """When the results came that the last plan knew."""
        self._streams_per_step = 1.0
        """Running mean of the number of streams in a step."""
        self._cut_share = 0.0
        """Running share of the steps with streams that the target cut."""
        self._reports: list[tuple[int, int]] = []
        """Reports of clients since the last plan: numbers of times between tokens, and of late ones."""
        self._reported_at = -inf
        """Time of the last plan that knew a new report."""

    def plan(self, step: StepBuilder) -> None:
        self._note_host(step.results_at)
        self._read_reports(step.now)
        step.budget = self.ceiling
        step.displace()
        step.budget = self._most_decodes(step)
        step.decode()
        step.budget = self.ceiling - step.num_tokens
        decodes = self._decodes = step.num_tokens
        streams = self._count_streams(step)
        # A stream that sits this step out, for lack of a block or of its last token, waits for it as well.
        self._bound = self.target - step.reserved if any(entry.decoding for entry in step.running) else inf
        step.budget = self.prefill_budget(step)
        self._attention = self._predictor.decodes([entry.cache.planned for entry in step.sampling])
        self._cut = False
        step.pace = lambda start, stop: self._take(step, start, stop)
        step.prefill()
        self.streams.begin()
        step.admit(lambda entry: self._may_start(step, entry))
        seconds = self._predictor.mixed(decodes, step.num_tokens - decodes) + self._attention
        correction = self._correction_of(step)
        # A step that exceeds the target by its decodes, or by the one tile that it may always fill, says nothing.
        cut = self._cut and self.wait(seconds * correction.factor) <= self._bound
        self.planned(step, seconds)
        step.predicted = seconds * correction.mean if step.num_tokens else 0.0
        if streams:
            self._streams_per_step += REPORT_GAIN * (streams - self._streams_per_step)
            self._cut_share += REPORT_GAIN * ((cut and not step.reserved) - self._cut_share)
        if step.num_tokens > decodes:
            self._predicted[step.number] = Predicted(seconds, step.now, step.swaps_in, cut and not step.reserved)

    def prefill_budget(self, step: StepBuilder) -> int:
        """Most tokens to add to a step that holds its decodes."""
        return step.budget

    def wait(self, seconds: float) -> float:
        """How long a stream waits for its token if the step under construction takes `seconds`."""
        return seconds

    def planned(self, step: StepBuilder, seconds: float) -> None:
        """Take note of a finished step, predicted to take `seconds`."""

    def observe(self, plan: StepPlan, result: StepResult) -> None:
        """Correct the prediction by the measured time of a step."""
        step = self._predicted.pop(plan.step, NO_PROMPT)
        others, self._seconds_apart = self._seconds_apart, result.seconds_apart
        self._measured = None
        if step.seconds:
            if step.copies and not self._copying:
                self._copying = (copy(self.correction),)
            self._correction(copies=step.copies).update(result.seconds / step.seconds)
            if not (others or self._seconds_apart):
                self._measured = step, result.seconds

    def spare(self, running: Iterable[Entry]) -> float:
        """See `Policy.spare`. Lines of batches are left out, because they can sit out a step."""
        streams = [entry for entry in running if entry.decoding and entry.sequence.request.priority < BATCH_CLASS]
        if not streams:
            return inf
        seconds = self._predictor.decodes([entry.cache.planned + 1 for entry in streams])
        seconds += self._predictor.mixed(len(streams), 0)
        return self.target - self.wait(seconds * self.correction.factor)

    def note_waits(self, count: int, late: int) -> None:
        """Learn that clients had `late` of `count` times between two tokens above the target, with the way to them."""
        self._reports.append((count, late))

    def _note_host(self, results_at: float) -> None:
        """Learn how evenly results come, from the time of the latest, and whether the latest was late.

        Only a step that was planned before the results of the one before it came has followed it at once.
        """
        before, self._results_at = self._results_at, results_at
        if self._measured is None or not self._alone:
            return
        (step, seconds), self._measured = self._measured, None
        correction, wait = self._correction(copies=step.copies), seconds
        if step.planned_at <= before < results_at and seconds > 0:
            wait = results_at - before
            correction.update_host(wait / seconds)
        if step.cut and step.planned_at >= self._reported_at + REPORTED_SECONDS:
            correction.note_late(wait > self.target * (1 + ROUNDING))

    def _read_reports(self, now: float) -> None:
        """Learn from the reports of clients. They count tokens, and the margin counts steps.

        Reports count as much as the target cut steps lately: other steps have other reasons to be late.
        """
        if not self._reports:
            return
        count, late = (sum(numbers) for numbers in zip(*self._reports, strict=True))
        self._reports.clear()
        first, self._reported_at = self._reported_at == -inf, now
        share = self._cut_share / max(1.0, self._streams_per_step)
        for correction in (self.correction, *self._copying):
            if first:
                correction.widen(FIRST_WAY)
            correction.note_late(share * late, share * count)

    def _correction(self, *, copies: bool) -> Correction:
        """The correction of steps that begin copies from the host, or of the others."""
        return self._copying[0] if copies and self._copying else self.correction

    def _correction_of(self, step: StepBuilder) -> Correction:
        """The correction of the step under construction as it is now."""
        return self._correction(copies=step.swaps_in)

    def ended(self, entry: Entry) -> None:
        """Learn how long answers are."""
        self.streams.ended(entry)

    @property
    def corrected(self) -> CostModel:
        """The cost model as measured steps correct it, with the deviation that is left."""
        mean, deviation = self.correction.mean, self.correction.deviation
        return replace(self._cost.slower(mean, mean), deviation=deviation)

    def _count_streams(self, step: StepBuilder) -> int:
        """Number of streams that the step gives a token."""
        running = step.running
        if len(running) and running.last().sequence.request.priority < BATCH_CLASS:
            return len(step.sampling)
        return sum(entry.sequence.request.priority < BATCH_CLASS for entry in step.sampling)

    def _most_decodes(self, step: StepBuilder) -> int:
        """Most decodes of a step: every stream, and with streams as many lines of batches as meet the target.

        While the prompt of a stream is computed, lines of batches leave it the room: none decodes, or one if no stream
        does. The lines that rank first go on. The others keep their state, and wait.
        """
        running = step.running
        if not len(running) or running.last().sequence.request.priority < BATCH_CLASS:
            return self.ceiling
        streams = [entry for entry in running if entry.sequence.request.priority < BATCH_CLASS]
        if not streams:
            return self.ceiling
        ready = [entry for entry in running if entry.decoding and entry.next_step <= step.number]
        contexts = [entry.cache.planned + 1 for entry in ready]
        low = max(1, sum(entry.sequence.request.priority < BATCH_CLASS for entry in ready))
        high = len(ready) if all(entry.decoding for entry in streams) else low
        while low < high:  # search for the most that fit; the streams always do
            middle = (low + high + 1) // 2
            seconds = self._predictor.mixed(middle, 0) + self._predictor.decodes(contexts[:middle])
            if self.wait(seconds * self.correction.factor) <= self.target - step.reserved:
                low = middle
            else:
                high = middle - 1
        return low

    def _may_start(self, step: StepBuilder, entry: Entry) -> bool:
        """Whether the step has room for the first tile of a waiting sequence, and all later steps for its decodes."""
        if step.num_tokens > self._decodes and not self._room(step, entry.sequence.length):
            self._cut = True
            return False
        bound, factor = self.target - step.reserved, self.correction.factor
        return self.streams.allows(entry, step, lambda seconds: self.wait(seconds * factor) <= bound)

    def _take(self, step: StepBuilder, start: int, stop: int) -> int:
        """How many tokens of [start, stop) still fit the step. Adds their attention to the step's.

        The first chunk of a step always gets some.
        """
        tokens, planned = stop - start, step.num_tokens
        if not self.whole and not self._fits(step, tokens, start, stop):
            self._cut = True
            tile, filled = self.tile, 0 if self._apart else planned
            low, high = filled // tile + (1 if planned == self._decodes else 0), (filled + tokens - 1) // tile
            while low < high:  # search for the most tiles that fit; `low` counts as fitting
                middle = (low + high + 1) // 2
                added = middle * tile - filled
                if self._fits(step, added, start, start + added):
                    low = middle
                else:
                    high = middle - 1
            tokens = min(tokens, max(0, low * tile - filled))
        if tokens:
            self._attention += self._predictor.chunk(start, start + tokens)
        return tokens

    def _room(self, step: StepBuilder, length: int) -> bool:
        """Whether the step has room for the first tile of a prompt of this length, or all of it."""
        tokens = length
        if not self.whole:
            tokens = min(tokens, self.tile - (0 if self._apart else step.num_tokens % self.tile))
        return self._fits(step, tokens, 0, tokens)

    def _fits(self, step: StepBuilder, more: int, start: int, stop: int) -> bool:
        """Whether the step with `more` tokens, the last chunk [start, stop), is predicted to meet the target."""
        predictor = self._predictor
        rest = predictor.mixed(self._decodes, step.num_tokens + more - self._decodes)
        seconds = rest + self._attention + predictor.chunk(start, stop)
        return self.wait(seconds * self._correction_of(step).factor) <= self._bound


def checked(name: str, tokens: int) -> int:
    """A number of tokens. Raises ValueError if it is below 1."""
    if tokens < 1:
        raise ValueError(f"{name} is {tokens}; it must be at least 1")
    return tokens


def whole_tiles(tokens: int, tile: int) -> int:
    """The token budget rounded down to a multiple of `tile` (Sarathi-Serve §4.3); one below a tile stays as given."""
    return tokens - tokens % tile if tokens > tile else tokens
