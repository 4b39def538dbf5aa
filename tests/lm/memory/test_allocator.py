"""Allocator: which blocks are free, and how many owners each of the others has."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.lm.memory.allocator import Allocator


def test_the_lowest_blocks_are_allocated_first_and_then_the_ones_freed_last() -> None:
    allocator = Allocator(4)
    assert allocator.allocate(2) == [0, 1]
    assert allocator.allocate(0) == [] and allocator.owners == [1, 1, 0, 0]
    allocator.free += allocator.remove_owner([1])
    assert allocator.allocate(2) == [1, 2]
    assert allocator.allocate(1) == [3] and allocator.free == []


def test_a_block_that_nobody_owns_cannot_be_freed() -> None:
    allocator = Allocator(2)
    with pytest.raises(RuntimeError, match="block 1 is freed, but nobody owns it"):
        allocator.remove_owner([1])
    assert allocator.owners == [0, 0]


@given(st.lists(st.tuples(st.booleans(), st.sets(st.integers(0, 5))), max_size=30))
def test_blocks_come_and_go_with_their_first_and_last_owner(changes: list[tuple[bool, set[int]]]) -> None:
    allocator, counts = Allocator(6), [0] * 6
    for add, blocks in changes:
        if add:
            assert allocator.add_owner(blocks) == [block for block in blocks if not counts[block]]
        else:
            blocks = {block for block in blocks if counts[block]}
            assert allocator.remove_owner(blocks) == [block for block in blocks if counts[block] == 1]
        for block in blocks:
            counts[block] += 1 if add else -1
        assert allocator.owners == counts
