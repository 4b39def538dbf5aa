"""The values that penalties add to a plan."""

from __future__ import annotations

from dataclasses import dataclass

from holdfast.lm.types.plan import PartPlan
from holdfast.lm.types.sampling import History


@dataclass(frozen=True, slots=True)
class PenaltyPlan(PartPlan):
    """The tokens of sequences whose draws depend on them."""

    histories: tuple[History, ...] = ()
    """Histories of sampling segments.

    On paged rows only the first segment of a sequence in its row has one: the executor notes the tokens of later ones.
    """
