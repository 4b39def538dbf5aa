"""Saved states of driven jobs: the parameters, moments and number of updates that a call saves and another one loads.

A saved state is a directory with one file. It may be loaded by any job over the same base model whose adapter has the
same shape.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np
import torch

from holdfast.files.regular import sync_directory
from holdfast.training.framed import read_framed, write_framed
from holdfast.training.jobs import TrainingJob

SAVED_FILE = "state.bin"
SAVED = b"HFSAVED1"


class SavedShape(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The values that a job must have in common with a saved state to load it."""

    base_digest: str
    rank: int
    alpha: float
    modules: tuple[str, ...]

    @classmethod
    def of(cls, job: TrainingJob) -> SavedShape:
        """The shape of a job's states."""
        chosen = job.hyperparameters
        return cls(job.base_digest, chosen.rank, chosen.alpha, chosen.modules)


class _Header(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    shape: SavedShape
    updates: int
    elements: int
    """Number of elements of each vector."""


@dataclass(frozen=True, eq=False)
class Saved:
    """A saved state in the host's memory."""

    updates: int
    """Number of updates that the moments rest on."""
    params: torch.Tensor  # [elements] float32
    means: torch.Tensor
    variances: torch.Tensor

    def without_moments(self) -> Saved:
        """The parameters alone: moments and updates begin at zero."""
        return Saved(0, self.params, torch.zeros_like(self.means), torch.zeros_like(self.variances))


def write_saved(directory: Path, shape: SavedShape, saved: Saved) -> None:
    """Write a state to a directory, which appears whole, and is on the disk when this returns. Raises OSError."""
    header = msgspec.json.encode(_Header(shape, saved.updates, saved.params.numel()))
    arrays = [vector.numpy().astype("<f4", copy=False) for vector in (saved.params, saved.means, saved.variances)]
    write_whole(
        directory, lambda place: write_framed(place / SAVED_FILE, SAVED, header, arrays, durable=True)
    )  # fmt: skip


def read_saved(directory: Path, shape: SavedShape, elements: int) -> Saved:
    """Read a state from a directory.

    Raises ValueError, without the directory's name, if there is none or if it is damaged or of another shape.
    """
    try:
        text, body = read_framed(directory / SAVED_FILE, SAVED)
        header = msgspec.json.decode(text, type=_Header)
    except (OSError, msgspec.MsgspecError) as error:
        raise ValueError(f"the saved state cannot be read: {getattr(error, 'strerror', None) or error}") from None
    for name in SavedShape.__struct_fields__:
        theirs, ours = getattr(header.shape, name), getattr(shape, name)
        if theirs != ours:
            raise ValueError(f"{name} of the saved state is {theirs}; the job's is {ours}")
    if header.elements != elements or len(body) != 3 * 4 * elements or header.updates < 0:
        raise ValueError(f"the saved state is damaged: {len(body)} bytes for {elements} parameters")
    params, means, variances = (torch.from_numpy(part.copy()) for part in np.split(body.view("<f4"), 3))
    return Saved(header.updates, params, means, variances)


def write_whole(directory: Path, write: Callable[[Path], None]) -> None:
    """Let `write` fill a directory that appears whole, in place of an earlier one with that name."""
    partial = directory.with_name(f".{directory.name}.{os.getpid()}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(mode=0o700)
    try:
        write(partial)
        if directory.exists():
            shutil.rmtree(directory)  # a save is repeated after a crash, with the same bytes
        partial.rename(directory)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    sync_directory(directory.parent)
