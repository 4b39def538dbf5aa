"""FineInfer's deferral rule (FT-A): by hand, and its bound over random arrivals."""

import random
from itertools import pairwise
from math import inf

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.core.types import BATCH_CLASS
from holdfast.lm.parts.tuning.deferral import Deferred
from holdfast.lm.parts.tuning.planner import TuningPart
from holdfast.lm.parts.tuning.values import TrainingPlan
from holdfast.lm.scheduler.policies import StallFree
from tests.scheduling import create_scheduler, spans
from tests.training_plans import FakeEngine, a_request, blocks_of, cost_model, make_steps, make_tuner


def an_engine(bound, *, steps=None, budget=64, jobs=1, cost=None, share=0.05, **options):
    """Iterations of the job take what is predicted; a step of inference 10 ms."""
    tuner = make_tuner(cost or cost_model())
    part = TuningPart(tuner)
    policy = Deferred(StallFree(budget), part, bound, share=share)
    scheduler = create_scheduler(policy=policy, parts=[part], blocks=256, **options)
    engine = FakeEngine(scheduler, tuner, step_seconds=0.01)
    for number in range(jobs):
        engine.open(f"job {number}", steps or make_steps([16] * 64, micro_batch=32), blocks_of(2))
    return engine


def kinds(engine):
    """The steps so far, in short: R a copy of vectors, T an iteration, I a step of inference."""
    return "".join(
        "I" if plan.segments else "T" if plan.part(TrainingPlan).slice.action == "run" else "R"
        for _, plan in engine.plans
    )


def follow_the_rule(engine, name, arrival, bound):
    """Step until the request starts: in the very first plan in which waited + T_ft is above the bound."""
    while name not in engine.started:
        must_start = engine.now - arrival + engine.tuner.iteration_seconds() > bound
        engine.run(1)
        assert (name in engine.started) == must_start


def test_without_requests_whole_iterations_follow_each_other():
    engine = an_engine(1.0)
    engine.run(4)
    assert kinds(engine) == "RTTT"
    assert [plan.part(TrainingPlan).slice.stop for _, plan in engine.plans[1:]] == [10] * 3, (
        "every unit up to the optimizer's"
    )


def test_a_request_waits_until_one_more_iteration_would_make_it_wait_beyond_the_bound():
    engine = an_engine(1.0)
    engine.run(2)
    arrival = engine.now
    engine.add(a_request("r", arrival=arrival))
    follow_the_rule(engine, "r", arrival, bound=1.0)
    assert kinds(engine)[-2:] == "TI" and 0.8 < engine.started["r"] - arrival <= 1.0


def test_with_a_bound_of_zero_a_request_starts_before_the_next_iteration():
    engine = an_engine(0.0)
    engine.run(3)
    engine.add(a_request("r", arrival=engine.now, tokens=3))
    engine.run(5)
    assert kinds(engine) == "RTTIIITT"


def test_with_an_infinite_bound_training_runs_to_its_end_first():
    engine = an_engine(inf, steps=make_steps([16] * 8, micro_batch=32))
    engine.add(a_request("r", arrival=0.0, tokens=2))
    engine.run(8)
    assert kinds(engine) == "RTTTTII"
    assert engine.plans[5][1].part(TrainingPlan).slice.action == "offload", "the job leaves the device at once"
    assert [*engine.tuner.ended] == ["job 0"]


def test_no_iteration_begins_while_anything_runs():
    engine = an_engine(0.0)
    engine.add(a_request("r", arrival=0.0, tokens=20))
    engine.run(40)
    assert kinds(engine) == "I" * 20 + "R" + "T" * 19


def test_a_request_is_not_deferred_while_no_iteration_could_end_before_it_is_due():
    engine = an_engine(1.0)
    engine.add(a_request("first", arrival=-5.0, tokens=120))
    engine.run(2)
    arrival = engine.now
    engine.add(a_request("second", arrival=arrival))
    engine.run(1)
    assert engine.started["second"] == arrival, "the first runs for another 1.2 s"
    assert engine.scheduler.stats().deferred_seconds == 0.0


def test_a_request_is_deferred_if_the_running_ones_end_early_enough_for_an_iteration():
    engine = an_engine(1.0)
    engine.add(a_request("first", arrival=-5.0, tokens=30))
    engine.run(2)
    arrival = engine.now
    engine.add(a_request("second", arrival=arrival))
    engine.run(28)
    assert "second" not in engine.started, "the first has just ended"
    follow_the_rule(engine, "second", arrival, bound=1.0)
    assert kinds(engine).endswith("TI") and 0.8 < engine.started["second"] - arrival <= 1.0


def test_requests_that_follow_each_other_without_a_pause_wait_for_nothing():
    """A bound that is shorter than the answers: no iteration can ever begin, so nobody is held back for one."""
    engine = an_engine(0.5, max_sequences=4)
    for number in range(12):
        engine.due.append(a_request(str(number), arrival=0.3 * number if number else -5.0, tokens=100))
    engine.run_until("11")
    assert max(engine.started[str(number)] - 0.3 * number for number in range(1, 12)) <= 0.02
    assert "T" not in kinds(engine)


@pytest.mark.parametrize("share", [0.0, 0.05, 0.3])
def test_while_a_batch_runs_iterations_take_their_share_of_the_time(share):
    engine = an_engine(0.5, share=share, steps=make_steps([16] * 64, micro_batch=32, epochs=1000))
    engine.steps_in_flight = 2
    for number in range(32):
        engine.add(a_request(str(number), arrival=-5.0, tokens=120, priority=BATCH_CLASS))
    began = engine.now
    while engine.scheduler.entries and engine.now < 60:
        engine.run(1)
    slices = [plan.part(TrainingPlan).slice for _, plan in engine.plans]
    trained = sum(engine.slice_seconds(each) for each in slices if each and each.action == "run")
    assert trained / (engine.now - began) == pytest.approx(share, abs=0.02)
    units = len(engine.jobs["job 0"].micro_batches(0)[0].units)
    assert all((each.first, each.stop) == (0, units) for each in slices if each and each.action == "run")


def test_no_iteration_begins_beside_a_batch_while_a_stream_runs_or_waits():
    engine = an_engine(0.5, share=0.5, max_sequences=2)
    for number in range(8):
        engine.add(a_request(str(number), arrival=-5.0, tokens=110, priority=BATCH_CLASS))
    for number in range(6):
        engine.due.append(a_request(f"chat {number}", arrival=1.0 * number, tokens=20))
    running = []
    for _ in range(500):
        before = len(engine.plans)
        engine.run(1)
        streams = any(entry.sequence.request.priority < BATCH_CLASS for entry in engine.scheduler.entries.values())
        for _, plan in engine.plans[before:]:
            slice_ = plan.part(TrainingPlan).slice
            chats = any(segment.sequence_id.startswith("chat") for segment in plan.segments)
            running.append((bool(slice_ and slice_.action == "run"), chats or (streams and not plan.segments)))
    assert not any(trains and chats for trains, chats in running)
    assert sum(trains for trains, _ in running) > 5 and sum(chats for _, chats in running) > 50


def test_a_request_that_waited_long_enough_passes_those_ahead_of_it_that_have_not():
    engine = an_engine(1.0)
    engine.add(a_request("batch line", arrival=-0.9, priority=BATCH_CLASS))
    engine.add(a_request("chat", arrival=-0.01))
    engine.run_until("batch line")
    assert "chat" not in engine.started


def test_a_class_displaces_another_only_when_it_is_due():
    engine = an_engine(1.0, max_sequences=1)
    engine.add(a_request("batch line", arrival=-5.0, priority=BATCH_CLASS, tokens=100))
    engine.run(60)
    engine.add(a_request("chat", arrival=engine.now))
    engine.run(20)
    assert "chat" not in engine.started, "the line ends in 0.4 s, and an iteration would fit"
    engine.add(a_request("chat from before", arrival=-5.0))
    engine.run_until("chat from before")
    assert "chat" not in engine.started
    assert any("batch line" in plan.preempted for _, plan in engine.plans)


def test_due_requests_start_even_if_the_step_has_no_room_for_their_tokens():
    engine = an_engine(1.0, budget=8)
    for number in range(3):
        engine.add(a_request(str(number), arrival=-5.0 + number, prompt=8))
    engine.run(1)
    assert [*engine.started] == ["0", "1", "2"]
    assert spans(engine.plans[0][1]) == [("0", 0, 8)]


def test_the_time_that_requests_wait_by_the_rule_is_counted():
    engine = an_engine(1.0)
    engine.run(2)
    arrivals = {"first": engine.now, "second": engine.now + 0.05}
    for name, arrival in arrivals.items():
        engine.due.append(a_request(name, arrival=arrival, tokens=200))
    engine.run_until("second")
    engine.run(3)
    waited = sum(engine.started[name] - arrival for name, arrival in arrivals.items())
    one = engine.tuner.iteration_seconds()
    counted = engine.scheduler.stats().deferred_seconds
    assert waited - 2 * one < counted < waited
    assert counted == pytest.approx(2 * (1.0 - one), rel=0.05), "a request is due so long after it has come"


@pytest.mark.parametrize("bound", [0.0, 1.0, inf])
def test_a_request_counts_as_deferred_only_while_the_rule_holds_it_back(bound):
    engine = an_engine(bound, steps=make_steps([16] * 8, micro_batch=32))
    engine.run(1)
    engine.add(a_request("long ago", arrival=-5.0, tokens=3))
    engine.run_until("long ago")
    counted, start = engine.scheduler.stats().deferred_seconds, engine.started["long ago"]
    assert counted == (pytest.approx(start) if bound == inf else 0.0), "at most since there is a job"
    engine.run(20)
    assert [*engine.tuner.ended] == ["job 0"]
    engine.add(a_request("after the job", arrival=engine.now))
    engine.run(1)
    assert engine.scheduler.stats().deferred_seconds == counted


@pytest.mark.parametrize("change", ["pause", "remove"])
def test_nothing_is_deferred_without_a_job_that_can_run(change):
    engine = an_engine(100.0)
    engine.run(3)
    getattr(engine.tuner, change)("job 0")
    engine.add(a_request("r", arrival=engine.now))
    engine.run(1)
    assert "r" in engine.started


def test_a_preempted_request_is_not_deferred_again():
    engine = an_engine(inf, jobs=0)
    engine.add(a_request("line", arrival=0.0, priority=BATCH_CLASS, tokens=60))
    engine.run(2)
    engine.open("job", make_steps([16] * 4, micro_batch=32), blocks_of(2))
    (entry,) = engine.scheduler._queues.running
    engine.scheduler._queues.preempt(entry, engine.now)
    engine.scheduler._entries["line"].sequence.length = len(entry.sequence.tokens)
    engine.run(1)
    assert kinds(engine)[-1] == "I"


@pytest.mark.parametrize("bound", [-1.0, float("nan")])
def test_a_bound_below_zero_is_refused(bound):
    with pytest.raises(ValueError, match="deferral_bound"):
        Deferred(StallFree(8), TuningPart(make_tuner()), bound)


@settings(max_examples=settings().max_examples * 3 // 5)  # each runs a job for seconds of its clock
@given(
    seed=st.integers(0, 1 << 32),
    bound=st.sampled_from((0.0, 0.2, 0.5, 1.0, 3.0)),
    slope=st.sampled_from((0.0002, 0.002)),
    in_flight=st.sampled_from((1, 2)),
)
def test_nobody_waits_longer_than_the_bound_or_an_iteration_and_one_step_of_inference(seed, bound, slope, in_flight):
    """Units take 70 to 100% of what is predicted, so the estimate is an upper one, as it has to be."""
    choose = random.Random(seed)
    lengths = [choose.randint(8, 32) for _ in range(16)]
    steps = make_steps(lengths, micro_batch=64, epochs=40, batch_size=choose.choice((1, 4)), validation=[8])
    engine = an_engine(bound, steps=steps, cost=cost_model(slope), max_sequences=64)
    engine.steps_in_flight = in_flight
    engine.training_share = lambda: choose.uniform(0.7, 1.0)
    engine.step_share = lambda: choose.uniform(0.5, 3.0)
    arrivals = sorted(choose.uniform(0.0, 6.0) for _ in range(choose.randint(1, 30)))
    for number, arrival in enumerate(arrivals):
        engine.due.append(a_request(str(number), arrival=arrival, tokens=choose.randint(1, 25)))
    longest = 0.0
    while len(engine.started) < len(arrivals):
        longest = max(longest, engine.tuner.iteration_seconds())
        engine.run(1)
    inference = 0.03
    for number, arrival in enumerate(arrivals):
        assert engine.started[str(number)] - arrival <= max(bound, longest) + in_flight * inference + 1e-9


def test_requests_go_on_while_a_job_that_has_to_leave_is_copied_to_the_host():
    engine = an_engine(0.0)
    engine.steps_in_flight = 2
    engine.run(3)
    engine.add(a_request("r", arrival=engine.now, tokens=30))
    engine.run_until("r")
    engine.tuner.pause("job 0")
    before = len(engine.plans)
    engine.run(6)
    times, since = zip(*engine.plans[before:], strict=True)
    assert "offload" in {plan.part(TrainingPlan).slice.action for plan in since}
    assert all(plan.segments for plan in since), "no step waits for the copy"
    assert [after - at for at, after in pairwise(times)] == pytest.approx([0.01] * 5), (
        "each is planned as early as ever"
    )
