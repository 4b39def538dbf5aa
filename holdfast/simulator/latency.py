"""From a StepPlan to the seconds that it would take: the cost model applied to a plan's segments."""

from __future__ import annotations

from holdfast.core.cost import CostModel, Predictor
from holdfast.core.types import StepPlan


class Latency:
    """Step times of one device. A later tier or stage adds its part here."""

    def __init__(self, cost: CostModel) -> None:
        self._predictor = Predictor(cost)

    def seconds(self, plan: StepPlan) -> float:
        """Time that the device spends on the step."""
        _, _, starts, stops, _, _ = plan.columns.columns
        return self._predictor.segments(zip(starts, stops, strict=True))
