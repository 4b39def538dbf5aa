"""The default policy with a target: stall-free batching whose budget is computed for each step."""

from __future__ import annotations

from collections import deque
from math import inf

from holdfast.core.cost import CostModel, Predictor
from holdfast.lm.scheduler.builder import Policy, StepBuilder
from holdfast.lm.types import StepPlan, StepResult

MEAN_GAIN, DEVIATION_GAIN = 0.25, 0.1
"""How much one step counts in the mean and in the mean deviation of those before it."""
DEVIATIONS = 2.5
"""Mean deviations above the mean that nearly all steps stay below: two standard deviations, were they normal."""
UNSEEN = 0.02
"""The mean deviation, of the mean, that is supposed before any step was seen."""
LEAP = 0.1
"""What a step is off by counts no further, of the mean: a single outlier is no news of the steps to come.

Where steps are off by more anyway, what nearly all of them stay below is the bound: else it could never be learned.
"""
LEAST, MOST = 0.2, 20.0
"""Beyond, nothing counts, whatever is measured."""

NEARLY = 1.1
"""What a token may take at most in a step of `enough` tokens, of what it takes in the best one."""


class PacedStallFree(Policy):
    """Sarathi-Serve, Algorithm 3, with a budget in seconds instead of tokens.

    All running decodes come first. Then as much prefill work as the cost model predicts to end within `target`, given
    the contexts of these very decodes and the place of each chunk in its prompt. A step that this bound ends is a
    multiple of the tile size (Sarathi-Serve §4.3). However tight the target, prefills go on: a step may always fill
    the tile that it has begun. Where nobody streams yet, a step holds up nobody, and takes all that the
    ceiling allows.

    The prediction is corrected by what steps with prefill work were measured to take, so that it is nearly all steps
    that meet the target, not the average one (`Correction`).

    In a pipeline a stream waits for more than its own step, and the target bounds all of that wait (`StageTimes.wait`).
    Where few rows are left there, a step takes no more tokens than are `enough`: large steps would leave small ones
    behind them, of decodes alone, beside which stages stand empty, and requests wait for rows, not for larger steps.
    """

    def __init__(self, cost: CostModel, target: float, *, tile: int, ceiling: int) -> None:
        """`target` in seconds; `ceiling` is the most tokens of a step, `tile` what its matrices are cut into."""
        if not target > 0:
            raise ValueError(f"target is {target} s; it must be above 0")
        if not 1 <= tile <= ceiling:
            raise ValueError(f"tile is {tile}; it must lie between 1 and the ceiling of {ceiling} tokens")
        self.target = target
        self.tile = tile
        self.ceiling = ceiling
        self.correction = Correction()
        self.enough = self._enough(cost)
        """The tokens from which on larger steps would hardly be faster a token."""
        self._predictor = Predictor(cost)
        self._attention = 0.0
        """Predicted seconds of the attention of the step that is being planned."""
        self._bound = inf
        """Seconds that this step may take."""
        self._stages: StageTimes | None = None
        """Of a pipeline."""
        self._predicted: dict[int, float] = {}
        """By number, the predicted seconds of steps in flight with prefill work."""

    def plan(self, step: StepBuilder) -> None:
        step.budget = self.ceiling
        if step.micro_batches > 1:
            self._stages = self._stages or StageTimes(step.micro_batches)
            self._stages.look(step.now)
        step.displace()
        step.decode()
        decodes = step.num_tokens
        # Of all that have begun to stream, some may sit this step out, for a block or in a pipeline: they wait as well.
        self._bound = self.target if any(entry.decoding for entry in step.running) else inf
        if self._stages is not None and step.crowded:
            step.budget = max(self.tile, min(step.budget, self.enough - decodes))
        self._attention = self._predictor.decodes([entry.cache.planned for entry in step.sampling])
        step.pace = lambda start, stop: self._take(step.num_tokens, start, stop, first=step.num_tokens == decodes)
        step.prefill()
        step.admit(lambda entry: step.num_tokens == decodes or self._room(step.num_tokens, entry.sequence.length))
        seconds = self._predictor.linear(step.num_tokens) + self._attention
        if self._stages is not None and step.num_tokens:
            seconds = self._stages.add(step.number, seconds * self.correction.factor) / self.correction.factor
        if step.num_tokens > decodes:
            self._predicted[step.number] = seconds

    def observe(self, plan: StepPlan, result: StepResult) -> None:
        """Correct the prediction by what a step took."""
        if self._stages is not None:
            self._stages.ended(plan.step)
        predicted = self._predicted.pop(plan.step, None)
        if predicted:
            self.correction.see(result.seconds / predicted)

    def _enough(self, cost: CostModel) -> int:
        """The smallest step whose tokens take nearly as little time each as in the best one."""
        sizes: list[int] = [*range(self.tile, self.ceiling, self.tile), self.ceiling]
        least = min(cost.linear(size) / size for size in sizes)
        return next(size for size in sizes if cost.linear(size) / size <= NEARLY * least)

    def _take(self, planned: int, start: int, stop: int, *, first: bool) -> int:
        """How many tokens of [start, stop) still fit a step of `planned` tokens; counts their attention as taken.

        The first chunk of a step gets some in any case.
        """
        tokens = stop - start
        if not self._fits(planned + tokens, start, stop):
            tile = self.tile
            low, high = planned // tile + (1 if first else 0), (planned + tokens - 1) // tile
            while low < high:  # the most tiles that fit; `low` counts as fitting
                middle = (low + high + 1) // 2
                if self._fits(middle * tile, start, start + middle * tile - planned):
                    low = middle
                else:
                    high = middle - 1
            tokens = min(tokens, max(0, low * tile - planned))
        if tokens:
            self._attention += self._predictor.chunk(start, start + tokens)
        return tokens

    def _room(self, planned: int, length: int) -> bool:
        """Whether a step of `planned` tokens has room for the first tile of a prompt: it need not start otherwise."""
        total = min(planned + length, (planned // self.tile + 1) * self.tile)
        return self._fits(total, 0, total - planned)

    def _fits(self, total: int, start: int, stop: int) -> bool:
        """Whether a step of `total` tokens, [start, stop) the last of them, is predicted to meet the target."""
        predictor = self._predictor
        seconds = predictor.linear(total) + self._attention + predictor.chunk(start, stop)
        seconds *= self.correction.factor
        return (seconds if self._stages is None else self._stages.wait(seconds)) <= self._bound


class Correction:
    """Measured over predicted time of steps: what nearly all of them stay below.

    It is the mean of the latest steps and so many mean deviations more, as TCP reckons how long an answer may take
    (Jacobson, Congestion Avoidance and Control, 1988). Where steps take what is predicted, it comes to that and stays.
    """

    def __init__(self) -> None:
        self._mean, self._deviation = 1.0, UNSEEN

    @property
    def factor(self) -> float:
        """By this the prediction of a step is multiplied."""
        return self._mean * (1 + DEVIATIONS * self._deviation)

    def see(self, ratio: float) -> None:
        """A step took so many times what was predicted of it."""
        leap = max(LEAP, DEVIATIONS * self._deviation)
        off = min(max(min(max(ratio, LEAST), MOST) / self._mean - 1, -leap), leap)
        self._deviation += DEVIATION_GAIN * (abs(off) - self._deviation)
        self._mean *= 1 + MEAN_GAIN * off


class StageTimes:
    """A pipeline's stages, in predicted time: when each will have ended the steps in flight.

    Stages share a step out evenly, and each takes the steps in order.
    """

    def __init__(self, count: int) -> None:
        self._ends = [0.0] * count
        """By stage, when it has ended all that was planned."""
        self._in_flight: deque[tuple[int, float]] = deque()
        """Number and end of each step."""
        self._ended: float | None = None
        """When the step that was seen to end last was to end."""
        self._now = 0.0

    def look(self, now: float) -> None:
        """It is so late, and a step is about to be planned: what was predicted is late or early by what is seen."""
        late = 0.0 if self._ended is None else now - self._ended
        self._ends = [end + late if self._in_flight else now for end in self._ends]
        self._in_flight = deque((number, end + late) for number, end in self._in_flight)
        self._ended, self._now = None, now

    def wait(self, seconds: float) -> float:
        """The longest that a stream waits for its token if the next step takes so long, and one after it as well.

        The streams of this one wait from now on until it ends behind those in flight. Those of the one after it wait
        from its planning, when the oldest step in flight ends, for this one to leave the first stage, and for theirs:
        were it not left as much time, long and short steps would alternate, and stages stand empty.
        """
        ends = self._passage(seconds)
        full = len(self._in_flight) + 1 >= len(ends)
        after = max(self._now, self._in_flight[0][1]) if full else self._now
        return max(ends[-1] - self._now, ends[0] + seconds - after)

    def add(self, number: int, seconds: float) -> float:
        """Plan a step; the time from its begin to its end, waits between stages included."""
        begins, self._ends = max(self._now, self._ends[0]), self._passage(seconds)
        self._in_flight.append((number, self._ends[-1]))
        return self._ends[-1] - begins

    def ended(self, number: int) -> None:
        """The oldest step in flight has ended, if it is the one of this number: others had no segments."""
        if self._in_flight and self._in_flight[0][0] == number:
            self._ended = self._in_flight.popleft()[1]

    def _passage(self, seconds: float) -> list[float]:
        """When each stage would end a step that is planned now."""
        share, at, ends = seconds / len(self._ends), self._now, []
        for end in self._ends:
            at = max(at, end) + share
            ends.append(at)
        return ends
