"""PrefixIndex: blocks by digest, and the entries that remain after one moves or is removed."""

from __future__ import annotations

import pytest

from holdfast.lm.memory.prefix_index import PrefixIndex


def test_a_block_that_moves_takes_its_digest_and_its_place_along() -> None:
    index = PrefixIndex(4)
    index.add(0, b"first", 0)
    index.add(1, b"sixth", 5)
    index.indices[3] = 9  # the target's old entry
    index.move(1, 3)
    assert index.blocks == {b"first": 0, b"sixth": 3}
    assert (index.digests, index.indices[0], index.indices[3]) == ([b"first", None, None, b"sixth"], 0, 5)
    index.add(1, b"second", 1)  # the place that it left takes another
    index.move(3, 2)
    assert (index.indices[1], index.indices[2], index.blocks[b"sixth"]) == (1, 5, 2)


def test_a_removed_block_is_not_found_and_may_be_cached_again() -> None:
    index = PrefixIndex(2)
    index.add(0, b"a", 0)
    index.add(1, b"b", 1)
    assert index.remove([1, 0]) == [b"b", b"a"]
    assert (index.blocks, index.digests) == ({}, [None, None])
    index.add(0, b"b", 1)
    assert (index.blocks, index.indices[0]) == ({b"b": 0}, 1)


def test_a_block_is_not_cached_twice_nor_moved_onto_a_cached_one() -> None:
    index = PrefixIndex(2)
    index.add(0, b"a", 0)
    with pytest.raises(RuntimeError, match="block 0 is cached twice"):
        index.add(0, b"b", 1)
    index.add(1, b"b", 1)
    with pytest.raises(AssertionError):
        index.move(0, 1)
    assert index.blocks == {b"a": 0, b"b": 1}
