"""Digests that identify blocks, and a cache that finds those of a long prompt without hashing each block."""

from __future__ import annotations

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Sequence

RUN = 64
"""Number of consecutive blocks whose digests are remembered together."""


def block_digests(parent: bytes, tokens: Sequence[int], block_size: int) -> list[bytes]:
    """The digest of each full block: SHA-256 of the digest before it and the block's tokens as 32-bit numbers.

    `parent` is the digest before the first block. A digest thus identifies a block's tokens and all tokens before them.
    """
    if len(tokens) == block_size:  # the usual case: a decode has filled one block
        return [hashlib.sha256(parent + array("I", tokens)).digest()]
    return _chain(parent, array("I", tokens).tobytes(), 4 * block_size)


def _chain(parent: bytes, data: bytes, width: int) -> list[bytes]:
    digests = []
    for start in range(0, len(data), width):
        parent = hashlib.sha256(parent + data[start : start + width]).digest()
        digests.append(parent)
    return digests


def usable_blocks(tokens: int, block_size: int) -> int:
    """Number of a prompt's blocks whose state can be used: the full ones. The last token must always be computed."""
    return max(0, tokens - 1) // block_size


class DigestCache:
    """The block digests of recent long prompts, so that a conversation's next turn hashes only its new blocks.

    It remembers them in runs of RUN blocks. A run is found by one SHA-256 over the chain's root and all tokens up to
    the run's end. That takes a single pass over the prompt, about thirty times as fast as hashing each block. Digests
    follow from the tokens alone, so a remembered digest stays right whatever happens to the blocks.
    """

    def __init__(self, block_size: int, max_blocks: int) -> None:
        """Remembers the digests of up to `max_blocks` blocks (about 100 bytes each), and of at least one run."""
        self._block_size = block_size
        self._max_runs = max(1, max_blocks // RUN)
        self._runs: OrderedDict[bytes, list[bytes]] = OrderedDict()
        """The digests of each run, by the hash of all tokens up to its end. The least recently used run is first."""

    def digests(self, root: bytes, tokens: Sequence[int]) -> list[bytes]:
        """The digests that `block_digests` gives, for the first blocks of a sequence. `root` is its `Identity.root`."""
        data, width = array("I", tokens).tobytes(), 4 * self._block_size
        whole, parent, digests, runs = hashlib.sha256(root), root, [], self._runs
        stride = RUN * width
        for start in range(0, len(data), stride):
            part = data[start : start + stride]
            if len(part) < stride:
                digests += _chain(parent, part, width)
                break
            whole.update(part)
            key = whole.copy().digest()
            run = runs.get(key)
            if run is None:
                run = runs[key] = _chain(parent, part, width)
                if len(runs) > self._max_runs:
                    runs.popitem(last=False)
            else:
                runs.move_to_end(key)
            digests += run
            parent = run[-1]
        return digests
