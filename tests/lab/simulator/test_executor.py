"""The simulated executor: steps run one after another on a clock that waits for nobody."""

from dataclasses import replace

import pytest

from holdfast.core.cost import Burst
from holdfast.lab.simulator.deployment import Pipeline
from holdfast.lab.simulator.devices import Link
from holdfast.lab.simulator.executor import SimulatedExecutor, VirtualClock
from holdfast.lab.simulator.latency import Latency
from holdfast.lm.types import BlockCopy, Sampling, Segment, StepPlan
from tests.lab.simulator.simulation import COST


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


def test_a_step_is_as_slow_as_the_device_is_when_it_begins():
    executor = SimulatedExecutor(Latency(COST), VirtualClock(), pace=lambda now: 1.5 if now else 1.0)
    executor.submit(plan(0))
    executor.submit(plan(1))
    assert [executor.collect().seconds for _ in range(2)] == pytest.approx(
        [COST.step([(1, 1)]), 1.5 * COST.step([(1, 1)])]
    )


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


def test_heavy_steps_are_faster_behind_lighter_ones_and_behind_idle_time():
    clock = VirtualClock()
    executor = SimulatedExecutor(Latency(replace(COST, burst=Burst(0.8, 0.020))), clock)
    heavy, light = COST.step([(1024, 1024)]), COST.step([(1, 1)])

    def seconds(number, tokens):
        executor.submit(plan(number, tokens))
        return executor.collect().seconds

    after = 0.020 + heavy - 0.020 / 0.8
    assert [seconds(number, 1024) for number in range(2)] == pytest.approx([after, heavy])
    assert seconds(2, 1) == pytest.approx(light)
    assert seconds(3, 1024) == pytest.approx(light + heavy - light / 0.8)
    clock.advance_to(clock() + 0.010)
    assert seconds(4, 1024) == pytest.approx(0.010 + heavy - 0.010 / 0.8)


STAGES = Pipeline((COST, replace(COST, linear_seconds=(0.008, 0.010, 0.040))), Link("wire", 1e6, 0.001), token_bytes=10)


def test_a_step_passes_the_stages_in_order_and_the_next_follows_it_into_each():
    clock = VirtualClock()
    executor = SimulatedExecutor(Latency(STAGES.whole(), STAGES), clock)
    executor.submit(plan(0))
    executor.submit(plan(1))
    one, two = (stage.step([(1, 1)]) for stage in STAGES.stages)
    first = executor.collect()
    assert clock() == pytest.approx(one + STAGES.hop(1) + two)
    assert first.seconds == pytest.approx(STAGES.whole().step([(1, 1)]))
    second = executor.collect()
    assert clock() == pytest.approx(one + STAGES.hop(1) + 2 * two)  # the slower stage sets the pace
    assert second.seconds == pytest.approx(clock() - one)
    assert executor.busy == pytest.approx(one + two)


def copying(step, inward=0, outward=0, tokens=1):
    empty = () if not tokens else plan(step, tokens).segments
    swap_in, swap_out = (tuple(BlockCopy(at, at) for at in range(count)) for count in (inward, outward))
    return StepPlan(step, empty, swap_in=swap_in, swap_out=swap_out, awaits=step if inward and tokens else -1)


def test_a_step_ends_no_sooner_than_what_it_swaps_in():
    alone = COST.step([(1, 1)])
    for blocks, ends in ((1, alone), (20, 0.020)):
        clock = VirtualClock()
        executor = SimulatedExecutor(Latency(COST, copy_seconds=0.001), clock)
        executor.submit(copying(0, inward=blocks))
        executor.collect()
        assert clock() == pytest.approx(ends)


def test_what_is_swapped_in_follows_the_computation_begun_so_far():
    clock = VirtualClock()
    executor = SimulatedExecutor(Latency(COST, copy_seconds=0.001), clock)
    executor.submit(plan(0))
    executor.submit(copying(1, inward=20))
    executor.collect()
    executor.collect()
    assert clock() == pytest.approx(COST.step([(1, 1)]) + 0.020)


def test_what_no_step_awaits_comes_in_beside_the_steps_until_one_does():
    clock = VirtualClock()
    executor = SimulatedExecutor(Latency(COST, copy_seconds=0.001), clock)
    alone = COST.step([(1, 1)])
    executor.submit(replace(copying(0, inward=20), awaits=-1))
    assert executor.collect().swapped_in == -1
    assert clock() == pytest.approx(alone)
    executor.submit(replace(plan(1), awaits=0))
    assert executor.collect().swapped_in == 1
    assert clock() == pytest.approx(0.020)


def test_a_result_says_which_swap_outs_have_landed():
    executor = SimulatedExecutor(Latency(COST, copy_seconds=0.003), VirtualClock())
    for step in (copying(0, outward=3), plan(1), plan(2), plan(3)):  # 9 ms of copies beside steps of some 4 ms
        executor.submit(step)
    assert [executor.collect().swapped_out for _ in range(4)] == [-1, -1, 3, 3]


def test_swap_outs_wait_for_swap_ins():
    executor = SimulatedExecutor(Latency(COST, copy_seconds=0.001), VirtualClock())
    executor.submit(copying(0, inward=2, outward=1))
    assert executor.collect().swapped_out == 0  # 2 ms in, then 1 ms out, within a step of 4
    executor.submit(copying(1, inward=10, outward=1))
    assert executor.collect().swapped_out == 0  # the copy out begins when the step ends with its copies in


def test_a_plan_without_segments_is_complete_when_its_copies_are():
    clock = VirtualClock()
    executor = SimulatedExecutor(Latency(COST, copy_seconds=0.5), clock)
    executor.submit(copying(0, outward=4, tokens=0))
    assert executor.collect().swapped_out == 0
    assert clock() == pytest.approx(2.0)
