"""Storage of jobs: copies each step's vectors to the host, and stores them in a thread of its own beside later steps.

A step's vectors are copied piece by piece to the host, which has two rooms for them, so that the writer may read one. A
writer that is behind holds up no step, unless an adapter is to be written: a state that waits gives way to a newer one,
and its step is reported with that.
"""

from __future__ import annotations

import logging
import math
import shutil
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from holdfast.lm.models.halves import AdapterLayout
from holdfast.lm.models.peft_files import CONFIG_FILE, AdapterWeights, LoraPair, write_peft
from holdfast.training.jobs import JobSteps, TrainingJob
from holdfast.training.state import State, StateFiles, StepRecord, newest, rows_of

log = logging.getLogger("holdfast.engine")

CHECKPOINTS = "checkpoints"

DISK_SECONDS = 60.0
"""A state is on the disk at most so long after it was computed, if writing one takes long."""
DISK_SHARE = 0.05
"""If writing a state to the disk takes less than this share of a step, every step is written there."""

STORED = ("params", "means", "variances")
"""The vectors of a stored state. Without an update between, they are the same on host and device."""

Vectors = Mapping[str, Sequence[torch.Tensor]]
"""On the device, by name and layer. Those of STORED are copied."""


@dataclass(frozen=True)
class StepReport:
    """An optimizer step whose result is stored: a killed engine does not compute it again."""

    job: str
    step: int
    """From 0."""
    steps: int
    """Of the whole job."""
    record: StepRecord
    checkpoint: Path | None
    """The directory of the adapter after this step, in PEFT's format, if it was written."""


@dataclass(frozen=True)
class JobFailure:
    """A job that cannot go on. Its last stored step stays."""

    job: str
    reason: str


@dataclass(eq=False)
class _Done:
    """A step that is computed, or about to be on the device, and that no state holds yet."""

    step: int
    tokens: int
    loss: torch.Tensor
    """On the host once the device is done."""
    validation: torch.Tensor | None


@dataclass(eq=False)
class _Copying:
    """The copy of a state to the host, which goes on beside the slices of the next step."""

    room: dict[str, torch.Tensor]
    layers: int = 0
    """How many have been copied."""


@dataclass(eq=False)
class _Write:
    """A state that the writer stores, or will."""

    stored: StoredJob
    host: dict[str, torch.Tensor]
    done: list[_Done]
    step: int
    durable: bool
    future: Future[None]


@dataclass(eq=False)
class StoredJob:
    """What the host has of a job, and how much of that is stored. Only the storage changes it."""

    directory: Path
    steps: JobSteps
    layout: AdapterLayout
    host: dict[str, torch.Tensor]
    """The vectors of STORED [layers * elements] on the host."""
    spare: dict[str, torch.Tensor]
    """Room for newer ones while the writer reads `host`."""
    rows: npt.NDArray[np.void]
    """`State.rows` of the stored steps. Only the writer adds to it once the job runs."""
    step: int
    """The step under way."""
    host_step: int
    """The step before which the vectors on the host are."""
    done: list[_Done] = field(default_factory=list)
    """Steps that the writer has not been told of."""
    copying: _Copying | None = None
    """Of the last of these."""
    unstored: list[_Done] = field(default_factory=list)
    """Steps that no file took so far. Only the writer changes it."""
    copied: torch.cuda.Event | None = None
    """When the copies to the host that have begun have ended; the next update waits for it."""
    failed: bool = False
    to_disk: bool = False
    """The next state is to be written to the disk."""
    disk_seconds: float = 0.0
    """How long the last write to the disk took."""
    disk_at: float = -math.inf
    """When the last one began."""
    disk_step: int = -1
    """The step before which the vectors on the disk are; -1: not known."""
    step_seconds: float = math.inf
    """How long the last step took, from one's end to the next one's."""
    step_at: float = math.nan

    @property
    def job(self) -> TrainingJob:
        return self.steps.job

    def newest_checkpoint(self) -> str:
        """The directory of the newest adapter; empty if no epoch has ended."""
        done = range(len(self.rows), 0, -1)
        last = next((step for step in done if self.steps.checkpoint_after(step - 1)), None)
        return "" if last is None else str(self.checkpoint_path(last))

    def checkpoint_path(self, step: int) -> Path:
        """Where the adapter after so many steps is."""
        return self.directory / CHECKPOINTS / str(step)


class Storage:
    """Stores jobs. `open` may run in any thread; what has to do with slices and the rest may each have one."""

    def __init__(
        self,
        device: torch.device,
        *,
        mirror: Path | None,
        pinning: AbstractContextManager[object],
        wake: Callable[[], None],
    ) -> None:
        """`wake` is called when the writer is done with a state, mostly in its thread. The others: see `Trainer`."""
        self._device, self._mirror, self._pinning, self._wake = device, mirror, pinning, wake
        self._reports: deque[StepReport | JobFailure] = deque()
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="holdfast-tuning")
        self._lock = threading.RLock()
        """Of `_writes`, and of storing."""
        self._writes: list[_Write] = []
        """At most one that runs, and behind it those that wait."""
        self._copies = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]

    # Jobs

    def open(self, directory: Path, steps: JobSteps, layout: AdapterLayout) -> StoredJob:
        """Read the newest state of a job from its directory and the mirror, or begin it."""
        state = newest(self._files(steps.job, directory).values())
        state = state or _begin(layout, steps.num_layers, steps.job.hyperparameters.seed)
        with self._pinning:
            host, spare = (
                {name: pinned(vector, self._device) for name, vector in zip(STORED, vectors, strict=True)}
                for vectors in (state.vectors, [torch.empty_like(vector) for vector in state.vectors])
            )
        opened = StoredJob(directory, steps, layout, host, spare, state.rows, state.step, state.step)
        if state.step and steps.checkpoint_after(state.step - 1) and not _has_checkpoint(opened, state.step):
            # The engine was killed before it was complete.
            self._write_checkpoint(opened, opened.host["params"], state.step)
        return opened

    def settled(self, stored: StoredJob) -> bool:
        """Whether all that was to be stored of a job is, so that `close` and `discard` need not wait."""
        with self._lock:
            return not any(write.stored is stored and not write.future.done() for write in self._writes)

    def close(self, stored: StoredJob, vectors: Vectors | None) -> None:
        """`store`, and wait until it is on the disk."""
        self.store(stored, vectors)
        self.wait(stored)
        if not stored.failed:
            self._clear_mirror(stored)

    def discard(self, stored: StoredJob) -> None:
        """Delete a job's states. Its checkpoints stay."""
        self.wait(stored)
        self._files(stored.job, stored.directory)["disk"].remove()
        self._clear_mirror(stored)

    @property
    def has_reports(self) -> bool:
        """Whether `reports` would give any."""
        return bool(self._reports)

    def reports(self) -> list[StepReport | JobFailure]:
        """The steps that have been stored since the last call, in order."""
        found = []
        while self._reports:
            found.append(self._reports.popleft())
        return found

    def wait(self, stored: StoredJob | None = None) -> None:
        """Wait until the writer has nothing to do for a job; None: for any."""
        with self._lock:
            writes = [write for write in self._writes if stored is None or write.stored is stored]
            for write in writes:
                write.future.result()
            self._writes = [write for write in self._writes if write not in writes]

    def shut_down(self) -> None:
        """End the writer. All jobs are closed."""
        self._writer.shutdown()

    # Steps. `vectors` are those at the last step's end; None where there are none, or newer ones, on the device.

    def keeps_up(self, stored: StoredJob) -> bool:
        """Whether the next step may begin. False while the last one's adapter is to be written, and has no room."""
        if not stored.done or stored.copying is not None or not stored.steps.checkpoint_after(stored.step - 1):
            return True
        with self._lock:
            return self._room(stored) is not None

    def end_step(self, stored: StoredJob, tokens: int, loss: torch.Tensor, validation: torch.Tensor | None) -> None:
        """Count the step under way, for `copy` or `store`. Its losses are on the host once the device is done."""
        stored.done.append(_Done(stored.step, tokens, loss, validation))
        stored.step += 1
        now = time.monotonic()
        stored.step_seconds, stored.step_at = now - stored.step_at, now

    def copy(self, stored: StoredJob, vectors: Vectors | None, share: float) -> None:
        """Copy this share of the last step's vectors to the host, and tell the writer once all are there.

        One large copy would hold up the tokens of the steps beside it, which take the same way to the host. Where
        there is no room because the writer is behind, the step is stored with a later one.
        """
        with self._lock:
            if vectors is None or stored.host_step == stored.step:
                return
            if stored.copying is None:
                self._take_back(stored)
                room = self._room(stored)
                if room is None:
                    return
                stored.copying = _Copying(room)
            copying, layers = stored.copying, stored.steps.num_layers
            first = copying.layers
            copying.layers = last = min(layers, first + math.ceil(share * layers))
            if self._copies is not None:
                self._copies.wait_stream(torch.cuda.current_stream(self._device))
            with torch.no_grad(), torch.cuda.stream(self._copies):
                for name in STORED:
                    copy_all(vectors[name][first:last], copying.room[name].chunk(layers)[first:last])
                if self._copies is not None:
                    stored.copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
                    stored.copied.record(self._copies)
            if last == layers:
                if copying.room is stored.spare:
                    stored.host, stored.spare = stored.spare, stored.host
                stored.copying, stored.host_step = None, stored.step
                self._write_soon(stored)

    def before_update(self, stored: StoredJob, vectors: Vectors) -> None:
        """Copy what is left of the last step before its vectors change. An adapter to be written waits for room."""
        if stored.done and stored.copying is None and stored.steps.checkpoint_after(stored.step - 1):
            self.wait(stored)
        self.copy(stored, vectors, 1.0)
        self.after_copies(stored)

    def after_copies(self, stored: StoredJob) -> None:
        """Have the device begin what is launched from now on after the copies. Does not wait."""
        if stored.copied is not None:
            torch.cuda.current_stream(self._device).wait_event(stored.copied)

    def store(self, stored: StoredJob, vectors: Vectors | None) -> None:
        """Copy what is left of the last step to the host, and have it written to the disk, if that was not done yet."""
        with self._lock:
            if vectors is not None and stored.host_step != stored.step:
                if stored.copying is None and self._room(stored) is None:
                    self.wait(stored)
                stored.to_disk = True
                self.copy(stored, vectors, 1.0)
            elif stored.host_step == stored.step and (stored.done or stored.disk_step != stored.step):
                stored.to_disk = True
                self._write_soon(stored)

    # Rooms on the host, and the writer

    def _files(self, job: TrainingJob, directory: Path) -> dict[str, StateFiles]:
        """Where a job's states are, by kind."""
        found = {"disk": StateFiles(directory, job.digest(), durable=True)}
        if self._mirror is not None:
            found["mirror"] = StateFiles(self._mirror / job.id, job.digest(), durable=False)
        return found

    def _clear_mirror(self, stored: StoredJob) -> None:
        """Give the host's memory back that the mirror of a job takes."""
        if self._mirror is not None:
            shutil.rmtree(self._mirror / stored.job.id, ignore_errors=True)

    def _take_back(self, stored: StoredJob) -> None:
        """A state that waits for the writer gives way to a newer one, unless its adapter is to be written."""
        for write in [*self._writes]:
            if write.stored is stored and not self._must_stay(write) and write.future.cancel():
                stored.done = [*write.done, *stored.done]
                stored.to_disk |= write.durable
                self._writes.remove(write)

    def _must_stay(self, write: _Write) -> bool:
        return write.future.running() or write.stored.steps.checkpoint_after(write.step - 1)

    def _room(self, stored: StoredJob) -> dict[str, torch.Tensor] | None:
        """Vectors on the host that no write needs, or only one that can be taken back."""
        used = [write.host for write in self._writes if not write.future.done() and self._must_stay(write)]
        return next((room for room in (stored.spare, stored.host) if not any(room is each for each in used)), None)

    def _write_soon(self, stored: StoredJob) -> None:
        """Let the writer store the vectors on the host, with the steps that it has not been told of."""
        done, stored.done = stored.done, []
        durable, stored.to_disk = stored.to_disk, False
        self._writes = [write for write in self._writes if not write.future.done()]
        future = self._writer.submit(self._write, stored, stored.host, done, stored.copied, stored.step, durable)
        self._writes.append(_Write(stored, stored.host, done, stored.step, durable, future))
        future.add_done_callback(lambda _: self._wake())

    def _write(
        self,
        stored: StoredJob,
        host: dict[str, torch.Tensor],
        done: list[_Done],
        copied: torch.cuda.Event | None,
        step: int,
        durable: bool,
    ) -> None:
        """In the writer's thread: store a state, then report its steps."""
        if stored.failed:
            return
        try:
            if copied is not None:
                copied.synchronize()
            stored.unstored += done
            fresh = [
                StepRecord(float(each.loss), None if each.validation is None else float(each.validation), each.tokens)
                for each in stored.unstored
            ]
            for each, record in zip(stored.unstored, fresh, strict=True):
                if not math.isfinite(record.loss):
                    raise ArithmeticError(f"the loss of step {each.step} is {record.loss}: lower the learning rate")
            if not bool(torch.isfinite(host["params"]).all()):
                raise ArithmeticError(f"step {step - 1} made parameters that are not finite: lower the learning rate")
            state = State(np.concatenate((stored.rows, rows_of(fresh))), *(host[name] for name in STORED))
            assert state.step == step
            if not self._write_files(stored, state, durable):
                return  # these steps are reported with a later one
            stored.rows, ended, stored.unstored = state.rows, stored.unstored, []
            checkpoint = None
            if ended and stored.steps.checkpoint_after(step - 1):
                checkpoint = self._write_checkpoint(stored, host["params"], step)
            for each, record in zip(ended, fresh, strict=True):
                at = checkpoint if each.step == step - 1 else None
                self._reports.append(StepReport(stored.job.id, each.step, stored.steps.count, record, at))
        except (OSError, ArithmeticError) as error:
            stored.failed = True
            self._reports.append(JobFailure(stored.job.id, str(error)))

    def _write_files(self, stored: StoredJob, state: State, durable: bool) -> bool:
        """Write a state where it is due. Returns whether any file has it."""
        files, written = self._files(stored.job, stored.directory), False
        if "mirror" in files:
            try:
                files["mirror"].write(state)
                written = True
            except OSError as error:
                log.warning("states of job %s go to the disk only: %s", stored.job.id, error)
                shutil.rmtree(files["mirror"].directory, ignore_errors=True)
                self._mirror = None
        now = time.monotonic()
        quick = stored.disk_seconds < DISK_SHARE * stored.step_seconds
        if durable or quick or now - stored.disk_at >= DISK_SECONDS or stored.steps.checkpoint_after(state.step - 1):
            files["disk"].write(state)
            stored.disk_seconds, stored.disk_at, stored.disk_step = time.monotonic() - now, now, state.step
            written = True
        return written

    def _write_checkpoint(self, stored: StoredJob, params: torch.Tensor, step: int) -> Path:
        """Write the adapter of parameters on the host. `step` counts the steps behind it."""
        path, chosen = stored.checkpoint_path(step), stored.job.hyperparameters
        pairs = {}
        for layer, piece in enumerate(params.chunk(stored.steps.num_layers)):
            for group in stored.layout.views(piece).values():
                matrices = torch.split(group.a, chosen.rank)
                for (module, b), a in zip(group.b, matrices, strict=True):
                    pairs[layer, module] = LoraPair(a, b, chosen.scale)
        write_peft(path, AdapterWeights(pairs), base_model=stored.job.base_model)
        return path


def pinned(vector: torch.Tensor, device: torch.device) -> torch.Tensor:
    """The vector in memory that a GPU copies from and to by itself."""
    return vector.pin_memory() if device.type == "cuda" else vector


def copy_all(source: Sequence[torch.Tensor], target: Sequence[torch.Tensor]) -> None:
    """Copy tensors to others of the same sizes, between host and device without waiting."""
    for read, written in zip(source, target, strict=True):
        written.copy_(read, non_blocking=True)


def _has_checkpoint(stored: StoredJob, step: int) -> bool:
    return (stored.checkpoint_path(step) / CONFIG_FILE).exists()


def _begin(layout: AdapterLayout, num_layers: int, seed: int) -> State:
    """A new job's state: A uniform within 1 / √inputs, B zero (as PEFT draws them), so nothing changes at first."""
    params = torch.zeros(num_layers * layout.elements)
    generator = torch.Generator().manual_seed(seed)
    for piece in params.chunk(num_layers):
        for group in layout.views(piece).values():
            bound = 1.0 / math.sqrt(group.a.shape[1])
            group.a.uniform_(-bound, bound, generator=generator)
    return State(rows_of(()), params, torch.zeros_like(params), torch.zeros_like(params))
