"""An engine reports its work while it is watched, and is unchanged while it is not."""

from __future__ import annotations

import json

import msgspec
import pytest

from holdfast.engine.activity import StepRecord
from holdfast.engine.messages import Activity, Submit, Watch, decode_from_engine, encode
from holdfast.engine.process import watched as watching
from holdfast.engine.process.serve import serve
from holdfast.engine.process.trace import Trace
from holdfast.engine.process.watched import Recording, Watched, merge
from holdfast.loop.loop import Loop
from tests.engine.process.test_serve import ShutdownWhenIdle, engine
from tests.scheduling import FakeDevice, create_requests, create_scheduler


class Clock:
    """A clock that advances by a fixed time at each look."""

    def __init__(self, tick=0.01):
        self.now, self.tick = 100.0, tick

    def __call__(self):
        self.now += self.tick
        return self.now


def watched_loop(*requests, clock=None, **options):
    clock, device, sent = clock or Clock(), FakeDevice(64, 4), []
    for request in requests:
        device.expect(request)
    loop = Loop(create_scheduler(**options), device, 2, clock)
    for request in requests:
        loop.add(request)
    return loop, device, Watched(loop, sent.append, clock), sent


def test_an_engine_that_nobody_watches_has_no_observer_and_sends_nothing():
    loop, _, watched, sent = watched_loop(*create_requests(5, max_tokens=3))
    assert not watched.on and not loop._observers
    watched.watch(5.0)
    assert watched.on and isinstance(loop._observers[0], Recording)
    watched.watch(0)
    assert not watched.on and not loop._observers
    assert len(sent) == 1


def test_the_lease_ends_by_itself():
    loop, _, watched, sent = watched_loop(*create_requests(5, max_tokens=40), clock=Clock(0.05))
    watched.watch(1.0)
    while loop.has_work():
        loop.step()
        if watched.on:
            watched.tell()
    assert not loop._observers
    assert 0 < sum(len(activity.steps) for activity in sent) < 40


def test_nobody_watches_for_longer_than_the_longest_lease_without_asking_again():
    clock = Clock()
    loop, device, watched, _ = watched_loop(clock=clock)
    watched.watch(1000 * watching.LONGEST_LEASE)
    clock.now += 0.9 * watching.LONGEST_LEASE
    watched.tell(idle=True)
    assert watched.on
    clock.now += 0.2 * watching.LONGEST_LEASE
    watched.tell(idle=True)
    assert not watched.on and loop.executor is device


def test_each_step_is_told_once_with_its_decodes_and_chunks():
    loop, _, watched, sent = watched_loop(*create_requests(5, 30, max_tokens=4), budget=16)
    watched.watch(60.0)
    while loop.has_work():
        loop.step()
        watched.tell()
    watched._tell(watched._clock())
    steps = [step for activity in sent for step in activity.steps]
    assert [(step.step, step.tokens, step.decodes, step.prefill) for step in steps[:3]] == [
        (0, 16, 0, 16), (1, 16, 1, 15), (2, 5, 1, 4),
    ]  # fmt: skip
    assert [tuple(chunk) for chunk in steps[1].chunks] == [("1", 11, 26)]
    assert all(step.budget == 16 for step in steps)
    assert [step.step for step in steps] == list(range(len(steps)))
    assert sent[0].begins and not any(activity.begins for activity in sent[1:])


def test_steps_that_were_in_flight_when_watching_began_are_left_out():
    loop, _, watched, sent = watched_loop(*create_requests(5, max_tokens=6))
    loop.step()
    watched.watch(60.0)
    while loop.has_work():
        loop.step()
        watched.tell()
    watched._tell(watched._clock())
    assert [step.step for activity in sent for step in activity.steps] == [2, 3, 4, 5]


def test_the_served_loop_tells_steps_queues_and_blocks(monkeypatch):
    monkeypatch.setattr(watching, "TELL_SECONDS", 0.0)
    monkeypatch.setattr(watching, "SHARE", 1e9)
    (request,) = create_requests(9, max_tokens=3)
    parent = ShutdownWhenIdle(Watch(30.0), Submit(request))
    serve(engine(request), parent, ())
    told = [message for message in parent.sent if isinstance(message, Activity)]
    assert sum(step.tokens for activity in told for step in activity.steps) == 11
    assert told[0].queues is not None and told[0].stats is not None and told[0].costs
    assert any(row.request == request.id for activity in told for row in activity.blocks)


def test_activity_crosses_between_the_processes():
    loop, _, watched, sent = watched_loop(*create_requests(5, 30, max_tokens=4), budget=16)
    watched.watch(60.0)
    for _ in range(4):
        loop.step()
        watched.tell()
    for activity in sent:
        assert decode_from_engine(encode(activity)) == activity


def test_blocks_are_looked_at_seldom_enough_to_keep_their_share_of_the_time():
    tick = 0.001
    loop, _, watched, _ = watched_loop(*create_requests(5, max_tokens=100), clock=Clock(tick))
    watched.watch(60.0)
    looks, scene = [], watched._watching[0][0]
    scene_blocks = scene.blocks
    scene.blocks = lambda now, most: looks.append(now) or scene_blocks(now, most)
    while loop.has_work():
        loop.step()
        watched.tell()
    apart = [later - earlier for earlier, later in zip(looks, looks[1:], strict=False)]  # noqa: RUF007
    assert min(apart, default=1.0) >= tick / watching.SHARE


def test_an_idle_engine_reports_all_kept_state_of_a_large_pool_at_once(monkeypatch):
    monkeypatch.setattr("holdfast.engine.activity.LOOKED_AT", 2)
    loop, _, watched, sent = watched_loop(*create_requests(9, 30, 50, max_tokens=3), clock=Clock(1e-6))
    while loop.has_work():
        loop.step()
    watched.watch(60.0)
    watched._clock.now += 1.0
    watched.tell(idle=True)
    kept = sum(count for activity in sent for row in activity.blocks for letter, count in row.runs if letter == "d")
    assert kept == sent[-1].stats.blocks_cached > 3
    monkeypatch.setattr("holdfast.engine.activity.IDLE_SECONDS", 1e-5)
    watched.watch(0)
    watched.watch(60.0)
    watched._clock.now += 1.0
    watched.tell(idle=True)
    assert not sent[-1].blocks, "a new request does not wait for all blocks to be read"


def record(step, **fields):
    numbers = {"at": float(step), "seconds": 0.5, "tokens": 3, "decodes": 3, "prefill": 0, "segments": 3}
    return StepRecord(step, **{**numbers, "preempted": [], **fields})


def test_short_steps_that_only_decode_share_a_record():
    last = record(1)
    assert merge(last, record(2)) and merge(last, record(3))
    assert (last.step, last.steps, last.tokens, last.seconds) == (1, 3, 9, 2.5)


def test_steps_that_share_a_record_add_up_the_times_of_their_stages():
    last = record(1, stages=[0.25, 0.125])
    assert merge(last, record(2, stages=[0.5, 0.25]))
    assert last.stages == [0.75, 0.375]


@pytest.mark.parametrize("fields", [{"prefill": 4}, {"swap_out": 1}, {"swap_in": 1}, {"preempted": ["x"]}])
def test_a_step_that_does_more_keeps_its_own_record(fields):
    assert not merge(record(1), record(2, **fields))
    assert not merge(record(1, **fields), record(2))


def test_a_message_has_a_bounded_number_of_records(monkeypatch):
    monkeypatch.setattr(watching, "MOST_STEPS", 5)
    loop, _, watched, _ = watched_loop(*create_requests(5, max_tokens=90))
    watched.watch(60.0)
    while loop.has_work():
        loop.step()
    records = watched._watching[0][1].take()
    assert len(records) == 5 and sum(record.steps for record in records) == 90


def test_a_trace_has_the_records_of_a_live_view(tmp_path):
    """Each step's bar has the arguments that the record has as JSON, and queues and blocks are marks."""
    path, requests = tmp_path / "t.json", create_requests(5, 30, max_tokens=4)
    clock, device, told = Clock(), FakeDevice(64, 4), []
    for request in requests:
        device.expect(request)
    scheduler = create_scheduler(budget=16)
    recorded = Recording(clock, lambda plan: None)
    trace = Trace(path, clock, planner=scheduler, about={"model": "tiny"})
    loop = Loop(scheduler, device, 1, clock, observers=[trace, recorded])
    for request in requests:
        loop.add(request)
    while loop.has_work():
        loop.step()
        told += recorded.take()
    loop.close()
    events = json.loads(path.read_text())
    bars = [event["args"] for event in events if event["ph"] == "X" and (event["pid"], event["tid"]) == (0, 0)]
    expected = [json.loads(msgspec.json.encode(each)) for each in told]
    for bar in bars:  # each observer has looked at the clock itself
        del bar["submitted"]
    assert bars == [{k: v for k, v in each.items() if k not in ("at", "seconds", "submitted")} for each in expected]
    marks = {event["name"]: event["args"] for event in events if event["pid"] == 3 and event["ph"] == "i"}
    assert set(marks) == {"engine", "queues", "stats", "blocks"}
    assert marks["engine"]["model"] == "tiny" and marks["engine"]["costs"]
    assert set(marks["queues"]) == {"waiting", "running", "free_rows", "first", "rows"}


def test_a_record_of_a_draft_counts_what_is_verified_as_decodes():
    from tests.engine.process.test_trace import Sampling, Segment, StepPlan, StepResult

    recorded = Recording(Clock(), lambda plan: None)
    segment = Segment("a", 0, 9, 12, (1, 2, 3), Sampling(0.0, 0, 1.0, 1))
    recorded.planned(StepPlan(0, [segment, replace_segment(segment)], samples=(3,)))
    recorded.ended(StepResult(0, (1,), 0.01, counts=(1,)))
    (record,) = recorded.take()
    assert (record.tokens, record.decodes, record.prefill) == (6, 3, 3)


def replace_segment(segment):
    """A chunk of a prompt, of the same length."""
    return segment._replace(sequence_id="b", row=1, sampling=None)


def test_a_conversation_is_sent_again_only_once_its_blocks_have_changed(monkeypatch):
    monkeypatch.setattr(watching, "TELL_SECONDS", 0.0)
    monkeypatch.setattr(watching, "SHARE", 1e9)
    clock = Clock()
    loop, _, watched, sent = watched_loop(*create_requests(9, 30, max_tokens=3), clock=clock)
    watched.watch(60.0)
    while loop.has_work():
        loop.step()
        watched.tell()
    for _ in range(20):
        clock.now += 1.0
        watched.tell(idle=True)
    last = {}
    for row in (row for activity in sent for row in activity.blocks):
        assert row != last.get(row.number)
        last[row.number] = row
    assert sorted(row.request for row in last.values()) == ["0", "1"]
    assert len(sent) > 10 and not sent[-1].blocks
