"""The limit for each tenant: whose sequences run, whose wait, and that nobody else waits for it."""

import random

import pytest

from holdfast.core.types import Identity, Request, SamplingParams
from holdfast.lm.choice import make_scheduler
from holdfast.lm.config import EngineConfig
from holdfast.lm.parts.tenants.planner import TenantPart
from holdfast.lm.scheduler.queue_report import REASONS, report_queues
from holdfast.loop.loop import Loop
from tests.lm.test_choice import SHAPE
from tests.scheduling import FakeDevice, answer, create_scheduler, run_alone

A, B = "a", "b"


def requests_of(*tenants, prompt=5, max_tokens=4):
    """Requests "0", "1", …, one of each of these tenants, each with a prompt of its own."""
    params = SamplingParams(max_tokens=max_tokens)
    return [
        Request(str(index), (index, *range(prompt - 1)), params, identity=Identity("m", tenant=tenant))
        for index, tenant in enumerate(tenants)
    ]


def running(scheduler):
    return [each.id for each in report_queues(scheduler.queues, 100).rows]


def waiting(scheduler):
    return {each.id: each.reason for each in report_queues(scheduler.queues, 100).first}


def run_step(scheduler):
    plan = scheduler.schedule(0.0)
    scheduler.update(plan, answer(plan), 0.0)


def test_further_sequences_of_a_tenant_wait_and_another_tenant_passes_them():
    scheduler = create_scheduler(parts=[TenantPart(2)])
    for request in requests_of(A, A, A, B):
        scheduler.add(request)
    run_step(scheduler)
    assert running(scheduler) == ["0", "1", "3"]
    assert waiting(scheduler) == {"2": "tenant limit"} and "tenant limit" in REASONS


def test_the_first_waiting_sequence_starts_when_one_of_its_tenant_ends():
    scheduler = create_scheduler(parts=[TenantPart(1)])
    for request in requests_of(A, A, A, max_tokens=2):
        scheduler.add(request)
    order = []
    while scheduler.has_work():
        run_step(scheduler)
        order += [name for name in running(scheduler) if name not in order]
        assert len(running(scheduler)) <= 1
    assert order == ["0", "1", "2"]


def test_a_sequence_that_is_aborted_while_it_waits_leaves_its_place():
    scheduler = create_scheduler(parts=[TenantPart(1)])
    for request in requests_of(A, A, A, max_tokens=9):
        scheduler.add(request)
    run_step(scheduler)
    scheduler.abort("1")
    scheduler.abort("0")
    run_step(scheduler)
    assert (running(scheduler), waiting(scheduler)) == (["2"], {})


@pytest.mark.parametrize("seed", range(6))
def test_no_tenant_ever_has_more_rows_and_every_answer_is_its_own(seed):
    """Blocks run out, so sequences are preempted and start again; some requests are aborted."""
    choose = random.Random(seed)
    most = choose.choice((1, 2, 3))
    device = FakeDevice(16, 4)
    scheduler = create_scheduler(blocks=16, budget=16, max_sequences=6, parts=[TenantPart(most)])
    requests = requests_of(*(choose.choice((A, B)) for _ in range(20)), prompt=6, max_tokens=12)
    tenants, answers, aborted = {each.id: each.identity.tenant for each in requests}, {}, set()
    loop = Loop(scheduler, device, 2, clock=lambda: 0.0)
    coming, preempted = list(requests), 0
    while coming or loop.has_work():
        if coming and choose.random() < 0.7:
            device.expect(coming[0])
            loop.add(coming.pop(0))
        if choose.random() < 0.05 and answers:
            aborted.add(name := choose.choice(sorted(answers)))
            loop.abort(name)
        for output in loop.step() or ():
            answers[output.request_id] = answers.get(output.request_id, ()) + output.tokens
            preempted += output.preemptions
        rows = [tenants[name] for name in running(scheduler)]
        assert all(rows.count(tenant) <= most for tenant in "ab")
    for request in requests:
        if request.id not in aborted:
            assert answers[request.id] == run_alone(request)[0]
    part = scheduler.part(TenantPart)
    assert not (part._held or +part._running or any(part._waiting.values()))
    assert preempted or most < 3


def test_the_configuration_asks_for_the_limit():
    scheduler = make_scheduler(EngineConfig(max_tenant_sequences=1), SHAPE, None)
    for request in requests_of(A, A, B):
        scheduler.add(request)
    scheduler.schedule(0.0)
    assert waiting(scheduler) == {"1": "tenant limit"}
    with pytest.raises(LookupError, match="no TenantPart"):
        make_scheduler(EngineConfig(), SHAPE, None).part(TenantPart)


def test_a_limit_of_no_sequence_is_refused():
    with pytest.raises(ValueError, match="max_tenant_sequences is 0; it must lie between 1 and 4096"):
        EngineConfig(max_tenant_sequences=0)
