"""The simulated executor: takes plans as the real one does, and answers when a virtual clock says so."""

from __future__ import annotations

from collections import deque

from holdfast.core.protocols import MemoryProfile
from holdfast.core.types import CopyTime, StepPlan, StepResult
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
    """

    def __init__(self, latency: Latency, clock: VirtualClock, host_seconds: float = 0.0) -> None:
        self._latency = latency
        self._clock = clock
        self._host_seconds = host_seconds
        self._free_at = 0.0
        self._in_flight: deque[tuple[StepResult, float]] = deque()
        self.busy = 0.0
        """Seconds that the device was not idle."""

    def profile(self) -> MemoryProfile:
        """There is no memory: the simulation says how many blocks there are."""
        return MemoryProfile("simulated", total=0, weights=0, activations=0, cache=0, block=1)

    def allocate(self, num_blocks: int, host_blocks: int = 0) -> None:
        """Nothing is kept."""

    def submit(self, plan: StepPlan) -> None:
        self._clock.now += self._host_seconds
        seconds = self._latency.seconds(plan)
        self._free_at = max(self._clock.now, self._free_at) + seconds
        self.busy += seconds
        sampled = sum([segment[5] is not None for segment in plan.segments])
        ways = ((False, plan.swap_out), (True, plan.swap_in))
        copies = tuple(CopyTime(plan.step, inward, 0, 0.0) for inward, blocks in ways if blocks)
        result = StepResult(plan.step, (TOKEN,) * sampled, seconds, plan.step, plan.step, copies)
        self._in_flight.append((result, self._free_at))

    def collect(self) -> StepResult:
        result, ends = self._in_flight.popleft()
        self._clock.advance_to(ends)
        return result

    def close(self) -> None:
        self._in_flight.clear()
