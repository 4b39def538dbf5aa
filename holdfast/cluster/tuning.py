"""Tuning jobs of replicas, with the interface of TuningClient. A job runs at one replica, and outlives it.

All engines see a job's directory at the same path, because they are on one host or their hosts share the file system.
When the engine that has the job ends, another one goes on after the last stored step. When the job succeeds, all
replicas load its adapter before the owner gets to know.
"""

from __future__ import annotations

import asyncio
import logging
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from msgspec import structs

from holdfast.cluster.fleet import Fleet, NoReplica
from holdfast.cluster.replica import Replica
from holdfast.core.types import AdapterInfo
from holdfast.engine.client.client import AdapterError, EngineClient
from holdfast.engine.client.connection import EngineDead
from holdfast.engine.client.tuning import JobAction, JobEnded, JobInfo, JobStart, JobStep, TuningError, TuningRun

MOST_LOSSES = 2
"""Maximum number of engines that may end in a row under a job without a new step. At the last one it has failed."""
RETRY_SECONDS = 0.05
"""Seconds before a change is sent again after the job's engine has ended."""

log = logging.getLogger("holdfast.cluster")


class PlacedJob:
    """A job that is open at one of the replicas, or on its way to one. Only `ReplicaTuning` uses it."""

    def __init__(self, fleet: Fleet, order: JobStart) -> None:
        self.order = order
        """The job as its owner asked for it, but with the steps that the owner knows by now."""
        self.replica: Replica
        self.outer: TuningRun
        """The run that the owner has."""
        self.placed, self.ended = asyncio.Event(), False
        """Set while an engine has the job; and whether the job has ended."""
        self.moves = False
        """Whether the job leaves its engine only to go on at another one."""
        self._fleet, self._losses = fleet, 0
        self._inner: TuningRun
        """The run at the present engine."""
        self._engine: EngineClient

    async def place(self) -> JobInfo:
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
                self._inner = await self._engine.tuning.start(self.order)
            except EngineDead:
                self._lost()
                continue
            self.placed.set()
            return self._inner.info

    def _lost(self) -> None:
        """Note that the engine has ended with the job. Raises TuningError if the job may be the cause."""
        self.placed.clear()
        self._fleet.forget(self.replica, self._engine)
        if self._engine.retired:
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
        """Continue at another engine, with the steps that were stored and not reported before."""
        self.moves = False
        info = await self.place()
        log.warning("tuning job %s goes on at replica %s after step %d", info.id, self.replica.name, info.step)
        for step in info.untold:
            is_newest = bool(info.checkpoint) and Path(info.checkpoint).name == str(step.step)
            self._report(structs.replace(step, checkpoint=info.checkpoint) if is_newest else step)

    async def _follow_one(self) -> None:
        """Pass events on until the job ends, leaves its engine to move, or loses it."""
        async for event in self._inner.events():
            if isinstance(event, JobStep):
                self._report(event)
            elif not isinstance(event, JobEnded):
                self.outer.take(event)
            elif event.outcome == "left" and self.moves:
                self.placed.clear()
            else:
                await self._finish(event)

    def _report(self, step: JobStep) -> None:
        self._losses = 0
        self.order = replace(self.order, known=step.step)
        self.outer.take(step)

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
        if action in ("pause", "resume"):
            self.order = replace(self.order, paused=action == "pause")
        while True:
            await self.placed.wait()
            if self.ended:
                self._fleet.check_alive()
                raise TuningError(f"there is no open job {self.order.id}", missing=True)
            try:
                await self._engine.tuning.change(self.order.id, action)
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


class ReplicaTuning:
    """The tuning jobs of all replicas. For one event loop."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self._jobs: dict[str, PlacedJob] = {}
        """Jobs that are open, or about to be."""
        self._runs: dict[str, TuningRun] = {}
        self._following: set[asyncio.Task[None]] = set()

    @property
    def runs(self) -> dict[str, TuningRun]:
        """The open jobs, by id."""
        return dict(self._runs)

    @property
    def names(self) -> set[str]:
        """The adapter names that jobs reserve, open or about to be."""
        return {job.order.name for job in self._jobs.values()}

    async def start(self, order: JobStart) -> TuningRun:
        """Begin or continue a job at one of the replicas. See `TuningClient.start`."""
        self._fleet.check_alive()
        if order.id in self._jobs:
            raise TuningError(f"job {order.id} is open already")
        if order.name in self._fleet.adapters or order.name in self.names:
            raise TuningError(f"the name {order.name} is taken")
        job = self._jobs[order.id] = PlacedJob(self._fleet, order)
        return await asyncio.shield(asyncio.ensure_future(self._start(job)))

    async def _start(self, job: PlacedJob) -> TuningRun:
        try:
            job.outer = self._runs[job.order.id] = TuningRun(self, await job.place())
        except BaseException:
            del self._jobs[job.order.id]
            raise
        task = asyncio.create_task(self._follow(job))
        self._following.add(task)
        task.add_done_callback(self._following.discard)
        return job.outer

    async def _follow(self, job: PlacedJob) -> None:
        try:
            await job.follow()
        finally:
            del self._jobs[job.order.id], self._runs[job.order.id]

    async def change(self, job: str, action: JobAction) -> None:
        """Pause, resume, cancel or leave an open job. See `TuningClient.change`."""
        if job not in self._runs or self._jobs[job].ended:
            raise TuningError(f"there is no open job {job}", missing=True)
        await self._jobs[job].change(action)

    async def move_away(self, replica: Replica) -> None:
        """Move the jobs of a replica that is being drained to others."""
        jobs = [self._jobs[id] for id in self._runs if self._jobs[id].replica is replica]
        await asyncio.gather(*(job.move() for job in jobs))

    async def close(self) -> None:
        """Stop following the jobs. Their engines have ended, or end next."""
        for task in self._following:
            task.cancel()
        await asyncio.gather(*self._following, return_exceptions=True)
