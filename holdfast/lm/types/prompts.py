"""What log probabilities of prompts add to a plan and to a result."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from holdfast.core.types import TokenLogprobs
from holdfast.lm.types.plan import PartPlan
from holdfast.lm.types.result import PartResult


class Telling(NamedTuple):
    """Tell the log probabilities of prompt tokens that follow tokens of one segment."""

    segment: int
    """Its index in the plan."""
    first: int
    """The first of its tokens whose following token is told."""
    targets: tuple[int, ...]
    """The tokens that follow it and the tokens after it."""
    alternatives: int
    """How many of the most probable tokens are told beside each."""


@dataclass(frozen=True, slots=True)
class PromptPlan(PartPlan):
    """The log probabilities of prompt tokens that a plan reports."""

    tells: tuple[Telling, ...] = ()
    """Of paged rows, in the order of their segments."""


@dataclass(frozen=True, slots=True)
class PromptResult(PartResult):
    """The log probabilities of prompt tokens that a step gave."""

    logprobs: tuple[tuple[TokenLogprobs, ...], ...] = ()
    """For each of the plan's `tells`, the records of its targets."""
