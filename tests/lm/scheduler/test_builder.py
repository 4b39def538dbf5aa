"""StepBuilder: the budget, admission, growth, preemption and drafted tokens."""

from holdfast.lm.types import TableWrite
from tests.invariants import check_scheduler
from tests.scheduling import answer, create_requests, create_scheduler, spans


def filled(*prompts, **options):
    """A scheduler that holds these prompts."""
    request_options = {name: options.pop(name) for name in ("max_tokens", "priority") if name in options}
    scheduler = create_scheduler(**options)
    for request in create_requests(*prompts, **request_options):
        scheduler.add(request)
    return scheduler


def step(scheduler):
    plan = scheduler.schedule(0.0)
    scheduler.update(plan, answer(plan), 0.0)
    check_scheduler(scheduler)
    return plan


def test_a_long_prompt_is_computed_in_chunks_and_only_the_last_samples():
    scheduler = filled(10, budget=4)
    plans = [step(scheduler) for _ in range(3)]
    assert [spans(plan) for plan in plans] == [[("0", 0, 4)], [("0", 4, 8)], [("0", 8, 10)]]
    assert [plan.segments[0].sampling is None for plan in plans] == [True, True, False]
    assert plans[1].segments[0].tokens == (1004, 1005, 1006, 1007)


def test_the_rest_of_the_budget_goes_to_the_next_request():
    assert spans(step(filled(3, 3, 3, budget=8))) == [("0", 0, 3), ("1", 0, 3), ("2", 0, 2)]


def test_a_budget_below_the_decodes_serves_the_first_in_rank():
    scheduler = filled(1, 1, 1, budget=3)
    step(scheduler)
    scheduler._policy.token_budget = 2
    assert spans(step(scheduler)) == [("0", 1, 2), ("1", 1, 2)]


def test_at_most_max_sequences_run_and_rows_are_reused():
    scheduler = filled(2, 2, 2, max_sequences=2, max_tokens=2)
    first = step(scheduler)
    assert [segment.row for segment in first.segments] == [0, 1]
    assert spans(step(scheduler)) == [("0", 2, 3), ("1", 2, 3)]
    (segment,) = step(scheduler).segments
    assert (segment.sequence_id, segment.row) == ("2", 1)


def test_block_table_is_written_at_admission_and_then_only_extended():
    scheduler = filled(7, block_size=4)
    plans = [step(scheduler) for _ in range(4)]
    assert [plan.table_writes for plan in plans] == [(TableWrite(0, 0, (0, 1)),), (), (TableWrite(0, 2, (2,)),), ()]


def test_block_table_includes_a_shared_prefix():
    scheduler = filled((1, 2, 3, 4, 5), (1, 2, 3, 4, 6), block_size=4)
    plan = scheduler.schedule(0.0)
    assert spans(plan) == [("0", 0, 5), ("1", 4, 5)], "the second reads what the first writes in the same step"
    assert [write.blocks for write in plan.table_writes] == [(0, 1), (0, 2)]


def test_admission_leaves_the_headroom_free_unless_nothing_runs():
    scheduler = filled(32, 4, block_size=4, blocks=10, headroom=0.2)
    assert spans(step(scheduler)) == [("0", 0, 32)], "8 blocks of 10 are taken; the last 2 are for growth"
    alone = filled(36, block_size=4, blocks=10, headroom=0.5)
    assert spans(step(alone)) == [("0", 0, 36)]


def test_cached_blocks_count_once_when_they_are_shared_again():
    prompt = tuple(range(13))
    scheduler = filled(prompt, max_tokens=1, block_size=4, blocks=4)
    step(scheduler)
    assert scheduler.stats().blocks_cached == 3
    for request in create_requests((*prompt[:12], 99), 5, max_tokens=1)[::-1]:
        scheduler.add(request)
    assert spans(step(scheduler)) == [("1", 0, 5)], (
        "2 blocks of 4 are left; the other request needs 3 cached and 1 more"
    )
    assert spans(step(scheduler))[0][0] == "0"


def test_a_request_that_does_not_fit_blocks_those_behind_it():
    scheduler = filled(20, 20, 1, block_size=4, blocks=8)
    assert spans(step(scheduler)) == [("0", 0, 20)]
    assert scheduler.stats().waiting == 2


def test_the_latest_arrival_is_preempted_and_later_resumes_with_its_tokens():
    scheduler = filled(4, 4, 4, block_size=4, blocks=4, max_tokens=5)
    step(scheduler)
    plan = step(scheduler)
    assert plan.preempted == ("2",)
    assert spans(plan) == [("0", 4, 5), ("1", 4, 5)]
    for _ in range(3):
        step(scheduler)
    plan = step(scheduler)
    assert spans(plan) == [("2", 0, 5)], "the prompt, and the token that it had already"
    assert plan.segments[0].tokens[-1] == 7
    assert scheduler.stats().preemptions == 1


def test_the_sequence_that_ranks_last_keeps_its_blocks_and_waits_for_one():
    scheduler = filled(4, 6, block_size=4, blocks=4, max_tokens=4)
    step(scheduler)
    assert spans(step(scheduler)) == [("0", 4, 5), ("1", 6, 7)]
    assert spans(step(scheduler)) == [("0", 5, 6), ("1", 7, 8)]
    scheduler = filled(4, 4, block_size=4, blocks=3, max_tokens=4)
    step(scheduler)
    plan = step(scheduler)
    assert (spans(plan), plan.preempted) == ([("0", 4, 5)], ())
    assert scheduler.stats().running == 2
    step(scheduler)
    step(scheduler)
    assert spans(step(scheduler)) == [("1", 4, 5)], "it never lost what it had"


def test_a_lower_class_is_preempted_even_if_it_arrived_first():
    scheduler = create_scheduler(block_size=4, blocks=3)
    early, late = create_requests(4, 4, priority=5)[0], create_requests(4, 4)[1]
    scheduler.add(early)
    step(scheduler)
    scheduler.add(late)
    assert spans(step(scheduler)) == [("0", 4, 5), ("1", 0, 4)]
    plan = step(scheduler)
    assert (spans(plan), plan.preempted) == ([("1", 4, 5)], ("0",))


def test_a_preempted_sequence_resumes_after_its_token_in_flight_is_known():
    scheduler = filled(4, 4, block_size=4, blocks=2, max_tokens=3)
    prefills, decode = scheduler.schedule(0.0), scheduler.schedule(0.0)
    assert (spans(decode), decode.preempted) == ([("0", 4, 5)], ("1",))
    outputs = scheduler.update(prefills, answer(prefills), 0.0)
    assert [(output.request_id, output.preemptions) for output in outputs] == [("0", 0), ("1", 1)]
    scheduler.abort("0")
    plan = scheduler.schedule(0.0)
    assert (spans(plan), plan.segments[0].tokens[-1]) == ([("1", 0, 5)], 7)


def test_a_preempted_sequence_with_a_token_in_flight_is_not_admitted_into_free_blocks():
    scheduler = filled(4, 4, block_size=4, blocks=2, max_tokens=3)
    prefills, _ = scheduler.schedule(0.0), scheduler.schedule(0.0)
    scheduler.abort("0")
    assert scheduler.schedule(0.0) is None
    scheduler.update(prefills, answer(prefills), 0.0)
    assert spans(scheduler.schedule(0.0)) == [("1", 0, 5)]


def test_a_preempted_sequence_can_end_by_its_token_in_flight():
    scheduler = filled(4, 4, block_size=4, blocks=2, max_tokens=3, eos=(2,))
    prefills, _ = scheduler.schedule(0.0), scheduler.schedule(0.0)
    scheduler.update(prefills, answer(prefills, 2), 0.0)
    assert not scheduler.has_work()
    assert (scheduler.stats().waiting, scheduler.stats().blocks_used) == (0, 0)
