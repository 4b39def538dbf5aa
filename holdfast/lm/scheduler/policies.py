"""Stall-free policies: a fixed token budget, one computed once from a latency target, or one computed each step."""

from __future__ import annotations

from dataclasses import replace
from math import inf

from holdfast.core.cost import CostModel, PaddedCost
from holdfast.core.types import BATCH_CLASS
from holdfast.lm.scheduler.builder import Policy, StepBuilder
from holdfast.lm.scheduler.correction import Correction
from holdfast.lm.scheduler.entries import Entry
from holdfast.lm.scheduler.stream_limit import StreamLimit
from holdfast.lm.types import StepPlan, StepResult

REFERENCE_DECODES, REFERENCE_CONTEXT = 32, 4096
"""The decode batch that Sarathi-Serve, Table 3, defines its latency targets by."""


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


class LatencyTarget(Policy):
    """Sarathi-Serve, Algorithm 3, with a budget in seconds, computed for each step.

    Running decodes come first: all streams, and as many batch requests as still meet the target. Then comes as much
    prefill work as the cost model predicts to end within `target`, given the contexts of these decodes and the place of
    each chunk in its prompt. A step cut by this bound is a multiple of the tile size (Sarathi-Serve §4.3). A step may
    always fill the tile it has begun, so prefills go on however tight the target is. While no request streams, a step
    delays nobody and is bounded by the ceiling alone.

    A request waits while the streams would be late with it, now or when their contexts have grown (`StreamLimit`).

    The prediction is corrected by the measured times of steps with prefill work, so that nearly all steps meet the
    target and not just the average one (`Correction`).

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
        self._predicted: dict[int, tuple[float, float]] = {}
        """Predicted seconds and time of planning of each step in flight with prefill work, by number."""
        self._alone = stages == 1
        """Whether one step follows the other, so that the time between two results is that of a step."""
        self._measured: tuple[float, float] | None = None
        """Time of planning and measured seconds of the step whose result came last.

        None if it had no prefill work, or if parts had work after it or after the step before.
        """
        self._seconds_apart = 0.0
        """Seconds that the device spent on work of parts after the step whose result came last."""
        self._results_at = 0.0
        """When the results came that the last plan knew."""

    def plan(self, step: StepBuilder) -> None:
        self._note_host(step.results_at)
        step.budget = self.ceiling
        step.displace()
        step.budget = self._most_decodes(step)
        step.decode()
        step.budget = self.ceiling - step.num_tokens
        decodes = self._decodes = step.num_tokens
        # A stream that sits this step out, for lack of a block or of its last token, waits for it as well.
        self._bound = self.target - step.reserved if any(entry.decoding for entry in step.running) else inf
        step.budget = self.prefill_budget(step)
        self._attention = self._predictor.decodes([entry.cache.planned for entry in step.sampling])
        step.pace = lambda start, stop: self._take(step.num_tokens, start, stop, first=step.num_tokens == decodes)
        step.prefill()
        self.streams.begin()
        step.admit(lambda entry: self._may_start(step, entry))
        seconds = self._predictor.mixed(decodes, step.num_tokens - decodes) + self._attention
        self.planned(step, seconds)
        step.predicted = seconds * self.correction.mean if step.num_tokens else 0.0
        if step.num_tokens > decodes:
            self._predicted[step.number] = seconds, step.now

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
        predicted, planned_at = self._predicted.pop(plan.step, (0.0, 0.0))
        others, self._seconds_apart = self._seconds_apart, result.seconds_apart
        self._measured = None
        if predicted:
            self.correction.update(result.seconds / predicted)
            if not (others or self._seconds_apart):
                self._measured = planned_at, result.seconds

    def _note_host(self, results_at: float) -> None:
        """Learn how evenly results come, from the time of the latest.

        Only a step that was planned before the results of the one before it came has followed it at once.
        """
        before, self._results_at = self._results_at, results_at
        if self._measured is not None and self._alone:
            planned_at, seconds = self._measured
            if planned_at <= before < results_at and seconds > 0:
                self.correction.update_host((results_at - before) / seconds)
            self._measured = None

    def ended(self, entry: Entry) -> None:
        """Learn how long answers are."""
        self.streams.ended(entry)

    @property
    def corrected(self) -> CostModel:
        """The cost model as measured steps correct it, with the deviation that is left."""
        mean, deviation = self.correction.mean, self.correction.deviation
        return replace(self._cost.slower(mean, mean), deviation=deviation)

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
        if step.num_tokens > self._decodes and not self._room(step.num_tokens, entry.sequence.length):
            return False
        bound, factor = self.target - step.reserved, self.correction.factor
        return self.streams.allows(entry, step, lambda seconds: self.wait(seconds * factor) <= bound)

    def _take(self, planned: int, start: int, stop: int, *, first: bool) -> int:
        """How many tokens of [start, stop) still fit a step of `planned` tokens. Adds their attention to the step's.

        The first chunk of a step always gets some.
        """
        tokens = stop - start
        if not self.whole and not self._fits(planned + tokens, start, stop):
            tile, filled = self.tile, 0 if self._apart else planned
            low, high = filled // tile + (1 if first else 0), (filled + tokens - 1) // tile
            while low < high:  # search for the most tiles that fit; `low` counts as fitting
                middle = (low + high + 1) // 2
                added = middle * tile - filled
                if self._fits(planned + added, start, start + added):
                    low = middle
                else:
                    high = middle - 1
            tokens = min(tokens, max(0, low * tile - filled))
        if tokens:
            self._attention += self._predictor.chunk(start, start + tokens)
        return tokens

    def _room(self, planned: int, length: int) -> bool:
        """Whether a step of `planned` tokens has room for the first tile of a prompt of this length, or all of it."""
        tokens = length
        if not self.whole:
            tokens = min(tokens, self.tile - (0 if self._apart else planned % self.tile))
        return self._fits(planned + tokens, 0, tokens)

    def _fits(self, total: int, start: int, stop: int) -> bool:
        """Whether a step of `total` tokens that ends with the chunk [start, stop) is predicted to meet the target."""
        predictor = self._predictor
        rest = predictor.mixed(self._decodes, total - self._decodes)
        seconds = rest + self._attention + predictor.chunk(start, stop)
        return self.wait(seconds * self.correction.factor) <= self._bound


def checked(name: str, tokens: int) -> int:
    """A number of tokens. Raises ValueError if it is below 1."""
    if tokens < 1:
        raise ValueError(f"{name} is {tokens}; it must be at least 1")
    return tokens


def whole_tiles(tokens: int, tile: int) -> int:
    """The token budget rounded down to a multiple of `tile` (Sarathi-Serve §4.3); one below a tile stays as given."""
    return tokens - tokens % tile if tokens > tile else tokens
