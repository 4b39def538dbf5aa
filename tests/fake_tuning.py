"""A fake of the engine's part of tuning jobs: reads a job's files, counts its steps, and learns nothing."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from holdfast.core.types import AdapterInfo
from holdfast.engine.client.tuning import EXAMPLES_FILE, TuningClient, auto_batch_size, auto_epochs, digest_of
from holdfast.lm.parts.tuning.messages import (
    ChangeJob,
    JobChanged,
    JobEnded,
    JobEvent,
    JobInfo,
    JobProgress,
    JobRefused,
    JobStart,
    JobStarted,
    JobStatus,
    JobStep,
    StartJob,
)
from holdfast.training.data import Examples

STATE = "job.json"


class FakeTuner:
    """Answers a real TuningClient. A step takes `seconds`; it is stored in the job's directory before it is told."""

    def __init__(self, adapters: dict[str, AdapterInfo], check_alive: Callable[[], None]) -> None:
        self.client = TuningClient(self.send, adapters, check_alive)
        self.seconds = 0.0
        self.untold = 0
        """Steps from which on nothing is told any more, as if the engine were killed between storing and telling."""
        self.waits_at, self.goes_on = 0, asyncio.Event()
        """The step that begins only when a test says so: whatever the test does before, the job runs by then."""
        self.refuse = ""
        self.breaks_at = 0
        """The step at which a job fails."""
        self.breaks_with = "the loss is not a number"
        self.poison = ""
        """A job with these bytes among its examples kills the engine at the step `kills_at`."""
        self.kills_at = 1
        self.kill: Callable[[str], None] = self.die
        self.orders: list[JobStart] = []
        self.changes: list[tuple[str, str]] = []
        self.steps: list[tuple[str, int]] = []
        """All steps that were computed: job and number."""
        self._may_run: dict[str, asyncio.Event] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._kept: set[asyncio.Task[None]] = set()

    def send(self, message: Any) -> None:
        match message:
            case StartJob(number, job):
                self._later(self._start(number, job))
            case ChangeJob(number, job, action):
                self.changes.append((job, action))
                self.client.take(JobChanged(number))
                if action == "cancel":
                    self._tasks.pop(job).cancel()
                    (self._directory(job) / STATE).unlink()
                    self._tell(JobEnded(job, "cancelled"))
                elif action == "pause":
                    self._may_run[job].clear()
                    self._tell(JobStatus(job, "paused"))
                else:
                    self._may_run[job].set()
                    self._tell(JobStatus(job, "running"))

    def die(self, reason: str) -> None:
        for task in self._tasks.values():
            task.cancel()
        self.client.fail(reason)

    def _later(self, work: Any) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._kept.add(task)
        task.add_done_callback(self._kept.discard)
        return task

    def _tell(self, event: JobEvent) -> None:
        if not self.untold or not isinstance(event, JobStep | JobEnded):
            self.client.take(JobProgress([event]))

    def _directory(self, job: str) -> Path:
        return Path(next(order.directory for order in self.orders if order.id == job))

    async def _start(self, number: int, order: JobStart) -> None:
        self.orders.append(order)
        directory = Path(order.directory)
        if self.refuse or digest_of(directory / EXAMPLES_FILE) != order.data_digest:
            self.client.take(JobRefused(number, self.refuse or "examples.bin has changed"))
            return
        lengths = Examples(directory / EXAMPLES_FILE).lengths
        size = order.batch_size or auto_batch_size(len(lengths))
        epochs = order.epochs or auto_epochs(len(lengths), size)
        per_epoch = -(-len(lengths) // size)
        try:
            step = json.loads((directory / STATE).read_text())["step"]
        except FileNotFoundError:
            step = 0
        done = step // per_epoch * per_epoch
        info = JobInfo(
            id=order.id, step=step, steps=epochs * per_epoch, examples=len(lengths), trained_tokens=10 * step,
            loss=1 / step if step else None, validation=None,
            checkpoint=str(directory / "checkpoints" / str(done)) if done else "", epochs=epochs, batch_size=size,
            learning_rate=order.learning_rate, rank=order.rank, alpha=order.alpha or 2.0 * order.rank,
            modules=order.modules or ("q",), dora=order.dora, micro_batch=order.micro_batch or 512,
            untold=tuple(
                JobStep(order.id, each, epochs * per_epoch, 10, 1 / each) for each in range(order.known + 1, step + 1)
            ),
        )  # fmt: skip
        self.client.take(JobStarted(number, info))
        self._may_run[order.id] = asyncio.Event()
        self._may_run[order.id].set()
        self._tell(JobStatus(order.id, "running"))
        self._tasks[order.id] = self._later(self._compute(order, info, per_epoch))

    def _is_poisoned(self, directory: Path) -> bool:
        """FakeText has one token for each character, and examples are stored as 32-bit tokens."""
        return self.poison.encode("utf-32-le") in (directory / EXAMPLES_FILE).read_bytes()

    async def _compute(self, order: JobStart, info: JobInfo, per_epoch: int) -> None:
        directory = Path(order.directory)
        place = directory / "checkpoints" / str(info.steps)
        for step in range(info.step + 1, info.steps + 1):
            await asyncio.sleep(self.seconds)
            if step == self.waits_at:
                await self.goes_on.wait()
            await self._may_run[order.id].wait()
            if step == self.kills_at and self.poison and self._is_poisoned(directory):
                self.kill("the engine ended by signal 11 (SIGSEGV)")
                return
            if step == self.breaks_at:
                self._tell(JobEnded(order.id, "failed", self.breaks_with))
                return
            self.steps.append((order.id, step))
            checkpoint = ""
            if step % per_epoch == 0:
                made = directory / "checkpoints" / str(step)
                made.mkdir(parents=True)
                (made / "adapter_config.json").write_text(json.dumps({"step": step}))
                (made / "adapter_model.safetensors").write_bytes(b"weights")
                checkpoint = str(made)
            (directory / STATE).write_text(json.dumps({"step": step}))
            validation = 2 / step if checkpoint and order.validation_digest else None
            if not self.untold or step < self.untold:
                self.client.take(
                    JobProgress([JobStep(order.id, step, info.steps, 10, 1 / step, validation, checkpoint)])
                )
        adapter = AdapterInfo(f"{order.name}@0123", order.name, order.rank, 100, ("q",))
        self._tell(JobEnded(order.id, "succeeded", adapter=adapter, checkpoint=str(place)))
