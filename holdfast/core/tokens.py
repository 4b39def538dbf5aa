"""Tokens on their way to the engine: 32-bit numbers in a row, each of them a token of the model."""

from __future__ import annotations

import sys
from array import array
from collections.abc import Sequence
from functools import lru_cache

VOCABULARY_LIMIT = 1 << 31
"""No model has more tokens: a signed 32-bit number holds each on the device."""


def packed(tokens: Sequence[int], vocab_size: int) -> array[int]:
    """Tokens as 32-bit numbers (typecode I); those that are so already come back as they are.

    Raises ValueError, naming one, where a model of at most VOCABULARY_LIMIT tokens lacks a token, and TypeError for
    what is no number.
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
    """Whether all are below `vocab_size`, some five times as fast as by `max`, which makes an object of each.

    They are read as one long integer, and the distance from `vocab_size` to 2^31 is added to each by one addition: the
    highest bit of a number that is not below is then set, if it was not before.
    """
    distances, highest_bits = _constants(vocab_size, (len(numbers) - 1).bit_length())
    together = int.from_bytes(numbers, sys.byteorder)
    return not (together | together + distances) & highest_bits


@lru_cache(maxsize=32)
def _constants(vocab_size: int, doublings: int) -> tuple[int, int]:
    """For up to 2^`doublings` numbers in a row: the distance at the place of each, and the highest bit of each."""
    ones = int.from_bytes(array("I", [1]) * (1 << doublings), sys.byteorder)
    return ones * (VOCABULARY_LIMIT - vocab_size), ones << 31
