"""Clients: all clients of an engine with the interface of one. Each has its own request ids and numbers.

An attached client is dropped when its connection closes, when it is silent, when its queue is full, or when it sends
what is no message. Its requests are then aborted, except those that are held: for a while another client may adopt
them. Nothing else of the engine notices.
"""

from __future__ import annotations

import itertools
import logging
import time
from array import array
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import replace
from math import inf
from typing import Any, get_args

import msgspec

from holdfast.core.version import __version__
from holdfast.engine import messages
from holdfast.engine.link import Parent
from holdfast.engine.process.activity_ids import with_ids
from holdfast.engine.process.door import Door
from holdfast.engine.process.held import HeldRequest, HeldRequests
from holdfast.engine.wire import WIRE, knows, mismatch
from holdfast.lm.parts.adapters.messages import AdapterLoaded, AdapterUnloaded, UnloadAdapter
from holdfast.lm.parts.message import Message
from holdfast.lm.parts.moves.messages import StopFetch
from holdfast.lm.parts.pauses.messages import NotePause
from holdfast.lm.parts.sleep.messages import Asleep
from holdfast.lm.parts.tuning.messages import (
    ChangeJob,
    DrivenProgress,
    DrivenStarted,
    JobEnded,
    JobProgress,
    JobStarted,
)

SILENT_SECONDS = 8.0
"""Seconds without a message after which an attached client is dropped. It sends Tick far more often."""
CHECK_SECONDS = 1.0
"""Seconds between two looks for silent clients."""
MOST_CLIENTS = 256
"""Most clients that are attached at a time."""
CLOSING_SECONDS = 0.001
"""Usual seconds between the report that a connection has closed and the time at which sending to it fails."""
LOOKS, LOOK_SECONDS = 5, 0.01
"""Most looks for the client of a closed connection, and most seconds between two: on a busy machine it takes longer."""
LEFT_SECONDS = 120.0
"""Seconds for which new clients learn that a server has left."""
MARK = ":"
"""Stands in the engine's id of a request between the client's number and the client's own id."""
PRIVATE = (messages.Start, messages.StartApp, messages.Infer, messages.Shutdown, messages.Attach, messages.Drain)
"""Messages that an attached client must not send."""
NUMBERED = frozenset(
    kind
    for kind in (*get_args(messages.ToEngine), *get_args(messages.FromEngine))
    if "number" in kind.__struct_fields__
)
"""Questions and their answers: messages with a number."""

log = logging.getLogger("holdfast.engine")


class Client:
    """One client of the engine: what it has there, and how messages reach it."""

    def __init__(self, number: int, send: Callable[[Message], None], wire: int = WIRE) -> None:
        """`number` differs from those of all other clients of this engine, earlier ones included.

        `wire` is the version of the client's messages.
        """
        self.number, self.send, self.wire = number, send, wire
        self.seen = 0.0
        """Time of its last message."""
        self.gone = False
        """Whether it was dropped, or has left."""
        self.watches = False
        """Whether it wants the engine's activity."""
        self.requests: set[str] = set()
        """Its own ids of the requests that have not ended."""
        self.jobs: set[str] = set()
        """The tuning jobs that it started and that are open."""
        self.server = ""
        """The name of its server; empty until it says it."""
        self._adopted: dict[str, str] = {}
        """The engine's ids of the requests that it has adopted, by the client's own ids."""

    def note_message(self, now: float) -> None:
        """Record that a message came."""
        self.seen = now

    def note_watch(self, seconds: float) -> None:
        """Record whether the client watches."""
        self.watches = seconds > 0

    def note_server(self, server: str) -> None:
        """Record the name of its server."""
        self.server = server

    def adopt(self, held: HeldRequest) -> None:
        """Record that a request of another client belongs to this one."""
        self._adopted[held.request.id] = held.id
        if not held.ended:
            self.requests.add(held.request.id)

    def leave(self) -> None:
        """Record that the client is gone."""
        self.gone = True

    def new_id_of(self, request: str) -> str:
        """The engine's id of a new request, from the client's own id, under which it may have adopted one before."""
        self._adopted.pop(request, None)
        return self.id_of(request)

    def id_of(self, request: str) -> str:
        """The engine's id of a request, from the client's own id."""
        return self._adopted.get(request, f"{self.number}{MARK}{request}")

    def own_id(self, request: str) -> str:
        """The client's own id of a request, from the engine's id. Another client's request keeps the engine's id."""
        own = request.partition(MARK)[2]
        return own if self.id_of(own) == request else request


def _send_nobody(message: Message) -> None:
    """Drop the answer to a question that no client has asked."""


NOBODY = Client(-1, _send_nobody)
"""Asks the questions that clean up after a client. Nobody reads the answers."""


class Clients:
    """The parent and the clients at a door, for the engine's loop. Has the methods of `Parent`. For one thread."""

    def __init__(
        self, parent: Parent, door: Door, welcome: messages.Attached, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """`welcome` is what a new client gets. `clock` gives seconds that never go back."""
        parent.watch(door.socket)
        parent.watch(door.closings)
        self._parent, self._door, self._welcome, self._clock = parent, door, welcome, clock
        self._first = Client(0, parent.send)
        """The client that started the engine. It is never dropped: the engine ends with it."""
        self._attached: dict[bytes, Client] = {}
        """The attached clients, by connection."""
        self._numbers, self._questions = itertools.count(1), itertools.count()
        self._asked: dict[int, tuple[Client, int]] = {}
        """The client and its own number, by the engine's number of each open question."""
        self._holders: dict[str, set[Client]] = {info.id: {self._first} for info in welcome.info.adapters}
        """The clients that use an adapter, by its content id."""
        self._arrived: deque[tuple[Client, messages.ToEngine]] = deque()
        """Messages to the engine's loop, each with its sender."""
        self._sender = self._first
        """The sender of the message that the loop took last."""
        self._held = HeldRequests()
        self._left: dict[str, float] = {}
        """Time at which a server left, by name, for LEFT_SECONDS."""
        self._unfound, self._looks = 0, 0
        """Number of closed connections whose clients were not found yet, and of looks for them that are left."""
        self._checked_at = 0.0
        self._drains: list[messages.Drain] = []
        """The orders to drain that were not answered yet."""
        self._ends_at: float | None = None
        """Time at which a draining engine ends; None while it does not drain."""

    def send(self, message: Message) -> None:
        """Send a message of the engine to the clients that it is for."""
        match message:
            case messages.Outputs():
                self._send_outputs(message)
            case messages.Refused() | messages.ContractRefusal() | Asleep():
                self._send_refusal(message)
            case messages.Clock():
                self._sender.send(message)
            case messages.Steps():
                self._counter.send(message)
            case messages.Activity():
                for client in self._all():
                    if client.watches:
                        client.send(with_ids(message, client.own_id))
            case DrivenProgress():
                self._send_driven(message)
            case _ if type(message) in NUMBERED:
                self._send_answer(message)
            case _:
                if isinstance(message, JobProgress):
                    self._note_ends(message)
                for client in self._all():
                    client.send(message)

    def poll(self, seconds: float) -> bool:
        """Whether a message arrives within `seconds`, or a closed connection's client is to be found soon.

        See `Parent.poll`.
        """
        return bool(self._arrived) or self._parent.poll(min(seconds, self._longest)) or self._looks > 0

    def wait(self, seconds: float = inf) -> None:
        """Wait at most `seconds` for a message. See `Parent.wait`."""
        if not self._arrived:
            limit = min(seconds, self._longest)
            self._parent.wait(None if limit == inf else limit)

    @property
    def _longest(self) -> float:
        """Most seconds to wait for a message."""
        return LOOK_SECONDS if self._looks else inf

    def wake(self) -> None:
        """End a wait. May be called in any thread."""
        self._parent.wake()

    def receive(self) -> list[messages.ToEngine]:
        """Wait for the next message. Empty if another thread calls `wake` first, or if it is not for the loop."""
        self.wait()
        return [*itertools.islice(self.waiting(), 1)]

    def waiting(self) -> Iterator[messages.ToEngine]:
        """The messages that have arrived. Does not wait for more. Raises ValueError if the parent's is invalid."""
        for message in self._parent.waiting():
            self._take(self._first, message)
        if closed := self._door.take_closings():
            self._unfound, self._looks = self._unfound + closed, LOOKS
            time.sleep(CLOSING_SECONDS)
        for key, data in self._door.waiting():
            self._read(key, data)
        if self._looks:
            self._look_for_closed()
        self._check_silence()
        self._answer_drains()
        while self._arrived:
            self._sender, message = self._arrived.popleft()
            yield message

    def end(self, reason: str) -> None:
        """Let the attached clients know why the engine ends. Does not close the door."""
        for key in self._attached:
            self._door.send(key, messages.encode(messages.Failure(reason)))

    def _all(self) -> list[Client]:
        return [self._first, *self._attached.values()]

    @property
    def _counter(self) -> Client:
        """The client that counts the engine's steps: one alone, so that sums over all servers are right."""
        return next(iter(self._attached.values()), self._first)

    def _read(self, key: bytes, data: bytes) -> None:
        """Take what came from a connection: a message of an attached client, or a new client's first one."""
        try:
            message = messages.decode_to_engine(data)
        except (ValueError, RecursionError) as error:
            self._refuse(key, f"it sent what is no message: {error}")
            return
        if isinstance(message, messages.Attach):
            self._attach(key, message)
        elif key not in self._attached:
            self._refuse(key, "it is not attached, or not any more")
        elif isinstance(message, PRIVATE):
            self._refuse(key, f"it sent {type(message).__name__}, which is not for attached clients")
        elif isinstance(message, messages.Detach):
            self._drop(key, "it has left", logging.INFO)
        else:
            self._attached[key].note_message(self._clock())
            self._take(self._attached[key], message)

    def _attach(self, key: bytes, attach: messages.Attach) -> None:
        """Welcome a new client, unless the engine drains, its version is too far away, or it is one too many."""
        if reason := mismatch(attach.wire):
            self._refuse(key, f"it is Holdfast {attach.version}, and this engine is {__version__}: {reason}")
        elif self._ends_at is not None and knows(attach.wire, "draining"):
            self._door.send(key, messages.encode(messages.Draining(max(0.0, self._ends_at - self._clock()))))
        elif self._ends_at is not None:
            self._refuse(key, "the engine drains and takes no new clients")
        elif key in self._attached:
            self._refuse(key, "it attached twice")
        elif len(self._attached) >= MOST_CLIENTS:
            self._refuse(key, f"{MOST_CLIENTS} clients are attached, which is the limit")
        else:
            number, wire = next(self._numbers), attach.wire
            client = self._attached[key] = Client(number, lambda message: self._send_to(key, message), wire)
            client.note_message(self._clock())
            client.send(msgspec.structs.replace(self._welcome, now=client.seen))

    def _drain(self, order: messages.Drain) -> None:
        """Let all attached clients know that the engine ends soon. Clients of an older version stay until it ends."""
        self._drains.append(order)
        self._ends_at = self._clock() + order.seconds
        for client in [*self._attached.values()]:
            if knows(client.wire, "draining"):
                client.send(messages.Draining(order.seconds))

    def _answer_drains(self) -> None:
        """Answer the orders to drain once no client is attached."""
        if not self._attached:
            for order in self._drains:
                self._first.send(messages.Drained(order.number))
            self._drains.clear()

    def _refuse(self, key: bytes, reason: str) -> None:
        """Drop the client of a connection, if there is one, and send it the reason."""
        self._drop(key, reason)
        self._door.send(key, messages.encode(messages.Failure(f"the engine has dropped this client: {reason}")))

    def _send_to(self, key: bytes, message: Message) -> None:
        """Send a message to an attached client, and drop the client if that fails."""
        if key in self._attached and (reason := self._door.send(key, messages.encode(message))):
            self._drop(key, reason)

    def _drop(self, key: bytes, reason: str, level: int = logging.WARNING) -> None:
        """Forget an attached client, abort the requests that are not held, and give up the adapters and jobs that it
        alone used.

        `level` is that of the line in the log.
        """
        client = self._attached.pop(key, NOBODY)
        if client is NOBODY:
            return
        open_requests = len(client.requests)
        log.log(level, "holdfast: client %d is gone, with %d requests: %s", client.number, open_requests, reason)
        client.leave()
        self._forget_arrived(client)
        kept = {held.id for held in self._held.of(client.number)}
        for id in map(client.id_of, client.requests):
            if id not in kept:
                self._arrived.append((NOBODY, messages.Abort(id)))
        self._note_loss(client)
        for job in client.jobs:
            self._leave(job)
        for adapter in [id for id, holders in self._holders.items() if client in holders]:
            self._release(client, adapter)
        if client.watches and not any(each.watches for each in self._all()):
            self._arrived.append((NOBODY, messages.Watch(0)))

    def _note_loss(self, client: Client) -> None:
        """Let all other clients know that the server of a client has left, and keep its held requests for them."""
        now = self._clock()
        for held in self._held.of(client.number):
            held.lose(now)
        if client.server:
            self._left[client.server] = now
            self._report_servers()

    def _report_servers(self) -> None:
        """Send all attached clients the servers that are attached, and those that have left lately."""
        now = self._clock()
        self._left = {server: at for server, at in self._left.items() if now <= at + LEFT_SECONDS}
        present = [client.server for client in self._attached.values() if client.server]
        report = messages.Servers(present, [server for server in self._left if server not in present])
        for client in [*self._attached.values()]:
            if knows(client.wire, "servers"):
                client.send(report)

    def _adopt(self, client: Client, number: int, tenant: str, own_id: str) -> None:
        """Give a client a held request, if it has ended or its own client is lost."""
        held = self._held.find(tenant, own_id)
        if held and not (held.ended or held.lost):
            self._find_closed()  # Its client may have ended just now.
        if not held or not (held.ended or held.lost):
            client.send(messages.Adopted(number))
            return
        yours = held.lost
        if yours:
            held.move(client.number)
            client.adopt(held)
        client.send(messages.Adopted(number, _message(held), yours))

    def _forget_arrived(self, client: Client) -> None:
        """Forget the messages of a client that the loop has not taken, except requests that are held."""
        for sender, message in self._arrived:
            if sender is client and type(message) in NUMBERED and not isinstance(message, StopFetch):
                self._asked.pop(message.number)  # type: ignore[union-attr]
        self._arrived = deque(
            (sender, message)
            for sender, message in self._arrived
            if sender is not client or (isinstance(message, messages.Submit) and self._held.get(message.request.id))
        )

    def _look_for_closed(self) -> None:
        """Drop the clients of closed connections. Some of these had none: it had detached before, or never attached."""
        attached = len(self._attached)
        self._find_closed()
        self._unfound -= attached - len(self._attached)
        self._looks = self._looks - 1 if self._unfound > 0 else 0
        if not self._looks:
            self._unfound = 0

    def _find_closed(self) -> None:
        """Drop the clients whose connection has closed: they cannot be sent the time."""
        for client in [*self._attached.values()]:
            client.send(messages.Clock(self._clock()))

    def _check_silence(self) -> None:
        """Drop the clients that have not been heard of for a while. All that has arrived was read before."""
        now = self._clock()
        if now < self._checked_at + CHECK_SECONDS:
            return
        self._checked_at = now
        for key, client in [*self._attached.items()]:
            if now > client.seen + SILENT_SECONDS:
                self._refuse(key, f"it was silent for {now - client.seen:.1f} s")
        for held in self._held.due(now):
            log.warning("holdfast: no client has adopted request %s in time, and it is aborted", held.request.id)
            self._arrived.append((NOBODY, messages.Abort(held.id)))

    def _take(self, client: Client, message: messages.ToEngine) -> None:
        """Queue a client's message for the loop, with the engine's ids and numbers in place of the client's own."""
        self._arrived.extend((client, each) for each in self._translated(client, message))

    def _translated(self, client: Client, message: messages.ToEngine) -> Iterator[messages.ToEngine]:
        match message:
            case messages.Submit(request) if request.id in client.requests:
                client.send(messages.Refused(request.id, f"request id {request.id} is in use", "request_id"))
            case messages.Submit(request, note):
                client.requests.add(request.id)
                id = client.new_id_of(request.id)
                if note:
                    yield from self._hold(HeldRequest(id, request, note, client.number))
                yield messages.Submit(replace(request, id=id))
            case messages.Abort(request_id, complete):
                client.requests.discard(request_id)
                self._note_abort(client.id_of(request_id), complete=complete)
                yield messages.Abort(client.id_of(request_id))
            case messages.Drain():
                self._drain(message)
            case messages.Introduce(server):
                client.note_server(server)
                self._report_servers()
            case messages.Adopt(number, tenant, request_id):
                self._adopt(client, number, tenant, request_id)
            case NotePause(request_id):
                yield msgspec.structs.replace(message, request_id=client.id_of(request_id))
            case messages.Watch(seconds):
                yield from self._watch(client, seconds)
            case messages.CountClients(number):
                client.send(messages.ClientCount(number, len(self._attached)))
            case StopFetch(number):
                yield from (StopFetch(ours) for ours, asked in self._asked.items() if asked == (client, number))
            case UnloadAdapter(number, adapter) if self._holders.get(adapter, set()) - {client}:
                self._holders[adapter].discard(client)
                client.send(AdapterUnloaded(number))  # Others use it, so the engine keeps it.
            case UnloadAdapter(number, adapter):
                self._holders.pop(adapter, None)
                yield UnloadAdapter(self._ask(client, number), adapter)
            case _ if type(message) in NUMBERED:
                yield msgspec.structs.replace(message, number=self._ask(client, message.number))  # type: ignore[union-attr]
            case _:
                yield message

    def _hold(self, held: HeldRequest) -> Iterator[messages.Abort]:
        """Hold a new request. An earlier run of it that has lost its client is aborted."""
        former = self._held.find(*held.key)
        if former and former.lost and not former.ended:
            yield messages.Abort(former.id)
        self._held.add(held)

    def _note_abort(self, id: str, *, complete: bool) -> None:
        """Hold a request no longer that its client aborts, unless its answer is complete."""
        held = self._held.get(id)
        if held and complete:
            held.end(self._clock())
        elif held:
            self._held.drop(held)

    def _owner(self, id: str) -> int:
        """The number of the client that a request belongs to, by the engine's id."""
        held = self._held.get(id)
        return held.owner if held else int(id.partition(MARK)[0])

    def _ask(self, client: Client, number: int) -> int:
        """The engine's number for a client's question."""
        ours = next(self._questions)
        self._asked[ours] = client, number
        return ours

    def _watch(self, client: Client, seconds: float) -> Iterator[messages.Watch]:
        """Begin to watch again for a new viewer, who needs the first message; stop once nobody watches."""
        others = any(each.watches for each in self._all() if each is not client)
        if seconds > 0:
            if others and not client.watches:
                yield messages.Watch(0)
            yield messages.Watch(seconds)
        elif not others:
            yield messages.Watch(0)
        client.note_watch(seconds)

    def _send_outputs(self, outputs: messages.Outputs) -> None:
        """Send each client the outputs of its own requests. Outputs of dropped clients go to nobody."""
        columns = outputs.columns
        rows: dict[int, list[int]] = {}
        whole, now = outputs.outputs, self._clock()
        for at, id in enumerate(columns.pop("request_id")):
            rows.setdefault(self._owner(id), []).append(at)
            if self._held.get(id):
                self._held.take(whole[at], now)
        for client in self._all():
            if (mine := rows.get(client.number)) is not None:
                self._send_rows(client, outputs, columns, mine)

    @staticmethod
    def _send_rows(client: Client, outputs: messages.Outputs, columns: dict[str, list[Any]], rows: list[int]) -> None:
        own = [client.own_id(outputs.request_id[at]) for at in rows]
        chosen = {name: [column[at] for at in rows] for name, column in columns.items()}
        ended = [id for id, reason in zip(own, chosen["finish_reason"], strict=True) if reason is not None]
        client.requests.difference_update(ended)
        client.send(messages.Outputs(own, **chosen, sent_at=outputs.sent_at))

    def _send_refusal(self, message: messages.Refused | messages.ContractRefusal | Asleep) -> None:
        number = self._owner(message.request_id)
        if held := self._held.get(message.request_id):
            self._held.drop(held)
        for client in self._all():
            if client.number == number:
                id = client.own_id(message.request_id)
                client.requests.discard(id)
                client.send(msgspec.structs.replace(message, request_id=id))

    def _send_answer(self, message: Any) -> None:
        """Send an answer to the client that asked, under its own number."""
        client, number = self._asked.pop(message.number, (NOBODY, 0))
        match message:
            case AdapterLoaded(_, info):
                self._holders.setdefault(info.id, set()).add(client)
                if client.gone:
                    self._release(client, info.id)
            case JobStarted(_, info) | DrivenStarted(_, info) if client.gone:
                self._leave(info.id)
            case JobStarted(_, info) | DrivenStarted(_, info):
                client.jobs.add(info.id)
        client.send(msgspec.structs.replace(message, number=number))

    def _send_driven(self, progress: DrivenProgress) -> None:
        """Send each client the events of the driven jobs that it started."""
        for client in self._all():
            if own := [event for event in progress.events if event.job in client.jobs]:
                client.jobs.difference_update(event.job for event in own if isinstance(event, JobEnded))
                client.send(DrivenProgress(own))

    def _note_ends(self, progress: JobProgress) -> None:
        """Note which jobs have ended, and that their clients use the adapters that came of them."""
        for event in progress.events:
            if isinstance(event, JobEnded):
                for client in self._all():
                    if event.job in client.jobs:
                        client.jobs.discard(event.job)
                        if event.adapter is not None:
                            self._holders.setdefault(event.adapter.id, set()).add(client)

    def _leave(self, job: str) -> None:
        """Close a job, so that another client can continue it."""
        self._arrived.append((NOBODY, ChangeJob(self._ask(NOBODY, 0), job, "leave")))

    def _release(self, client: Client, adapter: str) -> None:
        """Unload an adapter that only this client, which is gone, has used."""
        self._holders[adapter].discard(client)
        if not self._holders[adapter]:
            del self._holders[adapter]
            self._arrived.append((NOBODY, UnloadAdapter(self._ask(NOBODY, 0), adapter)))


def _message(held: HeldRequest) -> messages.Held:
    """A held request as a message."""
    first, prompt = held.first, array("I", held.request.prompt).tobytes()
    return messages.Held(
        replace(held.request, prompt=()), prompt, held.note, held.tokens.tobytes(), [*held.logprobs],
        first.cached_tokens, first.cached_by_tier, first.scheduled_at, held.finish_reason, held.ended,
    )  # fmt: skip
