"""EngineConnection: one engine process as its client sees it: its start, its health, and its end."""

from __future__ import annotations

import asyncio
import itertools
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from typing import Any, Generic, Protocol, TypeVar

from holdfast.engine import messages
from holdfast.engine.link import Child
from holdfast.engine.spawn import Remote

HEALTH_SECONDS = 10.0
"""Default time limit of a health check, in seconds."""
TICK_SECONDS = 1.5
"""Seconds between two comparisons with the clock of an engine on another host. They also reveal a lost connection."""
CLOCKS = 40
"""Number of answers from which the difference of the clocks is taken.

They cover the last minute, because clocks drift.
"""

Info = TypeVar("Info")
Stats = TypeVar("Stats")


class EngineStartError(RuntimeError):
    """The engine could not start. The message has the reason in one line."""


class EngineDead(RuntimeError):
    """The engine process has ended. The message has the reason in one line."""


class QueueFull(RuntimeError):
    """The queue of waiting requests is full; try again later."""


class EngineAsleep(RuntimeError):
    """The engine sleeps, falls asleep or wakes up, and takes no requests."""


class SleepError(RuntimeError):
    """The engine does not fall asleep or wake up. The message has the reason."""


class Questions:
    """Questions to an engine, each with a number under which its answer comes back."""

    def __init__(self, send: Callable[[messages.ToEngine], None], check_alive: Callable[[], None]) -> None:
        """`check_alive` raises EngineDead for an engine that has ended."""
        self._send, self._check_alive = send, check_alive
        self._numbers = itertools.count()
        self._open: dict[int, asyncio.Future[Any]] = {}

    def ask(self, message: Callable[[int], messages.ToEngine]) -> asyncio.Future[Any]:
        """Send a question. Returns the future of its answer, which may be cancelled. Raises EngineDead."""
        self._check_alive()
        number = next(self._numbers)
        answer = self._open[number] = asyncio.get_running_loop().create_future()
        answer.add_done_callback(lambda _: self._open.pop(number, None))
        try:
            self._send(message(number))  # its answer may come at once
        except BaseException:
            answer.cancel()
            raise
        return answer

    def answer(self, number: int, result: Any) -> None:
        """Settle a question, unless nobody waits for its answer."""
        if number in self._open:
            settle(self._open[number], result)

    def refuse(self, number: int, error: Exception) -> None:
        """Settle a question with an error, unless nobody waits for its answer."""
        if number in self._open:
            fail_all([self._open[number]], error)

    def fail(self, error: Exception) -> None:
        """Settle all questions with an error."""
        fail_all([*self._open.values()], error)


class Origin(Protocol):
    """An engine before its client talks to it: a new process, or one that the client attaches to."""

    began: float
    """Time at which its start, or the attempt to reach it, began, on our monotonic clock."""
    remote: Remote | None
    """Its place, if it is not a process of this client on this machine."""


class Peer(Protocol):
    """The connection to an engine: `Child` for a process of ours, `Attachment` for one that outlives us."""

    @property
    def pid(self) -> int: ...

    def send(self, message: messages.ToEngine) -> None: ...

    async def receive(self) -> messages.FromEngine: ...

    def hide(self) -> None: ...

    async def close(self, *, at_once: bool = False) -> None: ...

    def kill(self) -> None: ...


Connect = Callable[[Callable[[str], None], Any], Peer]
"""Opens the connection to an Origin. The function that it is given is called with the reason when it ends."""


def connect_child(on_end: Callable[[str], None], process: Any) -> Peer:
    """Open the connection to a new process."""
    return Child(on_end, process)


class EngineConnection(ABC, Generic[Info, Stats]):
    """One engine process, for one event loop. Each kind of engine defines its start message and its answers."""

    def __init__(
        self, process: Origin, on_progress: Callable[[str], None] | None = None, connect: Connect = connect_child
    ) -> None:
        """Connect to a new process. `on_progress` is called with each stage's name. Raises OSError."""
        self.info: Info
        """The engine's description of itself when it was ready."""
        self.dead = asyncio.Event()
        """Set when the engine has ended."""
        self.reason = ""
        """The reason why the engine ended, in one line."""
        self._on_progress = on_progress or (lambda stage: None)
        self._began = process.began
        self._ready: asyncio.Future[Info] = asyncio.get_running_loop().create_future()
        self._questions = Questions(lambda message: self._child.send(message), self._check_alive)
        self._closed = False
        self.retired = False
        """Whether the engine ended because it was closed while it lived."""
        self._from = "" if process.remote is None else f"{process.remote.place}: "
        """Prefix of reasons that names the engine's host; empty for an engine on this host."""
        self.ahead = 0.0
        """Seconds that the engine's clock is ahead of ours; 0 on the same machine.

        The value is never above the true difference, and below it only by the fastest travel time of the last messages.
        So an event that the engine dates never seems to precede its cause here.
        """
        self._clocks: deque[float] = deque(maxlen=CLOCKS)
        self._ticking: list[asyncio.Task[None]] = []
        """The task that compares clocks, with an engine on another host."""
        self._child = connect(self._end, process)
        self._listening = asyncio.create_task(self._listen())

    @property
    def pid(self) -> int:
        """The engine's process id."""
        return self._child.pid

    async def health(self, timeout: float = HEALTH_SECONDS) -> Stats:
        """Queues and memory, by a round trip through the engine's loop. Raises EngineDead, TimeoutError."""
        stats: Stats = await asyncio.wait_for(self._questions.ask(messages.Ask), timeout)
        return stats

    async def close(self) -> None:
        """End the engine process. Requests that still run raise EngineDead. May be called more than once."""
        await self._close(at_once=False)

    def kill(self) -> None:
        """End the engine process at once, in whatever state it is. Running requests raise EngineDead a moment later."""
        self._child.kill()

    @abstractmethod
    def _start_message(self) -> messages.Start | messages.StartApp:
        """The message to send after the engine's Hello."""

    @abstractmethod
    def _take_output(self, message: messages.FromEngine) -> None:
        """Handle a message about requests."""

    @abstractmethod
    def _fail_requests(self, reason: str) -> None:
        """End all requests with an EngineDead."""

    @asynccontextmanager
    async def _starting(self) -> AsyncIterator[None]:
        """Inside the block, wait until the engine is ready. If that fails or ends early, the process ends, too.

        Raises EngineStartError with the reason.
        """
        try:
            yield
        except BaseException as error:
            await self._close(at_once=True)
            if isinstance(error, (ValueError, EngineDead)):
                raise EngineStartError(str(error)) from error
            raise

    async def _close(self, *, at_once: bool) -> None:
        self.retired |= not self.dead.is_set()
        self._end("the engine was closed")
        if not self._closed:
            self._closed = True
            self._listening.cancel()
            for ticking in self._ticking:
                ticking.cancel()
            await self._child.close(at_once=at_once)

    def _check_alive(self) -> None:
        if self.dead.is_set():
            raise EngineDead(self.reason)

    async def _listen(self) -> None:
        try:
            while True:
                self._take(await self._child.receive())
        except Exception as error:  # nothing reads the socket now, so requests must not wait for it
            self._end(f"the engine's messages cannot be read: {type(error).__name__}: {error}")
            self._child.kill()

    def _take(self, message: messages.FromEngine) -> None:
        match message:
            case messages.Stats(number, stats) | messages.AppAnswer(number, stats):
                self._questions.answer(number, stats)
            case messages.Hello(there):
                if self._from:
                    self._begin_ticks(there)
                self._child.hide()
                self._child.send(self._start_message())
            case messages.Progress(stage):
                self._on_progress(stage)
            case messages.Ready(info) | messages.AppReady(info):
                settle(self._ready, info)
            case messages.Failure(reason):
                self._end(f"{self._from}{reason}")
            case messages.Clock(there):
                self._note_clock(there)
            case _:
                self._take_output(message)

    def _begin_ticks(self, there: float) -> None:
        """Compare clocks from now on, with an engine whose clock says `there`. It also learns that we live."""
        self._note_clock(there)
        self._ticking.append(asyncio.create_task(self._tick()))

    def _note_clock(self, there: float) -> None:
        self._clocks.append(there - time.monotonic())
        self.ahead = max(self._clocks)

    async def _tick(self) -> None:
        while not self.dead.is_set():
            await asyncio.sleep(TICK_SECONDS)
            self._child.send(messages.Tick())

    def _end(self, reason: str) -> None:
        """Fail all calls that wait for the engine, which has ended. Only the first call counts."""
        if self.dead.is_set():
            return
        self.reason = reason
        self.dead.set()
        self._fail_requests(reason)
        fail_all([self._ready], EngineDead(reason))
        self._questions.fail(EngineDead(reason))


def settle(future: asyncio.Future[Any], result: Any) -> None:
    """Give an unfinished future its result."""
    if not future.done():
        future.set_result(result)


def fail_all(futures: Iterable[asyncio.Future[Any]], error: Exception) -> None:
    """End all unfinished futures with an error."""
    for future in futures:
        if not future.done():
            future.set_exception(error)
            future.exception()  # marks it as retrieved, because nobody may await it
