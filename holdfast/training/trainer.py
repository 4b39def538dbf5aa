"""The tuner's device side: computes slices of training for several jobs over one base model, and stores every step.

Several ranks may share the model. Each then has a trainer that computes its part of every slice, in the same order. All
ranks of a stage have the whole vectors of the stage's layers, and make the same update from the sum of their gradients.
So their vectors stay equal, a state or an adapter is whole on any of them, and it does not depend on the number of
ranks. Rank 0's trainer leads: it stores the states, for which it gets the vectors of later stages at each step's end.

One job is resident at a time: its vectors lie in lent blocks at the end of the cache. The other jobs wait on the host.
Slices are launched in the order of the engine's steps, on the same stream. On a GPU each launch returns at once.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch

from holdfast.core.training_cost import HALVES
from holdfast.lm.execution.stage_link import StageLink
from holdfast.lm.kernels.collectives.protocol import in_rows
from holdfast.lm.models.decoder import Decoder
from holdfast.lm.models.halves import AdapterLayout, Halves, LayerAdapter, layer_halves
from holdfast.lm.parts.tuning.values import TrainingReport, TrainingSlice
from holdfast.training.calls import CallSteps, Limits
from holdfast.training.data import EXAMPLES_FILE, VALIDATION_FILE, Examples, digest_of
from holdfast.training.done import DoneStep
from holdfast.training.host_copies import HostCopies
from holdfast.training.iteration import Arena, Iteration, Places, kept_places
from holdfast.training.jobs import Hyperparameters, JobSteps, MicroBatch, TrainingJob, Unit
from holdfast.training.sources import CallSource, Device, FileSource, Output, PreparedCall, Source
from holdfast.training.stages import Stages
from holdfast.training.state import State, StepRecord, read_job
from holdfast.training.storage import STORED, Report, Storage, StoredJob, Vectors, copy_all, pinned

log = logging.getLogger("holdfast.engine")

VECTORS = ("params", "grads", "means", "variances", "fresh")
"""Names of a resident job's vectors of float32."""
COPY_HASTE = 2.0
"""Factor on a slice's share of its step.

The product is the share of the last step's state that it copies to the host.
"""


class LaunchedSlice:
    """A slice that the device computes, or has computed."""

    def __init__(self, slice_: TrainingSlice, tokens: int, loss: torch.Tensor | None, timer: _Timer) -> None:
        self._slice, self._tokens, self._loss, self._timer = slice_, tokens, loss, timer

    def result(self) -> TrainingReport:
        """The result of the slice. Waits until the device is done with it."""
        given = self._slice
        seconds = self._timer.seconds()
        return TrainingReport(
            given.job, given.step, given.micro_batch, given.action, given.first, given.stop, seconds, self._tokens,
            None if self._loss is None else float(self._loss), self._timer.launch_seconds,
        )  # fmt: skip


@dataclass(eq=False)
class _Resident:
    """A job's vectors on the device, by name and layer."""

    places: Places
    vectors: dict[str, list[torch.Tensor]]
    adapters: list[LayerAdapter]
    grads: list[LayerAdapter]
    fresh: list[LayerAdapter]
    """Gradients of one micro-batch that is not the first of its step. They are added to `grads` when it is complete."""


@dataclass(eq=False)
class _Job:
    """A job that the trainer has open."""

    stored: StoredJob
    halves: Halves
    source: Source
    """Where the micro-batches and updates come from."""
    micro_batch: int = 0
    batches: tuple[MicroBatch, ...] = ()
    """The micro-batches of the current step."""
    began: float = 0.0
    """Monotonic time of the current step's first slice."""
    outputs: list[Output] = field(default_factory=list)
    """The results of the current step's micro-batches so far, on the device."""
    iteration: Iteration | NothingToCompute | None = None
    resident: _Resident | None = None
    has_gradients: bool = False
    """Whether gradients of earlier micro-batches wait for an update."""
    host_grads: torch.Tensor | None = None
    """These gradients, if the job was offloaded with them."""
    updated: bool = False
    """Whether the current step's update is done but not its validation. The vectors are then those of the next step."""
    remote: dict[str, list[torch.Tensor]] = field(default_factory=dict)
    """The vectors of later stages' layers at the end of the last step, on the host, by name. Only on rank 0."""
    host_updated: dict[str, torch.Tensor] | None = None
    """The updated vectors of a job that was offloaded before its validation.

    No state holds them before the step ends.
    """

    @property
    def job(self) -> TrainingJob:
        return self.stored.job

    @property
    def steps(self) -> Any:
        """The outline of the job's steps: `JobSteps` or `CallSteps`."""
        return self.stored.steps

    @property
    def step(self) -> int:
        """The number of the current step."""
        return self.stored.step

    @property
    def begins(self) -> bool:
        """Whether no step has changed the vectors on the host."""
        return not self.step and self.host_updated is None

    @property
    def last_vectors(self) -> Vectors | None:
        """The vectors at the end of the last step; None if they are not on the device."""
        return None if self.resident is None or self.updated else self.whole(self.resident)

    def whole(self, resident: _Resident) -> Vectors:
        """The resident vectors, and those of later stages."""
        if not self.remote:
            return resident.vectors
        return {name: [*resident.vectors[name], *self.remote[name]] for name in STORED}


class NothingToCompute:
    """The place of an `Iteration` in a micro-batch that only has the optimizer's unit."""

    at = 0
    units: tuple[Unit, ...] = ()

    def __init__(self, places: Places) -> None:
        """`places` are those of the job's vectors."""
        self.places = self.most_places = places

    def run(self, first: int, stop: int, *, keep: bool) -> None:
        """Do nothing."""

    def release(self) -> None:
        """Do nothing."""


class Trainer(Device):
    """Computes and stores tuning jobs. All slices come from one thread, and all other calls from one thread."""

    def __init__(
        self,
        model: Decoder,
        arena: Arena,
        *,
        base_digest: str,
        mirror: Path | None,
        pinning: AbstractContextManager[object] | None = None,
        wake: Callable[[], None] = lambda: None,
        link: StageLink | None = None,
        leads: bool = True,
        alone: int = 0,
    ) -> None:
        """`arena` is the end of the engine's cache (`arena_of`). A job of another `base_digest` is refused.

        `link` leads to the other stages, if the model is in a pipeline. A trainer that does not lead stores nothing,
        and takes jobs of any base: rank 0 has compared it.

        `mirror` is a directory in the host's memory, where states survive the engine but not the host. If it is None,
        states go only to the jobs' own directories. `pinning` is held while another thread locks host memory. `wake` is
        called when the writer is done with a state, mostly in its thread.

        A datum of a driven job that is longer than the job's micro-batch is computed by itself, up to `alone` tokens.
        """
        self._model, self._base_digest, self._arena, self._alone = model, base_digest, arena, alone
        self._device = model.spec.device
        self._jobs: dict[str, _Job] = {}
        self._leads = leads
        self._stages = Stages(model.shard, model.decoder.num_layers, link)
        self._passing = threading.Lock()
        """Guards the end of a step, and the steps that are passed over: calls arrive in another thread than slices."""
        pinning = pinning or nullcontext()
        self._storage: Storage | HostCopies = (
            Storage(self._device, mirror=mirror, pinning=pinning, wake=wake)
            if leads
            else HostCopies(self._device, layers=model.shard.layers, mirror=mirror, pinning=pinning)
        )

    # Jobs

    @property
    def base_digest(self) -> str:
        """The digest of the model that jobs are tuned on."""
        return self._base_digest

    @property
    def block_bytes(self) -> int:
        """Size of one block of the cache in bytes, over all layers."""
        return len(self._arena.planes) * self._arena.block_bytes

    def open(self, directory: Path, known: int = 0) -> Any:
        """Open the job of a directory at its last stored step, and return its steps. The job is not resident yet.

        The owner of a driven job has the results of its first `known` calls. Raises ValueError if the job is of another
        base model, if its data have changed, or if it is already open.
        """
        return self.add(self.prepare(directory, known))

    def add(self, prepared: _Job) -> Any:
        """The quick part of `open`, in the thread of all other calls."""
        if prepared.job.id in self._jobs:
            raise ValueError(f"job {prepared.job.id} is open already")
        self._jobs[prepared.job.id] = prepared
        return prepared.steps

    def prepare(self, directory: Path, known: int = 0) -> _Job:
        """The slow part of `open`, for `add`: reads files and locks host memory. May run in any thread."""
        job = read_job(directory)
        if self._leads and job.base_digest != self._base_digest:
            raise ValueError(f"job {job.id} was begun over another base model ({job.base_model}); serve that one")
        if job.threads and job.threads != torch.get_num_threads() and self._device.type == "cpu":
            log.warning("job %s began on %d threads; the last bits may differ on others", job.id, job.threads)
        chosen = job.hyperparameters
        layout = AdapterLayout(self._model.decoder, chosen.modules, chosen.rank, chosen.dora)
        state = self._storage.read(job, directory, layout)
        source = self._calls_of(job, directory, layout, state, known) if job.driven else self._files_of(job, directory)
        stored = self._storage.open(directory, source.steps, layout, state, source.files)
        return _Job(stored, Halves(self._model, layout, chosen.scale), source)

    def _files_of(self, job: TrainingJob, directory: Path) -> FileSource:
        """The examples of a job over files. Raises ValueError."""
        validation = directory / VALIDATION_FILE if job.validation_digest else None
        for path, digest in ((directory / EXAMPLES_FILE, job.data_digest), (validation, job.validation_digest)):
            if path is not None and digest_of(path) != digest:
                raise ValueError(f"{path.name} of job {job.id} is not the file that the job was begun with")
        examples = Examples(directory / EXAMPLES_FILE)
        held_out = Examples(validation) if validation is not None else None
        spec = self._model.decoder
        held_out_lengths = held_out.lengths.tolist() if held_out is not None else []
        steps = JobSteps(job, layer_halves(spec), examples.lengths.tolist(), held_out_lengths)
        longest = max((*steps.lengths, *steps.validation_lengths))
        if longest > spec.max_positions:
            raise ValueError(f"an example has {longest} tokens; the model was made for {spec.max_positions}")
        return FileSource(steps, examples, held_out)

    def _calls_of(
        self, job: TrainingJob, directory: Path, layout: AdapterLayout, state: State, known: int
    ) -> CallSource:
        """The calls of a driven job, from its state on."""
        spec = self._model.decoder
        steps = CallSteps(job, layer_halves(spec), done=state.step, alone=self._alone)
        way_out = " (tuning_micro_batch)" if steps.most_tokens < spec.max_positions else ""
        limits = Limits(spec.vocab_size, min(spec.max_positions, steps.most_tokens), way_out)
        followed = self._model.group is not None or self._stages.several
        return CallSource(directory, steps, layout, state, limits, known, followed=followed)

    # Calls of driven jobs

    def prepare_call(self, job: str, number: int) -> PreparedCall:
        """Read a call of an open job. May run in any thread. Raises ValueError for one that must be refused."""
        return self._driven(job).prepare(number)

    def prepare_load(self, job: str, prepared: PreparedCall) -> PreparedCall:
        """Read what a call loads, once all calls before it are done and stored. May run in any thread.

        Raises ValueError for one that must be refused.
        """
        return self._driven(job).load(prepared)

    def add_call(self, job: str, prepared: PreparedCall) -> None:
        """Take the next call of an open job. Raises ValueError for a call that is not the next."""
        with self._passing:
            self._driven(job).add(prepared)
            self._pass_over(self._jobs[job])

    def refuse_call(self, job: str, number: int, reason: str) -> None:
        """Take the next call of an open job as one that was refused. It is reported in its turn."""
        with self._passing:
            self._driven(job).refuse(number, reason)
            self._pass_over(self._jobs[job])

    def counts(self, job: str) -> tuple[int, int]:
        """Number of calls that the stored state of an open job includes, and of its updates."""
        ledger = self._jobs[job].stored.ledger
        return ledger.step, ledger.updates

    def most_tokens(self, job: str) -> int:
        """Most tokens of a datum of an open driven job."""
        return self._driven(job).most_tokens

    def _driven(self, job: str) -> CallSource:
        source = self._jobs[job].source
        assert isinstance(source, CallSource), f"job {job} takes no calls"
        return source

    def records(self, job: str) -> tuple[StepRecord, ...]:
        """The stored steps of an open job."""
        return self._jobs[job].stored.ledger.records

    def steps(self, job: str) -> Any:
        """The steps of an open job."""
        return self._jobs[job].steps

    def is_complete(self, job: str) -> bool:
        """Whether an open job has done all steps that it will ever have."""
        known = self._jobs[job]
        return bool(known.steps.final) and known.step == known.steps.count

    def host_vector(self, job: str, name: str) -> torch.Tensor:
        """One of the vectors in STORED on the host. For an offloaded job, it is the only copy."""
        self._storage.wait()
        return self._jobs[job].stored.host[name]

    def next_slice(self, job: str) -> tuple[int, int, int]:
        """The position of an open job: its step, its micro-batch, and its next unit."""
        known = self._jobs[job]
        return known.step, known.micro_batch, known.iteration.at if known.iteration else 0

    def blocks(self, job: str, tokens: int = 0, *, keep: bool = False) -> int:
        """Number of blocks at the end of the cache that a resident job takes, with a micro-batch of `tokens` tokens."""
        known = self._jobs[job]
        inputs, everything = kept_places(known.halves, tokens, self._vector_places(known))
        places = everything if keep else inputs
        return self._arena.blocks(places if tokens else self._vector_places(known))

    def blocks_for(self, chosen: Hyperparameters, tokens: int, *, keep: bool = False) -> int:
        """The result of `blocks` for a job that is not open, with these hyperparameters."""
        layout = AdapterLayout(self._model.decoder, chosen.modules, chosen.rank, chosen.dora)
        halves = Halves(self._model, layout, chosen.scale)
        inputs, everything = kept_places(halves, tokens, self._places(layout))
        return self._arena.blocks(everything if keep else inputs)

    def is_resident(self, job: str) -> bool:
        """Whether the vectors of an open job are in lent blocks."""
        return self._jobs[job].resident is not None

    def newest_checkpoint(self, job: str) -> str:
        """The directory of an open job's newest adapter; empty if no epoch has ended."""
        return self._jobs[job].stored.newest_checkpoint()

    def keeps_up(self, job: str) -> bool:
        """Whether the next step may begin. False while the last step's adapter waits for memory to be written from."""
        known = self._jobs[job]
        return self._storage.keeps_up(known.stored, changes=known.source.changes(known.step))

    def settled(self, job: str) -> bool:
        """Whether everything due for an open job is stored, so that `close` and `discard` need not wait."""
        return self._storage.settled(self._jobs[job].stored)

    def close(self, job: str) -> None:
        """Store a job's finished steps on the disk, and forget the job. Its blocks are then free.

        It resumes after its last step when it is opened again.
        """
        known = self._jobs[job]
        self._storage.close(known.stored, known.last_vectors)
        del self._jobs[job]

    def discard(self, job: str) -> None:
        """Forget a job and delete its states. Its checkpoints stay."""
        self._storage.discard(self._jobs.pop(job).stored)

    @property
    def has_reports(self) -> bool:
        """Whether `reports` would return any."""
        return self._storage.has_reports

    def reports(self) -> list[Report]:
        """The steps that have been stored since the last call, in order."""
        return self._storage.reports()

    def shut_down(self) -> None:
        """Store all jobs on the disk and end the writer."""
        for job in [*self._jobs]:
            self.close(job)
        self._storage.shut_down()

    # Slices

    def run(self, slice_: TrainingSlice, lent: int) -> TrainingReport:
        """`launch`, and wait for the result."""
        return self.launch(slice_, lent).result()

    def launch(self, slice_: TrainingSlice, lent: int) -> LaunchedSlice:
        """Compute a slice. The cache's last `lent` blocks belong to training until a later slice lends fewer.

        Raises ValueError if the slice does not follow the previous ones, or if its tensors do not fit those blocks.
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
        """Run units of a micro-batch.

        Returns its number of tokens if they end it, and the step's loss if they end the step.
        """
        if known.step >= known.steps.count:
            raise ValueError(f"job {slice_.job} is done: it has {known.steps.count} steps")
        if not known.batches:
            known.batches, known.began = known.steps.micro_batches(known.step), time.monotonic()
        batch = known.batches[known.micro_batch]
        if slice_.stop > len(batch.units):
            raise ValueError(f"units up to {slice_.stop}; the micro-batch has {len(batch.units)}")
        if known.iteration is None:
            known.iteration = self._begin_micro_batch(known, resident, batch)
        iteration = known.iteration
        units = sum(len(each.units) for each in known.batches)
        self._storage.copy(known.stored, known.last_vectors, COPY_HASTE * (slice_.stop - slice_.first) / units)
        keeps = slice_.keep and any(unit.kind in HALVES for unit in batch.units[slice_.first : slice_.stop])
        self._check_room(known, iteration.most_places if keeps and not batch.validation else iteration.places, lent)
        iteration.run(slice_.first, min(slice_.stop, len(iteration.units)), keep=slice_.keep)
        if slice_.stop < len(batch.units):
            return 0, None
        if isinstance(iteration, Iteration):
            known.outputs.append(Output(batch, iteration.loss, iteration.logprobs))
        if batch.lengths and not batch.validation:
            if known.has_gradients:
                _add(resident.vectors["grads"], resident.vectors["fresh"])
            known.has_gradients = True
        if batch.units[-1].kind == "optimizer":
            self._update(known, resident)
        known.iteration = None
        known.micro_batch += 1
        return batch.tokens, self._end_step(known) if known.micro_batch == len(known.batches) else None

    def _begin_micro_batch(self, known: _Job, resident: _Resident, batch: MicroBatch) -> Iteration | NothingToCompute:
        if not batch.lengths:
            return NothingToCompute(self._vector_places(known))
        scored = known.source.scored(known.step, batch, self._device)
        into = "fresh" if known.has_gradients else "grads"
        if self._model.group is not None and not batch.validation:
            # The backward writes this rank's part of them only.
            torch._foreach_zero_(resident.vectors[into])
        return Iteration(
            known.halves,
            self._arena,
            resident.places,
            batch.units,
            known.halves.pack(scored.ids, batch.lengths),
            scored.targets,
            scored.loss,
            resident.adapters,
            resident.fresh if known.has_gradients else resident.grads,
            self._stages,
        )

    def _update(self, known: _Job, resident: _Resident) -> None:
        """Run the optimizer's unit."""
        self._storage.before_update(known.stored, known.whole(resident))
        vectors = resident.vectors
        with torch.no_grad():
            if not known.has_gradients:
                torch._foreach_zero_(vectors["grads"])
            update = known.source.update(known.step, self._model.shard.layers)
            update(vectors, partial(self._sum_gradients, vectors["grads"]))
        _cast(vectors)
        known.has_gradients, known.updated = False, True

    def _sum_gradients(self, grads: Sequence[torch.Tensor]) -> torch.Tensor | None:
        """Add up the gradients of all ranks that share these layers.

        Returns the norm of the gradients of all stages; None if there is one stage.
        """
        group = self._model.group
        if group is not None:
            for each in grads:
                each.copy_(group.all_reduce(in_rows(each)).view(-1))
        if not self._stages.several:
            return None
        squares = torch.linalg.vector_norm(torch.stack(torch._foreach_norm([*grads]))).square()
        return self._stages.total(squares[None])[0].sqrt()

    def _end_step(self, known: _Job) -> torch.Tensor | None:
        """Count the step; the next step stores it. Returns the loss of an optimizer step of a job over files, on the
        host once the device is done."""
        changes = known.source.changes(known.step)
        done = known.source.done(known.step, known.outputs, self, known.began)
        if changes:
            self._gather(known)
        with self._passing:
            known.source.forget(known.step)
            self._storage.end_step(known.stored, done, changes=changes)
            known.micro_batch, known.batches, known.outputs, known.updated = 0, (), [], False
            self._store_last(known)
            self._pass_over(known)
        return done.loss if isinstance(done, DoneStep) else None

    def _store_last(self, known: _Job) -> None:
        """Store the last step if no step follows that would, or if the next call saves it."""
        if known.step == known.steps.count and known.steps.final:
            self._storage.store(known.stored, known.last_vectors)
        elif known.step == known.steps.count or not known.steps.micro_batches(known.step):
            self._storage.flush(known.stored, known.last_vectors)

    def _pass_over(self, known: _Job) -> None:
        """Go on to the next step that has something to compute."""
        while known.step < known.steps.count and not known.steps.micro_batches(known.step):
            done = known.source.passed(known.step)
            known.source.forget(known.step)
            self._storage.pass_over(known.stored, done)

    def to_host(self, tensor: torch.Tensor) -> torch.Tensor:
        """The sum of a tensor over the stages, on the host of the first one once the device is done."""
        return self._to_host(self._stages.at_first(tensor))

    def _gather(self, known: _Job) -> None:
        """Bring the vectors of later stages to rank 0, which stores all."""
        if not self._stages.several:
            return
        assert known.resident is not None
        for name in STORED:
            remote = known.remote.get(name, [])
            sizes = known.halves.layout.sizes[self._stages.layers.stop :]
            for index, vector in enumerate(self._stages.gather(known.resident.vectors[name], sizes)):
                if index == len(remote):
                    remote.append(pinned(torch.empty(vector.shape, dtype=vector.dtype), self._device))
                remote[index].copy_(vector, non_blocking=True)
            if remote:
                known.remote[name] = remote
        if known.remote and self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()  # the host reads them

    # Memory

    def _vector_places(self, known: _Job) -> Places:
        """The places of a resident job's vectors."""
        return self._places(known.halves.layout)

    def _places(self, layout: AdapterLayout) -> Places:
        own = self._model.shard.layers
        sizes = layout.sizes[own.start : own.stop]
        return self._arena.free.then(
            ((layer, name), dtype.itemsize * size)
            for name, dtype in self._dtypes.items()
            for layer, size in enumerate(sizes)
        )

    @property
    def _dtypes(self) -> dict[str, torch.dtype]:
        """The dtype of each vector of a resident job, by name."""
        dtype = self._model.spec.dtype
        return dict.fromkeys(VECTORS, torch.float32) | ({} if dtype == torch.float32 else {"cast": dtype})

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
        layout, places, own = known.halves.layout, self._vector_places(known), self._model.shard.layers
        sizes = layout.sizes[own.start : own.stop]
        vectors = {
            name: [self._arena.tensor(places, (layer, name), (size,), dtype) for layer, size in enumerate(sizes)]
            for name, dtype in self._dtypes.items()
        }
        with torch.no_grad():
            for name in STORED:
                if known.host_updated is not None:
                    copy_all(layout.split(known.host_updated[name], own), vectors[name])
                else:
                    copy_all(layout.split(known.stored.host[name])[own.start : own.stop], vectors[name])
            if known.begins and layout.dora:
                for layer, vector in enumerate(vectors["params"]):
                    known.halves.begin_magnitudes(layer, vector)
            known.host_updated = None
            if known.has_gradients and known.host_grads is not None:
                copy_all(layout.split(known.host_grads, own), vectors["grads"])
        _cast(vectors)
        read = vectors.get("cast", vectors["params"])
        # A gain is a ratio near 1, and 16 bits of its magnitude would change rows that training has not changed yet.
        adapters = [
            known.halves.own(layout.views(layer, piece, wide))
            for layer, piece, wide in zip(own, read, vectors["params"], strict=True)
        ]
        grads, fresh = (
            [known.halves.own(layout.views(layer, piece)) for layer, piece in zip(own, vectors[name], strict=True)]
            for name in ("grads", "fresh")
        )
        known.resident = _Resident(places, vectors, [*adapters], [*grads], [*fresh])

    def _offload(self, known: _Job, resident: _Resident) -> None:
        """Move the job's vectors to the host, and store its last step: on the disk, if the job does not leave often."""
        (self._storage.store if known.steps.final else self._storage.flush)(known.stored, known.last_vectors)
        self._storage.after_copies(known.stored)  # later users of the blocks write after the copies
        layout, own = known.halves.layout, self._model.shard.layers
        if known.updated:
            known.host_updated = {name: self._room(known) for name in STORED}
            with torch.no_grad():
                for name, vector in known.host_updated.items():
                    copy_all(resident.vectors[name], layout.split(vector, own))
        elif known.has_gradients:
            if known.host_grads is None:
                known.host_grads = self._room(known)
            with torch.no_grad():
                copy_all(resident.vectors["grads"], layout.split(known.host_grads, own))
        known.resident = None

    def _room(self, known: _Job) -> torch.Tensor:
        """Memory on the host for one vector of this rank's layers."""
        own = self._model.shard.layers
        return pinned(torch.empty(sum(known.halves.layout.sizes[own.start : own.stop])), self._device)

    def _to_host(self, value: torch.Tensor) -> torch.Tensor:
        """A copy on the host of numbers that the device computes. They are there once the device is done."""
        if self._device.type != "cuda":
            return value
        return torch.empty(value.shape, dtype=value.dtype, pin_memory=True).copy_(value, non_blocking=True)


class _Timer:
    """Measures the device's time from construction to `stop`."""

    def __init__(self, device: torch.device) -> None:
        self._events: list[torch.cuda.Event] = []
        self._start, self._seconds = time.perf_counter(), 0.0
        """The time of construction, and the host's seconds until `stop`."""
        if device.type == "cuda":
            self._events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]  # type: ignore[no-untyped-call]
            self._events[0].record()

    def stop(self) -> None:
        if self._events:
            self._events[1].record()
        self._seconds = time.perf_counter() - self._start

    @property
    def launch_seconds(self) -> float:
        """The host's seconds until `stop` if the device works in parallel; else 0."""
        return self._seconds if self._events else 0.0

    def seconds(self) -> float:
        """Return the device's seconds from construction to `stop`. Waits until the device has reached `stop`."""
        if not self._events:
            return self._seconds
        self._events[1].synchronize()
        return float(self._events[0].elapsed_time(self._events[1])) / 1000.0


def _add(sums: Sequence[torch.Tensor], fresh: Sequence[torch.Tensor]) -> None:
    with torch.no_grad():
        for total, part in zip(sums, fresh, strict=True):
            total += part


def _cast(vectors: dict[str, list[torch.Tensor]]) -> None:
    """Update the copy of the parameters in the model's dtype, if there is one."""
    if "cast" in vectors:
        with torch.no_grad():
            torch._foreach_copy_(vectors["cast"], vectors["params"])
