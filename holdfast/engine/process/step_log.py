"""StepLog: how many tokens each step had and how long it took, for another process to add up."""

from __future__ import annotations

from collections import deque

from holdfast.engine.messages import Steps
from holdfast.lm.types import StepPlan, StepResult


class StepLog:
    """An observer that notes each step that computes tokens. That takes a microsecond or two a step.

    It may begin while steps are in flight, which it leaves out.
    """

    def __init__(self) -> None:
        self._planned: deque[tuple[int, int]] = deque()
        """Numbers of the steps in flight, and of their tokens."""
        self._tokens: list[int] = []
        self._seconds: list[float] = []

    def __len__(self) -> int:
        return len(self._tokens)

    def planned(self, plan: StepPlan) -> None:
        self._planned.append((plan.step, plan.num_tokens))

    def ended(self, result: StepResult) -> None:
        if not self._planned or self._planned[0][0] != result.step:
            return
        _, tokens = self._planned.popleft()
        if tokens:
            self._tokens.append(tokens)
            self._seconds.append(result.seconds)

    def close(self) -> None:
        """Do nothing: the steps noted so far can still be taken."""

    def take(self) -> Steps:
        """The steps since the last call."""
        steps = Steps(self._tokens, self._seconds)
        self._tokens, self._seconds = [], []
        return steps
