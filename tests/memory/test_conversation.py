"""Residency: what is missing, what is found in the cache, when a block may be shared."""

from holdfast.memory.blocks import BlockPool, StateIdentity
from holdfast.memory.conversation import Residency

ROOT = StateIdentity("model").root("")


def computed(pool, tokens, root=ROOT):
    """A sequence whose tokens are all known and planned."""
    residency = Residency(pool, root)
    residency.open(residency.match(tokens), len(tokens))
    residency.plan(residency.planned, len(tokens))
    residency.seal(tokens)
    return residency


def test_what_no_plan_computes_yet_is_missing():
    residency = Residency(BlockPool(4, 4), ROOT)
    assert residency.missing(10) == ((0, 10),)
    residency.open([], 10)
    residency.plan(0, 6)
    assert residency.missing(10) == ((6, 10),)
    residency.plan(6, 10)
    assert residency.missing(10) == ()


def test_blocks_are_taken_for_whole_positions_and_grow_one_by_one():
    pool = BlockPool(4, 4)
    residency = Residency(pool, ROOT)
    residency.open([], 9)
    assert (len(residency.blocks), residency.capacity, pool.available) == (3, 12, 1)
    residency.grow(1)
    assert (len(residency.blocks), residency.capacity, pool.available) == (4, 16, 0)


def test_full_blocks_of_an_equal_prefix_are_found():
    pool = BlockPool(8, 4)
    first = computed(pool, list(range(10)))
    assert Residency(pool, ROOT).match([*range(9), 99, 98]) == first.blocks[:2]
    assert Residency(pool, ROOT).match([0, 1, 2, 3, 99, 5, 6, 7, 8]) == first.blocks[:1]
    assert Residency(pool, ROOT).match([99, *range(1, 10)]) == []


def test_the_last_token_is_never_taken_from_the_cache():
    pool = BlockPool(8, 4)
    first = computed(pool, list(range(8)))
    assert Residency(pool, ROOT).match(list(range(8))) == first.blocks[:1]
    assert Residency(pool, ROOT).match(list(range(9))) == first.blocks
    single = BlockPool(8, 1)
    assert Residency(single, ROOT).match(list(range(3))) == []
    first = computed(single, list(range(3)))
    assert Residency(single, ROOT).match(list(range(3))) == first.blocks[:2]


def test_other_roots_share_nothing_and_no_root_shares_nothing():
    pool = BlockPool(16, 4)
    computed(pool, list(range(10)))
    computed(pool, list(range(10)), root=None)
    assert Residency(pool, StateIdentity("model").root("other tenant")).match(list(range(10))) == []
    assert Residency(pool, None).match(list(range(10))) == []


def test_a_block_is_shared_only_once_its_tokens_are_known_and_planned():
    pool = BlockPool(8, 4)
    residency = Residency(pool, ROOT)
    residency.open([], 8)
    tokens = list(range(7))
    residency.plan(0, 6)
    residency.seal(tokens)
    assert len(Residency(pool, ROOT).match(range(20))) == 1
    residency.plan(6, 8)
    residency.seal(tokens)
    assert len(Residency(pool, ROOT).match(range(20))) == 1, "the token at position 7 is in flight"
    residency.seal([*tokens, 7])
    assert len(Residency(pool, ROOT).match(range(20))) == 2


def test_the_count_of_tokens_at_which_sealing_is_due_is_told():
    pool = BlockPool(8, 4)
    residency = computed(pool, list(range(6)))
    assert residency.next_seal == 8
    residency.release()
    assert residency.next_seal == 4
    assert Residency(pool, None).next_seal > 1 << 60


def test_what_is_released_is_kept_as_a_prefix_whose_end_goes_first():
    pool = BlockPool(4, 4)
    tokens = list(range(16))
    residency = computed(pool, tokens)
    blocks = list(residency.blocks)
    residency.release()
    assert (residency.blocks, residency.planned, residency.capacity) == ([], 0, 0)
    assert pool.cached == 4
    pool.take(2)
    assert residency.match(tokens) == blocks[:2]


def test_a_sequence_that_lost_its_blocks_takes_what_is_left_of_them():
    pool = BlockPool(4, 4)
    tokens = list(range(14))
    residency = computed(pool, tokens)
    residency.release()
    shared = residency.match(tokens)
    residency.open(shared, len(tokens))
    assert residency.missing(len(tokens)) == ((12, 14),)
    assert residency.next_seal == 16
    pool.check([residency.blocks])
