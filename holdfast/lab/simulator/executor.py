"""The simulated executor: takes plans as the real one does, and answers when a virtual clock says so."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import NamedTuple

from holdfast.lab.simulator.latency import Latency
from holdfast.lm.types import CopyTime, StepPlan, StepResult

TOKEN = 7
"""What every step samples: no model runs, and a sequence ends at its length."""


class Copying(NamedTuple):
    """The copies of one plan in one direction, until they end."""

    ends: float
    time: CopyTime


class VirtualClock:
    """Seconds that pass only when something lets them. A `core.protocols.Clock`."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now

    def advance_to(self, time: float) -> None:
        """Let time pass; it never goes back."""
        self.now = max(self.now, time)


class SimulatedExecutor:
    """`core.protocols.Executor` without a device: steps take the time that the cost model predicts, one after another.

    Heavy steps behind lighter ones take less, as far as the cost model's burst goes.

    `host_seconds` pass on the clock with each plan: planning and packing, which overlap the device as they do for real.
    A step that begins at a time takes `pace` of it times as long: a device that others use is not always as fast.

    A step passes the stages of a pipeline in order, and each stage takes the steps in order: it begins one when it has
    ended the one before, and the stage before it has sent its part. What a stage waits is a bubble.

    Copies take their time on a link of their own, as `execution.transfer` does them: blocks that come in follow the
    computation begun so far, and a step that awaits them reads them layer by layer, so that it ends no sooner than they
    do; blocks that go out wait for both. A result says which of either have landed.
    """

    def __init__(
        self,
        latency: Latency,
        clock: VirtualClock,
        host_seconds: float = 0.0,
        pace: Callable[[float], float] = lambda now: 1.0,
    ) -> None:
        self._latency = latency
        self._clock = clock
        self._host_seconds = host_seconds
        self._pace = pace
        self._free_at = [0.0] * latency.num_stages
        """By stage, when it has ended what it was given."""
        self._reserves = latency.reserves()
        self._in_flight: deque[tuple[StepPlan, float, float]] = deque()
        """Plans, the seconds that each takes, and when it ends."""
        self._in_free = self._out_free = 0.0
        """When each direction of the copy link is free."""
        self._leaving: deque[Copying] = deque()
        self._arriving: deque[Copying] = deque()
        """Copies under way, to the host and from it."""
        self._begun = -1
        self.busy = 0.0
        """Seconds that the device was not idle; of several stages, the mean."""
        self.copied_in = 0.0
        """Seconds that blocks took to come in."""

    def submit(self, plan: StepPlan) -> None:
        self._clock.now += self._host_seconds
        now, free_at, latency = self._clock.now, self._free_at, self._latency
        began = at = max(now, free_at[0])
        self._copy(plan, began)
        arrived = max((copy.ends for copy in self._arriving if copy.time.step <= plan.awaits), default=0.0)
        hop = latency.hop(plan)
        pace = self._pace(began)
        stages = [pace * seconds for seconds in latency.stages(plan)]
        for stage, reserve in enumerate(self._reserves):
            idle = max(0.0, at - free_at[stage])
            stages[stage] = reserve.step(plan.num_tokens, stages[stage], idle)
            at = max(free_at[stage] + idle + stages[stage], arrived)
            free_at[stage] = at
            at += hop
        ends = free_at[-1]
        self.busy += sum(stages) / len(stages)
        self._in_flight.append((plan, ends - began, ends))

    def collect(self) -> StepResult:
        plan, seconds, ends = self._in_flight.popleft()
        clock, ways = self._clock, (self._leaving, self._arriving)
        clock.advance_to(ends)
        if not plan.num_tokens:  # a plan without segments is complete when all copies are
            clock.advance_to(max((way[-1].ends for way in ways if way), default=0.0))
        done: list[CopyTime] = []
        for way in ways:
            while way and way[0].ends <= clock.now:
                done.append(way.popleft().time)
        out, into = (way[0].time.step - 1 if way else self._begun for way in ways)
        return StepResult(plan.step, (TOKEN,) * plan.num_sampled, seconds, out, into, tuple(done))

    def close(self) -> None:
        self._in_flight.clear()

    def _copy(self, plan: StepPlan, computed: float) -> None:
        """Begin the plan's copies; `computed` is when the computation begun so far ends."""
        if plan.swap_in:
            self._in_free = max(computed, self._in_free)
            self._in_free = self._begin(plan, inward=True, blocks=len(plan.swap_in), at=self._in_free)
            self.copied_in += self._arriving[-1].time.seconds
        if plan.swap_out:
            at = max(computed, self._in_free, self._out_free)
            self._out_free = self._begin(plan, inward=False, blocks=len(plan.swap_out), at=at)
        self._begun = plan.step

    def _begin(self, plan: StepPlan, *, inward: bool, blocks: int, at: float) -> float:
        """Put copies that begin at `at` on their way; gives when they end."""
        seconds = blocks * self._latency.copy_seconds
        time = CopyTime(plan.step, inward, blocks * self._latency.block_bytes, seconds)
        (self._arriving if inward else self._leaving).append(Copying(at + seconds, time))
        return at + seconds
