"""Two tiers: when blocks are copied to the host, which are pinned meanwhile, and which make room for others there."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

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
    """Blocks of one conversation whose contents have these numbers, freed at `now`."""
    blocks = pool.allocate(len(numbers), now)
    for index, (block, number) in enumerate(zip(blocks, numbers, strict=True)):
        pool.cache_block(block, digest(number), index)
    pool.free(blocks, now)
    return blocks


def found(pool, *numbers):
    """The tier of each of these contents: the device, the host, both, or none."""
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


def test_blocks_that_are_freed_while_others_are_copied_count_once():
    pool = pool_of(4, 4)
    idle(pool, 0, 1)
    kept = pool.allocate(2, 0.0)
    for index, block in enumerate(kept):
        pool.cache_block(block, digest(2 + index), index)
    (copy,) = pool.swap_out(0, 0, 0.0)
    pool.free(kept, 0.0)
    assert copy.source not in kept and (pool.cached, pool.available, pool.used) == (4, 3, 0)
    check_pool(pool, [])
    pool.finish_swap_out(0)
    assert (pool.cached, pool.available) == (4, 4)
    check_pool(pool, [])


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
    assert pool.swap_in([(block, digest(0), 0)]) == (BlockCopy(0, block),)
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


def test_blocks_that_another_engine_has_go_first_unless_other_state_has_used_them_since():
    pool = pool_of(8, 8, low_water=1.0)
    idle(pool, 5, 6, now=0.0)
    shared = idle(pool, 0, 1, 2, 3, now=10.0)
    for step in range(6):
        pool.swap_out(step, 6, 10.0)
        pool.finish_swap_out(step)
    assert found(pool, 5, 6, 0, 1, 2, 3) == ["both"] * 6
    pool.touch(shared[:1], [], 20.0)  # another sequence begins with this block
    pool.give_way([digest(number) for number in (0, 1, 2, 3)])
    pool.free(pool.allocate(5, 21.0), 21.0)
    assert found(pool, 5, 6, 0, 1, 2, 3) == ["both", "both", "both", "host", "host", "host"]
    idle(pool, *range(10, 15), now=22.0)
    for step in range(6, 12):
        pool.swap_out(step, 6, 23.0)
        pool.finish_swap_out(step)
    assert found(pool, 5, 6, 0, 1, 2, 3) == ["both", "both", "both", "nowhere", "nowhere", "nowhere"]
    pool.share(shared[:1])
    pool.give_way([digest(0), digest(9)])  # neither blocks in use nor blocks that are not here
    check_pool(pool, [shared[:1]])


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
        pool.swap_in([(block, digest(0), 0)])


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


def host_of(blocks, *numbers, now=0.0):
    """A host tier that retains blocks with these contents, last used one second after another from `now` on."""
    host = HostPool(blocks, RULE)
    for at, number in enumerate(numbers):
        block, _ = host.reserve(1.0, host.victims(now))
        host.cache_block(block, digest(number), 0, (now + at, at))
    return host


def test_a_held_block_is_not_evicted_and_after_its_release_it_is_again():
    host = host_of(2, 1, 2)
    block = host.hold(digest(1))
    assert host.hold(digest(1)) == block and host.held == 1
    other, lost = host.reserve(1e9, host.victims(10.0))
    assert (other, lost) == (1 - block, [digest(2)])
    assert host.reserve(1e9, host.victims(10.0)) == (None, []), "all that is left is held"
    host.release([block])
    assert host.reserve(1e9, host.victims(10.0)) == (None, []), "one of its holders is left"
    host.release([block])
    check_host(host, [other])
    assert host.reserve(1e9, host.victims(10.0)) == (block, [digest(1)])


def test_blocks_held_together_have_their_old_state_afterwards():
    host = HostPool(3, RULE)
    for number, use in ((1, None), (2, (0.0, 1)), (3, (0.0, 2))):
        block, _ = host.reserve(1e9, host.victims(0.0))
        host.cache_block(block, digest(number), 0, use)
    again = host.hold(digest(3))
    blocks = host.hold_all([digest(1), digest(2), digest(3), digest(9)], (5.0, 3))
    assert host.held == 3 and [host.last_use(block) for block in blocks] == [None, (5.0, 3), (5.0, 3)]
    host.release([*blocks, again])
    assert list(host._duplicates) == blocks[:1] and len(host._retained.blocks) == 2 and not host.held
    check_host(host, ())


def test_holding_a_missing_block_gives_none_and_releasing_one_that_is_not_held_raises():
    host = host_of(2, 1)
    assert host.hold(digest(9)) is None
    with pytest.raises(RuntimeError, match="nobody holds it"):
        host.release([0])


def test_a_held_block_keeps_its_age_and_a_touch_renews_it():
    host = host_of(3, 1, 2, 3)
    blocks = [host.hold(digest(number)) for number in (1, 2)]
    host.touch(digest(2), (20.0, 9))
    for block in blocks:
        host.release([block])
    lost = [host.reserve(1e9, host.victims(30.0))[1] for _ in range(3)]
    assert lost == [[digest(1)], [digest(3)], [digest(2)]]


def test_a_released_block_takes_the_state_that_its_device_block_has_meanwhile():
    host = host_of(3, 1, 2, 3)
    blocks = [host.hold(digest(number)) for number in (1, 2)]
    host.mark_in_use([digest(1), digest(2), digest(3)])
    assert [host.last_use(block) for block in blocks] == [None, None]
    host.mark_idle([digest(2), digest(3)], (20.0, 9))
    host.release(blocks)
    assert (host.last_use(blocks[0]), host.last_use(blocks[1])) == (None, (20.0, 9))
    assert list(host._duplicates) == blocks[:1], "one is in use on the device, and is the first to go"
    check_host(host, ())


def test_bad_state_is_dropped_at_once_but_not_while_somebody_reads_it():
    host = host_of(2, 1, 2)
    host.mark_in_use([digest(2)])
    block = host.hold(digest(1))
    for number in (1, 2, 9):
        host.drop(digest(number))
    assert (host.find(digest(1)), host.find(digest(2)), host.held) == (block, None, 1)
    check_host(host, ())
    host.release([block])
    host.drop(digest(1))
    assert host.find(digest(1)) is None
    check_host(host, ())


def test_a_reserved_block_whose_filling_failed_is_free():
    host = HostPool(1, RULE)
    block, _ = host.reserve(1.0, host.victims(0.0))
    host.free(block)
    check_host(host, [])
    assert host.reserve(1.0, host.victims(0.0)) == (block, [])


def test_state_that_arrives_is_found_and_belongs_to_the_device_block_in_use():
    pool = pool_of(4, 2)
    (block,) = pool.allocate(1, 0.0)
    pool.cache_block(block, digest(1), 0)
    for number in (1, 2):
        assert pool.cache_on_host([(pool.reserve_on_host(0, 1.0), digest(number), 0)], 1.0)
    assert found(pool, 1, 2) == ["both", "host"]
    check_pool(pool, [[block]])
    place = pool.reserve_on_host(0, 2.0)
    assert found(pool, 1, 2) == ["device", "host"], "the copy of a block in use makes room first"
    assert not pool.cache_on_host([(place, digest(2), 0)], 2.0), "it is there already"
    pool.free([block], 3.0)
    check_pool(pool, [])


def test_state_that_arrives_during_its_swap_out_is_kept_once():
    pool = pool_of(4, 4)
    idle(pool, 0, 1, 2, 3)
    (copy,) = pool.swap_out(0, 0, 0.0)
    place = pool.reserve_on_host(0, 0.0)
    assert place != copy.target and pool.cache_on_host([(place, digest(0), 0)], 0.0)
    pool.finish_swap_out(0)
    assert found(pool, 0) == ["both"] and pool.find_on_host(digest(0)) == place
    check_pool(pool, [])


def test_state_that_arrives_evicts_no_block_of_a_conversation_that_is_as_active():
    pool = pool_of(4, 2)
    for number in (1, 2):
        pool.cache_on_host([(pool.reserve_on_host(5, 1.0), digest(number), 5)], 1.0)
    assert pool.reserve_on_host(0, 1.0) is None, "an early block costs less to compute again than a late one"
    assert pool.reserve_on_host(0, 1000.0) is not None
    assert BlockPool(4, 1).reserve_on_host(0, 1.0) is None, "there is no host tier"


class TwoTiersWithReaders(RuleBasedStateMachine):
    """Both tiers under random use, with readers of held blocks and blocks that are filled from elsewhere.

    A copy to the host clears its place at once, and fills it when it is complete.
    """

    def __init__(self):
        super().__init__()
        self.pool = pool_of(6, 4, low_water=0.6)
        self.now = 0.0
        self.step = 0
        self.tables = []
        self.held = []
        self.filling = []
        self.memory = [None] * 4
        self.copies = []
        self.arriving = {}
        """The plan that fills each device block from the host."""
        self.used = {}
        """When the device block of each content was last used."""
        self.used_on_host = {}
        """When the copy of each content on the host was last used."""

    def digest_of(self, block):
        return self.pool._digests[block]

    def owned(self):
        """The contents of blocks that have an owner."""
        return {self.digest_of(block) for table in self.tables for block in table}

    @rule(numbers=st.lists(st.integers(0, 7), min_size=1, max_size=3, unique=True))
    def start(self, numbers):
        shared = [block for number in numbers if (block := find(self.pool, digest(number))) is not None]
        missing = [number for number in numbers if find(self.pool, digest(number)) is None]
        if len(missing) + self.pool.pinned_by(shared) > self.pool.available or not self.pool.fits(len(missing), shared):
            return
        self.pool.share(shared)
        fresh = self.pool.allocate(len(missing), self.now)
        for block, number in zip(fresh, missing, strict=True):
            if self.pool.find_on_host(digest(number)) is not None:
                (copy,) = self.pool.swap_in([(block, digest(number), number)])
                assert self.memory[copy.source] == digest(number)
                self.pool.copies.start_swap_in([copy.target], self.step)
                self.arriving[copy.target] = self.step
            else:
                self.pool.cache_block(block, digest(number), number)
        self.tables.append(shared + fresh)

    @precondition(lambda self: self.tables)
    @rule(at=st.integers(0, 99))
    def end(self, at):
        table = self.tables.pop(at % len(self.tables))
        if not self.arriving.keys().isdisjoint(table):  # as when a sequence ends: only later plans use its blocks
            self.arrive(0)
        self.pool.free(table, self.now)
        for block in table:
            if (contents := self.digest_of(block)) not in self.owned():
                self.used[contents] = self.used_on_host[contents] = self.now

    @rule(behind=st.integers(0, 2))
    def arrive(self, behind):
        done = self.step - behind
        self.pool.copies.finish_swap_in(done)
        self.arriving = {block: step for block, step in self.arriving.items() if step > done}

    @rule()
    def swap_out(self):
        for copy in self.pool.swap_out(self.step, 2, self.now):
            self.memory[copy.target] = None
            self.copies.append((self.step, copy.target, self.digest_of(copy.source)))
        self.step += 1

    @rule(behind=st.integers(1, 3))
    def finish(self, behind):
        done = self.step - behind
        for step, target, contents in self.copies:
            if step <= done:
                if self.pool.host.find(contents) is None:
                    self.used_on_host[contents] = self.used.get(contents)
                self.memory[target] = contents
        self.copies = [copy for copy in self.copies if copy[0] > done]
        self.pool.finish_swap_out(done)

    @rule(number=st.integers(0, 7))
    def hold(self, number):
        block = self.pool.host.hold(digest(number))
        assert (block is None) == (self.pool.find_on_host(digest(number)) is None)
        if block is not None:
            self.held.append((block, digest(number)))

    @precondition(lambda self: self.held)
    @rule(at=st.integers(0, 99))
    def release(self, at):
        self.pool.host.release([self.held.pop(at % len(self.held))[0]])

    @rule(number=st.integers(0, 7))
    def reserve(self, number):
        block = self.pool.reserve_on_host(number, self.now)
        if block is not None:
            self.memory[block] = None
            self.filling.append((block, number))

    @precondition(lambda self: self.filling)
    @rule(at=st.integers(0, 99), fails=st.booleans())
    def fill(self, at, fails):
        block, number = self.filling.pop(at % len(self.filling))
        if fails:
            self.pool.host.free(block)
        elif self.pool.cache_on_host([(block, digest(number), number)], self.now):
            self.memory[block] = digest(number)
            self.used_on_host[digest(number)] = self.now

    @rule(number=st.integers(0, 7), seconds=st.floats(0.001, 5.0))
    def touch(self, number, seconds):
        self.now += seconds
        block = find(self.pool, digest(number))
        self.pool.touch([] if block is None else [block], [digest(number)], self.now)
        self.used[digest(number)] = self.used_on_host[digest(number)] = self.now

    @invariant()
    def the_books_are_whole(self):
        check_pool(self.pool, self.tables, [block for block, _ in self.filling])
        assert self.pool.host.held == len({block for block, _ in self.held})

    @invariant()
    def held_blocks_and_found_blocks_hold_what_their_digest_says(self):
        for block, contents in self.held:
            assert self.memory[block] == contents
        for contents, block in self.pool.host._index.blocks.items():
            assert self.memory[block] == contents

    @invariant()
    def each_block_is_reported_where_it_is(self):
        pool, owned, leaving = self.pool, self.owned(), {contents for _, _, contents in self.copies}
        for contents in map(digest, range(8)):
            block, copied = find(pool, contents), pool.find_on_host(contents) is not None
            if block is None:
                expected = "h" if copied else "-"
            elif contents in owned:
                expected = "i" if block in self.arriving else "u"
            else:
                expected = "o" if contents in leaving else "b" if copied else "d"
            assert pool.tiers([contents]) == expected

    @invariant()
    def idle_blocks_are_as_old_as_their_last_use(self):
        owned = self.owned()
        for (last, _), _, contents in self.pool.idle_blocks(0, 6):
            assert last == self.used[contents] and contents not in owned
        for (last, _), number, contents in self.pool.host.idle_blocks(0, 4):
            assert (last, digest(number)) == (self.used_on_host[contents], contents) and contents not in owned

    @invariant()
    def sharing_takes_what_it_pins_and_leaves_the_rest_available(self):
        here = [block for number in range(8) if (block := find(self.pool, digest(number))) is not None]
        idle = {block for block in here if self.pool.tiers([self.digest_of(block)]) in "db"}
        assert self.pool.pinned_by(here) == len(idle)
        used = {block for table in self.tables for block in table}
        assert self.pool.used == len(used) and self.pool.cached == len(here) - len(used & {*here})
        assert self.pool.available == 6 - len(used) - len({*self.pool.copies.swapping_out} - used)


TestTwoTiersWithReaders = TwoTiersWithReaders.TestCase
TestTwoTiersWithReaders.settings = settings(stateful_step_count=60, max_examples=60)


def test_blocks_that_are_wanted_on_the_host_are_copied_first_whether_or_not_they_have_an_owner():
    pool = BlockPool(64, 1, rule=RULE, host_blocks=16)
    (owned,) = pool.allocate(1, 0.0)
    pool.cache_block(owned, digest(9), 0)
    blocks = idle(pool, 1, 2, 3)
    pool.want_on_host([digest(1), digest(9), digest(3), digest(77)])
    assert pool.coming_to_host(digest(9)) and not pool.coming_to_host(digest(77))
    copies = pool.swap_out(0, 0, 5.0)
    assert [copy.source for copy in copies] == [blocks[0], owned, blocks[2]]
    check_pool(pool, [[owned]])
    assert pool.coming_to_host(digest(9))
    pool.finish_swap_out(0)
    assert found(pool, 1, 2, 3, 9) == ["both", "device", "both", "both"]
    assert pool.swap_out(1, 0, 5.0) == () and not pool.coming_to_host(digest(9))
    pool.free([owned], 6.0)
    check_pool(pool, [])


def test_a_step_copies_few_of_the_wanted_blocks_and_a_pause_many():
    pool = BlockPool(64, 1, rule=RULE, host_blocks=64, low_water=0.01, copies_for_others=2)
    idle(pool, *range(8))
    pool.want_on_host(map(digest, range(8)))
    assert len(pool.swap_out(0, 5, 0.0)) == 2
    assert pool.swap_out(1, 5, 0.0) == (), "those are under way"
    pool.finish_swap_out(0)
    assert [len(pool.swap_out(step, 0, 0.0)) for step in (2, 3)] == [4, 0]
    pool.finish_swap_out(3)
    assert len(pool.swap_out(4, 0, 0.0)) == 2 and not pool.copies.wanted


def test_a_wanted_block_that_is_evicted_and_computed_again_is_not_copied_before_it_is_there():
    pool = pool_of(2, 2, low_water=0.01)
    pool.want_on_host([digest(1)])
    (block,) = pool.allocate(1, 0.0)
    pool.cache_block(block, digest(1), 0)
    pool.want_on_host([digest(1)])
    pool.free([block], 0.0)
    pool._idle.retained.remove([block])
    pool._idle.reclaimable[block] = None  # as if the host had been too full for it
    pool.cache_block(pool.allocate(2, 0.0)[0], digest(1), 0)
    assert pool.swap_out(0, 0, 0.0) == (), "this plan computes it"


def test_a_block_that_arrives_during_its_swap_out_is_as_idle_as_the_one_on_the_device():
    pool = pool_of(4, 4)
    (block,) = pool.allocate(1, 0.0)
    pool.cache_block(block, digest(0), 0)
    pool.want_on_host([digest(0)])
    pool.swap_out(0, 0, 0.0)
    pool.cache_on_host([(pool.reserve_on_host(0, 0.0), digest(0), 0)], 0.0)
    pool.free([block], 1.0)
    pool.finish_swap_out(0)
    check_pool(pool, [])
    pool.free(pool.allocate(4, 2.0), 2.0)
    assert found(pool, 0) == ["host"] and pool.find_on_host(digest(0)) in pool.host._retained.blocks
    pool.touch([], [digest(0)], 3.0)


def test_a_full_host_takes_no_wanted_block():
    pool = pool_of(4, 1, low_water=0.01)
    pool.cache_on_host([(pool.reserve_on_host(5, 1.0), digest(7), 5)], 1.0)
    idle(pool, 0, now=1.0)
    pool.want_on_host([digest(0)])
    assert pool.swap_out(0, 0, 1.0) == () and not pool.coming_to_host(digest(0))


def used(host):
    """The uses that readers see: the number of each content, and the time of its last use; None: it is in use."""
    return [(contents[0], use and use[0]) for contents, use in host.take_uses()]


def test_readers_are_told_what_came_and_what_was_used_again_from_their_first_look_on():
    pool = pool_of(4, 4)
    pool.cache_on_host([(pool.reserve_on_host(0, 0.0), digest(1), 0)], 1.0)
    assert pool.host.unread_uses == 0 and used(pool.host) == [], "nobody had asked"
    pool.cache_on_host([(pool.reserve_on_host(0, 0.0), digest(2), 0)], 2.0)
    blocks = pool.allocate(3, 3.0)
    for block, number in zip(blocks, (1, 2, 5), strict=True):
        pool.cache_block(block, digest(number), number)
    pool.free(blocks, 4.0)
    assert pool.host.unread_uses == 4
    assert used(pool.host) == [(2, 2.0), (1, 4.0), (2, 4.0), (5, 4.0)], "the host has no block of the last one"
    assert pool.host.unread_uses == 0 and used(pool.host) == []
    pool.touch(blocks[:1], [digest(2), digest(7)], 5.0)
    assert used(pool.host) == [(1, 5.0), (2, 5.0), (7, 5.0)]


def test_state_that_arrives_for_a_block_in_use_is_told_without_a_time():
    pool = pool_of(4, 4)
    pool.host.take_uses()
    (block,) = pool.allocate(1, 0.0)
    pool.cache_block(block, digest(1), 0)
    pool.cache_on_host([(pool.reserve_on_host(0, 1.0), digest(1), 0)], 1.0)
    assert used(pool.host) == [(1, None)]


@settings(max_examples=60)
@given(
    count=st.integers(0, 7),
    free=st.integers(0, 4),
    duplicates=st.integers(0, 2),
    values=st.lists(st.integers(0, 5), max_size=3),
    value=st.integers(0, 12),
)
def test_reserving_many_takes_what_reserving_one_by_one_takes(count, free, duplicates, values, value):
    def made():
        host = HostPool(free + duplicates + len(values), RULE)
        taken = [host.reserve(1.0, host.victims(9.0))[0] for _ in range(duplicates + len(values))]
        for number, block in enumerate(taken):
            at = number - duplicates
            host.cache_block(block, digest(number), 0 if at < 0 else values[at], None if at < 0 else (1.0, number))
        return host

    together, alone = made(), made()
    blocks, lost = together.reserve_all(count, value / 8, together.victims(9.0))
    victims, one_by_one, gone = alone.victims(9.0), [], []
    for _ in range(count):
        block, evicted = alone.reserve(value / 8, victims)
        gone += evicted
        if block is None:
            break
        one_by_one.append(block)
    assert (blocks, lost) == (one_by_one, gone)
    check_host(together, blocks)
    assert len(blocks) == min(count, free + duplicates + sum(number + 1 < value for number in values))
    assert together.dropped == alone.dropped == len(blocks) - min(len(blocks), free + duplicates)


def test_one_digest_named_twice_is_touched_once_and_duplicates_are_left_alone():
    pool = pool_of(4, 4)
    idle(pool, 1, now=0.0)
    (block,) = pool.allocate(1, 0.0)
    pool.cache_block(block, digest(2), 0)
    for number in (1, 2):
        pool.cache_on_host([(pool.reserve_on_host(0, 0.0), digest(number), 0)], 0.0)
    pool.host.touch_all([digest(1), digest(2), digest(1), digest(3)], (5.0, 99))
    check_pool(pool, [[block]])
    assert pool.host.last_use(pool.find_on_host(digest(1))) == (5.0, 99)
    assert pool.host.last_use(pool.find_on_host(digest(2))) is None


def test_what_is_not_here_can_be_dropped_and_touched():
    host = HostPool(2, RULE)
    host.drop(digest(1))
    host.touch(digest(1), (1.0, 1))
    assert host.find(digest(1)) is None
    check_host(host, [])


def test_a_host_tier_never_shrinks():
    host = HostPool(8, RULE, ready=4)
    host.resize(2, 6)
    assert (host.ready, host.num_blocks) == (4, 6)
    check_host(host, [])
    host.resize(6, 6)
    assert [host.reserve(1.0, host.victims(0.0))[0] for _ in range(7)] == [0, 1, 2, 3, 4, 5, None]


def test_of_two_duplicates_the_one_that_has_been_one_longer_is_evicted_first():
    host = HostPool(2, RULE)
    for number in (1, 2):
        host.cache_block(host.reserve(1.0, host.victims(0.0))[0], digest(number), 0, None)
    assert host.reserve(0.0, host.victims(0.0))[1] == [digest(1)]
    assert host.dropped == 0, "the device has it"


def test_the_largest_of_several_demands_that_were_refused_counts_until_the_next_plan():
    pool = BlockPool(64, 1, rule=RULE, host_blocks=64, low_water=0.02, copies_ahead=1)
    idle(pool, *range(64))
    assert not pool.fits(4, []) and not pool.fits(2, [])
    assert len(pool.swap_out(0, 0, 0.0)) == 4
    pool.finish_swap_out(0)
    assert pool.fits(4, []) and pool.swap_out(1, 0, 0.0) == ()
