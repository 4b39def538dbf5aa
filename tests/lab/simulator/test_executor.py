"""The simulated executor: steps and copies take their predicted time on a virtual clock."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.core.cost import HEAVY, Burst
from holdfast.lab.simulator.deployment import Pipeline
from holdfast.lab.simulator.devices import Link
from holdfast.lab.simulator.executor import Reserve, SimulatedExecutor, StepTimes, VirtualClock
from holdfast.lm.types import BlockCopy, Sampling, Segment, StepPlan, TierCopies
from tests.lab.simulator.simulation import COST


def plan(step, tokens=1, samples=True):
    drawn = Sampling(0.0, 0, 1.0, 0) if samples else None
    return StepPlan(step, (Segment("a", 0, 0, tokens, (0,) * tokens, drawn),))


def test_a_plan_takes_the_time_of_its_linear_layers_and_of_each_segments_attention():
    def segment(start, stop):
        return Segment("a", 0, start, stop, (0,) * (stop - start), None)

    mixed = StepPlan(0, (segment(99, 100), segment(499, 500), segment(10, 110)))
    expected = COST.linear(102) + COST.attention(1, 100) + COST.attention(1, 500) + COST.attention(100, 110)
    assert StepTimes(COST).stages(mixed) == [pytest.approx(expected)]


def test_steps_in_flight_run_one_after_another():
    clock = VirtualClock()
    executor = SimulatedExecutor(StepTimes(COST), clock)
    executor.submit(plan(0))
    executor.submit(plan(1, 64))
    assert clock() == 0.0
    first = executor.collect()
    assert clock() == first.seconds == pytest.approx(COST.step([(1, 1)]))
    second = executor.collect()
    assert clock() == executor.busy == pytest.approx(first.seconds + COST.step([(64, 64)]))
    assert (first.step, second.step) == (0, 1)


def test_host_time_overlaps_device_time():
    clock = VirtualClock()
    executor = SimulatedExecutor(StepTimes(COST), clock, host_seconds=0.001)
    executor.submit(plan(0))
    executor.submit(plan(1))
    assert clock() == 0.002
    executor.collect()
    executor.collect()
    assert clock() == pytest.approx(0.001 + 2 * COST.step([(1, 1)]))


def test_pace_at_the_start_of_a_step_multiplies_its_duration():
    executor = SimulatedExecutor(StepTimes(COST), VirtualClock(), pace=lambda now: 1.5 if now else 1.0)
    executor.submit(plan(0))
    executor.submit(plan(1))
    assert [executor.collect().seconds for _ in range(2)] == pytest.approx(
        [COST.step([(1, 1)]), 1.5 * COST.step([(1, 1)])]
    )


def test_only_sampling_segments_return_a_token():
    executor = SimulatedExecutor(StepTimes(COST), VirtualClock())
    executor.submit(plan(0))
    executor.submit(plan(1, samples=False))
    assert [len(executor.collect().tokens) for _ in range(2)] == [1, 0]


def test_the_virtual_clock_never_goes_back():
    clock = VirtualClock()
    clock.advance_to(3.0)
    clock.advance_to(2.0)
    assert clock() == 3.0


def test_heavy_steps_are_faster_after_lighter_steps_and_after_idle_time():
    clock = VirtualClock()
    executor = SimulatedExecutor(StepTimes(replace(COST, burst=Burst(0.8, 0.020))), clock)
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


def test_each_stage_starts_the_next_step_when_it_has_ended_the_previous_one():
    clock = VirtualClock()
    executor = SimulatedExecutor(StepTimes(STAGES.whole(), STAGES), clock)
    executor.submit(plan(0))
    executor.submit(plan(1))
    one, two = (stage.step([(1, 1)]) for stage in STAGES.stages)
    first = executor.collect()
    assert clock() == pytest.approx(one + STAGES.hop(1) + two)
    assert first.seconds == pytest.approx(STAGES.whole().step([(1, 1)]))
    second = executor.collect()
    assert clock() == pytest.approx(one + STAGES.hop(1) + 2 * two)  # the slower stage sets the pace
    assert second.seconds == pytest.approx(first.seconds), "waits do not count"
    assert executor.busy == pytest.approx(one + two)


def copying(step, inward=0, outward=0, tokens=1):
    empty = () if not tokens else plan(step, tokens).segments
    swap_in, swap_out = (tuple(BlockCopy(at, at) for at in range(count)) for count in (inward, outward))
    return StepPlan(
        step, empty, copies=TierCopies(swap_in=swap_in, swap_out=swap_out, awaits=step if inward and tokens else -1)
    )


def test_a_step_ends_no_earlier_than_its_swap_in():
    alone = COST.step([(1, 1)])
    for blocks, ends in ((1, alone), (20, 0.020)):
        clock = VirtualClock()
        executor = SimulatedExecutor(StepTimes(COST, copy_seconds=0.001), clock)
        executor.submit(copying(0, inward=blocks))
        executor.collect()
        assert clock() == pytest.approx(ends)


def test_swap_in_starts_after_the_computation_submitted_before_it():
    clock = VirtualClock()
    executor = SimulatedExecutor(StepTimes(COST, copy_seconds=0.001), clock)
    executor.submit(plan(0))
    executor.submit(copying(1, inward=20))
    executor.collect()
    executor.collect()
    assert clock() == pytest.approx(COST.step([(1, 1)]) + 0.020)


def test_swap_in_overlaps_steps_until_a_step_awaits_it():
    clock = VirtualClock()
    executor = SimulatedExecutor(StepTimes(COST, copy_seconds=0.001), clock)
    alone = COST.step([(1, 1)])
    first = copying(0, inward=20)
    executor.submit(replace(first, copies=first.copies._replace(awaits=-1)))
    assert executor.collect().copied.swapped_in == -1
    assert clock() == pytest.approx(alone)
    executor.submit(replace(plan(1), copies=TierCopies(awaits=0)))
    assert executor.collect().copied.swapped_in == 1
    assert clock() == pytest.approx(0.020 + alone)


@pytest.mark.parametrize(("blocks", "groups"), [(20, 4), (20, 32), (2, 4), (2, 1)])
def test_a_step_computes_a_group_of_layers_once_that_has_been_swapped_in(blocks, groups):
    clock, alone, copied = VirtualClock(), COST.step([(1, 1)]), 0.001 * blocks
    executor = SimulatedExecutor(StepTimes(COST, copy_seconds=0.001, swap_in_groups=groups), clock)
    executor.submit(copying(0, inward=blocks))
    executor.collect()
    ends = 0.0
    for group in range(groups):
        ends = max(ends, copied * (group + 1) / groups) + alone / groups
    assert clock() == pytest.approx(ends)


def test_results_report_completed_swap_outs():
    executor = SimulatedExecutor(StepTimes(COST, copy_seconds=0.003), VirtualClock())
    for step in (copying(0, outward=3), plan(1), plan(2), plan(3)):  # 9 ms of copies during steps of some 4 ms
        executor.submit(step)
    assert [executor.collect().copied.swapped_out for _ in range(4)] == [-1, -1, 3, 3]


def test_swap_outs_wait_for_swap_ins():
    executor = SimulatedExecutor(StepTimes(COST, copy_seconds=0.001), VirtualClock())
    executor.submit(copying(0, inward=2, outward=1))
    assert executor.collect().copied.swapped_out == 0  # 2 ms in, then 1 ms out, within a step of 4
    executor.submit(copying(1, inward=10, outward=1))
    assert executor.collect().copied.swapped_out == 0  # the copy out begins when the step ends with its copies in


def test_swap_outs_start_after_the_computation_submitted_before_them():
    executor = SimulatedExecutor(StepTimes(COST, copy_seconds=0.001), VirtualClock())
    executor.submit(plan(0))
    executor.submit(copying(1, outward=1))
    assert [executor.collect().copied.swapped_out for _ in range(2)] == [0, 1]


def test_a_plan_without_segments_ends_with_its_copies():
    clock = VirtualClock()
    executor = SimulatedExecutor(StepTimes(COST, copy_seconds=0.5), clock)
    executor.submit(copying(0, outward=4, tokens=0))
    assert executor.collect().copied.swapped_out == 0
    assert clock() == pytest.approx(2.0)


def test_heavy_steps_use_up_the_boost_and_light_steps_restore_it():
    reserve = Reserve(Burst(share=0.8, seconds=0.03))
    assert reserve.step(HEAVY, 0.020) == pytest.approx(0.016)
    assert reserve.step(HEAVY, 0.020) == pytest.approx(0.014 + 0.0025)  # 14 ms that are left, and the rest at the pace
    assert reserve.step(HEAVY, 0.020) == 0.020
    assert reserve.step(HEAVY - 1, 0.004) == 0.004
    assert reserve.step(HEAVY, 0.020, idle=0.004) == pytest.approx(0.008 + 0.010)
    reserve.step(1, 1.0)
    assert reserve.step(HEAVY, 0.100) == pytest.approx(0.03 + 0.0625)  # no more than a full reserve


@given(st.lists(st.tuples(st.sampled_from([1, HEAVY]), st.floats(0, 0.1), st.floats(0, 0.1)), max_size=20))
def test_without_a_burst_every_step_takes_its_steady_time(steps):
    reserve = Reserve(Burst())
    assert [reserve.step(*step) for step in steps] == [seconds for _, seconds, _ in steps]
