"""The latency target in a simulated pipeline: a stream waits for other steps as well as for its own."""

from __future__ import annotations

from collections import deque

from holdfast.core.cost import CostModel
from holdfast.lm.scheduler.builder import StepBuilder
from holdfast.lm.scheduler.policies import LatencyTarget
from holdfast.lm.types import StepPlan, StepResult

EFFICIENT = 1.1
"""A step is large enough when its time per token is within 10% of the best."""


class PipelineLatencyTarget(LatencyTarget):
    """A latency target where steps pass the stages of a pipeline: it bounds a stream's whole wait (`wait`).

    It predicts when each stage will have finished the steps in flight. It assumes that a step takes the same time on
    every stage, and that each stage runs the steps in order.

    When over half the rows are busy, a step is capped where time per token stops improving. Larger steps would leave
    small ones behind them, of decodes alone, and stages would stand idle beside those; and requests then wait for rows,
    not for larger steps.
    """

    def __init__(self, cost: CostModel, target: float, *, tile: int, ceiling: int, stages: int) -> None:
        """As `LatencyTarget`, in a pipeline of `stages`; `cost` is that of a step through all of them."""
        super().__init__(cost, target, tile=tile, ceiling=ceiling)
        sizes = [*range(tile, ceiling, tile), ceiling]
        best = min(cost.linear(size) / size for size in sizes)
        self.efficient_tokens: int = next(size for size in sizes if cost.linear(size) / size <= EFFICIENT * best)
        """The smallest step whose time per token is within 10% of the best."""
        self._ends = [0.0] * stages
        """By stage, when it finishes all planned steps."""
        self._in_flight: deque[tuple[int, float]] = deque()
        """Number and predicted end of each step."""
        self._ended: float | None = None
        """Predicted end of the last step whose result was seen."""
        self._now = 0.0

    def plan(self, step: StepBuilder) -> None:
        late = 0.0 if self._ended is None else step.now - self._ended  # all predictions shift by the last one's error
        self._ends = [end + late if self._in_flight else step.now for end in self._ends]
        self._in_flight = deque((number, end + late) for number, end in self._in_flight)
        self._ended, self._now = None, step.now
        super().plan(step)

    def prefill_budget(self, step: StepBuilder) -> int:
        if not step.mostly_busy:
            return step.budget
        return min(step.budget, max(self.tile, self.efficient_tokens - step.num_tokens))

    def wait(self, seconds: float) -> float:
        """The longest wait of any stream for its token if the next step takes `seconds`, and so does the one after it.

        Streams in the next step wait from now until it ends, behind those in flight. Streams in the one after it wait
        from its planning, when the oldest step in flight ends, until the next step has left the first stage and their
        own step has run. If the later step were not given as much time, long and short steps would alternate, and
        stages would stand idle.
        """
        ends = self._passage(seconds)
        full = len(self._in_flight) + 1 >= len(ends)
        after = max(self._now, self._in_flight[0][1]) if full else self._now
        return max(ends[-1] - self._now, ends[0] + seconds - after)

    def planned(self, step: StepBuilder, seconds: float) -> float:
        """Returns the time from the step's start to its end, waits between stages included."""
        if not step.num_tokens:
            return seconds
        factor = self.correction.factor
        begins, self._ends = max(self._now, self._ends[0]), self._passage(seconds * factor)
        self._in_flight.append((step.number, self._ends[-1]))
        return (self._ends[-1] - begins) / factor

    def observe(self, plan: StepPlan, result: StepResult) -> None:
        if self._in_flight and self._in_flight[0][0] == plan.step:  # steps without segments were not added
            self._ended = self._in_flight.popleft()[1]
        super().observe(plan, result)

    def _passage(self, seconds: float) -> list[float]:
        """When each stage would finish a step that is planned now."""
        share, at, ends = seconds / len(self._ends), self._now, []
        for end in self._ends:
            at = max(at, end) + share
            ends.append(at)
        return ends
