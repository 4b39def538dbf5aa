"""LatencyTarget: each step holds as much prefill work as the target leaves after its decodes."""

import itertools
import random
from collections import deque
from dataclasses import replace

import pytest

from holdfast.core.cost import CostModel
from holdfast.core.types import BATCH_CLASS
from holdfast.lm.scheduler.correction import Correction
from holdfast.lm.scheduler.policies import FIRST_WAY, LatencyTarget
from holdfast.lm.types import PartResult, StepResult, TierCopied
from tests.scheduling import answer, create_requests, create_scheduler, spans

COST = CostModel(
    model="m",
    device="d",
    linear_tokens=(1, 64, 1024),
    linear_seconds=(0.004, 0.005, 0.020),
    attention_queries=(1, 1024),
    attention_contexts=(64, 1024),
    attention_seconds=((0.0001, 0.001), (0.0005, 0.008)),
)
TILE = 16


def settled(ratio=1.0):
    """The correction after many steps that took `ratio` times their predicted time."""
    correction = Correction(0.02)
    for _ in range(200):
        correction.update(ratio)
    return correction


def with_target(target_ms, ceiling=256):
    return LatencyTarget(COST, target_ms / 1e3, tile=TILE, ceiling=ceiling)


def scheduler_of(policy, *prompts, **options):
    settings = {"blocks": 4096, "block_size": 4, "max_model_len": 2048, "max_sequences": 64, "sharing": False}
    scheduler = create_scheduler(policy=policy, **(settings | options))
    for request in create_requests(*prompts, max_tokens=100):
        scheduler.add(request)
    return scheduler


def beside_a_stream(policy, *prompts, **options):
    """A scheduler with a stream, "0", and prompts that arrived after it."""
    scheduler = scheduler_of(policy, 1, **options)
    step(scheduler)
    policy.correction = settled()
    for request in create_requests(1, *prompts, max_tokens=100)[1:]:
        scheduler.add(request)
    return scheduler


def seconds(plan):
    return COST.step((segment.length, segment.stop) for segment in plan.segments)


def step(scheduler, times=1.0):
    """One step that takes `times` its predicted time."""
    plan = scheduler.schedule(0.0)
    tokens = answer(plan).tokens
    scheduler.update(plan, StepResult(plan.step, tokens, times * seconds(plan)), 0.0)
    return plan


def mixed_step(scheduler, count=1, times=1.0):
    """Run steps until `count` of them have prefilled next to streams. Returns the last, in which a prompt was cut."""
    while True:
        plan = step(scheduler, times)
        *others, last = plan.segments
        count -= bool(others) and last.length > 1
        if count <= 0 and others and last.sampling is None:
            return plan


def with_one_tile_more(plan):
    """The time of the step if its last chunk were one tile longer."""
    *others, last = [(segment.length, segment.stop) for segment in plan.segments]
    return COST.step([*others, (last[0] + TILE, last[1] + TILE)])


def test_a_long_prefill_is_cut_at_the_last_tile_within_the_target():
    scheduler = beside_a_stream(policy := with_target(6.0), 1000)
    lengths = []
    for _ in range(5):
        correction = policy.correction.factor
        plan = step(scheduler)
        assert plan.num_tokens % TILE == 0
        assert seconds(plan) * correction <= 0.006 < with_one_tile_more(plan) * correction
        lengths.append(plan.num_tokens)
    assert lengths == sorted(lengths, reverse=True) and lengths[0] > lengths[-1], "attention grows with the context"


def test_longer_decode_contexts_leave_less_room_for_prefill():
    def joined(prompt):
        scheduler = scheduler_of(policy := with_target(10.0, ceiling=1024), *[prompt] * 6)
        while any(segment.sampling is None for segment in step(scheduler).segments) or scheduler.stats().waiting:
            pass
        for request in create_requests(*[1] * 6, 1000, max_tokens=100)[6:]:
            scheduler.add(request)
        policy.correction = settled()
        plan = step(scheduler)
        assert len(plan.segments) == 7 and seconds(plan) <= 0.010
        return plan.segments[-1].length

    assert joined(20) > joined(200) > joined(400) > 0


def test_a_step_fills_the_tile_it_began_under_any_target():
    scheduler = beside_a_stream(with_target(0.001), 3, 3, 100)
    lengths = [[segment.length for segment in step(scheduler).segments] for _ in range(4)]
    assert lengths == [[1, 3], [1, 1, 3], [1, 1, 1, 13], [1, 1, 1, 13]]


def test_a_step_without_streams_is_bounded_by_the_ceiling_alone():
    scheduler = scheduler_of(with_target(0.001, ceiling=256), 200, 100, 100)
    assert spans(step(scheduler)) == [("0", 0, 200), ("1", 0, 56)]
    assert spans(step(scheduler)) == [("0", 200, 201), ("1", 56, 71)], "the target counts from the first token on"


def test_steps_reach_the_ceiling_when_most_rows_are_busy():
    scheduler = beside_a_stream(with_target(1000.0, ceiling=1024), 1500, 1500, max_sequences=3)
    step(scheduler)
    assert sum(segment.length for segment in step(scheduler).segments) == 1024


def test_a_second_prompt_joins_only_within_the_target():
    assert spans(beside_a_stream(with_target(8.0), 20, 20).schedule(0.0))[1:] == [("1", 0, 20), ("2", 0, 20)]
    plan = step(beside_a_stream(with_target(4.6), 20, 20))
    assert spans(plan)[1:] == [("1", 0, 20)]
    assert seconds(plan) <= 0.0046


def test_measured_steps_correct_the_prediction():
    scheduler = scheduler_of(policy := with_target(16.0), *[1000] * 60)
    plan = mixed_step(scheduler, 80, times=1.3)
    assert policy.correction.factor == pytest.approx(1.3, rel=0.002)
    assert 1.3 * seconds(plan) <= 0.016 < 1.301 * with_one_tile_more(plan)


@pytest.mark.parametrize(
    ("drawn", "most"),
    [
        (lambda draw: draw.gauss(1.0, 0.01), 1.035),
        (lambda draw: draw.gauss(1.05, 0.03), 1.17),
        (lambda draw: draw.gauss(1.0, 0.1), 1.35),
    ],
)
def test_correction_exceeds_99_percent_of_normal_steps_by_little(drawn, most):
    draw, correction = random.Random(0), Correction(0.02)
    late, factors = 0, []
    for index in range(3000):
        factor, ratio = correction.factor, drawn(draw)
        if index > 100:
            late += ratio > factor
            factors.append(factor)
        correction.update(ratio)
    assert 0 < late < 0.01 * len(factors)
    assert sum(factors) / len(factors) < most


def test_99_percent_of_noisy_steps_meet_the_target():
    draw = random.Random(0)
    scheduler = scheduler_of(with_target(14.0), *[1000] * 600, max_model_len=2048, blocks=100_000)
    late, steps = 0, 0
    while steps < 800:
        plan = scheduler.schedule(0.0)
        taken = draw.uniform(0.9, 1.1) * seconds(plan)
        scheduler.update(plan, StepResult(plan.step, answer(plan).tokens, taken), 0.0)
        if plan.num_tokens > len(answer(plan).tokens):
            steps += 1
            late += steps > 100 and taken > 0.014
    assert late < 0.01 * 700


def test_a_step_that_the_target_did_not_cut_teaches_no_margin():
    scheduler = beside_a_stream(policy := with_target(14.0), 20, 20)
    policy.correction.deviation = 0.02
    step(scheduler, times=10.0)
    scheduler.schedule(0.0)
    assert policy.correction.learned_margin == 0.0


def test_a_target_that_no_step_meets_teaches_no_margin():
    scheduler = beside_a_stream(policy := with_target(1.0), *[1000] * 3)
    for _ in range(30):
        policy.note_waits(100, 100)
        step(scheduler)
    assert policy.correction.learned_margin == FIRST_WAY


@pytest.mark.parametrize(("times", "moved"), [(1.2, 0.01 - 0.000075), (0.9, -0.000075)])
def test_late_and_timely_steps_that_the_target_cut_move_the_margin(times, moved):
    scheduler = beside_a_stream(policy := with_target(8.0), 1000)
    policy.correction.deviation = 0.02
    step(scheduler, times)
    step(scheduler)
    assert policy.correction.learned_margin == pytest.approx(moved)


def test_a_step_without_room_for_the_next_prompt_was_cut_by_the_target():
    scheduler = beside_a_stream(policy := with_target(4.6), 20, 20)
    assert spans(step(scheduler, times=1.2))[1:] == [("1", 0, 20)]
    step(scheduler)
    assert policy.correction.learned_margin > 0.009


def sent(policy, way, count=1500):
    """Seconds between tokens at a client that the way from the engine delays by `way(draw)`, and seconds of each step.

    The client reports every 20 tokens how many were late.
    """
    draw, found, taken, reported, now = random.Random(0), [], [], 0, 0.0
    scheduler, before = scheduler_of(policy, *[1000] * 900, blocks=100_000), 0.0
    while len(found) < count:
        plan = scheduler.schedule(now)
        seconds_ = draw.gauss(1.0, 0.003) * seconds(plan)
        now += seconds_
        tokens = answer(plan).tokens
        scheduler.update(plan, StepResult(plan.step, tokens, seconds_), now)
        at = now + way(draw)
        if plan.num_tokens > len(tokens) > 1:
            found.append(at - before)
            taken.append(seconds_)
            if len(found) % 20 == 0:
                late = sum(wait > policy.target for wait in found[reported:])
                scheduler.note_waits(20 * len(tokens), late * len(tokens))
                reported = len(found)
        before = at
    return found, taken


def test_tokens_meet_the_target_at_a_client_that_the_way_delays():
    found, taken = sent(policy := with_target(14.0), lambda draw: draw.uniform(0.0, 0.001))
    assert policy.correction.learned_margin > 0.02
    assert sum(wait > 0.014 for wait in found[500:]) < 0.012 * len(found[500:])
    assert sum(taken[500:]) / len(taken[500:]) > 0.0125, "no more time is left than the way takes"


def test_a_steady_way_to_clients_costs_no_time():
    found, _ = sent(with_target(14.0), lambda draw: 0.005)
    assert sum(found[500:]) / len(found[500:]) > 0.0132


def test_reports_of_clients_count_in_place_of_results_while_they_come():
    def learned(reports):
        scheduler = beside_a_stream(policy := with_target(8.0), 1000)
        for _ in range(reports):
            policy.note_waits(1, 0)
        for _ in range(3):
            step(scheduler, times=1.2)
        return policy.correction.learned_margin

    assert learned(0) > 0.01
    assert learned(1) == FIRST_WAY, "the client has said how late its tokens were"


def test_reports_count_by_the_share_of_steps_that_the_target_cuts():
    def learned(*prompts):
        scheduler = beside_a_stream(policy := with_target(8.0), *prompts)
        for _ in range(20):
            step(scheduler)
        policy.note_waits(0, 0)
        step(scheduler)
        before = policy.correction.learned_margin
        policy.note_waits(50, 50)
        step(scheduler)
        return policy.correction.learned_margin - before

    assert learned(5) == 0.0
    assert learned(1000, 5) > 0.0
    assert learned(1000, 1000) > 1.5 * learned(1000, 5)


def test_steps_that_copy_from_the_host_have_a_correction_of_their_own():
    scheduler = scheduler_of(policy := with_target(8.0), blocks=400, host_blocks=2000, sharing=True, by_layer=True)
    policy.correction = settled()
    scheduler.add(*create_requests(1, max_tokens=1500))
    step(scheduler)
    found, history, times = [], tuple(range(100, 500)), itertools.count(1.0)

    def turn(name, prompt):
        """Run another request next to the stream. Its steps with copies take half as long again."""
        (request,) = create_requests(prompt, max_tokens=2)
        scheduler.add(replace(request, id=name))
        while name in scheduler.entries:
            plan = scheduler.schedule(now := next(times))
            if (copies := bool(plan.copies.swap_in)) and plan.num_tokens > 1:
                found.append(seconds(plan))
            taken = (1.5 if copies else 1.0) * seconds(plan)
            done = TierCopied(plan.step, plan.step)
            scheduler.update(plan, StepResult(plan.step, answer(plan).tokens, taken, copied=done), now)

    for number in range(16):
        turn(f"turn {number}", (*history, *range(10_000 * number, 10_000 * number + 400)))
        turn(f"other {number}", tuple(range(7 + 10_000 * number, 1_107 + 10_000 * number)))  # fills the device
    assert found[0] > 0.0072 and 1.5 * found[-1] < 0.0083
    assert policy.correction.factor == pytest.approx(1.0, abs=0.01), "other steps have the whole target"


def test_late_tokens_of_all_streams_of_a_step_count_as_one_late_step():
    def learned(streams):
        scheduler = scheduler_of(policy := with_target(9.0), *[1] * streams)
        for _ in range(4):
            step(scheduler)
        for request in create_requests(*[1900] * 40, max_tokens=1):
            scheduler.add(replace(request, id=f"prompt {request.id}"))
        policy.correction = settled()
        for _ in range(90):
            step(scheduler)
        policy.note_waits(0, 0)
        step(scheduler)
        before = policy.correction.learned_margin
        policy.note_waits(streams, streams)
        step(scheduler)
        return policy.correction.learned_margin - before

    assert 0.004 < learned(2) < 0.013
    assert learned(8) == pytest.approx(learned(2), rel=0.5)


class OtherWork(PartResult):
    """A part's work of 5 ms after a step."""

    @property
    def seconds_apart(self):
        return 0.005


def waits(policy, unsteady, between=0.0, count=800, parts=()):
    """Seconds between the results of steps with prompts and those before, two in flight.

    The host gives results up to `unsteady` seconds after the end of a step. The device rests `between` two steps, or
    does the work of `parts`.
    """
    draw, found, plans = random.Random(0), [], deque()
    scheduler = scheduler_of(policy, *[1000] * 600, blocks=100_000)
    now = ended = before = 0.0
    while len(found) < count:
        while len(plans) < 2:
            plans.append((scheduler.schedule(now), now))
        plan, planned = plans.popleft()
        taken = draw.gauss(1.0, 0.005) * seconds(plan)
        ended = max(ended, planned) + between + taken
        now = max(now, ended + draw.uniform(0.0, unsteady))
        tokens = answer(plan).tokens
        scheduler.update(plan, StepResult(plan.step, tokens, taken, parts=parts), now)
        if plan.num_tokens > len(tokens):
            found.append(now - before)
        before = now
    return found[100:]


def test_99_percent_of_results_meet_the_target_though_the_host_is_unsteady():
    found = waits(policy := with_target(14.0), 0.001)
    assert sum(wait > 0.014 for wait in found) < 0.01 * len(found)
    assert policy.correction.host_deviation > 0.01


def test_a_steady_host_costs_no_time():
    found, policy = waits(with_target(14.0), 0.0), with_target(14.0)
    waits(policy, 0.0)
    assert policy.correction.host_deviation < 1e-6
    assert sum(found) / len(found) > 0.013


def test_time_between_steps_is_left_once_and_not_as_a_deviation():
    found = waits(policy := with_target(14.0), 0.0, between=0.0005)
    assert policy.correction.host_deviation < 0.003
    assert policy.correction.host_mean == pytest.approx(14.0 / 13.5, abs=0.01)
    assert sum(wait > 0.014 for wait in found) < 0.01 * len(found)
    assert sum(found) / len(found) > 0.013


def test_work_of_parts_between_steps_is_not_the_hosts():
    waits(policy := with_target(14.0), 0.0, between=0.005, count=200, parts=(OtherWork(),))
    assert (policy.correction.host_mean, policy.correction.host_deviation) == (1.0, 0.0)


def test_results_after_a_pause_say_nothing_of_the_host():
    scheduler = beside_a_stream(policy := with_target(14.0), *[1000] * 4)
    for number in range(1, 9):  # each step is planned after a pause that follows the results of the one before
        plan = scheduler.schedule(float(number))
        taken = seconds(plan)
        scheduler.update(plan, StepResult(plan.step, answer(plan).tokens, taken), number + 1.5 * taken)
    assert (policy.correction.host_mean, policy.correction.host_deviation) == (1.0, 0.0)


@pytest.mark.parametrize("ratio", [0.0, 1000])
def test_an_outlier_of_the_host_counts_as_ten_percent(ratio):
    correction = settled()
    before = correction.factor
    correction.update_host(ratio)
    assert before <= correction.factor < before * 1.05


def mixed_steps(cost, truth, target):
    """Seconds and tokens of 700 steps in which prompts join streams, on a device that takes `truth` and some noise."""
    draw, steps = random.Random(0), []
    policy = LatencyTarget(cost, target, tile=TILE, ceiling=256)
    scheduler = scheduler_of(policy, *[1000] * 400, blocks=100_000, max_sequences=6)
    while len(steps) < 700:
        plan = scheduler.schedule(0.0)
        tokens = answer(plan).tokens
        taken = draw.gauss(1.0, 0.01) * truth.step((segment.length, segment.stop) for segment in plan.segments)
        decodes = sum(segment.length == 1 for segment in plan.segments)
        if 0 < decodes < plan.num_tokens:
            steps.append((taken, plan.num_tokens))
        scheduler.update(plan, StepResult(plan.step, tokens, taken), 0.0)
    return steps, policy


@pytest.mark.parametrize("factor", [1.5, 1.0, 1 / 1.5])
def test_an_estimate_wrong_by_half_meets_the_target_from_the_first_step_and_soon_costs_no_throughput(factor):
    truth, target = COST.slower(factor, factor), 0.012 * factor
    estimated, policy = mixed_steps(replace(COST, deviation=0.18), truth, target)
    measured, _ = mixed_steps(truth, truth, target)
    assert max(seconds for seconds, _ in estimated[:50]) <= target
    assert sorted(seconds for seconds, _ in estimated)[int(0.99 * 700)] <= target

    def rate(steps):
        return sum(tokens for _, tokens in steps) / sum(seconds for seconds, _ in steps)

    assert rate(estimated[50:]) > 0.95 * rate(measured[50:])
    corrected = policy.corrected
    assert corrected.linear(100) == pytest.approx(truth.linear(100), rel=0.05)
    assert corrected.attention(16, 900) == pytest.approx(truth.attention(16, 900), rel=0.05)
    again, _ = mixed_steps(corrected, truth, target)
    assert rate(again[:50]) > 0.95 * rate(measured[:50]), "the next start begins with what this one has learned"
    assert sorted(seconds for seconds, _ in again)[int(0.99 * 700)] <= target


def test_correction_converges_to_one_when_predictions_are_exact():
    scheduler = scheduler_of(policy := with_target(14.0), *[1000] * 60)
    assert policy.correction.factor == pytest.approx(1.07), "steps stay below the target until some were measured"
    plan = mixed_step(scheduler, 90)
    assert policy.correction.factor == pytest.approx(1.0, abs=1e-4)
    assert seconds(plan) <= 0.014 < with_one_tile_more(plan)


def test_an_outlier_moves_the_correction_no_more_than_a_step_ten_percent_late():
    late, outlier = settled(), settled()
    late.update(1.1)
    outlier.update(1000)
    assert outlier.factor == pytest.approx(late.factor)
    assert 1 < outlier.factor < 1.07
    for _ in range(60):
        outlier.update(1.0)
    assert outlier.factor == pytest.approx(1.0, abs=0.001)


@pytest.mark.parametrize("ratio", [0.001, 1000])
def test_correction_stays_bounded_for_extreme_ratios(ratio):
    assert 0.1 < settled(ratio).factor < 30


def test_steps_of_decodes_alone_leave_the_correction_unchanged():
    scheduler = scheduler_of(policy := with_target(8.0), 5)
    step(scheduler)
    learned = policy.correction.factor
    step(scheduler, times=3)
    assert policy.correction.factor == learned


def test_a_prediction_is_forgotten_once_its_step_is_measured():
    scheduler = scheduler_of(policy := with_target(16.0), 1000, 1000)
    plan = scheduler.schedule(0.0)
    assert policy._predicted.keys() == {plan.step}
    scheduler.update(plan, answer(plan), 0.0)
    assert not policy._predicted


def test_a_cached_prefix_counts_as_context_of_the_chunk_behind_it():
    scheduler = scheduler_of(policy := with_target(11.0), 900, sharing=True)
    while any(segment.sampling is None for segment in step(scheduler).segments):
        pass
    (first, _) = create_requests(900, 1)
    (_, again) = create_requests(1, (*first.prompt[:896], *range(800)), max_tokens=1)
    scheduler.add(again)
    policy.correction = settled()
    plan = step(scheduler)
    assert plan.segments[-1].start == 896
    assert seconds(plan) <= 0.011 < with_one_tile_more(plan)


@pytest.mark.parametrize(("target", "tile", "ceiling"), [(0.0, 16, 64), (1.0, 0, 64), (1.0, 128, 64)])
def test_invalid_targets_and_tiles_are_refused(target, tile, ceiling):
    with pytest.raises(ValueError, match="must"):
        LatencyTarget(COST, target, tile=tile, ceiling=ceiling)


def with_lines(policy, *, streams, lines):
    """A scheduler in which streams and lines of batches decode; the lines rank after the streams."""
    scheduler = create_scheduler(
        policy=policy, blocks=4096, block_size=4, max_model_len=2048, max_sequences=64, sharing=False
    )
    for request in create_requests(*[8] * lines, max_tokens=100, priority=BATCH_CLASS):
        scheduler.add(replace(request, id=f"line {request.id}"))
    while any(segment.length > 1 for segment in step(scheduler).segments):
        pass
    for request in create_requests(*[8] * streams, max_tokens=100):
        scheduler.add(replace(request, id=f"stream {request.id}", prompt=(5, *request.prompt)))
    while any(segment.length > 1 for segment in step(scheduler).segments):
        pass
    policy.correction = settled()
    return scheduler


def test_beside_a_stream_lines_of_batches_decode_as_far_as_they_fit_the_target():
    policy = with_target(5.0, ceiling=256)
    scheduler = with_lines(policy, streams=2, lines=40)
    plan = step(scheduler)
    decodes = [segment.sequence_id for segment in plan.segments]
    assert decodes[:2] == ["stream 0", "stream 1"] and 2 < len(decodes) < 42
    assert decodes[2:] == [f"line {number}" for number in range(len(decodes) - 2)]
    assert seconds(plan) <= policy.target
    one_more = [(segment.length, segment.stop) for segment in (*plan.segments, plan.segments[-1])]
    assert COST.step(one_more) * policy.correction.factor > policy.target


def test_streams_decode_whatever_the_target_and_lines_go_on_when_no_stream_is_left():
    policy = with_target(0.1)
    scheduler = with_lines(policy, streams=3, lines=10)
    assert [segment.sequence_id for segment in step(scheduler).segments] == ["stream 0", "stream 1", "stream 2"]
    for number in range(3):
        scheduler.abort(f"stream {number}")
    assert len(step(scheduler).segments) == 10
    for _ in range(200):
        if not scheduler.has_work():
            return
        step(scheduler)
    raise AssertionError("a line never ended")


def test_a_stream_that_sits_a_step_out_bounds_it_all_the_same():
    scheduler = beside_a_stream(with_target(6.0), 1000)
    scheduler.entries["0"].next_step = 1 << 40  # as while a draft of it is verified
    plan = scheduler.schedule(0.0)
    assert {name for name, _, _ in spans(plan)} == {"1"} and seconds(plan) <= 0.006
    assert plan.num_tokens < 256, "the ceiling"


def decodes_of(scheduler, steps):
    """Number of decodes in each of the next `steps` steps."""
    return [sum(segment.length == 1 for segment in step(scheduler).segments) for _ in range(steps)]


def test_a_request_waits_if_all_streams_would_be_late_with_it():
    scheduler = scheduler_of(policy := with_target(8.0), *[60] * 40)
    policy.correction = settled()
    plans = [step(scheduler) for _ in range(60)]
    beside = [plan for plan in plans if any(segment.length == 1 for segment in plan.segments)]
    assert max(map(seconds, beside)) <= 0.008
    stats = scheduler.stats()
    assert stats.waiting > 0
    assert COST.step([(1, 160)] * (stats.running + 1)) > 0.008, "no more would fit when the answers are longest"


def test_all_run_under_a_target_that_not_even_one_stream_meets():
    scheduler = scheduler_of(with_target(0.001), *[60] * 40)
    decodes_of(scheduler, 60)
    assert scheduler.stats().running > 10


def test_streams_that_will_be_late_when_their_contexts_have_grown_wait_at_once():
    short, long = (
        scheduler_of(policy_of, blocks=8192, max_sequences=64) for policy_of in (with_target(12.0), with_target(12.0))
    )
    for scheduler, length in ((short, 20), (long, 900)):
        for request in create_requests(*[60] * 64, max_tokens=length):
            scheduler.add(request)
        scheduler._policy.correction = settled()
        for _ in range(20):
            step(scheduler)
    assert long.stats().running < short.stats().running


def test_the_length_of_answers_is_learned_from_those_that_ended():
    scheduler = scheduler_of(policy := with_target(50.0), *[10] * 300, max_sequences=8, blocks=8192)
    assert policy.streams.mean_answer == 1024
    while scheduler.has_work():
        step(scheduler)
    assert policy.streams.mean_answer == pytest.approx(100, rel=0.01)


def test_batch_requests_neither_wait_for_streams_nor_hold_them_up():
    scheduler = scheduler_of(policy := with_target(8.0))
    policy.correction = settled()
    lines = create_requests(*[60] * 50, max_tokens=400, priority=BATCH_CLASS)
    for request in lines[:40]:
        scheduler.add(request)
    while sum(segment.sampling is not None for segment in step(scheduler).segments) < 40:
        pass
    scheduler.add(replace(lines[40], id="stream", priority=0))
    step(scheduler)
    assert scheduler.stats().waiting == 0, "40 lines take longer than the target, but none of them is a stream"
    for request in lines[41:]:
        scheduler.add(request)
    while scheduler.stats().waiting:
        step(scheduler)
    assert scheduler.stats().running == 50
