"""Locks by which servers show that they run. The system releases a lock when its process ends, in whatever way.

An `Owner` holds a lock on a file, so that other servers continue its work only after its end. A `Scratch` is a
temporary directory with a lock. The next server deletes those that a killed server left.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
import uuid
import weakref
from pathlib import Path

from holdfast.files.regular import open_directory, open_regular

PREFIX = "holdfast-files-"


class Owner:
    """This server, among those that share a directory of files."""

    def __init__(self, directory: Path) -> None:
        """Raises OSError if the lock's file cannot be created."""
        self.id = f"owner-{uuid.uuid4().hex}"
        self._directory = directory
        self._held: int | None = open_regular(directory / self.id, os.O_RDWR | os.O_CREAT | os.O_EXCL)
        fcntl.flock(self._held, fcntl.LOCK_EX | fcntl.LOCK_NB)

    def gone(self, other: str) -> bool:
        """Whether another server has ended. Removes its file if so."""
        path = self._directory / other
        try:
            descriptor = open_regular(path, os.O_RDWR | os.O_NOFOLLOW)
        except FileNotFoundError:
            return True
        try:
            if not _take(descriptor):
                return False
        finally:
            os.close(descriptor)
        path.unlink(missing_ok=True)
        return True

    def close(self) -> None:
        """Release the lock, so that other servers may take over unfinished work."""
        if self._held is not None:
            (self._directory / self.id).unlink(missing_ok=True)
            os.close(self._held)
            self._held = None


class Scratch:
    """A directory for one server, which holds a lock on it. The system releases the lock when the process ends."""

    def __init__(self) -> None:
        """Raises OSError if the directory cannot be created."""
        drop_left(Path(tempfile.gettempdir()))
        while True:
            self.directory = Path(tempfile.mkdtemp(prefix=PREFIX))
            try:
                lock = open_directory(self.directory)
            except FileNotFoundError:
                continue  # Another server took it for an abandoned one.
            fcntl.flock(lock, fcntl.LOCK_EX)
            if self.directory.exists():  # A server that takes it for an abandoned one locks it while deleting it.
                break
            os.close(lock)
        self.remove = weakref.finalize(self, _remove, self.directory, lock)
        """Deletes the directory, once, and at the process's end at the latest."""


def _remove(directory: Path, lock: int) -> None:
    shutil.rmtree(directory, ignore_errors=True)
    os.close(lock)


def drop_left(parent: Path) -> None:
    """Delete the directories of this user's killed servers. Directories that cannot be deleted stay."""
    for path in parent.glob(f"{PREFIX}*"):
        try:
            lock = open_directory(path)
        except OSError:
            continue  # Another user's, a link, no directory, or gone.
        try:
            if os.fstat(lock).st_uid != os.geteuid() or not _take(lock):
                continue
            if not any(map(_locked, path.glob("owner-*"))):
                shutil.rmtree(path, ignore_errors=True)
        finally:
            os.close(lock)


def _locked(path: Path) -> bool:
    """Whether a running server holds a lock on a file."""
    try:
        opened = open_regular(path, os.O_RDONLY | os.O_NOFOLLOW)
    except OSError:
        return False
    try:
        return not _take(opened)
    finally:
        os.close(opened)


def _take(opened: int) -> bool:
    """Try to lock a file or directory without waiting. Returns whether it succeeded. Closing it releases the lock."""
    try:
        fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True
