"""The simulated executor: takes plans as the real one does, and answers when a virtual clock says so."""

from __future__ import annotations

from collections import deque

from holdfast.core.protocols import MemoryProfile
from holdfast.core.types import StepPlan, StepResult
from holdfast.simulator.latency import Latency

TOKEN = 7
"""What every step samples: no model runs, and a sequence ends at its length."""


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

    `host_seconds` pass on the clock with each plan: planning and packing, which overlap the device as they do for real.

    A step passes the stages of a pipeline in order, and each stage takes the steps in order: it begins one when it has
    ended the one before, and the stage before it has sent its part. What a stage waits is a bubble.

    Copies take their time on a link of their own, as `execution.transfer` does them: blocks that come in follow the
    computation begun so far, layer by layer under the step that reads them, which so ends no sooner than they do;
    blocks that go out wait for both, and a result says which of them have landed.
    """

    def __init__(self, latency: Latency, clock: VirtualClock, host_seconds: float = 0.0) -> None:
        self._latency = latency
        self._clock = clock
        self._host_seconds = host_seconds
        self._free_at = [0.0] * latency.num_stages
        """By stage, when it has ended what it was given."""
        self._in_flight: deque[tuple[StepPlan, float, float]] = deque()
        """Plans, the seconds that each takes, and when it ends."""
        self._in_free = self._out_free = 0.0
        """When each direction of the copy link is free."""
        self._leaving: deque[tuple[int, float]] = deque()
        """Plans with copies to the host under way, and when these land."""
        self._begun = -1
        self.busy = 0.0
        """Seconds that the device was not idle; of several stages, the mean."""
        self.copied_in = 0.0
        """Seconds that blocks took to come in."""

    def profile(self) -> MemoryProfile:
        """There is no memory: the simulation says how many blocks there are."""
        return MemoryProfile("simulated", total=0, weights=0, activations=0, cache=0, block=1)

    def allocate(self, num_blocks: int, host_blocks: int = 0) -> None:
        """Nothing is kept."""

    def submit(self, plan: StepPlan) -> None:
        self._clock.now += self._host_seconds
        now, free_at, latency = self._clock.now, self._free_at, self._latency
        began = at = max(now, free_at[0])
        arrived = self._copy(plan, began)
        hop = latency.hop(plan)
        stages = latency.stages(plan)
        for stage, seconds in enumerate(stages):
            at = max(max(at, free_at[stage]) + seconds, arrived)
            free_at[stage] = at
            at += hop
        ends = free_at[-1]
        self.busy += sum(stages) / len(stages)
        self._in_flight.append((plan, ends - began, ends))

    def collect(self) -> StepResult:
        plan, seconds, ends = self._in_flight.popleft()
        self._clock.advance_to(ends)
        leaving = self._leaving
        if leaving:
            if not plan.segments:  # such a plan is complete when all copies to the host are
                self._clock.advance_to(leaving[-1][1])
            while leaving and leaving[0][1] <= self._clock.now:
                leaving.popleft()
        landed = leaving[0][0] - 1 if leaving else self._begun
        sampled = sum([segment[5] is not None for segment in plan.segments])
        return StepResult(plan.step, (TOKEN,) * sampled, seconds, landed)

    def close(self) -> None:
        self._in_flight.clear()

    def _copy(self, plan: StepPlan, computed: float) -> float:
        """Begin the plan's copies; `computed` is when the computation begun so far ends. Gives when what comes in has.

        0.0 if nothing does.
        """
        arrived, each = 0.0, self._latency.copy_seconds
        if plan.swap_in:
            took = len(plan.swap_in) * each
            self._in_free = arrived = max(computed, self._in_free) + took
            self.copied_in += took
        if plan.swap_out:
            self._out_free = max(computed, self._in_free, self._out_free) + len(plan.swap_out) * each
            self._leaving.append((plan.step, self._out_free))
        self._begun = plan.step
        return arrived
