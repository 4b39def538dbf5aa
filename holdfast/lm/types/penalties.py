"""What penalties add to a plan."""

from __future__ import annotations

from dataclasses import dataclass

from holdfast.lm.types.plan import PartPlan
from holdfast.lm.types.sampling import History


@dataclass(frozen=True, slots=True)
class PenaltyPlan(PartPlan):
    """The tokens of sequences whose draws depend on them."""

    histories: tuple[History, ...] = ()
    """Of sampling segments. On paged rows only the first one of a sequence in its row has it: the executor notes the
    tokens of later ones."""
