"""Handlers: who gets which message, what a message is answered whose part is off, and how pauses are used."""

from __future__ import annotations

from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

import pytest

from holdfast.core.columns import Columns
from holdfast.core.types import Request, SamplingParams, SequenceOutput
from holdfast.engine import messages
from holdfast.engine.process.build import PARTS, refusing
from holdfast.engine.process.handler import Gate, Handler, Router, find
from holdfast.engine.process.requests import ClockHandler, RequestHandler, StatsHandler
from holdfast.engine.process.serve import AWAITED_SECONDS, LULL_SECONDS, await_messages, do_step
from holdfast.engine.process.step_log import StepLog
from holdfast.lm.parts.adapters.messages import AdapterRefused, AdapterUnloaded, LoadAdapter, UnloadAdapter
from holdfast.lm.parts.moves.messages import ChunksFetched, ChunksFound, FetchChunks, FindChunks, StopFetch
from holdfast.lm.parts.tuning.messages import ChangeJob, JobRefused, RunCall, StartDriven, StartJob
from holdfast.lm.types import SchedulerStats, StepPlan, StepResult


class Taking(Handler):
    """Takes some kinds of messages, and answers each with its number."""

    def __init__(self, *receives: type, stats: dict[str, float] | None = None, **states: bool) -> None:
        self.receives = receives
        self.taken: list[Any] = []
        self._stats, self._states = stats or {}, states

    def receive(self, message: Any) -> None:
        self.taken.append(message)

    def answers(self) -> Iterable[Any]:
        while self.taken:
            yield AdapterUnloaded(self.taken.pop(0).number)

    def stats(self) -> dict[str, float]:
        return self._stats

    @property
    def ready(self) -> bool:
        return self._states.get("ready", False)

    @property
    def busy(self) -> bool:
        return self._states.get("busy", False)

    @property
    def awaited(self) -> bool:
        return self._states.get("awaited", False)

    def between_steps(self) -> bool:
        return self._states.get("between", False)


def test_each_message_goes_to_the_handler_of_its_kind_in_order_and_answers_wait_until_they_are_sent() -> None:
    sent: list[Any] = []
    adapters, jobs, silent = Taking(LoadAdapter, UnloadAdapter), Taking(ChangeJob), Handler()
    router = Router([adapters, jobs, silent], sent.append)
    arrived = [
        UnloadAdapter(1, "a"),
        ChangeJob(2, "j", "pause"),
        LoadAdapter(3, "b", "/there"),
    ]
    assert router.receive(arrived)
    assert (adapters.taken, jobs.taken, sent) == ([arrived[0], arrived[2]], [arrived[1]], [])
    router.send_answers()
    assert [answer.number for answer in sent] == [1, 3, 2]
    router.send_answers()
    assert len(sent) == 3


@pytest.mark.parametrize(
    ("message", "answer"),
    [
        (LoadAdapter(4, "a", "/there"), AdapterRefused),
        (UnloadAdapter(4, "a"), AdapterRefused),
        (StartJob(4, None), JobRefused),  # type: ignore[arg-type]
        (ChangeJob(4, "j", "pause"), JobRefused),
        (StartDriven(4, None), JobRefused),  # type: ignore[arg-type]
        (RunCall(4, "j", 0), JobRefused),
        (FindChunks(4, [b"a"]), ChunksFound),
        (FetchChunks(4, [b"a"], [0], "there:1", 16), ChunksFetched),
    ],
)
def test_a_message_whose_part_is_off_is_answered_once_by_its_number(message: Any, answer: type) -> None:
    sent: list[Any] = []
    router = Router([refusing(PARTS, [])], sent.append)
    assert router.receive([message, StopFetch(4)])
    router.send_answers()
    router.send_answers()
    (said,) = sent
    assert isinstance(said, answer) and said.number == 4  # type: ignore[attr-defined]
    if isinstance(said, ChunksFound | ChunksFetched):
        assert getattr(said, "tokens", 0) == 0 and getattr(said, "device", 0) == 0
    else:
        assert "this engine" in said.reason  # type: ignore[attr-defined]


def test_nothing_behind_the_message_that_ends_the_engine_is_taken() -> None:
    handler = Taking(ChangeJob)
    router = Router([handler], lambda message: None)
    first, last = (ChangeJob(number, "j", "pause") for number in (1, 2))
    assert not router.receive([first, messages.Shutdown(), last])
    assert handler.taken == [first]


def test_a_message_that_no_engine_knows_is_a_fault_with_its_name() -> None:
    with pytest.raises(RuntimeError, match="told to start twice"):
        Router([], print).receive([messages.Start(None, 0.0)])  # type: ignore[arg-type]
    with pytest.raises(RuntimeError, match="the engine of a language model was sent Hello"):
        Router([], print).receive([messages.Hello(0.0)])  # type: ignore[list-item]


def test_a_handler_is_found_by_its_class() -> None:
    taking = Taking()
    assert find([Handler(), taking], Taking) is taking
    with pytest.raises(LookupError, match="the engine has no Taking"):
        find([Handler()], Taking)


class Taker(Gate):
    """A gate that takes the requests of one tenant."""

    def __init__(self, prefix: str) -> None:
        self.prefix = prefix
        self.asked: list[str] = []
        self.aborted: list[str] = []

    def take(self, request: Request) -> bool:
        self.asked.append(request.id)
        return request.id.startswith(self.prefix)

    def abort(self, request_id: str) -> None:
        self.aborted.append(request_id)


def test_a_request_is_queued_unless_a_gate_takes_it_and_an_abort_reaches_all_of_them() -> None:
    added: list[str] = []
    aborted: list[str] = []

    def add(request: Request) -> None:
        if request.id == "c3":
            raise ValueError("it is bad")
        added.append(request.id)

    sent: list[Any] = []
    first, second = Taker("a"), Taker("b")
    loop: Any = SimpleNamespace(add=add, abort=aborted.append)
    handler = RequestHandler(loop, sent.append, [first, second])
    for name in ("a1", "b1", "c1", "c3"):
        handler.receive(messages.Submit(Request(name, (1,), SamplingParams())))
    assert (added, first.asked, second.asked) == (["c1"], ["a1", "b1", "c1", "c3"], ["b1", "c1", "c3"])
    assert [(message.request_id, message.reason) for message in sent] == [("c3", "it is bad")]
    handler.receive(messages.Abort("b1"))
    assert aborted == first.aborted == second.aborted == ["b1"]


def test_the_figures_are_those_of_the_planner_with_what_handlers_know_after_the_steps_so_far() -> None:
    sent: list[Any] = []
    stats = SchedulerStats(1, *[0] * 8)
    loop: Any = SimpleNamespace(stats=lambda: stats, prepared=True)
    log = StepLog(float)
    log.planned(StepPlan(0, ()))
    log.ended(StepResult(0, (), 0.5))
    handlers = [Taking(stats={"chunk_rate": 5.0}), Handler(), Taking(stats={"chunk_failures": 2})]
    StatsHandler(loop, sent.append, log, handlers).receive(messages.Ask(7))
    steps, answer = sent
    assert isinstance(steps, messages.Steps) and answer.number == 7
    assert (answer.stats.waiting, answer.stats.chunk_rate, answer.stats.chunk_failures) == (1, 5.0, 2)


@pytest.mark.parametrize(("prepared", "ready", "warming"), [(False, 4, 1), (True, 3, 1), (False, 3, 1), (True, 4, 0)])
def test_an_engine_is_warm_once_nothing_is_left_to_prepare_and_its_host_tier_is_complete(
    prepared: bool, ready: int, warming: int
) -> None:
    sent: list[Any] = []
    stats = SchedulerStats(*[0] * 9, host_blocks_total=4, host_blocks_ready=ready)
    loop: Any = SimpleNamespace(stats=lambda: stats, prepared=prepared)
    StatsHandler(loop, sent.append, StepLog(float), ()).receive(messages.Ask(7))
    assert sent[1].stats.warming == warming


def test_the_time_is_given_when_it_is_asked_for() -> None:
    sent: list[Any] = []
    ClockHandler(sent.append, lambda: 42.5).receive(messages.Tick())
    assert sent == [messages.Clock(42.5)]


class Parent:
    """Notes what the loop does with its client."""

    def __init__(self, arrives: bool = False) -> None:
        self.did: list[Any] = []
        self.arrives = arrives

    def poll(self, seconds: float) -> bool:
        self.did.append(("poll", seconds))
        return self.arrives

    def wait(self, seconds: float | None = None) -> None:
        self.did.append(("wait", seconds))

    def receive(self) -> list[Any]:
        self.did.append("receive")
        return ["message"]

    def send(self, message: Any) -> None:
        self.did.append(message)


def pause(
    handlers: list[Handler], prepares: int = 0, arrives: bool = False, lull: float = LULL_SECONDS
) -> tuple[Any, Parent, int]:
    """The messages of a pause, the calls of the client, and how often the loop prepared something."""
    left = [prepares]

    def prepare() -> bool:
        left[0] -= 1
        return left[0] >= 0

    parent, watched = Parent(arrives), SimpleNamespace(on=False)
    loop: Any = SimpleNamespace(prepare=prepare, prepared=not prepares)
    found = await_messages(loop, parent, handlers, watched, lull)  # type: ignore[arg-type]
    return found, parent, prepares - max(0, left[0])


def test_a_pause_waits_for_no_message_while_a_handler_has_something_to_do_or_is_about_to() -> None:
    found, parent, _ = pause([Handler(), Taking(ready=True)])
    assert (found, parent.did) == ([], [])
    found, parent, _ = pause([Handler(), Taking(busy=True)])
    assert (found, parent.did) == ([], [("wait", None)])
    found, parent, _ = pause([Handler(), Taking()])
    assert found == ["message"] and parent.did[-1] == "receive"


def test_a_pause_prepares_until_there_is_nothing_left_or_a_message_comes() -> None:
    assert pause([Taking(ready=True)], prepares=3)[2] == 3
    _, parent, prepared = pause([Taking(ready=True)], prepares=3, arrives=True)
    assert prepared == 1 and parent.did == [("poll", 0)]


def test_a_client_that_asks_again_at_once_does_not_wait_for_a_preparation() -> None:
    found, parent, prepared = pause([Taking()], prepares=3, arrives=True)
    assert (found, prepared) == (["message"], 0) and parent.did == [("poll", LULL_SECONDS), "receive"]
    _, parent, prepared = pause([Taking()], prepares=3)
    assert prepared == 3 and parent.did[0] == ("poll", LULL_SECONDS)


def test_after_a_lull_something_is_prepared_before_each_message_that_comes() -> None:
    _, parent, prepared = pause([Taking()], prepares=3, arrives=True, lull=-0.5)
    assert prepared == 1 and parent.did[0] == ("poll", 0)


def step(outputs: Any, *handlers: Handler) -> tuple[list[Any], int]:
    """Run one step of a loop that gives these outputs. Returns the calls of the client, and how often it prepares."""
    prepared: list[int] = []
    loop: Any = SimpleNamespace(step=lambda: outputs, prepare=lambda: prepared.append(1))
    parent = Parent()
    do_step(loop, parent, handlers)  # type: ignore[arg-type]
    return parent.did, len(prepared)


def test_a_step_sends_its_outputs_or_uses_the_pause_or_waits_for_what_nothing_runs_without() -> None:
    output = SequenceOutput("a", (1,), None, 0, 0.0)
    columns = {field: [value] for field, value in output._asdict().items()}
    between, awaited = Taking(between=True), Taking(awaited=True)
    did, prepared = step(Columns(SequenceOutput, **columns), between, awaited)
    assert [type(message) for message in did] == [messages.Outputs] and prepared == 0
    assert step(None, between, awaited) == ([], 1)
    assert step(None, Handler(), awaited) == ([("wait", AWAITED_SECONDS)], 0)
    assert step([], awaited) == ([], 0), "a step ran, without an output"
    assert step(None, Handler()) == ([], 0)
