"""Requests with adapters: each waits for its own adapter, holds nobody up meanwhile, and none starves."""

import random
from collections import Counter, deque
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.core.types import Identity, Request, SamplingParams
from holdfast.lm.limits import RequestRefused
from holdfast.lm.parts.adapters.planner import AdapterPart, adapter_of
from holdfast.lm.parts.adapters.pool import AdapterPool
from holdfast.lm.parts.adapters.values import AdapterPlan, AdapterResult
from holdfast.lm.scheduler.order import Fair, Fcfs, Priority
from holdfast.lm.scheduler.queue_report import report_queues
from holdfast.lm.types import StepResult, TierCopied
from tests.invariants import check_scheduler
from tests.long import then_long
from tests.scheduling import EOS, VOCABULARY, FakeDevice, answer, create_requests, create_scheduler, run_alone

MAX_MODEL_LEN = 48


class AdapterDevice(FakeDevice):
    """A device that checks at every segment that its slot holds its adapter. Loads complete as late as they may."""

    def __init__(self, *sizes, slots, adapters, choose=None, broken=()):
        super().__init__(*sizes, choose=choose)
        self.held = [None] * slots
        self.adapters = adapters
        """The adapter of each request, by id."""
        self.broken = broken
        """Adapters that can never be read."""
        self.loads = deque()
        self.written = set()
        """Slots whose loads have ended, and which no plan has completed."""
        self.complete = set()
        """Slots that a plan has completed."""

    def collect(self):
        plan = self.plans[0]
        for slot in plan.part(AdapterPlan).complete:
            self.written.remove(slot)
            self.complete.add(slot)
        for slot, adapter in plan.part(AdapterPlan).loads:
            self.written.discard(slot)
            self.complete.discard(slot)
            self.held[slot] = None
            self.loads.append((plan.step, slot, adapter))
        slots = plan.part(AdapterPlan).slots or (-1,) * len(plan.segments)
        assert len(slots) == len(plan.segments)
        for segment, slot in zip(plan.segments, slots, strict=True):
            wanted = self.adapters.get(segment.sequence_id, "")
            assert (self.held[slot] == wanted and slot in self.complete) if wanted else slot == -1
        result = super().collect()
        lost, done = [], plan.step
        while self.loads:
            if plan.segments and self.choose is not None and self.choose.random() < 0.5:
                done = self.loads[0][0] - 1
                break
            _, slot, adapter = self.loads.popleft()
            if adapter in self.broken:
                lost.append(adapter)
            else:
                self.held[slot] = adapter
                self.written.add(slot)
        return replace(result, parts=(AdapterResult(loaded=done, lost=tuple(lost)),))


def check_adapters(scheduler, part):
    """Every slot is in one state, pins and users are those of the sequences, and exactly the held ones are held."""
    queues, entries, pool = scheduler._queues, list(scheduler._entries.values()), part.pool
    used = Counter(adapter_of(entry) for entry in entries if adapter_of(entry) and entry.row >= 0)
    assert dict(pool.pinned) == dict(used)
    assert +pool.users == Counter(adapter_of(entry) for entry in entries if adapter_of(entry))
    waiting = {entry.id for entry in queues.waiting}
    for entry in entries:
        held, slot = entry in queues.held, part._slots.get(entry, -1)
        assert held == (entry in part._held)
        assert (entry.row < 0 and not held) == (entry.id in waiting)
        assert (slot == pool.slot(adapter_of(entry))) if entry.row >= 0 and adapter_of(entry) else slot == -1
        assert not (held and entry.row >= 0)
        if entry.id in waiting and adapter_of(entry):
            assert pool.slot(adapter_of(entry)) is not None
    assert queues.num_waiting == sum(entry.row < 0 for entry in entries)


def history(seed):
    """One random run: more adapters than slots, short memory, aborts, adapters that come, go, and cannot be read."""
    choose = random.Random(seed)
    block_size, slots = choose.choice((2, 4)), choose.choice((1, 1, 2, 3))
    blocks = choose.choice((1, 3)) * -(-MAX_MODEL_LEN // block_size)
    pool, adapters, requests = AdapterPool(slots), {}, {}
    part = AdapterPart(pool)
    broken = {f"x{number}" for number in range(choose.choice((0, 0, 2)))}
    scheduler = create_scheduler(
        budget=choose.choice((3, 16, 64)),
        blocks=blocks,
        block_size=block_size,
        max_sequences=choose.choice((1, 3, 8)),
        max_model_len=MAX_MODEL_LEN,
        eos=(EOS,),
        order=choose.choice((Priority(aging=5.0), Fcfs(), Fair())),
        host_blocks=choose.choice((0, 40)),
        parts=[part],
    )
    device = AdapterDevice(blocks, block_size, 40, slots=slots, adapters=adapters, choose=choose, broken=broken)
    names = [f"a{number}" for number in range(choose.choice((1, 4, 9)))] + sorted(broken)
    for name in names:
        part.add(name)
    plans, tokens, reasons, aborted, now, depth = deque(), {}, {}, set(), 0.0, choose.randint(1, 3)
    refused = set()
    for step in range(2000):
        now += 0.1
        if step < 120:
            while choose.random() < 0.4:
                number = len(requests)
                adapter = choose.choice(["", *names])
                prompt = tuple(choose.randrange(1, VOCABULARY) for _ in range(choose.randint(1, 30)))
                request = Request(
                    str(number), prompt, SamplingParams(max_tokens=choose.randint(1, 12)),
                    identity=Identity(adapter=adapter, tenant=choose.choice("st")), arrival=now,
                    priority=choose.randrange(3),
                )  # fmt: skip
                requests[request.id], tokens[request.id] = request, ()
                adapters[request.id] = adapter
                device.expect(request)
                scheduler.add(request)
            if requests and choose.random() < 0.05:
                aborted.add(name := choose.choice([*requests]))
                scheduler.abort(name)
        while len(plans) < depth and (plan := scheduler.schedule(now)) is not None:
            device.submit(plan)
            plans.append(plan)
        if not plans:
            assert not scheduler.has_work()
            if step >= 120:
                break
            continue
        plan = plans.popleft()
        for output in scheduler.update(plan, device.collect(), now):
            tokens[output.request_id] += output.tokens
            reasons[output.request_id] = output.finish_reason
        refused |= {request for request, _ in part.refused}
        check_scheduler(scheduler)
        check_adapters(scheduler, part)
    assert not scheduler.has_work(), "a request starves"
    for name, request in requests.items():
        if adapters[name] in broken:
            assert not tokens[name] and (name in refused or name in aborted)
        elif name not in aborted:
            assert (tokens[name], reasons[name]) == run_alone(request, eos=(EOS,), max_model_len=MAX_MODEL_LEN)
    assert not pool.pinned and pool.users.total() == 0
    return pool.loads


@pytest.mark.parametrize("seed", then_long(6, range(40)))
def test_random_histories_give_each_request_its_own_tokens_with_its_own_adapter(seed):
    history(seed)


@settings(max_examples=settings.default.max_examples // 4)  # each is a long history
@given(st.integers(0, 1 << 40))
def test_other_histories_do_too(seed):
    history(seed)


def with_adapter(request, adapter):
    return replace(request, identity=Identity(adapter=adapter))


def scheduler_of(*names, slots=1, **options):
    part = AdapterPart(AdapterPool(slots))
    scheduler = create_scheduler(parts=[part], **options)
    for name in names:
        part.add(name)
    return scheduler


def loaded(plan, token=7):
    """The result of a plan whose loads are complete."""
    return replace(answer(plan, token), parts=(AdapterResult(loaded=plan.step),))


def test_a_request_whose_adapter_is_being_loaded_holds_nobody_up():
    scheduler = scheduler_of("a")
    first, *others = create_requests(3, 3, 3)
    scheduler.add(with_adapter(first, "a"))
    for other in others:
        scheduler.add(other)
    plan = scheduler.schedule(0.0)
    assert [segment.sequence_id for segment in plan.segments] == ["1", "2"]
    assert [load.adapter for load in plan.part(AdapterPlan).loads] == ["a"] and plan.part(AdapterPlan).slots == ()
    scheduler.update(plan, loaded(plan), 0.0)
    plan = scheduler.schedule(0.0)
    assert [segment.sequence_id for segment in plan.segments] == ["1", "2", "0"]
    assert plan.part(AdapterPlan).slots == (-1, -1, 0)


def test_once_requests_with_adapters_have_ended_plans_name_no_slots_and_nothing_of_them_is_kept():
    scheduler = scheduler_of("a", "b", slots=2)
    first, second, other = create_requests(3, 3, 3, max_tokens=3)
    for request, adapter in ((first, "a"), (second, "b")):
        scheduler.add(with_adapter(request, adapter))
    while scheduler.has_work():
        plan = scheduler.schedule(0.0)
        scheduler.update(plan, loaded(plan), 0.0)
    scheduler.add(other)
    assert scheduler.schedule(0.0).part(AdapterPlan).slots == ()
    assert not scheduler.part(AdapterPart)._by_adapter


def test_with_nothing_else_to_run_a_plan_without_segments_waits_for_the_adapter():
    scheduler = scheduler_of("a")
    scheduler.add(with_adapter(create_requests(3)[0], "a"))
    plan = scheduler.schedule(0.0)
    assert not plan.segments and plan.part(AdapterPlan).loads
    assert scheduler.schedule(0.0) is None
    scheduler.update(plan, loaded(plan), 0.0)
    assert scheduler.schedule(0.0).part(AdapterPlan).slots == (0,)


def test_a_request_gets_a_slot_although_others_keep_the_only_one_busy():
    scheduler = scheduler_of("a", "b", max_sequences=4)
    requests = iter(create_requests(*[2] * 60, max_tokens=6))
    ended, running, step = [], set(), 0
    while "b" not in ended:
        step += 1
        assert step < 60, "adapter b never gets the slot"
        if step % 3 == 1:  # the next of them starts before the last one ends
            scheduler.add(with_adapter(next(requests), "a"))
        if step == 8:
            scheduler.add(replace(with_adapter(next(requests), "b"), id="b"))
        plan = scheduler.schedule(float(step))
        running |= {segment.sequence_id for segment in plan.segments}
        for output in scheduler.update(plan, loaded(plan), float(step)):
            if output.finish_reason is not None:
                ended.append(output.request_id)
    assert len(running) > 3


def test_those_ahead_of_a_reserved_slot_still_start():
    scheduler = scheduler_of("a", "b", max_sequences=4, order=Priority(aging=1e6))
    first, waits, ahead, behind = create_requests(2, 2, 2, 2, max_tokens=20)
    scheduler.add(with_adapter(first, "a"))
    for _ in range(2):
        plan = scheduler.schedule(0.0)
        scheduler.update(plan, loaded(plan), 0.0)
    scheduler.add(with_adapter(waits, "b"))
    plan = scheduler.schedule(0.0)
    scheduler.update(plan, loaded(plan), 0.0)
    scheduler.add(replace(with_adapter(behind, "a"), id="behind"))
    scheduler.add(replace(with_adapter(ahead, "a"), id="ahead", priority=-1))
    plan = scheduler.schedule(0.0)
    assert [segment.sequence_id for segment in plan.segments] == ["0", "ahead"]


def test_a_request_for_an_adapter_that_is_not_known_is_refused():
    scheduler = scheduler_of("a")
    with pytest.raises(RequestRefused, match="adapter is b, which this engine does not serve"):
        create = with_adapter(create_requests(3)[0], "b")
        scheduler_served = create_scheduler(parts=[AdapterPart(AdapterPool(1))], served=Identity("m"))
        scheduler_served.add(create)
    scheduler.add(with_adapter(create_requests(3)[0], "a"))


def test_an_adapter_is_forgotten_once_its_requests_have_ended():
    scheduler = scheduler_of("a", served=Identity("m"))
    request = with_adapter(create_requests(3)[0], "a")
    scheduler.add(request)
    scheduler.part(AdapterPart).remove("a")
    assert not scheduler.part(AdapterPart).retired
    scheduler.abort(request.id)
    assert list(scheduler.part(AdapterPart).retired) == ["a"] and scheduler.stats().adapters_known == 0
    with pytest.raises(RequestRefused):
        scheduler.add(request)


def test_requests_of_an_adapter_that_cannot_be_read_end_and_others_go_on():
    scheduler = scheduler_of("a")
    first, other = create_requests(3, 3)
    scheduler.add(with_adapter(first, "a"))
    scheduler.add(other)
    plan = scheduler.schedule(0.0)
    outputs = scheduler.update(plan, replace(loaded(plan), parts=(AdapterResult(plan.step, ("a",)),)), 0.0)
    assert [output.request_id for output in outputs] == ["1"]
    assert list(scheduler.part(AdapterPart).refused) == [("0", "a")]
    assert [segment.sequence_id for segment in scheduler.schedule(0.0).segments] == ["1"]


def test_adapters_are_counted():
    scheduler = scheduler_of("a", "b", slots=2)
    scheduler.add(with_adapter(create_requests(3)[0], "b"))
    plan = scheduler.schedule(0.0)
    assert (scheduler.stats().adapters_known, scheduler.stats().adapters_resident) == (2, 0)
    assert scheduler.stats().waiting == 1
    scheduler.update(
        plan,
        StepResult(
            plan.step,
            (),
            0.0,
            copied=TierCopied(swapped_out=plan.step, swapped_in=plan.step),
            parts=(AdapterResult(loaded=plan.step),),
        ),
        0.0,
    )
    assert (scheduler.stats().adapters_resident, scheduler.stats().adapter_loads) == (1, 1)
    assert scheduler.stats().running == 0


def test_a_slot_is_reserved_anew_once_the_adapter_in_it_is_no_longer_used():
    scheduler = scheduler_of("a", "b", "c", slots=2, max_sequences=4, blocks=34, block_size=4, order=Fcfs())
    first, second, waits, long, behind = create_requests(3, 40, 3, 120, 3, max_tokens=9)
    for request, adapter in ((first, "a"), (second, "b")):
        scheduler.add(with_adapter(request, adapter))
    for _ in range(2):
        plan = scheduler.schedule(0.0)
        scheduler.update(plan, loaded(plan), 0.0)
    scheduler.add(with_adapter(waits, "c"))
    plan = scheduler.schedule(0.0)
    scheduler.update(plan, loaded(plan), 0.0)
    scheduler.abort("0")
    scheduler.add(replace(with_adapter(long, "a"), arrival=-1.0))  # ranks first and finds too few blocks
    plan = scheduler.schedule(0.0)
    scheduler.update(plan, loaded(plan), 0.0)
    scheduler.add(with_adapter(behind, "b"))
    found = {each.id: each.reason for each in report_queues(scheduler.queues, 9).first}
    assert found == {"2": "adapter loading", "3": "no blocks", "4": "adapter loading"}
