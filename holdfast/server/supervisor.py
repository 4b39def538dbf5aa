"""Supervisor: several API processes on one port, which attach to the same engines and share one store."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
from msgspec.structs import replace
from prometheus_client.multiprocess import mark_process_dead

from holdfast.cluster.config import ClusterConfig
from holdfast.cluster.local_spawner import LocalSpawner
from holdfast.cluster.replicas import Replicas
from holdfast.cluster.spawner import make_spawner
from holdfast.engine.client.connection import EngineStartError
from holdfast.engine.spawn import EngineProcess, child_environment
from holdfast.lm.config import EngineConfig
from holdfast.server.address import listen, url_of
from holdfast.server.config import ServerConfig
from holdfast.server.conversations.database import MEMORY
from holdfast.server.metrics import SHARED_VARIABLE
from holdfast.server.run import HAND_OVER, Engines, signals

PAUSES = (0.0, 1.0, 2.0, 5.0, 10.0)
"""Seconds before an API process is started again, by the number of its short runs in a row. The last value repeats."""
LASTING_SECONDS = 30.0
"""Seconds after which a run is not short."""
GRACE_SECONDS = 5.0
"""Seconds after the time limit of draining until API processes that still run are killed."""
READY = b"ready\n"
"""Line that an API process writes when it accepts requests."""

log = logging.getLogger("holdfast.server")


class Order(msgspec.Struct):
    """The work of an API process: the line that it reads from its standard input."""

    server: ServerConfig
    cluster: ClusterConfig
    listener: int = -1
    """Number of the file descriptor of the listener, which the process inherits."""


def check(server: ServerConfig, cluster: ClusterConfig) -> None:
    """Raises ValueError for options that several API processes on one port cannot follow."""
    for name, value, why in (
        ("store", server.store if server.store == MEMORY else None, "they share one store, which needs a place"),
        ("ray", cluster.ray, "they attach to engines of this machine, or to those that engines names"),
        ("max_replicas", cluster.max_replicas, "they would not know of a replica that is added"),
    ):
        if value is not None:
            raise ValueError(f"api_processes is {server.api_processes}, and {name} is {value}: {why}; leave it out")


async def run(
    engine: EngineConfig,
    config: ServerConfig,
    held: socket.socket,
    process: EngineProcess | None,
    *,
    cluster: ClusterConfig,
    on_progress: Callable[[str], None],
    on_ready: Callable[[Engines, str], None],
) -> int:
    """Run the engines, and the API processes, until a signal or the engines' end. Returns the exit code.

    `held` is bound to the port and does not listen. Arguments are otherwise as for `server.run.run`. Raises
    EngineStartError, also if an API process cannot start.
    """
    with tempfile.TemporaryDirectory(prefix="holdfast-api-") as directory:
        place = Path(directory)
        (place / "metrics").mkdir()
        if cluster.engines:
            spawner, addresses = make_spawner(engine, cluster), cluster.addresses
        else:
            addresses = tuple(str(place / f"{number}.sock") for number in range(cluster.count))
            spawner = LocalSpawner(engine, cluster.count, process, listen=addresses)
        model = await Replicas.start(cluster, spawner, on_progress)
        try:
            attached = dataclasses.replace(cluster, engines=addresses, replicas=len(addresses))
            order = Order(dataclasses.replace(config, port=held.getsockname()[1]), attached)
            return await serve(model, order, place / "metrics", lambda: on_ready(Engines(model), url_of(held, config)))
        finally:
            await model.close()


async def serve(model: Replicas, order: Order, metrics: Path, on_ready: Callable[[], None]) -> int:
    """Keep the API processes running until a signal or the engines' end. Returns the exit code.

    SIGHUP replaces them one after another.
    """
    processes = [ApiProcess(number, order, metrics) for number in range(order.server.api_processes)]
    keeping = [asyncio.create_task(each.keep()) for each in processes]
    with signals() as received, signals([HAND_OVER]) as asked:
        died, stop = asyncio.create_task(model.dead.wait()), asyncio.create_task(received.get())
        ready = asyncio.create_task(report([each.ready for each in processes], on_ready))
        rolling = asyncio.create_task(roll(processes, asked))
        tasks: set[asyncio.Task[Any]] = {died, stop, ready, rolling, *keeping}
        try:
            await asyncio.wait(tasks - {ready, rolling}, return_when=asyncio.FIRST_COMPLETED)
            for task in keeping:
                if task.done():
                    task.result()  # Raises the reason why the process cannot start.
            if died.done():
                log.error("the engines have ended, so the server ends: %s", model.reason)
            rolling.cancel()
            config = order.server
            await end_all(processes, config.lame_duck_seconds + config.drain_seconds, received)
            return 1 if died.done() else 0
        finally:
            for each in processes:
                each.kill()
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


async def roll(processes: list[ApiProcess], asked: asyncio.Queue[int]) -> None:
    """Whenever it is asked for, replace the API processes one after another. One that cannot start ends the round."""
    while True:
        await asked.get()
        began = time.monotonic()
        try:
            for each in processes:
                await each.replace()
            log.warning("all %d API processes were replaced in %.1f s", len(processes), time.monotonic() - began)
        except (EngineStartError, OSError) as error:
            log.error("the API processes were not all replaced: %s", error)
        while not asked.empty():
            asked.get_nowait()


async def report(events: list[asyncio.Event], call: Callable[[], None] = lambda: None) -> None:
    """Wait until all these events are set, and then make a call."""
    for event in events:
        await event.wait()
    call()


async def end_all(processes: list[ApiProcess], seconds: float, received: asyncio.Queue[int]) -> None:
    """Let the API processes drain, up to the time limit. A second signal is passed on, and ends them at once."""
    for each in processes:
        each.end()
    ended = asyncio.create_task(report([each.ended for each in processes]))
    again = asyncio.create_task(received.get())
    tasks: set[asyncio.Task[Any]] = {ended, again}
    await asyncio.wait(tasks, timeout=seconds + GRACE_SECONDS, return_when=asyncio.FIRST_COMPLETED)
    if again.done() and not ended.done():
        for each in processes:
            each.end()
        await asyncio.wait({ended}, timeout=GRACE_SECONDS)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


class Run:
    """One run of an API process."""

    def __init__(self, process: asyncio.subprocess.Process, metrics: Path, first_ready: asyncio.Event) -> None:
        """`metrics` is the directory in which all API processes keep their metrics.

        `first_ready` is set with `ready`, and stays set over all runs.
        """
        self.began = time.monotonic()
        self.ready = asyncio.Event()
        """Set once the process accepts requests."""
        self.replaced = asyncio.Event()
        """Set once a successor runs, to which the process hands over."""
        self._process, self._first_ready = process, first_ready
        self.ended = asyncio.create_task(self._follow(process, metrics))
        """Ends with the process, and gives its exit status."""

    @property
    def seconds(self) -> float:
        """Seconds since the start."""
        return time.monotonic() - self.began

    def send(self, number: int) -> None:
        """Send a signal, unless the process has ended."""
        with contextlib.suppress(ProcessLookupError):
            self._process.send_signal(number)

    async def started(self) -> bool:
        """Wait until the process accepts requests or has ended. Returns whether it accepts requests."""
        ready = asyncio.create_task(self.ready.wait())
        try:
            await asyncio.wait({ready, self.ended}, return_when=asyncio.FIRST_COMPLETED)
            return self.ready.is_set() and not self.ended.done()
        finally:
            ready.cancel()

    async def over(self) -> None:
        """Wait until the process has ended or hands over."""
        replaced = asyncio.create_task(self.replaced.wait())
        try:
            await asyncio.wait({replaced, self.ended}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            replaced.cancel()

    def hand_over(self) -> None:
        """Let the successor accept all further connections. The process ends once it has answered its requests."""
        self.replaced.set()
        self.send(HAND_OVER)

    async def end_within(self, seconds: float) -> None:
        """Wait for the end of the process, and kill it after the time limit."""
        done, _ = await asyncio.wait({self.ended}, timeout=seconds)
        if not done:
            self.send(signal.SIGKILL)

    async def _follow(self, process: asyncio.subprocess.Process, metrics: Path) -> int:
        assert process.stdout is not None
        try:
            while line := await process.stdout.readline():
                if line == READY:
                    self.ready.set()
                    self._first_ready.set()
            return await process.wait()
        finally:
            mark_process_dead(process.pid, str(metrics))  # type: ignore[no-untyped-call]


class ApiProcess:
    """One of the API processes. It is started again when it ends, until `end`.

    The supervisor holds its listener. So connections that come between two runs wait in the listener's queue, and a
    process and its successor can accept at the same time.
    """

    def __init__(self, number: int, order: Order, metrics: Path) -> None:
        """`metrics` is the directory in which all API processes keep their metrics."""
        self.ready = asyncio.Event()
        """Set once it has accepted requests for the first time."""
        self.ended = asyncio.Event()
        """Set when it has ended and is not started again."""
        self._number, self._order, self._metrics = number, order, metrics
        self._ending = asyncio.Event()
        """Set once it is not to be started again."""
        self._listeners: list[socket.socket] = []
        """The listener; empty while it is closed because the process fails again and again."""
        self._runs: list[Run] = []
        """The runs that have not ended. The last one is the present one; those before it hand over."""
        self._changing = asyncio.Lock()
        """Held while a run is started in place of another."""

    async def keep(self) -> None:
        """Run the process until `end`. Raises EngineStartError if its first run ends before it accepts requests."""
        short = 0
        try:
            while not self._ending.is_set():
                await asyncio.sleep(PAUSES[min(short, len(PAUSES) - 1)])
                if self._ending.is_set():
                    return
                run = await self._present()
                await run.over()
                if self._ending.is_set():
                    return
                async with self._changing:
                    if run.replaced.is_set():
                        short = 0
                        continue
                    self._runs.remove(run)
                status = run.ended.result()
                if not self.ready.is_set():
                    raise EngineStartError(f"API process {self._number} could not start: exit status {status}")
                log.error("API process %d has ended with status %d and is started again", self._number, status)
                short = 0 if run.seconds >= LASTING_SECONDS else short + 1
                if short > 1:
                    self._close_listener()  # The kernel gives its connections to the other processes.
        finally:
            for run in [*self._runs]:
                await run.ended
            self._close_listener()
            self.ended.set()

    async def replace(self) -> None:
        """Start a successor, and let the present run hand over to it. Raises EngineStartError if it cannot start."""
        async with self._changing:
            before, run = [*self._runs], await self._start()
            if not await run.started():
                self._runs.remove(run)
                raise EngineStartError(f"API process {self._number} could not be replaced and goes on")
            config = self._order.server
            for each in before:
                each.hand_over()
        for each in before:
            await each.end_within(config.drain_seconds + config.idle_seconds + GRACE_SECONDS)
            self._runs.remove(each)

    def end(self) -> None:
        """Let the process drain and end. A second call ends it at once."""
        again = self._ending.is_set()
        self._ending.set()
        for run in self._runs:
            if again or not run.replaced.is_set():  # To one that hands over, it would be the second signal.
                run.send(signal.SIGTERM)
        if not self._runs:
            self.ended.set()

    def kill(self) -> None:
        """Kill the process, if it runs."""
        self._ending.set()
        for run in self._runs:
            run.send(signal.SIGKILL)

    async def _present(self) -> Run:
        """Return the present run, which is started if there is none."""
        async with self._changing:
            return self._runs[-1] if self._runs else await self._start()

    def _close_listener(self) -> None:
        for listener in self._listeners:
            listener.close()
        self._listeners.clear()

    async def _start(self) -> Run:
        """Start the process at the listener."""
        if not self._listeners:
            self._listeners.append(listen(self._order.server))
        listener = self._listeners[0].fileno()
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-P", "-m", "holdfast.server.worker",
            stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, pass_fds=(listener,),
            env=child_environment() | {SHARED_VARIABLE: str(self._metrics)},  # The order has the keys.
            start_new_session=True,  # The terminal's Ctrl-C must reach only us.
        )  # fmt: skip
        assert process.stdin is not None
        run = Run(process, self._metrics, self.ready)
        self._runs.append(run)
        with contextlib.suppress(OSError):
            process.stdin.write(msgspec.json.encode(replace(self._order, listener=listener)) + b"\n")
            await process.stdin.drain()
        return run
