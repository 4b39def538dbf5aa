"""SequenceCache: which positions of one sequence are in the KV cache, and in which blocks."""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from holdfast.lm.memory.block_pool import BlockPool
from holdfast.lm.memory.digests import block_digests, usable_blocks
from holdfast.lm.memory.turns import NEW, NOTHING_SAID, Departure
from holdfast.lm.types import BlockCopy


@dataclass(frozen=True, slots=True)
class Found:
    """The cached blocks of a sequence, by index in its block table. All other blocks must be computed."""

    device: dict[int, int] = field(default_factory=dict)
    """Blocks on the device."""
    host: dict[int, bytes] = field(default_factory=dict)
    """Digests of blocks that only the host has."""

    def __len__(self) -> int:
        """Number of blocks that need not be computed."""
        return len(self.device) + len(self.host)

    @property
    def shared(self) -> Collection[int]:
        """The blocks on the device."""
        return self.device.values()

    @property
    def copied(self) -> Collection[int]:
        """Empty: the sequence shares all blocks on the device."""
        return ()

    def positions(self, block_size: int) -> int:
        """Number of positions that need not be computed."""
        return len(self) * block_size

    def first(self, count: int) -> Found:
        """The blocks among these whose index is below `count`."""
        device = {index: block for index, block in self.device.items() if index < count}
        return Found(device, {index: digest for index, digest in self.host.items() if index < count})


class SequenceCache:
    """The block table of one sequence, the positions still to be computed, and the digests of its blocks.

    Plans run on the device in the order in which they are made. So a position counts as resident for the plan that
    computes it and for every later plan. Within one plan this holds because a layer writes all keys of a step before it
    attends.

        0 ······ cached ······ planned ·· hole ·· island ·· hole ·· capacity
        └ full blocks whose   └ some plan         └ cached before   └ end of the
          tokens are known      writes them                           blocks

    If state was dropped before cached state, it leaves a hole (Pensieve §4.3.4). The digests of a sequence's blocks
    follow from its tokens alone, so an island after a hole is found too. Holes are planned in ascending order, so
    everything that a segment attends to is resident or is computed in the same step.

    Sharing is safe while steps are in flight, because a block is cached only when all of its tokens are known to the
    host and all of its positions are planned. A plan writes position p of a sequence with the token at p, so a plan
    that writes to a cached block writes what the block already holds. A plan in flight for a sequence that has ended
    writes beyond its last known token, into a block that is not cached. Only later plans use that block again.
    """

    __slots__ = (
        "_cached",
        "_digests",
        "_islands",
        "_pool",
        "_root",
        "_start",
        "blocks",
        "capacity",
        "next_full",
        "planned",
    )

    def __init__(self, pool: BlockPool, root: bytes | None) -> None:
        """`root` starts the chain of digests (`Identity.root`). None: the sequence shares no blocks."""
        self._pool = pool
        self._root = root
        self._digests: list[bytes] = []
        self._islands: deque[tuple[int, int]] = deque()
        self._start = NEW
        """The state that the sequence began with."""
        self.blocks: list[int] = []
        """The block table. Callers must not change it."""
        self.capacity = 0
        """Number of positions that the blocks can hold."""
        self.planned = 0
        """Positions [0, planned) are resident, or a plan already made computes them."""
        self._cached = 0
        """Number of leading blocks that are cached."""
        self.next_full = 0
        """`cache_blocks` has nothing to do while fewer tokens than this are known."""
        self._set_next_full()

    @property
    def digests(self) -> list[bytes]:
        """The digests of its first blocks, as far as they were needed; empty if the sequence shares no blocks.

        Always the same list. Callers must not change it.
        """
        return self._digests

    def missing(self, length: int) -> tuple[tuple[int, int], ...]:
        """The ranges of [0, length) that are not cached and that no plan computes yet, in ascending order."""
        ranges, at = [], self.planned
        for start, stop in self._islands:
            ranges.append((at, start))
            at = stop
        if at < length:
            ranges.append((at, length))
        return tuple(ranges)

    def most_cuts(self, length: int) -> int:
        """None: blocks are kept wherever a step ends."""
        return 0

    def plan(self, start: int, stop: int) -> None:
        """Record that a plan computes [start, stop), the beginning of the first missing range."""
        assert start == self.planned and stop <= self.capacity
        self.planned = stop
        if self._islands and stop >= self._islands[0][0]:
            assert stop == self._islands[0][0]
            self.planned = self._islands.popleft()[1]

    def draft(self, start: int, stop: int) -> int:
        """Have the current plan verify a draft at [start + 1, stop), as far as the blocks have room for it.

        See `protocol.SequenceState.draft`.
        """
        stop = min(stop, self.capacity)
        if stop <= start + 1:
            return start + 1
        self.rollback(start)
        return stop

    def accept(self, count: int) -> None:
        """Count the first `count` positions of the verified draft as computed."""
        if count:
            self.plan(self.planned, self.planned + count)

    def rollback(self, length: int) -> None:
        """Count the positions from `length` on as not computed. None of them may be in a cached block."""
        assert not self._islands and self._cached * self._pool.block_size <= length <= self.planned
        self.planned = length

    def match(self, tokens: Sequence[int]) -> Found:
        """Find all full blocks that are cached. The last token never counts: it must be computed to give logits.

        Blocks of the host that are cheaper to compute than to copy are left out.
        """
        found, pool = Found(), self._pool
        if self._root is not None:
            digests = self.usable_digests(tokens)
            count, blocks = len(digests), pool.find_all(digests)
            on_device = [block for block in blocks if block is not None]
            if len(on_device) == count:
                found.device.update(enumerate(on_device))
                return found
            find_on_host = pool.find_on_host
            for index, block in enumerate(blocks):
                if block is not None:
                    found.device[index] = block
                elif find_on_host(digests[index]) is not None:
                    found.host[index] = digests[index]
            if found.host and pool.prices is not None:
                worth = pool.prices.worth([*found.host], pool.host_link)
                if len(worth) < len(found.host):
                    return Found(found.device, {index: digests[index] for index in worth})
        return found

    def usable_digests(self, tokens: Sequence[int]) -> Sequence[bytes]:
        """The digests of the full blocks whose state can be used. The last token never counts.

        The sequence must share blocks.
        """
        count = usable_blocks(len(tokens), self._pool.block_size)
        self._hash(count, tokens)
        return self._digests if len(self._digests) == count else self._digests[:count]

    def lacking(self, tokens: Sequence[int]) -> dict[int, bytes]:
        """The digests of all full blocks that are cached in neither tier, by place. The last token never counts."""
        if self._root is None:
            return {}
        pool, digests = self._pool, self.usable_digests(tokens)
        found = pool.find_all(digests)
        return {
            index: digest
            for index, (digest, block) in enumerate(zip(digests, found, strict=True))
            if block is None and pool.find_on_host(digest) is None
        }

    def candidates(self, tokens: Sequence[int]) -> Sequence[bytes]:
        """Empty: blocks serve without another state."""
        return ()

    def touch(self, tokens: Sequence[int], now: float) -> None:
        """Count the cached blocks of a waiting sequence as used now, so that they are still cached when it starts."""
        found = self.match(tokens)
        self._begin(found, now)
        if found:
            self._pool.touch(found.device.values(), found.host.values(), now)

    def allocate(self, found: Found, length: int, now: float) -> tuple[BlockCopy, ...]:
        """Share the blocks found and allocate blocks for the rest of `length` positions. The table must be empty.

        Returns the copies from the host that the current plan must do.
        """
        assert not self.blocks
        self._begin(found, now)
        pool = self._pool
        pool.share(found.device.values())
        count = pool.blocks_for(length)
        fresh = pool.allocate(count - len(found.device), now)
        if not found.host and next(reversed(found.device), -1) == len(found.device) - 1:  # no holes: the common case
            self.blocks.extend((*found.device.values(), *fresh))
        else:
            rest = iter(fresh)
            self.blocks.extend(found.device[index] if index in found.device else next(rest) for index in range(count))
        self.capacity = count * pool.block_size
        copies = pool.swap_in([(self.blocks[index], digest, index) for index, digest in found.host.items()])
        self._settle(found)
        return copies

    def _begin(self, found: Found, now: float) -> None:
        """Note the state that the sequence begins with, unless that is noted already."""
        if self._start is NEW:
            self._start = self._pool.rule.turns.begin(self._digests, len(found), now)

    def _settle(self, found: Found) -> None:
        """Set the planned positions, and the islands beyond them, from the blocks found."""
        size, indices = self._pool.block_size, sorted((*found.device, *found.host))
        whole = not indices or indices[-1] == len(indices) - 1
        leading = len(indices) if whole else next(at for at, index in enumerate(indices) if at != index)
        self._cached = leading
        self.planned = leading * size
        for index in indices[leading:]:
            start, stop = index * size, (index + 1) * size
            if self._islands and self._islands[-1][1] == start:
                self._islands[-1] = self._islands[-1][0], stop
            else:
                self._islands.append((start, stop))
        self._set_next_full()

    def occupy(self, row: int) -> None:
        """Do nothing: the plan that starts the sequence writes its block table to its row."""

    def grow(self, now: float) -> None:
        """Add a block at the end of the table."""
        self.blocks += self._pool.allocate(1, now)
        self.capacity += self._pool.block_size

    def move(self, places: Mapping[int, int]) -> None:
        """Replace blocks of the table whose contents moved.

        `places` maps each old block to its new one (`BlockPool.lend`).
        """
        self.blocks[:] = [places.get(block, block) for block in self.blocks]

    def cache_blocks(self, tokens: Sequence[int]) -> None:
        """Cache every block whose tokens are all known and whose positions are all planned."""
        known = min(len(tokens), self.planned)
        if known < self.next_full:
            return
        pool = self._pool
        full = known // pool.block_size
        self._hash(full, tokens)
        for index in range(self._cached, full):
            pool.cache_block(self.blocks[index], self._digests[index], index)
        self._cached = full
        self.next_full = (full + 1) * pool.block_size

    def end(self, tokens: Sequence[int], now: float, departure: Departure = NOTHING_SAID) -> bool:
        """Free all blocks, because the sequence has ended. Its row is free, too."""
        if self.blocks:
            pool, digests, shared = self._pool, self._digests[: self._cached], 0
            if digests:
                prompt = departure.prompt // pool.block_size
                shared = pool.rule.turns.left(digests, departure, self._start, pool.uses + 1, now, prompt=prompt)
            self.free(now, shared)
        return True

    def suspend(self, tokens: Sequence[int], now: float) -> bool:
        """Free all blocks, because the sequence must wait. Its full blocks become idle.

        With a host tier they are copied there (Pensieve §4.3.5), and copied back when the sequence starts again. Blocks
        that were dropped meanwhile, and its last one, are computed again. Returns whether there is a host tier.
        """
        self.free(now)
        return self._pool.host is not None

    def free(self, now: float, shared: int = 0) -> None:
        """Free all blocks, the first `shared` of them as another use than the rest.

        Among blocks of equal value, those freed first are evicted first.
        """
        trailing_first = self._pool.rule.eviction.trailing_first
        for part in (self.blocks[shared:], self.blocks[:shared]) if shared else (self.blocks,):
            self._pool.free(reversed(part) if trailing_first else part, now)
        self.blocks.clear()
        self._islands.clear()
        self.capacity = self.planned = self._cached = 0
        self._set_next_full()

    def _set_next_full(self) -> None:
        self.next_full = (self._cached + 1) * self._pool.block_size if self._root is not None else sys.maxsize

    def _hash(self, count: int, tokens: Sequence[int]) -> None:
        """Make the digests of the first `count` blocks known. Known digests are kept, so each block is hashed once."""
        digests, known, pool = self._digests, len(self._digests), self._pool
        size = pool.block_size
        if not known and count:
            assert self._root is not None
            digests += pool.digest_cache.digests(self._root, tokens[: count * size])
        elif known < count:
            digests += block_digests(digests[-1], tokens[known * size : count * size], size)
