"""Residency: what of one sequence is in the KV cache, and in which blocks."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from holdfast.memory.blocks import BlockPool


class Residency:
    """The block table of one sequence, the positions that are still to be computed, and the hashes of its blocks.

    Plans run on the device in the order in which they are made, so a position counts as resident for every plan after
    the one that computes it. Within that very plan too: a layer writes all keys of a step before it attends.

        0 ······ sealed ······ planned ······ capacity
        └ full blocks whose   └ written by   └ blocks are
          tokens are known      some plan      there for it

    Why sharing is safe while steps are in flight: a block is sealed only when each of its tokens is known to the host
    and each of its positions is planned. A plan writes position p of a sequence with the token that stands at p, so
    whatever plan writes to a sealed block writes what it holds. Plans for a sequence that has ended meanwhile write
    beyond its last known token: into its unsealed tail, which is released as a free block, and before any later plan
    that gives this block to another sequence. The prefix cache offers sealed blocks alone.
    """

    __slots__ = ("_digests", "_pool", "_root", "_sealed", "blocks", "capacity", "next_seal", "planned")

    def __init__(self, pool: BlockPool, root: bytes | None) -> None:
        """`root` starts the hash chain (StateIdentity.root); None keeps the sequence from sharing."""
        self._pool = pool
        self._root = root
        self._digests: list[bytes] = []
        self.blocks: list[int] = []
        """The block table; the memory's own list, not to be changed."""
        self.capacity = 0
        """Positions that the blocks hold."""
        self.planned = 0
        """Positions [0, planned) are resident, or are computed by a plan already made."""
        self._sealed = 0
        self.next_seal = 0
        """`seal` has nothing to do while fewer tokens than this are known."""
        self._await_seal()

    def missing(self, length: int) -> tuple[tuple[int, int], ...]:
        """The ranges of [0, length) that no plan computes yet, ascending; each becomes a segment of its own."""
        return ((self.planned, length),) if self.planned < length else ()

    def plan(self, start: int, stop: int) -> None:
        """Note that a plan computes [start, stop), which begins one of the missing ranges."""
        assert start == self.planned and stop <= self.capacity
        self.planned = stop

    def match(self, tokens: Sequence[int]) -> list[int]:
        """The longest cached prefix as blocks. The last token is left out: it must be computed to give logits."""
        found: list[int] = []
        if self._root is not None:
            for index in range((len(tokens) - 1) // self._pool.block_size):
                block = self._pool.find(self._digest(index, tokens))
                if block is None:
                    break
                found.append(block)
        return found

    def open(self, shared: Sequence[int], length: int) -> None:
        """Take in a cached prefix, and blocks for the rest of `length` positions. Nothing may be held before."""
        assert not self.blocks
        for block in shared:
            self._pool.share(block)
        self.blocks.extend(shared)
        self._sealed = len(shared)
        self.planned = len(shared) * self._pool.block_size
        self._await_seal()
        self.grow(self._pool.blocks_for(length) - len(shared))

    def grow(self, count: int) -> None:
        """Add `count` blocks at the end of the table."""
        self.blocks.extend(self._pool.take(count))
        self.capacity = len(self.blocks) * self._pool.block_size

    def seal(self, tokens: Sequence[int]) -> None:
        """Make every block sharable that is full of known tokens and wholly planned."""
        full = min(len(tokens), self.planned) // self._pool.block_size
        if full > self._sealed and self._root is not None:
            for index in range(self._sealed, full):
                self._pool.seal(self.blocks[index], self._digest(index, tokens))
            self._sealed = full
            self._await_seal()

    def release(self) -> None:
        """Give up all blocks, the last ones first in line to be reclaimed: a prefix is worth more than its end."""
        self._pool.release(reversed(self.blocks))
        self.blocks.clear()
        self.capacity = self.planned = self._sealed = 0
        self._await_seal()

    def _await_seal(self) -> None:
        self.next_seal = (self._sealed + 1) * self._pool.block_size if self._root is not None else sys.maxsize

    def _digest(self, index: int, tokens: Sequence[int]) -> bytes:
        """Digest of full block `index`; the chain is kept, so each block is hashed once."""
        digests, size = self._digests, self._pool.block_size
        while len(digests) <= index:
            start = len(digests) * size
            parent = digests[-1] if digests else self._root
            assert parent is not None
            digests.append(self._pool.digest(parent, tokens[start : start + size]))
        return digests[index]
