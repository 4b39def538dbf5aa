"""A job's state: its vectors on the host, and the files from which a killed engine resumes.

A state replaces the older of two files as a whole, and the newer file stays. So at any moment at least one file of each
directory is complete. The newest complete file of all directories counts.
"""

from __future__ import annotations

import errno
import logging
import os
import shutil
import stat
import struct
import time
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import torch

from holdfast.files.regular import create_file, open_file, read_bytes, read_text, sync_directory
from holdfast.training.jobs import TrainingJob

MAGIC = b"HFSTATE1"
HEADER = struct.Struct("<8sI32sQQ")
"""Magic, CRC-32 of all that follows it, digest of the job, number of steps done, number of elements of a vector."""
HEADER_CRC_END = len(MAGIC) + 4
"""The offset at which the part covered by the checksum begins."""
RECORD = np.dtype([("loss", "<f8"), ("validation", "<f8"), ("tokens", "<u8")])
NAMES = ("a", "b")
"""Names of a job's two state files."""
HOME = "home"
"""Name of the file, next to states in the host's memory, that names the job's directory."""
JOB_FILE = "job.json"
SHARED_MEMORY = Path("/dev/shm")
"""A file system in the host's memory. Its files survive the engine, but not the host."""
MIRROR_SECONDS = 7 * 86_400.0
"""Seconds without a change after which states in the host's memory are deleted."""

log = logging.getLogger("holdfast.engine")


class StepRecord(NamedTuple):
    """The results of one optimizer step."""

    loss: float
    """The mean loss over the step's weighted tokens, before the update."""
    validation: float | None
    """The mean loss of the validation that followed the update; None without one."""
    tokens: int
    """Number of tokens that the step trained on."""


class Ledger(Protocol):
    """The steps that a state includes."""

    @property
    def step(self) -> int:
        """Number of steps done, which is also the number of the next step."""
        ...

    @property
    def updates(self) -> int:
        """Number of updates of the parameters."""
        ...

    @property
    def records(self) -> tuple[StepRecord, ...]:
        """The results of steps that the ledger holds."""
        ...

    def packed(self) -> bytes:
        """The ledger as it stands in a file. Its size follows from `step`."""
        ...


@dataclass(frozen=True, eq=False)
class StepRows:
    """The ledger of a job over files: the results of all its steps. Each step is one update."""

    rows: npt.NDArray[np.void]
    """One RECORD for each step that is done. A long job has many, and each state holds them all."""

    @property
    def step(self) -> int:
        return len(self.rows)

    @property
    def updates(self) -> int:
        return len(self.rows)

    @property
    def records(self) -> tuple[StepRecord, ...]:
        return tuple(
            StepRecord(loss, None if np.isnan(validation) else validation, tokens)
            for loss, validation, tokens in self.rows.tolist()
        )

    def then(self, record: StepRecord) -> StepRows:
        """The ledger with one step more."""
        return StepRows(np.concatenate((self.rows, rows_of([record]).rows)))

    def packed(self) -> bytes:
        return self.rows.tobytes()

    @staticmethod
    def size(step: int) -> int:
        """Number of bytes of `packed`."""
        return step * RECORD.itemsize

    @classmethod
    def unpack(cls, step: int, data: bytes) -> StepRows:
        """The ledger in these bytes."""
        return cls(np.frombuffer(data, RECORD, step).copy())


@dataclass(frozen=True)
class CallCounts:
    """The ledger of a driven job. Results of calls are in files of their own."""

    step: int = 0
    """Number of calls up to the last one that changed the vectors. Later ones are computed again after a crash."""
    updates: int = 0
    records: tuple[()] = ()

    def packed(self) -> bytes:
        return struct.pack("<Q", self.updates)

    @staticmethod
    def size(step: int) -> int:
        """Number of bytes of `packed`."""
        return 8

    @classmethod
    def unpack(cls, step: int, data: bytes) -> CallCounts:
        """The ledger in these bytes, of a state of `step` calls."""
        return cls(step, *struct.unpack("<Q", data))


@dataclass(frozen=True, eq=False)
class State:
    """A job's state after some steps."""

    ledger: StepRows | CallCounts
    params: torch.Tensor  # [elements] float32, on the host
    means: torch.Tensor
    variances: torch.Tensor

    @property
    def step(self) -> int:
        """Number of steps done, which is also the number of the next step."""
        return self.ledger.step

    @property
    def records(self) -> tuple[StepRecord, ...]:
        """The results of the steps that are done; none for a driven job."""
        return self.ledger.records

    @property
    def vectors(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        return self.params, self.means, self.variances


class StateFiles:
    """The state files of one job in one directory."""

    def __init__(
        self,
        directory: Path,
        job: bytes,
        *,
        durable: bool,
        ledger: type[StepRows] | type[CallCounts] = StepRows,
        home: Path | None = None,
    ) -> None:
        """`job` is the digest of the job, which has ledgers of this kind. A `durable` write is on the disk when it
        returns. `home` is the job's directory if the files are in another one: they are of no use without it, and the
        first write notes it."""
        self.directory, self._job, self._durable, self._ledger, self._home = directory, job, durable, ledger, home

    def write(self, state: State) -> None:
        """Replace the older file. Raises OSError if there is no space; both files are then unchanged."""
        self.directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        if self._home is not None:
            partial = self.directory / f".{HOME}.{os.getpid()}.partial"
            partial.write_text(str(self._home.absolute()))
            partial.replace(self.directory / HOME)
            self._home = None
        steps = [self._step(self._path(name)) for name in NAMES]
        target = self._path(NAMES[steps.index(min(steps))])
        partial = self.directory / f".state.{os.getpid()}.partial"
        parts: list[bytes | memoryview] = [
            HEADER.pack(MAGIC, 0, self._job, state.step, state.params.numel())[HEADER_CRC_END:]
        ]
        parts += [state.ledger.packed(), *(_bytes(vector) for vector in state.vectors)]
        checksum = 0
        for part in parts:
            checksum = zlib.crc32(part, checksum)
        try:
            with create_file(partial) as file:
                file.write(MAGIC + struct.pack("<I", checksum))
                for part in parts:
                    file.write(part)
                if self._durable:
                    file.flush()
                    os.fsync(file.fileno())
            partial.replace(target)
        finally:
            partial.unlink(missing_ok=True)
        if self._durable:
            sync_directory(self.directory)

    def read(self) -> State | None:
        """The newest complete state; None if there is none."""
        found = sorted((self._path(name) for name in NAMES), key=self._step, reverse=True)
        return next((state for path in found if (state := self._read(path)) is not None), None)

    def remove(self) -> None:
        """Delete the files."""
        for name in NAMES:
            self._path(name).unlink(missing_ok=True)

    def _path(self, name: str) -> Path:
        return self.directory / f"state.{name}"

    def _step(self, path: Path) -> int:
        """The number of steps done in a file's header; -1 if the file is not a state of this job."""
        try:
            with open_file(path) as file:
                header = file.read(HEADER.size)
        except OSError:
            return -1
        if len(header) < HEADER.size:
            return -1
        magic, _, job, step, _ = HEADER.unpack(header)
        return int(step) if (magic, job) == (MAGIC, self._job) else -1

    def _read(self, path: Path) -> State | None:
        """The state in a file, if the file is complete and unchanged; else None."""
        try:
            data = read_bytes(path)
        except OSError:
            return None
        if len(data) < HEADER.size:
            return None
        magic, checksum, job, step, count = HEADER.unpack_from(data)
        vectors_at = HEADER.size + self._ledger.size(step)
        if (magic, job) != (MAGIC, self._job) or len(data) != vectors_at + 3 * 4 * count:
            return None
        if zlib.crc32(memoryview(data)[HEADER_CRC_END:]) != checksum:
            return None
        ledger = self._ledger.unpack(step, data[HEADER.size : vectors_at])
        numbers = np.frombuffer(data, "<f4", 3 * count, vectors_at)
        params, means, variances = (torch.from_numpy(part.copy()) for part in np.split(numbers, 3))
        return State(ledger, params, means, variances)


def newest(files: Iterable[StateFiles]) -> State | None:
    """The state with the most steps among several directories; None if there is no state."""
    states = [state for each in files if (state := each.read()) is not None]
    return max(states, key=lambda state: state.step, default=None)


def mirror_directory(chosen: str) -> Path | None:
    """The directory of states in the host's memory, for this user alone; None if there is none.

    Created if it is missing.

    Raises ValueError for a given directory that cannot be used.
    """
    if chosen == "off" or (chosen == "auto" and not SHARED_MEMORY.is_dir()):
        return None
    path = SHARED_MEMORY / f"holdfast-{os.getuid()}" if chosen == "auto" else Path(chosen)
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = path.lstat()
        if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o022:
            raise PermissionError(errno.EACCES, "it is a link, or others may write to it")
    except OSError as error:
        if chosen != "auto":
            raise ValueError(f"tuning_mirror {chosen} cannot be used: {error.strerror}") from None
        log.warning("holdfast: states of tuning jobs go to the disk only: %s", error.strerror)
        return None
    for job in path.iterdir():
        # No engine has resumed from this state of a killed one. The disk has a state that is at most a minute older.
        if job.is_dir() and not job.is_symlink() and time.time() - job.stat().st_mtime > MIRROR_SECONDS:
            shutil.rmtree(job, ignore_errors=True)
    return path


def clear_mirror(mirror: Path) -> None:
    """Delete the states of jobs whose directory is gone.

    A killed engine leaves the states of its jobs. Their owner may end a job that no engine has resumed, and delete its
    directory.
    """
    for job in mirror.iterdir() if mirror.is_dir() else ():
        if not job.is_symlink() and _home_is_gone(job):
            shutil.rmtree(job, ignore_errors=True)


def _home_is_gone(states: Path) -> bool:
    """Whether the job of these states has no directory any more, or one that is no job's."""
    try:
        home = Path(read_text(states / HOME))
    except (OSError, ValueError):
        return False
    return home.is_absolute() and not (home / JOB_FILE).exists()


def write_job(directory: Path, job: TrainingJob) -> None:
    """Write a job's values to job.json in its directory. Raises FileExistsError if the directory already has a job."""
    path, partial = directory / JOB_FILE, directory / f".{JOB_FILE}.partial"
    if path.exists():
        raise FileExistsError(f"{directory.name} holds a job already")
    with create_file(partial) as file:
        file.write(f"{job.to_json()}\n".encode())
        file.flush()
        os.fsync(file.fileno())
    partial.replace(path)
    sync_directory(directory)


def read_job(directory: Path) -> TrainingJob:
    """The job of a directory. Raises ValueError if its job.json is invalid, and FileNotFoundError if there is none."""
    return TrainingJob.from_json(read_text(directory / JOB_FILE))


def rows_of(records: Sequence[StepRecord]) -> StepRows:
    """The ledger of steps with these records."""
    values = [(loss, np.nan if validation is None else validation, tokens) for loss, validation, tokens in records]
    return StepRows(np.array(values, RECORD))


def new_ledger(job: TrainingJob) -> StepRows | CallCounts:
    """The ledger of a job that has done nothing."""
    return CallCounts() if job.driven else rows_of(())


def _bytes(vector: torch.Tensor) -> memoryview:
    """A float32 vector on the host, as bytes in place."""
    return memoryview(vector.numpy().astype("<f4", copy=False).data).cast("B")
