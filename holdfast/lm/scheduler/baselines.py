"""The policies of the literature that Holdfast is measured against, over the same queues, memory and kernels."""

from __future__ import annotations

from holdfast.lm.scheduler.builder import Policy, StepBuilder
from holdfast.lm.scheduler.entries import Entry


class RequestLevel(Policy):
    """FasterTransformer (Sarathi-Serve, Algorithm 1): a batch is formed, and decoded until its last request has ended.

    Each request reserves blocks for its longest length. A batch whose prompts exceed one step is prefilled in several.
    """

    def __init__(self, capacity: int) -> None:
        """`capacity` is the most tokens of a step; every prompt must fit."""
        self.capacity = checked("capacity", capacity)
        self._forming = True

    def plan(self, step: StepBuilder) -> None:
        step.budget = self.capacity
        if not step.running:
            self._forming = True
        if self._forming:
            step.admit(Reservation(step), whole=True)
            self._forming = step.num_tokens > 0
        if not self._forming:
            step.decode()


class Orca(Policy):
    """Orca: requests join and leave at every step, their prompts whole, with blocks reserved for the longest length."""

    def __init__(self, capacity: int) -> None:
        """`capacity` is the most tokens of a step; every prompt must fit beside the decodes."""
        self.capacity = checked("capacity", capacity)

    def plan(self, step: StepBuilder) -> None:
        step.budget = self.capacity
        step.decode()
        step.admit(Reservation(step), whole=True)


class PrefillFirst(Policy):
    """vLLM as the papers knew it (Sarathi-Serve, Algorithm 2): while a request can start, only prompts are computed."""

    def __init__(self, capacity: int) -> None:
        """`capacity` is the most tokens of a step; every prompt must fit."""
        self.capacity = checked("capacity", capacity)

    def plan(self, step: StepBuilder) -> None:
        step.budget = self.capacity
        step.displace()
        step.admit(whole=True)
        if not step.num_tokens:
            step.decode()


class HybridOnly(Policy):
    """The ablation of Sarathi-Serve, Table 4, without chunks: decodes, and whole prompts as memory allows."""

    def __init__(self, capacity: int) -> None:
        """`capacity` is the most tokens of a step; every prompt must fit beside the decodes."""
        self.capacity = checked("capacity", capacity)

    def plan(self, step: StepBuilder) -> None:
        step.budget = self.capacity
        step.displace()
        step.decode()
        step.admit(whole=True)


class Unified(Policy):
    """Pensieve §4.2: both kinds in one batch, first come, first served; a request joins whole while there is room.

    There is room as long as the step holds fewer tokens than a threshold; the prompt that crosses it is not cut.
    """

    def __init__(self, threshold: int, capacity: int) -> None:
        """`capacity` is the most tokens of a step; every prompt must fit beside the decodes."""
        self.threshold = checked("threshold", threshold)
        self.capacity = checked("capacity", capacity)

    def plan(self, step: StepBuilder) -> None:
        step.budget = self.capacity
        step.displace()
        step.decode()
        step.admit(lambda entry: step.num_tokens < self.threshold, whole=True)


class ChunkedOnly(Policy):
    """The ablation of Sarathi-Serve, Table 4, without hybrid batches: chunks and decodes take turns, a step each."""

    def __init__(self, token_budget: int) -> None:
        self.token_budget = checked("token_budget", token_budget)
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
    """Allows a request only if it and all that run could grow to their longest length: none will ever be preempted."""

    def __init__(self, step: StepBuilder) -> None:
        self._step = step
        self._spare: int | None = None

    def __call__(self, entry: Entry) -> bool:
        step = self._step
        if self._spare is None:  # counted only where somebody waits
            self._spare = step.num_blocks - sum(step.blocks_for(other.limit - 1) for other in step.running)
        self._spare -= step.blocks_for(entry.limit - 1)
        return self._spare >= 0


def checked(name: str, tokens: int) -> int:
    """A number of tokens. Raises ValueError for none."""
    if tokens < 1:
        raise ValueError(f"{name} is {tokens}; it must be at least 1")
    return tokens
