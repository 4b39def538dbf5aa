"""Parts of an engine that have no messages of their own: drafts, traces, the pinning of the host tier, other ranks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from holdfast.core.cost import CostModel
from holdfast.engine import messages
from holdfast.engine.process.handler import Handler
from holdfast.engine.process.part_builder import PartBuilder, Served
from holdfast.engine.process.trace import Trace, about_engine
from holdfast.engine.ranks.ranks import AnyRanks
from holdfast.lm.choice import make_drafter
from holdfast.lm.config import EngineConfig
from holdfast.lm.types import EngineShape, HostTier, StepPlan, StepResult
from holdfast.loop.contracts import Observer


class DraftBuilder(PartBuilder):
    """Builds the drafter, which guesses tokens so that one step verifies several of them."""

    name = "drafts"

    def is_priced(self, shape: EngineShape) -> bool:
        return bool(self.planner(shape, ())["drafter"])

    def planner(self, shape: EngineShape, costs: Sequence[CostModel]) -> Mapping[str, Any]:
        return {"drafter": make_drafter(self.site.config, shape, self.site.device.kind)}


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


class HostTierBuilder(PartBuilder):
    """Makes the host tier usable bit by bit, during the first requests, where its memory has to be locked."""

    name = "host tier"

    def observers(self, served: Served) -> Iterable[Observer[StepPlan, StepResult]]:
        self._scheduler, self._tiers = served.scheduler, list[HostTier]()
        host = self.site.device.host
        if host is not None:
            host.begin()
            self._tiers.append(host)
        return ()

    def refresh(self) -> None:
        for host in self._tiers:
            if self._scheduler.pool.host is not None:
                self._scheduler.pool.host.resize(host.ready, host.blocks)


class RankHandler(Handler):
    """Ends serving when another rank has failed."""

    def __init__(self, ranks: AnyRanks) -> None:
        self._ranks = ranks

    def answers(self) -> Iterable[messages.FromEngine]:
        """Raises RankFailure."""
        self._ranks.check()
        return ()


class RankBuilder(PartBuilder):
    """Builds the handler that watches the processes of other ranks."""

    name = "ranks"

    @staticmethod
    def wanted(config: EngineConfig) -> bool:
        return config.layout.ranks > 1

    def handlers(self, served: Served) -> Iterable[Handler]:
        return (RankHandler(self.site.ranks),)
