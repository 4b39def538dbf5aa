"""Slices of training in steps with streams: which steps get one, how large it is, and what goes before it."""

import random
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.core.types import BATCH_CLASS
from holdfast.lm.parts.tuning.planner import TuningPart
from holdfast.lm.parts.tuning.share import WINDOW_SECONDS
from holdfast.lm.parts.tuning.slices import BUSY_SECONDS, IDLE_SECONDS, RESERVE, WATCHED, TrainingSlices
from holdfast.lm.parts.tuning.training_room import TrainingRoom
from holdfast.lm.parts.tuning.values import TrainingPlan
from holdfast.lm.scheduler.entries import AWAITED
from holdfast.lm.scheduler.policies import LatencyTarget, StallFree
from holdfast.lm.scheduler.stream_limit import FIRST_GUESS
from tests.scheduling import create_scheduler
from tests.training_plans import FakeEngine, a_request, blocks_of, cost_model, make_steps, make_tuner

TARGET = 0.025


def an_engine(
    *,
    target=TARGET,
    cost=None,
    steps=None,
    ceiling=64,
    progress=False,
    share=0.05,
    tuning=None,
    inner=None,
    stages=1,
    **options,
):
    """An engine whose steps take what its cost model predicts."""
    cost = cost or cost_model(slope=0.0001)
    tuner = make_tuner(tuning or cost)
    part = TuningPart(tuner)
    inner = inner or LatencyTarget(cost, target, tile=4, ceiling=ceiling)
    policy = TrainingSlices(inner, part, cost, target, progress=progress, stages=stages, share=share)
    scheduler = create_scheduler(policy=policy, parts=[part], **{"max_sequences": 16, "blocks": 256, **options})
    engine = FakeEngine(scheduler, tuner, step_seconds=0.0)
    engine.predict = cost.predictor().segments
    engine.open("job", steps or make_steps([16] * 64, micro_batch=32, epochs=1000), blocks_of(2))
    return engine


def slices(engine):
    return [
        plan.part(TrainingPlan).slice
        for _, plan in engine.plans
        if plan.part(TrainingPlan).slice and plan.part(TrainingPlan).slice.action == "run"
    ]


@pytest.mark.parametrize("in_flight", [1, 2, 3])
def test_slices_of_an_idle_engine_follow_each_other_and_hold_a_prompt_up_for_ten_milliseconds(in_flight):
    engine = an_engine(tuning=cost_model(slope=0.00003, base=0.001))
    engine.steps_in_flight = in_flight
    engine.run(200)
    found = slices(engine)
    assert len(found) > 150
    at = 0
    for each in found:
        assert each.first == at
        at = each.stop % 10  # units of a micro-batch: two layers, a chunk of the head, and the optimizer
    waits = waits_of_prompts(engine)
    assert max(waits) <= IDLE_SECONDS + 1e-9
    assert sum(wait > IDLE_SECONDS / 2 for wait in waits) > 60 or in_flight == 1, "two are in flight most of the time"


def waits_of_prompts(engine):
    """How long a prompt would wait that came when each slice had just been planned, in seconds."""
    end, waits = 0.0, []
    for planned, plan in engine.plans:
        slice_ = plan.part(TrainingPlan).slice
        end = max(end, planned) + (engine.slice_seconds(slice_) if slice_ else 0.0)
        waits.append(end - planned)
    return waits


def test_no_slice_delays_a_stream_that_waits_for_the_result_of_its_step():
    engine = an_engine(ceiling=8)
    engine.steps_in_flight = 2
    engine.add(a_request("r", prompt=60))
    engine.run(4)
    (entry,) = engine.scheduler.entries.values()
    assert engine.in_flight and not engine.tuner.in_flight, "its prompt is computed, without slices"
    entry.decoding, entry.next_step = True, AWAITED  # as in a decode with drafts
    assert engine.scheduler.schedule(engine.now) is None


def test_nothing_is_planned_past_a_unit_that_is_long():
    engine = an_engine(tuning=cost_model(slope=0.001))
    engine.steps_in_flight = 2
    engine.run(40)
    longest = max(engine.slice_seconds(each) for each in slices(engine))
    assert all(each.stop == each.first + 1 for each in slices(engine)) and longest > IDLE_SECONDS
    assert max(waits_of_prompts(engine)) <= longest + 1e-9


def test_a_step_of_decodes_is_filled_up_to_the_target():
    engine = an_engine()
    engine.add(a_request("r", tokens=60))
    engine.run(50)
    for _, plan in engine.plans[5:]:
        step, trained = engine.predict([(s.start, s.stop) for s in plan.segments]), 0.0
        if plan.part(TrainingPlan).slice and plan.part(TrainingPlan).slice.action == "run":
            trained = engine.slice_seconds(plan.part(TrainingPlan).slice)
            units = len(engine.jobs["job"].micro_batches(0)[0].units)
            if plan.part(TrainingPlan).slice.stop < units:  # not cut by the micro-batch's end
                assert step + trained > 0.6 * TARGET
        assert step + trained <= TARGET


def test_the_steps_of_all_stages_share_what_is_left_of_the_target():
    longest = []
    for stages in (1, 2):
        engine = an_engine(stages=stages)
        engine.add(a_request("r", tokens=60))
        engine.run(50)
        steps = [(plan.part(TrainingPlan).slice, plan.segments) for _, plan in engine.plans[5:] if plan.segments]
        longest.append(max(engine.slice_seconds(each) for each, _ in steps if each and each.action == "run"))
    assert 0 < longest[1] <= 0.5 * TARGET < longest[0]


def test_a_unit_that_does_not_fit_beside_the_decodes_waits_until_nothing_runs():
    slow = cost_model(slope=0.01)
    engine = an_engine(tuning=slow)
    engine.add(a_request("r", tokens=20))
    engine.run(19)
    assert not slices(engine)
    engine.run(10)
    assert all(each.stop == each.first + 1 for each in slices(engine)) and len(slices(engine)) >= 5


@pytest.mark.parametrize("job_first", [True, False], ids=["job first", "steps first"])
def test_steps_in_service_set_the_price_by_which_a_job_is_taken(job_first):
    """All was measured five times too slow at the start, when the machine was busy: no unit had room."""
    cost, start = cost_model(slope=0.0001), cost_model(slope=0.0005, base=0.020)
    step = start.step([(1, 16)] * 32)
    room = TrainingRoom(TARGET, 1 - RESERVE, 32, step)
    assert room.seconds < 0
    tuner = make_tuner(start, room=room)
    part = TuningPart(tuner)
    policy = TrainingSlices(StallFree(64), part, start, TARGET)
    scheduler = create_scheduler(policy=policy, parts=[part], blocks=256, max_sequences=16)
    engine = FakeEngine(scheduler, tuner, step_seconds=0.0)
    engine.predict, engine.training_share = cost.predictor().segments, lambda: 0.2
    steps = make_steps([16] * 64, micro_batch=32, epochs=1000)
    if job_first:
        engine.open("job", steps, blocks_of(2))
    for number in range(1 if job_first else WATCHED):
        engine.add(a_request(str(number), tokens=70))
        engine.run(60 if job_first else 100)
    assert room.known and room.factor == pytest.approx(0.2, rel=0.15)
    if not job_first:
        engine.open("job", steps, blocks_of(2))
    assert not tuner.refused
    engine.add(a_request("stream", tokens=70))
    engine.run(60)
    assert any(plan.part(TrainingPlan).slice and plan.segments for _, plan in engine.plans), "beside the stream"


def test_chats_go_before_batches_and_batches_before_training():
    engine = an_engine(max_sequences=1)
    engine.add(a_request("chat", tokens=30))
    engine.run(3)
    assert slices(engine)
    before = len(slices(engine))
    engine.add(a_request("line", priority=BATCH_CLASS, tokens=5))
    engine.run(3)
    assert len(slices(engine)) > before, "a batch's line that waits for a row holds nothing up"
    engine.add(a_request("chat 2", tokens=5))
    before = len(slices(engine))
    engine.run(3)
    assert len(slices(engine)) == before


def shares(engine, began=0.0):
    """The shares of the time since `began` that steps of inference and slices took."""
    inference = trained = 0.0
    for at, plan in engine.plans:
        if at >= began:
            inference += engine.predict([(s.start, s.stop) for s in plan.segments]) if plan.segments else 0.0
            slice_ = plan.part(TrainingPlan).slice
            trained += engine.slice_seconds(slice_) if slice_ else 0.0
    return inference / (engine.now - began), trained / (engine.now - began)


@pytest.mark.parametrize("share", [0.0, 0.05, 0.2, 0.6, 1.0])
@pytest.mark.parametrize("in_flight", [1, 2])
def test_while_a_batch_has_work_training_takes_its_share_of_the_time(share, in_flight):
    steps = make_steps([64] * 64, micro_batch=256, epochs=1000, batch_size=4)
    engine = an_engine(share=share, steps=steps, blocks=1024)
    engine.steps_in_flight = in_flight
    for number in range(256):
        engine.add(a_request(str(number), priority=BATCH_CLASS, prompt=8, tokens=100))
    while engine.now < 5:
        engine.run(1)
    assert engine.scheduler.stats().waiting, "the batch has work until the end"
    inference, trained = shares(engine)
    assert inference + trained == pytest.approx(1.0, abs=0.01)
    if share < 1:
        assert 0.9 * share <= trained <= share + 0.005
    else:
        assert trained > 0.7, "each step is filled up to the target"


@pytest.mark.parametrize("lines", [4, 64])
def test_chats_beside_a_batch_and_training_keep_their_target_and_training_its_share(lines):
    """With 64 lines the batch alone would fill each step up to the target."""
    gaps = gaps_of_chats(lines, share=0.0)
    beside = gaps_of_chats(lines, share=0.05)
    assert len(beside) > 300 and max(beside) <= max(TARGET, *gaps) + 1e-9


def gaps_of_chats(lines, share):
    """Seconds between the tokens of chats next to a batch of `lines` lines."""
    engine = an_engine(cost=cost_model(slope=0.0005), share=share, max_sequences=72, blocks=2048)
    for number in range(256):
        engine.add(a_request(f"line {number}", priority=BATCH_CLASS, prompt=8, tokens=100))
        engine.due.append(a_request(f"chat {number}", arrival=0.4 * number, prompt=8, tokens=10))
    while engine.now < 20:
        engine.run(1)
        if len([name for name in engine.scheduler.entries if name.startswith("line")]) < lines:
            engine.add(a_request(f"more at {engine.now}", priority=BATCH_CLASS, prompt=8, tokens=100))
    assert 0.9 * share <= shares(engine)[1] <= 1.1 * share
    times = {}
    for (_, plan), (end, _) in pairwise(engine.plans):
        for segment in plan.segments:
            times.setdefault(segment.sequence_id, []).append(end)
    return [
        later - earlier
        for name, found in times.items() if name.startswith("chat")
        for earlier, later in pairwise(found)
    ]  # fmt: skip


def test_training_beside_chats_alone_takes_what_they_leave_of_the_target_whatever_its_share():
    engine = an_engine(share=0.0)
    engine.add(a_request("chat", tokens=110))
    engine.run(60)
    assert shares(engine)[1] > 0.5


def test_training_takes_all_of_the_time_again_when_the_batch_has_ended():
    engine = an_engine(share=0.0)
    engine.add(a_request("line", priority=BATCH_CLASS, tokens=50))
    engine.run(50)
    assert not slices(engine)
    began = engine.now
    engine.run(20)
    assert shares(engine, began)[1] > 0.9


def test_a_share_that_could_not_run_is_taken_later_but_no_more_than_thirty_seconds_hold():
    engine = an_engine(share=0.1, max_sequences=1)
    engine.add(a_request("chat", arrival=0.0, tokens=100))
    engine.add(a_request("line", arrival=0.0, priority=BATCH_CLASS, tokens=100))
    engine.add(a_request("next chat", arrival=0.0, tokens=100))
    engine.run(90)
    assert not slices(engine), "a chat waits all the time"
    engine.now += 1000.0
    began = engine.now
    engine.scheduler.abort("next chat")
    for number in range(100):
        engine.add(a_request(str(number), arrival=began, priority=BATCH_CLASS, tokens=100))
    while engine.now < began + 20:
        engine.run(1)
    assert shares(engine, began)[1] * 20 == pytest.approx(0.1 * (WINDOW_SECONDS + 20), rel=0.05)


def test_no_share_is_saved_up_while_there_is_no_job():
    engine = an_engine(share=0.1, max_sequences=4)
    engine.tuner.remove("job")
    for number in range(400):
        engine.add(a_request(str(number), arrival=0.0, priority=BATCH_CLASS, tokens=100))
    engine.run(3)
    assert not engine.tuner.has_work
    engine.now += 1000.0
    engine.run(3)
    engine.open("next job", make_steps([16] * 64, name="next job", micro_batch=32, epochs=1000), blocks_of(2))
    began = engine.now
    while engine.now < began + 5:
        engine.run(1)
    assert engine.scheduler.stats().waiting, "the batch has work until the end"
    assert 0.08 < shares(engine, began)[1] < 0.11


@pytest.mark.parametrize("share", [-0.1, 1.1, float("nan")])
def test_a_share_that_is_no_share_is_refused(share):
    with pytest.raises(ValueError, match="tuning_share is"):
        an_engine(share=share)


def test_no_slice_runs_beside_a_prompt_of_a_stream_that_is_not_whole():
    engine = an_engine(ceiling=8)
    engine.add(a_request("r", prompt=30))
    engine.run(3)
    assert not slices(engine)
    engine.run(2)
    assert slices(engine)


def test_a_busy_engine_trains_again_only_after_a_quiet_second():
    engine = an_engine(max_sequences=2)
    for number in range(2):
        engine.add(a_request(str(number), tokens=110))
    engine.run(2)
    engine.add(a_request("waits", tokens=2))
    engine.run(1)
    engine.scheduler.abort("waits")
    seen = engine.now
    before = len(slices(engine))
    while len(slices(engine)) == before:
        engine.now += 0.01
        engine.run(1)
    assert engine.plans[-1][0] >= seen + BUSY_SECONDS - 0.03


def test_with_progress_a_unit_runs_every_two_seconds_however_full_the_steps_are():
    slow = cost_model(slope=0.01)
    engine = an_engine(tuning=slow, progress=True)
    engine.add(a_request("r", tokens=110))
    for _ in range(100):
        engine.now += 0.06
        engine.run(1)
    times = [time for time, plan in engine.plans if plan.part(TrainingPlan).slice]
    assert 2 <= len(times) <= 4
    assert all(later - earlier >= 2.0 for earlier, later in pairwise(times[1:]))


def test_a_complete_job_leaves_the_device_within_two_seconds_however_full_the_steps_are():
    engine = an_engine(max_sequences=1)
    engine.run(2)
    engine.tuner.cost.block_seconds = 1.0
    engine.tuner.remove("job")
    engine.add(a_request("runs", tokens=110))
    engine.add(a_request("waits", tokens=110))
    while not engine.tuner.ended:
        engine.now += 0.05
        engine.run(1)
        assert engine.now < 2.2


def test_measured_units_correct_the_size_of_slices():
    """The device takes a fifth longer for units than is predicted: slices become smaller."""
    engine = an_engine()
    engine.training_share = lambda: 1.2
    engine.add(a_request("r", tokens=110))
    engine.run(100)
    late = [plan for _, plan in engine.plans[60:] if plan.part(TrainingPlan).slice]
    spent = [1.2 * engine.slice_seconds(plan.part(TrainingPlan).slice) for plan in late]
    assert max(spent) <= TARGET - 0.004 and max(spent) > 0.5 * (TARGET - 0.004)


def test_the_policy_beneath_learns_from_what_ends_and_from_reports_of_the_pace():
    engine = an_engine(inner=(inner := LatencyTarget(cost_model(slope=0.0001), TARGET, tile=4, ceiling=64)))
    noted = []
    inner.note_waits = lambda count, late: noted.append((count, late))
    engine.scheduler.note_waits(7, 2)
    engine.add(a_request("stream", tokens=20))
    engine.run(60)
    assert noted == [(7, 2)]
    assert inner.streams.mean_answer < FIRST_GUESS


def test_measured_steps_correct_the_room_that_is_left_to_slices():
    """The device takes twice as long for steps as is predicted, and for units what is predicted."""
    engine = an_engine(inner=StallFree(16))
    engine.step_share = lambda: 2.0
    engine.add(a_request("r", tokens=110))
    engine.run(100)
    late = [plan for _, plan in engine.plans[60:] if plan.part(TrainingPlan).slice]
    spent = [
        2.0 * engine.predict([(s.start, s.stop) for s in plan.segments])
        + engine.slice_seconds(plan.part(TrainingPlan).slice)
        for plan in late
    ]
    assert 0.7 * TARGET < max(spent) <= TARGET


def test_a_fixed_budget_computed_once_has_slices_too():
    engine = an_engine(inner=StallFree(16))
    engine.add(a_request("r", tokens=30))
    engine.run(20)
    assert slices(engine)


@settings(max_examples=40)
@given(
    seed=st.integers(0, 1 << 32),
    target=st.sampled_from((0.008, 0.025, 0.08)),
    in_flight=st.sampled_from((1, 2)),
)
def test_a_slice_never_makes_a_predicted_step_exceed_the_target(seed, target, in_flight):
    """Also not the first ones, before anything was measured. The device takes what is predicted.

    A step that holds only a batch keeps no stream waiting, so only its slice is bounded.
    """
    choose = random.Random(seed)
    slope = choose.choice((0.00005, 0.0002, 0.001))
    lengths = [choose.randint(4, 64) for _ in range(32)]
    steps = make_steps(lengths, micro_batch=128, epochs=1000, validation=[8, 30])
    engine = an_engine(target=target, cost=cost_model(slope=slope), steps=steps, ceiling=choose.choice((8, 64)))
    engine.steps_in_flight = in_flight
    at, classes = 0.0, dict[str, int]()
    for number in range(30):
        at += choose.expovariate(10.0)
        classes[str(number)] = choose.choice((0, BATCH_CLASS))
        engine.due.append(
            a_request(
                str(number), arrival=at, prompt=choose.randint(1, 60), tokens=choose.randint(1, 40),
                priority=classes[str(number)],
            )
        )  # fmt: skip
    engine.run(150)
    for _, plan in engine.plans:
        if not plan.part(TrainingPlan).slice or plan.part(TrainingPlan).slice.action != "run" or not plan.segments:
            continue
        step = 0.0
        if any(classes[segment.sequence_id] < BATCH_CLASS for segment in plan.segments):
            step = engine.predict([(segment.start, segment.stop) for segment in plan.segments])
        assert step + engine.slice_seconds(plan.part(TrainingPlan).slice) <= target * (1 - RESERVE) + 1e-12


def test_a_target_of_nothing_is_refused():
    with pytest.raises(ValueError, match="target is 0"):
        TrainingSlices(StallFree(8), TuningPart(make_tuner()), cost_model(), 0.0)
