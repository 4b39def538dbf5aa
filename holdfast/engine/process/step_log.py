"""StepLog: how many tokens each step had and how long it took, for another process to add up."""

from __future__ import annotations

from collections import deque

from holdfast.engine.messages import Steps
from holdfast.lm.types import LanguageExecutor, StepPlan, StepResult


class StepLog:
    """An executor that notes each step that computes tokens. That takes a microsecond or two a step."""

    def __init__(self, inner: LanguageExecutor) -> None:
        self.inner = inner
        self._planned: deque[int] = deque()
        self._tokens: list[int] = []
        self._seconds: list[float] = []

    def __len__(self) -> int:
        return len(self._tokens)

    def submit(self, plan: StepPlan) -> None:
        """Start the step."""
        self._planned.append(plan.num_tokens)
        self.inner.submit(plan)

    def collect(self) -> StepResult:
        """Wait for the oldest step in flight, and note it."""
        result = self.inner.collect()
        if tokens := self._planned.popleft():
            self._tokens.append(tokens)
            self._seconds.append(result.seconds)
        return result

    def close(self) -> None:
        """Release the device."""
        self.inner.close()

    def take(self) -> Steps:
        """The steps since the last call."""
        steps = Steps(self._tokens, self._seconds)
        self._tokens, self._seconds = [], []
        return steps
