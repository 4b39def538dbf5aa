"""Tuning jobs of replicas, with the interface of TuningClient. A job runs at one replica, and outlives it.

All engines see a job's directory at the same path, because they are on one host or their hosts share the file system.
When the engine that has the job ends, another one goes on after the last stored step. When the job succeeds, all
replicas load its adapter before the owner gets to know. A driven job moves in the same way; it serves no adapter.
"""

from __future__ import annotations

import asyncio
import logging
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

from msgspec import structs

from holdfast.cluster.fleet import Fleet, NoReplica
from holdfast.cluster.replica import Replica
from holdfast.core.types import AdapterInfo
from holdfast.engine.client.client import AdapterError, EngineClient
from holdfast.engine.client.connection import EngineDead
from holdfast.engine.client.tuning import (
    DrivenEvent,
    DrivenInfo,
    DrivenRun,
    DrivenStart,
    JobAction,
    JobEnded,
    JobEvent,
    JobInfo,
    JobStart,
    JobStep,
    TuningError,
    TuningRun,
)

MOST_LOSSES = 2
"""Maximum number of engines that may end in a row under a job without a new step. At the last one it has failed."""
RETRY_SECONDS = 0.05
"""Seconds before a change is sent again after the job's engine has ended."""

log = logging.getLogger("holdfast.cluster")


class Placed(ABC):
    """A job that is open at one of the replicas, or on its way to one. Only `ReplicaTuning` uses it."""

    order: Any
    """The job as its owner asked for it, but with the progress that the owner knows by now."""
    name: str
    """The adapter name that it reserves; empty if it reserves none."""

    def __init__(self, fleet: Fleet) -> None:
        self.replica: Replica
        self.outer: Any
        """The run that the owner has."""
        self.placed, self.ended = asyncio.Event(), False
        """Set while an engine has the job; and whether the job has ended."""
        self.moves = False
        """Whether the job leaves its engine only to go on at another one."""
        self._fleet, self._losses = fleet, 0
        self._inner: Any
        """The run at the present engine."""
        self._engine: EngineClient

    def own(self, run: Any) -> None:
        """Take the run that the owner has."""
        self.outer = run

    @abstractmethod
    def run(self, client: ReplicaTuning, info: Any) -> Any:
        """The run that the owner gets."""

    @abstractmethod
    async def _begin(self, engine: EngineClient) -> Any:
        """Start the job at an engine. Returns its run there."""

    @abstractmethod
    async def _take(self, event: Any) -> None:
        """Handle an event of the engine that has the job."""

    @property
    def _works(self) -> bool:
        """Whether the job may be the cause if its engine ends: it has something to compute."""
        return True

    @abstractmethod
    def _continued(self, info: Any) -> None:
        """Report what was stored and not reported before the job came to its present engine."""

    async def place(self) -> Any:
        """Start the job at the replica that has fewest jobs, and among these, fewest requests.

        Raises TuningError if the engine refuses it, or if too many engines ended, and EngineDead once the fleet is
        dead.
        """
        fleet = self._fleet
        while True:
            fleet.check_alive()
            able = [(replica, replica.engine) for replica in fleet.serving if replica.engine is not None]
            if not able:
                fleet.changed.clear()
                await fleet.changed.wait()
                continue
            self.replica, self._engine = min(
                able, key=lambda each: (len(each[1].tuning.runs), len(each[0].running), each[0].number)
            )
            try:
                self._inner = await self._begin(self._engine)
            except EngineDead:
                self._lost()
                continue
            self.placed.set()
            return self._inner.info

    def _lost(self) -> None:
        """Note that the engine has ended with the job. Raises TuningError if the job may be the cause."""
        works = self._works
        self.placed.clear()
        self._fleet.forget(self.replica, self._engine)
        if self._engine.retired or not works:
            return
        self._losses += 1
        if self._losses >= MOST_LOSSES:
            raise TuningError(
                f"{self._losses} engines ended while they had this job, without a new step; it may be the cause"
            )

    async def follow(self) -> None:
        """Pass the job's events on to its owner, from as many engines as it takes."""
        try:
            while not self.ended:
                try:
                    await self._follow_one()
                except EngineDead:
                    self._fleet.check_alive()
                    self._lost()
                if not self.ended:
                    await self._go_on()
        except EngineDead as error:
            self._fail(str(error))
        except TuningError as error:
            self._end(JobEnded(self.order.id, "failed", str(error)))

    async def _go_on(self) -> None:
        """Continue at another engine, with what was stored and not reported before."""
        self.moves = False
        info = await self.place()
        log.warning("tuning job %s goes on at replica %s", info.id, self.replica.name)
        self._continued(info)

    async def _follow_one(self) -> None:
        """Pass events on until the job ends, leaves its engine to move, or loses it."""
        async for event in self._inner.events():
            if isinstance(event, JobEnded) and event.outcome == "left" and self.moves:
                self.placed.clear()
            else:
                await self._take(event)

    def _report(self, event: Any, known: int) -> None:
        """Report progress. `known` is the number of steps that the owner knows then."""
        self._losses = 0
        self.order = replace(self.order, known=known)
        self.outer.take(event)

    def _end(self, ended: JobEnded) -> None:
        self.ended = True
        self.placed.set()
        self.outer.take(ended)

    def _fail(self, reason: str) -> None:
        self.ended = True
        self.placed.set()
        self.outer.fail(reason)

    async def change(self, action: JobAction) -> None:
        """Apply a change at the engine that has the job. Waits while none has it. Raises TuningError, EngineDead."""
        await self._ask(lambda engine: engine.tuning.change(self.order.id, action))

    async def _ask(self, question: Callable[[EngineClient], Awaitable[None]]) -> None:
        """Ask the engine that has the job, or the next one."""
        while True:
            await self.placed.wait()
            if self.ended:
                self._fleet.check_alive()
                raise TuningError(f"there is no open job {self.order.id}", missing=True)
            try:
                await question(self._engine)
                return
            except EngineDead:
                self._fleet.check_alive()
                await asyncio.sleep(RETRY_SECONDS)

    async def move(self) -> None:
        """Let the job leave its replica, which is being drained, and wait until it goes on elsewhere or has ended."""
        before, self.moves = self.replica, True
        with suppress(TuningError):
            await self.change("leave")
        while not self.ended and (self.replica is before or not self.placed.is_set()):
            await asyncio.sleep(RETRY_SECONDS)


class PlacedJob(Placed):
    """A job over files."""

    order: JobStart

    def __init__(self, fleet: Fleet, order: JobStart) -> None:
        super().__init__(fleet)
        self.order, self.name = order, order.name

    def run(self, client: ReplicaTuning, info: JobInfo) -> TuningRun:
        return TuningRun(client, info)

    async def _begin(self, engine: EngineClient) -> TuningRun:
        return await engine.tuning.start(self.order)

    async def _take(self, event: JobEvent) -> None:
        if isinstance(event, JobStep):
            self._report(event, event.step)
        elif isinstance(event, JobEnded):
            await self._finish(event)
        else:
            self.outer.take(event)

    def _continued(self, info: JobInfo) -> None:
        for step in info.untold:
            is_newest = bool(info.checkpoint) and Path(info.checkpoint).name == str(step.step)
            told = structs.replace(step, checkpoint=info.checkpoint) if is_newest else step
            self._report(told, told.step)

    async def change(self, action: JobAction) -> None:
        if action in ("pause", "resume"):
            self.order = replace(self.order, paused=action == "pause")
        await super().change(action)

    async def _finish(self, ended: JobEnded) -> None:
        """Report the end of the job. All replicas serve the adapter of a job that has succeeded."""
        if ended.adapter is not None:
            ended = structs.replace(ended, adapter=await self._serve(ended.checkpoint))
        self._end(ended)

    async def _serve(self, checkpoint: str) -> AdapterInfo | None:
        """Load the job's adapter at all replicas. None if that failed twice: an engine may have ended meanwhile."""
        for _ in range(2):
            try:
                return await self._fleet.load_adapter(self.order.name, checkpoint, replace=True)
            except (AdapterError, NoReplica) as error:
                log.warning("the adapter %s of a finished job is not served yet: %s", self.order.name, error)
                await asyncio.sleep(RETRY_SECONDS)
        return None


class PlacedDriven(Placed):
    """A driven job. The engine that takes it finds its calls on the disk, and reports those that the owner lacks."""

    order: DrivenStart
    name = ""

    def __init__(self, fleet: Fleet, order: DrivenStart) -> None:
        super().__init__(fleet)
        self.order = order
        self._asked = 0
        """Number of calls that the owner has asked for here."""

    @property
    def _works(self) -> bool:
        return self._asked > self.order.known or not self.placed.is_set()

    def run(self, client: ReplicaTuning, info: DrivenInfo) -> DrivenRun:
        return DrivenRun(client, info)

    async def _begin(self, engine: EngineClient) -> DrivenRun:
        return await engine.tuning.drive(self.order)

    async def _take(self, event: DrivenEvent) -> None:
        if isinstance(event, JobEnded):
            self._end(event)
        else:
            self._report(event, event.number + 1)

    def _continued(self, info: DrivenInfo) -> None:
        """Nothing: the engine reports it by itself."""

    async def call(self, number: int) -> None:
        """Let the engine that has the job take a call. Waits while none has it. Raises TuningError, EngineDead."""
        self._asked = max(self._asked, number + 1)
        await self._ask(lambda engine: engine.tuning.call(self.order.id, number))


class ReplicaTuning:
    """The tuning jobs of all replicas. For one event loop."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self._jobs: dict[str, Placed] = {}
        """Jobs that are open, or about to be."""
        self._runs: dict[str, TuningRun | DrivenRun] = {}
        self._following: set[asyncio.Task[None]] = set()

    @property
    def runs(self) -> dict[str, TuningRun | DrivenRun]:
        """The open jobs, by id."""
        return dict(self._runs)

    @property
    def names(self) -> set[str]:
        """The adapter names that jobs reserve, open or about to be."""
        return {job.name for job in self._jobs.values() if job.name}

    async def start(self, order: JobStart) -> TuningRun:
        """Begin or continue a job at one of the replicas. See `TuningClient.start`."""
        self._check_new(order.id)
        if order.name in self._fleet.adapters or order.name in self.names:
            raise TuningError(f"the name {order.name} is taken")
        return cast(TuningRun, await self._open(PlacedJob(self._fleet, order)))

    async def drive(self, order: DrivenStart) -> DrivenRun:
        """Begin or continue a driven job at one of the replicas. See `TuningClient.drive`."""
        self._check_new(order.id)
        return cast(DrivenRun, await self._open(PlacedDriven(self._fleet, order)))

    def _check_new(self, job: str) -> None:
        self._fleet.check_alive()
        if job in self._jobs:
            raise TuningError(f"job {job} is open already")

    async def _open(self, job: Placed) -> TuningRun | DrivenRun:
        """Place a job. It is placed even if the wait is cancelled."""
        self._jobs[job.order.id] = job
        return await asyncio.shield(asyncio.ensure_future(self._start(job)))

    async def _start(self, job: Placed) -> TuningRun | DrivenRun:
        try:
            run: TuningRun | DrivenRun = job.run(self, await job.place())
        except BaseException:
            del self._jobs[job.order.id]
            raise
        self._runs[job.order.id] = run
        job.own(run)
        task = asyncio.create_task(self._follow(job))
        self._following.add(task)
        task.add_done_callback(self._following.discard)
        return run

    async def _follow(self, job: Placed) -> None:
        try:
            await job.follow()
        finally:
            del self._jobs[job.order.id], self._runs[job.order.id]

    async def change(self, job: str, action: JobAction) -> None:
        """Pause, resume, cancel or leave an open job. See `TuningClient.change`."""
        if job not in self._runs or self._jobs[job].ended:
            raise TuningError(f"there is no open job {job}", missing=True)
        await self._jobs[job].change(action)

    async def call(self, job: str, number: int) -> None:
        """Let an open driven job take a call. See `TuningClient.call`."""
        known = self._jobs.get(job)
        if job not in self._runs or not isinstance(known, PlacedDriven) or known.ended:
            raise TuningError(f"there is no open driven job {job}", missing=True)
        await known.call(number)

    async def move_away(self, replica: Replica) -> None:
        """Move the jobs of a replica that is being drained to others."""
        jobs = [self._jobs[id] for id in self._runs if self._jobs[id].replica is replica]
        await asyncio.gather(*(job.move() for job in jobs))

    async def close(self) -> None:
        """Stop following the jobs. Their engines have ended, or end next."""
        for task in self._following:
            task.cancel()
        await asyncio.gather(*self._following, return_exceptions=True)
