"""Sums of many rows over GPUs of one host, whose halves travel by copy engine while the processors compute."""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

from collections.abc import Callable

import torch
import triton
import triton.language as tl

from holdfast.lm.kernels.collectives.peer_memory import PeerMemory, copy
from holdfast.lm.kernels.collectives.protocol import SumInParts, halves

FLAG_BYTES = 128
"""Room of a number that tells whether a part has come from a device."""
MOST_DEVICES = 32
TURNS = 2
"""Successive sums use the two halves of the memory in turns."""
PARTS = 2
FLAGS_BYTES = TURNS * PARTS * MOST_DEVICES * FLAG_BYTES
"""Room of all flags."""
ROWS = 256
"""The first part has a multiple of so many rows, for which matrix products have whole tiles."""


class CopiedSums:
    """The memory that successive sums of one group share, and the streams of their copies.

    A turn has room for a sum: of each part, the addends of every device by rank. A device computes its own where they
    belong, and copies them to the same place of every other device, where a flag follows them. Whoever has received a
    part takes its flag away again.

    A device cannot overwrite what another one still reads. Before it sends parts of the sum after next, it has
    received all parts of the next one, and the others had then read all of this one. Places do not depend on what
    was before, so CUDA graphs may capture sums and be replayed in any order, as long as each step begins with the
    first turn.
    """

    def __init__(self, memory: PeerMemory, alone: torch.Tensor, is_alone: Callable[[], bool]) -> None:
        """`memory` is of all devices of the group, not opened, and only used for this.

        `alone` [1] int32, on the device, and `is_alone` tell whether nothing is sent and nobody waits.
        """
        self.memory, self.addresses = memory, memory.open()
        self.alone, self.is_alone = alone, is_alone
        device = memory.device
        self.streams = [torch.cuda.Stream(device) for _ in range(memory.size - 1)]  # type: ignore[no-untyped-call]
        """One for each other device, by its distance in rank less one."""
        self.flag = torch.ones(1, dtype=torch.int32, device=device)
        self._turn = 0
        if memory.size > MOST_DEVICES:
            raise ValueError(f"{memory.size} devices cannot share layers, at most {MOST_DEVICES} can")

    @property
    def turn_bytes(self) -> int:
        """Memory of one turn."""
        return (self.memory.num_bytes - FLAGS_BYTES) // TURNS // FLAG_BYTES * FLAG_BYTES

    def begin(self, rows: int, width: int, dtype: torch.dtype) -> CopiedSum | None:
        """The next sum of so many rows; None if there is no room for it, or not a row for each part."""
        if rows <= ROWS or self.memory.size * rows * width * dtype.itemsize > self.turn_bytes:
            return None
        turn = self._turn
        if not self.is_alone():  # threads that compile kernels are alone, and count no turns
            self._turn = (turn + 1) % TURNS
        return CopiedSum(self, turn, rows, width, dtype)

    def flag_place(self, turn: int, part: int, sender: int) -> int:
        """Where in a device's memory the flag of a part from a sender is."""
        return ((turn * PARTS + part) * self.memory.size + sender) * FLAG_BYTES


class CopiedSum(SumInParts):
    """One sum. What is received are the addends of all devices, [size, rows, width], by rank."""

    def __init__(self, sums: CopiedSums, turn: int, rows: int, width: int, dtype: torch.dtype) -> None:
        self._sums, self._turn, self._width, self._dtype = sums, turn, width, dtype
        self._parts = halves(rows, ROWS)
        self._sent: list[list[torch.cuda.Event]] = []
        """By part, what has passed once the copies to the others are done."""

    @property
    def parts(self) -> tuple[slice, ...]:
        return self._parts

    def room(self, part: int) -> torch.Tensor:
        return self._addends(part)[self._sums.memory.rank]

    def send(self, part: int) -> None:
        sums = self._sums
        memory = sums.memory
        self._sent.append([])
        if sums.is_alone():
            return
        own = self.room(part)
        place, flag = own.data_ptr() - memory.address, sums.flag_place(self._turn, part, memory.rank)
        current = torch.cuda.current_stream(memory.device)
        for distance, stream in enumerate(sums.streams, 1):
            there = sums.addresses[(memory.rank + distance) % memory.size]
            stream.wait_stream(current)
            copy(there + place, own.data_ptr(), own.nbytes, stream)
            copy(there + flag, sums.flag.data_ptr(), sums.flag.nbytes, stream)
            self._sent[part].append(stream.record_event())

    def receive(self, part: int) -> torch.Tensor:
        sums = self._sums
        memory = sums.memory
        # Who waits for the others needs nothing more from its own streams: they have sent before.
        for sent in self._sent[part]:
            torch.cuda.current_stream(memory.device).wait_event(sent)
        first = sums.flag_place(self._turn, part, 0)
        flags = memory.own[first : first + memory.size * FLAG_BYTES].view(torch.int32)
        take_flags_kernel[(1,)](
            flags, sums.alone, memory.size, memory.rank, EACH=FLAG_BYTES // 4, SENDERS=MOST_DEVICES, num_warps=1
        )
        return self._addends(part)

    def _addends(self, part: int) -> torch.Tensor:
        """The place of a part, [size, rows, width], in this device's memory."""
        memory, rows = self._sums.memory, self._parts[part]
        row_bytes = memory.size * self._width * self._dtype.itemsize
        begin = FLAGS_BYTES + self._turn * self._sums.turn_bytes + rows.start * row_bytes
        place = memory.own[begin : begin + (rows.stop - rows.start) * row_bytes]
        return place.view(self._dtype).view(memory.size, -1, self._width)


@triton.jit(do_not_specialize=["size", "rank"])
def take_flags_kernel(flags, alone, size, rank, EACH: tl.constexpr, SENDERS: tl.constexpr):
    """Wait for the flag of every device but `rank`, and take it away. Flag i is at flags[i * EACH]. One program.

    Of SENDERS threads, the first `size` look at a flag each.
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
