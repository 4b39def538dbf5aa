"""The block pool: what is shared, what is reclaimed first, what is refused, and a random life against a plain model."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from holdfast.core.types import Identity
from holdfast.lm.memory.block_pool import BlockPool
from holdfast.lm.memory.digests import block_digests
from tests.invariants import check_pool


def digests(count):
    return [bytes([index]) * 32 for index in range(count)]


def find(pool, digest):
    return pool.find_all([digest])[0]


def test_allocated_blocks_are_distinct_and_can_be_freed():
    pool = BlockPool(4, 16)
    first, second = pool.allocate(3, 0.0), pool.allocate(1, 0.0)
    assert sorted(first + second) == [0, 1, 2, 3]
    assert (pool.available, pool.used) == (0, 4)
    pool.free(first, 0.0)
    assert (pool.available, pool.used, pool.cached) == (3, 1, 0)
    check_pool(pool, [second])


def test_allocating_more_than_available_raises_and_allocates_nothing():
    pool = BlockPool(2, 16)
    with pytest.raises(RuntimeError, match="1 blocks more"):
        pool.allocate(3, 0.0)
    assert pool.available == 2
    check_pool(pool, [])


def test_a_freed_cached_block_is_still_found_and_can_be_shared():
    pool = BlockPool(2, 16)
    (digest,) = digests(1)
    (block,) = pool.allocate(1, 0.0)
    pool.cache_block(block, digest, 0)
    pool.free([block], 0.0)
    assert (find(pool, digest), pool.cached, pool.available) == (block, 1, 2)
    assert pool.pinned_by([block]) == 1
    pool.share((block,))
    assert (find(pool, digest), pool.cached, pool.pinned_by([block])) == (block, 0, 0)


def test_a_shared_block_is_available_only_after_its_last_owner_frees_it():
    pool = BlockPool(1, 16)
    (block,) = pool.allocate(1, 0.0)
    pool.cache_block(block, digests(1)[0], 0)
    pool.share((block,))
    check_pool(pool, [[block], [block]])
    pool.free([block], 0.0)
    assert pool.available == 0
    pool.free([block], 0.0)
    assert pool.available == 1


def test_allocate_uses_free_blocks_first_and_then_the_cached_block_freed_first():
    pool = BlockPool(4, 16)
    blocks, names = pool.allocate(3, 0.0), digests(3)
    for block, digest in zip(blocks, names, strict=True):
        pool.cache_block(block, digest, 0)
    pool.free([blocks[2]], 0.0)
    pool.free([blocks[0], blocks[1]], 0.0)
    pool.allocate(1, 0.0)
    assert pool.find_all(names) == blocks
    assert pool.allocate(1, 0.0) == [blocks[2]]
    assert pool.allocate(1, 0.0) == [blocks[0]]
    assert pool.find_all(names) == [None, blocks[1], None]


def test_of_two_blocks_with_equal_contents_the_first_one_cached_is_found():
    pool = BlockPool(2, 16)
    (digest,) = digests(1)
    first, second = pool.allocate(2, 0.0)
    pool.cache_block(first, digest, 0)
    pool.cache_block(second, digest, 0)
    pool.free([second, first], 0.0)
    assert find(pool, digest) == first
    assert pool.cached == 1


def test_calls_that_would_break_the_block_states_raise():
    pool = BlockPool(2, 16)
    (block,) = pool.allocate(1, 0.0)
    with pytest.raises(RuntimeError, match="not cached"):
        pool.share((block,))
    pool.cache_block(block, digests(2)[0], 0)
    with pytest.raises(RuntimeError, match="cached twice"):
        pool.cache_block(block, digests(2)[1], 0)
    pool.free([block], 0.0)
    with pytest.raises(RuntimeError, match="nobody owns"):
        pool.free([block], 0.0)
    with pytest.raises(RuntimeError, match="nobody owns"):
        pool.cache_block(block, digests(1)[0], 0)


@pytest.mark.parametrize("size", [(0, 16), (4, 0)])
def test_a_pool_without_blocks_or_with_empty_blocks_is_refused(size):
    with pytest.raises(ValueError, match="at least 1"):
        BlockPool(*size)


def test_check_finds_a_lost_block_and_a_block_with_too_many_owners():
    pool = BlockPool(2, 16)
    (block,) = pool.allocate(1, 0.0)
    check_pool(pool, [[block]])
    with pytest.raises(RuntimeError, match=f"block {block} stands in 0 tables"):
        check_pool(pool, [])
    with pytest.raises(RuntimeError, match=f"block {block} stands in 2 tables"):
        check_pool(pool, [[block], [block]])
    with pytest.raises(RuntimeError, match="twice in one table"):
        check_pool(pool, [[block, block]])


def test_the_digest_of_a_block_depends_on_its_tokens_and_on_all_before_it():
    root = Identity("m").root()
    first, second = (list(block_digests(root, tokens, 2)) for tokens in ([1, 2, 1, 2], (2, 1, 1, 2)))
    assert first == [*block_digests(root, (1, 2), 2), *block_digests(first[0], (1, 2), 2)]
    assert len({*first, *second}) == 4


def test_different_identities_have_different_roots():
    roots = [
        Identity("m", "a", "f32", "t").root(),
        Identity("n", "a", "f32", "t").root(),
        Identity("m", "b", "f32", "t").root(),
        Identity("m", "a", "f16", "t").root(),
        Identity("m", "a", "f32", "u").root(),
        Identity("ma", "", "f32", "t").root(),
        Identity("", "ma", "f32", "t").root(),
        Identity("m", "a", "", "f32t").root(),
    ]
    assert len(set(roots)) == len(roots)


class PoolLife(RuleBasedStateMachine):
    """The pool, compared with a model that keeps plain lists and searches them."""

    def __init__(self):
        super().__init__()
        self.pool = BlockPool(6, 1)
        self.tables = []
        self.contents = {}
        self.cached = []

    def owned(self):
        return {block for table in self.tables for block in table}

    @rule(count=st.integers(1, 4))
    def allocate(self, count):
        free = 6 - len(self.owned()) - len(self.cached)
        if count > free + len(self.cached):
            with pytest.raises(RuntimeError):
                self.pool.allocate(count, 0.0)
            return
        reclaimed = self.cached[: max(0, count - free)]
        taken = self.pool.allocate(count, 0.0)
        assert set(reclaimed) <= set(taken)
        assert self.owned().isdisjoint(taken)
        self.cached = self.cached[len(reclaimed) :]
        for block in taken:
            self.contents.pop(block, None)
        self.tables.append(taken)

    @precondition(lambda self: self.tables)
    @rule(data=st.data())
    def cache_block(self, data):
        block = data.draw(st.sampled_from(sorted(self.owned())))
        content = data.draw(st.integers(0, 5))
        if block not in self.contents:
            self.pool.cache_block(block, digests(6)[content], 0)
            if content not in self.contents.values():
                self.contents[block] = content

    @rule(content=st.integers(0, 5))
    def share(self, content):
        block = find(self.pool, digests(6)[content])
        assert block == next((block for block, held in self.contents.items() if held == content), None)
        if block is not None:
            self.pool.share((block,))
            self.tables.append([block])
            if block in self.cached:
                self.cached.remove(block)

    @precondition(lambda self: self.tables)
    @rule(data=st.data())
    def free(self, data):
        table = self.tables.pop(data.draw(st.integers(0, len(self.tables) - 1)))
        self.pool.free(table, 0.0)
        self.cached += [block for block in table if block in self.contents and block not in self.owned()]

    @invariant()
    def the_pool_agrees_with_the_model(self):
        check_pool(self.pool, self.tables)
        assert self.pool.used == len(self.owned())
        assert self.pool.cached == len(self.cached)
        assert self.pool.available + self.pool.used == 6


TestPoolLife = PoolLife.TestCase
TestPoolLife.settings = settings(stateful_step_count=40)
