"""A fake of the engine's part of driven jobs: one parameter, which calls read, and which updates move.

It keeps what the engine promises: a call is done once, its result is in its file before it is reported, an update's
state is stored, and calls after the stored state are computed again from their files when the job is opened.
"""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from fake_tuning import FakeTuner

from holdfast.core.types import AdapterInfo
from holdfast.engine.client.tuning import (
    CALLS,
    RESULTS,
    Call,
    CallDone,
    CallFailed,
    CallResult,
    DrivenInfo,
    DrivenStart,
    JobEnded,
    Limits,
    call_path,
    read_call,
)
from holdfast.lm.parts.tuning.messages import (
    ChangeJob,
    DrivenProgress,
    DrivenStarted,
    JobChanged,
    JobRefused,
    RunCall,
    StartDriven,
)
from holdfast.training.calls import write_result

STATE = "state.json"
LIMITS = Limits(vocabulary=256, tokens=200)


class DrivenJob:
    """One open job. `value` is its parameter, and `gradient` what the calls since the last update add up to."""

    def __init__(self, order: DrivenStart) -> None:
        self.order, self.directory = order, Path(order.directory)
        self.calls = self.updates = 0
        self.value = self.gradient = 0.0
        try:
            stored = json.loads((self.directory / STATE).read_text())
            self.calls, self.updates, self.value = stored["calls"], stored["updates"], stored["value"]
        except FileNotFoundError:
            self.store()
        self.next = self.calls
        self.last = -1
        """The newest call that may be computed."""
        self.more = asyncio.Event()

    def store(self) -> None:
        kept = {"calls": self.calls, "updates": self.updates, "value": self.value}
        (self.directory / STATE).write_text(json.dumps(kept))

    def compute(self, number: int) -> CallResult:
        call, data = read_call(self.directory, number, LIMITS)
        if call.scores:
            scores = (self.value - data.targets / 256).astype(np.float32)
            logprobs = data.trimmed(scores)
            weights = data.arrays.get("weights", data.arrays.get("advantages", np.ones(len(data.targets))))
            loss = float(-(weights * scores).sum())
            self.gradient += float(weights.sum()) if call.kind == "forward_backward" else 0.0
            return CallResult(number, {"loss:sum": loss}, logprobs)
        getattr(self, call.kind)(call)
        return CallResult(number, {"updates:max": float(self.updates)} if call.kind == "optimize" else {})

    def optimize(self, call: Call) -> None:
        self.value += call.adam.learning_rate * self.gradient
        self.gradient, self.updates, self.calls = 0.0, self.updates + 1, call.number + 1
        self.store()

    def save(self, call: Call) -> None:
        self._write(call, {"state.json": {"updates": self.updates, "value": self.value}})

    def save_adapter(self, call: Call) -> None:
        self._write(call, {"adapter_config.json": {"value": self.value}, "adapter_model.safetensors": {}})

    def load(self, call: Call) -> None:
        found = json.loads(Path(call.directory, "state.json").read_text())
        self.value, self.gradient = found["value"], 0.0
        self.updates, self.calls = found["updates"] if call.moments else 0, call.number + 1
        self.store()

    def _write(self, call: Call, files: dict[str, Any]) -> None:
        directory = Path(call.directory)
        directory.mkdir(exist_ok=True)
        for name, content in files.items():
            (directory / name).write_text(json.dumps(content))


class FakeDriver(FakeTuner):
    """Answers a real TuningClient for driven jobs as well."""

    def __init__(self, adapters: dict[str, AdapterInfo], check_alive: Callable[[], None]) -> None:
        super().__init__(adapters, check_alive)
        self.jobs: dict[str, DrivenJob] = {}
        self.opened: list[DrivenStart] = []
        self.computed: list[tuple[str, int]] = []
        """All calls that were computed: job and number."""
        self.hold = asyncio.Event()
        """Cleared: no call is computed."""
        self.hold.set()
        self.refused_call: Callable[[Call], str] = lambda call: ""
        """The reason for which a call is refused; empty if it is not."""
        self.dies_at = -1
        """The call that ends the engine."""

    def send(self, message: Any) -> None:
        match message:
            case StartDriven(number, order):
                self._open(number, order)
            case RunCall(number, job, call):
                self.jobs[job].last = max(self.jobs[job].last, call)
                self.jobs[job].more.set()
                self.client.take(JobChanged(number))
            case ChangeJob(number, job, action) if job in self.jobs:
                self.client.take(JobChanged(number))
                self._close(job, action)
            case _:
                super().send(message)

    def _open(self, number: int, order: DrivenStart) -> None:
        self.opened.append(order)
        if self.refuse:
            self.client.take(JobRefused(number, self.refuse))
            return
        job = self.jobs[order.id] = DrivenJob(order)
        while call_path(job.directory, job.last + 1).exists() or job.last + 1 < job.calls:
            job.last += 1
        modules = ("q", "k") * order.attention + ("up", "down") * order.mlp
        info = DrivenInfo(
            id=order.id, calls=job.calls, updates=job.updates, rank=order.rank, alpha=order.alpha or 0.0,
            modules=modules, micro_batch=200,
        )  # fmt: skip
        self.client.take(DrivenStarted(number, info))
        self._tasks[order.id] = self._later(self._work(job))

    def _close(self, name: str, action: str) -> None:
        self._tasks.pop(name).cancel()
        job = self.jobs.pop(name)
        if action == "cancel":
            (job.directory / STATE).unlink()
            for folder in (CALLS, RESULTS):
                shutil.rmtree(job.directory / folder, ignore_errors=True)
        outcome: Any = "cancelled" if action == "cancel" else "left"
        self.client.take(DrivenProgress([JobEnded(name, outcome)]))

    async def _work(self, job: DrivenJob) -> None:
        known = job.order.known
        for number in range(known, job.calls):
            self._report(job, number)
        while True:
            while job.next > job.last:
                job.more.clear()
                await job.more.wait()
            await self.hold.wait()
            number = job.next
            if number == self.dies_at:
                self.kill("the engine ended by signal 11 (SIGSEGV)")
                return
            call, _ = read_call(job.directory, number, LIMITS)
            job.next += 1
            if reason := self.refused_call(call):
                self.client.take(DrivenProgress([CallFailed(job.order.id, number, reason)]))
                continue
            write_result(job.directory, job.compute(number))
            self.computed.append((job.order.id, number))
            if number >= known:
                self._report(job, number)
            await asyncio.sleep(0)

    def _report(self, job: DrivenJob, number: int) -> None:
        self.client.take(DrivenProgress([CallDone(job.order.id, number, 0.01)]))
