"""From a StepPlan to the seconds that it would take: the cost model applied to a plan's segments, stage by stage."""

from __future__ import annotations

from holdfast.core.cost import CostModel, Predictor, Reserve
from holdfast.lab.simulator.deployment import Pipeline
from holdfast.lm.types import StepPlan


class Latency:
    """Step times of one device, or of each stage of a pipeline; and the time of copies between the tiers."""

    def __init__(
        self, cost: CostModel, pipeline: Pipeline | None = None, copy_seconds: float = 0.0, block_bytes: int = 0
    ) -> None:
        """`copy_seconds` is the time that the copy of one block of `block_bytes` takes, either way."""
        self.copy_seconds = copy_seconds
        self.block_bytes = block_bytes
        self._pipeline = pipeline
        self._stages = [Predictor(stage) for stage in (pipeline.stages if pipeline else (cost,))]

    @property
    def num_stages(self) -> int:
        """Stages that a step passes."""
        return len(self._stages)

    def reserves(self) -> list[Reserve]:
        """What each stage has in hand at first."""
        return [Reserve(stage.cost.burst) for stage in self._stages]

    def stages(self, plan: StepPlan) -> list[float]:
        """Time that each stage spends on the step in the long run."""
        columns = plan.columns
        spans = list(zip(columns.column("start"), columns.column("stop"), strict=True))
        return [stage.segments(spans) for stage in self._stages]

    def hop(self, plan: StepPlan) -> float:
        """Time from one stage to the next."""
        return self._pipeline.hop(plan.num_tokens) if self._pipeline else 0.0
