"""Retention: which idle chunks of the KV cache are worth least, found without looking at all of them."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from heapq import heapify, heappop, heappush

from holdfast.core.config import EngineConfig

Queue = OrderedDict[int, tuple[float, int, int]]
"""Blocks with what they go together by: time of last use, number of the release, chunk."""

Cost = Callable[[int], float]
"""Cost of computing a chunk again that ends at this position, in any unit."""

LEAST_AGE = 1e-3
"""Seconds; younger chunks count as this old, so that none is beyond price."""


def cost_by_position(position: int, balance: int = 16384) -> float:
    """The cost where none was measured: attention grows with position, and equals all the rest at `balance`."""
    return 1.0 + position / balance


@dataclass(frozen=True, slots=True)
class Eviction:
    """An order in which idle state is given up."""

    by_cost: bool
    """Value is cost / age; otherwise 1 / age, the least recently used first."""
    trailing_first: bool
    """Of chunks that are worth the same, those at the end of the conversation go first, not those at its start."""
    whole: bool
    """A conversation goes at once, all chunks that were released together."""


EVICTIONS = {
    "retention": Eviction(by_cost=True, trailing_first=False, whole=False),
    "lru": Eviction(by_cost=False, trailing_first=False, whole=False),
    "lru-conversation": Eviction(by_cost=False, trailing_first=False, whole=True),
    "tail-first": Eviction(by_cost=False, trailing_first=True, whole=False),
}


@dataclass(frozen=True, slots=True)
class RetentionRule:
    """What a chunk is worth: V = Cost(l) / T (Pensieve §4.3.1), or one of the orders to compare it with."""

    eviction: Eviction = EVICTIONS["retention"]
    cost: Cost = cost_by_position
    chunk_blocks: int = 2
    """Blocks of a chunk, the unit of the decision."""
    block_size: int = 16

    @classmethod
    def of(cls, config: EngineConfig, cost: Cost) -> RetentionRule:
        """The rule that a configuration names, with chunks of whole blocks."""
        chunk_blocks = -(-config.chunk_size // config.block_size)
        return cls(EVICTIONS[config.eviction], cost, chunk_blocks, config.block_size)

    def cost_class(self, index: int) -> int:
        """Class of the chunk that holds block `index` of a sequence: 32 exact ones, then 16 for each doubling.

        So the costs within a class lie within 1/16 of each other, and 2^20 positions make some 300 classes.
        """
        if not self.eviction.by_cost:
            return 0
        chunk = index // self.chunk_blocks
        shift = max(0, chunk.bit_length() - 5)
        return 16 * shift + (chunk >> shift)

    def class_cost(self, number: int) -> float:
        """Cost of the first chunk of a class."""
        if not self.eviction.by_cost:
            return 1.0
        shift = max(0, number // 16 - 1)
        chunk = (number - 16 * shift) << shift
        return self.cost((chunk + 1) * self.chunk_blocks * self.block_size)


class Retention:
    """Idle blocks in the order of their value, which changes with time, though each operation is O(1).

    V = cost / age orders blocks of one cost class by age alone, and that order never changes. So each class is a queue
    by the time of last use, and the block of the lowest value overall is at the head of one of the queues: a choice
    among as many heads as there are classes, whatever the number of blocks.
    """

    def __init__(self, rule: RetentionRule) -> None:
        self._rule = rule
        self._queues: dict[int, Queue] = {}
        self._costs: dict[int, float] = {}
        self._newest: dict[int, float] = {}
        """By class, the last use of what was used last of all that it has held."""
        self._places: dict[int, tuple[int, int]] = {}
        """By index in a sequence, class and chunk."""
        self._class_of: dict[int, int] = {}

    def __len__(self) -> int:
        return len(self._class_of)

    def __contains__(self, block: int) -> bool:
        return block in self._class_of

    def __iter__(self) -> Iterator[int]:
        return iter(self._class_of)

    def add(self, block: int, index: int, last: float, release: int) -> None:
        """Take in an idle block: the `index`-th of its sequence, last used at `last`, let go in release `release`."""
        rule = self._rule
        place = self._places.get(index)
        if place is None:
            number = rule.cost_class(index)
            place = self._places[index] = number, 0 if rule.eviction.whole else index // rule.chunk_blocks
            if number not in self._queues:
                self._queues[number] = OrderedDict()
                self._costs[number] = rule.class_cost(number)
                self._newest[number] = last
        number, chunk = place
        self._class_of[block] = number
        self._enter(block, number, (last, release, chunk))

    def renew(self, block: int, last: float, release: int) -> None:
        """Count a block as used at `last`."""
        number = self._class_of[block]
        _, _, chunk = self._queues[number].pop(block)
        self._enter(block, number, (last, release, chunk))

    def _enter(self, block: int, number: int, bounds: tuple[float, int, int]) -> None:
        """Put a block behind all those of its class that were used earlier; hardly ever is one used later."""
        queue, last = self._queues[number], bounds[0]
        if last >= self._newest[number]:
            self._newest[number] = last
            queue[block] = bounds
            return
        younger = []
        for other in reversed(queue):
            if queue[other][0] <= last:
                break
            younger.append(other)
        queue[block] = bounds
        for other in reversed(younger):
            queue.move_to_end(other)

    def remove(self, block: int) -> None:
        """Let a block go that is in use again."""
        del self._queues[self._class_of.pop(block)][block]

    def victims(self, now: float) -> Victims:
        """All blocks, the lowest value first. Nothing may be added or removed meanwhile but by taking from it."""
        return Victims(self._queues, self._costs, self._class_of, now)


class Victims:
    """Chunks by ascending value, taken out as they are asked for: O(classes) to begin with, O(log classes) each."""

    def __init__(
        self,
        queues: dict[int, Queue],
        costs: dict[int, float],
        class_of: dict[int, int],
        now: float,
    ) -> None:
        self._queues, self._costs, self._class_of, self._now = queues, costs, class_of, now
        self._heads = [(self._value(number), number) for number, queue in queues.items() if queue]
        heapify(self._heads)

    def _value(self, number: int) -> float:
        last = next(iter(self._queues[number].values()))[0]
        return self._costs[number] / max(self._now - last, LEAST_AGE)

    def take(self, below: float = math.inf) -> tuple[float, list[int]] | None:
        """Remove the chunk of the lowest value and give its value and blocks; None if there is none `below` that."""
        if not self._heads or self._heads[0][0] >= below:
            return None
        value, number = heappop(self._heads)
        queue, blocks = self._queues[number], []
        block, bounds = queue.popitem(last=False)
        blocks.append(block)
        while queue:
            block = next(iter(queue))
            if queue[block] != bounds:
                break
            del queue[block]
            blocks.append(block)
        for block in blocks:
            del self._class_of[block]
        if queue:
            heappush(self._heads, (self._value(number), number))
        return value, blocks
