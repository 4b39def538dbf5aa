"""The files of a driven job's calls as the engine keeps them: which calls were refused, and which files may go.

DIRECTORY/calls/00000007.refused      the reason why call 7 was refused: it changes nothing, for ever
"""

from __future__ import annotations

import math
import os
import shutil
from pathlib import Path

from holdfast.files.regular import create_file, open_file, read_text, sync_directory
from holdfast.training.calls import CALLS, RESULTS, call_numbers, call_path, delete_calls, result_path

REASON_CHARACTERS = 500
"""Most characters of a reason that is kept."""


class JobFiles:
    """The files that come and go with the steps of a job. A job over files has none."""

    def sync(self, stop: int) -> None:
        """Before a state of `stop` steps is on the disk: bring there what it replaces."""

    def forget(self, stop: int) -> None:
        """After a state of `stop` steps is on the disk: delete what it replaces."""

    def remove(self) -> None:
        """Delete all of them."""


class CallFiles(JobFiles):
    """The files of a driven job's calls and results. For one thread, but for `read_by_all`.

    A call's file may go once a state on the disk includes the call, and all ranks have read it. The result must then be
    on the disk, because nothing computes it again.
    """

    def __init__(self, directory: Path, done: int, *, followed: bool = False) -> None:
        """`done` is the number of calls that the newest state includes, which may be in the host's memory only.

        A result may not be on the disk while its call has a file. `followed` says whether other ranks read the calls.
        """
        self._directory, self._synced = directory, min(call_numbers(directory), default=done)
        self._read: float = done if followed else math.inf
        """The number of the first call that another rank may still have to read."""

    def read_by_all(self, stop: int) -> None:
        """Record that all ranks have read the calls before number `stop`."""
        self._read = stop if self._read < stop else self._read

    def sync(self, stop: int) -> None:
        for number in range(self._synced, stop):
            path = result_path(self._directory, number)
            if path.exists():
                with open_file(path) as file:
                    os.fsync(file.fileno())
        if stop > self._synced and (self._directory / RESULTS).exists():
            sync_directory(self._directory / RESULTS)
        self._synced = max(stop, self._synced)

    def forget(self, stop: int) -> None:
        delete_calls(self._directory, int(min(stop, self._read)))

    def remove(self) -> None:
        for folder in (CALLS, RESULTS):
            shutil.rmtree(self._directory / folder, ignore_errors=True)


def refuse_call(directory: Path, number: int, reason: str) -> None:
    """Note for ever, on the disk, that a call was refused, with the reason in one line."""
    path = _refusal_path(directory, number)
    partial = path.with_name(f".{path.name}.partial")
    with create_file(partial) as file:
        file.write(" ".join(reason.split())[:REASON_CHARACTERS].encode())
        file.flush()
        os.fsync(file.fileno())
    partial.replace(path)
    sync_directory(path.parent)


def refusal_of(directory: Path, number: int) -> str:
    """The reason why a call was refused; empty if it was not."""
    try:
        return read_text(_refusal_path(directory, number)) or "it was refused"
    except FileNotFoundError:
        return ""


def calls_from(directory: Path, first: int) -> int:
    """The number after the last call that has a file, or was refused, without a gap from `first` on."""
    number = first
    while call_path(directory, number).exists() or _refusal_path(directory, number).exists():
        number += 1
    return number


def _refusal_path(directory: Path, number: int) -> Path:
    return call_path(directory, number).with_suffix(".refused")
