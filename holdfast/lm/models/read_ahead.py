"""Read a checkpoint's files ahead, several at a time, so that later reads find them in the page cache."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from queue import Empty, SimpleQueue

from holdfast.files.regular import open_file

READERS = 4
"""Number of files that are read at a time. One alone does not keep an SSD or a network file system busy."""
BLOCK = 16 << 20
"""Bytes of one read."""


@contextmanager
def read_ahead(paths: Sequence[Path], share: int = 0, shares: int = 1) -> Iterator[None]:
    """Within this context, threads read these files into the page cache, from the first on.

    Nothing waits for the threads.

    If `shares` processes on one host read the same files, each reads its own `share`. Nothing is read ahead if the
    files would take more than half of the free memory, because they would evict each other. A file that cannot be read
    is skipped; the loader reports it.
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
