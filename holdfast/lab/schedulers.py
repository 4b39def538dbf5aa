"""Schedulers of other systems to measure against, over the same queues, memory and kernels. `lm.choice` names them."""

from __future__ import annotations

from holdfast.lm.scheduler.builder import StepBuilder
from holdfast.lm.scheduler.entries import Entry
from holdfast.lm.scheduler.policies import FixedBudget, checked


class RequestLevel(FixedBudget):
    """FasterTransformer (Sarathi-Serve, Algorithm 1): forms one batch, and decodes it until its last request has ended.

    A batch is formed when nothing runs, from as many waiting requests as rows and memory allow. Each request reserves
    blocks for its longest length. Prompts are prefilled in as many steps as they take, and later requests wait.
    """

    reserves = unbounded = True

    def plan(self, step: StepBuilder) -> None:
        step.budget = self.token_budget
        if not step.running:
            step.admit(Reservation(step), beyond_budget=True)
        step.prefill()
        if not step.num_tokens:
            step.decode()


class Orca(FixedBudget):
    """Orca: requests join and leave at every step.

    Prompts are whole, and blocks are reserved for the longest length.
    """

    reserves = unbounded = True

    def plan(self, step: StepBuilder) -> None:
        step.budget = self.token_budget
        step.decode()
        step.admit(Reservation(step), whole=True)


class PrefillFirst(FixedBudget):
    """vLLM in the papers (Sarathi-Serve, Algorithm 2): steps compute only whole prompts while one can start."""

    def plan(self, step: StepBuilder) -> None:
        step.budget = self.token_budget
        step.displace()
        step.admit(whole=True)
        if not step.num_tokens:
            step.decode()


class HybridOnly(FixedBudget):
    """Sarathi-Serve, Table 4, ablation without chunks: all decodes, and whole prompts as memory allows."""

    def plan(self, step: StepBuilder) -> None:
        step.budget = self.token_budget
        step.displace()
        step.decode()
        step.admit(whole=True)


class Unified(FixedBudget):
    """Pensieve §4.2: all decodes, and whole prompts in order while the step holds fewer tokens than a threshold.

    The prompt that crosses the threshold is not cut.
    """

    def __init__(self, threshold: int, token_budget: int) -> None:
        super().__init__(token_budget)
        self.threshold = checked("threshold", threshold)

    @classmethod
    def sized(cls, token_budget: int, capacity: int) -> Unified:
        """The policy that `FixedBudget.sized` makes, with the token budget as the threshold."""
        return cls(token_budget, capacity)

    def plan(self, step: StepBuilder) -> None:
        step.budget = self.token_budget
        step.displace()
        step.decode()
        step.admit(lambda entry: step.num_tokens < self.threshold, whole=True)


class ChunkedOnly(FixedBudget):
    """Sarathi-Serve, Table 4, ablation without hybrid batches: steps of chunks and steps of decodes take turns."""

    chunks = True

    def __init__(self, token_budget: int) -> None:
        super().__init__(token_budget)
        self._decodes_next = True

    def plan(self, step: StepBuilder) -> None:
        step.budget = self.token_budget
        for decodes in (self._decodes_next, not self._decodes_next):
            if decodes:
                step.decode()
            else:
                step.prefill()
                step.displace()
                step.admit()
            if step.num_tokens:
                self._decodes_next = not decodes
                return


class Reservation:
    """Allows a request only if it and all running ones can grow to their longest length, so none is ever preempted."""

    def __init__(self, step: StepBuilder) -> None:
        self._step = step
        self._count = -1
        self._blocks = self._longest = 0

    def __call__(self, entry: Entry) -> bool:
        pool = self._step.pool
        if self._count < 0:  # counted only when a request waits
            self._count = 0
            for other in self._step.running:
                self._add(other)
        self._add(entry)
        return pool.holds(self._count, self._blocks, self._longest)

    def _add(self, entry: Entry) -> None:
        positions = entry.limit - 1
        self._count += 1
        self._blocks += self._step.pool.blocks_for(positions)
        self._longest = max(self._longest, positions)
