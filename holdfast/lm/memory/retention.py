"""Retention: which idle chunks of the KV cache are worth least, found without looking at all of them."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from itertools import repeat

from holdfast.core.config import EngineConfig

Bounds = tuple[float, int, int]
"""What blocks go together by: time of last use, number of the release, rank of the chunk therein."""

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


class Queue:
    """The blocks of one cost class, those first that were used longest ago.

    Most come in that order and are in a row. But what lands on the host was idle for longer than what was put to rest
    there meanwhile: such blocks are in a heap beside it, where one that is used again stays until it comes up, or until
    such are half of it.
    """

    def __init__(self) -> None:
        self.row: OrderedDict[int, Bounds] = OrderedDict()
        """What came in order."""
        self._newest = -math.inf
        """The last use of what was used last of all that the row has held."""
        self.late: dict[int, Bounds] = {}
        """The others: those that the heap holds."""
        self._heap: list[tuple[Bounds, int]] = []

    def __len__(self) -> int:
        return len(self.row) + len(self.late)

    def add(self, block: int, bounds: Bounds) -> None:
        """Take in a block: O(1), or O(log n) where younger ones are in the row."""
        if self.in_order(bounds[0]):
            self.row[block] = bounds
            return
        self.late[block] = bounds
        heappush(self._heap, (bounds, block))
        if len(self._heap) > 2 * len(self.late) + 64:
            self._heap = [(bounds, block) for block, bounds in self.late.items()]
            heapify(self._heap)

    def in_order(self, last: float) -> bool:
        """Whether blocks last used at `last` go to the end of the row, where they must then be put."""
        if last < self._newest:
            return False
        self._newest = last
        return True

    def remove(self, block: int) -> Bounds:
        """Let a block go; what it went by."""
        bounds = self.row.pop(block, None)
        return self.late.pop(block) if bounds is None else bounds

    def first(self) -> Bounds:
        """Of what goes first; there must be one."""
        late = self._first_late()
        row = next(iter(self.row.values()), None)
        if row is None or (late is not None and late < row):
            assert late is not None
            return late
        return row

    def _first_late(self) -> Bounds | None:
        heap, late = self._heap, self.late
        while heap and late.get(heap[0][1]) != heap[0][0]:
            heappop(heap)
        return heap[0][0] if heap else None

    def take(self) -> list[int]:
        """Remove the chunk that goes first: the blocks that were let go together and have one rank."""
        bounds, row, blocks = self.first(), self.row, []
        while row:
            block = next(iter(row))
            if row[block] != bounds:
                break
            del row[block]
            blocks.append(block)
        while self._first_late() == bounds:
            _, block = heappop(self._heap)
            del self.late[block]
            blocks.append(block)
        return blocks


class Retention:
    """Idle blocks in the order of their value, which changes with time, though no operation is worse than O(log n).

    V = cost / age orders blocks of one cost class by age alone, and that order never changes. So each class is a queue
    by the time of last use, and the block of the lowest value overall is at the head of one of the queues: a choice
    among as many heads as there are classes, whatever the number of blocks.
    """

    def __init__(self, rule: RetentionRule) -> None:
        self._rule = rule
        self._queues: dict[int, Queue] = {}
        self._costs: dict[int, float] = {}
        self._places: dict[int, tuple[int, int]] = {}
        """Of a sequence's chunks, class and rank among those that were let go with it."""
        self._class_of: dict[int, int] = {}

    def __len__(self) -> int:
        return len(self._class_of)

    def __contains__(self, block: int) -> bool:
        return block in self._class_of

    def __iter__(self) -> Iterator[int]:
        return iter(self._class_of)

    def add(self, block: int, index: int, last: float, release: int) -> None:
        """Take in an idle block: the `index`-th of its sequence, last used at `last`, let go in release `release`."""
        self.add_all((block,), (index,), last, release)

    def add_all(self, blocks: Iterable[int], indices: Iterable[int], last: float, release: int) -> None:
        """`add` for each: what their chunks have in common is looked up once where they are in a row."""
        class_of, size, at = self._class_of, self._rule.chunk_blocks, -1
        for block, index in zip(blocks, indices, strict=True):
            if index // size != at:
                at = index // size
                number, rank = self._places.get(at) or self._place(at)
                bounds, queue = (last, release, rank), self._queues[number]
                row, in_order = queue.row, queue.in_order(last)
            class_of[block] = number
            if in_order:
                row[block] = bounds
            else:
                queue.add(block, bounds)

    def _place(self, chunk: int) -> tuple[int, int]:
        rule = self._rule
        eviction, number = rule.eviction, rule.cost_class(chunk * rule.chunk_blocks)
        if number not in self._queues:
            self._queues[number] = Queue()
            self._costs[number] = rule.class_cost(number)
        rank = 0 if eviction.whole else -chunk if eviction.trailing_first else chunk
        self._places[chunk] = number, rank
        return number, rank

    def renew(self, block: int, last: float, release: int) -> None:
        """Count a block as used at `last`."""
        queue = self._queues[self._class_of[block]]
        _, _, rank = queue.remove(block)
        queue.add(block, (last, release, rank))

    def remove(self, block: int) -> None:
        """Let a block go that is in use again."""
        self._queues[self._class_of.pop(block)].remove(block)

    def discard_all(self, blocks: Sequence[int]) -> list[int]:
        """Let go of those of these blocks that are here; the others."""
        others: list[int] = []
        at = None
        for block, number in zip(blocks, map(self._class_of.pop, blocks, repeat(None)), strict=True):
            if number is None:
                others.append(block)
                continue
            if number != at:
                at, queue = number, self._queues[number]
                row, late = queue.row, queue.late
            if row.pop(block, None) is None:
                del late[block]
        return others

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
        self._heads = [(self._value(number, queue), number) for number, queue in queues.items() if queue]
        heapify(self._heads)

    def _value(self, number: int, queue: Queue) -> float:
        return self._costs[number] / max(self._now - queue.first()[0], LEAST_AGE)

    def take(self, below: float = math.inf) -> tuple[float, list[int]] | None:
        """Remove the chunk of the lowest value and give its value and blocks; None if there is none `below` that."""
        if not self._heads or self._heads[0][0] >= below:
            return None
        value, number = heappop(self._heads)
        queue = self._queues[number]
        blocks = queue.take()
        for block in blocks:
            del self._class_of[block]
        if queue:
            heappush(self._heads, (self._value(number, queue), number))
        return value, blocks
