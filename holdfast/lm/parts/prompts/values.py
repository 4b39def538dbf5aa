"""The values that log probabilities of prompts add to a plan and to a result."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from holdfast.core.types import TokenLogprobs
from holdfast.lm.types.plan import PartPlan
from holdfast.lm.types.result import PartResult


class PromptReport(NamedTuple):
    """Prompt tokens whose log probabilities a plan reports. They follow tokens of one segment."""

    segment: int
    """Index of the segment in the plan."""
    first: int
    """Index, in the segment, of the first token whose following token is reported."""
    targets: tuple[int, ...]
    """The reported tokens, one after the other."""
    alternatives: int
    """Number of most probable tokens that are reported with each."""
    named: tuple[tuple[int, ...], ...] = ()
    """Further tokens that are reported with each target, after the alternatives; empty if no target has any."""

    @property
    def most_named(self) -> int:
        """Largest number of further tokens of one target."""
        return max(map(len, self.named), default=0)


@dataclass(frozen=True, slots=True)
class PromptPlan(PartPlan):
    """The log probabilities of prompt tokens that a plan reports."""

    reports: tuple[PromptReport, ...] = ()
    """The reports of the plan, in the order of their segments."""


@dataclass(frozen=True, slots=True)
class PromptResult(PartResult):
    """The log probabilities of prompt tokens that a step gave."""

    logprobs: tuple[tuple[TokenLogprobs, ...], ...] = ()
    """For each of the plan's `reports`, the records of its targets."""
    ranks: tuple[tuple[int, ...], ...] = ()
    """For each of the plan's `reports`, the ranks of its targets: 1 for the most probable token of its place."""
