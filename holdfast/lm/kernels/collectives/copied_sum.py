"""Sums of many rows over GPUs of one host. A copy engine carries one half while processors compute the other."""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable

import torch
import triton
import triton.language as tl

from holdfast.lm.kernels.collectives.peer_memory import PeerMemory, copy
from holdfast.lm.kernels.collectives.protocol import SumInParts, halves, own_rows

FLAG_BYTES = 128
"""Bytes that each flag occupies. A flag says that a device's rows have arrived."""
MOST_DEVICES = 32
"""Largest number of devices in a group. In `take_flags_kernel`, one warp has a thread for each device."""
TURNS = 2
"""Number of halves of the memory. Successive sums use them in turn."""
PARTS = 2
"""Number of parts of a sum: one travels while the next is computed."""
HOPS = 2
"""Largest number of transfers of a row: to all other devices, or to the device that adds it up and then to all."""
FLAGS_BYTES = TURNS * PARTS * HOPS * MOST_DEVICES * FLAG_BYTES
"""Bytes of all flags."""
ROWS = 256
"""The first part's number of rows is a multiple of this, for which matrix products have whole tiles."""


class CopiedSums:
    """The memory that successive sums of one group share, and the streams of their copies.

    A device copies its rows to their places in another device's memory, and then copies a flag after them. The receiver
    waits for the flag, and clears it again.

    A device cannot overwrite rows that another one still reads. Before it sends parts of the sum after next, it has
    received all parts of the next one, and by then the others had read all of this one. Places in memory do not depend
    on earlier sums. So CUDA graphs may capture sums and be replayed in any order, as long as each step begins with the
    same turn.
    """

    def __init__(self, memory: PeerMemory, alone: torch.Tensor, is_alone: Callable[[], bool]) -> None:
        """`memory` belongs to all devices of the group, is not opened yet, and has no other user.

        `alone` [1] int32, on the device, and `is_alone` say whether this device neither sends nor waits.
        """
        if memory.size > MOST_DEVICES:
            raise ValueError(f"{memory.size} devices cannot share layers, at most {MOST_DEVICES} can")
        self.memory, self.addresses = memory, memory.open()
        self.alone, self.is_alone = alone, is_alone
        device = memory.device
        self.streams = [torch.cuda.Stream(device) for _ in range(memory.size - 1)]  # type: ignore[no-untyped-call]
        """A stream for each other device. Index 0 is the next rank, index 1 the one after it, and so on."""
        self.adding = torch.cuda.Stream(device, priority=-1)  # type: ignore[no-untyped-call]
        self.flag = torch.ones(1, dtype=torch.int32, device=device)
        self._turn = 0

    @property
    def turn_bytes(self) -> int:
        """Bytes of one turn."""
        return (self.memory.num_bytes - FLAGS_BYTES) // TURNS // FLAG_BYTES * FLAG_BYTES

    def begin(self, rows: int, width: int, dtype: torch.dtype, *, two_hops: bool) -> DirectSum | SharedSum | None:
        """The next sum of `rows` rows; None if there is no room for it, or too few rows for two parts."""
        kind = SharedSum if two_hops else DirectSum
        if rows <= ROWS or kind.num_rows(rows, self.memory.size) * width * dtype.itemsize > self.turn_bytes:
            return None
        turn = self._turn
        if not self.is_alone():  # threads that compile kernels are alone, and count no turns
            self._turn = (turn + 1) % TURNS
        return kind(self, turn, rows, width, dtype)

    def send(self, distance: int, source: torch.Tensor, place: int, flag: int, after: torch.cuda.Stream) -> None:
        """Copy `source`, and then a flag, to places in the memory of the device at this distance.

        The copies start when the current work of the stream `after` is done.
        """
        stream, memory = self.streams[distance - 1], self.memory
        there = self.addresses[(memory.rank + distance) % memory.size]
        stream.wait_stream(after)
        copy(there + place, source.data_ptr(), source.nbytes, stream)
        copy(there + flag, self.flag.data_ptr(), self.flag.nbytes, stream)

    def take_flags(self, first: int) -> None:
        """On the current stream, wait for the flags of all other devices, and clear them."""
        memory = self.memory
        flags = memory.own[first : first + memory.size * FLAG_BYTES].view(torch.int32)
        take_flags_kernel[(1,)](
            flags, self.alone, memory.size, memory.rank, EACH=FLAG_BYTES // 4, SENDERS=MOST_DEVICES, num_warps=1
        )


class _CopiedSum(SumInParts):
    """One sum. Each part has as many rows of the turn's memory as it needs."""

    def __init__(self, sums: CopiedSums, turn: int, rows: int, width: int, dtype: torch.dtype) -> None:
        self._sums, self._turn, self._width, self._dtype = sums, turn, width, dtype
        self._parts = halves(rows, ROWS)
        self._sent: list[list[torch.cuda.Event]] = []
        """For each part, the events that pass once this device's other streams have finished with it."""

    @property
    def parts(self) -> tuple[slice, ...]:
        return self._parts

    @staticmethod
    @abstractmethod
    def num_rows(rows: int, size: int) -> int:
        """Number of memory rows for a sum, or a part, of `rows` rows among `size` devices."""

    def _count(self, part: int) -> int:
        return int(self._parts[part].stop - self._parts[part].start)

    def _rows(self, part: int, first: int, count: int) -> torch.Tensor:
        """Rows of a part's memory, [count, width]."""
        memory, row_bytes = self._sums.memory, self._width * self._dtype.itemsize
        before = sum(self.num_rows(self._count(earlier), memory.size) for earlier in range(part))
        begin = FLAGS_BYTES + self._turn * self._sums.turn_bytes + (before + first) * row_bytes
        return memory.own[begin : begin + count * row_bytes].view(self._dtype).view(count, self._width)

    def _place(self, rows: torch.Tensor) -> int:
        """The offset of rows in this device's memory. It is the same in every other device's memory."""
        return rows.data_ptr() - self._sums.memory.address

    def _flag(self, part: int, hop: int, sender: int) -> int:
        """The offset of a flag."""
        return (((self._turn * PARTS + part) * HOPS + hop) * MOST_DEVICES + sender) * FLAG_BYTES

    def _wait_for_own(self, part: int) -> None:
        """Make the current stream wait until this device has sent a part.

        Its later wait for other devices then comes after everything that they wait for.
        """
        for sent in self._sent[part]:
            torch.cuda.current_stream(self._sums.memory.device).wait_event(sent)


class DirectSum(_CopiedSum):
    """A sum in which every device sends all its addends to all others: one hop, for two devices.

    A part's memory has the addends of every device, by rank. A device computes its own addends directly there.
    """

    @staticmethod
    def num_rows(rows: int, size: int) -> int:
        return rows * size

    def room(self, part: int) -> torch.Tensor:
        count = self._count(part)
        return self._rows(part, self._sums.memory.rank * count, count)

    def send(self, part: int) -> None:
        sums, own = self._sums, self.room(part)
        self._sent.append([])
        if sums.is_alone():
            return
        current = torch.cuda.current_stream(sums.memory.device)
        for distance, stream in enumerate(sums.streams, 1):
            sums.send(distance, own, self._place(own), self._flag(part, 0, sums.memory.rank), current)
            self._sent[part].append(stream.record_event())

    def receive(self, part: int) -> torch.Tensor:
        self._wait_for_own(part)
        self._sums.take_flags(self._flag(part, 0, 0))
        count, size = self._count(part), self._sums.memory.size
        return self._rows(part, 0, size * count).view(size, count, self._width)


class SharedSum(_CopiedSum):
    """A sum in which each device adds up its share of the rows, and sends the result to all: two hops, fewer bytes.

    A part's memory has a device's own addends, then the addends of all devices for its share, then all results. The sum
    runs at the same time as the device's other computation.
    """

    @staticmethod
    def num_rows(rows: int, size: int) -> int:
        return 2 * rows + size * -(-rows // size)

    def room(self, part: int) -> torch.Tensor:
        return self._rows(part, 0, self._count(part))

    def send(self, part: int) -> None:
        sums, count, own = self._sums, self._count(part), self.room(part)
        memory, adding = sums.memory, sums.adding
        share = -(-count // memory.size)
        current = torch.cuda.current_stream(memory.device)
        mine = own_rows(count, memory.size, memory.rank)
        results = self._rows(part, count + memory.size * share + mine.start, len(mine))
        self._sent.append([])
        if not sums.is_alone():
            for distance in range(1, memory.size):
                theirs = own_rows(count, memory.size, (memory.rank + distance) % memory.size)
                place = self._place(self._rows(part, count + memory.rank * share, share))
                flag = self._flag(part, 0, memory.rank)
                sums.send(distance, own[theirs.start : theirs.stop], place, flag, current)
        adding.wait_stream(current)
        with torch.cuda.stream(adding):
            arrived = self._rows(part, count, memory.size * share).view(memory.size, share, self._width)
            arrived[memory.rank, : len(mine)].copy_(own[mine.start : mine.stop])
            sums.take_flags(self._flag(part, 0, 0))
            torch.sum(arrived[:, : len(mine)], 0, out=results)
        self._sent[part].append(adding.record_event())
        if not sums.is_alone():
            for distance, stream in enumerate(sums.streams, 1):
                sums.send(distance, results, self._place(results), self._flag(part, 1, memory.rank), adding)
                self._sent[part].append(stream.record_event())

    def receive(self, part: int) -> torch.Tensor:
        self._wait_for_own(part)
        self._sums.take_flags(self._flag(part, 1, 0))
        count, size = self._count(part), self._sums.memory.size
        return self._rows(part, count + size * -(-count // size), count)[None]


@triton.jit(do_not_specialize=["size", "rank"])
def take_flags_kernel(flags, alone, size, rank, EACH: tl.constexpr, SENDERS: tl.constexpr):
    """Wait for the flag of every device but `rank`, and clear it. Flag i is at flags[i * EACH]. One program.

    The program has SENDERS threads. Each of the first `size` threads reads one flag.
    """
    sender = tl.arange(0, SENDERS)
    is_other = (sender < size) & (sender != rank)
    flag_at = flags + sender * EACH
    if tl.load(alone) == 0:
        flag = tl.load(flag_at, mask=is_other, other=1, volatile=True)
        missing = tl.max((flag == 0).to(tl.int32), 0)
        while missing > 0:
            flag = tl.load(flag_at, mask=is_other, other=1, volatile=True)
            missing = tl.max((flag == 0).to(tl.int32), 0)
        tl.store(flag_at, tl.zeros([SENDERS], tl.int32), mask=is_other)
