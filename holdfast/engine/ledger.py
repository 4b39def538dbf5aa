"""DeviceLedger: a page of memory in which a language model reports its work to other processes on its device."""

from __future__ import annotations

import mmap
import os
import struct
import tempfile
from pathlib import Path
from typing import NamedTuple

SHARED_MEMORY = Path("/dev/shm")
FIELDS = struct.Struct("=ddd")
NO_GPU = 0.0


class DeviceNews(NamedTuple):
    """The last news of a language model. Times are those of `time.monotonic`, which processes of a host share."""

    working_until: float
    """The model has work until then, as far as is known."""
    late_until: float
    """Its streams are behind their target until then."""
    gpus: float
    """Number of GPUs that it computes on, counted from the first; NO_GPU: it computes on the CPU."""


class DeviceLedger:
    """The page, mapped into this process. One process writes it; others read it.

    A reader may see one field newer than another. That is as good as reading a moment later.
    """

    def __init__(self, path: str) -> None:
        """Map the page at a path that `make_ledger` gave. Raises OSError."""
        with Path(path).open("r+b") as file:
            self._page = mmap.mmap(file.fileno(), FIELDS.size)

    def write(self, news: DeviceNews) -> None:
        """Replace the news."""
        FIELDS.pack_into(self._page, 0, *news)

    def read(self) -> DeviceNews:
        return DeviceNews(*FIELDS.unpack_from(self._page))

    def close(self) -> None:
        self._page.close()


def make_ledger() -> str:
    """Make an empty page in the host's memory. Returns its path, which only this user may open. Raises OSError."""
    place = SHARED_MEMORY if SHARED_MEMORY.is_dir() else None
    file, path = tempfile.mkstemp(prefix="holdfast-device-", dir=place)
    with os.fdopen(file, "wb") as opened:
        opened.write(bytes(FIELDS.size))
    return path
