"""Traces: each step is written to a file."""

from __future__ import annotations

from collections.abc import Iterable

from holdfast.engine.process.part_builder import PartBuilder, Served
from holdfast.engine.process.trace import Trace, about_engine
from holdfast.lm.config import EngineConfig
from holdfast.lm.types import StepPlan, StepResult
from holdfast.loop.contracts import Observer


class TraceBuilder(PartBuilder):
    """Builds the trace, which writes each step to a file."""

    name = "trace"

    @staticmethod
    def wanted(config: EngineConfig) -> bool:
        return bool(config.trace)

    def observers(self, served: Served) -> Iterable[Observer[StepPlan, StepResult]]:
        """Raises ValueError if the file cannot be written."""
        config, shape = self.site.config, served.shape
        yield Trace(
            str(config.trace),
            self.site.clock,
            suspends=shape.num_host_blocks > 0,
            planner=served.scheduler,
            about=about_engine(config, shape),
        )
