"""The notes of steps, and when they are sent."""

from __future__ import annotations

from holdfast.engine.messages import Ask, Stats, Steps, Submit
from holdfast.engine.process import serve as serving
from holdfast.engine.process.serve import serve
from holdfast.engine.process.step_log import StepLog
from holdfast.lm.types import Segment, StepPlan, StepResult
from holdfast.loop.loop import Loop
from tests.engine.process.test_serve import ShutdownWhenIdle, engine
from tests.scheduling import FakeDevice, create_requests, create_scheduler


def test_each_step_is_noted_once_with_its_tokens_and_time():
    (request,) = create_requests(5, max_tokens=4)
    device = FakeDevice(64, 4)
    device.expect(request)
    log = StepLog(float)
    loop = Loop(create_scheduler(), device, 2, clock=lambda: 0.0, observers=[log])
    loop.add(request)
    seconds = []
    while loop.has_work():
        loop.step()
        seconds += log.take().seconds
        assert len(log) == 0
    assert len(seconds) == 4 and all(each >= 0 for each in seconds)


def test_a_step_without_tokens_is_not_noted():
    log = StepLog(float)
    log.planned(StepPlan(0, ()))
    log.ended(StepResult(0, (), 0.01))
    assert log.take() == Steps([], [], 0.0, (0.01,))


def test_a_step_that_was_in_flight_before_is_not_noted():
    log = StepLog(float)
    log.ended(StepResult(6, (1,), 0.01))
    log.planned(StepPlan(8, [Segment("a", 0, 0, 2, (1, 2), None)]))
    log.ended(StepResult(7, (1,), 0.01))
    log.ended(StepResult(8, (), 0.02))
    assert log.take() == Steps([2], [0.02], 0.0, (0.02,))


def test_the_time_with_steps_in_flight_leaves_out_pauses_and_counts_no_time_twice():
    times = iter([1.0, 2.5, 4.0, 4.25, 5.0])
    log = StepLog(lambda: next(times))
    log.planned(StepPlan(0, ()))  # at 1.0
    log.planned(StepPlan(1, ()))
    log.ended(StepResult(0, (), 0.75, stages=(0.5, 0.25)))
    log.ended(StepResult(1, (), 0.75, stages=(0.25, 0.5)))  # at 2.5
    assert log.take() == Steps([], [], 1.5, (0.75, 0.75))
    log.planned(StepPlan(2, ()))  # at 4.0, after a pause
    assert log.take().under_way == 0.25
    log.ended(StepResult(2, (), 0.5))  # at 5.0
    assert log.take() == Steps([], [], 0.75, (0.5,))


def test_the_engine_tells_its_steps_before_its_stats():
    (request,) = create_requests(5, max_tokens=3)
    parent = ShutdownWhenIdle(Submit(request), None, None, None, Ask(1))
    serve(engine(request, steps_in_flight=1), parent, ())
    told = [message for message in parent.sent if isinstance(message, Steps | Stats)]
    assert [type(message) for message in told] == [Steps, Stats]
    assert told[0].tokens == [5, 1, 1]


def test_the_engine_tells_many_steps_unasked(monkeypatch):
    monkeypatch.setattr(serving, "STEPS_PER_MESSAGE", 8)
    (request,) = create_requests(5, max_tokens=12)
    parent = ShutdownWhenIdle(Submit(request))
    serve(engine(request), parent, ())
    (told,) = [message for message in parent.sent if isinstance(message, Steps)]
    assert told.tokens == [5, *[1] * 7] and len(told.seconds) == 8
