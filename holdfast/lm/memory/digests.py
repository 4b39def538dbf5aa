"""Chains: the digests that identify a sequence's blocks, and how those of a prompt that goes on are found at once."""

from __future__ import annotations

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Sequence

RUN = 64
"""Blocks whose digests are remembered together."""


def chain_digests(parent: bytes, tokens: Sequence[int], block_size: int) -> list[bytes]:
    """What identifies each full block: SHA-256 of the digest before it and its tokens as 32-bit numbers."""
    if len(tokens) == block_size:  # most often: a decode has filled it
        return [hashlib.sha256(parent + array("I", tokens)).digest()]
    return _chain(parent, array("I", tokens).tobytes(), 4 * block_size)


def _chain(parent: bytes, data: bytes, width: int) -> list[bytes]:
    digests = []
    for start in range(0, len(data), width):
        parent = hashlib.sha256(parent + data[start : start + width]).digest()
        digests.append(parent)
    return digests


class Chains:
    """The digests of long prompts of late, so that a conversation's next turn need not hash all of it block by block.

    A run of RUN blocks is found by one SHA-256 over the chain's root and all tokens up to the run's end: a single pass
    over the prompt, some thirty times as fast as a hash for each block. What is remembered follows from the tokens
    alone, so it is never wrong, whatever became of the blocks.
    """

    def __init__(self, block_size: int, most_blocks: int) -> None:
        """Remembers the digests of up to `most_blocks` blocks (some 100 bytes each), and one run at the least."""
        self._block_size = block_size
        self._most = max(1, most_blocks // RUN)
        self._runs: OrderedDict[bytes, list[bytes]] = OrderedDict()
        """By the hash of all up to its end, the digests of a run; what was asked for last comes last."""

    def __len__(self) -> int:
        """Runs that are remembered."""
        return len(self._runs)

    def digests(self, root: bytes, tokens: Sequence[int]) -> list[bytes]:
        """As `chain_digests`, for a chain from its root."""
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
                if len(runs) > self._most:
                    runs.popitem(last=False)
            else:
                runs.move_to_end(key)
            digests += run
            parent = run[-1]
        return digests
