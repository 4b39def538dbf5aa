"""Packing of token ids: arrays of 32-bit numbers, each checked against the model's vocabulary."""

from __future__ import annotations

import sys
from array import array
from collections.abc import Sequence
from functools import lru_cache

VOCABULARY_LIMIT = 1 << 31
"""Upper bound of every vocabulary size: the device stores a token as a signed 32-bit number."""


def packed(tokens: Sequence[int], vocab_size: int) -> array[int]:
    """Return tokens as an array of 32-bit numbers (typecode I). An array of that kind is returned unchanged.

    `vocab_size` is at most VOCABULARY_LIMIT. Raises ValueError naming an out-of-range id; TypeError for a non-number.
    """
    try:
        numbers = tokens if isinstance(tokens, array) and tokens.typecode == "I" else array("I", tokens)
    except OverflowError:
        lowest, highest = min(tokens), max(tokens)
        unknown = lowest if lowest < 0 else highest
    else:
        if _all_below(vocab_size, numbers):
            return numbers
        unknown = max(numbers)
    raise ValueError(f"token id {unknown}; this model's lie between 0 and {vocab_size - 1}")


def _all_below(vocab_size: int, numbers: array[int]) -> bool:
    """Whether all numbers are below `vocab_size`.

    This is about five times as fast as `max`, which makes an object of each number. All numbers are read as one long
    integer. One addition adds 2^31 - `vocab_size` to each. A number is out of range if its highest bit is set before or
    after the addition.
    """
    distances, highest_bits = _constants(vocab_size, (len(numbers) - 1).bit_length())
    together = int.from_bytes(numbers, sys.byteorder)
    return not (together | together + distances) & highest_bits


@lru_cache(maxsize=32)
def _constants(vocab_size: int, doublings: int) -> tuple[int, int]:
    """For 2^`doublings` numbers in one integer: 2^31 - `vocab_size` at each place, and the highest bit of each."""
    ones = int.from_bytes(array("I", [1]) * (1 << doublings), sys.byteorder)
    return ones * (VOCABULARY_LIMIT - vocab_size), ones << 31
