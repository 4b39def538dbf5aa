"""The default policy with a target: stall-free batching whose budget is computed for each step."""

from __future__ import annotations

from holdfast.core.cost import CostModel, Predictor
from holdfast.core.types import StepPlan, StepResult
from holdfast.scheduler.step import Policy, Step

QUANTILE = 0.95
"""The share of steps that the correction covers."""
RATE = 0.05
"""How far one step may move the correction."""
LEAST, MOST = 0.2, 20.0
"""Where the correction stays, whatever is measured."""


class PacedStallFree(Policy):
    """Sarathi-Serve, Algorithm 3, with a budget in seconds instead of tokens.

    All running decodes come first. Then as much prefill work as the cost model predicts to end within `target`, given
    the contexts of these very decodes and the place of each chunk in its prompt. A step that this bound ends is a
    multiple of the tile size (Sarathi-Serve §4.3). However tight the target, prefills go on: a step may always fill
    the tile that it has begun.

    The prediction is corrected by what steps with prefill work were measured to take. The correction follows the 0.95
    quantile of measured over predicted time (a step of the pinball loss's gradient for each), so that it is nearly all
    steps that meet the target, not the average one, and a single outlier moves it no more than any other step.
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
        self.correction = 1.0
        """Measured over predicted time."""
        self._predictor = Predictor(cost)
        self._attention = 0.0
        self._predicted: dict[int, float] = {}
        """By number, the predicted seconds of steps in flight with prefill work."""

    def fill(self, step: Step) -> None:
        step.budget = self.ceiling
        step.make_way()
        step.decode()
        decodes = step.num_tokens
        self._attention = self._predictor.decodes([entry.residency.planned for entry in step.sampling])
        step.pace = lambda start, stop: self._take(step.num_tokens, start, stop, first=step.num_tokens == decodes)
        step.prefill()
        step.admit(lambda entry: step.num_tokens == decodes or self._room(step.num_tokens, entry.sequence.length))
        if step.num_tokens > decodes:
            self._predicted[step.number] = self._predictor.linear(step.num_tokens) + self._attention

    def learn(self, plan: StepPlan, result: StepResult) -> None:
        """Correct the prediction by what a step took."""
        predicted = self._predicted.pop(plan.step, None)
        if predicted:
            over = result.seconds > predicted * self.correction
            factor = 1 + RATE * (QUANTILE if over else QUANTILE - 1)
            self.correction = min(max(self.correction * factor, LEAST), MOST)

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
        return seconds * self.correction <= self.target
