"""BlockPool: who owns each block of the KV cache, and which unowned blocks still hold a reusable prefix."""

from __future__ import annotations

import hashlib
import struct
from collections import OrderedDict
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class StateIdentity:
    """What cached state depends on besides its tokens. State of different identities is never shared."""

    model: str
    adapter: str = ""
    dtype: str = ""

    def root(self, tenant: str) -> bytes:
        """The digest that starts a tenant's hash chains. Fields are length-prefixed, so none can pose as another."""
        digest = hashlib.sha256()
        for text in (self.model, self.adapter, self.dtype, tenant):
            encoded = text.encode()
            digest.update(struct.pack("<Q", len(encoded)))
            digest.update(encoded)
        return digest.digest()


class BlockPool:
    """The blocks 0 to `num_blocks - 1` of one tier; every operation costs O(1) a block.

    A block is in exactly one of three states:

        free ──take──▶ owned (by one sequence; by several once it is sealed) ──release──▶ free
                         ▲                                                └──release──▶ cached (if sealed)
                         └── share ────────────────────────────────────────────────────────┘
                              cached ──take, when no free block is left, least recently released first──▶ owned

    A sealed block is full and never written again, and is found by the SHA-256 digest of its contents and of all that
    came before them. Raises RuntimeError when it is asked for what would break these states.
    """

    def __init__(self, num_blocks: int, block_size: int) -> None:
        if num_blocks < 1 or block_size < 1:
            raise ValueError(f"a pool of {num_blocks} blocks of {block_size} tokens; both must be at least 1")
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._pack = struct.Struct(f"<{block_size}I").pack
        self._owners = [0] * num_blocks
        self._digests: list[bytes | None] = [None] * num_blocks
        self._sealed: dict[bytes, int] = {}
        self._free = list(range(num_blocks - 1, -1, -1))
        self._cached: OrderedDict[int, None] = OrderedDict()

    @property
    def available(self) -> int:
        """Blocks that can be taken: free ones, and cached ones that would be reclaimed."""
        return len(self._free) + len(self._cached)

    @property
    def cached(self) -> int:
        """Unowned blocks that still hold a reusable prefix."""
        return len(self._cached)

    @property
    def used(self) -> int:
        """Blocks with an owner."""
        return self.num_blocks - self.available

    def blocks_for(self, positions: int) -> int:
        """Blocks that hold this many positions."""
        return -(-positions // self.block_size)

    def take(self, count: int) -> list[int]:
        """Give `count` blocks to one owner; free ones first, then the longest unused prefixes are given up."""
        free = self._free
        if count > len(free):
            self._reclaim(count - len(free))
        taken = free[: -count - 1 : -1]
        del free[len(free) - count :]
        for block in taken:
            self._owners[block] = 1
        return taken

    def digest(self, parent: bytes, tokens: Sequence[int]) -> bytes:
        """What identifies a full block: SHA-256 of the digest before it and its tokens as 32-bit little-endian."""
        return hashlib.sha256(parent + self._pack(*tokens)).digest()

    def find(self, digest: bytes) -> int | None:
        """The sealed block with this digest, owned or not."""
        return self._sealed.get(digest)

    def unowned(self, blocks: Iterable[int]) -> int:
        """How many of these sealed blocks nobody owns: sharing them makes that many fewer available."""
        return sum(not self._owners[block] for block in blocks)

    def share(self, block: int) -> None:
        """Add an owner to a sealed block."""
        if self._digests[block] is None:
            raise RuntimeError(f"block {block} is shared, but it is not sealed")
        if not self._owners[block]:
            del self._cached[block]
        self._owners[block] += 1

    def seal(self, block: int, digest: bytes) -> None:
        """Make an owned, full block sharable. The first block of a digest stays the one that is found."""
        if not self._owners[block]:
            raise RuntimeError(f"block {block} is sealed, but nobody owns it")
        if digest not in self._sealed:
            if self._digests[block] is not None:
                raise RuntimeError(f"block {block} is sealed twice, with different contents")
            self._sealed[digest] = block
            self._digests[block] = digest

    def release(self, blocks: Iterable[int]) -> None:
        """Take one owner from each block. Sealed ones without any are cached; the first of them is reclaimed first."""
        for block in blocks:
            owners = self._owners[block] - 1
            if owners < 0:
                raise RuntimeError(f"block {block} is released, but nobody owns it")
            self._owners[block] = owners
            if not owners:
                if self._digests[block] is None:
                    self._free.append(block)
                else:
                    self._cached[block] = None

    def _reclaim(self, count: int) -> None:
        """Free the `count` blocks that have been cached for longest."""
        if count > len(self._cached):
            raise RuntimeError(f"{count - len(self._cached)} blocks more are asked for than are available")
        for _ in range(count):
            block, _ = self._cached.popitem(last=False)
            digest = self._digests[block]
            assert digest is not None
            del self._sealed[digest]
            self._digests[block] = None
            self._free.append(block)

    def check(self, tables: Collection[Sequence[int]]) -> None:
        """Raise RuntimeError unless these block tables, and they alone, account for every block that is used."""
        owners = [0] * self.num_blocks
        for table in tables:
            if len(set(table)) != len(table):
                raise RuntimeError(f"a block stands twice in one table: {table}")
            for block in table:
                owners[block] += 1
        unowned = set(self._free) | self._cached.keys()
        if len(unowned) != len(self._free) + len(self._cached):
            raise RuntimeError("a block is free twice, or free and cached at once")
        for block, count in enumerate(owners):
            if count != self._owners[block]:
                raise RuntimeError(f"block {block} stands in {count} tables, but counts {self._owners[block]} owners")
            if (count == 0) != (block in unowned):
                raise RuntimeError(f"block {block} has {count} owners, and is {'' if count else 'not '}free or cached")
            digest = self._digests[block]
            if count > 1 and digest is None:
                raise RuntimeError(f"block {block} has {count} owners, but was never sealed")
            if (digest is None and block in self._cached) or (digest is not None and self._sealed.get(digest) != block):
                raise RuntimeError(f"block {block} is cached without being found by its digest")
        if len(self._sealed) != sum(digest is not None for digest in self._digests):
            raise RuntimeError("a digest leads to a block that does not bear it")
