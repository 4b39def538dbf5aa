"""StepBuilder: the budget, admission, growth, preemption and drafted tokens."""

from dataclasses import replace

from holdfast.lm.scheduler.part import Part
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


class Lender(Part):
    """Makes room when asked, as often as it can."""

    name = "lender"

    def __init__(self, rooms):
        self.rooms, self.asked = list(rooms), []

    def attach(self, queues):
        self.queues = queues

    def make_room(self, blocks, now):
        self.asked.append(blocks)
        if not self.rooms:
            return False
        self.queues.pool.reclaim(self.rooms.pop(0))
        return True


def lending(lent, rooms, *prompts, **options):
    """A scheduler whose part has borrowed blocks and gives some back at each question."""
    lender = Lender(rooms)
    scheduler = filled(*prompts, block_size=4, parts=[lender], **options)
    scheduler.pool.lend(lent, 0.0, most_moves=0)
    return scheduler, lender


def test_a_part_gives_back_what_a_waiting_request_lacks_until_it_fits():
    scheduler, lender = lending(7, [1, 3], 16, blocks=8, headroom=0.25)
    assert spans(step(scheduler)) == [("0", 0, 16)]
    assert lender.asked == [3, 2], "no headroom while nothing runs"
    assert scheduler.pool.lent == 3


def test_a_request_waits_if_no_part_makes_room_and_gets_the_headroom_asked_for_too_while_others_run():
    scheduler, lender = lending(4, [], 4, 8, blocks=8, headroom=0.25)
    assert spans(step(scheduler)) == [("0", 0, 4)] and lender.asked == [1]
    assert spans(step(scheduler)) == [("0", 4, 5)], "it has grown, and 2 of the 2 left are set aside"
    assert lender.asked[1:] == [2]


def test_a_part_gives_blocks_back_before_anybody_is_preempted_and_growth_waits_while_any_are_lent():
    scheduler, lender = lending(2, [1], 4, 4, blocks=4, max_tokens=9)
    step(scheduler)
    plan = step(scheduler)
    assert (spans(plan), plan.preempted) == ([("0", 4, 5)], ()), "one came back; the other is still lent"
    assert lender.asked == [1, 1]
    scheduler.pool.reclaim(1)
    plan = step(scheduler)
    assert (spans(plan), plan.preempted) == ([("0", 5, 6), ("1", 4, 5)], ())


def test_a_waiting_request_of_a_higher_class_takes_lent_blocks_before_it_displaces_anybody():
    lender = Lender([3])
    scheduler = create_scheduler(block_size=4, blocks=8, max_sequences=4, parts=[lender])
    low, high = create_requests(8, 12, priority=5)
    scheduler.add(low)
    step(scheduler)
    scheduler.pool.lend(5, 0.0, most_moves=0)
    scheduler.add(replace(high, priority=0))
    plan = step(scheduler)
    assert plan.preempted == () and ("1", 0, 12) in spans(plan)
    assert lender.asked == [2] and scheduler.pool.lent == 2


class Steps(Part):
    """Acts on the step under construction."""

    name = "steps"

    def __init__(self, begin=lambda step: None, finish=lambda step: None):
        self._begin, self._finish = begin, finish

    def begin(self, step):
        self._begin(step)

    def finish(self, step):
        return self._finish(step)


def test_a_postponed_step_plans_nothing_unless_the_part_keeps_the_plan():
    for keeps in (False, True):
        part = Steps(lambda step: step.postpone(), (lambda step: step.keep()) if keeps else (lambda step: None))
        scheduler = filled(5, parts=[part])
        plan = scheduler.schedule(0.0)
        assert (plan is not None) == keeps and (not keeps or spans(plan) == [])
        assert scheduler.stats().waiting == 1


def test_a_kept_plan_is_made_although_others_are_in_flight_and_writes_stand_in_their_order():
    writes = [TableWrite(7, 0, (3,)), TableWrite(7, 1, (4,))]

    def finish(step):
        step.keep()
        step.write(writes)

    part = Steps(finish=finish)
    scheduler = filled(5, parts=[part], max_tokens=1, block_size=4)
    first, second = scheduler.schedule(0.0), scheduler.schedule(0.0)
    assert first.table_writes == (TableWrite(0, 0, (0, 1)), *writes)
    assert (spans(second), second.table_writes) == ([], tuple(writes))


def test_a_step_tells_its_parts_what_is_there():
    seen = []

    def look(step):
        counts = [entry.id for entry in step.resident], [entry.id for entry in step.waiting]
        seen.append((step.begun, step.busy, step.mostly_busy, step.in_flight, *counts))

    scheduler = filled(5, 5, 5, parts=[Steps(look)], max_sequences=3)
    scheduler.schedule(0.0)
    scheduler.abort_all()
    scheduler.schedule(0.0)
    assert seen == [
        (False, True, False, False, [], ["0", "1", "2"]),
        (False, False, False, True, [], []),
    ]
    seen.clear()
    scheduler = filled(5, 5, 5, parts=[Steps(finish=look)], max_sequences=3, budget=6)
    scheduler.schedule(0.0)
    assert seen == [(True, True, True, False, ["0", "1"], ["2"])]


def test_of_a_decode_the_token_can_be_given_and_its_place_is_known():
    class Giving(Part):
        name = "giving"

        def decoded(self, step):
            for decode in step.decodes:
                places.append((decode.entry.id, decode.segment, decode.place))
                step.give(decode, 40 + decode.segment)

    places = []
    scheduler = filled(5, 6, parts=[Giving()])
    step(scheduler)
    plan = step(scheduler)
    assert places == [("0", 0, 0), ("1", 1, 1)]
    assert [segment.tokens for segment in plan.segments] == [(40,), (41,)]


def test_a_draft_is_cut_at_the_budget_at_the_limit_and_at_the_free_blocks_and_sits_out_until_it_is_known():
    class Drafting(Part):
        name = "drafting"

        def decoded(self, step):
            for decode in step.decodes:
                added.append(step.extend(decode, (1, 2, 3, 4, 5, 6)))

    cases = (4, 20, 0, 3), (64, 4, 0, 2), (64, 3, 0, 1), (64, 20, 62, 2), (64, 20, 0, 6)
    for budget, tokens, lent, expected in cases:
        added = []
        scheduler = filled(5, parts=[Drafting()], budget=budget, max_tokens=tokens, block_size=4)
        for _ in range(2 if budget < 5 else 1):
            step(scheduler)
        scheduler.pool.lend(lent, 0.0, most_moves=0)
        plan = scheduler.schedule(0.0)
        assert added == [tuple(range(1, expected + 1))]
        assert plan.samples == (1 + expected,) and plan.segments[0].length == 1 + expected
        assert plan.num_tokens == 1 + expected <= budget
        assert scheduler.schedule(0.0) is None, "how many are right is not known"
