"""All-to-all between GPUs of one host, by copies that the host launches."""

from __future__ import annotations

import torch

from holdfast.lm.kernels.collectives.peer_memory import PeerMemory, copy, signal, wait

FLAG_BYTES = 128
"""Room of a number that tells how many pieces have come from a device."""
HALVES = 2


class PeerExchange:
    """Each device has a block for every other one, and writes it into that one's memory, piece by piece.

    Each piece is counted, and the receiver waits for the count. Successive pieces use the two halves of the memory in
    turns. A device sends a piece only after it has received the one before from every device, and those had then read
    the one before that. No call makes the host wait. CUDA graphs cannot capture calls, since the host counts them.
    """

    def __init__(self, memory: PeerMemory) -> None:
        """`memory` is of all devices of the group, not opened, and only used for this."""
        self._memory, self._addresses = memory, memory.open()
        slots = (memory.num_bytes - memory.size * FLAG_BYTES) // (HALVES * memory.size)
        self._slot_bytes = slots // FLAG_BYTES * FLAG_BYTES
        self._turns = 0

    def exchange(self, blocks: torch.Tensor) -> torch.Tensor:
        """Send blocks[i] of contiguous blocks [size, ...] to device i; what came from each device, [size, ...]."""
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
        """Where in a device's memory a sender's piece of this turn is."""
        slot = self._turns % HALVES * self._memory.size + sender
        return self._memory.size * FLAG_BYTES + slot * self._slot_bytes
