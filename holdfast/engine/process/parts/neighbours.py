"""Neighbours: a language model reports to applications of cells on its device when it has work, and when it is late."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import islice
from math import inf

from holdfast.core.device_turns import LATE_SECONDS
from holdfast.core.types import BATCH_CLASS
from holdfast.engine.ledger import NO_GPU, DeviceLedger, DeviceNews
from holdfast.engine.process.part_builder import PartBuilder, Served
from holdfast.lm.scheduler.scheduler import Scheduler
from holdfast.lm.types import StepPlan, StepResult
from holdfast.loop.contracts import Clock, Observer

LONGEST_STEP = 5.0
"""Seconds for which a step counts as running, if its end is never seen."""
BETWEEN_STEPS = 0.05
"""Seconds after a step in which the next one is expected."""


class LedgerWriter(Observer[StepPlan, StepResult]):
    """Writes the news of each step to the ledger."""

    def __init__(
        self, ledger: DeviceLedger, streams: Callable[[], bool], *, target: float, gpus: float, clock: Clock
    ) -> None:
        """`streams` says whether any stream runs. `target` is the most seconds between their tokens."""
        self._ledger, self._streams, self._target, self._gpus, self._clock = ledger, streams, target, gpus, clock
        self._late_until = 0.0
        self._in_flight = 0

    def planned(self, plan: StepPlan) -> None:
        self._in_flight += 1
        self._write(self._clock() + LONGEST_STEP)

    def ended(self, result: StepResult) -> None:
        self._in_flight -= 1
        now = self._clock()
        if result.seconds + result.seconds_apart > self._target and self._streams():
            self._late_until = now + LATE_SECONDS
        self._write(now + (LONGEST_STEP if self._in_flight else BETWEEN_STEPS))

    def _write(self, working_until: float) -> None:
        self._ledger.write(DeviceNews(working_until, self._late_until, self._gpus))

    def close(self) -> None:
        self._ledger.write(DeviceNews(0.0, 0.0, self._gpus))
        self._ledger.close()


class NeighbourBuilder(PartBuilder):
    """Builds the writer of the ledger, if the server has made one."""

    name = "neighbours"

    def observers(self, served: Served) -> Iterable[Observer[StepPlan, StepResult]]:
        config, order = self.site.config, self.site.order
        if order.ledger:
            target = config.tbt_seconds or inf
            gpus = NO_GPU if self.site.device.kind == "cpu" else config.layout.ranks
            yield LedgerWriter(
                DeviceLedger(order.ledger), lambda: has_streams(served.scheduler), target=target, gpus=gpus,
                clock=self.site.clock,
            )  # fmt: skip


def has_streams(scheduler: Scheduler) -> bool:
    """Whether a request of a stream's class runs."""
    first = islice(scheduler.queues.running, 1)
    return any(entry.sequence.request.priority < BATCH_CLASS for entry in first)
