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
        """Target block on the host, by device block being swapped out."""
        self.idle = 0
        """Number of blocks being swapped out that have no owner."""
        self.wanted: dict[bytes, None] = {}
        """Digests of device blocks that the next plans copy to the host because others than the device ask for them."""
        self._last_use: dict[int, Use] = {}
        """Last use, by device block being swapped out."""
        self._swap_outs: deque[tuple[int, Sequence[BlockCopy]]] = deque()
        """Copies to the host under way, with the number of the plan that began them, oldest first."""
        self.swapping_in: dict[int, int] = {}
        """Number of the plan that began the copy, by device block being swapped in."""
        self.overwritten = -1
        """Number of a plan. Some of its copies from the host go to blocks that were allocated meanwhile, so the next
        plan must await them before it writes there. -1: none."""

    @property
    def under_way(self) -> set[int]:
        """The device blocks that are being copied, in either direction."""
        return {*self.swapping_out, *self.swapping_in}

    def start_swap_out(self, copies: Sequence[BlockCopy], last_use: dict[int, Use], step: int, owned: int = 0) -> None:
        """Pin the blocks that plan `step` copies to the host; `owned` of them have an owner. `last_use` is by block."""
        if copies:
            self.idle += len(copies) - owned
            self.swapping_out.update(copies)
            self._last_use |= last_use
            self._swap_outs.append((step, copies))

    def add_idle(self, blocks: list[int], use: Use) -> list[int]:
        """Record that these blocks lost their owner and were last used together.

        Returns those that are not being swapped out.
        """
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
        """Record that plan `step` begins to copy state from the host into these blocks. The call does not wait."""
        self.swapping_in.update(dict.fromkeys(blocks, step))

    def swap_in_step(self, blocks: Iterable[int]) -> int:
        """Number of the plan whose copies must be complete before these blocks are read; -1 if all are."""
        under_way = self.swapping_in
        return max((under_way.get(block, -1) for block in blocks), default=-1) if under_way else -1

    def overwrite(self, blocks: Iterable[int]) -> None:
        """Note that these blocks are about to be written, even if copies from the host are still on their way there."""
        self.overwritten = max(self.overwritten, self.swap_in_step(blocks))

    def finish_swap_in(self, step: int) -> None:
        """Finish the copies from the host of plan `step` and earlier plans: they are complete, or will be awaited."""
        if step >= self.overwritten:
            self.overwritten = -1
        if self.swapping_in:
            self.swapping_in = {block: number for block, number in self.swapping_in.items() if number > step}
