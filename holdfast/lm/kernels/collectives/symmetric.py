"""`Group` of GPUs of one host that write into each other's memory."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from math import inf

import torch
from torch._C._distributed_c10d import Store
from torch.distributed.distributed_c10d import PrefixStore

from holdfast.lm.kernels.collectives.copied_sum import FLAGS_BYTES, CopiedSums
from holdfast.lm.kernels.collectives.peer_memory import PeerMemory, copy, signal, wait
from holdfast.lm.kernels.collectives.protocol import Group, SumInParts, columns_by_device, rows_of_device
from holdfast.lm.kernels.collectives.reduce_kernels import (
    BEST_PROGRAMS,
    REGIONS,
    Mailboxes,
    best_rows,
    reduce_rows,
)

ROOM_BYTES = 64 << 20
"""Bytes for sums on each device. Longer sums take several launches."""
EXCHANGE_BYTES = 64 << 20
"""Memory for rows of logits on each device, in bytes. Larger exchanges go piece by piece."""
FLAG_BYTES = 128
"""Bytes of the counter of pieces that have arrived from a device."""
HALVES = 2
"""Number of halves of that memory. Successive pieces use them in turn."""

COPIED_BYTES = 512 << 20
"""Bytes on each device for sums that copy engines carry: 8,192 rows of 8,192 numbers, for two devices."""

LEAST_COPIED_BYTES = 12 << 20
"""Smallest size of a sum, in bytes, whose halves travel by copy engine.

Measured with layers of Llama-3's shapes on two H200s. 8B takes 5% longer this way with 1,024 rows (8 MB), and 4% less
time with 1,536 (12 MB). 70B takes 9% longer with 512 rows (8 MB), and 3% less time with 1,024
(benchmarks/kernels/many_probe.py).
"""

LEAST_LAUNCHED_BYTES = 32 << 20
"""Smallest size of such a sum, in bytes, in steps that no graph captures.

The host launches a layer of an 8B shape in 1.4 ms with copy engines, and in 0.6 ms without.
"""

SECOND_SHOT = 2.1e-6
"""Seconds that two shots take longer than one, for sums of a few rows."""
LINK_SPEED = 300e9
"""Bytes per second that a device sends, in sums of more rows.

SECOND_SHOT and LINK_SPEED were measured on two H200s (benchmarks/kernels/many_probe.py).
"""


def two_shot_bytes(size: int) -> float:
    """The size of a sum, in bytes, from which two shots are faster than one, among `size` devices.

    In one shot, each device sends its addends to all others. In two, it sends each of them its share of the rows, and
    later the sum of its own rows: 2 / size of the bytes. For two devices the bytes are equal, and two shots were never
    faster by more than 5%. NCCL followed by a norm took longer at every size: 2 to 2.8 times as long up to 4 MB, and
    18% longer at 64 MB or more, so it is not used.
    """
    saved = (size - 1) * (1 - 2 / size)
    return SECOND_SHOT * LINK_SPEED / saved if saved else inf


class SymmetricGroup(Group):
    """GPUs of one host, each in its own process.

    Sums and the best tokens go through mailboxes, in kernels that CUDA graphs may capture. Sums travel in the stream's
    dtype: float32 would take 0.5 us longer for one row, and twice as long for many. Large sums may go by copy engine
    instead, in parts, while the processors compute. The host starts the copies of logits and of gathered numbers, so
    graphs cannot capture `exchange_rows` and `gather`.
    """

    def __init__(self, store: Store, rank: int, size: int, device: torch.device) -> None:
        """`store` belongs to this group alone. All processes of the group construct theirs at the same time.

        Raises RuntimeError if one device cannot write to another.
        """
        self._rank, self._size, self._device = rank, size, device
        sums = PeerMemory(PrefixStore("sums", store), rank, size, device, Mailboxes.num_bytes(size, ROOM_BYTES))
        counters = torch.zeros(2 * REGIONS + BEST_PROGRAMS, dtype=torch.int32, device=device)
        no_addresses = torch.zeros(size, dtype=torch.int64, device=device)
        self.mailboxes = Mailboxes(sums.own, no_addresses, counters, counters.new_zeros(1), rank, size)
        self.mailboxes.empty()
        no_addresses.copy_(torch.tensor(sums.open()))
        self._exchange = PeerExchange(PeerMemory(PrefixStore("rows", store), rank, size, device, EXCHANGE_BYTES))
        copied = PeerMemory(PrefixStore("copied sums", store), rank, size, device, FLAGS_BYTES + COPIED_BYTES)
        self._copied = CopiedSums(copied, self.mailboxes.is_alone, lambda: self._alone > 0)
        self._two_shot = two_shot_bytes(size)
        self._alone = 0
        """Number of callers that are inside `alone`."""
        self._entering = threading.Lock()

    @property
    def size(self) -> int:
        return self._size

    @property
    def rank(self) -> int:
        return self._rank

    def room(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device=self._device)

    def add_norm(
        self,
        stream: torch.Tensor,
        partials: torch.Tensor,
        bias: torch.Tensor | None,
        norm: torch.Tensor,
        eps: float,
    ) -> torch.Tensor:
        two_shot = stream.nbytes >= self._two_shot
        return reduce_rows(self.mailboxes, partials, bias, stream, norm, eps, wire=stream.dtype, two_shot=two_shot)

    def begin_sum(self, rows: int, width: int, dtype: torch.dtype) -> SumInParts | None:
        # A caller inside `alone` rehearses a capture.
        captured = self._alone or torch.cuda.is_current_stream_capturing()
        if rows * width * dtype.itemsize < (LEAST_COPIED_BYTES if captured else LEAST_LAUNCHED_BYTES):
            return None
        return self._copied.begin(rows, width, dtype, two_hops=self.size > 2)

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        two_shot = x.nbytes >= self._two_shot
        return reduce_rows(self.mailboxes, x[None], None, None, None, 0.0, wire=x.dtype, two_shot=two_shot)

    def best(self, values: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        return best_rows(self.mailboxes, values, ids)

    def exchange_rows(self, logits: torch.Tensor, vocab_size: int) -> torch.Tensor:
        blocks = columns_by_device(logits, self.size, vocab_size)
        received = blocks if self._alone else self._exchange.exchange(blocks)
        return rows_of_device(received, len(logits), self.rank, vocab_size)

    def gather(self, x: torch.Tensor) -> torch.Tensor:
        everyones = x.expand(self.size, len(x)).contiguous()
        return everyones if self._alone else self._exchange.exchange(everyones)

    @contextmanager
    def alone(self) -> Iterator[None]:
        self._enter(1)
        try:
            yield
        finally:
            self._enter(-1)

    def _enter(self, count: int) -> None:
        """Count the callers inside `alone`. The first and the last set a flag for later kernels on all streams."""
        with self._entering:
            before, self._alone = self._alone, self._alone + count
            if before == 0 or self._alone == 0:
                torch.cuda.synchronize(self._device)
                self.mailboxes.is_alone.fill_(min(self._alone, 1))
                torch.cuda.synchronize(self._device)


class PeerExchange:
    """Exchange in which each device has a block for every other one, and writes it into that device's memory in pieces.

    Each piece is counted, and the receiver waits for the count. Successive pieces use the two halves of the memory in
    turn. A device sends a piece only after it has received the previous one from every device, and by then those had
    read the one before that. No call makes the host wait. CUDA graphs cannot capture calls, because the host counts
    them.
    """

    def __init__(self, memory: PeerMemory) -> None:
        """`memory` spans all devices of the group, is not opened yet, and has no other user."""
        self._memory, self._addresses = memory, memory.open()
        slots = (memory.num_bytes - memory.size * FLAG_BYTES) // (HALVES * memory.size)
        self._slot_bytes = slots // FLAG_BYTES * FLAG_BYTES
        self._turns = 0

    def exchange(self, blocks: torch.Tensor) -> torch.Tensor:
        """Send blocks[i] of contiguous blocks [size, ...] to device i; return those of each device, [size, ...]."""
        memory, given = self._memory, torch.empty_like(blocks)
        stream = torch.cuda.current_stream(memory.device)
        others = [(memory.rank + step) % memory.size for step in range(1, memory.size)]
        block_bytes = blocks[0].nbytes
        given[memory.rank].copy_(blocks[memory.rank])
        for begin in range(0, block_bytes, self._slot_bytes):
            num_bytes = min(self._slot_bytes, block_bytes - begin)
            self._turns += 1
            for other in others:
                there = self._addresses[other]
                source = blocks.data_ptr() + other * block_bytes + begin
                copy(there + self._place(memory.rank), source, num_bytes, stream)
                signal(there + memory.rank * FLAG_BYTES, self._turns, stream)
            for other in others:
                wait(memory.address + other * FLAG_BYTES, self._turns, stream)
                target = given.data_ptr() + other * block_bytes + begin
                copy(target, memory.address + self._place(other), num_bytes, stream)
        return given

    def _place(self, sender: int) -> int:
        """Address of a sender's piece of this turn within a device's memory."""
        slot = self._turns % HALVES * self._memory.size + sender
        return self._memory.size * FLAG_BYTES + slot * self._slot_bytes
