"""Two tiers: when blocks are copied to the host, what is pinned meanwhile, and who makes room for whom there."""

import pytest

from holdfast.lm.memory.block_pool import BlockPool
from holdfast.lm.memory.host_pool import HostPool
from holdfast.lm.memory.retention import RetentionRule
from holdfast.lm.types import BlockCopy
from tests.invariants import check_host, check_pool

RULE = RetentionRule(cost=float, chunk_blocks=1, block_size=1)


def pool_of(blocks, host_blocks, low_water=0.25):
    return BlockPool(blocks, 1, rule=RULE, host_blocks=host_blocks, low_water=low_water)


def digest(number):
    return bytes([number]) * 32


def find(pool, digest):
    return pool.find_all([digest])[0]


def idle(pool, *numbers, now=0.0):
    """One conversation's blocks, whose contents have these numbers, let go at `now`."""
    blocks = pool.allocate(len(numbers), now)
    for index, (block, number) in enumerate(zip(blocks, numbers, strict=True)):
        pool.cache_block(block, digest(number), index)
    pool.free(blocks, now)
    return blocks


def found(pool, *numbers):
    """Where each of these contents is: on the device, on the host, on both, or nowhere."""
    where = {(True, True): "both", (True, False): "device", (False, True): "host", (False, False): "nowhere"}
    return [
        where[find(pool, digest(number)) is not None, pool.find_on_host(digest(number)) is not None]
        for number in numbers
    ]


def test_swap_out_starts_below_the_threshold_with_the_lowest_value():
    pool = pool_of(16, 16)
    idle(pool, *range(12))
    assert pool.swap_out(0, 0, 0.0) == ()
    taken = pool.allocate(2, 0.0)
    copies = pool.swap_out(1, 0, 10.0) + pool.swap_out(2, 0, 10.0)
    assert [pool._digests[copy.source] for copy in copies] == [digest(0), digest(1)], "one chunk a step, from the front"
    assert pool.swap_out(3, 0, 10.0) == (), "copies under way count"
    pool.finish_swap_out(2)
    assert found(pool, 0, 1, 2) == ["both", "both", "device"]
    check_pool(pool, [taken])


def test_without_a_host_tier_nothing_is_swapped_out():
    pool = pool_of(4, 0)
    idle(pool, 0, 1, 2, 3)
    assert pool.swap_out(0, 0, 0.0) == () and not pool.can_swap_out
    assert pool.allocatable == pool.available == 4


def test_a_block_is_pinned_until_its_copy_to_the_host_is_complete():
    pool = pool_of(4, 4)
    idle(pool, 0, 1, 2, 3)
    (copy,) = pool.swap_out(5, 0, 0.0)
    assert (pool.allocatable, pool.available, pool.cached, bool(pool.copies.swapping_out)) == (0, 3, 4, True)
    with pytest.raises(RuntimeError, match="1 blocks more"):
        pool.allocate(1, 0.0)
    pool.finish_swap_out(4)
    assert pool.allocatable == 0
    pool.finish_swap_out(5)
    assert (pool.allocatable, bool(pool.copies.swapping_out)) == (1, False)
    assert pool.allocate(1, 0.0) == [copy.source]
    assert found(pool, 0, 1) == ["host", "device"]
    check_pool(pool, [[copy.source]])


def test_a_block_shared_during_its_copy_cannot_be_allocated_afterwards():
    pool = pool_of(4, 4)
    idle(pool, 0, 1, 2, 3)
    (copy,) = pool.swap_out(0, 0, 0.0)
    assert pool.pinned_by([copy.source]) == 0, "it was not available"
    pool.share((copy.source,))
    pool.finish_swap_out(0)
    assert pool.allocatable == 0
    check_pool(pool, [[copy.source]])
    pool.free([copy.source], 0.0)
    assert found(pool, 0) == ["both"]
    assert pool.swap_out(1, 0, 0.0) == (), "it has a copy already"
    assert pool.allocatable == 1
    check_pool(pool, [])


def test_a_reclaimable_block_can_be_shared():
    pool = pool_of(4, 4)
    blocks = idle(pool, 0, 1, 2, 3)
    pool.swap_out(0, 0, 0.0)
    pool.finish_swap_out(0)
    assert not pool.fits(1, [blocks[0]]), "the one that is ready is the one to be shared"
    pool.share((blocks[0],))
    assert pool.allocatable == 0
    check_pool(pool, [[blocks[0]]])


@pytest.mark.parametrize("num_tokens, copies", [(0, [2, 2, 2, 2, 2, 2]), (5, [5, 5, 2])])
def test_a_step_swaps_out_ahead_of_need_no_more_than_it_computes_or_a_fixed_number(num_tokens, copies):
    pool = BlockPool(96, 1, rule=RULE, host_blocks=64, low_water=0.25, copies_ahead=2)
    idle(pool, *range(84))
    assert pool.allocatable == 12, "the threshold is 24"
    given = []
    for step in range(8):
        given.append(len(pool.swap_out(step, num_tokens, 0.0)))
        pool.finish_swap_out(step)
    assert given == copies + [0] * (8 - len(copies))


def test_blocks_asked_for_in_vain_are_swapped_out_at_once():
    pool = BlockPool(64, 1, rule=RULE, host_blocks=64, low_water=0.25, copies_ahead=1)
    idle(pool, *range(64))
    assert len(pool.swap_out(0, 0, 0.0)) == 2, "an eighth of the 16 blocks below the threshold"
    assert not pool.fits(6, [])
    assert len(pool.swap_out(1, 0, 0.0)) == 4, "two blocks are being swapped out already"


def test_swap_out_makes_room_for_a_demand_above_the_threshold():
    pool = pool_of(64, 64, low_water=0.1)
    idle(pool, *range(64))
    assert not pool.fits(20, [])
    step = 0
    while not pool.fits(20, []):
        assert len(pool.swap_out(step, 0, 0.0)) == 4, "not all at once"
        pool.finish_swap_out(step)
        step += 1
    assert step == 5


def test_a_swapped_in_block_stays_on_the_host_until_its_place_is_needed():
    pool = pool_of(2, 1, low_water=1.0)
    idle(pool, 0)
    pool.swap_out(0, 0, 0.0)
    pool.finish_swap_out(0)
    pool.free(pool.allocate(2, 0.0), 0.0)
    assert found(pool, 0) == ["host"]
    (block,) = pool.allocate(1, 0.0)
    assert pool.swap_in(block, digest(0), 0) == BlockCopy(0, block)
    assert found(pool, 0) == ["both"]
    idle(pool, 1)
    (copy,) = pool.swap_out(1, 0, 0.0)
    assert copy.target == 0, "its place is read before it is written"
    assert found(pool, 0) == ["device"]
    assert pool.host.dropped == 0, "nothing was lost"
    pool.finish_swap_out(1)
    check_pool(pool, [[block]])


def test_a_full_host_evicts_the_lowest_value():
    pool = pool_of(4, 2, low_water=1.0)
    for number, now in ((0, 0.0), (1, 50.0)):
        idle(pool, number, now=now)
        pool.swap_out(number, 0, now)
        pool.finish_swap_out(number)
    pool.free(pool.allocate(4, 0.0), 0.0)
    assert found(pool, 0, 1) == ["host", "host"]
    idle(pool, 2, now=60.0)
    pool.swap_out(2, 0, 61.0)
    pool.finish_swap_out(2)
    assert found(pool, 0, 1, 2) == ["nowhere", "host", "both"]
    assert pool.host.dropped == 1
    check_pool(pool, [])


def test_a_block_worth_less_than_everything_on_a_full_host_is_not_copied():
    pool = pool_of(4, 1, low_water=1.0)
    idle(pool, 0, now=50.0)
    pool.swap_out(0, 0, 50.0)
    pool.finish_swap_out(0)
    pool.free(pool.allocate(4, 0.0), 0.0)
    (block,) = idle(pool, 1, now=0.0)
    assert pool.swap_out(1, 0, 60.0) == ()
    assert found(pool, 0, 1) == ["host", "device"], "reclaimable, and lost once it is taken"
    assert pool.allocatable == 4 and find(pool, digest(1)) == block
    check_pool(pool, [])


def test_a_host_full_of_reserved_blocks_accepts_no_more_copies():
    pool = pool_of(4, 1, low_water=1.0)
    idle(pool, 0, 1)
    assert len(pool.swap_out(0, 0, 0.0)) == 1
    assert pool.swap_out(1, 0, 0.0) == ()
    pool.finish_swap_out(0)
    check_pool(pool, [])


def test_touched_blocks_are_evicted_last_in_both_tiers():
    pool = pool_of(4, 2, low_water=1.0)
    for number in (0, 1):
        idle(pool, number, now=10.0 * number)
        pool.swap_out(number, 0, 10.0 * number)
        pool.finish_swap_out(number)
    pool.free(pool.allocate(4, 0.0), 0.0)
    blocks = [idle(pool, number, now=20.0)[0] for number in (2, 3)]
    pool.touch([blocks[0]], [digest(0)], 30.0)
    pool.swap_out(2, 0, 31.0)
    pool.finish_swap_out(2)
    assert found(pool, 0, 1, 2, 3) == ["host", "nowhere", "device", "both"]
    check_pool(pool, [])


def test_touching_blocks_in_use_or_being_swapped_out_keeps_their_state():
    pool = pool_of(4, 4)
    blocks = idle(pool, 0, 1, 2, 3)
    (copy,) = pool.swap_out(0, 0, 0.0)
    pool.share((blocks[1],))
    pool.touch(blocks, [], 5.0)
    pool.finish_swap_out(0)
    assert found(pool, 0, 1) == ["both", "device"]
    pool.touch(blocks, [digest(0)], 5.0)
    assert pool.allocatable == 1
    check_pool(pool, [[blocks[1]]])
    assert copy.source == blocks[0]


def test_swapping_in_a_block_that_the_host_lacks_raises():
    pool = pool_of(2, 2)
    (block,) = pool.allocate(1, 0.0)
    with pytest.raises(RuntimeError, match="which does not have its contents"):
        pool.swap_in(block, digest(0), 0)


def test_check_finds_a_lost_host_block_and_a_pinned_block_without_a_copy():
    host = HostPool(2, RULE)
    check_host(host, [])
    place, lost = host.reserve(1.0, host.victims(0.0))
    assert place is not None and not lost
    check_host(host, [place])
    with pytest.raises(RuntimeError, match="lost or in two states"):
        check_host(host, [])
    pool = pool_of(4, 4)
    idle(pool, 0, 1, 2, 3)
    pool.swap_out(0, 0, 0.0)
    pool.copies._swap_outs.clear()
    with pytest.raises(RuntimeError, match="pinned without a copy"):
        check_pool(pool, [])


def test_state_lost_in_both_tiers_counts_as_dropped_once():
    pool = pool_of(4, 1, low_water=1.0)
    idle(pool, 0, now=1.0)
    pool.swap_out(0, 0, 10.0)
    pool.finish_swap_out(0)
    assert found(pool, 0) == ["both"]
    pool.free(pool.allocate(4, 0.0), 0.0)
    assert (found(pool, 0), pool.dropped) == (["host"], 0)
    idle(pool, 1, now=11.0)
    pool.swap_out(1, 0, 11.5)
    pool.finish_swap_out(1)
    assert (found(pool, 0, 1), pool.dropped) == (["nowhere", "both"], 1)
    pool.free(pool.allocate(4, 0.0), 0.0)
    idle(pool, 0, now=0.5)
    pool.swap_out(2, 0, 12.0)
    pool.free(pool.allocate(4, 0.0), 0.0)
    assert (found(pool, 0, 1), pool.dropped) == (["nowhere", "host"], 2)


def test_without_a_host_tier_evicted_blocks_count_as_dropped():
    pool = pool_of(4, 0)
    idle(pool, 0, 1, 2)
    pool.allocate(3, 0.0)
    assert pool.dropped == 2


def test_a_host_tier_grows_and_gives_its_lowest_blocks_first():
    pool = BlockPool(64, 1, rule=RULE, host_blocks=6, host_ready=0, low_water=1.0)
    idle(pool, 1, 2)
    assert pool.swap_out(0, 8, 1.0) == (), "nothing can be copied yet, so what is idle may be reclaimed"
    assert pool.allocatable == 64
    pool.host.resize(2, 6)
    check_host(pool.host, ())
    idle(pool, 3, 4, 5)
    copies = pool.swap_out(1, 8, 2.0)
    assert [copy.target for copy in copies] == [0, 1]
    pool.host.resize(3, 6)
    pool.host.resize(3, 3)
    check_host(pool.host, (0, 1))
    assert (pool.host.ready, pool.host.num_blocks) == (3, 3)
    pool.finish_swap_out(1)
    check_host(pool.host, ())
    assert pool.host.cached == 2
