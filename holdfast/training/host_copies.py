"""HostCopies: the vectors of jobs in the host's memory of a rank that stores nothing: rank 0 stores all."""

from __future__ import annotations

from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch

from holdfast.lm.models.halves import AdapterLayout
from holdfast.training.call_files import JobFiles
from holdfast.training.done import Done
from holdfast.training.jobs import TrainingJob
from holdfast.training.state import State
from holdfast.training.storage import STORED, Report, Steps, StoredJob, Vectors, copy_all, pinned, state_of


class HostCopies:
    """`storage.Storage` for a rank that computes a part of each job. Its vectors go to the host with the job.

    One thread makes the calls of slices. `open` may run in any thread.
    """

    has_reports = False

    def __init__(
        self, device: torch.device, *, layers: range, mirror: Path | None, pinning: AbstractContextManager[object]
    ) -> None:
        """`layers` are those of this rank, by their numbers in the whole model. For the others, see `Storage`."""
        self._device, self._layers, self._mirror, self._pinning = device, layers, mirror, pinning

    def read(self, job: TrainingJob, directory: Path, layout: AdapterLayout) -> State:
        """The newest state of a job, as rank 0 finds it while the job does not run."""
        return state_of(job, directory, layout, self._mirror)

    def open(self, directory: Path, steps: Steps, layout: AdapterLayout, state: State, files: JobFiles) -> StoredJob:
        """Take a job with the state that `read` has found."""
        with self._pinning:
            host = {name: pinned(vector, self._device) for name, vector in zip(STORED, state.vectors, strict=True)}
        return StoredJob(directory, steps, layout, host, {}, state.ledger, state.step, state.step, files)

    def keeps_up(self, stored: StoredJob, *, changes: bool) -> bool:
        """Whether the next step may begin. Rank 0 decides that."""
        return True

    def end_step(self, stored: StoredJob, done: Done[Any], *, changes: bool) -> None:
        """Count the current step."""
        stored.step += 1
        if changes:
            stored.changed_step = stored.step

    def pass_over(self, stored: StoredJob, done: Done[Any]) -> None:
        """Count a step that has nothing to compute."""
        stored.step += 1

    def flush(self, stored: StoredJob, vectors: Vectors | None) -> None:
        """Do nothing: nothing is stored here."""

    def copy(self, stored: StoredJob, vectors: Vectors | None, share: float) -> None:
        """Do nothing: the vectors are copied when the job leaves the device."""

    def before_update(self, stored: StoredJob, vectors: Vectors) -> None:
        """Do nothing."""

    def after_copies(self, stored: StoredJob) -> None:
        """Do nothing: copies are on the stream of the slices."""

    def store(self, stored: StoredJob, vectors: Vectors | None) -> None:
        """Copy the vectors at the end of the last step to the host, if they are not there."""
        if vectors is None or stored.host_step == stored.changed_step:
            return
        with torch.no_grad():
            for name in STORED:
                own = stored.layout.split(stored.host[name])[self._layers.start : self._layers.stop]
                copy_all(vectors[name], own)
        stored.host_step = stored.changed_step

    def settled(self, stored: StoredJob) -> bool:
        """Whether everything due is stored."""
        return True

    def close(self, stored: StoredJob, vectors: Vectors | None) -> None:
        """Do nothing."""

    def discard(self, stored: StoredJob) -> None:
        """Do nothing: rank 0 deletes the states."""

    def reports(self) -> list[Report]:
        """No report: rank 0 has them."""
        return []

    def wait(self, stored: StoredJob | None = None) -> None:
        """Do nothing: nothing is written."""

    def shut_down(self) -> None:
        """Do nothing."""
