"""Policies of padded rows: Baton's two. The policies of systems that it is compared with are in `lab`."""

from __future__ import annotations

from holdfast.lm.scheduler.admission import NO_LIMIT
from holdfast.lm.scheduler.builder import StepBuilder
from holdfast.lm.scheduler.policies import FixedBudget
from holdfast.lm.scheduler.row_builder import RowBuilder


class RowPolicy(FixedBudget):
    """A policy that knows rows and their forwards."""

    to_completion = False
    """Whether the rows of ended sequences stay in the batch until all its sequences have ended."""

    def plan(self, step: StepBuilder) -> None:
        """Plan a step. Raises TypeError for a builder of packed steps."""
        if not isinstance(step, RowBuilder):
            raise TypeError(f"{type(self).__name__} plans padded rows, and {type(step).__name__} has none")
        step.budget = self.token_budget
        self.plan_rows(step)

    def plan_rows(self, step: RowBuilder) -> None:
        """Plan a step of padded rows, whose budget is set."""
        raise NotImplementedError


class Shaping(RowPolicy):
    """Baton without separate prefill (§4.1): a whole prompt joins the running batch in one forward with its decodes.

    One prompt joins in each step, while a row is free. While nothing runs, as many join as rows and memory allow.
    """

    def plan_rows(self, step: RowBuilder) -> None:
        step.displace()
        step.shape(most=1 if step.running else NO_LIMIT)


class Embedding(RowPolicy):
    """Baton-PD (§4.2): prompts are prefilled apart, in groups of similar length, ahead of a free row.

    A prefilled sequence joins as soon as a row is free, and at once if its class is higher than that of a running
    request.
    """

    def plan_rows(self, step: RowBuilder) -> None:
        step.embed()
        step.decode()
        step.prefill_ahead()
