"""Planning: the values over which the planner's sides of parts are made."""

from __future__ import annotations

from dataclasses import dataclass

from holdfast.core.config import CoreConfig
from holdfast.core.cost import CostModel
from holdfast.lm.scheduler.builder import Policy
from holdfast.lm.scheduler.kind import MemoryKind
from holdfast.lm.types import EngineShape


@dataclass(frozen=True, slots=True, kw_only=True)
class Planning:
    """An engine of a configuration and a shape, real or simulated, whose scheduler is about to be made."""

    config: CoreConfig
    shape: EngineShape
    cost: CostModel | None
    """The device's cost model; None if nothing of the engine needs it."""
    policy: Policy
    """The policy of requests alone, before any part extends it."""
    kind: MemoryKind
    """The memory that the scheduler will plan over, empty."""
    stages: int = 1
    """Number of pipeline stages."""
    in_flight: int = 2
    """Number of steps that are planned before the first of them has ended."""
    now: float = 0.0
    """Time at which the contents of the disk tier were listed (`EngineShape.lower`)."""

    @property
    def priced(self) -> CostModel:
        """The cost model. Raises ValueError if there is none."""
        if self.cost is None:
            raise ValueError("there is no cost model of the device, and a part needs one")
        return self.cost

    @property
    def on_rows(self) -> bool:
        """Whether plans are of padded rows."""
        return self.shape.rows is not None
