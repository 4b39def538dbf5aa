"""PipelineLatencyTarget: the target bounds a stream's wait for all stages, and steps take equal times."""

import random
from dataclasses import replace

import pytest

from holdfast.lm.scheduler.pipeline_target import PipelineLatencyTarget
from holdfast.lm.scheduler.policies import FIRST_WAY
from tests.lm.scheduler.test_latency_target import COST, TILE, beside_a_stream, scheduler_of, seconds, settled, step
from tests.scheduling import answer, create_requests, spans


def with_target(target_ms, ceiling=256, cost=COST, stages=2):
    return PipelineLatencyTarget(cost, target_ms / 1e3, tile=TILE, ceiling=ceiling, stages=stages)


def test_the_target_holds_for_a_stream_whose_token_is_in_flight():
    scheduler = beside_a_stream(with_target(0.001), stages=2)
    assert spans(scheduler.schedule(0.0)) == [("0", 1, 2)]
    (_, late) = create_requests(1, 100)
    scheduler.add(late)
    assert spans(scheduler.schedule(0.0)) == [("1", 0, 16)]


def test_prompts_are_shared_by_as_many_steps_as_there_are_stages_but_no_step_is_less_than_efficient():
    policy = with_target(1000.0, ceiling=1024, stages=3)
    assert policy.efficient_tokens == 688
    fastest = COST.linear(1024) / 1024
    assert COST.linear(688) / 688 <= 1.1 * fastest < COST.linear(688 - TILE) / (688 - TILE)
    scheduler = beside_a_stream(policy, 1500, 1100, stages=3)
    plans = [step(scheduler) for _ in range(4)]
    of_prompts = [sum(segment.length for segment in plan.segments if segment.length > 1) for plan in plans]
    assert of_prompts == [867, 687, 686, 360], "a third of what is lacking, then what is efficient beside decodes"


def test_no_step_exceeds_the_ceiling_even_where_decodes_leave_less_than_a_tile():
    scheduler = beside_a_stream(with_target(1000.0, ceiling=TILE), 100, 100, max_sequences=3, stages=2)
    steps = [step(scheduler).num_tokens for _ in range(20)]
    assert max(steps) == TILE


class Passing:
    """The oracle: the stages of a pipeline, each with its share of every step, and the tokens that come back."""

    def __init__(self, shares):
        self.shares = shares
        self.free_at = [0.0] * len(shares)
        self.ends = []
        """End of each step."""
        self.given = {}
        """When each step that has been collected gave its tokens."""

    def copy(self):
        other = Passing(self.shares)
        other.free_at, other.ends, other.given = [*self.free_at], [*self.ends], self.given
        return other

    def shift(self, number, late):
        """A step ends later than was expected, and so will those after it."""
        self.free_at = [at + late for at in self.free_at]
        self.ends[number:] = [at + late for at in self.ends[number:]]

    def tokens_at(self, number, now):
        """When the sequences of a step get the tokens that they had before it, or got them."""
        before = number - len(self.shares)
        return self.given.get(before, max(now, self.ends[before]) if before >= 0 else now)

    def run(self, now, seconds):
        """When the next step, planned now, ends."""
        at = max(now, self.tokens_at(len(self.ends), now))
        for stage, share in enumerate(self.shares):
            at = self.free_at[stage] = max(at, self.free_at[stage]) + share * seconds
        self.ends.append(at)
        return at

    def wait(self, now, seconds):
        """The longest wait of a stream if this step, and each later one, takes `seconds`."""
        ahead, first = self.copy(), len(self.ends)
        return max(ahead.run(now, seconds) - self.tokens_at(first + later, now) for later in range(len(self.shares)))


class Asked(PipelineLatencyTarget):
    """Notes what it predicts while a step is planned."""

    def prefill_budget(self, step):
        self.waits = [self.wait(seconds) for seconds in (0.001, 0.02)]
        return super().prefill_budget(step)


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("shares", [(0.5, 0.5), (0.3, 0.7), (0.7, 0.3), (1 / 3,) * 3, (1 / 4,) * 4])
def test_the_predicted_wait_counts_the_steps_ahead_and_those_after_it_however_late_they_are(shares, seed):
    choose, stages = random.Random(seed), len(shares)
    policy = Asked(replace(COST, stage_shares=shares), 1.0, tile=TILE, ceiling=256, stages=stages)
    scheduler = scheduler_of(policy, *[choose.randint(1, 300) for _ in range(40)], stages=stages, max_sequences=12)
    passing, plans, now = Passing(shares), [], 0.0
    for _ in range(60):
        while len(plans) <= stages and (plan := scheduler.schedule(now)) is not None:
            assert policy.waits == pytest.approx([passing.wait(now, seconds) for seconds in (0.001, 0.02)])
            passing.run(now, seconds(plan))
            plans.append(plan)
        plan = plans.pop(0)
        now = passing.given[plan.step] = max(now, passing.ends[plan.step] + choose.choice((0.0, 0.003)))
        passing.shift(plan.step, now - passing.ends[plan.step])
        scheduler.update(plan, replace(answer(plan), seconds=seconds(plan)), now)
        now += choose.choice((0.0, 0.0, 0.004))  # the host is busy


def test_time_that_the_host_is_busy_counts_as_time_that_a_stream_has_waited():
    policy = Asked(replace(COST, stage_shares=(0.5, 0.5)), 1.0, tile=TILE, ceiling=256, stages=2)
    scheduler = scheduler_of(policy, 1, 1, stages=2)
    plans = [scheduler.schedule(0.0)]
    scheduler.update(plans[0], answer(plans[0]), 0.1)
    plans = [scheduler.schedule(0.1), scheduler.schedule(0.1)]
    scheduler.update(plans[0], answer(plans[0]), 0.2)
    scheduler.schedule(0.2)
    at_once = policy.waits
    scheduler.update(plans[1], answer(plans[1]), 0.3)
    scheduler.schedule(0.35)
    assert policy.waits[0] > at_once[0] + 0.04


def test_the_prediction_is_corrected_by_the_time_of_all_stages_without_their_waits():
    policy = with_target(1000.0)
    scheduler = beside_a_stream(policy, *[1000] * 8, stages=2)
    policy.correction = settled()
    for _ in range(30):
        step(scheduler, times=1.2)
    assert policy.correction.mean == pytest.approx(1.2, rel=0.01)


def decodes_of_steps(policy, *prompts, stages):
    """Plans of the next `stages` steps, which decode streams with these prompts."""
    scheduler = scheduler_of(policy, *prompts, stages=stages)
    while any(segment.length > 1 for segment in step(scheduler).segments):
        pass
    for _ in range(3):
        step(scheduler)
    return [scheduler.schedule(0.0) for _ in range(stages)]


@pytest.mark.parametrize(
    ("stages", "prompts"), [(2, [1000, *[30] * 7]), (2, [*[30] * 12, 900]), (3, [800, *[20] * 20])]
)
def test_steps_of_decodes_of_unequal_contexts_take_equal_times(stages, prompts):
    by_time = decodes_of_steps(with_target(1000.0, ceiling=1024, stages=stages), *prompts, stages=stages)
    assert sorted(name for plan in by_time for name, *_ in spans(plan)) == sorted(map(str, range(len(prompts))))
    assert len({len(plan.segments) for plan in by_time}) > 1, "not as many in each"
    times = [seconds(plan) - COST.linear(1) for plan in by_time]
    mean = sum(times) / stages
    longest = max(seconds(plan) / len(plan.segments) for plan in by_time)
    assert max(times) - mean <= longest, "a step exceeds its share by less than a decode"


def test_steps_of_equal_decodes_hold_equally_many():
    plans = decodes_of_steps(with_target(1000.0, ceiling=1024, stages=3), *[10] * 9, stages=3)
    assert [len(plan.segments) for plan in plans] == [3, 3, 3]


def test_reports_of_clients_move_the_margin_of_a_pipeline_whose_steps_the_target_cuts():
    def learned(late):
        policy = with_target(16.0, stages=2)
        scheduler, plans, now = scheduler_of(policy, *[1000] * 20, stages=2, blocks=100_000), [], 0.0
        for number in range(80):
            while len(plans) < 3 and (plan := scheduler.schedule(now)) is not None:
                plans.append(plan)
            plan = plans.pop(0)
            now += seconds(plan) / 2
            scheduler.update(plan, replace(answer(plan), seconds=seconds(plan)), now)
            if number > 40:
                scheduler.note_waits(10, late)
        return policy.correction.learned_margin

    assert learned(10) > FIRST_WAY > learned(0)


def test_no_pause_empties_a_pipeline_with_streams():
    scheduler = scheduler_of(with_target(50.0), stages=2)
    assert scheduler.pause(10.0, 0.0)
    scheduler.add(create_requests(20)[0])
    plan = scheduler.schedule(0.0)
    scheduler.update(plan, answer(plan), 0.01)
    assert not scheduler.pause(0.001, 0.01)
