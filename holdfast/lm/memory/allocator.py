"""Allocator: the free list, and the number of owners of each block."""

from __future__ import annotations

from collections.abc import Collection, Iterable


class Allocator:
    """Counts the sequences that own each of the blocks 0 to `num_blocks - 1`, and lists the free blocks.

    A block without an owner is not always free: it may hold cached state. The pool decides that.
    """

    def __init__(self, num_blocks: int) -> None:
        self.free = list(range(num_blocks - 1, -1, -1))
        """Free blocks; the last is allocated first. Always the same list."""
        self.owners = [0] * num_blocks
        """Number of owners by block. Always the same list."""

    def allocate(self, count: int) -> list[int]:
        """Remove `count` blocks from the free list and give each one owner. The list must hold that many."""
        free, owners = self.free, self.owners
        allocated = free[: -count - 1 : -1]
        del free[len(free) - count :]
        for block in allocated:
            owners[block] = 1
        return allocated

    def add_owner(self, blocks: Collection[int]) -> list[int]:
        """Add an owner to each block; each block is named once. Returns the blocks that had none."""
        owners = self.owners
        idle = [block for block in blocks if not owners[block]]
        for block in blocks:
            owners[block] += 1
        return idle

    def remove_owner(self, blocks: Iterable[int]) -> list[int]:
        """Remove an owner from each block. Returns the blocks left without one. Raises RuntimeError if one had none."""
        owners, idle = self.owners, []
        for block in blocks:
            count = owners[block]
            if count == 1:
                idle.append(block)
            elif not count:
                raise RuntimeError(f"block {block} is freed, but nobody owns it")
            owners[block] = count - 1
        return idle
