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
from typing import Any

import torch

from holdfast.lm.models.halves import AdapterLayout
from holdfast.lm.models.peft_files import CONFIG_FILE, AdapterWeights, LoraPair, write_peft
from holdfast.training.call_files import JobFiles
from holdfast.training.calls import CallSteps
from holdfast.training.done import CallReport, Done, Host, JobFailure, StepReport
from holdfast.training.jobs import JobSteps, TrainingJob
from holdfast.training.state import CallCounts, State, StateFiles, StepRows, clear_mirror, new_ledger, newest

log = logging.getLogger("holdfast.engine")

CHECKPOINTS = "checkpoints"

DISK_SECONDS = 60.0
"""Seconds since the last write to the disk after which a state is written there, even if writing takes long."""
DISK_SHARE = 0.05
"""Every step is written to the disk if writing takes less than this share of a step."""

STORED = ("params", "means", "variances")
"""Names of the vectors in a stored state. After a copy, host and device are equal until the next update."""

Steps = JobSteps | CallSteps
Report = StepReport | CallReport | JobFailure
Vectors = Mapping[str, Sequence[torch.Tensor]]
"""Vectors on the device, by name and layer. Vectors in STORED are copied."""


@dataclass(eq=False)
class _Copying:
    """The copy of a state to the host, which runs during the slices of the next step."""

    room: dict[str, torch.Tensor]
    layers: int = 0
    """Number of layers that have been copied."""


@dataclass(eq=False)
class _Given:
    """Work of a thread that writes for a job."""

    stored: StoredJob
    future: Future[None]


@dataclass(eq=False)
class _Result(_Given):
    """A result that waits for no state."""

    step: int
    """The number of its step."""


@dataclass(eq=False)
class _Write(_Given):
    """A state that the writer stores, or will store."""

    host: dict[str, torch.Tensor]
    done: list[Done[Any]]
    step: int
    durable: bool
    stays: bool
    """Whether it must be written, even if a newer state follows."""


@dataclass(eq=False)
class StoredJob:
    """A job's data on the host, and its progress on disk. Only the storage changes it."""

    directory: Path
    steps: Steps
    layout: AdapterLayout
    host: dict[str, torch.Tensor]
    """The vectors of STORED on the host, each of all layers (`AdapterLayout.split`)."""
    spare: dict[str, torch.Tensor]
    """Memory for newer vectors while the writer reads `host`."""
    ledger: StepRows | CallCounts
    """The ledger of the stored state. Only the writer changes it once the job runs."""
    step: int
    """The number of the current step."""
    host_step: int
    """The step that follows the vectors on the host."""
    files: JobFiles
    """The files that come and go with the job's steps."""
    reported: int = 0
    """The number of the step that is reported next."""
    reports: dict[int, StepReport | CallReport | None] = field(default_factory=dict)
    """Reports that wait for those of earlier steps, by step; None for a step that is not reported."""
    changed_step: int = -1
    """The step that follows the last one that changed the vectors. It is `step` for a job over files."""
    done: list[Done[Any]] = field(default_factory=list)
    """Steps that changed the vectors and were not passed to the writer yet."""
    copying: _Copying | None = None
    """The copy of the newest of these steps; None if none is running."""
    unstored: list[Done[Any]] = field(default_factory=list)
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

    def __post_init__(self) -> None:
        self.changed_step = self.reported = self.step

    @property
    def job(self) -> TrainingJob:
        return self.steps.job

    def newest_checkpoint(self) -> str:
        """The directory of the newest adapter; empty if no epoch has ended."""
        done = range(self.ledger.step, 0, -1)
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
        self._reports: deque[Report] = deque()
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="holdfast-tuning")
        self._results = ThreadPoolExecutor(1, thread_name_prefix="holdfast-results")
        """Writes results that wait for no state."""
        self._lock = threading.RLock()
        """Guards `_writes`, and the act of storing."""
        self._reporting = threading.Lock()
        """Guards the reports that wait for earlier ones: two threads write."""
        self._writes: list[_Write] = []
        """The writes that are not done: at most one runs, and the others wait in order."""
        self._given: list[_Result] = []
        """The results that are not written, and that wait for no state."""
        self._copies = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]

    # Jobs

    def read(self, job: TrainingJob, directory: Path, layout: AdapterLayout) -> State:
        """The newest state of a job in its directory and the mirror, or the state of a new job.

        Frees the host memory of jobs that are gone.
        """
        found = state_of(job, directory, layout, self._mirror)
        if self._mirror is not None:
            clear_mirror(self._mirror)
        return found

    def open(self, directory: Path, steps: Steps, layout: AdapterLayout, state: State, files: JobFiles) -> StoredJob:
        """Take a job with the state that `read` has found."""
        with self._pinning:
            host, spare = (
                {name: pinned(vector, self._device) for name, vector in zip(STORED, vectors, strict=True)}
                for vectors in (state.vectors, [torch.empty_like(vector) for vector in state.vectors])
            )
        opened = StoredJob(directory, steps, layout, host, spare, state.ledger, state.step, state.step, files)
        if state.step and steps.checkpoint_after(state.step - 1) and not _has_checkpoint(opened, state.step):
            # The engine was killed before this file was complete.
            self._write_checkpoint(opened, opened.host["params"], state.step)
        return opened

    def settled(self, stored: StoredJob) -> bool:
        """Whether everything due for a job is stored, so that `close` and `discard` need not wait."""
        with self._lock:
            works: list[_Given] = [*self._writes, *self._given]
            return not any(each.stored is stored and not each.future.done() for each in works)

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
        stored.files.remove()
        self._clear_mirror(stored)

    @property
    def has_reports(self) -> bool:
        """Whether `reports` would return any."""
        return bool(self._reports)

    def reports(self) -> list[Report]:
        """The steps that have been stored since the last call, in order."""
        found = []
        while self._reports:
            found.append(self._reports.popleft())
        return found

    def wait(self, stored: StoredJob | None = None) -> None:
        """Wait until the writer has nothing to do for a job; None: for any job."""
        with self._lock:
            given = [each for each in self._given if stored is None or each.stored is stored]
            writes = [write for write in self._writes if stored is None or write.stored is stored]
            works: list[_Given] = [*given, *writes]
            for each in works:
                each.future.result()
            self._given = [each for each in self._given if each not in given]
            self._writes = [write for write in self._writes if write not in writes]

    def shut_down(self) -> None:
        """End the writer. All jobs must be closed."""
        self._writer.shutdown()
        self._results.shutdown()

    # Steps. `vectors` are those at the end of the last step. They are None if the device has none, or newer ones.

    def keeps_up(self, stored: StoredJob, *, changes: bool) -> bool:
        """Whether the next step may begin, which `changes` the vectors or does not.

        False while the last step's adapter, or what a call saves, waits for memory to be written from.
        """
        if stored.steps.final and (not stored.done or not stored.steps.checkpoint_after(stored.step - 1)):
            return True
        if stored.copying is not None or not changes:
            return True
        with self._lock:
            return self._room(stored) is not None

    def end_step(self, stored: StoredJob, done: Done[Any], *, changes: bool) -> None:
        """Count the current step. If it `changes` the vectors, `copy` or `store` stores it.

        If it does not, or if its file gives it again, its result is written at once. `done` is on the host once the
        device is done.
        """
        now = time.monotonic()
        stored.step += 1
        if changes:
            stored.done.append(done)
            stored.changed_step = stored.step
            stored.step_seconds, stored.step_at = now - stored.step_at, now
        if done.replays or not changes:
            self._give_soon(stored, done)

    def pass_over(self, stored: StoredJob, done: Done[Any]) -> None:
        """Count a step that has nothing to compute. The vectors of the last step must be on the host."""
        with self._lock:
            stored.step += 1
            self._submit(stored, [done], stored.changed_step, durable=False, stays=True, write=self._store_call)

    def copy(self, stored: StoredJob, vectors: Vectors | None, share: float) -> None:
        """Copy this share of the last step's vectors to the host. Once all are copied, pass the step to the writer.

        One large copy would delay the tokens of simultaneous steps, which take the same way to the host. If the writer
        is slow and there is no memory, the step is stored with a later one.
        """
        with self._lock:
            if vectors is None or stored.host_step == stored.changed_step:
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
                stored.copying, stored.host_step = None, stored.changed_step
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
            if vectors is not None and stored.host_step != stored.changed_step:
                stored.to_disk = True
                self.flush(stored, vectors)
            elif stored.host_step == stored.changed_step and (stored.done or stored.disk_step != stored.changed_step):
                stored.to_disk = True
                self._write_soon(stored)

    def flush(self, stored: StoredJob, vectors: Vectors | None) -> None:
        """Copy the rest of the last step to the host, and have it stored."""
        with self._lock:
            if vectors is not None and stored.host_step != stored.changed_step:
                if stored.copying is None and self._room(stored) is None:
                    self.wait(stored)
                self.copy(stored, vectors, 1.0)

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
        return write.stays or write.future.running() or write.stored.steps.checkpoint_after(write.step - 1)

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
        self._submit(stored, done, stored.changed_step, durable=durable, stays=False, write=self._store_state)

    def _submit(
        self,
        stored: StoredJob,
        done: list[Done[Any]],
        step: int,
        *,
        durable: bool,
        stays: bool,
        write: Callable[[StoredJob, Host, list[Done[Any]], int, bool], None],
    ) -> None:
        """Give the writer steps to store, with the vectors on the host, which follow `step` steps."""
        self._writes = [each for each in self._writes if not each.future.done()]
        host, copied = stored.host, stored.copied

        def run() -> None:
            if copied is not None:
                copied.synchronize()
            write(stored, host, done, step, durable)

        future = self._writer.submit(self._try, stored, run)
        self._writes.append(_Write(stored, future, host, done, step, durable, stays))
        future.add_done_callback(lambda _: self._wake())

    def _give_soon(self, stored: StoredJob, done: Done[Any]) -> None:
        """Have a result written that waits for no state."""
        computed: torch.cuda.Event | None = None
        if self._device.type == "cuda":
            computed = torch.cuda.Event()  # type: ignore[no-untyped-call]
            computed.record()

        def run() -> None:
            if computed is not None:
                computed.synchronize()
            done.write()
            self._report(stored, done.step, done.report(None))

        with self._lock:
            self._given = [each for each in self._given if not each.future.done()]
            future = self._results.submit(self._try, stored, run)
            self._given.append(_Result(stored, future, done.step))
        future.add_done_callback(lambda _: self._wake())

    def _try(self, stored: StoredJob, write: Callable[[], None]) -> None:
        """Let a thread write. If it cannot, the job has failed, and nothing more of it is written."""
        if stored.failed:
            return
        try:
            write()
        except (OSError, ArithmeticError) as error:
            stored.failed = True
            self._reports.append(JobFailure(stored.job.id, str(error)))

    def _store_call(self, stored: StoredJob, host: Host, done: list[Done[Any]], step: int, durable: bool) -> None:
        """Write what a call makes of the vectors on the host, and report it. Runs in the writer's thread."""
        for each in done:
            each.store(host)
            each.write()
            self._report(stored, each.step, each.report(None))

    def _store_state(self, stored: StoredJob, host: Host, done: list[Done[Any]], step: int, durable: bool) -> None:
        """Store a state, then report its steps. Runs in the writer's thread."""
        for given in [*self._given]:  # A step that a state holds is not computed again, so its result is there before.
            if given.stored is stored and given.step < step:
                given.future.result()
        if stored.failed:
            return
        stored.unstored += done
        ledger = stored.ledger
        for each in stored.unstored:
            ledger = each.then(ledger)
        if not bool(torch.isfinite(host["params"]).all()):
            reason = "made parameters that are not finite: lower the learning rate"
            stored.unstored[-1].refuse(reason)
            raise ArithmeticError(f"step {step - 1} {reason}")
        for each in done:
            if not each.replays:
                each.write()
        state = State(ledger, *(host[name] for name in STORED))
        assert state.step == step
        if not self._write_files(stored, state, durable):
            return  # these steps are reported with a later state
        stored.ledger, ended, stored.unstored = ledger, stored.unstored, []
        checkpoint = None
        if ended and stored.steps.checkpoint_after(step - 1):
            checkpoint = self._write_checkpoint(stored, host["params"], step)
        for each in ended:
            if not each.replays:
                self._report(stored, each.step, each.report(checkpoint if each.step == step - 1 else None))

    def _report(self, stored: StoredJob, step: int, report: StepReport | CallReport | None) -> None:
        """Add a report, after those of all earlier steps."""
        with self._reporting:
            stored.reports[step] = report
            while stored.reported in stored.reports:
                known = stored.reports.pop(stored.reported)
                stored.reported += 1
                if known is not None:
                    self._reports.append(known)

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
        alone = not (written or stored.steps.final)  # no other step of a driven job may ever come
        late = now - stored.disk_at >= DISK_SECONDS
        if durable or quick or alone or late or stored.steps.checkpoint_after(state.step - 1):
            stored.files.sync(state.step)
            files["disk"].write(state)
            stored.files.forget(state.step)
            stored.disk_seconds, stored.disk_at, stored.disk_step = time.monotonic() - now, now, state.step
            written = True
        return written

    def _write_checkpoint(self, stored: StoredJob, params: torch.Tensor, step: int) -> Path:
        """Write the adapter from parameters on the host. `step` is the number of steps that led to it."""
        path = stored.checkpoint_path(step)
        write_adapter(path, stored.job, stored.layout, params)
        return path


def write_adapter(directory: Path, job: TrainingJob, layout: AdapterLayout, params: torch.Tensor) -> None:
    """Write a job's adapter in PEFT's format, from parameters on the host."""
    chosen, base = job.hyperparameters, layout.base
    pairs = {}
    for layer, piece in enumerate(layout.split(params)):
        for group in layout.views(layer, piece).values():
            magnitudes = group.magnitudes or (None,) * len(group.b)
            for (module, b), a, norms in zip(group.b, torch.split(group.a, chosen.rank), magnitudes, strict=True):
                own = base.modules[module].own
                pairs[layer, module] = LoraPair(a, own(b), chosen.scale, None if norms is None else own(norms))
    write_peft(directory, AdapterWeights(pairs, base.names), base_model=job.base_model)


def files_of(job: TrainingJob, directory: Path, mirror: Path | None) -> dict[str, StateFiles]:
    """The files of a job's states, by kind."""
    kind = type(new_ledger(job))
    found = {"disk": StateFiles(directory, job.digest(), durable=True, ledger=kind)}
    if mirror is not None:
        found["mirror"] = StateFiles(mirror / job.id, job.digest(), durable=False, ledger=kind, home=directory)
    return found


def state_of(job: TrainingJob, directory: Path, layout: AdapterLayout, mirror: Path | None) -> State:
    """The newest state of a job in its directory and the mirror, or the state of a new job."""
    return newest(files_of(job, directory, mirror).values()) or _begin(job, layout)


def pinned(vector: torch.Tensor, device: torch.device) -> torch.Tensor:
    """The vector in pinned memory, which a GPU can copy by itself."""
    return vector.pin_memory() if device.type == "cuda" else vector


def copy_all(source: Sequence[torch.Tensor], target: Sequence[torch.Tensor]) -> None:
    """Copy tensors to others of the same sizes, between host and device without waiting."""
    for read, written in zip(source, target, strict=True):
        written.copy_(read, non_blocking=True)


def _has_checkpoint(stored: StoredJob, step: int) -> bool:
    return (stored.checkpoint_path(step) / CONFIG_FILE).exists()


def _begin(job: TrainingJob, layout: AdapterLayout) -> State:
    """A new job's state: A uniform within 1 / √inputs, B zero (as in PEFT), so the adapter changes nothing at first."""
    params = torch.zeros(sum(layout.sizes))
    generator = torch.Generator().manual_seed(job.hyperparameters.seed)
    for layer, piece in enumerate(layout.split(params)):
        for group in layout.views(layer, piece).values():
            bound = 1.0 / math.sqrt(group.a.shape[1])
            group.a.uniform_(-bound, bound, generator=generator)
    return State(new_ledger(job), params, torch.zeros_like(params), torch.zeros_like(params))
