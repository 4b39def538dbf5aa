"""The simulated executor: steps run one after another on a clock that waits for nobody."""

import pytest

from holdfast.core.types import Sampling, Segment, StepPlan
from holdfast.simulator.executor import SimulatedExecutor, VirtualClock
from holdfast.simulator.latency import Latency
from tests.simulator.simulation import COST


def plan(step, tokens=1, samples=True):
    drawn = Sampling(0.0, 0, 1.0, 0) if samples else None
    return StepPlan(step, (Segment("a", 0, 0, tokens, (0,) * tokens, drawn),))


def test_steps_in_flight_run_one_after_another():
    clock = VirtualClock()
    executor = SimulatedExecutor(Latency(COST), clock)
    executor.submit(plan(0))
    executor.submit(plan(1, 64))
    assert clock() == 0.0
    first = executor.collect()
    assert clock() == first.seconds == pytest.approx(COST.step([(1, 1)]))
    second = executor.collect()
    assert clock() == executor.busy == pytest.approx(first.seconds + COST.step([(64, 64)]))
    assert (first.step, second.step) == (0, 1)


def test_the_hosts_time_passes_beside_the_devices():
    clock = VirtualClock()
    executor = SimulatedExecutor(Latency(COST), clock, host_seconds=0.001)
    executor.submit(plan(0))
    executor.submit(plan(1))
    assert clock() == 0.002
    executor.collect()
    executor.collect()
    assert clock() == pytest.approx(0.001 + 2 * COST.step([(1, 1)]))


def test_only_sampling_segments_give_a_token():
    executor = SimulatedExecutor(Latency(COST), VirtualClock())
    executor.submit(plan(0))
    executor.submit(plan(1, samples=False))
    assert [len(executor.collect().tokens) for _ in range(2)] == [1, 0]


def test_time_never_goes_back():
    clock = VirtualClock()
    clock.advance_to(3.0)
    clock.advance_to(2.0)
    assert clock() == 3.0
