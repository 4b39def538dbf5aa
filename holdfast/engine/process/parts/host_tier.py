"""The host tier: made usable bit by bit, where its memory has to be locked."""

from __future__ import annotations

from collections.abc import Iterable

from holdfast.engine.process.part_builder import PartBuilder, Served
from holdfast.lm.types import HostTier, StepPlan, StepResult
from holdfast.loop.contracts import Observer


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
