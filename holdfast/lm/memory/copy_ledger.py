"""CopyLedger: the block copies between device and host that are under way."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence

from holdfast.lm.memory.retention import Use
from holdfast.lm.types import BlockCopy


class CopyLedger:
    """Records which plan began each copy, until a step result says that the copies of that plan are complete.

    A block being swapped out is pinned: it keeps its contents until its copy is complete. A block being swapped in must
    not be read or written before its copy is complete.
    """

    def __init__(self) -> None:
        self.swapping_out: dict[int, int] = {}
        """Target on the host of each block being swapped out."""
        self.idle = 0
        """Blocks being swapped out that have no owner."""
        self.wanted: dict[bytes, None] = {}
        """Digests of device blocks that the next plans copy to the host ahead of need, for others than the device."""
        self._last_use: dict[int, Use] = {}
        """Last use of each block being swapped out."""
        self._swap_outs: deque[tuple[int, Sequence[BlockCopy]]] = deque()
        """The copies to the host, with the number of the plan that began them."""
        self._swapping_in: dict[int, int] = {}
        """By block being swapped in, the number of the plan that began the copy."""

    @property
    def under_way(self) -> set[int]:
        """The blocks of the device that are being copied, in either direction."""
        return {*self.swapping_out, *self._swapping_in}

    def start_swap_out(self, copies: Sequence[BlockCopy], last_use: dict[int, Use], step: int, owned: int = 0) -> None:
        """Pin the blocks that plan `step` copies to the host; `owned` of them have an owner. `last_use` is by block."""
        if copies:
            self.idle += len(copies) - owned
            self.swapping_out.update(copies)
            self._last_use |= last_use
            self._swap_outs.append((step, copies))

    def add_idle(self, blocks: list[int], use: Use) -> list[int]:
        """Note that these blocks have no owner any more, and were last used together. Returns those not swapped out."""
        others = [block for block in blocks if block not in self.swapping_out]
        self._last_use.update((block, use) for block in blocks if block in self.swapping_out)
        self.idle += len(blocks) - len(others)
        return others

    def touch(self, block: int, use: Use) -> None:
        """Count a block being swapped out as used again."""
        self._last_use[block] = use

    def finish_swap_out(self, step: int) -> Iterator[tuple[BlockCopy, Use]]:
        """Unpin the blocks that plan `step` and earlier plans copied to the host. Yields each copy and its last use."""
        while self._swap_outs and self._swap_outs[0][0] <= step:
            for copy in self._swap_outs.popleft()[1]:
                del self.swapping_out[copy.source]
                yield copy, self._last_use.pop(copy.source)

    def start_swap_in(self, blocks: Iterable[int], step: int) -> None:
        """Note that plan `step` begins to copy state from the host into these blocks, without waiting for it."""
        self._swapping_in.update(dict.fromkeys(blocks, step))

    def swap_in_step(self, blocks: Iterable[int]) -> int:
        """The plan whose copies must be complete before these blocks are read; -1 if all are there."""
        under_way = self._swapping_in
        return max((under_way.get(block, -1) for block in blocks), default=-1) if under_way else -1

    def finish_swap_in(self, step: int) -> None:
        """The copies from the host that plan `step` and earlier plans began are complete, or will be awaited."""
        if self._swapping_in:
            self._swapping_in = {block: number for block, number in self._swapping_in.items() if number > step}
