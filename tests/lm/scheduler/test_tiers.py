"""Plans with two tiers: turns that find their conversation wherever it is, holes, suspension, waiting for copies."""

import pytest

from holdfast.core.types import Identity
from holdfast.lm.memory.prices import LARGE, Prices
from holdfast.lm.scheduler.policies import StallFree
from tests.invariants import check_scheduler
from tests.scheduling import FakeDevice, answer, create_requests, create_scheduler, spans


def step(scheduler, now=0.0, **options):
    plan = scheduler.schedule(now)
    scheduler.update(plan, answer(plan, **options), now)
    check_scheduler(scheduler)
    return plan


def run(scheduler, request, now=0.0):
    """A request from start to end, alone; its plans."""
    scheduler.add(request)
    plans = []
    while scheduler.has_work():
        plans.append(step(scheduler, now))
    return plans


def one(prompt, name="0", **params):
    (request,) = create_requests(prompt, **{"max_tokens": 1, **params})
    return type(request)(name, request.prompt, request.params, request.priority)


def away(scheduler, tokens, now):
    """Fill the device with another conversation, so that what was there goes to the host, or is lost."""
    run(scheduler, one(tuple(range(9000 + int(now), 9000 + int(now) + tokens)), "filler"), now)


def test_the_next_turn_swaps_its_conversation_in_with_its_first_step():
    scheduler = create_scheduler(block_size=4, blocks=8, host_blocks=32)
    history = tuple(range(20))
    run(scheduler, one(history), now=0.0)
    away(scheduler, 30, now=50.0)
    assert scheduler.stats().blocks_swapped_out >= 4
    away(scheduler, 31, now=60.0)
    *_, plan = run(scheduler, one((*history, 99, 98)), now=70.0)
    assert spans(plan) == [("0", 20, 22)], "once there was room, it all came in at once"
    assert len(plan.copies.swap_in) == 5
    (write,) = plan.table_writes
    assert write.blocks[:5] == tuple(copy.target for copy in plan.copies.swap_in)
    assert scheduler.stats().blocks_swapped_in == 5


def test_blocks_that_are_slower_to_copy_than_to_compute_are_computed():
    scheduler = create_scheduler(block_size=4, blocks=8, host_blocks=32)
    pool, history = scheduler._queues.pool, tuple(range(20))
    pool.prices = Prices(lambda position: position / 10, block_size=4, block_bytes=4 * LARGE)
    run(scheduler, one(history), now=0.0)
    away(scheduler, 30, now=50.0)
    away(scheduler, 31, now=60.0)
    for _ in range(100):
        pool.host_link.observe(4 * LARGE, 5.0)  # seconds, and computing takes at most 2
    *_, plan = run(scheduler, one((*history, 99, 98)), now=70.0)
    assert not plan.copies.swap_in and spans(plan) == [("0", 0, 22)]


def dropped_front():
    """A conversation of 5 blocks whose first 2 are lost, without a host tier to keep them."""
    scheduler = create_scheduler(block_size=4, blocks=8, budget=64)
    history = tuple(range(20))
    run(scheduler, one(history), now=0.0)
    blocks = scheduler._queues.pool.allocate(5, 0.0)  # 3 were free
    scheduler._queues.pool.free(blocks, 0.0)
    return scheduler, history


def test_a_dropped_front_is_recomputed_with_the_new_prompt_and_the_kept_rest_is_not():
    scheduler, history = dropped_front()
    (plan,) = run(scheduler, one((*history, 99)), now=70.0)
    assert spans(plan) == [("0", 0, 8), ("0", 20, 21)]
    assert [segment.tokens for segment in plan.segments] == [history[:8], (99,)]
    assert [segment.sampling is None for segment in plan.segments] == [True, False]
    assert scheduler.stats().tokens_recovered == 8
    assert scheduler.stats().prefix_hits == 12


def test_a_long_recovery_is_cut_into_chunks_by_the_budget():
    scheduler, history = dropped_front()
    scheduler._policy.token_budget = 3
    plans = run(scheduler, one((*history, 99)), now=70.0)
    assert [spans(plan) for plan in plans] == [[("0", 0, 3)], [("0", 3, 6)], [("0", 6, 8), ("0", 20, 21)]]


def test_an_aborted_recovery_leaves_its_computed_blocks_cached():
    scheduler, history = dropped_front()
    scheduler._policy.token_budget = 5
    scheduler.add(one((*history, 99)))
    step(scheduler, 70.0)
    scheduler.abort("0")
    check_scheduler(scheduler)
    scheduler._policy.token_budget = 64
    (plan,) = run(scheduler, one((*history, 99), "1"), now=71.0)
    assert spans(plan) == [("1", 4, 8), ("1", 20, 21)]


def test_a_suspended_sequence_goes_to_the_host_and_resumes_before_new_work():
    scheduler = create_scheduler(block_size=4, blocks=6, host_blocks=8, max_sequences=2)
    first, second = create_requests(11, 11, max_tokens=12)
    scheduler.add(first)
    scheduler.add(second)
    (late,) = create_requests(4, max_tokens=1)
    scheduler.add(type(late)("late", late.prompt, late.params))
    plans = []
    while scheduler.has_work():
        plans.append(step(scheduler, float(len(plans))))
    (suspended,) = [plan for plan in plans if plan.preempted]
    assert suspended.preempted == ("1",)
    out = {copy.target for plan in plans for copy in plan.copies.swap_out}
    (resumed,) = [plan for plan in plans if plan.copies.swap_in]
    assert {copy.source for copy in resumed.copies.swap_in} <= out
    again = [spans(plan) for plan in plans if plan.step >= resumed.step]
    (name, start, _), *_ = again[0]
    assert (name, start) == ("1", 12), "its three full blocks are not computed again"
    assert all("late" not in {name for name, _, _ in spans(plan)} for plan in plans[: resumed.step])


def test_a_sequence_waits_for_a_copy_and_none_is_preempted_while_idle_blocks_remain():
    scheduler = create_scheduler(block_size=4, blocks=4, host_blocks=8, low_water=0.01)
    run(scheduler, one(tuple(range(8)), "idle"), now=0.0)
    scheduler.add(one(8, "1", max_tokens=4))
    first = step(scheduler, 5.0, swapped_out=-1)
    assert (spans(first), len(first.copies.swap_out)) == ([("1", 0, 8)], 1)
    plan = scheduler.schedule(6.0)
    assert (spans(plan), plan.preempted) == ([], ()), "no block is ready for position 8 before that copy is done"
    scheduler.update(plan, answer(plan), 6.0)
    assert spans(step(scheduler, 7.0)) == [("1", 8, 9)]


def test_admission_waits_until_the_idle_blocks_it_needs_are_on_the_host():
    scheduler = create_scheduler(block_size=4, blocks=4, host_blocks=8, low_water=0.01)
    run(scheduler, one(tuple(range(16)), "idle"), now=0.0)
    scheduler.add(one(16, "1"))
    plans = []
    while scheduler.has_work():
        plans.append(step(scheduler, 5.0 + len(plans)))
    assert [spans(plan) for plan in plans] == [[]] * 4 + [[("1", 0, 16)]]
    assert [len(plan.copies.swap_out) for plan in plans] == [1, 1, 1, 1, 0]
    assert scheduler.stats().host_blocks_cached == 4


def test_late_copies_delay_no_sequence_that_needs_no_block():
    scheduler = create_scheduler(block_size=4, blocks=8, host_blocks=8, low_water=0.9)
    run(scheduler, one(tuple(range(8)), "idle"), now=0.0)
    scheduler.add(one(5, "1", max_tokens=3))
    plans = [step(scheduler, 5.0, swapped_out=-1) for _ in range(3)]
    assert [spans(plan) for plan in plans] == [[("1", 0, 5)], [("1", 5, 6)], [("1", 6, 7)]]
    assert sum(len(plan.copies.swap_out) for plan in plans) == 2
    assert scheduler.stats().host_blocks_cached == 0


def on_the_host(*histories, **options):
    """A scheduler whose host tier alone has these conversations."""
    scheduler = create_scheduler(block_size=4, blocks=20, host_blocks=99, low_water=1.0, **options)
    for number, history in enumerate(histories):
        run(scheduler, one(history), now=float(number))
    for _ in range(40):
        run(scheduler, one((1,), "tick"), now=5.0)
    pool = scheduler._queues.pool
    pool.free(pool.allocate(20, 5.0), 5.0)
    return scheduler


def test_a_step_swaps_in_at_most_one_long_conversation():
    histories = [tuple(range(number, number + 17)) for number in (0, 100)]
    scheduler = on_the_host(*histories)
    for number, history in enumerate(histories):
        scheduler.add(one((*history, 99), str(number), max_tokens=3))
    first = step(scheduler, 6.0)
    assert (spans(first), len(first.copies.swap_in)) == ([("0", 16, 18)], 4)
    second = step(scheduler, 7.0)
    assert (spans(second), len(second.copies.swap_in)) == ([("0", 18, 19)], 4)
    assert spans(step(scheduler, 8.0)) == [("0", 19, 20), ("1", 16, 18)]


def beside_another(**options):
    """A scheduler with a decode that runs and a conversation on the host whose next turn is then added."""
    history = tuple(range(17))
    scheduler = on_the_host(history, **options)
    scheduler.add(one(3, "runs", max_tokens=9))
    alone = step(scheduler, 6.0)
    scheduler.add(one((*history, 99), "returns", max_tokens=2))
    return scheduler, alone


def test_a_conversation_swaps_in_beside_steps_of_others_that_do_not_wait():
    scheduler, alone = beside_another()
    assert alone.copies.awaits == -1
    first = step(scheduler, 7.0, swapped_in=-1)
    assert (spans(first), len(first.copies.swap_in), first.copies.awaits) == ([("runs", 3, 4)], 4, -1)
    assert spans(step(scheduler, 8.0, swapped_in=first.step - 1)) == [("runs", 4, 5)]
    assert spans(step(scheduler, 9.0, swapped_in=first.step)) == [("runs", 5, 6)]
    plan = step(scheduler, 10.0)
    assert (spans(plan), plan.copies.awaits) == ([("runs", 6, 7), ("returns", 16, 18)], -1)


def test_by_layer_a_conversation_joins_the_step_that_swaps_it_in_and_the_step_awaits_that():
    scheduler, _ = beside_another(by_layer=True)
    plan = step(scheduler, 7.0, swapped_in=-1)
    assert (spans(plan), len(plan.copies.swap_in)) == ([("runs", 3, 4), ("returns", 16, 18)], 4)
    assert plan.copies.awaits == plan.step
    after = step(scheduler, 8.0, swapped_in=-1)
    assert (spans(after), after.copies.awaits) == ([("runs", 4, 5), ("returns", 18, 19)], -1)


def test_by_layer_a_due_sequence_joins_the_step_that_swaps_it_in():
    class Due(StallFree):
        def plan(self, step):
            step.due = lambda entry: True
            super().plan(step)

    scheduler, _ = beside_another(by_layer=True, policy=Due(64))
    plan = step(scheduler, 7.0, swapped_in=-1)
    assert (spans(plan), plan.copies.awaits) == ([("runs", 3, 4), ("returns", 16, 18)], plan.step)


def test_a_sequence_alone_starts_at_once_and_its_step_awaits_its_copies():
    history = tuple(range(17))
    scheduler = on_the_host(history)
    scheduler.add(one((*history, 99), "returns", max_tokens=2))
    plan = step(scheduler, 6.0, swapped_in=-1)
    assert (spans(plan), plan.copies.awaits) == ([("returns", 16, 18)], plan.step)


def test_a_swapping_in_sequence_starts_when_the_others_have_ended():
    scheduler, _ = beside_another()
    first = step(scheduler, 7.0, swapped_in=-1)
    scheduler.abort("runs")
    plan = step(scheduler, 8.0, swapped_in=-1)
    assert (spans(plan), plan.copies.awaits) == ([("returns", 16, 18)], first.step)


def test_blocks_of_a_sequence_aborted_while_swapping_in_are_reused_after_its_copies():
    scheduler, _ = beside_another()
    first = step(scheduler, 7.0, swapped_in=-1)
    scheduler.abort("returns")
    check_scheduler(scheduler)
    assert step(scheduler, 8.0, swapped_in=-1).copies.awaits == first.step
    assert step(scheduler, 9.0, swapped_in=-1).copies.awaits == -1


def test_a_sequence_that_shares_blocks_being_swapped_in_waits_for_them():
    scheduler, _ = beside_another()
    first = step(scheduler, 7.0, swapped_in=-1)
    scheduler.add(one((*range(17), 98), "shares", max_tokens=2))
    second = step(scheduler, 8.0, swapped_in=-1)
    assert (spans(second), second.copies.swap_in) == ([("runs", 4, 5)], ())
    step(scheduler, 9.0, swapped_in=first.step)
    assert {name for name, _, _ in spans(step(scheduler, 10.0))} == {"runs", "returns", "shares"}


def test_a_waiting_turn_makes_its_conversation_recent():
    histories = [tuple(range(number, number + 9)) for number in (0, 100)]
    scheduler = create_scheduler(block_size=4, blocks=8, max_sequences=1)
    for number, history in enumerate(histories):
        run(scheduler, one(history), now=float(number))
    scheduler.add(one(3, "runs", max_tokens=8))
    step(scheduler, 50.0)
    scheduler.add(one(2, "waits first"))
    scheduler.add(one((*histories[0], 99), "waits"))
    pool = scheduler._queues.pool
    pool.free(pool.allocate(5, 50.0), 50.0)
    assert pool.cached == 2 and len(scheduler._entries["waits"].cache.match(range(9))) == 2


def test_equal_prefixes_are_stored_once_in_each_tier():
    scheduler = create_scheduler(block_size=4, blocks=16, host_blocks=16, low_water=1.0)
    system = tuple(range(8))
    for number in range(3):
        run(scheduler, one((*system, *range(100 * number, 100 * number + 4), 7), str(number)), now=float(number))
    for _ in range(20):
        run(scheduler, one((1,), "tick"), now=5.0)
    assert scheduler.stats().blocks_cached == 2 + 3
    assert scheduler.stats().host_blocks_cached == 2 + 3


def test_a_shared_prefix_is_as_recent_as_its_latest_user():
    scheduler = create_scheduler(block_size=4, blocks=6, eviction="lru")
    system = tuple(range(8))
    run(scheduler, one((*system, 50, 51, 52, 53, 54), "old"), now=0.0)
    run(scheduler, one((*system, 60, 61, 62, 63, 64), "new"), now=9.0)
    run(scheduler, one(9, "filler"), now=10.0)
    pool = scheduler._queues.pool
    assert pool.cached == 2 + 1 + 2, "the old conversation's own block went, not what it shares"
    (plan,) = run(scheduler, one((*system, 60, 61, 62, 63, 99), "again"), now=11.0)
    assert spans(plan) == [("again", 12, 13)]


def test_tenants_share_no_conversation_on_the_host():
    scheduler = create_scheduler(block_size=4, blocks=8, host_blocks=16, low_water=1.0)
    request = one(tuple(range(9)))
    run(scheduler, request)
    run(scheduler, one((1,), "tick"))
    other = type(request)("1", request.prompt, request.params, identity=Identity(tenant="other"))
    (plan,) = run(scheduler, other)
    assert spans(plan) == [("1", 0, 9)] and plan.copies.swap_in == ()


def test_the_fake_device_detects_a_block_that_changes_while_copied():
    """The check that the histories rest on."""
    scheduler = create_scheduler(block_size=4, blocks=4, host_blocks=8, low_water=1.0)
    device = FakeDevice(4, 4, 8)
    request = one(tuple(range(9)), max_tokens=2)
    device.expect(request)
    scheduler.add(request)
    plan = scheduler.schedule(0.0)
    device.submit(plan)
    scheduler.update(plan, device.collect(), 0.0)
    scheduler.abort("0")
    second = one(5, "1")
    device.expect(second)
    scheduler.add(second)
    plan = scheduler.schedule(1.0)
    assert plan.copies.swap_out
    device.slots[4 * plan.copies.swap_out[0].source] = "something else"
    device._begin_to_swap_out(plan)
    device.slots[4 * plan.copies.swap_out[0].source] = "changed"
    with pytest.raises(AssertionError, match="changed while it was copied"):
        device._complete_copies(plan)
