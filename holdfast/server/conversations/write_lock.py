"""The write lock of a SQLite file: processes write in turn, in about the order in which they asked.

SQLite's own lock is not fair: a writer that waits looks again after a pause that grows to 100 ms, and gives up after
some seconds, although other writers got the lock meanwhile. So each writer takes this lock first, where the system
wakes it. The system also releases the lock of a process that was killed.
"""

from __future__ import annotations

import fcntl
import os
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Protocol

from holdfast.files.regular import open_regular


class WriteLock(Protocol):
    """Keeps the writers of one database apart."""

    def held(self) -> AbstractContextManager[None]:
        """Wait for the lock, and hold it within the context. Raises OSError."""

    def close(self) -> None:
        """Close the lock's files."""


class NoLock:
    """The lock of a database that keeps its writers apart by itself."""

    def held(self) -> AbstractContextManager[None]:
        return nullcontext()

    def close(self) -> None:
        pass


class FileLock:
    """Lock made of two empty files next to the database: the line, and the turn.

    A writer waits for the turn while it holds the line. A writer that just had the turn must ask for the line again, so
    it cannot have two turns while another one waits.
    """

    def __init__(self, database: Path) -> None:
        """The files are opened at the first write, because a reader needs none."""
        self._paths = [database.with_name(f"{database.name}-{name}") for name in ("line", "turn")]
        self._files: list[int] = []
        """Descriptors of the line and the turn, once they are open."""
        self._mutex = threading.Lock()
        """Keeps the threads of this process apart, because a file's lock belongs to its descriptor."""

    @contextmanager
    def held(self) -> Iterator[None]:
        with self._mutex:
            if not self._files:
                self._files = [open_regular(path, os.O_RDWR | os.O_CREAT) for path in self._paths]
            line, turn = self._files
            fcntl.flock(line, fcntl.LOCK_EX)
            try:
                fcntl.flock(turn, fcntl.LOCK_EX)
            finally:
                fcntl.flock(line, fcntl.LOCK_UN)
            try:
                yield
            finally:
                fcntl.flock(turn, fcntl.LOCK_UN)

    def close(self) -> None:
        with self._mutex:
            files, self._files = self._files, []
        for file in files:
            os.close(file)
