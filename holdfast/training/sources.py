"""Sources of a job's work: its micro-batches with their arrays, its updates, and what its steps give."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

from holdfast.lm.kernels.training.attention import sent
from holdfast.lm.kernels.training.losses import CrossEntropy, PositionLoss
from holdfast.lm.models.halves import AdapterLayout
from holdfast.training.call_files import CallFiles, JobFiles, refusal_of
from holdfast.training.calls import Call, CallData, CallSteps, Limits, read_call
from holdfast.training.data import Examples
from holdfast.training.done import Done, DoneCall, DoneStep, Host, RefusedCall
from holdfast.training.jobs import JobSteps, MicroBatch
from holdfast.training.optimizer import adamw_step, learning_rate
from holdfast.training.saved import Saved, SavedShape, read_saved, write_saved, write_whole
from holdfast.training.scoring import position_loss
from holdfast.training.state import State
from holdfast.training.storage import STORED, copy_all, write_adapter

Resident = Mapping[str, Sequence[torch.Tensor]]
"""The vectors of a resident job by name and layer, the gradients included."""


class Scored(NamedTuple):
    """The inputs of a micro-batch."""

    ids: torch.Tensor  # [T] int64
    targets: torch.Tensor  # [T] int64, or [T, K]
    loss: PositionLoss


class Output(NamedTuple):
    """The results of a micro-batch, on the device."""

    batch: MicroBatch
    loss: torch.Tensor
    """The sum of the losses, with no dimensions."""
    logprobs: torch.Tensor  # [T], or [T, K]


class Device(ABC):
    """The part of the trainer that a source needs when a step ends."""

    @abstractmethod
    def to_host(self, tensor: torch.Tensor) -> torch.Tensor:
        """The sum of a tensor over the stages, on the host of the first one once the device is done."""


Update = Callable[[Resident, Callable[[], torch.Tensor | None]], None]
"""Changes parameters and moments in place.

The second argument adds up the gradients of all ranks, and gives the norm of all stages' gradients; None if there is
one stage.
"""


class Source(ABC):
    """Where a job's work comes from."""

    steps: Any
    """The job's outline (`JobSteps` or `CallSteps`)."""
    files: JobFiles

    @abstractmethod
    def scored(self, step: int, batch: MicroBatch, device: torch.device) -> Scored:
        """The inputs of a micro-batch, on a device."""

    @abstractmethod
    def update(self, step: int, layers: range) -> Update:
        """The update of a step that has one. `layers` are those of this device."""

    @abstractmethod
    def done(self, step: int, outputs: Sequence[Output], device: Device, began: float) -> Done[Any]:
        """The end of a step, from the results of its micro-batches.

        `began` is the monotonic time of its first slice.
        """

    @abstractmethod
    def changes(self, step: int) -> bool:
        """Whether a step changes parameters and moments."""

    @abstractmethod
    def passed(self, step: int) -> Done[Any]:
        """The end of a step without micro-batches."""

    def forget(self, step: int) -> None:  # noqa: B027
        """Release the memory of a step that is done."""


class FileSource(Source):
    """A job over files of examples. Each step is one update, and a validation may follow it."""

    files = JobFiles()

    def __init__(self, steps: JobSteps, examples: Examples, validation: Examples | None) -> None:
        self.steps, self._examples = steps, examples
        self._sources = {False: examples, True: validation or examples}
        """The examples of micro-batches, by whether they are for validation."""
        self._totals: dict[tuple[int, bool], float] = {}
        """Sums of the weights of the current step's examples, by step and by whether they are for validation."""

    def scored(self, step: int, batch: MicroBatch, device: torch.device) -> Scored:
        source = self._sources[batch.validation]
        ids, targets, weights = (torch.from_numpy(array) for array in source.packed(batch.examples))
        weights = weights / self._total(step, validation=batch.validation)
        ids, targets, weights = (sent(part, device) for part in (ids, targets, weights))
        return Scored(ids, targets, CrossEntropy(weights))

    def _total(self, step: int, *, validation: bool) -> float:
        if (step, validation) not in self._totals:
            batches = [each for each in self.steps.micro_batches(step) if each.validation is validation]
            numbers: Iterable[int] = (number for each in batches for number in each.examples)
            self._totals = {key: total for key, total in self._totals.items() if key[0] == step}
            self._totals[step, validation] = self._sources[validation].weight(numbers)
        return self._totals[step, validation]

    def update(self, step: int, layers: range) -> Update:
        chosen = self.steps.job.hyperparameters
        rate = learning_rate(step, steps=self.steps.count, peak=chosen.learning_rate, warmup=chosen.warmup)
        adam = replace(chosen.adam, learning_rate=rate)

        def run(vectors: Resident, norm: Callable[[], torch.Tensor | None]) -> None:
            _adam(vectors, norm, number=step + 1, adam=adam)

        return run

    def done(self, step: int, outputs: Sequence[Output], device: Device, began: float) -> DoneStep:
        losses = {
            wanted: [each.loss for each in outputs if each.batch.validation is wanted] for wanted in (False, True)
        }
        loss, *validation = [device.to_host(torch.stack(each).sum()[None])[0] for each in losses.values() if each]
        tokens = sum(each.batch.tokens for each in outputs if not each.batch.validation)
        job = self.steps.job.id
        return DoneStep(job, step, self.steps.count, tokens, loss, validation[0] if validation else None)

    def changes(self, step: int) -> bool:
        return True

    def passed(self, step: int) -> Done[Any]:
        raise ValueError(f"step {step} of a job over files has no micro-batch")


@dataclass(frozen=True, eq=False)
class PreparedCall:
    """A call that was read, with all that its step needs."""

    call: Call
    data: CallData
    batches: tuple[MicroBatch, ...]
    saved: Saved | None = None
    """The state that a load call loads; None for other calls, and before it is read."""

    @property
    def loads(self) -> bool:
        """Whether the call waits for what it loads."""
        return self.call.kind == "load" and self.saved is None


class CallSource(Source):
    """A driven job: each step is a call of its owner."""

    steps: CallSteps
    files: CallFiles

    def __init__(
        self,
        directory: Path,
        steps: CallSteps,
        layout: AdapterLayout,
        state: State,
        limits: Limits,
        known: int,
        *,
        followed: bool,
    ) -> None:
        """`limits` are those of a datum. The owner has the results of the first `known` calls.

        `followed` says whether other ranks compute the calls, too.
        """
        self.steps, self._directory, self._layout = steps, directory, layout
        self._limits, self._known, self.updates = limits, known, state.ledger.updates
        self.files = CallFiles(directory, state.step, followed=followed)
        self._calls: dict[int, PreparedCall] = {}
        """The calls that are not done."""
        self._refused: dict[int, str] = {}
        """The reasons of refused calls that are not done."""
        self._norms: dict[int, torch.Tensor] = {}
        """Norms of the gradients of updates whose steps have not ended, on the first stage; 0 on the others."""

    @property
    def most_tokens(self) -> int:
        """Most tokens of a datum."""
        return self._limits.tokens

    def prepare(self, number: int) -> PreparedCall:
        """Read a call, but not yet what it loads. May run in any thread.

        Raises ValueError for one that must be refused, with the reason.
        """
        if reason := refusal_of(self._directory, number):
            raise ValueError(reason)
        try:
            call, data = read_call(self._directory, number, self._limits)
        except OSError as error:
            raise ValueError(f"the file of call {number} cannot be read: {error.strerror}") from None
        return PreparedCall(call, data, self.steps.outline(call, data.lengths))

    def load(self, prepared: PreparedCall) -> PreparedCall:
        """Read what a call loads. May run in any thread, after the calls before it. Raises ValueError as `prepare`."""
        shape, call = SavedShape.of(self.steps.job), prepared.call
        saved = read_saved(Path(call.directory), shape, sum(self._layout.sizes))
        return replace(prepared, saved=saved if call.moments else saved.without_moments())

    def add(self, prepared: PreparedCall) -> None:
        """Take the next call. Raises ValueError if it is not the next."""
        self._calls[prepared.call.number] = prepared
        self.steps.add(prepared.call, prepared.data.lengths)

    def refuse(self, number: int, reason: str) -> None:
        """Take the next call as one that was refused."""
        self._refused[number] = reason
        self.steps.refuse(number)

    def scored(self, step: int, batch: MicroBatch, device: torch.device) -> Scored:
        prepared = self._calls[step]
        part = prepared.data.packed(batch.examples)
        ids, targets = (
            sent(torch.from_numpy(array.astype("<i8")), device) for array in (part.tokens, part.targets)
        )  # fmt: skip
        arrays = {name: sent(torch.from_numpy(array.copy()), device) for name, array in part.arrays.items()}
        return Scored(ids, targets, position_loss(prepared.call.loss, arrays, targets))

    def update(self, step: int, layers: range) -> Update:
        prepared = self._calls[step]
        if prepared.saved is not None:
            self.updates = prepared.saved.updates
            return partial(self._load, prepared.saved, layers)
        self.updates += 1
        number, adam = self.updates, prepared.call.adam

        def run(vectors: Resident, norm: Callable[[], torch.Tensor | None]) -> None:
            found = _adam(vectors, norm, number=number, adam=adam)
            # Parameters that are not finite make the norm NaN, so that the update is refused before it is reported.
            ruined = 0.0 * torch.stack(torch._foreach_norm([*vectors["params"]])).sum()
            self._norms[step] = ruined + (found if layers.start == 0 else 0.0)

        return run

    def _load(self, saved: Saved, layers: range, vectors: Resident, norm: Callable[[], torch.Tensor | None]) -> None:
        for name in STORED:
            copy_all(self._layout.split(getattr(saved, name))[layers.start : layers.stop], vectors[name])

    def done(self, step: int, outputs: Sequence[Output], device: Device, began: float) -> DoneCall:
        done = self._done(step, began)
        if self._calls[step].saved is None:  # all ranks have added to its sums; what a call loads, each reads alone
            self.files.read_by_all(step + 1)
        if step in self._norms:
            norm = device.to_host(self._norms.pop(step)[None])[0]
            return replace(done, metrics={"grad_norm": norm}, replays=True)
        if not outputs:
            return done
        lengths = [length for each in outputs for length in each.batch.lengths]
        found = torch.cat([each.logprobs for each in outputs])
        logprobs = device.to_host(found.view(-1)).view(found.shape)
        loss = device.to_host(torch.stack([each.loss for each in outputs]).sum()[None])[0]
        widths = self._calls[step].data.widths
        return replace(done, metrics={"loss:sum": loss}, logprobs=logprobs, lengths=lengths, widths=widths)

    def changes(self, step: int) -> bool:
        return step in self._calls and self._calls[step].call.changes

    def passed(self, step: int) -> Done[Any]:
        if step in self._refused:
            return RefusedCall(self.steps.job.id, step, step < self._known, self._refused[step])
        call = self._calls[step].call
        write = {"save": self._save, "save_adapter": self._save_adapter}[call.kind]
        return replace(self._done(step, time.monotonic()), save=partial(write, Path(call.directory), self.updates))

    def _done(self, step: int, began: float) -> DoneCall:
        return DoneCall(self.steps.job.id, self._directory, step, self.updates, step < self._known, began)

    def _save(self, directory: Path, updates: int, host: Host) -> None:
        write_saved(directory, SavedShape.of(self.steps.job), Saved(updates, *(host[name] for name in STORED)))

    def _save_adapter(self, directory: Path, updates: int, host: Host) -> None:
        write_whole(
            directory, lambda place: write_adapter(place, self.steps.job, self._layout, host["params"])
        )  # fmt: skip

    def forget(self, step: int) -> None:
        self._calls.pop(step, None)
        self._refused.pop(step, None)
        self.steps.forget(step)  # the tuner may not have passed over this one yet


def _adam(vectors: Resident, norm: Callable[[], torch.Tensor | None], **chosen: Any) -> torch.Tensor:
    """Update the vectors. Returns the norm of the gradients before they were clipped."""
    return adamw_step(*(vectors[name] for name in ("params", "grads", "means", "variances")), norm=norm(), **chosen)
