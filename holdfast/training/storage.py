"""Storage of jobs: copies each step's vectors to the host, and stores them in a separate thread during later steps.

A step's vectors are copied piece by piece to the host, which has memory for two copies, so that the writer may read
one. A slow writer delays no step, unless an adapter must be written. A state that waits for the writer is replaced by a
newer one, and its step is reported with the newer state.
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
"""Seconds since the last write to the disk after which a state is written there, even if writing takes long."""
DISK_SHARE = 0.05
"""Every step is written to the disk if writing takes less than this share of a step."""

STORED = ("params", "means", "variances")
"""Names of the vectors in a stored state. After a copy, host and device are equal until the next update."""

Vectors = Mapping[str, Sequence[torch.Tensor]]
"""Vectors on the device, by name and layer. Vectors in STORED are copied."""


@dataclass(frozen=True)
class StepReport:
    """An optimizer step whose result is stored: a killed engine does not compute it again."""

    job: str
    step: int
    """The number of the step, from 0."""
    steps: int
    """Number of steps in the whole job."""
    record: StepRecord
    checkpoint: Path | None
    """The directory of the adapter after this step, in PEFT's format; None if it was not written."""


@dataclass(frozen=True)
class JobFailure:
    """A job that cannot continue. Its last stored step stays."""

    job: str
    reason: str


@dataclass(eq=False)
class _Done:
    """A step that is computed, or being computed on the device, and that no state holds yet."""

    step: int
    tokens: int
    loss: torch.Tensor
    """The loss. It is on the host once the device is done."""
    validation: torch.Tensor | None


@dataclass(eq=False)
class _Copying:
    """The copy of a state to the host, which runs during the slices of the next step."""

    room: dict[str, torch.Tensor]
    layers: int = 0
    """Number of layers that have been copied."""


@dataclass(eq=False)
class _Write:
    """A state that the writer stores, or will store."""

    stored: StoredJob
    host: dict[str, torch.Tensor]
    done: list[_Done]
    step: int
    durable: bool
    future: Future[None]


@dataclass(eq=False)
class StoredJob:
    """A job's data on the host, and its progress on disk. Only the storage changes it."""

    directory: Path
    steps: JobSteps
    layout: AdapterLayout
    host: dict[str, torch.Tensor]
    """The vectors of STORED on the host, each of all layers (`AdapterLayout.split`)."""
    spare: dict[str, torch.Tensor]
    """Memory for newer vectors while the writer reads `host`."""
    rows: npt.NDArray[np.void]
    """`State.rows` of the stored steps. Only the writer adds to it once the job runs."""
    step: int
    """The number of the current step."""
    host_step: int
    """The step that follows the vectors on the host."""
    done: list[_Done] = field(default_factory=list)
    """Steps that were not passed to the writer yet."""
    copying: _Copying | None = None
    """The copy of the newest of these steps; None if none is running."""
    unstored: list[_Done] = field(default_factory=list)
    """Steps that are in no file yet. Only the writer changes the list."""
    copied: torch.cuda.Event | None = None
    """The event that ends the copies to the host that have begun. The next update waits for it."""
    failed: bool = False
    to_disk: bool = False
    """Whether the next state must be written to the disk."""
    disk_seconds: float = 0.0
    """Seconds that the last write to the disk took."""
    disk_at: float = -math.inf
    """Time at which the last write to the disk began."""
    disk_step: int = -1
    """The step that follows the vectors on the disk; -1 if it is not known."""
    step_seconds: float = math.inf
    """Seconds from the end of the previous step to the end of the last one."""
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
        """The directory of the adapter after `step` steps."""
        return self.directory / CHECKPOINTS / str(step)


class Storage:
    """Stores jobs. `open` may run in any thread.

    One thread makes the calls of slices, and one thread all other calls.
    """

    def __init__(
        self,
        device: torch.device,
        *,
        mirror: Path | None,
        pinning: AbstractContextManager[object],
        wake: Callable[[], None],
    ) -> None:
        """`wake` is called when the writer is done with a state, mostly in its thread.

        For the others, see `Trainer`.
        """
        self._device, self._mirror, self._pinning, self._wake = device, mirror, pinning, wake
        self._reports: deque[StepReport | JobFailure] = deque()
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="holdfast-tuning")
        self._lock = threading.RLock()
        """Guards `_writes`, and the act of storing."""
        self._writes: list[_Write] = []
        """The writes that are not done: at most one runs, and the others wait in order."""
        self._copies = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]

    # Jobs

    def open(self, directory: Path, steps: JobSteps, layout: AdapterLayout) -> StoredJob:
        """Read the newest state of a job from its directory and the mirror, or begin the job."""
        state = state_of(steps, directory, layout, self._mirror)
        with self._pinning:
            host, spare = (
                {name: pinned(vector, self._device) for name, vector in zip(STORED, vectors, strict=True)}
                for vectors in (state.vectors, [torch.empty_like(vector) for vector in state.vectors])
            )
        opened = StoredJob(directory, steps, layout, host, spare, state.rows, state.step, state.step)
        if state.step and steps.checkpoint_after(state.step - 1) and not _has_checkpoint(opened, state.step):
            # The engine was killed before this file was complete.
            self._write_checkpoint(opened, opened.host["params"], state.step)
        return opened

    def settled(self, stored: StoredJob) -> bool:
        """Whether everything due for a job is stored, so that `close` and `discard` need not wait."""
        with self._lock:
            return not any(write.stored is stored and not write.future.done() for write in self._writes)

    def close(self, stored: StoredJob, vectors: Vectors | None) -> None:
        """Call `store`, and wait until the state is on the disk."""
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
        """Whether `reports` would return any."""
        return bool(self._reports)

    def reports(self) -> list[StepReport | JobFailure]:
        """The steps that have been stored since the last call, in order."""
        found = []
        while self._reports:
            found.append(self._reports.popleft())
        return found

    def wait(self, stored: StoredJob | None = None) -> None:
        """Wait until the writer has nothing to do for a job; None: for any job."""
        with self._lock:
            writes = [write for write in self._writes if stored is None or write.stored is stored]
            for write in writes:
                write.future.result()
            self._writes = [write for write in self._writes if write not in writes]

    def shut_down(self) -> None:
        """End the writer. All jobs must be closed."""
        self._writer.shutdown()

    # Steps. `vectors` are those at the end of the last step. They are None if the device has none, or newer ones.

    def keeps_up(self, stored: StoredJob) -> bool:
        """Whether the next step may begin. False while the last step's adapter waits for memory to be written from."""
        if not stored.done or stored.copying is not None or not stored.steps.checkpoint_after(stored.step - 1):
            return True
        with self._lock:
            return self._room(stored) is not None

    def end_step(self, stored: StoredJob, tokens: int, loss: torch.Tensor, validation: torch.Tensor | None) -> None:
        """Count the current step, for `copy` or `store`. Its losses are on the host once the device is done."""
        stored.done.append(_Done(stored.step, tokens, loss, validation))
        stored.step += 1
        now = time.monotonic()
        stored.step_seconds, stored.step_at = now - stored.step_at, now

    def copy(self, stored: StoredJob, vectors: Vectors | None, share: float) -> None:
        """Copy this share of the last step's vectors to the host. Once all are copied, pass the step to the writer.

        One large copy would delay the tokens of simultaneous steps, which take the same way to the host. If the writer
        is slow and there is no memory, the step is stored with a later one.
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
                    copy_all(vectors[name][first:last], stored.layout.split(copying.room[name])[first:last])
                if self._copies is not None:
                    stored.copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
                    stored.copied.record(self._copies)
            if last == layers:
                if copying.room is stored.spare:
                    stored.host, stored.spare = stored.spare, stored.host
                stored.copying, stored.host_step = None, stored.step
                self._write_soon(stored)

    def before_update(self, stored: StoredJob, vectors: Vectors) -> None:
        """Copy the rest of the last step before its vectors change. If its adapter must be written, wait for memory."""
        if stored.done and stored.copying is None and stored.steps.checkpoint_after(stored.step - 1):
            self.wait(stored)
        self.copy(stored, vectors, 1.0)
        self.after_copies(stored)

    def after_copies(self, stored: StoredJob) -> None:
        """Make later launches on the device wait for the copies. Does not wait itself."""
        if stored.copied is not None:
            torch.cuda.current_stream(self._device).wait_event(stored.copied)

    def store(self, stored: StoredJob, vectors: Vectors | None) -> None:
        """Copy the rest of the last step to the host, and have it written to the disk, unless it is there already."""
        with self._lock:
            if vectors is not None and stored.host_step != stored.step:
                if stored.copying is None and self._room(stored) is None:
                    self.wait(stored)
                stored.to_disk = True
                self.copy(stored, vectors, 1.0)
            elif stored.host_step == stored.step and (stored.done or stored.disk_step != stored.step):
                stored.to_disk = True
                self._write_soon(stored)

    # Memory on the host, and the writer

    def _files(self, job: TrainingJob, directory: Path) -> dict[str, StateFiles]:
        """The files of a job's states, by kind."""
        return files_of(job, directory, self._mirror)

    def _clear_mirror(self, stored: StoredJob) -> None:
        """Free the host memory that the mirror of a job takes."""
        if self._mirror is not None:
            shutil.rmtree(self._mirror / stored.job.id, ignore_errors=True)

    def _take_back(self, stored: StoredJob) -> None:
        """Withdraw the job's states that wait for the writer, unless an adapter must be written from them.

        Their steps are stored with a newer state.
        """
        for write in [*self._writes]:
            if write.stored is stored and not self._must_stay(write) and write.future.cancel():
                stored.done = [*write.done, *stored.done]
                stored.to_disk |= write.durable
                self._writes.remove(write)

    def _must_stay(self, write: _Write) -> bool:
        return write.future.running() or write.stored.steps.checkpoint_after(write.step - 1)

    def _room(self, stored: StoredJob) -> dict[str, torch.Tensor] | None:
        """Vectors on the host that no write needs, or only a write that can be withdrawn; None if there are none."""
        used = [write.host for write in self._writes if not write.future.done() and self._must_stay(write)]
        return next((room for room in (stored.spare, stored.host) if not any(room is each for each in used)), None)

    def _write_soon(self, stored: StoredJob) -> None:
        """Ask the writer to store the vectors on the host. Does not wait for it.

        The writer also gets the completed steps that are not part of an earlier write.
        """
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
        """Store a state, then report its steps. Runs in the writer's thread."""
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
                return  # these steps are reported with a later state
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
        """Write a state to each place where it is due. Returns whether any file has it."""
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
        """Write the adapter from parameters on the host. `step` is the number of steps that led to it."""
        path, chosen, base = stored.checkpoint_path(step), stored.job.hyperparameters, stored.layout.base
        pairs = {}
        for layer, piece in enumerate(stored.layout.split(params)):
            for group in stored.layout.views(layer, piece).values():
                magnitudes = group.magnitudes or (None,) * len(group.b)
                for (module, b), a, norms in zip(group.b, torch.split(group.a, chosen.rank), magnitudes, strict=True):
                    own = base.modules[module].own
                    pairs[layer, module] = LoraPair(a, own(b), chosen.scale, None if norms is None else own(norms))
        write_peft(path, AdapterWeights(pairs, base.names), base_model=stored.job.base_model)
        return path


def files_of(job: TrainingJob, directory: Path, mirror: Path | None) -> dict[str, StateFiles]:
    """The files of a job's states, by kind."""
    found = {"disk": StateFiles(directory, job.digest(), durable=True)}
    if mirror is not None:
        found["mirror"] = StateFiles(mirror / job.id, job.digest(), durable=False)
    return found


def state_of(steps: JobSteps, directory: Path, layout: AdapterLayout, mirror: Path | None) -> State:
    """The newest state of a job in its directory and the mirror, or the state of a new job."""
    state = newest(files_of(steps.job, directory, mirror).values())
    return state or _begin(layout, steps.job.hyperparameters.seed)


def pinned(vector: torch.Tensor, device: torch.device) -> torch.Tensor:
    """The vector in pinned memory, which a GPU can copy by itself."""
    return vector.pin_memory() if device.type == "cuda" else vector


def copy_all(source: Sequence[torch.Tensor], target: Sequence[torch.Tensor]) -> None:
    """Copy tensors to others of the same sizes, between host and device without waiting."""
    for read, written in zip(source, target, strict=True):
        written.copy_(read, non_blocking=True)


def _has_checkpoint(stored: StoredJob, step: int) -> bool:
    return (stored.checkpoint_path(step) / CONFIG_FILE).exists()


def _begin(layout: AdapterLayout, seed: int) -> State:
    """A new job's state: A uniform within 1 / √inputs, B zero (as in PEFT), so the adapter changes nothing at first."""
    params = torch.zeros(sum(layout.sizes))
    generator = torch.Generator().manual_seed(seed)
    for layer, piece in enumerate(layout.split(params)):
        for group in layout.views(layer, piece).values():
            bound = 1.0 / math.sqrt(group.a.shape[1])
            group.a.uniform_(-bound, bound, generator=generator)
    return State(rows_of(()), params, torch.zeros_like(params), torch.zeros_like(params))
