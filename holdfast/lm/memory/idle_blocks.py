"""IdleBlocks: cached blocks of the device that nobody owns, and which of them are reused first."""

from __future__ import annotations

from collections import OrderedDict

from holdfast.lm.memory.retention import Retention, RetentionRule, Use


class IdleBlocks:
    """Cached blocks without an owner, except those being swapped out.

    A retained block keeps its state until it is evicted; the block of the lowest value goes first. A reclaimable block
    has been evicted. It still holds its state and may be shared again, until it is allocated for other state.
    """

    def __init__(self, rule: RetentionRule) -> None:
        self.retained = Retention(rule)
        self.reclaimable: OrderedDict[int, None] = OrderedDict()
        """The first is reclaimed next."""

    def touch(self, block: int, use: Use) -> None:
        """Count a block as used again."""
        if block in self.reclaimable:
            self.reclaimable.move_to_end(block)
        else:
            self.retained.renew(block, use)

    def reclaim(self, count: int, now: float, batch: int) -> list[int]:
        """Remove `count` blocks, so that they can be allocated. There must be as many.

        If too few are reclaimable, at least `batch` retained blocks are evicted, or all if there are fewer.
        """
        if count > len(self.reclaimable):
            wanted = max(count - len(self.reclaimable), batch)
            victims = self.retained.victims(now)
            while wanted > 0 and (chunk := victims.pop()) is not None:
                wanted -= len(chunk.blocks)
                self.reclaimable.update(dict.fromkeys(chunk.blocks))
        return [self.reclaimable.popitem(last=False)[0] for _ in range(count)]
