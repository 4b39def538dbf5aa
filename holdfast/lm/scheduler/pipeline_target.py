"""The latency target in a pipeline: a stream waits for the steps ahead of its own as well as for its own."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import chain
from math import inf

from holdfast.core.cost import CostModel
from holdfast.lm.scheduler.builder import StepBuilder
from holdfast.lm.scheduler.entries import Entry
from holdfast.lm.scheduler.policies import LatencyTarget
from holdfast.lm.types import StepPlan, StepResult

EFFICIENT = 1.1
"""A step is large enough when its time per token is within 10% of the best."""
LEAST_ROW = 1e-9
"""Least seconds that the rows of a step add, so that rows count if nothing else differs."""


class PipelineLatencyTarget(LatencyTarget):
    """A latency target for a pipeline: it bounds a stream's whole wait, which spans several steps (`wait`).

    It predicts when each stage will have finished the steps in flight. Every step takes the same share of its time on a
    given stage (`CostModel.shares`), and each stage runs the steps in order.

    Steps of equal predicted time leave no stage idle (the thesis on BatchMaker and Pensieve, §4.1.1). Three rules make
    them equal. Each step takes decodes until it has its share of their predicted time. It takes its share of the prompt
    tokens that are still to be computed, but no less than is efficient. And the target reserves as much time for the
    next steps as for this one. Otherwise small steps of decodes alone would follow a large step.
    """

    def __init__(self, cost: CostModel, target: float, *, tile: int, ceiling: int, stages: int) -> None:
        """Arguments of `LatencyTarget`, and the number of `stages`; `cost` is that of a step through all of them."""
        super().__init__(cost, target, tile=tile, ceiling=ceiling, stages=stages)
        sizes = [*range(tile, ceiling, tile), ceiling]
        best = min(cost.linear(size) / size for size in sizes)
        self.efficient_tokens: int = next(size for size in sizes if cost.linear(size) / size <= EFFICIENT * best)
        """The smallest step whose time per token is within 10% of the best."""
        self._shares = cost.shares(stages)
        self._ends = [0.0] * stages
        """By stage, when it finishes all planned steps."""
        self._in_flight: dict[int, float] = {}
        """Predicted end of each step in flight, by number, the oldest first."""
        self._ended: float | None = None
        """Predicted end of the last step whose result was seen."""
        self._seen: list[int] = []
        """Numbers of the steps whose results were seen since the last plan."""
        self._given: dict[int, float] = {}
        """When each of the last steps gave its tokens, by number, the oldest first. As many as there are stages."""
        self._since = [0.0] * stages
        """When the streams of the step under construction, and those of each step after it, get their last tokens."""
        self._now = 0.0
        """Time of planning."""

    def plan(self, step: StepBuilder) -> None:
        # All predictions shift by the last one's error. Time that the host has spent since then is no part of it.
        late = 0.0 if self._ended is None else step.results_at - self._ended
        self._ends = [end + late if self._in_flight else step.now for end in self._ends]
        self._in_flight = {number: end + late for number, end in self._in_flight.items()}
        self._ended, self._now = None, step.now
        self._note_given(step.results_at)
        stages = len(self._shares)
        self._since = [self._last_tokens(step.number + later - stages) for later in range(stages)]
        self._weigh_decodes(step)
        super().plan(step)

    def spare(self, running: Iterable[Entry]) -> float:
        """See `Policy.spare`. With streams it is 0: all stages would have to be empty for the pause to begin."""
        return 0.0 if any(entry.decoding for entry in running) else inf

    def prefill_budget(self, step: StepBuilder) -> int:
        """A share of the prompt tokens still to be computed, or the efficient number if that is larger."""
        stages, lacking = len(self._shares), 0
        running = (entry.sequence.length - entry.cache.planned for entry in step.running if not entry.decoding)
        for tokens in chain(running, (entry.sequence.length for entry in step.waiting)):
            lacking += tokens
            if lacking >= stages * step.budget:
                return step.budget
        return min(step.budget, max(self.tile, self.efficient_tokens - step.num_tokens, -(-lacking // stages)))

    def wait(self, seconds: float) -> float:
        """The longest wait of any stream for its token if the next step, and each step after it, takes `seconds`.

        With n stages, a stream is in every n-th step. Streams in the next step have waited since the step n before it
        gave their tokens, and wait until the next step ends. Streams in a later step wait until that step ends. Each
        step leaves the last stage after the previous one by the time of the slowest stage. If later steps were given
        less time, long and short steps would alternate, and stages would stand idle.
        """
        end, apart = self._passage(seconds)[-1], max(self._shares) * seconds
        return max(end + apart * later - since for later, since in enumerate(self._since))

    def planned(self, step: StepBuilder, seconds: float) -> None:
        if step.num_tokens:
            self._ends = self._passage(seconds * self.correction.mean)
            self._in_flight[step.number] = self._ends[-1]

    def observe(self, plan: StepPlan, result: StepResult) -> None:
        if plan.step in self._in_flight:  # steps without segments were not added
            self._ended = self._in_flight.pop(plan.step)
            self._seen.append(plan.step)
        super().observe(plan, result)

    def _note_given(self, at: float) -> None:
        """Note when the steps whose results were just seen gave their tokens."""
        self._given |= dict.fromkeys(self._seen, at)
        self._seen.clear()
        for number in [*self._given][: -len(self._shares)]:
            del self._given[number]

    def _last_tokens(self, number: int) -> float:
        """When the streams of a step get its tokens. They have them since before now if the host was busy meanwhile."""
        if number in self._given:
            return self._given[number]
        return max(self._now, self._in_flight.get(number, self._now))

    def _weigh_decodes(self, step: StepBuilder) -> None:
        """Let decodes share the step's time: each counts for its row in the matrices and for its attention."""
        predictor, rows = self._predictor, -(-len(step.running) // len(self._shares))
        of_a_row = max(predictor.mixed(rows + 1, 0) - predictor.mixed(1, 0), LEAST_ROW) / max(1, rows)

        def weigh(entry: Entry) -> float:
            return of_a_row + predictor.decode(rows, entry.cache.planned + 1)

        step.weigh = weigh

    def _passage(self, seconds: float) -> list[float]:
        """When each stage would finish a step that is planned now. The first stage waits for the step's last tokens."""
        at, ends = max(self._now, self._since[0]), []
        for end, share in zip(self._ends, self._shares, strict=True):
            at = max(at, end) + share * seconds
            ends.append(at)
        return ends
