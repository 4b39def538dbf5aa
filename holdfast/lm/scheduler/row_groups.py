"""Groups of prompts of similar length, which are computed in one padded forward (Baton §4.2)."""

from __future__ import annotations

from collections.abc import Sequence

MOST_PADDING = 0.25
"""Share of a group's tokens that may be padding. Baton names no number; a quarter costs less than a second forward."""


def group(lengths: Sequence[int], *, most: int, unequal: bool = True) -> list[list[int]]:
    """Indices of `lengths` in groups of at most `most`, each sorted by falling length; all groups too.

    A group takes the next shorter prompt while padding stays below `MOST_PADDING` of its tokens. With `unequal` False
    the prompts of a group are of one length.
    """
    groups: list[list[int]] = []
    tokens = 0
    for index in sorted(range(len(lengths)), key=lambda at: -lengths[at]):
        length = lengths[index]
        if groups and len(groups[-1]) < most:
            longest = lengths[groups[-1][0]]
            whole = (len(groups[-1]) + 1) * longest
            if length == longest or (unequal and whole - tokens - length <= MOST_PADDING * whole):
                groups[-1].append(index)
                tokens += length
                continue
        groups.append([index])
        tokens = length
    return groups
