"""Shows which servers still run. Each holds a lock on a file, which the system releases when the process ends."""

from __future__ import annotations

import fcntl
import os
import uuid
from pathlib import Path

from holdfast.files.regular import open_regular


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
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
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
