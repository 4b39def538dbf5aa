"""Temporary directories of servers. What a killed server left is deleted by the next one that makes its own."""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
import weakref
from pathlib import Path

from holdfast.files.regular import open_directory, open_regular

PREFIX = "holdfast-files-"


class Scratch:
    """A directory for one server, which holds a lock on it. The system releases the lock when the process ends."""

    def __init__(self) -> None:
        """Raises OSError."""
        drop_left(Path(tempfile.gettempdir()))
        while True:
            self.directory = Path(tempfile.mkdtemp(prefix=PREFIX))
            try:
                lock = open_directory(self.directory)
            except FileNotFoundError:
                continue  # another server took it for one that was left
            fcntl.flock(lock, fcntl.LOCK_EX)
            if self.directory.exists():  # whoever takes it for one that was left locks it while it is deleted
                break
            os.close(lock)
        self.remove = weakref.finalize(self, _remove, self.directory, lock)
        """Deletes the directory; once, and at the process's end at the latest."""


def _remove(directory: Path, lock: int) -> None:
    shutil.rmtree(directory, ignore_errors=True)
    os.close(lock)


def drop_left(parent: Path) -> None:
    """Delete the directories of servers of this user that were killed. What cannot be deleted stays."""
    for path in parent.glob(f"{PREFIX}*"):
        try:
            lock = open_directory(path)
        except OSError:
            continue  # another user's, a link, no directory, or gone
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
    """Lock a file or directory without waiting; whether nobody else had it locked. Closing it releases the lock."""
    try:
        fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True
