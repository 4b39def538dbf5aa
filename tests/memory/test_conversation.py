"""Residency: what is missing, what is found in the cache, when a block may be shared."""

from holdfast.memory.blocks import BlockPool, StateIdentity
from holdfast.memory.conversation import Found, Residency
from holdfast.memory.retention import EVICTIONS, RetentionRule

ROOT = StateIdentity("model").root("")


def computed(pool, tokens, root=ROOT):
    """A sequence whose tokens are all known and planned."""
    residency = Residency(pool, root)
    residency.open(residency.match(tokens), len(tokens))
    residency.plan(residency.planned, len(tokens))
    residency.seal(tokens)
    return residency


def kept(pool, tokens, root=ROOT):
    """The blocks that a new sequence of these tokens finds on the device, by index."""
    return Residency(pool, root).match(tokens).device


def test_what_no_plan_computes_yet_is_missing():
    residency = Residency(BlockPool(4, 4), ROOT)
    assert residency.missing(10) == ((0, 10),)
    residency.open(Found(), 10)
    residency.plan(0, 6)
    assert residency.missing(10) == ((6, 10),)
    residency.plan(6, 10)
    assert residency.missing(10) == ()


def test_blocks_are_taken_for_whole_positions_and_grow_one_by_one():
    pool = BlockPool(4, 4)
    residency = Residency(pool, ROOT)
    residency.open(Found(), 9)
    assert (len(residency.blocks), residency.capacity, pool.available) == (3, 12, 1)
    residency.grow(1)
    assert (len(residency.blocks), residency.capacity, pool.available) == (4, 16, 0)


def test_full_blocks_of_an_equal_prefix_are_found():
    pool = BlockPool(8, 4)
    first = computed(pool, list(range(10)))
    assert kept(pool, [*range(9), 99, 98]) == {0: first.blocks[0], 1: first.blocks[1]}
    assert kept(pool, [0, 1, 2, 3, 99, 5, 6, 7, 8]) == {0: first.blocks[0]}
    assert kept(pool, [99, *range(1, 10)]) == {}


def test_the_last_token_is_never_taken_from_the_cache():
    pool = BlockPool(8, 4)
    first = computed(pool, list(range(8)))
    assert kept(pool, list(range(8))) == {0: first.blocks[0]}
    assert kept(pool, list(range(9))) == dict(enumerate(first.blocks))
    single = BlockPool(8, 1)
    assert kept(single, list(range(3))) == {}
    first = computed(single, list(range(3)))
    assert kept(single, list(range(3))) == dict(enumerate(first.blocks[:2]))


def test_other_roots_share_nothing_and_no_root_shares_nothing():
    pool = BlockPool(16, 4)
    computed(pool, list(range(10)))
    computed(pool, list(range(10)), root=None)
    assert kept(pool, list(range(10)), StateIdentity("model").root("other tenant")) == {}
    assert kept(pool, list(range(10)), None) == {}


def test_a_block_is_shared_only_once_its_tokens_are_known_and_planned():
    pool = BlockPool(8, 4)
    residency = Residency(pool, ROOT)
    residency.open(Found(), 8)
    tokens = list(range(7))
    residency.plan(0, 6)
    residency.seal(tokens)
    assert len(kept(pool, range(20))) == 1
    residency.plan(6, 8)
    residency.seal(tokens)
    assert len(kept(pool, range(20))) == 1, "the token at position 7 is in flight"
    residency.seal([*tokens, 7])
    assert len(kept(pool, range(20))) == 2


def test_the_count_of_tokens_at_which_sealing_is_due_is_told():
    pool = BlockPool(8, 4)
    residency = computed(pool, list(range(6)))
    assert residency.next_seal == 8
    residency.release()
    assert residency.next_seal == 4
    assert Residency(pool, None).next_seal > 1 << 60


def test_what_is_released_stays_and_its_start_is_given_up_first():
    pool = BlockPool(4, 4, rule=RetentionRule(chunk_blocks=1, block_size=4))
    tokens = list(range(16))
    residency = computed(pool, tokens)
    blocks = list(residency.blocks)
    residency.release()
    assert (residency.blocks, residency.planned, residency.capacity) == ([], 0, 0)
    assert pool.cached == 4
    pool.take(2)
    assert kept(pool, [*tokens, 99]) == {2: blocks[2], 3: blocks[3]}


def test_tail_first_gives_up_the_end_first():
    pool = BlockPool(4, 4, rule=RetentionRule(EVICTIONS["tail-first"], chunk_blocks=1, block_size=4))
    tokens = list(range(16))
    residency = computed(pool, tokens)
    blocks = list(residency.blocks)
    residency.release()
    pool.take(2)
    assert kept(pool, [*tokens, 99]) == {0: blocks[0], 1: blocks[1]}


def test_holes_before_and_between_what_is_kept_are_missing_and_filled_in_ascending_order():
    pool = BlockPool(9, 4)
    tokens = list(range(24))
    first = computed(pool, tokens)
    residency = Residency(pool, ROOT)
    residency.open(Found({index: first.blocks[index] for index in (1, 3, 4)}), 24)
    assert residency.missing(24) == ((0, 4), (8, 12), (20, 24))
    residency.plan(0, 2)
    assert residency.missing(24) == ((2, 4), (8, 12), (20, 24))
    residency.plan(2, 4)
    assert residency.planned == 8
    residency.plan(8, 12)
    assert (residency.planned, residency.missing(24)) == (20, ((20, 24),))
    residency.plan(20, 24)
    assert residency.missing(24) == ()
    pool.check([first.blocks, residency.blocks])


def test_a_filled_hole_is_sealed_and_what_was_found_stays_what_it_was():
    pool = BlockPool(5, 4, rule=RetentionRule(chunk_blocks=1, block_size=4))
    tokens = list(range(17))
    computed(pool, tokens).release()
    pool.release(pool.take(2))  # the fifth block was never full; one more is given up
    residency = Residency(pool, ROOT)
    found = residency.match(tokens)
    assert sorted(found.device) == [1, 2, 3]
    residency.open(found, 17)
    residency.plan(0, 4)
    residency.seal(tokens)
    assert kept(pool, tokens) == dict(enumerate(residency.blocks[:4]))
    pool.check([residency.blocks])


def test_a_block_on_the_host_is_brought_in_and_shared_at_once():
    pool = BlockPool(4, 4, rule=RetentionRule(chunk_blocks=1, block_size=4), host_blocks=4, low_water=1.0)
    tokens = list(range(9))
    computed(pool, tokens).release()
    for step in range(2):
        assert len(pool.relieve(step)) == 1
        pool.landed(step)
    pool.release(pool.take(4))
    residency = Residency(pool, ROOT)
    found = residency.match(tokens)
    assert (found.device, sorted(found.host)) == ({}, [0, 1])
    copies = residency.open(found, len(tokens))
    assert [copy.target for copy in copies] == residency.blocks[:2]
    assert residency.missing(len(tokens)) == ((8, 9),)
    assert kept(pool, tokens) == dict(enumerate(residency.blocks[:2]))
    pool.check([residency.blocks])


def test_a_sequence_that_lost_its_blocks_takes_what_is_left_of_them():
    pool = BlockPool(4, 4)
    tokens = list(range(14))
    residency = computed(pool, tokens)
    residency.release()
    residency.open(residency.match(tokens), len(tokens))
    assert residency.missing(len(tokens)) == ((12, 14),)
    assert residency.next_seal == 16
    pool.check([residency.blocks])
