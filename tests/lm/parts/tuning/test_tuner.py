"""The tuner: the queue of jobs, their turns and lifecycles, and what slices and their results do to it."""

import pytest

from holdfast.lm.parts.tuning.training_room import LEAST_STEPS
from holdfast.lm.parts.tuning.tuner import Needs
from holdfast.lm.parts.tuning.turns import TURN_SECONDS
from holdfast.lm.parts.tuning.values import TrainingReport
from tests.training_plans import blocks_of, cost_model, make_steps, make_tuner, room_of

UNITS = 10
"""Units of a micro-batch that ends with the optimizer's: two layers, and one chunk of the head."""


def a_tuner(jobs=1, *, lent=100, lengths=(16,) * 4, vectors=2, tenants=("",), **options):
    tuner = make_tuner(**options)
    for number in range(jobs):
        steps = make_steps(lengths, name=str(number), micro_batch=32)
        tuner.add(str(number), steps, blocks_of(vectors), tenant=tenants[number % len(tenants)])
    tuner.lent = lent
    return tuner


def answer(tuner, slice_, seconds=0.0, **more):
    tuner.observe(
        TrainingReport(
            slice_.job, slice_.step, slice_.micro_batch, slice_.action, slice_.first, slice_.stop, seconds, **more
        )
    )  # fmt: skip


def take(tuner, seconds=float("inf"), **options):
    tuner.begin()
    slice_ = tuner.next_slice(seconds, **options)
    if slice_ is not None:
        answer(tuner, slice_)
    return slice_


def finish(tuner):
    """All slices until nothing is left, in short."""
    found = []
    while (slice_ := take(tuner)) is not None:
        found.append((slice_.job, slice_.action, slice_.step))
    return found


def test_jobs_run_one_after_the_other_each_brought_to_the_device_and_taken_off():
    tuner = a_tuner(jobs=2)
    assert [tuner.status(name) for name in "01"] == ["running", "queued"]
    assert finish(tuner) == [
        ("0", "restore", 0), ("0", "run", 0), ("0", "run", 1), ("0", "offload", 2),
        ("1", "restore", 0), ("1", "run", 0), ("1", "run", 1), ("1", "offload", 2),
    ]  # fmt: skip
    assert [*tuner.ended] == ["0", "1"]
    assert not tuner.has_work and tuner.held == 0
    with pytest.raises(KeyError):
        tuner.status("0")


def test_a_job_has_ended_only_when_the_result_of_its_last_slice_is_known():
    tuner = a_tuner()
    slices = [tuner.next_slice(float("inf")) for _ in range(4)]
    assert [each.action for each in slices] == ["restore", "run", "run", "offload"]
    for each in slices[:3]:
        answer(tuner, each)
    assert not tuner.ended and tuner.status("0") == "ending" and tuner.in_flight == 1
    answer(tuner, slices[3])
    assert [*tuner.ended] == ["0"]


def test_slices_cut_a_micro_batch_where_the_time_ends():
    tuner = a_tuner()
    take(tuner)
    unit = tuner.cost.unit("attention", (16, 16)) * 1.35
    assert take(tuner, unit * 0.9) is None
    first = take(tuner, unit * 1.01)
    assert (first.first, first.stop) == (0, 1)
    assert take(tuner, 0.0, at_least_one=True).stop == 2
    assert (take(tuner).first, tuner.step_of("0")) == (2, (1, 2))


def test_a_slice_has_no_more_units_than_the_host_can_launch_in_time():
    tuner = a_tuner(lengths=(16,) * 800)
    tuner.max_launch_seconds = 0.010
    take(tuner)  # brings the job to the device

    def most_units(launch_seconds):
        taken = []
        for _ in range(60):
            slice_ = tuner.next_slice(float("inf"))
            taken.append(slice_.stop - slice_.first)
            answer(tuner, slice_, launch_seconds=launch_seconds * taken[-1])
        return max(taken[-10:])

    assert most_units(0.0) == UNITS, "it is not known"
    assert [most_units(each) for each in (0.002, 0.1, 0.0001)] == [4, 1, UNITS]


def test_a_step_begins_only_when_what_stores_the_job_keeps_up():
    tuner, behind = make_tuner(), [False]
    tuner.add("0", make_steps((16,) * 4, name="0", micro_batch=32), blocks_of(2), keeps_up=lambda: not behind[0])
    tuner.lent = 100
    take(tuner)
    assert take(tuner, 0.0, at_least_one=True).stop == 1
    behind[0] = True
    assert (take(tuner).first, tuner.step_of("0")) == (1, (1, 2)), "a step that has begun goes on"
    assert take(tuner) is None and not tuner.has_work and tuner.status("0") == "running" and tuner.runs
    behind[0] = False
    assert tuner.has_work and take(tuner).step == 1
    behind[0] = True
    assert tuner.has_work and take(tuner).action == "offload", "a job that is complete leaves"


def test_activations_are_kept_where_the_lent_blocks_hold_them():
    tuner = a_tuner(lent=2 + 3 * 4)
    assert tuner.needs == Needs(2 + 4, 2 + 12)
    take(tuner)
    assert take(tuner, 0.0, at_least_one=True).keep and tuner.held == 14
    tuner.act("release")
    tuner.lent = 6
    assert tuner.held == 6 and not take(tuner, 0.0, at_least_one=True).keep
    tuner.lent = 5
    assert take(tuner) is None, "nothing fits"


def test_what_an_action_leaves_is_known_before_it_is_taken():
    tuner = a_tuner()
    assert tuner.held_after("offload") is None
    take(tuner)
    assert (tuner.held_after("release"), tuner.held_after("drop"), tuner.held_after("offload")) == (None, None, 2)
    take(tuner, 0.0, at_least_one=True)
    assert [tuner.held_after(action) for action in ("release", "drop", "offload")] == [6, 2, 2]


def test_blocks_of_a_job_that_leaves_are_held_until_the_next_plan():
    tuner = a_tuner()
    take(tuner)
    tuner.begin()
    tuner.act("offload")
    assert tuner.held == 2
    tuner.begin()
    assert tuner.held == 0


def test_a_dropped_micro_batch_begins_again_and_earlier_ones_do_not():
    tuner = make_tuner()
    tuner.add("0", make_steps((16,) * 4, batch_size=4, micro_batch=32), blocks_of(2))
    tuner.lent = 100
    take(tuner)
    assert take(tuner).micro_batch == 0
    assert take(tuner, 0.0, at_least_one=True).micro_batch == 1
    assert tuner.act("drop").micro_batch == 1
    again = take(tuner)
    assert (again.step, again.micro_batch, again.first, again.stop) == (0, 1, 0, UNITS)


def test_a_paused_job_leaves_the_device_and_goes_on_where_it_stood():
    tuner = a_tuner(jobs=2)
    take(tuner), take(tuner)
    tuner.pause("0")
    assert tuner.status("0") == "paused"
    assert finish(tuner)[0] == ("0", "offload", 1)
    assert [*tuner.ended] == ["1"] and not tuner.has_work
    tuner.resume("0")
    assert finish(tuner) == [("0", "restore", 1), ("0", "run", 1), ("0", "offload", 2)]


def test_a_job_that_is_resumed_before_it_left_stays():
    tuner = a_tuner()
    take(tuner)
    tuner.pause("0")
    tuner.resume("0")
    assert take(tuner).action == "run"


def test_a_removed_job_ends_at_once_or_when_it_is_off_the_device():
    tuner = a_tuner(jobs=2)
    tuner.remove("1")
    assert [*tuner.ended] == ["1"]
    take(tuner)
    tuner.remove("0")
    assert tuner.status("0") == "ending" and tuner.has_work
    assert finish(tuner) == [("0", "offload", 0)] and [*tuner.ended] == ["1", "0"]
    tuner.remove("never there")


def test_a_job_goes_on_from_its_last_step_and_a_complete_one_has_ended():
    tuner = make_tuner()
    steps = make_steps((16,) * 4)
    tuner.add("half", steps, blocks_of(0), step=1)
    tuner.add("whole", steps, blocks_of(0), step=2)
    assert tuner.step_of("half") == (1, 2) and [*tuner.ended] == ["whole"]


def test_tenants_take_turns_between_steps_and_one_alone_is_never_interrupted():
    cost = cost_model(slope=1.0)  # an iteration of 32 tokens takes minutes
    tuner = a_tuner(jobs=3, tenants=("a", "b", "a"), lengths=(16,) * 8, cost=cost)
    turns = [job for job, action, _ in finish(tuner) if action == "restore"]
    assert tuner.cost.iteration((16, 16)) > TURN_SECONDS
    assert turns[:4] == ["0", "1", "0", "1"] and turns[-1] == "2", "each step is a turn; a tenant's jobs in their order"
    alone = a_tuner(jobs=2, lengths=(16,) * 8, cost=cost)
    assert [job for job, action, _ in finish(alone) if action == "restore"] == ["0", "1"]


def test_the_tenant_whose_last_turn_is_longest_ago_is_next():
    cost = cost_model(slope=1.0)  # each step is a turn
    tuner = a_tuner(jobs=3, tenants=("a", "b", "c"), lengths=(16,) * 8, cost=cost)
    turns = [job for job, action, _ in finish(tuner) if action == "restore"]
    assert turns[:6] == ["0", "1", "2", "0", "1", "2"]


def test_a_backward_without_kept_activations_takes_the_time_of_its_forward_too():
    tuner = a_tuner(lent=6)
    take(tuner)
    for _ in range(5):  # two layers and the head
        assert not take(tuner, 0.0, at_least_one=True).keep
    kept, again = (1.2 * tuner.cost.unit("mlp_backward", (16, 16), recompute=each) for each in (False, True))
    assert take(tuner, kept) is None
    assert take(tuner, 1.2 * again).stop == 6


def test_t_ft_is_an_upper_estimate_that_measured_times_correct():
    tuner = a_tuner(lengths=(16,) * 200)
    predicted = tuner.cost.iteration((16, 16))
    assert 1.2 * predicted < tuner.iteration_seconds() < 1.5 * predicted
    take(tuner)
    for _ in range(60):
        tuner.begin()
        answer(tuner, tuner.next_slice(float("inf")), 3 * predicted)
    assert tuner.iteration_seconds() == pytest.approx(3 * predicted, rel=0.05)
    tuner.pause("0")
    assert tuner.iteration_seconds() == 0.0


def test_copies_of_vectors_wait_for_room_but_not_for_more_than_any_step_has():
    for room, enough, little in ((0.5, 0.021, 0.019), (0.001, 0.002, 0.0005), (-0.1, 0.0, -0.001)):
        tuner = make_tuner(block_seconds=0.01, room=room_of(room))
        tuner.add("0", make_steps((16,) * 4, micro_batch=32), blocks_of(2))
        tuner.lent = 100
        assert take(tuner, little) is None and take(tuner, enough).action == "restore"
        tuner.pause("0")
        assert take(tuner, little) is None and take(tuner, enough).action == "offload"


def test_what_can_never_run_is_refused_with_the_numbers():
    tuner = make_tuner(max_blocks=5)
    with pytest.raises(
        ValueError, match="needs 6 blocks of the cache for micro-batches of 32 tokens, and 5 may be lent"
    ):
        tuner.add("0", make_steps((16,) * 4, micro_batch=32), blocks_of(2))
    tuner = make_tuner(room=room_of(0.001, exact=True))
    with pytest.raises(ValueError, match=r"job 0 .* takes .* ms with 32 tokens, and a step has room for 1.0 ms"):
        tuner.add("0", make_steps((16,) * 4, micro_batch=32), blocks_of(2))
    tuner = make_tuner(room=room_of(-0.002, step=0.006, exact=True))
    with pytest.raises(ValueError, match=r"tbt_target is 4 ms.* 32 decodes takes 6.0 ms, which leaves nothing"):
        tuner.add("0", make_steps((16,) * 4, micro_batch=32), blocks_of(2))
    tuner = a_tuner()
    with pytest.raises(ValueError, match="job 0 is in the queue already"):
        tuner.add("0", make_steps((16,)), blocks_of(2))
    with pytest.raises(ValueError, match="goes on from step 3; it has 2 steps"):
        tuner.add("1", make_steps((16,) * 4), blocks_of(2), step=3)


SLOW_START = 5.0
"""How much longer a step and all else was measured to take at the start than it takes in service."""


def a_tuner_after_a_busy_start():
    """Its steps and units take a fifth of their prices, by which a unit has no room and a step leaves nothing."""
    cost = cost_model(slope=0.001 * SLOW_START, base=0.004 * SLOW_START)
    longest = make_tuner(cost_model()).cost.largest_unit(32)
    step = 0.010 * SLOW_START
    return make_tuner(cost, room=room_of(0.012 + 1.5 * longest - step, step=step))


def measure_steps(tuner, ratio, count=LEAST_STEPS):
    for _ in range(count):
        tuner.observe_step(ratio)


def test_a_job_is_not_refused_by_a_price_that_no_step_in_service_has_confirmed():
    tuner = a_tuner_after_a_busy_start()
    assert tuner.max_unit_seconds < 0
    tuner.add("0", make_steps((16,) * 4, micro_batch=32), blocks_of(2))
    measure_steps(tuner, 1 / SLOW_START)
    assert tuner.max_unit_seconds > tuner.largest_unit(32), "what was not measured is as much cheaper"
    assert not tuner.refused and tuner.status("0") == "running"
    tuner.add("1", make_steps((16,) * 4, name="1", micro_batch=32), blocks_of(2))


def test_a_job_without_room_by_the_measured_price_is_refused_once_enough_steps_were_measured():
    tuner = a_tuner_after_a_busy_start()
    tuner.add("0", make_steps((16,) * 4, micro_batch=32), blocks_of(2))
    measure_steps(tuner, 1.0, LEAST_STEPS - 1)
    assert not tuner.refused
    tuner.observe_step(1.0)
    ((job, reason),) = tuner.refused
    assert job == "0" and "a step of 32 decodes takes 50.0 ms, which leaves nothing" in reason
    with pytest.raises(ValueError, match=r"job 1 has no room beside streams: .*leaves nothing"):
        tuner.add("1", make_steps((16,) * 4, name="1", micro_batch=32), blocks_of(2))
    measure_steps(tuner, 1.0)
    assert len(tuner.refused) == 1, "it is told once"


def test_a_refusal_is_not_final_as_the_price_follows_the_steps():
    tuner = a_tuner_after_a_busy_start()
    measure_steps(tuner, 1.0)
    steps = make_steps((16,) * 4, micro_batch=32)
    with pytest.raises(ValueError, match="has no room"):
        tuner.add("0", steps, blocks_of(2))
    measure_steps(tuner, 1 / SLOW_START)
    tuner.add("0", steps, blocks_of(2))


def test_a_job_that_has_ended_a_step_is_not_refused_by_a_price():
    tuner = a_tuner_after_a_busy_start()
    tuner.add("begun", make_steps((16,) * 4, micro_batch=32), blocks_of(2), step=1)
    tuner.add("0", make_steps((16,) * 4, micro_batch=32), blocks_of(2))
    tuner.lent = 100
    tuner.pause("begun")
    for _ in range(2):
        take(tuner)
    assert tuner.step_of("0")[0] == 1, "it ran while nothing else did"
    measure_steps(tuner, 1.0)
    assert not tuner.refused


def test_the_price_of_units_that_were_measured_is_their_own():
    tuner = make_tuner(room=room_of(1.0, exact=True))
    tuner.add("0", make_steps((16,) * 200, micro_batch=32), blocks_of(2))
    tuner.lent = 100
    take(tuner)
    predicted = tuner.cost.iteration((16, 16))
    for _ in range(60):
        answer(tuner, tuner.next_slice(float("inf")), 3 * predicted)
    measure_steps(tuner, 0.5)
    assert tuner.largest_unit(32) == pytest.approx(3 * tuner.cost.largest_unit(32), rel=0.1)
