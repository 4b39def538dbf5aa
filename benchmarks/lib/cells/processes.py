"""Several devices as processes: each has a planner and an executor of its own, and a share of the requests.

One process deals the requests out, each call's to the process with the fewest open requests, and takes the results.
Contents and results travel between the processes, as they do between a server and its engines. A device never waits for
messages: its process submits the next round before it sends the results of the last one, and unfolds the requests of
one message in each step.
"""

from __future__ import annotations

import gc
import pickle
import select
import time
from collections import defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from multiprocessing import get_context
from multiprocessing.connection import Connection
from typing import Any, Protocol

import numpy as np

from benchmarks.lib.cells.workloads import Sample, Samples
from holdfast.cells.plan import CellOutput, CellOutputs, EndedGroup

OUTPUTS, GROUPS, ANSWER, FAILED = "outputs", "groups", "answer", "failed"
"""The first word of a message from a process. Requests that ended come as `outputs`, or as `groups` with arrays."""
REQUESTS, ASK = "requests", "ask"
"""The first word of a message to a process."""
Seconds = Mapping[str, float]


class Engine(Protocol):
    """A system that serves requests."""

    def add(self, requests: Sequence[str], samples: Sequence[Sample]) -> None: ...

    def step(self, worker: int) -> Sequence[CellOutput] | None:
        """Do a part of the work. Returns the requests that ended, or None if there was nothing to do."""

    def drain(self) -> None:
        """End all requests."""


class DeviceEngine(Engine, Protocol):
    """A system that serves requests on a device of its own."""

    def fill(self) -> None:
        """Give the device its next work at once, as the next `step` would."""


class Host(Protocol):
    """The systems of one process. They run on its device."""

    def choose(self, model: str) -> None:
        """Make the systems of a model ready."""

    def engine(self, system: str) -> DeviceEngine:
        """A new engine of a system of the chosen model."""

    def ideal(self) -> float:
        """The requests a second of the device, if it runs nothing but full tasks of the chosen model."""

    def peak(self, system: str) -> float:
        """The requests a second of a system of the chosen model, if this process makes the requests."""


def packed_requests(ids: Sequence[str], samples: Sequence[Sample]) -> tuple[Any, ...]:
    """Requests in few objects without structure, which is much faster to send. No id may contain a line break."""
    some = Samples.of(samples)
    tokens = some.tokens
    return "\n".join(ids), some.lengths.astype(np.int64).tobytes(), tokens.dtype.str, tokens.tobytes(), some.trees


def unpacked_requests(
    ids: str, lengths: bytes, dtype: str, tokens: bytes, trees: Sequence[Any] | None
) -> tuple[list[str], Samples]:
    """The requests of `packed_requests`: their ids and contents."""
    return ids.split("\n"), Samples(np.frombuffer(lengths, np.int64), np.frombuffer(tokens, dtype), trees)


def packed_group(group: EndedGroup) -> tuple[Any, ...]:
    """Requests that ended, as `packed_requests` has those that come."""
    results = [
        (name, array.dtype.str, array.shape, array.tobytes(), ends.astype(np.int64).tobytes())
        for name, (array, ends) in group.results.items()
    ]
    return "\n".join(group.ids), group.scheduled_at.tobytes(), results, group.own


def unpacked_group(ids: str, scheduled_at: bytes, results: Sequence[Any], own: Any) -> EndedGroup:
    """The requests of `packed_group`."""
    arrays = {
        name: (np.frombuffer(array, dtype).reshape(shape), np.frombuffer(ends, np.int64))
        for name, dtype, shape, array, ends in results
    }
    return EndedGroup(ids.split("\n"), np.frombuffer(scheduled_at), arrays, own)


def send(connection: Connection, *message: Any) -> None:
    """Send a message."""
    connection.send_bytes(pickle.dumps(message, 5))


def serve_share(connection: Connection, make: Callable[[], Host]) -> None:
    """Serve the requests that come, and answer questions, until the connection ends. Runs in a process of its own."""
    try:
        host = make()
        gc.collect()
        gc.freeze()
        gc.disable()  # as in an engine process, which collects in pauses
        engine: DeviceEngine | None = None
        busy = False
        came: deque[bytes] = deque()
        """Messages that were not handled yet. They are read at once, so that the sender never waits."""
        poller = select.poll()
        poller.register(connection.fileno(), select.POLLIN)
        while True:
            while poller.poll(0 if busy or came else None):
                came.append(connection.recv_bytes())
            while came:
                kind, *rest = pickle.loads(came.popleft())
                if kind == REQUESTS:
                    assert engine is not None, "requests came before an engine was asked for"
                    engine.add(*unpacked_requests(*rest))
                    break  # the device would wait for those of further messages
                name, *arguments = rest
                if name == "engine":
                    engine = host.engine(*arguments)
                    send(connection, ANSWER, None)
                elif name in ("choose", "ideal", "peak"):
                    engine = None
                    send(connection, ANSWER, getattr(host, name)(*arguments))
                    gc.collect()
                else:
                    send(connection, ANSWER, getattr(engine, name)(*arguments))
            outputs = None if engine is None else engine.step(0)
            busy = outputs is not None
            if outputs:
                assert engine is not None
                engine.fill()
                if isinstance(outputs, CellOutputs):
                    send(connection, GROUPS, [packed_group(group) for group in outputs.groups])
                else:
                    send(connection, OUTPUTS, list(outputs))
    except (EOFError, ConnectionError):  # the other side has closed
        pass
    except Exception as error:
        send(connection, FAILED, f"{type(error).__name__}: {error}")
        raise


class Process:
    """One device's process, as the process that deals out requests sees it."""

    def __init__(self, make: Callable[[], Host]) -> None:
        """Start the process. `make`, which must be picklable, runs there."""
        context = get_context("spawn")
        self.connection, theirs = context.Pipe()
        self._process = context.Process(target=serve_share, args=(theirs, make), daemon=True)
        self._process.start()
        theirs.close()

    def send(self, *message: Any) -> None:
        """Send a message. Raises RuntimeError if the process has failed."""
        try:
            send(self.connection, *message)
        except ConnectionError:
            while True:
                self.receive()  # until its last message, or its end

    def begin(self, name: str, *arguments: Any) -> None:
        """Ask the host or its engine to do something."""
        self.send(ASK, name, *arguments)

    def answer(self) -> Any:
        """The answer to the oldest question. Drops outputs that come before it."""
        while True:
            kind, value = self.receive()
            if kind == ANSWER:
                return value

    def receive(self) -> tuple[str, Any]:
        """The next message. Raises RuntimeError if the process has failed."""
        try:
            kind, value = pickle.loads(self.connection.recv_bytes())
        except (EOFError, ConnectionError):
            raise RuntimeError(f"a device's process has ended, with exit code {self._process.exitcode}") from None
        if kind == FAILED:
            raise RuntimeError(f"a device's process has failed: {value}")
        return kind, value

    def close(self) -> None:
        """End the process."""
        self.connection.close()
        self._process.join(20)
        self._process.kill()


class Processes:
    """The processes of several devices."""

    def __init__(self, makes: Sequence[Callable[[], Host]]) -> None:
        """Start a process for each of these."""
        self.all = [Process(make) for make in makes]

    def ask(self, name: str, *arguments: Any) -> list[Any]:
        """Ask all processes at once. Returns their answers."""
        for process in self.all:
            process.begin(name, *arguments)
        return [process.answer() for process in self.all]

    def ideal(self) -> float:
        """The requests a second of the first device, if it runs nothing but full tasks."""
        self.all[0].begin("ideal")
        return float(self.all[0].answer())

    def close(self) -> None:
        """End all processes."""
        for process in self.all:
            process.close()


class SplitEngine:
    """A system on several devices. Each has its own process, planner, and share of the requests."""

    def __init__(self, processes: Processes, system: str) -> None:
        self._processes = processes
        processes.ask("engine", system)
        self._open = [0] * len(processes.all)
        """Number of open requests of each process."""
        self._poller = select.poll()
        self._number_of = {}
        for number, process in enumerate(processes.all):
            self._number_of[process.connection.fileno()] = number
            self._poller.register(process.connection.fileno(), select.POLLIN)
        self._clock: Callable[[], float] | None = None
        self._seconds: dict[str, float] = defaultdict(float)

    def add(self, requests: Sequence[str], samples: Sequence[Sample]) -> None:
        began = self._clock() if self._clock else 0.0
        number = self._open.index(min(self._open))
        self._processes.all[number].send(REQUESTS, *packed_requests(requests, samples))
        self._open[number] += len(requests)
        if self._clock:
            self._seconds["deal"] += self._clock() - began

    def step(self, worker: int) -> Sequence[CellOutput] | None:
        """Take the results that have come. None if there are none."""
        ready = self._poller.poll(0)
        if not ready:
            return None
        began = self._clock() if self._clock else 0.0
        groups: list[EndedGroup] = []
        outputs: list[CellOutput] = []
        for file, _ in ready:
            number = self._number_of[file]
            kind, some = self._processes.all[number].receive()
            if kind == GROUPS:
                groups += [unpacked_group(*each) for each in some]
                self._open[number] -= sum(len(group.ids) for group in groups[-len(some) :])
            else:
                outputs += some
                self._open[number] -= len(some)
        if self._clock:
            self._seconds["receive"] += self._clock() - began
        return [*CellOutputs(groups), *outputs] if outputs else CellOutputs(groups)

    def drain(self) -> None:
        self._processes.ask("drain")

    def watch(self, clock: str) -> None:
        """Time the parts of the work from now on, by this clock of the module `time`."""
        self._processes.ask("watch", clock)
        self._clock = getattr(time, clock)

    def times(self) -> tuple[Seconds, int]:
        """The seconds of all processes by what they were spent on, and the number of requests that have ended."""
        seconds, ended = defaultdict(float, self._seconds), 0
        for theirs, count in self._processes.ask("times"):
            ended += count
            for name, each in theirs.items():
                seconds[name] += each
        return seconds, ended
