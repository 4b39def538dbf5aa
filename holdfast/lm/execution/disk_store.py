"""DiskStore: blocks of the KV cache, or pieces of rows' states, in two files with fixed places.

They survive the engine, also if it is killed.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import re
import shutil
import struct
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from holdfast.files.own_directory import OwnDirectory
from holdfast.lm.tiers import (
    ABOUT,
    NO_STATE,
    Outcome,
    Pieces,
    StateAbout,
    StoredBlock,
    StoredState,
    TierBlock,
    checksum_of,
)

FORMAT = 3
"""Version of the file format. Increase it whenever the bytes in the files change their meaning."""
ENTRY = struct.Struct("<4sI32sQd")
"""Format of the entry of a place in use: MAGIC, the block's place in its sequence, its digest, checksum and last use.

The last use is in seconds since the epoch. The lower half of the entry's own checksum follows.
"""
MAGIC = b"HFKV"
ENTRY_BYTES = 64
PAGE = 4096
RUN_BYTES = 1 << 20
"""Approximate size of one read or write: large enough for a disk's full rate, small enough to check some blocks while
others are read."""
MOST_PIECES = 1024
"""Largest number of memory pieces in one read or write, which is Linux's limit."""
LEAST_LEFT = 1 << 30
"""Bytes of the file system that are left for other programs."""
IDENTITY = re.compile(r"kv-[0-9a-f]{32}")
OPEN = os.O_RDWR | os.O_CREAT


class DiskStore:
    """Blocks by their places, in a directory that only this engine uses (`OwnDirectory`).

    PATH/lock                 held while an engine uses the directory
    PATH/kv-IDENTITY/about    describes the identity, for people
    PATH/kv-IDENTITY/index    an entry of 64 bytes for each place
    PATH/kv-IDENTITY/blocks   the blocks, each at a multiple of 4 KiB

    An entry is cleared before its place is written to, and made when the block is complete. It has a checksum of the
    block and of the fields that identify it, and each read compares that checksum. So a kill at any moment leaves a
    place either empty or whole. Nothing is synced: pages that a power failure leaves unwritten are found by the same
    checksums when they are read, and their blocks are computed again.

    The identity is made from model, types, layout, block size and version. Each identity has its own subdirectory.
    Files of other identities are removed, so the directory stays within its size.

    Places that follow each other are read or written by one system call. Several threads do so; no place is written
    while another thread uses it.
    """

    def __init__(
        self, directory: Path, size: int, block_bytes: int, identity: dict[str, str], *, besides: int = 0
    ) -> None:
        """Open or make a store of at most `size` bytes. Another store below its files will take `besides` bytes.

        Raises ValueError for a directory that is in use, cannot hold this much, or can be written to by another user.
        Also raises it if a link, a pipe or another user's file has the name of one of these files.
        """
        self.block_bytes = block_bytes
        self._stride = -(-block_bytes // PAGE) * PAGE
        self.num_blocks = size // (self._stride + ENTRY_BYTES)
        if self.num_blocks < 1:
            raise ValueError(
                f"disk_cache_gb is {size / 1e9}, and a block takes {self._stride / 1e9:.6f}; give it room for one"
            )
        described = {**identity, "format": str(FORMAT), "block bytes": str(block_bytes)}
        about = json.dumps(described, indent=1, sort_keys=True)
        name = f"kv-{hashlib.sha256(about.encode()).hexdigest()[:32]}"
        self.directory = directory / name
        """Directory of the store's files."""
        try:
            with OwnDirectory(directory) as own, closing_on_error() as descriptors:
                descriptors.append(own.open("lock", OPEN))
                lock(descriptors[0], directory)
                self._open(own, size, besides, name, about, descriptors)
        except OSError as error:
            raise unusable(directory, error) from None
        self._lock, self._index, self._blocks = descriptors
        self._sums: list[int | None] = [None] * self.num_blocks
        """The checksum of each place; None for a place that is not in use."""
        self._gap = memoryview(bytearray(self._stride - block_bytes))
        """Bytes that fill the gap between two blocks. They are never read."""
        self.closed = threading.Event()

    def _open(
        self, directory: OwnDirectory, size: int, besides: int, name: str, about: str, descriptors: list[int]
    ) -> None:
        """Open the index and the blocks at their full sizes and add both descriptors. Raises ValueError and OSError."""
        for other in directory.names():
            if IDENTITY.fullmatch(other) and other != name:
                directory.remove_tree(other)
        with directory.below(name) as own:
            own.write_text("about", about + "\n")
            free = shutil.disk_usage(directory.path).free + own.bytes_on_disk()
            if size + besides > free - LEAST_LEFT:
                raise ValueError(
                    f"disk_cache_gb is {(size + besides) / 1e9}, and of the file system of {directory.path} "
                    f"{free / 1e9:.1f} GB are free, of which {LEAST_LEFT / 1e9:.1f} stay free; choose less"
                )
            for file, stride in (("index", ENTRY_BYTES), ("blocks", self._stride)):
                descriptors.append(own.open(file, OPEN))
                os.ftruncate(descriptors[-1], self.num_blocks * stride)

    def stored(self) -> list[StoredBlock]:
        """Blocks that the directory holds, the least recently used first. Reads only the index."""
        now, found = time.time(), []
        with open(self._index, "rb", closefd=False) as file:
            file.seek(0)
            index = file.read()
        for slot in range(len(index) // ENTRY_BYTES):
            entry = index[slot * ENTRY_BYTES : (slot + 1) * ENTRY_BYTES]
            if entry[:4] != MAGIC or entry[ENTRY.size : ENTRY.size + 4] != entry_checksum(entry[: ENTRY.size]):
                continue
            _, place, digest, checksum, used = ENTRY.unpack_from(entry)
            self._sums[slot] = checksum
            found.append(StoredBlock(slot, digest, place, max(0.0, now - used)))
        return sorted(found, key=lambda block: -block.age)

    def states(self) -> tuple[list[StoredState], int]:
        """States of rows that the directory holds, the least recently used first, and the number of damaged ones.

        The pieces of a state have one digest, and their places in it as places. Reads the index and the description of
        each state. The pieces of a state that is not whole are cleared.
        """
        found: dict[bytes, dict[int, StoredBlock]] = {}
        for block in self.stored():
            found.setdefault(block.digest, {})[block.place] = block
        states, damaged = list[StoredState](), 0
        for digest, pieces in found.items():
            slots = tuple(pieces[place].slot for place in range(len(pieces)) if place in pieces)
            try:
                about = self._about(slots) if len(slots) == len(pieces) else NO_STATE
                if about.pieces != len(slots) or not slots:
                    raise ValueError(f"there are {len(slots)} of {about.pieces} pieces")
            except (OSError, ValueError):
                damaged += 1
                for block in pieces.values():
                    self.clear(block.slot)
                continue
            states.append(StoredState(digest, slots, about, pieces[0].age))
        return states, damaged

    def _about(self, slots: Sequence[int]) -> StateAbout:
        """The description of the state in these places. Raises OSError, and ValueError if there is none."""
        start = os.pread(self._blocks, min(ABOUT.size, self.block_bytes), slots[0] * self._stride)
        pieces = -(-StateAbout.size_of(start) // self.block_bytes)
        return StateAbout.unpacked(
            b"".join([os.pread(self._blocks, self.block_bytes, slot * self._stride) for slot in slots[:pieces]])
        )

    def clear(self, slot: int) -> None:
        """Empty a place, as far as the disk lets it be written."""
        with contextlib.suppress(OSError):
            self._clear(slot)

    def write(self, blocks: Sequence[TierBlock], data: Sequence[Pieces], used: Sequence[float]) -> list[Outcome]:
        """Write blocks to their places. `used` is when each was last used, in seconds of `time.time`."""
        outcomes: list[Outcome] = ["failed"] * len(blocks)
        for first, run in self._runs(blocks, data):
            try:
                self._clear(first, len(run))
                sums = [block_checksum(blocks[at], data[at]) for at in run]
                pieces, size = self._pieces(data, run)
                if os.pwritev(self._blocks, pieces, first * self._stride) != size:
                    continue
                entries = [packed_entry(blocks[at], checksum, used[at]) for at, checksum in zip(run, sums, strict=True)]
                os.pwrite(self._index, b"".join(entries), first * ENTRY_BYTES)
            except OSError:
                continue
            self._sums[first : first + len(run)] = sums
            for at in run:
                outcomes[at] = "done"
        return outcomes

    def renew(self, blocks: Sequence[TierBlock], used: Sequence[float]) -> list[Outcome]:
        """Note when blocks were last used, in seconds of `time.time`. A place without its block is `missing`."""
        outcomes: list[Outcome] = []
        for block, at in zip(blocks, used, strict=True):
            checksum = self._sums[block.slot]
            if checksum is None:
                outcomes.append("missing")
                continue
            try:
                os.pwrite(self._index, packed_entry(block, checksum, at), block.slot * ENTRY_BYTES)
                outcomes.append("done")
            except OSError:
                outcomes.append("failed")
        return outcomes

    def read(self, blocks: Sequence[TierBlock], targets: Sequence[Pieces]) -> list[Outcome]:
        """Read each block into its target. If it is not `done`, its place is cleared and its target is undefined."""
        outcomes: list[Outcome] = ["failed"] * len(blocks)
        asked = [*self._runs(blocks, targets)]
        for first, run in asked:  # ask for all runs now, so that the device is busy while the first ones are checked
            with contextlib.suppress(OSError):
                os.posix_fadvise(self._blocks, first * self._stride, len(run) * self._stride, os.POSIX_FADV_WILLNEED)
        for first, run in asked:
            pieces, _ = self._pieces(targets, run)
            try:
                count = os.preadv(self._blocks, pieces, first * self._stride)
            except OSError:
                if len(run) > 1:  # some of these blocks may still be readable
                    for at in run:
                        (outcomes[at],) = self.read([blocks[at]], [targets[at]])
                continue
            for number, at in enumerate(run):
                whole = count >= number * self._stride + self.block_bytes
                if whole and block_checksum(blocks[at], targets[at]) == self._sums[first + number]:
                    outcomes[at] = "done"
                    continue
                outcomes[at] = "corrupt"
                self.clear(first + number)
        return outcomes

    def _runs(self, blocks: Sequence[TierBlock], data: Sequence[Pieces]) -> Iterator[tuple[int, list[int]]]:
        """Blocks whose places follow each other: the first place, and the indices of the blocks in order of place."""
        pieces = max(map(len, data), default=0) + 1  # a block may need another piece for the gap after it
        first, run, most = 0, list[int](), max(1, min(MOST_PIECES // pieces, RUN_BYTES // self._stride))
        for at in sorted(range(len(blocks)), key=lambda at: blocks[at].slot):
            slot = blocks[at].slot
            if run and (slot != first + len(run) or len(run) == most):
                yield first, run
                run = []
            if not run:
                first = slot
            run.append(at)
        if run:
            yield first, run

    def _pieces(self, data: Sequence[Pieces], run: Sequence[int]) -> tuple[list[memoryview], int]:
        """The memory of the blocks at `run` in the order of the file, and its size in bytes."""
        if not self._gap:
            return [piece for at in run for piece in data[at]], len(run) * self._stride
        pieces = [piece for at in run for piece in (*data[at], self._gap)][:-1]
        return pieces, len(run) * self._stride - len(self._gap)

    def _clear(self, first: int, count: int = 1) -> None:
        """Empty `count` places from the first on. Raises OSError."""
        self._sums[first : first + count] = [None] * count
        os.pwrite(self._index, bytes(count * ENTRY_BYTES), first * ENTRY_BYTES)

    def close(self) -> None:
        """Close the files and let another engine use the directory."""
        if not self.closed.is_set():
            self.closed.set()
            for descriptor in (self._index, self._blocks, self._lock):
                os.close(descriptor)


def lock(descriptor: int, directory: Path) -> None:
    """Hold the lock of a directory until the descriptor is closed. Raises ValueError if another engine holds it."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        raise ValueError(
            f"disk_cache_dir is {directory}, which another engine uses; give each engine a directory of its own"
        ) from None


@contextlib.contextmanager
def closing_on_error() -> Iterator[list[int]]:
    """A list of descriptors, which are closed if an error is raised within."""
    descriptors: list[int] = []
    try:
        yield descriptors
    except BaseException:
        for descriptor in descriptors:
            os.close(descriptor)
        raise


def unusable(directory: Path, error: OSError) -> ValueError:
    """The error for a directory that cannot be used, or for a file in it. It gives the reason, for people."""
    name = Path(os.fsdecode(error.filename or directory)).name
    inside = "" if name == directory.name else f"{name} in it: "
    return ValueError(f"disk_cache_dir is {directory}, which cannot be used: {inside}{error.strerror or error}")


def block_checksum(block: TierBlock, data: Pieces) -> int:
    """The checksum of the fields that identify a block, and of its bytes."""
    return checksum_of((block.place.to_bytes(4, "little") + block.digest, *data))


def packed_entry(block: TierBlock, checksum: int, used: float) -> bytes:
    """The entry of a place that holds this block, last used at `used` in seconds of `time.time`."""
    entry = ENTRY.pack(MAGIC, block.place, block.digest, checksum, used)
    return (entry + entry_checksum(entry)).ljust(ENTRY_BYTES, b"\0")


def entry_checksum(entry: bytes) -> bytes:
    """The checksum of an entry, as stored."""
    return struct.pack("<I", checksum_of((entry,)) & 0xFFFFFFFF)
