"""Clients: several clients of one engine, over real sockets, and a loop that the tests play."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import zmq
from fake_engine import engine_info

from holdfast.core.types import AdapterInfo, FinishReason, Identity, Request, SamplingParams
from holdfast.core.version import __version__
from holdfast.engine import messages
from holdfast.engine.activity import StepRecord
from holdfast.engine.link import Parent
from holdfast.engine.process import clients
from holdfast.engine.process.clients import LEFT_SECONDS, LOOKS, Clients
from holdfast.engine.process.door import Door
from holdfast.engine.process.held import GRACE_SECONDS
from holdfast.engine.spawn import Link
from holdfast.engine.wire import WIRE
from holdfast.lm.config import EngineConfig
from holdfast.lm.parts.adapters.messages import AdapterLoaded, AdapterUnloaded, LoadAdapter, UnloadAdapter
from holdfast.lm.parts.moves.messages import ChunksFetched, FetchChunks, StopFetch
from holdfast.lm.parts.tuning.messages import (
    CallDone,
    ChangeJob,
    DrivenInfo,
    DrivenProgress,
    DrivenStart,
    DrivenStarted,
    JobInfo,
    JobStart,
    JobStarted,
    RunCall,
    StartDriven,
    StartJob,
)
from holdfast.lm.types import SchedulerStats


def adapter(name: str) -> AdapterInfo:
    return AdapterInfo(f"{name}@1", name, 4, 10, ())


INFO = engine_info(adapters=(adapter("start"),))


class Peer:
    """A client at the other end of a socket."""

    def __init__(self, socket: zmq.Socket[bytes], house: House) -> None:
        self.socket, self._house = socket, house

    def send(self, *sent: Any) -> None:
        for message in sent:
            self.socket.send(messages.encode(message))
            self._house.sent += 1

    def read(self) -> Any:
        until = time.monotonic() + 200
        while not self.socket.poll(20):
            assert time.monotonic() < until, "nothing came"
            self._house.go_on()
        return messages.decode_from_engine(self.socket.recv())

    def reads_nothing(self) -> bool:
        return not self.socket.poll(50)


class House:
    """An engine's clients, with the ends of their sockets."""

    def __init__(self, directory: Any, **door: Any) -> None:
        self.now = 100.0
        self.context = zmq.Context()
        self.sockets: list[zmq.Socket[bytes]] = []
        started = self.socket()
        started.bind(f"ipc://{directory}/parent")
        self.early: list[Any] = []
        """Messages for the loop that came while a peer waited for an answer."""
        self.parent, self.address = Peer(started, self), f"{directory}/engine.sock"
        self.link = Parent(Link(f"ipc://{directory}/parent"))
        self.door = Door(self.address, **door)
        welcome = messages.Attached(EngineConfig(), INFO, b"profile")
        self.clients = Clients(self.link, self.door, welcome, lambda: self.now)
        self.sent = self.received = 0
        """Numbers of messages that the peers have sent, and of those that have arrived."""
        for end in (self.link, self.door):
            end.waiting = partial(self._counted, end.waiting)  # type: ignore[attr-defined]

    def socket(self) -> zmq.Socket[bytes]:
        self.sockets.append(self.context.socket(zmq.DEALER))
        return self.sockets[-1]

    def connect(self, queue: int = 0) -> Peer:
        socket = self.socket()
        socket.setsockopt(zmq.RCVHWM, queue)
        socket.setsockopt(zmq.RECONNECT_IVL, -1)
        socket.connect(f"ipc://{self.address}")
        return Peer(socket, self)

    def attach(self) -> Peer:
        peer = self.connect()
        peer.send(messages.Attach(__version__, WIRE))
        assert self.take(0) == []
        assert isinstance(peer.read(), messages.Attached)
        return peer

    def go_on(self) -> None:
        """Handle what has come, which on a busy machine may be later than a test expects."""
        self.clients.poll(0.0)
        self.early += self.clients.waiting()

    def _counted(self, waiting: Callable[[], Iterator[Any]]) -> Iterator[Any]:
        for each in waiting():
            self.received += 1
            yield each

    def take(self, count: int) -> list[Any]:
        """Wait until the loop has this many messages, and until all that the peers have sent was handled."""
        got, until = self.early, time.monotonic() + 200
        self.early = []
        while True:
            if self.received < self.sent:
                self.clients.poll(60.0)
            got += self.clients.waiting()
            if len(got) >= count and self.received >= self.sent:
                return got
            assert time.monotonic() < until, f"{len(got)} messages, of {count}"
            self.clients.poll(0.02)

    def outputs(self, **ended: bool) -> None:
        """Send one token for each engine's id of a request."""
        count = len(ended)
        reasons = [FinishReason.LENGTH if end else None for end in ended.values()]
        self.clients.send(
            messages.Outputs(
                [*ended], [(at,) for at in range(count)], reasons, [0] * count, [0.0] * count, [0] * count,
                [()] * count, [()] * count, [b""] * count, [(0, 0, 0)] * count, [()] * count, sent_at=7.5,
            )
        )  # fmt: skip

    def close(self) -> None:
        self.door.close()
        self.link.close()
        for socket in self.sockets:
            socket.close(linger=0)
        self.context.term()


@pytest.fixture
def house(tmp_path: Any) -> Iterator[House]:
    made = House(tmp_path)
    yield made
    made.close()


def submit(id: str) -> messages.Submit:
    params = SamplingParams(max_tokens=4)
    return messages.Submit(Request(id=id, prompt=(1, 2), params=params, identity=Identity("m"), arrival=1.0))


def ids(arrived: list[Any]) -> list[str]:
    return [each.request.id for each in arrived]


def test_equal_request_ids_of_two_clients_stay_apart(house: House) -> None:
    one, two = house.attach(), house.attach()
    one.send(submit("a"))
    first = ids(house.take(1))
    two.send(submit("a"))
    second = ids(house.take(1))
    assert first != second
    house.outputs(**{first[0]: False, second[0]: True})
    mine, other = one.read(), two.read()
    assert (mine.request_id, mine.tokens, mine.finish_reason) == (["a"], [(0,)], [None])
    assert (other.request_id, other.tokens, other.finish_reason) == (["a"], [(1,)], [FinishReason.LENGTH])
    assert mine.sent_at == other.sent_at == 7.5
    two.send(messages.Abort("a"))
    assert [each.request_id for each in house.take(1)] == second


def test_the_parent_is_one_of_the_clients(house: House) -> None:
    one = house.attach()
    house.parent.send(submit("a"))
    (id,) = ids(house.take(1))
    house.outputs(**{id: True})
    assert house.parent.read().request_id == ["a"] and one.reads_nothing()
    house.parent.send(messages.Shutdown())
    assert [type(each) for each in house.take(1)] == [messages.Shutdown]


def test_a_client_whose_request_id_is_in_use_is_refused(house: House) -> None:
    one = house.attach()
    one.send(submit("a"), submit("a"), messages.Ask(1))
    id = house.take(2)[0].request.id
    refused = one.read()
    assert (refused.request_id, refused.param) == ("a", "request_id")
    house.outputs(**{id: True})
    one.send(submit("a"))
    assert ids(house.take(1)) == [id], "an id can be used again once its request has ended"


def test_answers_go_to_the_client_that_asked_under_its_own_number(house: House) -> None:
    one, two = house.attach(), house.attach()
    two.send(messages.Ask(7))
    (ask,) = house.take(1)
    one.send(messages.Ask(7))
    (later,) = house.take(1)
    assert ask.number != later.number
    house.clients.send(messages.Stats(ask.number, stats(waiting=3)))
    house.clients.send(messages.Stats(later.number, stats(waiting=4)))
    assert (one.read().stats.waiting, two.read().stats.waiting) == (4, 3)
    one.send(messages.Tick())
    house.take(1)
    house.clients.send(messages.Clock(5.0))
    assert one.read().now == 5.0 and two.reads_nothing()


def test_a_fetch_is_stopped_by_its_own_client_alone(house: House) -> None:
    one, two = house.attach(), house.attach()
    one.send(FetchChunks(0, [b"d"], [0], "host:1", 16))
    (fetch,) = house.take(1)
    two.send(StopFetch(0))
    assert house.take(0) == []
    one.send(StopFetch(0))
    assert house.take(1) == [StopFetch(fetch.number)]
    house.clients.send(ChunksFetched(fetch.number, 16))
    assert one.read() == ChunksFetched(0, 16)


def test_garbage_costs_its_sender_the_connection_and_nobody_else(house: House) -> None:
    one, two = house.attach(), house.attach()
    one.send(submit("a"))
    two.send(submit("b"))
    mine, other = sorted(ids(house.take(2)))  # messages of two connections may come in either order
    one.socket.send(b"\xc1 garbage")
    assert [(type(each), each.request_id) for each in house.take(1)] == [(messages.Abort, mine)]
    assert "no message" in one.read().reason
    house.outputs(**{mine: False, other: False})
    assert two.read().request_id == ["b"] and one.reads_nothing()
    one.send(messages.Tick())
    assert house.take(0) == [] and "not attached" in one.read().reason


@pytest.mark.parametrize("message", [messages.Shutdown(), messages.Start(EngineConfig(), 0.0)])
def test_an_attached_client_cannot_end_or_restart_the_engine(house: House, message: Any) -> None:
    one = house.attach()
    one.send(message)
    assert house.take(0) == [] and "not for attached clients" in one.read().reason


def test_strangers_and_other_versions_are_refused(house: House) -> None:
    stranger, older = house.connect(), house.connect()
    stranger.send(submit("a"))
    older.send(messages.Attach("0.0.1", WIRE - 2))
    assert house.take(0) == []
    assert "not attached" in stranger.read().reason and "at most one version may lie" in older.read().reason


class TestDraining:
    """An engine that drains lets its clients leave, and takes no new ones."""

    def test_attached_clients_are_asked_to_leave_and_the_answer_comes_once_all_have(self, house: House) -> None:
        one, two = house.attach(), house.attach()
        house.parent.send(messages.Drain(7, 20.0))
        assert house.take(0) == [], "it is not for the loop"
        assert one.read() == two.read() == messages.Draining(20.0)
        one.send(messages.Detach())
        house.take(0)
        assert house.parent.reads_nothing()
        two.send(messages.Detach())
        house.take(0)
        assert house.parent.read() == messages.Drained(7)

    def test_without_clients_the_answer_comes_at_once(self, house: House) -> None:
        house.parent.send(messages.Drain(1, 20.0))
        house.take(0)
        assert house.parent.read() == messages.Drained(1)

    def test_a_new_client_learns_how_long_it_has_to_wait(self, house: House) -> None:
        house.parent.send(messages.Drain(1, 20.0))
        house.take(0)
        house.now += 5.0
        late, older = house.connect(), house.connect()
        late.send(messages.Attach(__version__, WIRE))
        older.send(messages.Attach(__version__))
        house.take(0)
        assert late.read() == messages.Draining(15.0)
        assert "drains and takes no new clients" in older.read().reason

    def test_a_client_of_the_version_before_stays_and_its_requests_run(self, house: House) -> None:
        older = house.connect()
        older.send(messages.Attach(__version__, 1))
        house.take(0)
        assert isinstance(older.read(), messages.Attached)
        house.parent.send(messages.Drain(1, 20.0))
        house.take(0)
        assert older.reads_nothing() and house.parent.reads_nothing()
        older.send(submit("a"))
        assert len(house.take(1)) == 1

    def test_an_attached_client_cannot_drain_the_engine(self, house: House) -> None:
        one = house.attach()
        one.send(messages.Drain(1, 20.0))
        assert house.take(0) == [] and "not for attached clients" in one.read().reason


def test_no_more_clients_than_the_limit_attach(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clients, "MOST_CLIENTS", 1)
    house.attach()
    late = house.connect()
    late.send(messages.Attach(__version__, WIRE))
    assert house.take(0) == [] and "which is the limit" in late.read().reason


def test_requests_of_a_closed_connection_are_aborted_at_their_next_output(house: House) -> None:
    one, two = house.attach(), house.attach()
    one.send(submit("a"), submit("done"))
    mine, done = ids(house.take(2))
    house.outputs(**{done: True})
    one.read()
    one.socket.close(linger=0)
    aborted: list[Any] = []
    while not aborted:
        house.clients.poll(0.02)
        house.outputs(**{mine: False})
        aborted = house.take(0)
    assert [each.request_id for each in aborted] == [mine], "an ended request is not aborted"
    two.send(submit("b"))
    assert len(house.take(1)) == 1


def test_a_client_that_leaves_aborts_its_requests(house: House) -> None:
    one = house.attach()
    one.send(submit("a"))
    (id,) = ids(house.take(1))
    one.send(messages.Detach())
    assert [each.request_id for each in house.take(1)] == [id]


def test_a_silent_client_is_dropped_and_one_that_ticks_is_not(house: House) -> None:
    silent, alive = house.attach(), house.attach()
    silent.send(submit("a"))
    (id,) = ids(house.take(1))
    house.now += clients.SILENT_SECONDS - 1
    alive.send(messages.Tick())
    house.take(1)
    house.now += 2
    assert [each.request_id for each in house.take(1)] == [id]
    assert "silent for 9.0 s" in silent.read().reason
    assert alive.reads_nothing()


def test_a_client_that_does_not_read_is_dropped_and_others_go_on(tmp_path: Any) -> None:
    house = House(tmp_path, limit=4)
    quick, slow = house.attach(), house.connect(queue=1)
    quick.send(submit("b"))
    (other,) = ids(house.take(1))
    slow.send(messages.Attach(__version__, WIRE), submit("a"))
    (mine,) = ids(house.take(1))
    aborted: list[Any] = []
    for _ in range(1000):
        house.outputs(**{mine: False, other: False})
        assert quick.read().request_id == ["b"]
        aborted = [*house.clients.waiting()]
        if aborted:
            break
    assert [each.request_id for each in aborted] == [mine]
    house.close()


def test_an_adapter_stays_until_its_last_client_unloads_it(house: House) -> None:
    one, two = house.attach(), house.attach()
    for peer in (one, two):
        peer.send(LoadAdapter(3, "poet", "/poet"))
        (load,) = house.take(1)
        house.clients.send(AdapterLoaded(load.number, adapter("poet")))
        assert peer.read().number == 3
    one.send(UnloadAdapter(4, adapter("poet").id))
    assert house.take(0) == [] and one.read() == AdapterUnloaded(4)
    two.send(messages.Detach())
    (unload,) = house.take(1)
    assert unload.adapter == adapter("poet").id
    house.clients.send(AdapterUnloaded(unload.number))
    assert one.reads_nothing()


def test_an_adapter_of_the_start_outlives_all_clients(house: House) -> None:
    one = house.attach()
    one.send(UnloadAdapter(0, INFO.adapters[0].id))
    assert house.take(0) == [] and one.read() == AdapterUnloaded(0)


def test_a_job_of_a_lost_client_is_left_so_that_another_can_continue_it(house: House) -> None:
    one = house.attach()
    one.send(StartJob(1, JobStart(id="job", directory="/d", name="n", data_digest="x")))
    (start,) = house.take(1)
    house.clients.send(JobStarted(start.number, JOB))
    assert one.read() == JobStarted(1, JOB)
    one.send(messages.Detach())
    (change,) = house.take(1)
    assert isinstance(change, ChangeJob) and (change.job, change.action) == ("job", "leave")


def test_events_of_a_driven_job_reach_its_own_client_alone_which_leaves_it_when_it_is_lost(house: House) -> None:
    one, two = house.attach(), house.attach()
    info = DrivenInfo(id="job", calls=0, updates=0, rank=4, alpha=8.0, modules=("q",), micro_batch=64)
    one.send(StartDriven(1, DrivenStart(id="job", directory="/d")))
    (start,) = house.take(1)
    house.clients.send(DrivenStarted(start.number, info))
    assert one.read() == DrivenStarted(1, info)
    house.clients.send(DrivenProgress([CallDone("job", 0), CallDone("another", 0)]))
    assert one.read() == DrivenProgress([CallDone("job", 0)]) and two.reads_nothing()
    one.send(RunCall(2, "job", 1))
    (call,) = house.take(1)
    assert (call.job, call.call) == ("job", 1)
    one.send(messages.Detach())
    (change,) = house.take(1)
    assert isinstance(change, ChangeJob) and (change.job, change.action) == ("job", "leave")


def test_activity_reaches_viewers_alone_with_their_own_ids(house: House) -> None:
    one, two = house.attach(), house.attach()
    one.send(submit("a"), messages.Watch(5.0))
    request, watch = house.take(2)
    assert watch.seconds == 5.0
    house.clients.send(activity(request.request.id))
    assert one.read().steps[0].preempted == ["a"] and two.reads_nothing()
    two.send(messages.Watch(4.0))
    assert [each.seconds for each in house.take(2)] == [0, 4.0], "a new viewer needs the first message"
    house.clients.send(activity(request.request.id))
    assert one.read().steps[0].preempted == ["a"] and two.read().steps[0].preempted == [request.request.id]
    one.send(messages.Watch(0))
    assert house.take(0) == [], "somebody still watches"
    two.send(messages.Detach())
    assert [each.seconds for each in house.take(1)] == [0]


def test_steps_are_counted_by_one_attached_client(house: House) -> None:
    one, two = house.attach(), house.attach()
    steps = messages.Steps([3], [0.1])
    house.clients.send(steps)
    assert one.read() == steps and two.reads_nothing()
    one.send(messages.Detach())
    house.take(0)
    house.clients.send(steps)
    assert two.read() == steps


def test_the_end_of_the_engine_reaches_all_attached_clients(house: House) -> None:
    one = house.attach()
    house.clients.end("the device is gone")
    assert one.read() == messages.Failure("the device is gone")


JOB = JobInfo(
    id="job", step=0, steps=1, examples=1, trained_tokens=0, loss=None, validation=None, checkpoint="", epochs=1,
    batch_size=1, learning_rate=1e-4, rank=4, alpha=8.0, modules=(), dora=False, micro_batch=64,
)  # fmt: skip


def stats(waiting: int) -> SchedulerStats:
    fields = {field.name: 0 for field in dataclasses.fields(SchedulerStats) if field.default is dataclasses.MISSING}
    return SchedulerStats(**fields | {"waiting": waiting})


def activity(request: str) -> messages.Activity:
    step = StepRecord(step=1, at=0.0, seconds=0.1, tokens=1, decodes=1, prefill=0, segments=1, preempted=[request])
    return messages.Activity(1.0, False, [step], [])


def noted(id: str, tenant: str = "") -> messages.Submit:
    """A request that another client can adopt."""
    plain = submit(id).request
    return messages.Submit(dataclasses.replace(plain, identity=Identity("m", tenant=tenant)), b"note")


def leave(house: House, peer: Peer) -> None:
    """Close a client's connection as a killed process does, and wait until the engine has noticed."""
    before = len(house.clients._attached)
    peer.socket.close(linger=0)
    until = time.monotonic() + 200
    while len(house.clients._attached) == before:
        assert time.monotonic() < until, "nobody noticed"
        house.clients.poll(0.02)
        assert not [each for each in house.take(0) if not isinstance(each, messages.Abort)]


def adopt(house: House, peer: Peer, id: str, tenant: str = "") -> messages.Adopted:
    peer.send(messages.Adopt(9, tenant, id))
    house.take(0)
    while not isinstance(answer := peer.read(), messages.Adopted):
        pass
    assert answer.number == 9
    return answer


def test_a_closed_connection_is_noticed_before_the_next_output(house: House) -> None:
    one = house.attach()
    one.send(submit("a"))
    (mine,) = ids(house.take(1))
    one.socket.close(linger=0)
    assert [each.request_id for each in house.take(1)] == [mine]


def test_a_closed_connection_that_can_be_sent_to_for_a_while_is_found_all_the_same(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, sends, send = house.attach(), list[bytes](), house.door.send
    one.send(submit("a"))
    (mine,) = ids(house.take(1))

    def late(key: bytes, data: bytes) -> str:
        sends.append(key)
        return send(key, data) if len(sends) > 2 else ""

    monkeypatch.setattr(house.door, "send", late)
    one.socket.close(linger=0)
    assert [each.request_id for each in house.take(1)] == [mine]


def test_the_client_of_a_closed_connection_that_had_none_is_looked_for_a_few_times(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    house.attach()
    stranger, sends = house.connect(), list[bytes]()
    stranger.send(submit("a"))
    assert "not attached" in stranger.read().reason
    monkeypatch.setattr(house.door, "send", lambda key, data: sends.append(key) or "")
    stranger.socket.close(linger=0)
    house.clients.wait()
    house.go_on()
    while len(sends) < LOOKS:
        assert house.clients.poll(3600.0), "it looks again soon"
        house.clients.wait()
        house.go_on()
    for _ in range(3):
        house.go_on()
    assert len(sends) == LOOKS


def test_a_request_with_a_note_outlives_its_client_and_another_one_gets_the_rest(house: House) -> None:
    one, two = house.attach(), house.attach()
    one.send(noted("a"), submit("plain"))
    mine, plain = ids(house.take(2))
    house.outputs(**{mine: False, plain: False})
    one.socket.close(linger=0)
    assert house.take(1) == [messages.Abort(plain)]
    assert isinstance(two.read(), messages.Clock), "this is how the engine finds out which connection has closed"
    house.outputs(**{mine: False})
    assert two.reads_nothing()
    found = adopt(house, two, "a")
    assert found.yours and found.held is not None
    assert (found.held.request.id, found.held.prompt, found.held.note) == ("a", submitted_prompt(1, 2), b"note")
    assert found.held.tokens == submitted_prompt(0, 0) and not found.held.ended
    house.outputs(**{mine: True})
    (rest,) = two.read().outputs
    assert (rest.request_id, rest.finish_reason) == ("a", FinishReason.LENGTH)
    two.send(messages.Abort("a"))
    assert house.take(1) == [messages.Abort(mine)], "the engine knows it under its first id"


def submitted_prompt(*tokens: int) -> bytes:
    return messages.Submitted.of(messages.Submit(dataclasses.replace(submit("a").request, prompt=tokens))).prompt


def test_a_request_is_not_adopted_from_a_client_that_lives_or_by_another_tenant(house: House) -> None:
    one, two = house.attach(), house.attach()
    one.send(noted("a", "ada"))
    house.take(1)
    assert adopt(house, two, "a", "ada") == messages.Adopted(9)
    leave(house, one)
    assert adopt(house, two, "a", "ben") == messages.Adopted(9)
    assert adopt(house, two, "b", "ada") == messages.Adopted(9)
    assert adopt(house, two, "a", "ada").yours
    three = house.attach()
    assert adopt(house, three, "a", "ada") == messages.Adopted(9), "it has a client again"


def test_an_adopted_request_outlives_its_second_client_too(house: House) -> None:
    one, two, three = house.attach(), house.attach(), house.attach()
    one.send(noted("a"))
    (mine,) = ids(house.take(1))
    leave(house, one)
    assert adopt(house, two, "a").yours
    house.outputs(**{mine: False})
    leave(house, two)
    found = adopt(house, three, "a")
    assert found.yours and found.held is not None and found.held.tokens == submitted_prompt(0)


def test_an_ended_answer_is_read_by_all_and_belongs_to_the_first_after_its_client(house: House) -> None:
    one, two, three = house.attach(), house.attach(), house.attach()
    one.send(noted("a"))
    (mine,) = ids(house.take(1))
    house.outputs(**{mine: True})
    found = adopt(house, two, "a")
    assert not found.yours and found.held is not None and found.held.ended
    assert found.held.finish_reason is FinishReason.LENGTH
    leave(house, one)
    assert adopt(house, two, "a").yours
    assert not adopt(house, three, "a").yours


def test_nobody_adopts_what_its_client_has_aborted_unless_the_answer_is_complete(house: House) -> None:
    one, two = house.attach(), house.attach()
    one.send(noted("a"), noted("whole"))
    house.take(2)
    one.send(messages.Abort("a"), messages.Abort("whole", complete=True))
    house.take(2)
    assert adopt(house, two, "a") == messages.Adopted(9)
    found = adopt(house, two, "whole")
    assert found.held is not None and found.held.ended and found.held.finish_reason is None
    one.send(noted("refused"))
    (mine,) = ids(house.take(1))
    house.clients.send(messages.Refused(mine, "too long"))
    leave(house, one)
    assert adopt(house, two, "refused") == messages.Adopted(9)


def test_a_request_that_nobody_adopts_is_aborted_after_a_while(house: House) -> None:
    one = house.attach()
    one.send(noted("a"))
    (mine,) = ids(house.take(1))
    one.send(messages.Detach())
    assert house.take(0) == []
    house.now += GRACE_SECONDS + 2
    assert house.take(1) == [messages.Abort(mine)]


def test_a_request_that_the_loop_has_not_taken_goes_on_without_its_client(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, two = house.attach(), house.attach()
    one.send(noted("a"), submit("plain"), messages.Detach())
    sent = list[tuple[bytes, bytes]]()
    while len(sent) < 3:
        sent += house.door.waiting()
    with monkeypatch.context() as patch:
        patch.setattr(house.door, "waiting", lambda: [sent.pop(0) for _ in range(len(sent))])
        arrived = house.take(2)
    assert ids(arrived[:1]) and isinstance(arrived[1], messages.Abort)
    assert adopt(house, two, "a").yours


def test_all_clients_learn_which_servers_are_attached_and_which_have_left(house: House) -> None:
    one, two = house.attach(), house.attach()
    one.send(messages.Introduce("first"))
    house.take(0)
    two.send(messages.Introduce("second"))
    house.take(0)
    assert [one.read(), one.read()] == [messages.Servers(["first"], []), messages.Servers(["first", "second"], [])]
    two.send(messages.Detach())
    house.take(0)
    assert one.read() == messages.Servers(["first"], ["second"])
    again = house.attach()
    again.send(messages.Introduce("second"))
    house.take(0)
    assert one.read() == messages.Servers(["first", "second"], []), "it is back"
    again.send(messages.Detach())
    house.take(0)
    house.now += LEFT_SECONDS + 1
    one.send(messages.Introduce("first"))
    house.take(0)
    while (latest := one.read()).left:
        pass
    assert latest == messages.Servers(["first"], []), "it left long ago"


def test_a_client_that_comes_back_runs_its_request_again_in_place_of_the_earlier_run(house: House) -> None:
    one, other = house.attach(), house.attach()
    one.send(noted("a"))
    (first,) = ids(house.take(1))
    leave(house, one)
    back = house.attach()
    back.send(noted("a"))
    abort, again = house.take(2)
    assert abort == messages.Abort(first) and again.request.id != first
    assert adopt(house, other, "a") == messages.Adopted(9), "it has a client"
    late = house.attach()
    late.send(noted("a"))
    (third,) = ids(house.take(1))
    house.outputs(**{again.request.id: False, third: False})
    while not isinstance(got := back.read(), messages.Outputs):
        pass
    assert got.tokens == [(0,)], "a third client with this id takes nothing from it"
