"""SleepHandler: orders to sleep and to wake up, one after the other, over a fake memory and a real scheduler."""

from __future__ import annotations

import itertools
import random
import threading
from typing import Any

import pytest

from holdfast.core.types import FinishReason
from holdfast.engine import messages
from holdfast.engine.process.parts import sleep as parts
from holdfast.engine.process.parts.sleep import SleepHandler
from holdfast.lm.parts.sleep.messages import Asleep, Sleep, SleepRefused, Slept, WakeUp
from holdfast.loop.loop import Loop
from tests.lm.parts.sleep.test_planner import Late
from tests.scheduling import FakeDevice, create_requests, create_scheduler, run_alone

BLOCKS = 32


class Memory:
    """The memory of a device that loses its content, and may refuse."""

    def __init__(self, device: FakeDevice) -> None:
        self.device = device
        self.absent: dict[str, int] = {}
        self.refusals: list[Exception] = []
        self.calls: list[Any] = []
        self.may_end = threading.Event()
        self.may_end.set()

    @property
    def is_awake(self) -> bool:
        return not self.absent

    def sleep(self, level: int) -> None:
        self._note(("sleep", level))
        self.absent = dict.fromkeys(("weights", "kv_cache"), level)
        self.device.slots = [None] * len(self.device.slots)

    def wake(self, tags: list[str]) -> None:
        self._note(("wake", *tags))
        for tag in tags or list(self.absent):
            self.absent.pop(tag, None)

    def _note(self, call: Any) -> None:
        self.calls.append(call)
        assert self.may_end.wait(10)
        if self.refusals:
            raise self.refusals.pop()


class Served:
    """The work of the engine's process between two steps, and the messages that it has sent."""

    def __init__(self) -> None:
        self.device = FakeDevice(BLOCKS, 4, 64, choose=random.Random(1))
        self.scheduler = create_scheduler(parts=[Late()], blocks=BLOCKS, budget=16, max_sequences=4, host_blocks=64)
        self.memory, self.woken = Memory(self.device), threading.Event()
        clock = itertools.count().__next__
        self.handler = SleepHandler(self.scheduler, self.memory, clock, self.woken.set)  # type: ignore[arg-type]
        self.loop = Loop(self.scheduler, self.device, 2, clock, halted=lambda: self.handler.halted)
        self.sent: list[Any] = []
        self.tokens: dict[str, tuple[int, ...]] = {}
        self.ends: dict[str, FinishReason | None] = {}

    def submit(self, *requests: Any) -> None:
        for request in requests:
            if not self.handler.take(request):
                self.device.expect(request)
                self.tokens[request.id] = ()
                self.loop.add(request)

    def turn(self) -> None:
        """One turn of `serve`: answers, then a step; wait where it would."""
        answers = [*self.handler.answers()]
        self.sent += answers
        for answer in answers:
            if isinstance(answer, messages.Outputs):
                self.ends |= dict(zip(answer.request_id, answer.finish_reason, strict=True))
        if self.loop.has_work():
            for output in self.loop.step() or ():
                self.tokens[output.request_id] += output.tokens
        elif self.handler.busy and not self.handler.ready:
            assert self.woken.wait(10), "nobody will wake the loop"
            self.woken.clear()

    def until_answered(self, number: int, turns: int = 500) -> Any:
        for _ in range(turns):
            found = [each for each in self.sent if getattr(each, "number", None) == number]
            if found:
                return found[0]
            self.turn()
        raise AssertionError(f"order {number} was not answered: {self.sent}")

    def order(self, message: Sleep | WakeUp) -> Any:
        self.handler.receive(message)
        return self.until_answered(message.number)

    def run(self) -> None:
        while self.loop.has_work():
            self.turn()


@pytest.fixture
def served() -> Served:
    return Served()


def test_an_idle_engine_sleeps_refuses_requests_and_serves_again_after(served):
    (request,) = create_requests(17, max_tokens=5)
    assert served.order(Sleep(1, 1, "abort")) == Slept(1)
    assert served.handler.stats() == {"sleep_level": 1} and served.handler.halted
    served.submit(request)
    served.turn()
    assert served.sent[-1] == Asleep("0") and not served.loop.has_work()
    assert served.order(WakeUp(2, [])) == Slept(2)
    assert served.handler.stats() == {"sleep_level": 0} and not served.handler.halted
    served.submit(request)
    served.run()
    assert served.tokens["0"] == run_alone(request)[0]


def test_abort_ends_requests_with_that_reason_and_their_tokens_are_found_again(served):
    requests = create_requests(16, 8, max_tokens=40)
    served.submit(*requests)
    for _ in range(6):
        served.turn()
    assert served.order(Sleep(1, 2, "abort")) == Slept(1)
    assert served.ends == {"0": FinishReason.ABORT, "1": FinishReason.ABORT}
    assert served.memory.calls == [("sleep", 2)] and not served.scheduler.entries
    served.order(WakeUp(2, []))
    served.submit(*requests)
    served.run()
    assert served.tokens == {request.id: run_alone(request)[0] for request in requests}
    assert served.scheduler.stats().prefix_hits_on_host == 16


def test_wait_lets_running_requests_end_and_refuses_new_ones_meanwhile(served):
    running, late = create_requests(16, 8, max_tokens=12)
    served.submit(running)
    served.turn()
    served.handler.receive(Sleep(1, 1, "wait"))
    served.turn()
    assert served.handler.stats() == {"sleep_level": 1} and not served.handler.halted
    served.submit(late)
    assert served.until_answered(1) == Slept(1)
    assert Asleep("1") in served.sent and served.tokens == {"0": run_alone(running)[0]}


def test_keep_suspends_requests_which_go_on_after_the_sleep(served):
    requests = create_requests(16, 8, max_tokens=12)
    served.submit(*requests)
    for _ in range(4):
        served.turn()
    assert served.order(Sleep(1, 1, "keep")) == Slept(1)
    before = dict(served.tokens)
    for _ in range(5):
        served.turn()
    assert served.tokens == before and all(len(tokens) < 12 for tokens in before.values())
    served.order(WakeUp(2, []))
    served.run()
    assert served.tokens == {request.id: run_alone(request)[0] for request in requests}


def test_memory_is_woken_up_in_parts_and_requests_wait_for_the_last(served):
    served.order(Sleep(1, 1, "abort"))
    assert served.order(WakeUp(2, ["weights"])) == Slept(2)
    assert served.handler.halted and served.handler.stats() == {"sleep_level": 1}
    assert served.handler.take(create_requests(3)[0])
    assert served.order(WakeUp(3, ["kv_cache"])) == Slept(3)
    assert not served.handler.halted and not served.handler.take(create_requests(3)[0])


def test_memory_that_was_woken_up_is_returned_by_the_next_order_to_sleep(served):
    served.order(Sleep(1, 1, "abort"))
    served.order(WakeUp(2, ["weights"]))
    assert served.order(Sleep(3, 2, "abort")) == Slept(3)
    assert served.memory.calls == [("sleep", 1), ("wake", "weights"), ("sleep", 2)]
    assert served.memory.absent == {"weights": 2, "kv_cache": 2} and served.handler.stats() == {"sleep_level": 2}


def test_an_engine_that_is_awake_wakes_up_at_once(served):
    assert served.order(WakeUp(1, ["weights"])) == Slept(1)
    assert served.memory.calls == []


def test_a_host_without_room_keeps_the_engine_awake(served):
    served.memory.refusals.append(MemoryError("the weights take 16 GB and 3 are free"))
    assert served.order(Sleep(1, 1, "abort")) == SleepRefused(1, "the weights take 16 GB and 3 are free")
    (request,) = create_requests(9)
    served.submit(request)
    served.run()
    assert served.tokens["0"] == run_alone(request)[0] and served.handler.stats() == {"sleep_level": 0}


@pytest.mark.parametrize(
    "error", [MemoryError("9 GB are free"), MemoryError(), OSError("no such file"), RuntimeError("CUDA error 4")]
)
def test_an_engine_whose_memory_is_not_to_be_had_sleeps_on_and_can_be_woken_later(served, error):
    served.order(Sleep(1, 1, "abort"))
    served.memory.refusals.append(error)
    assert served.order(WakeUp(2, [])) == SleepRefused(2, str(error) or "MemoryError")
    assert served.handler.halted and served.handler.take(create_requests(3)[0])
    assert served.order(WakeUp(3, [])) == Slept(3)


def test_waking_up_an_engine_that_still_waits_for_requests_refuses_the_sleep(served):
    (request,) = create_requests(16, max_tokens=30)
    served.submit(request)
    served.turn()
    served.handler.receive(Sleep(1, 1, "wait"))
    served.handler.receive(Sleep(2, 1, "wait"))
    served.turn()
    assert served.order(WakeUp(3, [])) == Slept(3)
    refused = [each for each in served.sent if isinstance(each, SleepRefused)]
    assert [each.number for each in refused] == [1, 2] and "woken up" in refused[0].reason
    served.run()
    assert served.tokens["0"] == run_alone(request)[0] and not served.memory.calls


def test_a_second_order_with_abort_ends_the_wait_of_the_first(served):
    (request,) = create_requests(16, max_tokens=60)
    served.submit(request)
    served.turn()
    served.handler.receive(Sleep(1, 1, "wait"))
    served.turn()
    served.handler.receive(Sleep(2, 1, "abort"))
    assert served.until_answered(1) == Slept(1) and served.until_answered(2) == Slept(2)
    assert served.ends == {"0": FinishReason.ABORT} and len(served.tokens["0"]) < 60


def test_messages_are_answered_while_memory_is_being_moved(served):
    served.memory.may_end.clear()
    served.handler.receive(Sleep(1, 1, "abort"))
    assert [*served.handler.answers()] == []
    served.handler.receive(WakeUp(2, []))
    assert served.handler.halted and [*served.handler.answers()] == [] and not served.handler.ready
    served.memory.may_end.set()
    assert served.until_answered(1) == Slept(1) and served.until_answered(2) == Slept(2)
    assert served.memory.calls == [("sleep", 1), ("wake",)] and served.memory.is_awake


def test_the_end_of_the_engine_waits_for_memory_that_is_being_moved(served):
    served.memory.may_end.clear()
    served.handler.receive(Sleep(1, 1, "abort"))
    assert [*served.handler.answers()] == []
    threading.Timer(0.01, served.memory.may_end.set).start()
    served.handler.stop()
    assert served.memory.absent


def test_state_that_lower_tiers_take_too_slowly_is_given_up_after_a_while(served, monkeypatch):
    (request,) = create_requests(16, max_tokens=2)
    served.submit(request)
    served.run()

    class Below:
        num_blocks, backlog, is_reading = 0, True, False

    monkeypatch.setattr(parts, "FLUSH_SECONDS", 20)  # of a clock that ticks at each look
    served.scheduler.pool.below = Below()
    assert served.order(Sleep(1, 1, "abort")) == Slept(1)
    assert served.scheduler.pool.dropped == 4
