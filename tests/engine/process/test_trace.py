"""The timeline: every step and segment of a run, from any executor, as Chrome reads it."""

import json
from dataclasses import replace
from itertools import pairwise

import pytest

from holdfast.engine.activity import LOOKED_AT, Scene
from holdfast.engine.process.build import build
from holdfast.engine.process.trace import SHARE, Trace
from holdfast.lm.parts.tuning.values import TrainingPlan, TrainingReport, TrainingSlice
from holdfast.lm.types import CopyTime, Forward, RowMove, RowPlan, Sampling, Segment, StepPlan, StepResult, TierCopied
from holdfast.loop.loop import Loop
from tests.lab.simulator.simulation import run
from tests.lab.simulator.test_run import separate_requests
from tests.scheduling import FakeDevice, create_requests, create_scheduler


def events_of(path, kind):
    return [event for event in json.loads(path.read_text()) if event["ph"] == kind]


def traced(trace, device, plan):
    """Run a plan as a loop does that the trace observes."""
    trace.planned(plan)
    device.submit(plan)
    trace.ended(device.collect())


def traced_loop(path, *requests, **options):
    device = FakeDevice(4, 4)
    for request in requests:
        device.expect(request)
    ticks = iter(range(1000))
    clock = lambda: float(next(ticks))  # noqa: E731
    loop = Loop(create_scheduler(blocks=4, **options), device, 2, clock, observers=[Trace(path, clock)])
    for request in requests:
        loop.add(request)
    return loop


def test_each_step_and_each_segment_is_a_bar(tmp_path):
    loop = traced_loop(tmp_path / "t.json", *create_requests(6, 5, max_tokens=2), budget=8)
    while loop.has_work():
        loop.step()
    loop.close()
    bars = events_of(tmp_path / "t.json", "X")
    steps = [bar for bar in bars if bar["pid"] == 0]
    segments = [bar for bar in bars if bar["pid"] == 1]
    assert [step["args"]["tokens"] for step in steps] == [8, 4, 1]
    assert [(bar["tid"], bar["name"], bar["args"]["start"], bar["args"]["stop"]) for bar in segments] == [
        (0, "prefill", 0, 6),
        (1, "prefill", 0, 2),
        (0, "decode", 6, 7),
        (1, "prefill", 2, 5),
        (1, "decode", 5, 6),
    ]
    for before, after in zip(steps, steps[1:], strict=False):  # noqa: RUF007
        assert before["ts"] + before["dur"] <= after["ts"]
    counters = events_of(tmp_path / "t.json", "C")
    assert [counter["args"] for counter in counters][:2] == [{"decodes": 0, "prefill": 8}, {"decodes": 1, "prefill": 3}]


class CopyingDevice(FakeDevice):
    """Says how long its copies took."""

    def collect(self):
        (plan, result) = self.plans[0], super().collect()
        ways = ((False, plan.copies.swap_out), (True, plan.copies.swap_in))
        times = tuple(CopyTime(plan.step, way, 4096 * len(copies), 0.5) for way, copies in ways if copies)
        return replace(result, copied=result.copied._replace(times=times))


def test_copies_have_their_own_lanes_and_suspensions_are_marked(tmp_path):
    path = tmp_path / "t.json"
    device = CopyingDevice(6, 4, 8)
    requests = create_requests(11, 11, max_tokens=12)
    ticks = iter(range(1000))
    clock = lambda: float(next(ticks))  # noqa: E731
    scheduler = create_scheduler(block_size=4, blocks=6, host_blocks=8, max_sequences=2)
    loop = Loop(scheduler, device, 1, clock, observers=[Trace(path, clock, suspends=True)])
    for request in requests:
        device.expect(request)
        loop.add(request)
    while loop.has_work():
        loop.step()
    loop.close()
    assert [mark["name"] for mark in events_of(path, "i")] == ["suspended 1"]
    copies = [bar for bar in events_of(path, "X") if bar["pid"] == 2]
    assert {(bar["name"], bar["tid"]) for bar in copies} == {("swap-out", 0), ("swap-in", 1)}
    stats = loop.stats()
    for name, blocks in (("swap-out", stats.blocks_swapped_out), ("swap-in", stats.blocks_swapped_in)):
        assert sum(bar["args"]["blocks"] for bar in copies if bar["name"] == name) == blocks
    assert all(bar["dur"] == 0.5e6 and bar["args"]["bytes"] == 4096 * bar["args"]["blocks"] for bar in copies)
    assert all(bar["args"]["GB/s"] > 0 for bar in copies)


def test_every_event_has_the_fields_of_chromes_trace_format(tmp_path):
    loop = traced_loop(tmp_path / "t.json", *create_requests(4, 4, 4, max_tokens=5))
    while loop.has_work():
        loop.step()
    loop.close()
    needed = {"X": {"dur": float, "ts": float}, "C": {"ts": float}, "i": {"ts": float}, "M": {}}
    events = json.loads((tmp_path / "t.json").read_text())
    assert {event["ph"] for event in events} == set(needed)
    for event in events:
        assert isinstance(event["name"], str) and isinstance(event["args"], dict)
        assert isinstance(event["pid"], int) and isinstance(event["tid"], int)
        for field, kind in needed[event["ph"]].items():
            assert isinstance(event[field], kind) and event[field] >= 0
        if event["ph"] == "C":
            assert all(isinstance(value, int) for value in event["args"].values())
        if event["ph"] == "M":
            assert event["name"] in ("process_name", "thread_name") and isinstance(event["args"]["name"], str)


def test_a_preemption_is_marked(tmp_path):
    loop = traced_loop(tmp_path / "t.json", *create_requests(4, 4, 4, max_tokens=5))
    while loop.has_work():
        loop.step()
    loop.close()
    assert events_of(tmp_path / "t.json", "i")[0]["name"] == "preempted 2"


def test_the_simulator_writes_the_same_trace_with_its_own_times(tmp_path):
    path = tmp_path / "t.json"
    traces = []

    def watch(planner, shape, clock):
        traces.append(Trace(path, clock))
        return traces

    outcome = run(separate_requests(3, 40, 5), watch=watch)
    traces[0].close()
    steps = [bar for bar in events_of(path, "X") if bar["pid"] == 0]
    assert len(steps) == outcome.steps
    assert sum(step["dur"] for step in steps) / 1e6 == pytest.approx(outcome.busy, rel=1e-4)


def test_the_engine_writes_the_trace_to_the_given_file(small, tmp_path):
    path = tmp_path / "t.json"
    loop, _ = build(small(trace=str(path)))
    loop.add(create_requests((5, 6, 7), temperature=0.0, max_tokens=3)[0])
    while loop.has_work():
        loop.step()
    loop.close()
    assert len([bar for bar in events_of(path, "X") if bar["pid"] == 0]) == 3


class PaddedDevice:
    """Answers plans of padded rows. In the steps that are named, copies to the host or the device take a moment."""

    def __init__(self, out=(), into=()):
        self.plans, self.out, self.into = [], out, into

    def submit(self, plan):
        self.plans.append(plan)

    def collect(self):
        plan = self.plans.pop(0)
        ways = ((False, self.out), (True, self.into))
        copies = tuple(CopyTime(plan.step, way, 10, 0.5) for way, steps in ways if plan.step in steps)
        return StepResult(plan.step, (1,) * plan.num_sampled, seconds=1.0, copied=TierCopied(times=copies))

    def close(self):
        pass


def test_a_draft_is_verified_and_its_tokens_count_as_decodes(tmp_path):
    path = tmp_path / "t.json"
    trace = Trace(path, lambda: 0.0)
    greedy = Sampling(temperature=0.0, top_k=0, top_p=1.0, seed=0)
    segments = (Segment("a", 0, 0, 2, (5, 6), None), Segment("b", 1, 3, 6, (7, 8, 9), greedy))
    trace.planned(StepPlan(0, segments, samples=(3,)))
    trace.ended(StepResult(0, (8, 1), 0.1, counts=(2,)))
    trace.close()
    assert [bar["name"] for bar in events_of(path, "X") if bar["pid"] == 1] == ["prefill", "verify"]
    assert events_of(path, "C")[0]["args"] == {"decodes": 3, "prefill": 2}


def test_forwards_share_the_bar_of_their_step_by_the_tokens_that_they_compute(tmp_path):
    path = tmp_path / "t.json"
    ticks = iter(range(0, 1000, 10))
    device, trace = PaddedDevice(), Trace(path, lambda: float(next(ticks)))
    segments = [Segment("a", 0, 9, 10, (1,), None), Segment("b", 1, 0, 3, (1, 2, 3), None)]
    segments.append(Segment("c", 2, 0, 5, (1, 2, 3, 4, 5), None))
    traced(
        trace,
        device,
        StepPlan(0, segments, parts=(RowPlan(forwards=(Forward(1, ended=(3, 4)), Forward(3, apart=True))),)),
    )
    traced(trace, device, StepPlan(1, segments[:1], parts=(RowPlan(forwards=(Forward(1),)),)))
    trace.close()
    bars = events_of(path, "X")
    steps, forwards = ([bar for bar in bars if (bar["pid"], bar["tid"]) == (0, lane)] for lane in (0, 1))
    assert [(bar["name"], bar["args"]["rows"], bar["args"]["idle tokens"]) for bar in forwards] == [
        ("3 × 1", 3, 2),
        ("2 × 5 apart", 2, 2),
        ("1 × 1", 1, 0),
    ]
    assert steps[0]["args"]["idle tokens"] == 4 and steps[0]["args"]["forwards"] == 2
    assert [bar["dur"] for bar in forwards] == pytest.approx([1e6 * 3 / 13, 1e6 * 10 / 13, 1e6])
    assert forwards[1]["ts"] == pytest.approx(forwards[0]["ts"] + forwards[0]["dur"])
    rows = {bar["tid"]: bar for bar in bars if bar["pid"] == 1 and bar["ts"] < steps[1]["ts"]}
    assert rows[0]["ts"] == forwards[0]["ts"] and rows[1]["ts"] == rows[2]["ts"] == forwards[1]["ts"]


class TrainingDevice(PaddedDevice):
    """A step takes a second, and a slice half a second."""

    def collect(self):
        plan = self.plans[0]
        given = plan.part(TrainingPlan).slice
        trained = (TrainingReport(*given[:6], seconds=0.5),) if given else ()
        return replace(super().collect(), seconds=float(bool(plan.segments)), parts=trained)


def test_a_slice_is_a_bar_behind_its_step_and_alone_where_there_is_none(tmp_path):
    path = tmp_path / "t.json"
    ticks = iter(range(0, 1000, 10))
    device, trace = TrainingDevice(), Trace(path, lambda: float(next(ticks)))
    segments = [Segment("a", 0, 9, 10, (1,), None)]
    for plan in (
        StepPlan(0, segments, parts=(TrainingPlan(slice=TrainingSlice("job", 3, 1, "run", 2, 6), lent=7),)),
        StepPlan(1, [], parts=(TrainingPlan(slice=TrainingSlice("job", 3, 1, "offload"), lent=7),)),
        StepPlan(2, segments),
    ):
        traced(trace, device, plan)
    trace.close()
    bars = events_of(path, "X")
    steps, training = ([bar for bar in bars if (bar["pid"], bar["tid"]) == (0, lane)] for lane in (0, 2))
    assert [(bar["name"], bar["ts"], bar["dur"]) for bar in steps] == [("step 0", 8.5e6, 1e6), ("step 2", 49e6, 1e6)]
    assert [(bar["name"], bar["ts"], bar["dur"]) for bar in training] == [
        ("training", 9.5e6, 0.5e6),
        ("offload", 29.5e6, 0.5e6),
    ]
    assert training[0]["args"] == {
        "plan": 0, "job": "job", "step": 3, "micro-batch": 1, "first unit": 2, "units": 4, "keeps": True,
    }  # fmt: skip
    lent = [event["args"]["training"] for event in events_of(path, "C") if event["name"] == "lent blocks"]
    assert lent == [7, 0]


def test_copies_of_rows_are_counted_where_they_cross_between_the_tiers(tmp_path):
    path = tmp_path / "t.json"
    ticks = iter(range(0, 1000, 10))
    device, trace = PaddedDevice(out=(1,), into=(2,)), Trace(path, lambda: float(next(ticks)))
    moves = {
        0: [RowMove(0, "keep", row=0, slot=5, length=3), RowMove(0, "load", row=1, slot=5, length=3)],
        1: [RowMove(0, "offload", slot=5, length=3), RowMove(0, "store", row=2, slot=6, length=4)],
        2: [RowMove(0, "load", row=3, slot=6, length=4), RowMove(0, "forget", slot=5)],
    }
    for step, each in moves.items():
        traced(trace, device, StepPlan(step, (), parts=(RowPlan(moves=tuple(each)),)))
    trace.close()
    copies = [bar for bar in events_of(path, "X") if bar["pid"] == 2]
    assert [(bar["name"], bar["args"]["rows"]) for bar in copies] == [("swap-out", 2), ("swap-in", 1)]
    assert not trace._recorder._copying


class TickingClock:
    """A clock that advances by a fixed time at each look."""

    def __init__(self, tick):
        self.now, self.tick = 100.0, tick

    def __call__(self):
        self.now += self.tick
        return self.now


def followed_loop(path, clock, *requests):
    """A loop with a trace that shows blocks, and the trace."""
    device = FakeDevice(64, 4)
    for request in requests:
        device.expect(request)
    scheduler = create_scheduler(max_sequences=8)
    trace = Trace(path, clock, planner=scheduler)
    loop = Loop(scheduler, device, 2, clock, observers=[trace])
    for request in requests:
        loop.add(request)
    return loop, trace


def test_a_trace_reads_blocks_in_a_bounded_share_of_the_time(tmp_path, monkeypatch):
    tick, looks = 0.001, []
    loop, trace = followed_loop(tmp_path / "t.json", TickingClock(tick), *create_requests(5, max_tokens=200))
    read = Scene.blocks
    monkeypatch.setattr(Scene, "blocks", lambda self, now, most: looks.append((now, most)) or read(self, now, most))
    while loop.has_work():
        loop.step()
    apart = [after - before for (before, _), (after, _) in pairwise(looks)]
    assert len(apart) > 2 and min(apart) >= tick / SHARE
    assert {most for _, most in looks} == {LOOKED_AT}
    trace.close()


def test_a_closed_trace_has_the_blocks_of_all_conversations(tmp_path):
    path = tmp_path / "t.json"
    loop, trace = followed_loop(path, TickingClock(1e-3), *create_requests(5, 6, 7, 8, max_tokens=6))
    while loop.has_work():
        loop.step()
    trace.close()
    trace.close()
    rows = [row for event in events_of(path, "i") if event["name"] == "blocks" for row in event["args"]["rows"]]
    last = {request: state for _, request, state, *_ in rows}
    assert last == dict.fromkeys("0123", "idle")


def test_a_step_says_when_it_was_submitted_and_what_the_device_measured(tmp_path):
    path, clock = tmp_path / "t.json", TickingClock(0.5)
    trace = Trace(path, clock)
    plans = [StepPlan(step, [segment(step, step + 1)]) for step in (0, 1)]
    for plan in plans:
        trace.planned(plan)
    for plan in plans:
        trace.ended(StepResult(plan.step, (1,), 2.0))
    trace.close()
    steps = [bar for bar in events_of(path, "X") if bar["pid"] == 0]
    assert [step["args"]["submitted"] for step in steps] == [100.5, 101.0]
    assert [step["args"]["measured"] for step in steps] == [2.0, 2.0]
    assert [step["dur"] / 1e6 for step in steps] == [1.0, 0.5]  # the second was collected too soon after the first


def test_the_bar_of_a_segment_has_any_name_of_a_sequence(tmp_path):
    path, name = tmp_path / "t.json", 'one "quoted" \\ ü\n'
    trace = Trace(path, TickingClock(0.5))
    plan = StepPlan(0, [segment(0, 3)._replace(sequence_id=name)])
    trace.planned(plan)
    trace.ended(StepResult(0, (1,), 0.25))
    trace.close()
    (bar,) = [bar for bar in events_of(path, "X") if bar["pid"] == 1]
    assert bar["args"] == {"sequence": name, "start": 0, "stop": 3}
    assert (bar["ts"], bar["dur"], bar["tid"]) == (100.75e6, 0.25e6, 0)


def segment(start, stop):
    return Segment("a", 0, start, stop, (1,) * (stop - start), Sampling(0.0, 0, 1.0, 1))
