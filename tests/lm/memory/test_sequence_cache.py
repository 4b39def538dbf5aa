"""SequenceCache: which positions are missing, which blocks are found in the cache, and when a block may be shared."""

import pytest

from holdfast.core.types import Identity
from holdfast.lm.memory.block_pool import BlockPool
from holdfast.lm.memory.prices import Link, Prices
from holdfast.lm.memory.retention import EVICTIONS, RetentionRule
from holdfast.lm.memory.sequence_cache import Found, SequenceCache
from tests.invariants import check_pool

ROOT = Identity("model").root()


def computed(pool, tokens, root=ROOT):
    """A sequence whose tokens are all known and planned."""
    cache = SequenceCache(pool, root)
    cache.allocate(cache.match(tokens), len(tokens), 0.0)
    cache.plan(cache.planned, len(tokens))
    cache.cache_blocks(tokens)
    return cache


def kept(pool, tokens, root=ROOT):
    """The blocks that a new sequence of these tokens finds on the device, by index."""
    return SequenceCache(pool, root).match(tokens).device


def test_positions_that_no_plan_computes_are_missing():
    cache = SequenceCache(BlockPool(4, 4), ROOT)
    assert cache.missing(10) == ((0, 10),)
    cache.allocate(Found(), 10, 0.0)
    cache.plan(0, 6)
    assert cache.missing(10) == ((6, 10),)
    cache.plan(6, 10)
    assert cache.missing(10) == ()


def test_allocate_rounds_up_to_blocks_and_grow_adds_one():
    pool = BlockPool(4, 4)
    cache = SequenceCache(pool, ROOT)
    cache.allocate(Found(), 9, 0.0)
    assert (len(cache.blocks), cache.capacity, pool.available) == (3, 12, 1)
    cache.grow(0.0)
    assert (len(cache.blocks), cache.capacity, pool.available) == (4, 16, 0)


def test_full_blocks_of_an_equal_prefix_are_found():
    pool = BlockPool(8, 4)
    first = computed(pool, list(range(10)))
    assert kept(pool, [*range(9), 99, 98]) == {0: first.blocks[0], 1: first.blocks[1]}
    assert kept(pool, [0, 1, 2, 3, 99, 5, 6, 7, 8]) == {0: first.blocks[0]}
    assert kept(pool, [99, *range(1, 10)]) == {}


def test_the_block_of_the_last_token_is_never_matched():
    pool = BlockPool(8, 4)
    first = computed(pool, list(range(8)))
    assert kept(pool, list(range(8))) == {0: first.blocks[0]}
    assert kept(pool, list(range(9))) == dict(enumerate(first.blocks))
    single = BlockPool(8, 1)
    assert kept(single, list(range(3))) == {}
    first = computed(single, list(range(3)))
    assert kept(single, list(range(3))) == dict(enumerate(first.blocks[:2]))


def test_sequences_with_different_roots_or_none_share_no_blocks():
    pool = BlockPool(16, 4)
    computed(pool, list(range(10)))
    computed(pool, list(range(10)), root=None)
    assert kept(pool, list(range(10)), Identity("model", tenant="other tenant").root()) == {}
    assert kept(pool, list(range(10)), None) == {}


def test_a_block_is_cached_only_when_its_tokens_are_known_and_planned():
    pool = BlockPool(8, 4)
    cache = SequenceCache(pool, ROOT)
    cache.allocate(Found(), 8, 0.0)
    tokens = list(range(7))
    cache.plan(0, 6)
    cache.cache_blocks(tokens)
    assert len(kept(pool, range(20))) == 1
    cache.plan(6, 8)
    cache.cache_blocks(tokens)
    assert len(kept(pool, range(20))) == 1, "the token at position 7 is in flight"
    cache.cache_blocks([*tokens, 7])
    assert len(kept(pool, range(20))) == 2


def test_next_full_is_the_token_count_that_fills_the_next_block():
    pool = BlockPool(8, 4)
    cache = computed(pool, list(range(6)))
    assert cache.next_full == 8
    cache.free(0.0)
    assert cache.next_full == 4
    assert SequenceCache(pool, None).next_full > 1 << 60


def test_freed_blocks_stay_cached_and_the_first_ones_are_evicted_first():
    pool = BlockPool(4, 4, rule=RetentionRule(chunk_blocks=1, block_size=4))
    tokens = list(range(16))
    cache = computed(pool, tokens)
    blocks = list(cache.blocks)
    cache.free(0.0)
    assert (cache.blocks, cache.planned, cache.capacity) == ([], 0, 0)
    assert pool.cached == 4
    pool.allocate(2, 0.0)
    assert kept(pool, [*tokens, 99]) == {2: blocks[2], 3: blocks[3]}


def test_tail_first_evicts_the_last_blocks_first():
    pool = BlockPool(4, 4, rule=RetentionRule(EVICTIONS["tail-first"], chunk_blocks=1, block_size=4))
    tokens = list(range(16))
    cache = computed(pool, tokens)
    blocks = list(cache.blocks)
    cache.free(0.0)
    pool.allocate(2, 0.0)
    assert kept(pool, [*tokens, 99]) == {0: blocks[0], 1: blocks[1]}


def test_holes_around_cached_blocks_are_missing_and_filled_in_ascending_order():
    pool = BlockPool(9, 4)
    tokens = list(range(24))
    first = computed(pool, tokens)
    cache = SequenceCache(pool, ROOT)
    cache.allocate(Found({index: first.blocks[index] for index in (1, 3, 4)}), 24, 0.0)
    assert cache.missing(24) == ((0, 4), (8, 12), (20, 24))
    cache.plan(0, 2)
    assert cache.missing(24) == ((2, 4), (8, 12), (20, 24))
    cache.plan(2, 4)
    assert cache.planned == 8
    cache.plan(8, 12)
    assert (cache.planned, cache.missing(24)) == (20, ((20, 24),))
    cache.plan(20, 24)
    assert cache.missing(24) == ()
    check_pool(pool, [first.blocks, cache.blocks])


def test_a_freed_sequence_forgets_its_blocks_after_a_hole():
    pool = BlockPool(9, 4)
    first = computed(pool, list(range(24)))
    cache = SequenceCache(pool, ROOT)
    cache.allocate(Found({1: first.blocks[1]}), 12, 0.0)
    assert cache.missing(12) == ((0, 4), (8, 12))
    cache.free(0.0)
    cache.allocate(Found(), 12, 0.0)
    assert cache.missing(12) == ((0, 12),)


def test_a_filled_hole_is_cached_and_the_blocks_found_stay_in_place():
    pool = BlockPool(5, 4, rule=RetentionRule(chunk_blocks=1, block_size=4))
    tokens = list(range(17))
    computed(pool, tokens).free(0.0)
    pool.free(pool.allocate(2, 0.0), 0.0)  # the fifth block was never full; one more is given up
    cache = SequenceCache(pool, ROOT)
    found = cache.match(tokens)
    assert sorted(found.device) == [1, 2, 3]
    cache.allocate(found, 17, 0.0)
    cache.plan(0, 4)
    cache.cache_blocks(tokens)
    assert kept(pool, tokens) == dict(enumerate(cache.blocks[:4]))
    check_pool(pool, [cache.blocks])


def test_a_swapped_in_block_can_be_shared_at_once():
    pool = BlockPool(4, 4, rule=RetentionRule(chunk_blocks=1, block_size=4), host_blocks=4, low_water=1.0)
    tokens = list(range(9))
    computed(pool, tokens).free(0.0)
    for step in range(2):
        assert len(pool.swap_out(step, 0, 0.0)) == 1
        pool.finish_swap_out(step)
    pool.free(pool.allocate(4, 0.0), 0.0)
    cache = SequenceCache(pool, ROOT)
    found = cache.match(tokens)
    assert (found.device, sorted(found.host)) == ({}, [0, 1])
    copies = cache.allocate(found, len(tokens), 0.0)
    assert [copy.target for copy in copies] == cache.blocks[:2]
    assert cache.missing(len(tokens)) == ((8, 9),)
    assert kept(pool, tokens) == dict(enumerate(cache.blocks[:2]))
    check_pool(pool, [cache.blocks])


def test_a_preempted_sequence_reuses_its_blocks_that_are_still_cached():
    pool = BlockPool(4, 4)
    tokens = list(range(14))
    cache = computed(pool, tokens)
    cache.free(0.0)
    cache.allocate(cache.match(tokens), len(tokens), 0.0)
    assert cache.missing(len(tokens)) == ((12, 14),)
    assert cache.next_full == 16
    check_pool(pool, [cache.blocks])


def test_rolled_back_positions_are_missing_again_and_cached_ones_cannot_be():
    pool = BlockPool(4, 4)
    cache = SequenceCache(pool, ROOT)
    cache.allocate(Found(), 12, 0.0)
    cache.plan(0, 11)
    cache.cache_blocks(range(6))
    cache.rollback(6)
    assert cache.missing(9) == ((6, 9),)
    with pytest.raises(AssertionError):
        cache.rollback(3)


def test_a_draft_is_cut_where_the_blocks_end_and_counts_once_it_is_accepted():
    cache = SequenceCache(BlockPool(4, 4), ROOT)
    cache.allocate(Found(), 8, 0.0)
    cache.plan(0, 6)
    assert cache.draft(5, 12) == 8
    assert cache.planned == 5
    cache.accept(0)
    assert cache.planned == 5
    cache.accept(2)
    assert cache.planned == 7
    cache.plan(7, 8)
    assert (cache.draft(7, 12), cache.planned) == (8, 8), "there is no room for a draft"


def two_tiers(tokens):
    """A pool whose host alone has the first block of these tokens, and whose device alone has the third."""
    pool = BlockPool(8, 4, rule=RetentionRule(chunk_blocks=1, block_size=4), host_blocks=4)
    digests = SequenceCache(pool, ROOT)
    digests.match(tokens)
    pool.cache_on_host([(pool.reserve_on_host(0, 0.0), digests.digests[0], 0)], 0.0)
    (block,) = pool.allocate(1, 0.0)
    pool.cache_block(block, digests.digests[2], 2)
    pool.free([block], 0.0)
    return pool, block


def test_blocks_that_neither_tier_has_are_lacking_but_never_the_one_of_the_last_token():
    tokens = list(range(21))
    pool, _ = two_tiers(tokens)
    cache = SequenceCache(pool, ROOT)
    lacking = cache.lacking(tokens)
    assert lacking == {index: cache.digests[index] for index in (1, 3, 4)}
    assert [*SequenceCache(pool, ROOT).lacking(tokens[:20])] == [1, 3]
    assert SequenceCache(pool, None).lacking(tokens) == {}
    assert SequenceCache(pool, ROOT).lacking(tokens[:1]) == {}


def test_blocks_of_both_tiers_and_new_ones_stand_at_their_places_of_the_table():
    tokens = list(range(21))
    pool, block = two_tiers(tokens)
    cache = SequenceCache(pool, ROOT)
    found = cache.match(tokens)
    assert (len(found), [*found.shared], sorted(found.host)) == (2, [block], [0])
    copies = cache.allocate(found, 21, 0.0)
    assert [copy.target for copy in copies] == [cache.blocks[0]] and cache.blocks[2] == block
    assert len(set(cache.blocks)) == 6 and cache.capacity == 24
    assert cache.missing(21) == ((4, 8), (12, 21))
    assert pool.find_all(cache.digests[:3]) == [cache.blocks[0], None, block]
    check_pool(pool, [cache.blocks])


def test_a_waiting_sequence_makes_its_blocks_of_both_tiers_young():
    tokens = list(range(21))
    pool, _ = two_tiers(tokens)
    SequenceCache(pool, ROOT).touch(tokens, 7.0)
    assert [use[0] for use, _, _ in pool.idle_blocks(0, 8)] == [7.0]
    assert [use[0] for use, _, _ in pool.host.idle_blocks(0, 4)] == [7.0]
    SequenceCache(pool, ROOT).touch([99, *tokens], 8.0)
    assert [use[0] for use, _, _ in pool.idle_blocks(0, 8)] == [7.0], "another prompt"


def test_blocks_of_the_host_that_are_cheaper_to_compute_are_left_out_of_what_is_found():
    tokens = list(range(21))
    pool, block = two_tiers(tokens)
    pool.prices = Prices(lambda position: 1e-3, block_size=4, block_bytes=1000)
    pool.host_link = Link(latency=0.0, rate=1e5)
    found = SequenceCache(pool, ROOT).match(tokens)
    assert (found.device, found.host) == ({2: block}, {})
    pool.host_link = Link(latency=0.0, rate=1e9)
    assert sorted(SequenceCache(pool, ROOT).match(tokens).host) == [0]


def test_a_sequence_follows_its_blocks_when_they_move():
    cache = SequenceCache(BlockPool(8, 4), ROOT)
    cache.allocate(Found(), 12, 0.0)
    first, second, third = table = cache.blocks
    cache.move({second: 7, 99: 3})
    assert cache.blocks is table and table == [first, 7, third]


def test_no_more_is_planned_than_the_blocks_hold_and_nothing_is_skipped():
    cache = SequenceCache(BlockPool(8, 4), ROOT)
    cache.allocate(Found(), 8, 0.0)
    for start, stop in ((0, 9), (1, 4)):
        with pytest.raises(AssertionError):
            cache.plan(start, stop)
    assert cache.missing(8) == ((0, 8),)
