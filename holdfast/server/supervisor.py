"""Supervisor: several API processes on one port, which attach to the same engines and share one store."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
from prometheus_client.multiprocess import mark_process_dead

from holdfast.cluster.config import ClusterConfig
from holdfast.cluster.local_spawner import LocalSpawner
from holdfast.cluster.replicas import Replicas
from holdfast.cluster.spawner import make_spawner
from holdfast.engine.client.connection import EngineStartError
from holdfast.engine.spawn import EngineProcess, child_environment
from holdfast.lm.config import EngineConfig
from holdfast.server.address import url_of
from holdfast.server.config import ServerConfig
from holdfast.server.conversations.database import MEMORY
from holdfast.server.metrics import SHARED_VARIABLE
from holdfast.server.run import Engines, signals

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
            attached = replace(cluster, engines=addresses, replicas=len(addresses))
            order = Order(replace(config, port=held.getsockname()[1]), attached)
            return await serve(model, order, place / "metrics", lambda: on_ready(Engines(model), url_of(held, config)))
        finally:
            await model.close()


async def serve(model: Replicas, order: Order, metrics: Path, on_ready: Callable[[], None]) -> int:
    """Keep the API processes running until a signal or the engines' end. Returns the exit code."""
    processes = [ApiProcess(number, order, metrics) for number in range(order.server.api_processes)]
    keeping = [asyncio.create_task(each.keep()) for each in processes]
    with signals() as received:
        died, stop = asyncio.create_task(model.dead.wait()), asyncio.create_task(received.get())
        ready = asyncio.create_task(report([each.ready for each in processes], on_ready))
        tasks: set[asyncio.Task[Any]] = {died, stop, ready, *keeping}
        try:
            await asyncio.wait(tasks - {ready}, return_when=asyncio.FIRST_COMPLETED)
            for task in keeping:
                if task.done():
                    task.result()  # Raises the reason why the process cannot start.
            if died.done():
                log.error("the engines have ended, so the server ends: %s", model.reason)
            await end_all(processes, order.server.drain_seconds, received)
            return 1 if died.done() else 0
        finally:
            for each in processes:
                each.kill()
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


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


class Run(NamedTuple):
    """One run of an API process."""

    process: asyncio.subprocess.Process
    began: float


class ApiProcess:
    """One of the API processes. It is started again when it ends, until `end`."""

    def __init__(self, number: int, order: Order, metrics: Path) -> None:
        """`metrics` is the directory in which all API processes keep their metrics."""
        self.ready = asyncio.Event()
        """Set once it has accepted requests for the first time."""
        self.ended = asyncio.Event()
        """Set when it has ended and is not started again."""
        self._number, self._order, self._metrics = number, order, metrics
        self._ending = asyncio.Event()
        """Set once it is not to be started again."""
        self._runs: list[Run] = []
        """The present run; empty between two runs."""

    async def keep(self) -> None:
        """Run the process until `end`. Raises EngineStartError if its first run ends before it accepts requests."""
        short = 0
        try:
            while not self._ending.is_set():
                await asyncio.sleep(PAUSES[min(short, len(PAUSES) - 1)])
                if self._ending.is_set():
                    return
                status, seconds = await self._run()
                if self._ending.is_set():
                    return
                if not self.ready.is_set():
                    raise EngineStartError(f"API process {self._number} could not start: exit status {status}")
                log.error("API process %d has ended with status %d and is started again", self._number, status)
                short = 0 if seconds >= LASTING_SECONDS else short + 1
        finally:
            self.ended.set()

    def end(self) -> None:
        """Let the process drain and end. A second call ends it at once."""
        self._ending.set()
        self._signal(signal.SIGTERM)
        if not self._runs:
            self.ended.set()

    def kill(self) -> None:
        """Kill the process, if it runs."""
        self._ending.set()
        self._signal(signal.SIGKILL)

    def _signal(self, number: int) -> None:
        for run in self._runs:
            with contextlib.suppress(ProcessLookupError):
                run.process.send_signal(number)

    async def _run(self) -> tuple[int, float]:
        """Run the process once. Returns its exit status, and the seconds that it ran."""
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-P", "-m", "holdfast.server.worker",
            stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE,
            env=child_environment() | {SHARED_VARIABLE: str(self._metrics)},  # The order has the keys.
            start_new_session=True,  # The terminal's Ctrl-C must reach only us.
        )  # fmt: skip
        assert process.stdin is not None and process.stdout is not None
        self._runs.append(Run(process, time.monotonic()))
        with contextlib.suppress(OSError):
            process.stdin.write(msgspec.json.encode(self._order) + b"\n")
            await process.stdin.drain()
        try:
            while line := await process.stdout.readline():
                if line == READY:
                    self.ready.set()
            return await process.wait(), time.monotonic() - self._runs[0].began
        finally:
            self._runs.clear()
            mark_process_dead(process.pid, str(self._metrics))  # type: ignore[no-untyped-call]
