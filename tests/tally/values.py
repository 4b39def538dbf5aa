"""Values that the tally adds to plans and results."""

from __future__ import annotations

from dataclasses import dataclass

from holdfast.lm.types import PartPlan, PartResult


@dataclass(frozen=True, slots=True)
class TallyPlan(PartPlan):
    """The step is to be counted."""

    lengths: tuple[int, ...] = ()
    """Number of positions of each segment."""


@dataclass(frozen=True, slots=True)
class TallyResult(PartResult):
    """The count of one step."""

    positions: int = 0
