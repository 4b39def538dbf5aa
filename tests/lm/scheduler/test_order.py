"""Orders: who goes first, who is displaced, and that nobody waits beyond the bound that each order states."""

from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.core.types import Identity, Request, SamplingParams
from holdfast.lm.choice import capacity_of, make_policy
from holdfast.lm.config import EngineConfig
from holdfast.lm.scheduler.order import Deadline, Fair, Fcfs, Priority, make_order
from tests.invariants import check_scheduler
from tests.scheduling import answer, create_requests, create_scheduler, spans

CHAT, BATCH = 0, 1


def step(scheduler, now=0.0):
    plan = scheduler.schedule(now)
    if plan is not None:
        scheduler.update(plan, answer(plan), now)
        check_scheduler(scheduler)
    return plan


def request(name, prompt=4, *, max_tokens=4, **options):
    tokens = tuple(range(100 * int(name) + 1000, 100 * int(name) + 1000 + prompt))
    return Request(str(name), tokens, SamplingParams(max_tokens=max_tokens), **options)


def started(scheduler, now=0.0):
    """The requests whose first positions a step computes."""
    plan = step(scheduler, now)
    return [name for name, start, _ in spans(plan) if start == 0] if plan else []


def test_make_order_follows_the_configuration():
    assert isinstance(make_order(EngineConfig(order="fcfs")), Fcfs)
    assert make_order(EngineConfig(priority_aging=60.0)).aging == 60.0
    assert make_order(EngineConfig(order="deadline")).ttft_target == 2.0
    assert make_order(EngineConfig(order="deadline", ttft_target=500.0)).ttft_target == 0.5
    assert make_order(EngineConfig(order="fair", fair_weight=3.0)).weight == 3.0


def test_fcfs_ranks_by_arrival_alone():
    early, late = request(0, arrival=1.0, priority=9), request(1, arrival=2.0, deadline=0.1)
    ranks = [Fcfs().rank(early, 1), Fcfs().rank(late, 0), Fcfs().rank(late, 2)]
    assert ranks == sorted(ranks)


def test_priority_ranks_by_class_then_arrival_then_number():
    urgent = request(0, priority=-1, arrival=9.0)
    early, late = request(1, arrival=1.0), request(2, arrival=2.0)
    order = Priority()
    ranks = [order.rank(urgent, 3), order.rank(early, 2), order.rank(late, 0), order.rank(late, 1)]
    assert ranks == sorted(ranks)


def test_aging_lifts_a_request_by_one_class():
    order = Priority(aging=10.0)
    batch = order.rank(request(0, priority=BATCH, arrival=0.0), 0)
    assert order.rank(request(1, arrival=9.0), 1) < batch < order.rank(request(2, arrival=11.0), 2)


def test_the_earliest_deadline_goes_first_with_the_target_as_default():
    scheduler = create_scheduler(order=Deadline(2.0))
    scheduler.add(request(0, arrival=0.0))
    scheduler.add(request(1, arrival=1.0, deadline=0.5))
    scheduler.add(request(2, arrival=0.5, deadline=30.0))
    scheduler.add(request(3, arrival=0.5, deadline=1.4))
    assert started(scheduler) == ["1", "3", "0", "2"]


def test_waiting_requests_start_by_class_then_arrival():
    scheduler = create_scheduler()
    requests = create_requests(2, 2, 2, 2)
    for each, level in zip(requests, (1, 0, 1, 0), strict=True):
        scheduler.add(replace(each, priority=level))
    assert started(scheduler) == ["1", "3", "0", "2"]


def full(policy="stall-free", rows=2, order=None, **options):
    """A scheduler whose rows batch requests 0, 1, … stand in, decoding."""
    capacity = capacity_of(policy, token_budget=64, max_model_len=128, max_sequences=rows, limit=1)
    scheduler = create_scheduler(
        policy=make_policy(policy, token_budget=64, capacity=capacity), max_sequences=rows, order=order, **options
    )
    for number in range(rows):
        scheduler.add(request(number, 5, max_tokens=20, priority=BATCH, arrival=float(number)))
    for _ in range(3):
        step(scheduler, 5.0)
    return scheduler


@pytest.mark.parametrize("policy", ["stall-free", "prefill-first", "hybrid-only", "unified"])
def test_a_chat_request_displaces_the_latest_batch_request_at_the_next_step(policy):
    scheduler = full(policy)
    scheduler.add(request(7, arrival=6.0))
    plan = step(scheduler, 6.0)
    assert plan.preempted == ("1",)
    assert ("7", 0, 4) in spans(plan)
    assert "1" not in {name for name, _, _ in spans(plan)}


def test_chunked_only_displaces_at_its_next_step_of_prompts():
    scheduler = full("chunked-only")
    scheduler.add(request(7, arrival=6.0))
    plans = [step(scheduler, 6.0) for _ in range(2)]
    assert [plan.preempted for plan in plans if ("7", 0, 4) in spans(plan)] == [("1",)]


@pytest.mark.parametrize("policy", ["request-level", "orca"])
def test_reserving_policies_displace_no_request(policy):
    scheduler = full(policy)
    scheduler.add(request(7, arrival=6.0))
    preempted = [step(scheduler, 6.0).preempted for _ in range(10)]
    assert set(preempted) == {()}


@pytest.mark.parametrize("order", [Fcfs(), Deadline(), Fair()])
def test_only_the_priority_order_displaces(order):
    scheduler = full(order=order)
    scheduler.add(request(7, arrival=6.0, deadline=0.1))
    assert step(scheduler, 6.0).preempted == ()


def test_no_request_is_displaced_by_its_own_class_or_while_rows_are_free():
    scheduler = full()
    scheduler.add(request(7, priority=BATCH, arrival=6.0))
    assert step(scheduler, 6.0).preempted == ()
    scheduler = full(rows=3)
    scheduler.abort("1")
    scheduler.add(request(7, arrival=6.0))
    assert step(scheduler, 6.0).preempted == ()


def test_a_request_older_than_the_aging_is_not_displaced():
    scheduler = full(order=Priority(aging=10.0))
    scheduler.add(request(7, arrival=12.0))
    assert step(scheduler, 12.0).preempted == ()


def test_requests_are_displaced_for_blocks_and_no_more_than_needed():
    scheduler = full(rows=3, block_size=4, blocks=9, max_model_len=48)
    scheduler.add(request(7, 21, arrival=6.0))
    scheduler.abort("0")
    plan = step(scheduler, 6.0)
    assert plan.preempted == ("2",)
    assert ("7", 0, 21) in spans(plan)


def test_what_is_spare_goes_to_the_first_waiting_request_alone():
    """Six blocks are spare and two requests take five each: the second has two of the three others displaced."""
    scheduler = full(rows=5, block_size=4, blocks=12, max_model_len=48)
    scheduler.abort("0")
    scheduler.abort("1")
    for number in (7, 8):
        scheduler.add(request(number, 20, arrival=6.0))
    plan = step(scheduler, 6.0)
    assert plan.preempted == ("4", "3")
    assert [span for span in spans(plan) if span[0] > "6"] == [("7", 0, 20), ("8", 0, 20)]


def test_no_more_requests_are_displaced_than_the_budget_has_room_for():
    scheduler = full(rows=4)
    scheduler._policy.token_budget = 30
    for number in (7, 8, 9):
        scheduler.add(request(number, 20, arrival=6.0))
    plan = step(scheduler, 6.0)
    assert plan.preempted == ("3", "2")
    assert [span for span in spans(plan) if span[0] > "6"] == [("7", 0, 20), ("8", 0, 8)]


def test_a_displaced_request_resumes_from_its_cached_blocks():
    scheduler = full(block_size=4)
    scheduler.add(request(7, arrival=6.0, max_tokens=2))
    plans = [step(scheduler, 6.0) for _ in range(4)]
    assert plans[0].preempted == ("1",)
    (again,) = [span for plan in plans[1:] for span in spans(plan) if span[0] == "1"][:1]
    assert again == ("1", 4, 8), "of eight tokens, the first block is full and was kept"


def test_a_displaced_request_resumes_after_its_token_in_flight_is_known():
    scheduler = full()
    flying = scheduler.schedule(6.0)
    scheduler.add(request(7, arrival=6.0, max_tokens=1))
    displacing = scheduler.schedule(6.0)
    assert displacing.preempted == ("1",)
    scheduler.update(flying, answer(flying, 42), 6.0)
    scheduler.update(displacing, answer(displacing), 6.0)
    plan = step(scheduler, 6.0)
    assert next(s for s in plan.segments if s.sequence_id == "1").tokens[-1] == 42


# The bounds.


class Waits:
    """Runs requests as they arrive, a step a second; notes who started while whom was waiting, and when all ended."""

    def __init__(self, order, arriving, **options):
        self.scheduler = create_scheduler(order=order, **options)
        self.requests = {request.id: request for request in arriving}
        self.ahead = set()
        """(who started, who waited meanwhile)"""
        self.started_at = {}
        due = sorted(arriving, key=lambda request: request.arrival)
        now = 0
        while due or self.scheduler.has_work():
            while due and due[0].arrival <= now:
                self.scheduler.add(due.pop(0))
            self.before_step()
            waiting = {name for name in self.scheduler._entries if name not in self.started_at}
            plan = self.scheduler.schedule(float(now))
            if plan is not None:
                fresh = {name for name, _, _ in spans(plan)} & waiting
                self.started_at |= dict.fromkeys(fresh, now)
                self.ahead |= {(first, other) for first in fresh for other in waiting - fresh}
                self.scheduler.update(plan, answer(plan), float(now))
            now += 1
            assert now < 20_000, "somebody starves"
        assert set(self.started_at) == set(self.requests)

    def before_step(self):
        pass


@st.composite
def arrivals(draw, most=14):
    return [
        request(
            number,
            draw(st.integers(1, 20)),
            max_tokens=draw(st.integers(1, 12)),
            arrival=float(draw(st.integers(0, 40))),
            priority=draw(st.integers(-2, 3)),
            deadline=draw(st.sampled_from((None, 1.0, 5.0, 60.0))),
            identity=Identity(tenant=draw(st.sampled_from("abc"))),
        )
        for number in range(draw(st.integers(2, most)))
    ]


tight = {"max_sequences": 2, "blocks": 12, "block_size": 4, "budget": 16, "max_model_len": 48}


@given(arrivals())
def test_fcfs_lets_no_later_request_pass(arriving):
    waits = Waits(Fcfs(), arriving, **tight)
    for first, other in waits.ahead:
        assert waits.requests[first].arrival <= waits.requests[other].arrival


@given(arrivals(), st.sampled_from((1.0, 7.0, 1e6)))
def test_a_class_passes_a_lower_one_only_within_the_aging(arriving, aging):
    waits = Waits(Priority(aging), arriving, **tight)
    for first, other in waits.ahead:
        ahead, behind = waits.requests[first], waits.requests[other]
        assert ahead.arrival - behind.arrival <= max(0, behind.priority - ahead.priority) * aging


@given(arrivals())
def test_a_request_that_arrives_after_a_deadline_ranks_behind_it(arriving):
    waits = Waits(Deadline(2.0), arriving, **tight)
    for first, other in waits.ahead:
        behind = waits.requests[other]
        assert waits.requests[first].arrival <= behind.arrival + (behind.deadline or 2.0)


@given(arrivals())
def test_fair_order_is_fcfs_within_a_tenant(arriving):
    waits = Waits(Fair(), arriving, **tight)
    for first, other in waits.ahead:
        ahead, behind = waits.requests[first], waits.requests[other]
        assert ahead.identity.tenant != behind.identity.tenant or ahead.arrival <= behind.arrival


def test_a_stream_of_chats_delays_a_batch_request_no_longer_than_the_aging():
    batch = request(0, priority=BATCH, arrival=0.5, max_tokens=3)
    chats = [request(number, arrival=float(number), max_tokens=2) for number in range(1, 60)]
    waits = Waits(Priority(aging=20.0), [batch, *chats], **{**tight, "max_sequences": 1})
    ahead = [chat for chat in chats if waits.started_at[chat.id] < waits.started_at["0"]]
    assert {chat.arrival for chat in ahead} == {float(number) for number in range(1, 21)}


@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(1, 20), st.integers(1, 12)), min_size=6, max_size=40))
def test_service_of_waiting_tenants_differs_by_at_most_the_bound(asked):
    order = Fair()
    bound = 2 * max(20, order.weight * tight["blocks"] * tight["block_size"])

    class Watched(Waits):
        def before_step(self):
            waiting = {
                entry.sequence.request.identity.tenant
                for name, entry in self.scheduler._entries.items()
                if name not in self.started_at
            }
            counters = [order.served[tenant] for tenant in waiting]
            assert not counters or max(counters) - min(counters) <= bound

    arriving = [
        request(number, prompt, max_tokens=most, identity=Identity(tenant=tenant))
        for number, (tenant, prompt, most) in enumerate(asked)
    ]
    Watched(order, arriving, **tight)


def test_a_tenant_that_floods_the_queue_gets_no_more_than_an_occasional_one():
    flood = [request(number, identity=Identity(tenant="flood")) for number in range(40)]
    modest = [request(number, identity=Identity(tenant="modest")) for number in range(40, 44)]
    waits = Waits(Fair(), [*flood, *modest], **{**tight, "max_sequences": 1})
    first_eight = Counter(
        waits.requests[name].identity.tenant for name in sorted(waits.started_at, key=waits.started_at.__getitem__)[:8]
    )
    assert first_eight == {"flood": 4, "modest": 4}


def test_an_idle_tenant_saves_up_no_service():
    order = Fair()
    busy = [request(number, identity=Identity(tenant="busy")) for number in range(20)]
    idle = [request(number, identity=Identity(tenant="idle"), arrival=40.0) for number in range(20, 30)]
    waits = Waits(order, [*busy, *idle], **{**tight, "max_sequences": 1})
    after = [name for name in waits.started_at if waits.started_at[name] >= 40][:6]
    assert Counter(waits.requests[name].identity.tenant for name in after) == {"busy": 3, "idle": 3}


def test_a_tenant_that_comes_back_starts_level_with_the_tenant_served_least():
    order = Fair()
    scheduler = create_scheduler(order=order, max_sequences=1)
    for number, (tenant, prompt) in enumerate((("a", 4), ("b", 40), ("a", 4), ("b", 4))):
        scheduler.add(request(number, prompt, max_tokens=1, identity=Identity(tenant=tenant)))
    for _ in range(2):
        step(scheduler)
    assert (order.served["a"], order.served["b"]) == (4 + 2, 40 + 2)
    scheduler.add(request(4, identity=Identity(tenant="c")))
    assert order.served["c"] == order.served["a"]


def test_cached_tokens_cost_a_tenant_nothing():
    order = Fair(weight=2.0)
    scheduler = create_scheduler(order=order, block_size=4)
    prompt = tuple(range(1, 11))
    for name in "01":
        scheduler.add(Request(name, prompt, SamplingParams(max_tokens=1), identity=Identity(tenant="a")))
        step(scheduler)
    assert order.served["a"] == (10 + 2) + (2 + 2)


def test_a_queue_by_tenant_goes_by_counter_and_then_by_rank_and_lists_everybody():
    order = Fair()
    scheduler = create_scheduler(order=order, max_sequences=1)
    scheduler.add(request(0, arrival=0.0))
    started(scheduler)
    for number, tenant in ((1, "b"), (2, "a"), (3, "b"), (4, "c")):
        scheduler.add(request(number, arrival=float(number), identity=Identity(tenant=tenant)))
    order.served.update(a=5.0, b=2.0, c=2.0)
    waiting = scheduler.queues.waiting
    assert [entry.id for entry in waiting] == ["1", "3", "4", "2"] and len(waiting) == 4
    order.served["b"] = 2.5
    assert waiting.first().id == "4"
    order.served["b"], order.served["c"] = 7.0, 7.0
    assert waiting.first().id == "2"
    for name in ("2", "4", "1", "3"):
        scheduler.abort(name)
    assert (waiting.first(), len(waiting), [*waiting]) == (None, 0, [])


def test_a_preempted_request_does_not_lift_its_tenant():
    order = Fair(weight=1.0)
    scheduler = create_scheduler(order=order, blocks=4, block_size=4)
    scheduler.add(request(0, 8, identity=Identity(tenant="a")))
    started(scheduler)
    order.served["b"] = 1000.0
    scheduler.queues.preempt(scheduler.entries["0"], 0.0)
    before = dict(order.served)
    scheduler.add(request(1, 8, identity=Identity(tenant="b")))
    assert order.served == before, "b is far ahead already, and a has saved nothing up"
    assert scheduler.queues.waiting.first().id == "0"


def test_a_request_that_finds_all_of_its_prompt_in_the_cache_costs_its_tenant_one_token_at_least():
    order = Fair(weight=0.5)
    scheduler = create_scheduler(order=order, block_size=1)
    for _ in range(2):
        scheduler.add(request(0, 4, max_tokens=1))
        step(scheduler)
    assert order.served[""] == 4 + 0.5 + 1 + 0.5


def test_a_class_waits_for_room_in_the_budget_and_for_its_tokens_in_flight_before_it_displaces():
    scheduler = full(rows=3)
    for number in (7, 8, 9):
        scheduler.add(request(number, 30, arrival=6.0))
    plan = step(scheduler, 6.0)
    assert plan.preempted == ("2", "1", "0"), "61 tokens have room, and each prompt takes 30"
    scheduler = full(rows=3)
    for number in (7, 8, 9):
        scheduler.add(request(number, 40, arrival=6.0))
    assert step(scheduler, 6.0).preempted == ("2", "1")


def test_a_request_displaces_nobody_whose_token_is_unknown():
    scheduler = full()
    scheduler.entries["1"].next_step = 1 << 40
    scheduler.add(request(7, arrival=6.0))
    plan = step(scheduler, 6.0)
    assert plan.preempted == ("0",)


def test_of_tenants_served_equally_the_one_whose_request_ranks_first_goes_first_and_is_listed_first():
    order = Fair()
    scheduler = create_scheduler(order=order, max_sequences=1)
    scheduler.add(request(0, arrival=0.0))
    started(scheduler)
    for number, tenant, arrival in ((1, "a", 5.0), (2, "b", 3.0), (3, "b", 9.0), (4, "c", 4.0)):
        scheduler.add(request(number, arrival=arrival, identity=Identity(tenant=tenant)))
    order.served.update(dict.fromkeys("abc", 7.0))
    waiting = scheduler.queues.waiting
    assert [entry.id for entry in waiting] == ["2", "3", "4", "1"] and waiting.first().id == "2"


@pytest.mark.parametrize(("headroom", "preempted"), [(0.0, ()), (0.3, ("0",))])
def test_a_request_displaces_others_where_only_the_headroom_would_hold_it(headroom, preempted):
    scheduler = create_scheduler(block_size=4, blocks=10, headroom=headroom)
    scheduler.add(request(0, 21, max_tokens=9, priority=BATCH))
    step(scheduler)
    scheduler.add(request(7, 12, arrival=6.0))
    plan = step(scheduler, 6.0)
    assert plan.preempted == preempted and ("7", 0, 12) in spans(plan)
