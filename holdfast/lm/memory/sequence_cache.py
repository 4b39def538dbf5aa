"""SequenceCache: what of one sequence is in the KV cache, and in which blocks."""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from holdfast.lm.memory.block_pool import BlockPool
from holdfast.lm.memory.digests import chain_digests
from holdfast.lm.types import BlockCopy


@dataclass(frozen=True, slots=True)
class Found:
    """What is kept of a sequence, by index in its block table; the rest must be computed."""

    device: dict[int, int] = field(default_factory=dict)
    """Blocks on the device."""
    host: dict[int, bytes] = field(default_factory=dict)
    """Digests of blocks that only the host has."""

    def __len__(self) -> int:
        """Blocks that need not be computed."""
        return len(self.device) + len(self.host)


class SequenceCache:
    """The block table of one sequence, the positions that are still to be computed, and the hashes of its blocks.

    Plans run on the device in the order in which they are made, so a position counts as resident for every plan after
    the one that computes it. Within that very plan too: a layer writes all keys of a step before it attends.

        0 ······ sealed ······ planned ·· hole ·· island ·· hole ·· capacity
        └ full blocks whose   └ written by        └ kept: was        └ blocks are
          tokens are known      some plan           never lost         there for it

    State that was dropped in front of state that was kept leaves a hole (Pensieve §4.3.4): the digests of a sequence's
    blocks follow from its tokens alone, so an island is found whether or not what precedes it is there. Holes are
    planned in ascending order, so whatever a segment attends to is there or comes within its own step.

    Why sharing is safe while steps are in flight: a block is sealed only when each of its tokens is known to the host
    and each of its positions is planned. A plan writes position p of a sequence with the token that stands at p, so
    whatever plan writes to a sealed block writes what it holds. Plans for a sequence that has ended meanwhile write
    beyond its last known token: into its unsealed tail, which is released as a free block, and before any later plan
    that gives this block to another sequence. The prefix cache offers sealed blocks alone.
    """

    __slots__ = ("_cached", "_digests", "_islands", "_pool", "_root", "blocks", "capacity", "next_full", "planned")

    def __init__(self, pool: BlockPool, root: bytes | None) -> None:
        """`root` starts the hash chain (Identity.root); None keeps the sequence from sharing."""
        self._pool = pool
        self._root = root
        self._digests: list[bytes] = []
        self._islands: deque[tuple[int, int]] = deque()
        self.blocks: list[int] = []
        """The block table; the memory's own list, not to be changed."""
        self.capacity = 0
        """Positions that the blocks hold."""
        self.planned = 0
        """Positions [0, planned) are resident, or are computed by a plan already made."""
        self._cached = 0
        self.next_full = 0
        """`seal` has nothing to do while fewer tokens than this are known."""
        self._set_next_full()

    def missing(self, length: int) -> tuple[tuple[int, int], ...]:
        """The ranges of [0, length) that no plan computes yet, ascending; each becomes a segment of its own."""
        ranges, at = [], self.planned
        for start, stop in self._islands:
            ranges.append((at, start))
            at = stop
        if at < length:
            ranges.append((at, length))
        return tuple(ranges)

    def plan(self, start: int, stop: int) -> None:
        """Note that a plan computes [start, stop), which begins the first of the missing ranges."""
        assert start == self.planned and stop <= self.capacity
        self.planned = stop
        if self._islands and stop >= self._islands[0][0]:
            assert stop == self._islands[0][0]
            self.planned = self._islands.popleft()[1]

    def match(self, tokens: Sequence[int]) -> Found:
        """All full blocks that are kept. The last token is left out: it must be computed to give logits."""
        found, pool = Found(), self._pool
        if self._root is not None:
            count = (len(tokens) - 1) // pool.block_size
            self._hash(count, tokens)
            digests = self._digests if len(self._digests) == count else self._digests[:count]
            blocks = pool.find_all(digests)
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
        return found

    def touch(self, tokens: Sequence[int]) -> None:
        """Count what is kept of a sequence that will soon be opened as used now, so that it is not given up before."""
        found = self.match(tokens)
        if found:
            self._pool.touch(found.device.values(), found.host.values())

    def allocate(self, found: Found, length: int) -> tuple[BlockCopy, ...]:
        """Take in what is kept, and blocks for the rest of `length` positions. Nothing may be held before.

        Gives the copies that bring in what is on the host, to be done by the plan in the making.
        """
        assert not self.blocks
        pool = self._pool
        pool.share(found.device.values())
        count = pool.blocks_for(length)
        if not found.host and len(found.device) and next(reversed(found.device)) == len(found.device) - 1:
            self.blocks.extend(
                (*found.device.values(), *pool.allocate(count - len(found.device)))
            )  # no holes: most often
        elif found:
            fresh = iter(pool.allocate(count - len(found.device)))
            self.blocks.extend(found.device[index] if index in found.device else next(fresh) for index in range(count))
        else:
            self.blocks.extend(pool.allocate(count))
        self.capacity = count * pool.block_size
        copies = tuple(pool.swap_in(self.blocks[index], digest, index) for index, digest in found.host.items())
        self._settle(found)
        return copies

    def _settle(self, found: Found) -> None:
        """Set what is planned, and the islands beyond it, from what was found."""
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

    def grow(self, count: int) -> None:
        """Add `count` blocks at the end of the table."""
        self.blocks.extend(self._pool.allocate(count))
        self.capacity = len(self.blocks) * self._pool.block_size

    def cache_blocks(self, tokens: Sequence[int]) -> None:
        """Make every block sharable that is full of known tokens and wholly planned."""
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

    def free(self) -> None:
        """Give up all blocks, those first that go first where all else is equal."""
        trailing_first = self._pool.rule.eviction.trailing_first
        self._pool.free(reversed(self.blocks) if trailing_first else self.blocks)
        self.blocks.clear()
        self._islands.clear()
        self.capacity = self.planned = self._cached = 0
        self._set_next_full()

    def _set_next_full(self) -> None:
        self.next_full = (self._cached + 1) * self._pool.block_size if self._root is not None else sys.maxsize

    def _hash(self, count: int, tokens: Sequence[int]) -> None:
        """Know the digests of the first `count` blocks, all full; the chain is kept, so each block is hashed once."""
        digests, known, pool = self._digests, len(self._digests), self._pool
        size = pool.block_size
        if not known and count:
            assert self._root is not None
            digests += pool.chains.digests(self._root, tokens[: count * size])
        elif known < count:
            digests += chain_digests(digests[-1], tokens[known * size : count * size], size)
