"""A busy engine captures graphs between two steps, where padding has cost more and no stream gets a late token."""

import itertools

import pytest

from holdfast.core.types import Request, SamplingParams
from holdfast.engine.process.build import may_pause
from holdfast.lm.execution.capture_queue import CaptureQueue, GraphSize
from holdfast.lm.memory.block_pool import BlockPool
from holdfast.lm.scheduler.paged import PagedKind
from holdfast.lm.scheduler.policies import LatencyTarget, StallFree
from holdfast.lm.scheduler.scheduler import PAUSE_STEPS, Scheduler
from holdfast.lm.types import StepResult
from holdfast.loop.loop import Loop
from tests.engine.process.test_in_service import COST

REHEARSAL, CAPTURE, PADDED = 0.008, 0.012, 16
"""Seconds of both halves of a capture, and the only size that the start has captured."""


class PaddedSteps:
    """A device that takes as long as the cost model says, and pads decodes to the next size that it has captured.

    Its clock stands still while the host plans.
    """

    def __init__(self):
        self.now, self.plans, self.pauses = 0.0, [], []
        self.left = CaptureQueue()
        self.left.captured(GraphSize("decode", PADDED), REHEARSAL, CAPTURE)
        self.left.add(GraphSize("decode", size) for size in range(1, PADDED))
        self.ready = [PADDED]

    @property
    def due(self):
        return self.left.due

    def submit(self, plan):
        self.plans.append(plan)

    def collect(self):
        plan = self.plans.pop(0)
        spans = [(segment.stop - segment.start, segment.stop) for segment in plan.segments]
        missed = None
        if all(query == 1 for query, _ in spans):
            size = next(size for size in self.ready if size >= len(spans))
            missed = self.left.missed(GraphSize("decode", len(spans)), GraphSize("decode", size))
        seconds = COST.step(spans)
        if missed:
            self.left.lost(missed, seconds)
        self.now += seconds
        return StepResult(plan.step, (7,) * plan.num_sampled, seconds)

    def prepare(self):
        assert not self.plans, "a step is in flight"
        if not self.left:
            return False
        size, half = self.left.next, CAPTURE if self.left.rehearsed else REHEARSAL
        self.now += half
        self.pauses.append((self.now, half))
        if self.left.rehearsed:
            self.left.captured(size, REHEARSAL, CAPTURE)
            self.ready = sorted([*self.ready, size.size])
        else:
            self.left.rehearsed = size
        return True


def serve(policy, steps=400, streams=10, steps_in_flight=2, every=40):
    """Run streams without a pause, with a new prompt every `every` steps. Returns the device, and gaps of streams."""
    device = PaddedSteps()
    scheduler = Scheduler(policy, PagedKind(BlockPool(1024, 16)), max_sequences=16, max_model_len=1024, vocab_size=100)
    loop = Loop(
        scheduler,
        device,
        steps_in_flight,
        lambda: device.now,
        prepare=device.prepare,
        gap=lambda: may_pause(device, scheduler, lambda: device.now),
    )
    last, gaps, names = {}, [], itertools.count()

    def add(prompt, tokens):
        loop.add(Request(str(next(names)), tuple(range(prompt)), SamplingParams(max_tokens=tokens)))

    for _ in range(streams):
        add(20, steps)
    for step in range(steps):
        if step % every == every - 1:
            add(90, 3)
        for output in loop.step() or ():
            if output.request_id in last:
                gaps.append(device.now - last[output.request_id])
            last[output.request_id] = device.now
    return device, gaps


def target_of(seconds):
    return LatencyTarget(COST, seconds, tile=16, ceiling=256)


def test_a_server_without_a_lull_captures_the_sizes_that_its_steps_have():
    device, gaps = serve(StallFree(64))
    assert 10 in device.ready and len(device.pauses) == 2 * (len(device.ready) - 1)
    assert sum(half for _, half in device.pauses) < 0.2 * device.now
    assert max(gaps) < CAPTURE + 2 * COST.step([(1, 1024)] * 10 + [(54, 90)])


@pytest.mark.parametrize("steps_in_flight", [1, 2, 3])
def test_no_stream_gets_a_late_token_for_a_capture(steps_in_flight):
    target = 0.025
    device, gaps = serve(target_of(target), steps_in_flight=steps_in_flight)
    assert 10 in device.ready
    assert max(gaps) <= target


def test_a_target_without_room_for_a_capture_lets_graphs_wait_for_a_lull():
    device, gaps = serve(target_of(0.011))
    assert device.left.due and device.ready == [PADDED] and not device.pauses
    assert max(gaps) <= 0.011


def test_prompts_in_the_step_after_a_pause_get_only_the_time_that_is_left():
    target, device = 0.030, PaddedSteps()
    scheduler = Scheduler(
        target_of(target), PagedKind(BlockPool(1024, 16)), max_sequences=16, max_model_len=1024, vocab_size=100
    )
    loop = Loop(scheduler, device, 1, lambda: device.now)
    loop.add(Request("stream", tuple(range(20)), SamplingParams(max_tokens=50)))
    for _ in range(3):
        loop.step()
    loop.add(Request("prompt", (7,) * 900, SamplingParams(max_tokens=1)))
    tokens = []
    for pause in (0.0, 0.022):
        assert scheduler.pause(pause, device.now)
        device.now += pause
        plan = scheduler.schedule(device.now)
        tokens.append(plan.num_tokens)
        seconds = COST.step([(segment.stop - segment.start, segment.stop) for segment in plan.segments])
        assert pause + seconds <= target
        scheduler.update(plan, StepResult(plan.step, (7,) * plan.num_sampled, seconds), device.now + seconds)
    assert tokens[1] < tokens[0]


def test_a_pause_is_allowed_while_nothing_streams_however_long_it_is():
    scheduler = Scheduler(
        target_of(0.001), PagedKind(BlockPool(64, 16)), max_sequences=4, max_model_len=512, vocab_size=100
    )
    assert scheduler.pause(10.0, 0.0)
    scheduler.add(Request("first", tuple(range(20)), SamplingParams(max_tokens=5)))
    plan = scheduler.schedule(0.0)
    assert plan is not None and plan.num_tokens == 20
    scheduler.update(plan, StepResult(plan.step, (7,), 0.01), 0.01)
    assert not scheduler.pause(10.0, 0.01) and not scheduler.pause(0.0, 0.01)


def test_lines_of_a_batch_wait_for_a_capture_however_long_it_is():
    scheduler = Scheduler(
        target_of(0.020), PagedKind(BlockPool(64, 16)), max_sequences=4, max_model_len=512, vocab_size=100
    )
    scheduler.add(Request("line", tuple(range(20)), SamplingParams(max_tokens=5), priority=100))
    plan = scheduler.schedule(0.0)
    scheduler.update(plan, StepResult(plan.step, (7,), 0.01), 0.01)
    assert scheduler.pause(10.0, 0.01)


def test_a_pause_that_was_refused_leaves_the_next_step_its_time():
    scheduler = Scheduler(
        target_of(0.020), PagedKind(BlockPool(64, 16)), max_sequences=4, max_model_len=512, vocab_size=100
    )
    scheduler.add(Request("stream", tuple(range(20)), SamplingParams(max_tokens=5)))
    plan = scheduler.schedule(0.0)
    scheduler.update(plan, StepResult(plan.step, (7,), 0.01), 0.01)
    assert scheduler.pause(0.001, 0.01) and not scheduler.pause(1.0, 0.01)
    scheduler.add(Request("prompt", tuple(range(64)), SamplingParams(max_tokens=1)))
    plan = scheduler.schedule(9.0)
    assert plan is not None and plan.num_tokens == 65


def test_while_steps_are_in_flight_few_of_them_ask_whether_there_may_be_a_pause():
    asked = []

    class Asked(StallFree):
        def spare(self, running):
            asked.append(len(asked))
            return 0.0

    scheduler = Scheduler(Asked(64), PagedKind(BlockPool(64, 16)), max_sequences=4, max_model_len=512, vocab_size=100)
    scheduler.add(Request("stream", tuple(range(20)), SamplingParams(max_tokens=100)))
    plans = []
    for step in range(4 * PAUSE_STEPS):
        plans.append(scheduler.schedule(float(step)))
        assert not scheduler.pause(1.0, float(step))
        if len(plans) > 1:
            plan = plans.pop(0)
            scheduler.update(plan, StepResult(plan.step, (7,) * plan.num_sampled, 0.01), float(step))
    assert len(asked) == 4
