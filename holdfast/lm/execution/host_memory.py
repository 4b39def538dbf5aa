"""HostMemory: the memory of the host tier, pinned slab by slab while the engine serves. HostBlocks: its bytes.

HostStates: the bytes of recurrent states on the host.
"""

from __future__ import annotations

import ctypes
import logging
import mmap
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch

from holdfast.lm.kernels.cache.kv_cache import KVCache
from holdfast.lm.tiers import Outcome, Pieces, TierJob

SLAB_BYTES = 1 << 26
"""Bytes that are pinned at a time. Other calls to the driver wait meanwhile: with slabs of 256 MiB, 10% of a stream's
tokens took over 25 ms."""
WAIT_SHARE = 9.0
"""Pause after a slab while steps run, as a multiple of the time of the slab: pinning gets a tenth of the time."""
SLOT_BYTES = 64
"""A slot for a recurrent state takes a multiple of this many bytes, so that the numbers of each state are aligned."""
HUGE_PAGES = 14
"""Linux's MADV_HUGEPAGE."""

log = logging.getLogger("holdfast.engine")


class HostMemory:
    """A cache in host memory, and the number of its blocks that can be used so far.

    Pinning 32 GB takes some 6 s while no step runs. A thread does it, so the first blocks can be used at once. Each
    slab holds up the launches of steps, so while steps run the thread rests between two slabs. If the system refuses,
    the memory pinned so far stays in use, and the log gives the reason.
    """

    def __init__(
        self,
        cache: KVCache,
        pin: Callable[[int, int], int] | None = None,
        unpin: Callable[[int], object] | None = None,
    ) -> None:
        """`cache` has each block in one piece (`by_block`).

        `pin` takes an address and a number of bytes and returns 0 or CUDA's error; `unpin` takes an address.
        """
        self.cache = cache
        self._pin, self._unpin = pin or cuda_pin, unpin or cuda_unpin
        self._bytes = cache.memory
        self._pinned: list[int] = []
        self._stop = threading.Event()
        self.pinning = threading.Lock()
        """Held while a slab is being pinned."""
        self.ready = 0
        """Number of blocks that can be used. It never falls."""
        self.blocks = cache.num_blocks
        """Number of blocks that can be used once all are pinned."""
        self._stepped = False
        """Whether a step began since the last slab was pinned."""
        self._thread = threading.Thread(target=self._pin_all, name="holdfast-host-memory", daemon=True)

    def begin(self) -> None:
        """Begin to pin."""
        self._thread.start()

    def note_step(self) -> None:
        """Note that a step begins."""
        self._stepped = True

    def wait(self) -> None:
        """Wait until no further block will become ready."""
        self._thread.join()

    def close(self) -> None:
        """Stop, at the latest once the slab in progress is pinned, and unpin everything. The device must be idle."""
        self._stop.set()
        if self._thread.ident is not None:
            self._thread.join()
        while self._pinned:
            self._unpin(self._pinned.pop())

    def _pin_all(self) -> None:
        block_bytes = len(self._bytes) // max(1, self.blocks)
        for start, stop in slabs(self._bytes.data_ptr(), len(self._bytes)):
            if self._stop.is_set():
                return
            self._stepped, began = False, time.monotonic()
            slab = self._bytes[start:stop]
            allow_huge_pages(slab)
            slab.zero_()  # several threads clear these pages; the driver would use one, and hold its locks meanwhile
            with self.pinning:
                error = self._pin(slab.data_ptr(), len(slab))
            if error:
                self.blocks = self.ready
                log.warning(
                    "holdfast: of %.1f GB for the host tier only %.1f could be pinned (CUDA error %d): raise the "
                    "limit on locked memory (ulimit -l), or lower --host-cache-gb",
                    len(self._bytes) / 1e9,
                    start / 1e9,
                    error,
                )
                return
            self._pinned.append(slab.data_ptr())
            self.ready = stop // block_bytes
            if self._stepped:
                self._stop.wait(WAIT_SHARE * (time.monotonic() - began))


class HostPart(NamedTuple):
    """One rank's share of the host tier's blocks."""

    data: memoryview
    """The bytes, block after block."""
    block_bytes: int

    @classmethod
    def of(cls, cache: KVCache) -> HostPart:
        """The blocks of a cache. Raises ValueError if a block is not in one piece."""
        return cls(cache.memory.numpy().data, cache.block_bytes)

    @classmethod
    def shared(cls, descriptor: int, num_blocks: int, block_bytes: int) -> HostPart:
        """The blocks of another process in `shared_memory`, laid out by that process. Raises OSError."""
        return cls(memoryview(mmap.mmap(descriptor, num_blocks * block_bytes)), block_bytes)


class StatesPart(NamedTuple):
    """One rank's share of the recurrent states on the host."""

    data: memoryview
    """The bytes, slot after slot. Each slot takes `slot_stride` bytes."""
    state_bytes: int

    @property
    def slots(self) -> int:
        """Number of slots."""
        return len(self.data) // slot_stride(self.state_bytes)

    @classmethod
    def shared(cls, descriptor: int, start: int, slots: int, state_bytes: int) -> StatesPart:
        """The states of another process in `shared_memory`, from byte `start` on: a multiple of a page.

        Raises OSError.
        """
        return cls(memoryview(mmap.mmap(descriptor, slots * slot_stride(state_bytes), offset=start)), state_bytes)


class HostStates:
    """The bytes of the recurrent states on the host, in place: each rank's share of a state, in rank order.

    A thread may read a slot that is held (`StatePool.hold`), and write to a reserved one (`StatePool.reserve_on_host`).
    """

    def __init__(self, parts: Sequence[StatesPart]) -> None:
        """`parts` are in rank order."""
        self._parts = parts

    def __getitem__(self, slot: int) -> Pieces:
        return tuple([data[slot * slot_stride(size) :][:size] for data, size in self._parts])


def slot_stride(state_bytes: int) -> int:
    """Bytes from one slot of the host to the next, for states of this size. Each slot begins at a multiple of it."""
    return -(-state_bytes // SLOT_BYTES) * SLOT_BYTES


def after_blocks(num_blocks: int, block_bytes: int) -> int:
    """The first byte of the states in shared memory, which come after the blocks, on a page of their own."""
    return -(-num_blocks * block_bytes // mmap.ALLOCATIONGRANULARITY) * mmap.ALLOCATIONGRANULARITY


class HostBlocks:
    """The bytes of the host tier's blocks, in place: each rank's share of a block, in rank order.

    Any thread may read a block that is held (`HostPool.hold`), and may write to a reserved one as described in
    `HostPool.reserve`.
    """

    def __init__(self, parts: Sequence[HostPart]) -> None:
        """`parts` are in rank order."""
        self._parts = parts

    def __getitem__(self, block: int) -> Pieces:
        return tuple([data[block * size : (block + 1) * size] for data, size in self._parts])

    def begin(self, job: TierJob) -> JobBlocks:
        """The memory of a job (`HostBytes`)."""
        return JobBlocks(self, job)


class JobBlocks:
    """The blocks of the host tier that a job reads or fills (`JobBytes`)."""

    def __init__(self, host: HostBlocks, job: TierJob) -> None:
        self._host, self._job = host, job

    def pieces(self) -> list[Pieces]:
        """The bytes of each block."""
        return [self._host[block.host] for block in self._job.blocks]

    def end(self, outcomes: Sequence[Outcome]) -> list[Outcome]:
        """The outcomes as they are: blocks need nothing more."""
        return [*outcomes]


def shared_memory(descriptor: int, size: int, start: int = 0) -> torch.Tensor:
    """Map `size` bytes of the memory that a file descriptor refers to, as uint8. Other processes may map it too.

    `start` is the first of them, a multiple of a page. Memory that is there already stays. Raises OSError.
    """
    if os.fstat(descriptor).st_size < start + size:
        os.ftruncate(descriptor, start + size)
    return torch.frombuffer(mmap.mmap(descriptor, size, offset=start), dtype=torch.uint8)


def cuda_pin(address: int, size: int, device: torch.device | None = None) -> int:
    """Pin memory in place and map it for a GPU, by default the thread's. Other Python threads keep running."""
    with torch.cuda.device(device):
        return int(torch.cuda.cudart().cudaHostRegister(address, size, 0))  # type: ignore[no-untyped-call]


def cuda_unpin(address: int) -> None:
    """Undo `cuda_pin`."""
    torch.cuda.cudart().cudaHostUnregister(address)  # type: ignore[no-untyped-call]


def slabs(address: int, size: int) -> Iterator[tuple[int, int]]:
    """Ranges that together are [0, size). Inner bounds are page bounds, because no page may be pinned twice."""
    start = 0
    while start < size:
        stop = start + SLAB_BYTES
        stop -= (address + stop) % mmap.PAGESIZE
        yield start, min(stop, size)
        start = min(stop, size)


def allow_huge_pages(slab: torch.Tensor) -> None:
    """Ask for huge pages, which are faster to pin. The system may have none."""
    try:
        advise = ctypes.CDLL(None).madvise
    except (OSError, AttributeError):
        return
    first = slab.data_ptr() + -slab.data_ptr() % mmap.PAGESIZE
    whole = (slab.data_ptr() + len(slab) - first) // mmap.PAGESIZE * mmap.PAGESIZE
    if whole > 0:
        advise(ctypes.c_void_p(first), ctypes.c_size_t(whole), HUGE_PAGES)
