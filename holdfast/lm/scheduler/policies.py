"""Policies: what runs next, with how many tokens."""

from __future__ import annotations

from holdfast.lm.scheduler.builder import Policy, StepBuilder


class StallFree(Policy):
    """Sarathi-Serve, Algorithm 3: no decode ever waits for a prefill.

    Running decodes first, then started prefills, then new requests, as far as a fixed budget of tokens goes.
    """

    def __init__(self, token_budget: int) -> None:
        if token_budget < 1:
            raise ValueError(f"token_budget is {token_budget}; it must be at least 1")
        self.token_budget = token_budget

    def plan(self, step: StepBuilder) -> None:
        step.budget = self.token_budget
        step.displace()
        step.decode()
        step.prefill()
        step.admit()
