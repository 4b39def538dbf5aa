"""Serving: how messages and steps take turns, and how an error ends the engine."""

from __future__ import annotations

import gc
import itertools
import queue
import sys
import time
import types
from collections import deque

import pytest

from holdfast.engine.link import one_line
from holdfast.engine.messages import Abort, Ask, Outputs, Refused, Shutdown, Start, Stats, Submit
from holdfast.engine.process.build import Engine
from holdfast.engine.process.serve import LULL_SECONDS, MESSAGE_SECONDS, Loading, for_a_while, make_context, run, serve
from holdfast.engine.ranks.ranks import NO_RANKS
from holdfast.lm.config import EngineConfig
from holdfast.loop.loop import Loop
from tests.scheduling import FakeDevice, create_requests, create_scheduler, run_alone


class Script:
    """A client with a script: all messages before a `None` have arrived before the next step."""

    def __init__(self, *messages):
        self.messages = deque(messages)
        self.sent = []

    def send(self, message):
        self.sent.append(message)

    def poll(self, seconds):
        return True

    def wake(self):
        pass

    def receive(self):
        while self.messages[0] is None:
            self.messages.popleft()
        return [self.messages.popleft()]

    def waiting(self):
        while self.messages:
            message = self.messages.popleft()
            if message is None:
                return
            yield message


class ShutdownWhenIdle(Script):
    """Ends the engine where it would wait for a message."""

    def receive(self):
        return super().receive() if self.messages else [Shutdown()]


def engine(*requests, steps_in_flight=2):
    device = FakeDevice(64, 4)
    for request in requests:
        device.expect(request)
    return Loop(create_scheduler(), device, steps_in_flight, clock=lambda: 0.0)


def tokens_of(sent, request_id):
    outputs = [output for message in sent if isinstance(message, Outputs) for output in message.outputs]
    return tuple(token for output in outputs if output.request_id == request_id for token in output.tokens)


@pytest.mark.parametrize("steps_in_flight", [1, 2])
def test_each_step_sends_one_message_with_all_its_tokens(steps_in_flight):
    requests = create_requests(5, 9, max_tokens=6)
    parent = ShutdownWhenIdle(*map(Submit, requests))
    serve(engine(*requests, steps_in_flight=steps_in_flight), parent, ())
    assert len(parent.sent) == 6
    assert all(len(message.outputs) == 2 for message in parent.sent)
    sent_at = [message.sent_at for message in parent.sent]
    assert sent_at == sorted(sent_at) and sent_at[0] > 0 and sent_at[-1] <= time.monotonic()
    for request in requests:
        assert tokens_of(parent.sent, request.id) == run_alone(request)[0]


def test_messages_that_arrive_during_a_step_are_handled_before_the_next_step():
    first, second = create_requests(5, 9, max_tokens=4)
    parent = ShutdownWhenIdle(Submit(first), None, Submit(second), Ask(1))
    serve(engine(first, second), parent, ())
    stats = next(message for message in parent.sent if isinstance(message, Stats))
    assert (stats.number, stats.stats.waiting, stats.stats.running) == (1, 1, 1)
    assert tokens_of(parent.sent, second.id) == run_alone(second)[0]


def test_abort_frees_blocks_before_the_next_step():
    (request,) = create_requests(9, max_tokens=50)
    parent = ShutdownWhenIdle(Submit(request), None, Ask(1), Abort(request.id), Ask(2))
    serve(engine(request), parent, ())
    before, after = (message.stats for message in parent.sent if isinstance(message, Stats))
    assert before.blocks_used > 0
    assert (after.running, after.blocks_used) == (0, 0)


def test_a_request_that_can_never_run_is_refused_and_others_continue():
    good, endless = create_requests(5, 500)
    parent = ShutdownWhenIdle(Submit(endless), Submit(good), Submit(good))
    serve(engine(good), parent, ())
    refusals = [message for message in parent.sent if isinstance(message, Refused)]
    assert [refusal.request_id for refusal in refusals] == [endless.id, good.id]
    assert "500 tokens" in refusals[0].reason and "already being served" in refusals[1].reason
    assert tokens_of(parent.sent, good.id) == run_alone(good)[0]


def test_shutdown_ends_the_engine_while_requests_run():
    (request,) = create_requests(5, max_tokens=50)
    parent = Script(Submit(request), None, Shutdown())
    serve(engine(request), parent, ())
    assert len(parent.sent) == 1


def test_an_exception_of_a_step_ends_serving():
    class Broken(FakeDevice):
        def collect(self):
            raise RuntimeError("the device fell off the bus")

    (request,) = create_requests(5)
    loop = Loop(create_scheduler(), Broken(64, 4), 2, clock=lambda: 0.0)
    with pytest.raises(RuntimeError, match="fell off the bus"):
        serve(loop, Script(Submit(request)), ())


@pytest.fixture
def collector():
    """The garbage collector, left as it was."""
    yield gc
    gc.enable()
    gc.unfreeze()


def test_garbage_collection_is_off_while_steps_run(monkeypatch, collector):
    (request,) = create_requests(5)
    seen = []

    class Watching(FakeDevice):
        def submit(self, plan):
            seen.append((collector.isenabled(), collector.get_freeze_count() > 0))
            super().submit(plan)

    device = Watching(64, 4)
    device.expect(request)
    loop = Loop(create_scheduler(), device, 2, clock=lambda: 0.0)
    built = Engine(loop, None, (), NO_RANKS)
    monkeypatch.setattr("holdfast.engine.process.build.build_engine", lambda config, **options: built)
    run(Start(EngineConfig(), 0.0), ShutdownWhenIdle(Submit(request)))
    assert seen == [(False, True)] * 4


@pytest.mark.parametrize("quiet", [False, True])
def test_all_garbage_is_collected_only_in_a_long_pause(quiet, monkeypatch):
    collected = []
    monkeypatch.setattr(gc, "collect", lambda generation=2: collected.append(generation))
    monkeypatch.setattr("holdfast.engine.process.serve.STEPS_PER_COLLECTION", 5)
    (request,) = create_requests(5, max_tokens=50)
    parent = ShutdownWhenIdle(Submit(request))
    parent.poll = lambda seconds: not quiet
    serve(engine(request), parent, ())
    assert collected.count(0) > 10
    assert collected.count(2) == (2 if quiet else 0)


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (ValueError("two\n  lines"), "two lines"),
        (MemoryError("0.1 GB are left"), "0.1 GB are left"),
        (RuntimeError("CUDA error"), "RuntimeError: CUDA error"),
        (KeyError(), "KeyError"),
        (ValueError("\ud800 is no model"), "\\ud800 is no model"),
    ],
)
def test_an_error_is_reported_in_one_line(error, line):
    assert one_line(error) == line


def test_a_pause_is_used_bit_by_bit_until_a_message_arrives():
    done = []
    request, *_ = create_requests(5, max_tokens=2)

    class Client(ShutdownWhenIdle):
        def poll(self, seconds):
            return seconds > LULL_SECONDS or (not seconds and len(done) in (2, 5))

    device = FakeDevice(64, 4)
    device.expect(request)

    def prepare():
        assert not device.plans, "nothing is in flight"
        done.append(len(done))
        return len(done) < 7

    loop = Loop(create_scheduler(), device, 2, lambda: 0.0, prepare=prepare)
    parent = Client(Ask(1), None, Submit(request))
    serve(loop, parent, ())
    assert len(done) == 7
    assert tokens_of(parent.sent, request.id) == run_alone(request)[0]


def test_an_engine_prepares_though_it_is_asked_all_the_time_how_it_is(monkeypatch):
    at = itertools.count(0.0, 0.01)  # each look at the clock is 10 ms later, so the steps take longer than a lull
    monkeypatch.setattr("holdfast.engine.process.serve.time", types.SimpleNamespace(monotonic=lambda: next(at)))
    request, *_ = create_requests(5, max_tokens=20)
    device = FakeDevice(64, 4)
    device.expect(request)
    done, answered = [], []

    class Asking(Script):
        def poll(self, seconds):
            return True

        def receive(self):
            answered.append(len(done))
            return [Ask(len(answered)) if len(answered) < 100 else Shutdown()]

    def prepare():
        done.append(len(answered))
        return len(done) < 4

    parent = Asking(Submit(request))
    serve(Loop(create_scheduler(), device, 2, lambda: 0.0, prepare=prepare), parent, ())
    assert len(done) >= 4 and done[0] > 2, "a lull after the last step, not at once"
    assert sum(isinstance(message, Stats) for message in parent.sent) == 99


def test_an_import_that_fails_while_the_client_gets_ready_is_raised_to_it(monkeypatch, collector):
    monkeypatch.setitem(sys.modules, "holdfast.engine.process.build", None)
    with pytest.raises(ImportError, match=r"holdfast\.engine\.process\.build"):
        run(Start(EngineConfig(), 0.0), Script(), Loading("cpu"))


def test_imports_are_not_interrupted_by_the_collector_and_not_looked_at_again(monkeypatch, collector):
    enabled = []

    monkeypatch.setattr("torch.cuda.is_available", lambda: enabled.append(collector.isenabled()))
    monkeypatch.setattr("holdfast.engine.process.serve.make_context", lambda gpu: None)
    Loading("auto:0").wait()
    assert enabled == [False] and collector.isenabled() and collector.get_freeze_count() > 0


@pytest.mark.parametrize(("device", "gpus"), [("cpu", []), ("auto:0", [0]), ("cuda:3", [3])])
def test_a_process_that_loads_makes_the_context_of_its_own_gpu_alone(device, gpus, monkeypatch, collector):
    made, woken = queue.SimpleQueue(), queue.SimpleQueue()
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("holdfast.engine.process.serve.make_context", made.put)
    monkeypatch.setattr("holdfast.engine.process.serve.wake_gpu", woken.put)
    Loading(device).wait()
    assert [each.get(timeout=60) for each in (made, woken) for _ in gpus] == gpus * 2
    assert made.empty() and woken.empty()


class Driver:
    """A GPU's driver that notes its calls."""

    def __init__(self, status):
        self.calls, self.devices, self.status = [], [], status

    def cuDeviceGet(self, device, number):
        self.calls.append("cuDeviceGet")
        self.devices.append(number)
        return self.status

    def __getattr__(self, name):
        return lambda *given: self.calls.append(name) or self.status


@pytest.mark.parametrize(
    ("cuda", "status", "calls"),
    [(True, 0, ["cuInit", "cuDeviceGet", "cuDevicePrimaryCtxRetain"]), (True, 100, ["cuInit"]), (False, 0, [])],
)
def test_a_context_is_made_without_pytorch_where_pytorch_will_use_the_gpu(cuda, status, calls, monkeypatch, tmp_path):
    driver = Driver(status)
    (tmp_path / "lib").mkdir()
    if cuda:
        (tmp_path / "lib" / "libtorch_cuda.so").touch()
    found = types.SimpleNamespace(origin=str(tmp_path / "__init__.py"))
    monkeypatch.setattr("importlib.util.find_spec", lambda name: found)
    monkeypatch.setattr("ctypes.CDLL", lambda name: driver)
    monkeypatch.setenv("CUDA_MODULE_LOADING", "LAZY")
    make_context(2)
    assert driver.calls == calls and driver.devices == [2] * ("cuDeviceGet" in calls)


def test_a_machine_without_a_driver_makes_no_context(monkeypatch, tmp_path):
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib" / "libtorch_cuda.so").touch()
    found = types.SimpleNamespace(origin=str(tmp_path / "__init__.py"))
    monkeypatch.setattr("importlib.util.find_spec", lambda name: found)
    monkeypatch.setenv("CUDA_MODULE_LOADING", "LAZY")

    def missing(name):
        raise OSError(f"{name}: cannot open shared object file")

    monkeypatch.setattr("ctypes.CDLL", missing)
    make_context(0)


def test_messages_that_take_long_leave_the_rest_until_after_the_next_step():
    clock = itertools.count(step=MESSAGE_SECONDS / 2).__next__
    arrived = iter([Abort("a"), Abort("b"), Abort("c"), Abort("d")])
    assert [each.request_id for each in for_a_while(arrived, clock)] == ["a", "b"]
    assert [each.request_id for each in for_a_while(arrived, clock)] == ["c", "d"]
