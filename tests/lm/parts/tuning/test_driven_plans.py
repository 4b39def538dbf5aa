"""Driven jobs in the tuner: waiting for calls on the device, leaving it, turns, refusals, and the target of streams."""

from holdfast.lm.parts.tuning.training_room import LEAST_STEPS
from holdfast.lm.parts.tuning.turns import CALL_SECONDS, TURN_SECONDS
from holdfast.lm.parts.tuning.values import TrainingPlan
from holdfast.training.calls import Call
from tests.lm.parts.tuning.test_driven_histories import driven_steps
from tests.lm.parts.tuning.test_slices import RESERVE, TARGET, an_engine
from tests.lm.parts.tuning.test_tuner import answer, take
from tests.training_plans import a_request, blocks_of, cost_model, make_steps, make_tuner, room_of


def call(tuner, steps, kind="forward_backward", lengths=(16, 16), *, job="0"):
    """Add the next call of a driven job."""
    data = lengths if kind.startswith("forward") else ()
    steps.add(Call(number=steps.count, kind=kind, directory="d" if kind in ("save", "load") else ""), data)
    tuner.grow(job)


def driven(*, lent=100, vectors=2, **options):
    tuner, steps = make_tuner(**options), driven_steps("0", micro_batch=32)
    tuner.add("0", steps, blocks_of(vectors))
    tuner.lent = lent
    return tuner, steps


def test_a_job_without_a_call_stays_on_the_device_and_has_no_work():
    tuner, steps = driven()
    assert not (tuner.has_work or tuner.runs or tuner.rests) and tuner.status("0") == "queued"
    call(tuner, steps)
    call(tuner, steps, "optimize")
    assert [take(tuner).action for _ in range(3)] == ["restore", "run", "run"]
    assert tuner.rests and not (tuner.has_work or tuner.leaves or tuner.runs) and take(tuner) is None
    assert tuner.held == 2 and tuner.needs == (0, 0) and tuner.iteration_seconds() == 0.0
    call(tuner, steps)
    assert tuner.has_work and not tuner.rests and take(tuner).action == "run"


def test_a_resting_job_leaves_when_it_is_removed_or_when_another_job_has_the_turn():
    for tenant in ("", "other"):
        tuner, steps = driven()
        call(tuner, steps)
        assert [take(tuner).action for _ in range(2)] == ["restore", "run"]
        tuner.add("1", make_steps((16,) * 2, name="1", micro_batch=32), blocks_of(2), tenant=tenant)
        assert tuner.leaves and [take(tuner).action for _ in range(3)] == ["offload", "restore", "run"]
        call(tuner, steps)
        assert [take(tuner).job for _ in range(2)] == ["1", "0"]
    tuner.remove("0")
    assert take(tuner).action == "offload" and "0" in tuner.ended


def test_a_resting_job_gives_its_place_to_requests_that_need_it():
    tuner, steps = driven()
    call(tuner, steps)
    take(tuner), take(tuner)
    assert [tuner.held_after(action) for action in ("release", "drop", "offload")] == [None, None, 2]
    answer(tuner, tuner.act("offload"))
    tuner.begin()
    assert tuner.held == 0 and not (tuner.rests or tuner.has_work)
    call(tuner, steps)
    assert take(tuner).action == "restore"


def test_calls_with_nothing_to_compute_are_passed_over_without_a_slice():
    tuner, steps = driven()
    call(tuner, steps, "save")
    assert tuner.step_of("0") == (1, 1) and not tuner.has_work
    call(tuner, steps)
    call(tuner, steps, "save")
    steps.refuse(steps.count)
    call(tuner, steps, "load")
    assert [(take(tuner).action, tuner.step_of("0")[0]) for _ in range(3)] == [("restore", 1), ("run", 4), ("run", 5)]


def test_frequent_calls_are_served_between_the_steps_of_a_long_job_of_another_tenant():
    tuner, steps = driven(cost=cost_model(slope=0.01))
    tuner.add("1", make_steps((16,) * 4000, name="1", micro_batch=32), blocks_of(2), tenant="other")
    waits = []
    for _ in range(60):
        call(tuner, steps, lengths=(4,))
        before, waited = tuner.step_of("0")[0], 0
        while tuner.step_of("0")[0] == before:
            waited += (slice_ := take(tuner)).job == "1" and slice_.action == "run"
        waits.append(waited)
        for _ in range(4):
            take(tuner)
    seconds = tuner.cost.iteration((16, 16))
    assert (max(waits) - 1) * seconds <= CALL_SECONDS < 60 * seconds, "a call waits for the step under way, or a little"
    assert sum(waits) * seconds < 60 * CALL_SECONDS and tuner.step_of("1")[0] > 60


def test_a_queue_of_calls_does_not_keep_out_another_tenant():
    cost = cost_model(slope=0.01)
    tuner, steps = driven(cost=cost)
    tuner.add("1", make_steps((16,) * 4000, name="1", micro_batch=32), blocks_of(2), tenant="other")
    seconds = dict.fromkeys("01", 0.0)
    for _ in range(6000):
        while steps.count < tuner.step_of("0")[0] + 3:
            call(tuner, steps, lengths=(2,))
        if (slice_ := take(tuner)).action == "run":
            lengths = (2,) if slice_.job == "0" else (16, 16)
            seconds[slice_.job] += tuner.cost.iteration(lengths)
    assert abs(seconds["0"] - seconds["1"]) < 4 * TURN_SECONDS < seconds["0"]


def test_a_call_that_does_not_fit_is_refused_alone_with_the_numbers():
    tuner, steps = driven(max_blocks=5)
    outline = steps.outline(Call(number=0, kind="forward"), (16, 16))
    assert "needs 6 blocks of the cache for micro-batches of 32 tokens, and 5 may be" in tuner.refusal("0", outline)
    assert tuner.refusal("0", steps.outline(Call(number=0, kind="forward"), (16,))) == ""
    tuner, steps = driven(room=room_of(0.001))
    assert tuner.refusal("0", outline) == "", "the price of a step is not known yet"
    for _ in range(LEAST_STEPS):
        tuner.observe_step(1.0)
    assert "ms with 32 tokens, and a step has room for" in tuner.refusal("0", outline)
    assert tuner.refusal("0", steps.outline(Call(number=0, kind="save", directory="d"), ())) == ""
    assert not tuner.refused


def test_slices_of_calls_keep_the_target_between_tokens():
    engine = an_engine()
    engine.tuner.remove("job")
    steps = engine.jobs["driven"] = driven_steps("driven", micro_batch=32)
    engine.tuner.add("driven", steps, blocks_of(2))
    engine.add(a_request("r", tokens=120))
    for round_ in range(120):
        if round_ % 3 == 0:
            call(engine.tuner, steps, "forward_backward", (16, 16, 20), job="driven")
            call(engine.tuner, steps, "optimize", job="driven")
        engine.run(1)
    beside = 0
    for _, plan in engine.plans[5:]:
        if plan.segments and plan.part(TrainingPlan).slice:
            step = engine.predict([(segment.start, segment.stop) for segment in plan.segments])
            trained = engine.slice_seconds(plan.part(TrainingPlan).slice)
            assert step + trained <= TARGET * (1 - RESERVE) + 1e-9
            beside += trained > 0
    assert beside > 20 and engine.tuner.step_of("driven")[0] > 10
