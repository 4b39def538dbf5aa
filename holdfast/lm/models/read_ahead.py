"""Reading a checkpoint's files ahead, several at a time, so that tensors are found in the page cache."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from queue import Empty, SimpleQueue

from holdfast.files.regular import open_file

READERS = 4
"""Files that are read at a time: one alone does not keep an SSD or a network file system busy."""
BLOCK = 16 << 20
"""Bytes of one read."""


@contextmanager
def read_ahead(paths: Sequence[Path], share: int = 0, shares: int = 1) -> Iterator[None]:
    """Within, threads read these files from the first on, for the kernel to keep; nothing waits for them.

    Of `shares` processes on one host that read the same files, each reads its own `share`. Files are left alone that
    would take more than half of the free memory: they would drive each other out. A file that cannot be read is left
    to whoever needs it.
    """
    paths = [path for path in paths if path.exists()]
    total = sum(path.stat().st_size for path in paths)
    free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    own = paths[share::shares] if len(paths) > 1 and total <= free // 2 else []
    waiting: SimpleQueue[Path] = SimpleQueue()
    for path in own:
        waiting.put(path)
    ended = threading.Event()
    threads = [
        threading.Thread(target=_read, args=(waiting, ended), name="holdfast-read-ahead", daemon=True)
        for _ in range(min(READERS, len(own)))
    ]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        ended.set()
        for thread in threads:
            thread.join()


def _read(waiting: SimpleQueue[Path], ended: threading.Event) -> None:
    room = bytearray(BLOCK)
    while not ended.is_set():
        try:
            path = waiting.get_nowait()
        except Empty:
            return
        try:
            with open_file(path) as file:
                while not ended.is_set() and file.readinto(room):
                    pass
        except OSError:
            continue
