"""StepLog: the tokens and the time of each step, and how busy each stage was, for another process to add up."""

from __future__ import annotations

from collections import deque
from itertools import zip_longest

from holdfast.engine.messages import Steps
from holdfast.lm.types import StepPlan, StepResult
from holdfast.loop.contracts import Clock


class StepLog:
    """An observer that notes each step that computes tokens. That takes a microsecond or two a step.

    It may begin while steps are in flight, which it leaves out.
    """

    def __init__(self, clock: Clock) -> None:
        """`clock` is the loop's."""
        self._clock = clock
        self._planned: deque[tuple[int, int]] = deque()
        """Numbers of the steps in flight, and of their tokens."""
        self._since = 0.0
        """Time from which the steps in flight are not counted in `_under_way` yet."""
        self._tokens: list[int] = []
        self._seconds: list[float] = []
        self._under_way = 0.0
        self._stages: list[float] = []

    def __len__(self) -> int:
        return len(self._tokens)

    def planned(self, plan: StepPlan) -> None:
        if not self._planned:
            self._since = self._clock()
        self._planned.append((plan.step, plan.num_tokens))

    def ended(self, result: StepResult) -> None:
        if not self._planned or self._planned[0][0] != result.step:
            return
        _, tokens = self._planned.popleft()
        if not self._planned:
            self._count()
        stages = result.stages or (result.seconds,)
        self._stages = [before + took for before, took in zip_longest(self._stages, stages, fillvalue=0.0)]
        if tokens:
            self._tokens.append(tokens)
            self._seconds.append(result.seconds)

    def close(self) -> None:
        """Do nothing: the steps noted so far can still be taken."""

    def take(self) -> Steps:
        """The steps since the last call."""
        if self._planned:
            self._count()
        steps = Steps(self._tokens, self._seconds, self._under_way, tuple(self._stages))
        self._under_way, self._stages = 0.0, []
        self._tokens, self._seconds = [], []
        return steps

    def _count(self) -> None:
        """Count the time since the last call, or since the first step in flight began."""
        now = self._clock()
        self._under_way += now - self._since
        self._since = now
