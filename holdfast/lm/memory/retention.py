"""Retention: orders idle chunks of the KV cache by value, and evicts those of the lowest value first."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from heapq import heapify, heappop, heappush
from itertools import repeat
from typing import NamedTuple, Protocol

from holdfast.core.config import CoreConfig
from holdfast.core.pause import Pause
from holdfast.lm.memory.prefix_index import PrefixIndex
from holdfast.lm.memory.turns import NEW, Departure, Start
from holdfast.lm.memory.wishes import NO_WISH, Wish

Use = tuple[float, int]
"""When a block was last used: time in seconds, and the number of the call that used it, which orders equal times."""

ChunkKey = tuple[float, int, int]
"""Identifies a chunk: the last use of its blocks, then its rank among the chunks freed together. Lower goes first."""

Cost = Callable[[int], float]
"""Cost of computing a chunk again that ends at this position, in any unit."""

NEVER: ChunkKey = (math.inf, 0, 0)
"""Greater than the key of any chunk."""

EVICTED_AHEAD = 4096
"""Largest number of tokens that are evicted beyond those that are wanted: what is evicted is not put in order again."""
MIN_AGE = 1e-3
"""Least age in seconds: a younger chunk counts as this old, so that its value is finite."""


def cost_by_position(position: int, balance: int = 16384) -> float:
    """The cost if none was measured: attention grows with position, and equals all other work at `balance`."""
    return 1.0 + position / balance


@dataclass(frozen=True, slots=True)
class Eviction:
    """An order of eviction."""

    by_cost: bool
    """Value is cost / age. Otherwise it is 1 / age: the least recently used chunk goes first."""
    trailing_first: bool
    """Among chunks of equal value, the last of the conversation goes first. Otherwise the first does."""
    whole: bool
    """All chunks that were freed together are evicted together."""


EVICTIONS = {
    "retention": Eviction(by_cost=True, trailing_first=False, whole=False),
    "lru": Eviction(by_cost=False, trailing_first=False, whole=False),
    "lru-conversation": Eviction(by_cost=False, trailing_first=False, whole=True),
    "tail-first": Eviction(by_cost=False, trailing_first=True, whole=False),
    "pauses": Eviction(by_cost=True, trailing_first=False, whole=False),
    "ttl": Eviction(by_cost=False, trailing_first=False, whole=False),
    "hits": Eviction(by_cost=False, trailing_first=False, whole=False),
}
"""The orders by name. The last three also go by what is known of turns (`turn_queue.make_turns`)."""


class Victims(Protocol):
    """Chunks by ascending value."""

    def pop(self, below: float = math.inf) -> Chunk | None:
        """Remove the chunk of the lowest value. Returns None if there is none, or if its value is not `below` this."""
        ...


class IdleOrder(Protocol):
    """Idle blocks of one tier by value."""

    @property
    def blocks(self) -> Mapping[int, object]:
        """The blocks that are here."""
        ...

    def add_all(self, blocks: Iterable[int], indices: Iterable[int], use: Use) -> None:
        """Add blocks that were last used together. `indices` are their places in their sequence, 0 for the first."""
        ...

    def among(self, start: int, stop: int, index: PrefixIndex) -> list[tuple[Use, int, bytes]]:
        """For each idle block in [start, stop): its last use, its place in its sequence, and its digest."""
        ...

    def renew(self, block: int, use: Use) -> None:
        """Count a block as used again."""
        ...

    def last_use(self, block: int) -> Use | None:
        """Return the last use of a block; None if `blocks` does not contain the block."""
        ...

    def take(self, block: int) -> Use:
        """Remove a block. Returns its last use."""
        ...

    def move(self, block: int, target: int) -> None:
        """Move the entry of a block to block `target`. Its value stays."""
        ...

    def remove(self, blocks: Sequence[int]) -> list[int]:
        """Remove those of these blocks that are here. Returns the others."""
        ...

    def victims(self, now: float) -> Victims:
        """All chunks, the lowest value first. Until the last is popped, nothing else may add or remove blocks."""
        ...


class Turns(Protocol):
    """The knowledge of ended sequences by which an eviction goes. `now` is in seconds and never decreases."""

    by_age: bool
    """Whether the worth of state is one over its age, whatever is known of its turn."""

    def begin(self, digests: Sequence[bytes], found: int, now: float) -> Start:
        """A sequence with these blocks begins, the first `found` of which are cached: it may continue a turn."""
        ...

    def left(
        self, digests: Sequence[bytes], departure: Departure, start: Start, call: int, now: float, *, prompt: int = 0
    ) -> int:
        """A sequence with these full blocks has ended, the first `prompt` of which are those of its prompt.

        Returns how many of them, the first, are not its alone. The call of number `call` is about to free its own
        blocks, and the call after it the others, if there are any.
        """
        ...

    def note(self, request: str, pause: Pause, now: float) -> bool:
        """Take note of what is known now of the pause after a request. Returns False if nobody remembers it."""
        ...

    def worth(self, last: float, call: int, now: float) -> float:
        """Worth, per unit of cost and second, of state that was last used at `last` by this call."""
        ...

    def worth_at(self, digest: bytes, last: float, now: float) -> float:
        """`worth` of state that ends with the block of this digest."""
        ...

    def wish_at(self, digest: bytes) -> Wish:
        """The client's wish for state that ends with the block of this digest, and whose it is."""
        ...

    def order(self, rule: RetentionRule, capacity: int) -> IdleOrder:
        """An order of the idle blocks of a tier with `capacity` blocks."""
        ...


class Untracked:
    """Nothing is known of turns but when their state was last used (`Turns`)."""

    by_age = True

    def begin(self, digests: Sequence[bytes], found: int, now: float) -> Start:
        """NEW: nothing is known of the sequence before."""
        return NEW

    def left(
        self, digests: Sequence[bytes], departure: Departure, start: Start, call: int, now: float, *, prompt: int = 0
    ) -> int:
        """Do nothing: the last use of the blocks is all, and they are freed together."""
        return 0

    def note(self, request: str, pause: Pause, now: float) -> bool:
        """False: nobody remembers requests."""
        return False

    def worth(self, last: float, call: int, now: float) -> float:
        """One over the time since the last use."""
        return 1.0 / max(now - last, MIN_AGE)

    def worth_at(self, digest: bytes, last: float, now: float) -> float:
        """One over the time since the last use."""
        return self.worth(last, 0, now)

    def wish_at(self, digest: bytes) -> Wish:
        """No wish: nobody remembers it."""
        return NO_WISH

    def order(self, rule: RetentionRule, capacity: int) -> IdleOrder:
        """The order by cost and last use."""
        return Retention(rule)


UNTRACKED: Turns = Untracked()


@dataclass(frozen=True, slots=True)
class RetentionRule:
    """The value of a chunk: V = Cost(l) / T (Pensieve §4.3.1), or an order to compare it with."""

    eviction: Eviction = EVICTIONS["retention"]
    cost: Cost = cost_by_position
    chunk_blocks: int = 2
    """Number of blocks in a chunk. Chunks are evicted whole."""
    block_size: int = 16
    turns: Turns = UNTRACKED
    """The knowledge of the turns that the chunks belong to. All tiers share it."""

    @classmethod
    def of(cls, config: CoreConfig, cost: Cost, turns: Turns = UNTRACKED) -> RetentionRule:
        """The rule that a configuration names. Its chunk size is rounded up to whole blocks."""
        chunk_blocks = -(-config.chunk_size // config.block_size)
        return cls(EVICTIONS[config.eviction], cost, chunk_blocks, config.block_size, turns)

    def order(self, capacity: int) -> IdleOrder:
        """The order of the idle blocks of a tier with `capacity` blocks."""
        return self.turns.order(self, capacity)

    def from_the_end(self) -> RetentionRule:
        """This rule where a block is of no use without all blocks before it.

        Then age alone decides which conversation goes first, and its last chunk goes first.
        """
        return replace(self, eviction=replace(self.eviction, by_cost=False, trailing_first=True))

    def cost_class(self, index: int) -> int:
        """Cost class of the chunk that holds block `index` of a sequence.

        The first 32 chunks have a class each; beyond, each doubling of the position has 16 classes. So the costs within
        a class differ by at most 1/16, and 2^20 positions need about 300 classes.
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


class ClassQueue:
    """The blocks of one cost class, the least recently used first.

    Most blocks arrive in that order and are appended to `ordered`. A block whose copy to the host has just completed
    may have been idle for longer than blocks that are here already. Such `late` blocks go into a heap. The heap keeps
    the stale entries of removed blocks until they come up, or until they are half of it.
    """

    def __init__(self, cost: float) -> None:
        self.cost = cost
        self.ordered: OrderedDict[int, ChunkKey] = OrderedDict()
        self._newest = -math.inf
        """The latest use of any block that `ordered` ever held."""
        self.late: dict[int, ChunkKey] = {}
        self._heap: list[tuple[ChunkKey, int]] = []

    def __len__(self) -> int:
        return len(self.ordered) + len(self.late)

    def add(self, block: int, key: ChunkKey) -> None:
        """Add a block. O(1), or O(log n) if it is late."""
        if self.accepts(key[0]):
            self.ordered[block] = key
            return
        self.late[block] = key
        heappush(self._heap, (key, block))
        if len(self._heap) > 2 * len(self.late) + 64:
            self._heap = [(key, block) for block, key in self.late.items()]
            heapify(self._heap)

    def accepts(self, last: float) -> bool:
        """Whether blocks last used at `last` belong at the end of `ordered`. If so, the caller must append them."""
        if last < self._newest:
            return False
        self._newest = last
        return True

    def remove(self, block: int) -> ChunkKey:
        """Remove a block. Returns its key."""
        key = self.ordered.pop(block, None)
        return self.late.pop(block) if key is None else key

    def key(self, block: int) -> ChunkKey:
        """The key of a block. The block must be in this queue."""
        key = self.ordered.get(block)
        return self.late[block] if key is None else key

    def value(self, now: float) -> float:
        """Value of the first chunk. The queue must not be empty."""
        return self.cost / max(now - self.first()[0], MIN_AGE)

    def first(self) -> ChunkKey:
        """Key of the first chunk. The queue must not be empty."""
        key = next(iter(self.ordered.values()), NEVER)
        return min(key, self._first_late()) if self._heap else key

    def _first_late(self) -> ChunkKey:
        heap = self._heap
        while heap and self.late.get(heap[0][1]) != heap[0][0]:
            heappop(heap)
        return heap[0][0] if heap else NEVER

    def pop(self) -> tuple[ChunkKey, list[int]]:
        """Remove the first chunk. Returns its key, and all blocks that have this key."""
        key, ordered, blocks = self.first(), self.ordered, []
        while ordered:
            block = next(iter(ordered))
            if ordered[block] != key:
                break
            del ordered[block]
            blocks.append(block)
        while self._heap and self._first_late() == key:
            _, block = heappop(self._heap)
            del self.late[block]
            blocks.append(block)
        return key, blocks


class Retention:
    """Idle blocks by value. The order changes as time passes, yet no operation takes more than O(log n).

    Within one cost class V = cost / age orders blocks by age alone, and that order never changes. So each class is a
    queue by last use, and the block of the lowest value is at the head of one of the queues.
    """

    def __init__(self, rule: RetentionRule) -> None:
        self._rule = rule
        self._queues: dict[int, ClassQueue] = {}
        self._chunks: dict[int, tuple[int, int]] = {}
        """Class and rank among the chunks freed together, by chunk index in a sequence."""
        self.blocks: dict[int, int] = {}
        """Cost class of each block."""

    def add_all(self, blocks: Iterable[int], indices: Iterable[int], use: Use) -> None:
        """Add blocks that were last used together. `indices` are their places in their sequence, 0 for the first."""
        classes, size, at = self.blocks, self._rule.chunk_blocks, -1
        for block, index in zip(blocks, indices, strict=True):
            if index // size != at:  # consecutive blocks mostly share a chunk: look its class up once
                at = index // size
                number, rank = self._chunks.get(at) or self._classify(at)
                key, queue = (*use, rank), self._queues[number]
                ordered, in_order = queue.ordered, queue.accepts(use[0])
            classes[block] = number
            if in_order:
                ordered[block] = key
            else:
                queue.add(block, key)

    def _classify(self, chunk: int) -> tuple[int, int]:
        rule = self._rule
        eviction, number = rule.eviction, rule.cost_class(chunk * rule.chunk_blocks)
        if number not in self._queues:
            self._queues[number] = ClassQueue(rule.class_cost(number))
        rank = 0 if eviction.whole else -chunk if eviction.trailing_first else chunk
        self._chunks[chunk] = number, rank
        return number, rank

    def among(self, start: int, stop: int, index: PrefixIndex) -> list[tuple[Use, int, bytes]]:
        """For each idle block in [start, stop): its last use, its place in its sequence, and its digest."""
        found = []
        for block in range(start, stop):
            if (number := self.blocks.get(block)) is not None and (digest := index.digests[block]) is not None:
                last, call, _ = self._queues[number].key(block)
                found.append(((last, call), index.indices[block], digest))
        return found

    def renew(self, block: int, use: Use) -> None:
        """Count a block as used again."""
        queue = self._queues[self.blocks[block]]
        *_, rank = queue.remove(block)
        queue.add(block, (*use, rank))

    def last_use(self, block: int) -> Use | None:
        """Return the last use of a block; None if `blocks` does not contain the block."""
        number = self.blocks.get(block)
        return None if number is None else self._queues[number].key(block)[:2]

    def take(self, block: int) -> Use:
        """Remove a block. Returns its last use."""
        last, call, _ = self._queues[self.blocks.pop(block)].remove(block)
        return last, call

    def move(self, block: int, target: int) -> None:
        """Move the entry of a block to block `target`. Its value stays."""
        number = self.blocks.pop(block)
        queue = self._queues[number]
        self.blocks[target] = number
        queue.add(target, queue.remove(block))

    def remove(self, blocks: Sequence[int]) -> list[int]:
        """Remove those of these blocks that are here. Returns the others."""
        others: list[int] = []
        at = None
        for block, number in zip(blocks, map(self.blocks.pop, blocks, repeat(None)), strict=True):
            if number is None:
                others.append(block)
                continue
            if number != at:
                at, queue = number, self._queues[number]
                ordered, late = queue.ordered, queue.late
            if ordered.pop(block, None) is None:
                del late[block]
        return others

    def victims(self, now: float) -> ClassVictims:
        """All chunks, the lowest value first. Until the last is popped, nothing else may add or remove blocks."""
        return ClassVictims(self._queues, self.blocks, now)


class Chunk(NamedTuple):
    """An evicted chunk, and its value."""

    value: float
    blocks: list[int]
    use: Use


class ClassVictims:
    """Evicts chunks by ascending value. O(classes) to begin with, O(log classes) for each chunk."""

    def __init__(self, queues: dict[int, ClassQueue], blocks: dict[int, int], now: float) -> None:
        self._queues, self._blocks, self._now = queues, blocks, now
        self._heads = [(queue.value(now), number) for number, queue in queues.items() if queue]
        heapify(self._heads)

    def pop(self, below: float = math.inf) -> Chunk | None:
        """Remove the chunk of the lowest value. Returns None if there is none, or if its value is not `below` this."""
        if not self._heads or self._heads[0][0] >= below:
            return None
        value, number = heappop(self._heads)
        queue = self._queues[number]
        (last, call, _), blocks = queue.pop()
        for block in blocks:
            del self._blocks[block]
        if queue:
            heappush(self._heads, (queue.value(self._now), number))
        return Chunk(value, blocks, (last, call))


class IdleBlocks:
    """The device's blocks that hold cached state and have no owner. Blocks being swapped out are not among them.

    Each block is retained or reclaimable. A retained block becomes reclaimable when it is evicted. A reclaimable block
    still holds its state and may be shared again, until it is allocated for other state.
    """

    def __init__(self, rule: RetentionRule, capacity: int = 0) -> None:
        """`capacity` is the number of blocks of the device."""
        self.retained = rule.order(capacity)
        self._most_ahead = max(1, EVICTED_AHEAD // rule.block_size)
        self.reclaimable: OrderedDict[int, None] = OrderedDict()
        """Reclaimable blocks in the order in which they are reclaimed."""

    def touch(self, block: int, use: Use) -> None:
        """Count a block as used again."""
        if block in self.reclaimable:
            self.reclaimable.move_to_end(block)
        else:
            self.retained.renew(block, use)

    def put_first(self, block: int, use: Use) -> None:
        """Reclaim a block before all others: `use` is earlier than their last uses."""
        if block in self.reclaimable:
            self.reclaimable.move_to_end(block, last=False)
        else:
            self.retained.renew(block, use)

    def move(self, block: int, target: int) -> None:
        """Move the entry of a block to block `target`. A reclaimable one is then the last to be reclaimed."""
        if block in self.reclaimable:
            del self.reclaimable[block]
            self.reclaimable[target] = None
        else:
            self.retained.move(block, target)

    def reclaim(self, count: int, now: float, batch: int) -> list[int]:
        """Remove `count` idle blocks, so that they can be allocated. At least that many must be idle.

        Blocks that were evicted before (reclaimable) go first. If they are too few, retained blocks are evicted: at
        least `batch` of them, but no more than EVICTED_AHEAD tokens beyond those wanted. An evicted block that is not
        removed keeps its contents, and can be shared again until it is allocated.
        """
        if count > len(self.reclaimable):
            wanted = max(count - len(self.reclaimable), min(batch, self._most_ahead))
            victims = self.retained.victims(now)
            while wanted > 0 and (chunk := victims.pop()) is not None:
                wanted -= len(chunk.blocks)
                self.reclaimable.update(dict.fromkeys(chunk.blocks))
        return [self.reclaimable.popitem(last=False)[0] for _ in range(count)]
