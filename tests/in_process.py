"""A real engine in this process, behind the real EngineClient: only the socket and the process are missing.

Whoever holds it says when a step is done, and may look at the scheduler between two of them. Everything runs in one
thread and in a fixed order, so whatever happens once happens again.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any
from unittest.mock import patch

from holdfast.engine.client import client, connection
from holdfast.engine.client.client import EngineClient
from holdfast.engine.messages import (
    EngineInfo,
    FromEngine,
    Hello,
    Outputs,
    Ready,
    Start,
    Submit,
    ToEngine,
    decode_from_engine,
    decode_to_engine,
    encode,
)
from holdfast.engine.process.build import refusing
from holdfast.engine.process.handler import Router
from holdfast.engine.process.parts.pace import PaceBuilder
from holdfast.engine.process.parts.pauses import PauseBuilder
from holdfast.engine.process.serve import core_handlers
from holdfast.engine.process.step_log import StepLog
from holdfast.engine.process.watched import Watched
from holdfast.lm.config import EngineConfig
from holdfast.loop.loop import Loop


class AtOnce(ThreadPoolExecutor):
    """Does what it is given before it answers; once it is gone, it does nothing any more."""

    def __init__(self, *arguments: Any, **keywords: Any) -> None:
        super().__init__(max_workers=1)
        self.gone = False

    def submit(self, work: Callable[..., Any], /, *arguments: Any, **keywords: Any) -> Future[Any]:
        done: Future[Any] = Future()
        try:
            if self.gone:
                raise RuntimeError("the process is no more")
            done.set_result(work(*arguments, **keywords))
        except BaseException as error:
            done.set_exception(error)
        return done

    def write(self, work: Callable[[], Any]) -> Future[Any]:
        """Do a work of a `GroupWriter`, in a transaction of its own."""
        return self.submit(work)


class Engine:
    """What stands in for `engine.process.Child` and the process behind it."""

    def __init__(self, loop: Loop, info: EngineInfo) -> None:
        self.loop = loop
        self.info = info
        self.asked: dict[str, tuple[int, ...]] = {}
        """Prompts by request."""
        self.answered: dict[str, list[int]] = {}
        self.began: dict[str, tuple[int, int]] = {}
        """With the first token of each request, how many cached tokens and preemptions were told."""
        self.ended = asyncio.Event()
        self.pid = 0
        self._messages: asyncio.Queue[bytes] = asyncio.Queue()
        self._on_end: Callable[[str], None]
        steps, watched = StepLog(loop._clock), Watched(loop, self._tell)
        core = core_handlers(loop, Parent(self._tell), steps, watched, ())  # type: ignore[arg-type]
        self._router = Router([*core, refusing((PauseBuilder, PaceBuilder), ())], self._tell)

    def step(self) -> bool:
        """Do one step, if there is anything to do, and send what it gave. Whether there was."""
        if self.ended.is_set() or not self.loop.has_work():
            return False
        outputs = self.loop.step()
        for output in outputs:
            self.began.setdefault(output.request_id, (output.cached_tokens, output.preemptions))
            self.answered[output.request_id] += output.tokens
        if outputs:
            self._tell(Outputs(**outputs.by_name))
        return True

    def die(self) -> None:
        """Be no more: nothing that is sent from now on arrives."""
        if not self.ended.is_set():
            self.ended.set()
            self.loop.close()

    # What the engine process has of its parent

    def _tell(self, message: FromEngine) -> None:
        self._messages.put_nowait(encode(message))

    def receive_from(self, message: ToEngine) -> None:
        if isinstance(message, Start):
            self._tell(Ready(self.info))
            return
        if isinstance(message, Submit):
            self.asked[message.request.id] = tuple(message.request.prompt)
            self.answered[message.request.id] = []
        self._router.receive([message])

    # What the client has of its child

    def born(self, on_end: Callable[[str], None], process: Unborn) -> Engine:
        self._on_end = on_end
        self._tell(Hello())
        return self

    def send(self, message: ToEngine) -> None:
        if not self.ended.is_set():
            self.receive_from(decode_to_engine(encode(message)))

    async def receive(self) -> FromEngine:
        return decode_from_engine(await self._messages.get())

    def hide(self) -> None:
        pass

    def kill(self) -> None:
        self.die()

    async def close(self, *, at_once: bool = False) -> None:
        self.die()


class Unborn:
    """In place of a process: the engine runs in this one."""

    def __init__(self, device: str) -> None:
        self.began = time.monotonic()
        self.remote = None


class Parent:
    """The engine process's end of the socket, as handlers need it."""

    def __init__(self, send: Callable[[FromEngine], None]) -> None:
        self.send = send


async def start(engine: Engine, config: EngineConfig) -> EngineClient:
    """The real client of an engine in this process."""
    with patch.object(connection, "Child", engine.born), patch.object(client, "EngineProcess", Unborn):
        return await EngineClient.start(config)


async def settle(turns: int = 60) -> None:
    """Let everybody go on until they wait for the engine, or for whoever drives it; at most so many turns."""
    ready, quiet = asyncio.get_running_loop()._ready, 0  # type: ignore[attr-defined]
    for _ in range(turns):
        await asyncio.sleep(0)
        quiet = 0 if ready else quiet + 1
        if quiet == 3:  # nobody but us had a turn, so nobody will until we go on
            return
