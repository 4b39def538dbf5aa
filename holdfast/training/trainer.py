"""The tuner's device side: computes slices of training for several jobs over one base model, and stores every step.

One job is resident at a time: its vectors lie in lent blocks at the end of the cache. The others wait on the host.
Slices are launched in the order of the engine's steps, on the same stream. Each launch returns at once on a GPU.
"""

from __future__ import annotations

import logging
import math
import shutil
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from holdfast.lm.kernels.training.attention import sent
from holdfast.lm.models.decoder import Decoder
from holdfast.lm.models.halves import AdapterLayout, Halves, LayerAdapter
from holdfast.lm.models.peft_files import CONFIG_FILE, AdapterWeights, LoraPair, write_peft
from holdfast.lm.types import TrainingResult, TrainingSlice
from holdfast.training.data import EXAMPLES_FILE, VALIDATION_FILE, Examples, digest_of
from holdfast.training.iteration import Arena, Iteration, Places, kept_places
from holdfast.training.jobs import Hyperparameters, JobSteps, MicroBatch, TrainingJob
from holdfast.training.optimizer import adamw_step
from holdfast.training.schedule import learning_rate
from holdfast.training.state import State, StateFiles, StepRecord, newest, read_job, records_of, rows_of

log = logging.getLogger("holdfast.engine")

CHECKPOINTS = "checkpoints"

DISK_SECONDS = 60.0
"""A state is on the disk at most so long after it was computed, if writing one takes long."""
DISK_SHARE = 0.05
"""If writing a state to the disk takes less than this share of a step, every step is written there."""

COPY_HASTE = 2.0
"""How much of a step's state each slice of the next step copies to the host, over the slice's share of that step."""

STORED = ("params", "means", "variances")
"""The vectors of a stored state. Without an update between, they are the same on host and device."""


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


class LaunchedSlice:
    """A slice that the device computes, or has computed."""

    def __init__(self, slice_: TrainingSlice, tokens: int, loss: torch.Tensor | None, timer: _Timer) -> None:
        self._slice, self._tokens, self._loss, self._timer = slice_, tokens, loss, timer

    def result(self) -> TrainingResult:
        """What it took and gave, once the device is done with it."""
        given = self._slice
        seconds = self._timer.seconds()
        return TrainingResult(
            given.job, given.step, given.micro_batch, given.action, given.first, given.stop, seconds, self._tokens,
            None if self._loss is None else float(self._loss), self._timer.launch_seconds,
        )  # fmt: skip


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

    known: _Job
    host: dict[str, torch.Tensor]
    done: list[_Done]
    step: int
    durable: bool
    future: Future[None]


@dataclass(eq=False)
class _Resident:
    """A job's vectors on the device, by name and layer."""

    places: Places
    vectors: dict[str, list[torch.Tensor]]
    adapters: list[LayerAdapter]
    grads: list[LayerAdapter]
    fresh: list[LayerAdapter]
    """The gradients of one micro-batch that is not a step's first; they are added to `grads` when it is complete."""


@dataclass(eq=False)
class _Job:
    """A job that the trainer knows."""

    job: TrainingJob
    directory: Path
    steps: JobSteps
    halves: Halves
    examples: Examples
    validation: Examples | None
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
    micro_batch: int = 0
    batches: tuple[MicroBatch, ...] = ()
    """Of the step under way."""
    total: float = 0.0
    """Sum of the weights of the step's examples."""
    losses: list[torch.Tensor] = field(default_factory=list)
    """Of the step's micro-batches so far, on the device."""
    iteration: Iteration | None = None
    resident: _Resident | None = None
    host_grads: torch.Tensor | None = None
    """The gradients of the earlier micro-batches of a step that was offloaded."""
    updated: bool = False
    """The step under way has been computed but for its validation, so its vectors are those of the next step."""
    host_updated: dict[str, torch.Tensor] | None = None
    """Such vectors of a job that was offloaded. No state holds them before the step ends."""
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


class Trainer:
    """Computes and stores tuning jobs. All slices come from one thread, and all other calls from one thread."""

    def __init__(
        self,
        model: Decoder,
        arena: Arena,
        *,
        base_digest: str,
        mirror: Path | None,
        pinning: AbstractContextManager[object] | None = None,
    ) -> None:
        """`arena` is the end of the engine's cache (`arena_of`). A job of another `base_digest` is refused.

        `mirror` is a directory in the host's memory, where states survive the engine but not the host; None: there is
        none, and states go to the jobs' own directories. `pinning` is held while another thread locks host memory.
        """
        self._pinning = pinning or nullcontext()
        self._model, self._base_digest, self._mirror = model, base_digest, mirror
        self._arena = arena
        self._device = model.spec.device
        self._jobs: dict[str, _Job] = {}
        self._reports: deque[StepReport | JobFailure] = deque()
        self.wake: Callable[[], None] = lambda: None
        """Called when the writer is done with a state, mostly in its thread."""
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="holdfast-tuning")
        self._lock = threading.RLock()
        """Of `_writes`, and of storing."""
        self._writes: list[_Write] = []
        """At most one that runs, and behind it those that wait."""
        self._copies = torch.cuda.Stream(self._device) if self._device.type == "cuda" else None  # type: ignore[no-untyped-call]

    # Jobs

    @property
    def block_bytes(self) -> int:
        """Bytes of one block of the cache in all layers."""
        return 2 * len(self._arena.planes) * self._arena.block_bytes

    def open(self, directory: Path) -> JobSteps:
        """Take a job of a directory, from its last stored step on; returns its steps. It is not resident yet.

        Raises ValueError if the job is of another base model, if its data have changed, or if it is open.
        """
        return self.add(self.prepare(directory))

    def add(self, prepared: _Job) -> JobSteps:
        """The quick part of `open`, in the thread of all other calls."""
        if prepared.job.id in self._jobs:
            raise ValueError(f"job {prepared.job.id} is open already")
        self._jobs[prepared.job.id] = prepared
        return prepared.steps

    def prepare(self, directory: Path) -> _Job:
        """The slow part of `open`, for `add`: reads files and locks host memory. May run in any thread."""
        job = read_job(directory)
        if job.base_digest != self._base_digest:
            raise ValueError(f"job {job.id} was begun over another base model ({job.base_model}); serve that one")
        validation = directory / VALIDATION_FILE if job.validation_digest else None
        for path, digest in ((directory / EXAMPLES_FILE, job.data_digest), (validation, job.validation_digest)):
            if path is not None and digest_of(path) != digest:
                raise ValueError(f"{path.name} of job {job.id} is not the file that the job was begun with")
        if job.threads and job.threads != torch.get_num_threads() and self._device.type == "cpu":
            log.warning("job %s began on %d threads; the last bits may differ on others", job.id, job.threads)
        examples = Examples(directory / EXAMPLES_FILE)
        held_out = Examples(validation) if validation is not None else None
        spec, chosen = self._model.decoder, job.hyperparameters
        held_out_lengths = held_out.lengths.tolist() if held_out is not None else []
        steps = JobSteps(job, spec.num_layers, examples.lengths.tolist(), held_out_lengths)
        longest = max((*steps.lengths, *steps.validation_lengths))
        if longest > spec.max_positions:
            raise ValueError(f"an example has {longest} tokens; the model was made for {spec.max_positions}")
        layout = AdapterLayout(spec, chosen.modules, chosen.rank)
        state = newest(self._files(job, directory).values()) or _begin(layout, spec.num_layers, chosen.seed)
        with self._pinning:
            host, spare = (
                {name: self._pinned(vector) for name, vector in zip(STORED, vectors, strict=True)}
                for vectors in (state.vectors, [torch.empty_like(vector) for vector in state.vectors])
            )
        opened = _Job(
            job, directory, steps, Halves(self._model, layout, chosen.scale), examples, held_out,
            host, spare,
            state.rows, state.step, state.step,
        )  # fmt: skip
        if state.step and steps.checkpoint_after(state.step - 1) and not _has_checkpoint(opened, state.step):
            # The engine was killed before it was complete.
            self._write_checkpoint(opened, opened.host["params"], state.step)
        return opened

    def records(self, job: str) -> tuple[StepRecord, ...]:
        """The stored steps of an open job."""
        return records_of(self._jobs[job].rows)

    def steps(self, job: str) -> JobSteps:
        """The steps of an open job."""
        return self._jobs[job].steps

    def host_vector(self, job: str, name: str) -> torch.Tensor:
        """One of STORED as the host has it: of an offloaded job, all there is."""
        self._wait()
        return self._jobs[job].host[name]

    def next_slice(self, job: str) -> tuple[int, int, int]:
        """Where an open job stands: step, micro-batch, and the unit that comes next."""
        known = self._jobs[job]
        return known.step, known.micro_batch, known.iteration.at if known.iteration else 0

    def blocks(self, job: str, tokens: int = 0, *, keep: bool = False) -> int:
        """Blocks at the end of the cache that a resident job takes with a micro-batch of so many tokens."""
        known = self._jobs[job]
        inputs, everything = kept_places(known.halves, tokens, self._vector_places(known))
        places = everything if keep else inputs
        return self._arena.blocks(places if tokens else self._vector_places(known))

    def blocks_for(self, chosen: Hyperparameters, tokens: int, *, keep: bool = False) -> int:
        """`blocks` of a job that is not open, with these hyperparameters."""
        layout = AdapterLayout(self._model.decoder, chosen.modules, chosen.rank)
        halves = Halves(self._model, layout, chosen.scale)
        inputs, everything = kept_places(halves, tokens, self._places(layout))
        return self._arena.blocks(everything if keep else inputs)

    def is_resident(self, job: str) -> bool:
        """Whether the vectors of an open job are in lent blocks."""
        return self._jobs[job].resident is not None

    def newest_checkpoint(self, job: str) -> str:
        """The directory of an open job's newest adapter; empty if no epoch has ended."""
        known = self._jobs[job]
        done = range(len(known.rows), 0, -1)
        last = next((step for step in done if known.steps.checkpoint_after(step - 1)), None)
        return "" if last is None else str(_checkpoint_path(known, last))

    def settled(self, job: str) -> bool:
        """Whether all that was to be stored of an open job is, so that `close` and `discard` need not wait."""
        with self._lock:
            return not any(write.known is self._jobs[job] and not write.future.done() for write in self._writes)

    def close(self, job: str) -> None:
        """Store what a job has done, on the disk, and forget the job; its blocks are free then.

        It goes on from its last step when it is opened again.
        """
        known = self._jobs[job]
        self._store(known, durable=True)
        self._wait(known)
        del self._jobs[job]
        if not known.failed:
            self._clear_mirror(known)

    def discard(self, job: str) -> None:
        """Forget a job and delete its states. Its checkpoints stay."""
        known = self._jobs.pop(job)
        self._wait(known)
        self._files(known.job, known.directory)["disk"].remove()
        self._clear_mirror(known)

    def _clear_mirror(self, known: _Job) -> None:
        """Give the host's memory back that the mirror of a job takes."""
        if self._mirror is not None:
            shutil.rmtree(self._mirror / known.job.id, ignore_errors=True)

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

    def shut_down(self) -> None:
        """Store all jobs on the disk and end the writer."""
        for job in [*self._jobs]:
            self.close(job)
        self._writer.shutdown()

    # Slices

    def run(self, slice_: TrainingSlice, lent: int) -> TrainingResult:
        """`launch`, and wait for the result."""
        return self.launch(slice_, lent).result()

    def launch(self, slice_: TrainingSlice, lent: int) -> LaunchedSlice:
        """Compute a slice. The cache's last `lent` blocks are training's until a later slice says less.

        Raises ValueError if the slice does not follow those before it, or if its tensors do not fit those blocks.
        """
        known = self._jobs.get(slice_.job)
        if known is None:
            raise ValueError(f"no open job {slice_.job!r}")
        if (slice_.step, slice_.micro_batch) != (known.step, known.micro_batch):
            raise ValueError(
                f"slice of step {slice_.step}, micro-batch {slice_.micro_batch}; job {slice_.job} is at step "
                f"{known.step}, micro-batch {known.micro_batch}"
            )
        timer = _Timer(self._device)
        tokens, loss = 0, None
        if slice_.action == "restore":
            self._check_room(known, self._vector_places(known), lent)
            self._restore(known)
        elif known.resident is None:
            raise ValueError(f"job {slice_.job} is not resident; it cannot {slice_.action}")
        elif slice_.action == "run":
            tokens, loss = self._run(known, known.resident, slice_, lent)
        elif slice_.action == "release":
            if known.iteration is not None:
                known.iteration.release()
        elif slice_.action == "drop":
            known.iteration = None
        else:
            known.iteration = None
            self._offload(known, known.resident)
        timer.stop()
        return LaunchedSlice(slice_, tokens, loss, timer)

    def _run(
        self, known: _Job, resident: _Resident, slice_: TrainingSlice, lent: int
    ) -> tuple[int, torch.Tensor | None]:
        """Units of a micro-batch. Returns its tokens if they end it, and the step's loss if they end the step."""
        if known.step >= known.steps.count:
            raise ValueError(f"job {slice_.job} is done: it has {known.steps.count} steps")
        if not known.batches:
            known.batches = known.steps.micro_batches(known.step)
            known.total = known.examples.weight(known.steps.order.examples(known.step))
        batch = known.batches[known.micro_batch]
        if slice_.stop > len(batch.units):
            raise ValueError(f"units up to {slice_.stop}; the micro-batch has {len(batch.units)}")
        if known.iteration is None:
            known.iteration = self._begin_micro_batch(known, resident, batch)
        iteration = known.iteration
        units = sum(len(each.units) for each in known.batches)
        self._go_on_copying(known, resident, COPY_HASTE * (slice_.stop - slice_.first) / units)
        _, everything = kept_places(known.halves, batch.tokens, resident.places)
        keeps = slice_.keep and any(
            unit.kind in ("attention", "mlp") for unit in batch.units[slice_.first : slice_.stop]
        )
        self._check_room(known, everything if keeps and not batch.validation else iteration.places, lent)
        iteration.run(slice_.first, min(slice_.stop, len(iteration.units)), keep=slice_.keep)
        if slice_.stop < len(batch.units):
            return 0, None
        known.losses.append(iteration.loss)
        if known.micro_batch and not batch.validation:
            _add(resident.vectors["grads"], resident.vectors["fresh"])
        if batch.units[-1].kind == "optimizer":
            self._update(known, resident)
            known.updated = True
        known.iteration = None
        known.micro_batch += 1
        return batch.tokens, self._end_step(known) if known.micro_batch == len(known.batches) else None

    def _begin_micro_batch(self, known: _Job, resident: _Resident, batch: MicroBatch) -> Iteration:
        source = known.validation if batch.validation else known.examples
        assert source is not None
        total = source.weight(number for each in known.batches if each.validation for number in each.examples)
        arrays = source.packed(batch.examples)
        ids, targets, weights = (torch.from_numpy(array) for array in arrays)
        weights = weights / (total if batch.validation else known.total)
        ids, targets, weights = (sent(part, self._device) for part in (ids, targets, weights))
        return Iteration(
            known.halves,
            self._arena,
            resident.places,
            batch.units,
            known.halves.pack(ids, batch.lengths),
            targets,
            weights,
            resident.adapters,
            resident.fresh if known.micro_batch else resident.grads,
        )

    def _update(self, known: _Job, resident: _Resident) -> None:
        """The optimizer's unit."""
        if known.done and known.copying is None and known.steps.checkpoint_after(known.step - 1):
            self._wait(known)  # until there is room for it
        self._go_on_copying(known, resident, 1.0)
        if known.copied is not None:
            torch.cuda.current_stream(self._device).wait_event(known.copied)
        chosen, vectors = known.job.hyperparameters, resident.vectors
        rate = learning_rate(known.step, steps=known.steps.count, peak=chosen.learning_rate, warmup=chosen.warmup)
        with torch.no_grad():
            adamw_step(
                *(vectors[name] for name in ("params", "grads", "means", "variances")),
                number=known.step + 1,
                learning_rate=rate,
                max_norm=chosen.max_grad_norm,
                weight_decay=chosen.weight_decay,
            )
        _cast(vectors)

    def _end_step(self, known: _Job) -> torch.Tensor:
        """Count the step; the next one stores it. Returns its loss, on the host once the device is done."""
        training, held_out = (
            [loss for loss, batch in zip(known.losses, known.batches, strict=True) if batch.validation is wanted]
            for wanted in (False, True)
        )
        loss = self._to_host(torch.stack(training).sum())
        validation = self._to_host(torch.stack(held_out).sum()) if held_out else None
        tokens = sum(batch.tokens for batch in known.batches if not batch.validation)
        known.done.append(_Done(known.step, tokens, loss, validation))
        known.step, known.micro_batch, known.batches, known.losses = known.step + 1, 0, (), []
        known.updated = False
        now = time.monotonic()
        known.step_seconds, known.step_at = now - known.step_at, now
        if known.step == known.steps.count:
            self._store(known, durable=True)
        return loss

    # Memory

    def _vector_places(self, known: _Job) -> Places:
        """Where the vectors of a resident job lie."""
        return self._places(known.halves.layout)

    def _places(self, layout: AdapterLayout) -> Places:
        numbers, dtype = layout.elements, self._model.spec.dtype
        sizes = [(name, 4 * numbers) for name in ("params", "grads", "means", "variances", "fresh")]
        if dtype != torch.float32:
            sizes.append(("cast", dtype.itemsize * numbers))
        return Places({}).then(sizes)

    def _check_room(self, known: _Job, places: Places, lent: int) -> None:
        needed = self._arena.blocks(places)
        if not needed <= lent <= self._arena.num_blocks:
            raise ValueError(
                f"job {known.job.id} needs {needed} blocks; lent are {lent} of {self._arena.num_blocks}"
            )  # fmt: skip

    def _restore(self, known: _Job) -> None:
        """Move the job's vectors from the host to the lent blocks."""
        if known.resident is not None:
            return
        for other in [*self._jobs.values()]:
            if other.resident is not None:
                raise ValueError(f"job {other.job.id} is resident; offload it before {known.job.id} is restored")
        layout, places = known.halves.layout, self._vector_places(known)
        layers = range(self._model.decoder.num_layers)
        vectors = {
            name: [
                self._arena.tensor(
                    places, layer, name, (layout.elements,), self._model.spec.dtype if name == "cast" else torch.float32
                )
                for layer in layers
            ]
            for name in places.at
        }
        with torch.no_grad():
            for name in STORED:
                _copy((known.host_updated or known.host)[name].chunk(len(layers)), vectors[name])
            known.host_updated = None
            if known.micro_batch and not known.updated and known.host_grads is not None:
                _copy(known.host_grads.chunk(len(layers)), vectors["grads"])
        _cast(vectors)
        read = vectors.get("cast", vectors["params"])
        adapters, grads, fresh = (
            [layout.views(piece) for piece in pieces] for pieces in (read, vectors["grads"], vectors["fresh"])
        )
        known.resident = _Resident(places, vectors, [*adapters], [*grads], [*fresh])

    def _offload(self, known: _Job, resident: _Resident) -> None:
        """Move the job's vectors to the host, and store its last step on the disk."""
        self._store(known, durable=True)
        if known.copied is not None:
            # Whoever gets the blocks next writes after the copy.
            torch.cuda.current_stream(self._device).wait_event(known.copied)
        if known.updated:
            known.host_updated = {name: self._pinned(torch.empty_like(known.host[name])) for name in STORED}
            with torch.no_grad():
                for name, vector in known.host_updated.items():
                    _copy(resident.vectors[name], vector.chunk(len(resident.adapters)))
        elif known.micro_batch:
            if known.host_grads is None:
                known.host_grads = self._pinned(torch.empty_like(known.host["params"]))
            with torch.no_grad():
                _copy(resident.vectors["grads"], known.host_grads.chunk(len(resident.vectors["grads"])))
        known.resident = None

    def _pinned(self, vector: torch.Tensor) -> torch.Tensor:
        """The vector in memory that a GPU copies from and to by itself."""
        return vector.pin_memory() if self._copies is not None else vector

    def _to_host(self, value: torch.Tensor) -> torch.Tensor:
        """A number that the device computes, on the host when it has."""
        if self._copies is None:
            return value
        return torch.empty((), dtype=value.dtype, pin_memory=True).copy_(value, non_blocking=True)

    # Storing

    def _files(self, job: TrainingJob, directory: Path) -> dict[str, StateFiles]:
        """Where a job's states are, by kind."""
        found = {"disk": StateFiles(directory, job.digest(), durable=True)}
        if self._mirror is not None:
            found["mirror"] = StateFiles(self._mirror / job.id, job.digest(), durable=False)
        return found

    def keeps_up(self, job: str) -> bool:
        """Whether the next step may begin. False while the last one's adapter is to be written, and has no room."""
        known = self._jobs[job]
        if not known.done or known.copying is not None or not known.steps.checkpoint_after(known.step - 1):
            return True
        with self._lock:
            return self._room(known) is not None

    def _store(self, known: _Job, *, durable: bool) -> None:
        """Copy what is left of the last step to the host, and let the writer store it, if that was not done yet."""
        with self._lock:
            if known.resident is not None and known.host_step != known.step:
                if known.copying is None and self._room(known) is None:
                    self._wait(known)
                self._go_on_copying(known, known.resident, 1.0, durable=durable)
            elif known.host_step == known.step and (known.done or (durable and known.disk_step != known.step)):
                self._write_soon(known, durable)

    def _go_on_copying(self, known: _Job, resident: _Resident, share: float, *, durable: bool = False) -> None:
        """Copy this share of the last step's vectors to the host, and tell the writer once all are there.

        One large copy would hold up the tokens of the steps beside it, which take the same way to the host. Where
        there is no room because the writer is behind, the step is stored with a later one.
        """
        with self._lock:
            if known.host_step == known.step or known.updated:
                return
            if known.copying is None:
                self._take_back(known)
                room = self._room(known)
                if room is None:
                    return
                known.copying = _Copying(room)
            copying, layers = known.copying, len(resident.adapters)
            first = copying.layers
            copying.layers = last = min(layers, first + math.ceil(share * layers))
            if self._copies is not None:
                self._copies.wait_stream(torch.cuda.current_stream(self._device))
            with torch.no_grad(), torch.cuda.stream(self._copies):
                for name in STORED:
                    _copy(resident.vectors[name][first:last], copying.room[name].chunk(layers)[first:last])
                if self._copies is not None:
                    known.copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
                    known.copied.record(self._copies)
            if last == layers:
                if copying.room is known.spare:
                    known.host, known.spare = known.spare, known.host
                known.copying, known.host_step = None, known.step
                self._write_soon(known, durable)

    def _take_back(self, known: _Job) -> None:
        """A state that waits for the writer gives way to a newer one, unless its adapter is to be written."""
        for write in [*self._writes]:
            if write.known is known and not self._must_stay(write) and write.future.cancel():
                known.done = [*write.done, *known.done]
                known.to_disk |= write.durable
                self._writes.remove(write)

    def _must_stay(self, write: _Write) -> bool:
        return write.future.running() or write.known.steps.checkpoint_after(write.step - 1)

    def _room(self, known: _Job) -> dict[str, torch.Tensor] | None:
        """Vectors on the host that no write needs, or only one that can be taken back."""
        used = [write.host for write in self._writes if not write.future.done() and self._must_stay(write)]
        return next((room for room in (known.spare, known.host) if not any(room is each for each in used)), None)

    def _write_soon(self, known: _Job, durable: bool) -> None:
        """Let the writer store the vectors on the host, with the steps that it has not been told of."""
        done, known.done = known.done, []
        durable, known.to_disk = durable or known.to_disk, False
        self._writes = [write for write in self._writes if not write.future.done()]
        future = self._writer.submit(self._write, known, known.host, done, known.copied, known.step, durable)
        self._writes.append(_Write(known, known.host, done, known.step, durable, future))
        future.add_done_callback(lambda _: self.wake())

    def _wait(self, known: _Job | None = None) -> None:
        """Wait until the writer has nothing to do for a job; None: for any."""
        with self._lock:
            writes = [write for write in self._writes if known is None or write.known is known]
            for write in writes:
                write.future.result()
            self._writes = [write for write in self._writes if write not in writes]

    def _write(
        self,
        known: _Job,
        host: dict[str, torch.Tensor],
        done: list[_Done],
        copied: torch.cuda.Event | None,
        step: int,
        durable: bool,
    ) -> None:
        """In the writer's thread: store a state, then report its steps."""
        if known.failed:
            return
        try:
            if copied is not None:
                copied.synchronize()
            known.unstored += done
            fresh = [
                StepRecord(float(each.loss), None if each.validation is None else float(each.validation), each.tokens)
                for each in known.unstored
            ]
            for each, record in zip(known.unstored, fresh, strict=True):
                if not math.isfinite(record.loss):
                    raise ArithmeticError(f"the loss of step {each.step} is {record.loss}: lower the learning rate")
            if not bool(torch.isfinite(host["params"]).all()):
                raise ArithmeticError(f"step {step - 1} made parameters that are not finite: lower the learning rate")
            state = State(np.concatenate((known.rows, rows_of(fresh))), *(host[name] for name in STORED))
            assert state.step == step
            if not self._write_files(known, state, durable):
                return  # these steps are reported with a later one
            known.rows, stored, known.unstored = state.rows, known.unstored, []
            checkpoint = None
            if stored and known.steps.checkpoint_after(step - 1):
                checkpoint = self._write_checkpoint(known, host["params"], step)
            for each, record in zip(stored, fresh, strict=True):
                at = checkpoint if each.step == step - 1 else None
                self._reports.append(StepReport(known.job.id, each.step, known.steps.count, record, at))
        except (OSError, ArithmeticError) as error:
            known.failed = True
            self._reports.append(JobFailure(known.job.id, str(error)))

    def _write_files(self, known: _Job, state: State, durable: bool) -> bool:
        """Write a state where it is due. Returns whether any file has it."""
        files, stored = self._files(known.job, known.directory), False
        if "mirror" in files:
            try:
                files["mirror"].write(state)
                stored = True
            except OSError as error:
                log.warning("states of job %s go to the disk only: %s", known.job.id, error)
                shutil.rmtree(files["mirror"].directory, ignore_errors=True)
                self._mirror = None
        now = time.monotonic()
        quick = known.disk_seconds < DISK_SHARE * known.step_seconds
        if durable or quick or now - known.disk_at >= DISK_SECONDS or known.steps.checkpoint_after(state.step - 1):
            files["disk"].write(state)
            known.disk_seconds, known.disk_at, known.disk_step, stored = time.monotonic() - now, now, state.step, True
        return stored

    def _write_checkpoint(self, known: _Job, params: torch.Tensor, step: int) -> Path:
        """Write the adapter of parameters on the host. `step` counts the steps behind it."""
        path = _checkpoint_path(known, step)
        layers = self._model.decoder.num_layers
        pairs = {}
        for layer, piece in enumerate(params.chunk(layers)):
            for group in known.halves.layout.views(piece).values():
                matrices = torch.split(group.a, known.job.hyperparameters.rank)
                for (module, b), a in zip(group.b, matrices, strict=True):
                    pairs[layer, module] = LoraPair(a, b, known.job.hyperparameters.scale)
        write_peft(path, AdapterWeights(pairs), base_model=known.job.base_model)
        return path


def _checkpoint_path(known: _Job, step: int) -> Path:
    return known.directory / CHECKPOINTS / str(step)


def _has_checkpoint(known: _Job, step: int) -> bool:
    return (_checkpoint_path(known, step) / CONFIG_FILE).exists()


class _Timer:
    """The device's time from its making to `stop`."""

    def __init__(self, device: torch.device) -> None:
        self._events: list[torch.cuda.Event] = []
        self._start, self._seconds = time.perf_counter(), 0.0
        """When it was made, and how long the host took until `stop`."""
        if device.type == "cuda":
            self._events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]  # type: ignore[no-untyped-call]
            self._events[0].record()

    def stop(self) -> None:
        if self._events:
            self._events[1].record()
        self._seconds = time.perf_counter() - self._start

    @property
    def launch_seconds(self) -> float:
        """The host's time until `stop`, where the device works meanwhile; else 0."""
        return self._seconds if self._events else 0.0

    def seconds(self) -> float:
        """Waits for the device."""
        if not self._events:
            return self._seconds
        self._events[1].synchronize()
        return float(self._events[0].elapsed_time(self._events[1])) / 1000.0


def _begin(layout: AdapterLayout, num_layers: int, seed: int) -> State:
    """A new job's state: A uniform within 1 / √inputs, B zero (as PEFT draws them), so nothing changes at first."""
    params = torch.zeros(num_layers * layout.elements)
    generator = torch.Generator().manual_seed(seed)
    for piece in params.chunk(num_layers):
        for group in layout.views(piece).values():
            bound = 1.0 / math.sqrt(group.a.shape[1])
            group.a.uniform_(-bound, bound, generator=generator)
    return State(rows_of(()), params, torch.zeros_like(params), torch.zeros_like(params))


def _copy(source: Sequence[torch.Tensor], target: Sequence[torch.Tensor]) -> None:
    for read, written in zip(source, target, strict=True):
        written.copy_(read, non_blocking=True)


def _add(sums: Sequence[torch.Tensor], fresh: Sequence[torch.Tensor]) -> None:
    with torch.no_grad():
        for total, part in zip(sums, fresh, strict=True):
            total += part


def _cast(vectors: dict[str, list[torch.Tensor]]) -> None:
    """Bring the copy of the parameters in the model's dtype up to date, if there is one."""
    if "cast" in vectors:
        with torch.no_grad():
            torch._foreach_copy_(vectors["cast"], vectors["params"])
