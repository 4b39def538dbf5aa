"""PrefixIndex: finds the cached blocks of one tier by the digest of their contents."""

from __future__ import annotations

from collections.abc import Iterable


class PrefixIndex:
    """The cached blocks of a tier, by digest. A cached block is full and is not written again.

    A digest identifies the tokens of a block and all tokens before them, so equal digests mean equal state.
    """

    def __init__(self, num_blocks: int) -> None:
        self.blocks: dict[bytes, int] = {}
        """Block by digest. Always the same dict."""
        self.digests: list[bytes | None] = [None] * num_blocks
        """Digest by block; None if the block is not cached. Always the same list."""
        self.indices = [0] * num_blocks
        """Index of each cached block in its sequence: 0 for the first block."""

    def add(self, block: int, digest: bytes, index: int) -> None:
        """Cache a block under a digest that no other block has. Raises RuntimeError if the block is cached already."""
        if self.digests[block] is not None:
            raise RuntimeError(f"block {block} is cached twice, with different contents")
        self.blocks[digest] = block
        self.digests[block] = digest
        self.indices[block] = index

    def move(self, block: int, target: int) -> None:
        """Move the entry of a cached block to block `target`, which is not cached."""
        digest = self.digests[block]
        assert digest is not None and self.digests[target] is None
        self.blocks[digest] = target
        self.digests[target], self.digests[block] = digest, None
        self.indices[target] = self.indices[block]

    def remove(self, blocks: Iterable[int]) -> list[bytes]:
        """Remove the entries of these cached blocks. Returns their digests."""
        removed = []
        for block in blocks:
            digest = self.digests[block]
            assert digest is not None
            del self.blocks[digest]
            self.digests[block] = None
            removed.append(digest)
        return removed
