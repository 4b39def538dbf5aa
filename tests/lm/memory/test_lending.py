"""Blocks lent to training: random histories against a plain model of every block's contents, and each rule by hand."""

import random

import pytest

from holdfast.core.types import Identity
from holdfast.lm.memory.block_pool import BlockPool
from holdfast.lm.memory.retention import EVICTIONS, RetentionRule
from holdfast.lm.memory.sequence_cache import SequenceCache
from tests.invariants import check_pool
from tests.long import then_long


def a_pool(blocks=8, **options):
    return BlockPool(blocks, 4, **options)


def lend(pool, count, *, most_moves=100, now=0.0):
    return [tuple(move) for move in pool.lend(count, now, most_moves=most_moves)]


def test_the_highest_blocks_are_lent_and_low_ones_are_allocated_meanwhile():
    pool = a_pool()
    assert lend(pool, 3) == []
    assert (pool.lent, pool.available, pool.used, pool.cached) == (3, 5, 0, 0)
    assert sorted(pool.allocate(5, 0.0)) == [0, 1, 2, 3, 4]
    with pytest.raises(RuntimeError, match="1 blocks more"):
        pool.allocate(1, 0.0)


def test_reclaimed_blocks_are_free_at_once_and_allocated_last():
    pool = a_pool()
    lend(pool, 5)
    pool.reclaim(2)
    assert (pool.lent, pool.available) == (3, 5)
    assert pool.allocate(5, 0.0) == [0, 1, 2, 3, 4]
    with pytest.raises(RuntimeError, match="4 blocks are to be reclaimed, and 3 are lent"):
        pool.reclaim(4)


def test_owned_blocks_of_the_lent_range_move_down_with_their_owners_and_their_digests():
    pool = a_pool(6)
    low = pool.allocate(2, 0.0)
    high = pool.allocate(4, 0.0)
    pool.cache_block(high[3], b"x" * 32, 3)
    pool.share(high[3:])
    pool.free(low, 0.0)
    assert lend(pool, 2) == [(4, 0), (5, 1)]
    assert pool.find_all([b"x" * 32]) == [1]
    check_pool(pool, [[2, 3, 0, 1], [1]])


def test_no_more_blocks_are_moved_than_allowed():
    pool = a_pool(6)
    low = pool.allocate(2, 0.0)
    pool.allocate(4, 0.0)
    pool.free(low, 0.0)
    assert lend(pool, 2, most_moves=1) == [(5, 0)]
    assert pool.lent == 1


def test_no_more_blocks_are_lent_than_can_be_allocated():
    pool = a_pool(6)
    pool.allocate(4, 0.0)
    lend(pool, 5)
    assert pool.lent == 2 and pool.available == 0


def test_idle_state_of_the_lowest_value_makes_room_and_the_rest_moves():
    pool = a_pool(6)
    names = [bytes([number]) * 32 for number in range(6)]
    blocks = pool.allocate(6, 0.0)
    for block, name in zip(blocks, names, strict=True):
        pool.cache_block(block, name, 0)
    for now, block in enumerate(blocks):  # the first is the oldest
        pool.free([block], float(now))
    pool.max_copies = 1
    assert dict(lend(pool, 2, now=10.0)).keys() == {4, 5}
    assert [place is not None for place in pool.find_all(names)] == [False, False, True, True, True, True]
    assert {*pool.find_all(names[2:])} == {0, 1, 2, 3}
    check_pool(pool, [])
    pool.allocate(2, 11.0)  # the moved block has kept its age
    assert [place is not None for place in pool.find_all(names)] == [False] * 4 + [True] * 2


def test_with_a_host_tier_state_is_copied_there_before_its_blocks_are_lent():
    pool = a_pool(4, host_blocks=4, low_water=0.0)
    pool.max_copies = 4
    for number, block in enumerate(pool.allocate(4, 0.0)):
        pool.cache_block(block, bytes([number]) * 32, 0)
        pool.free([block], float(number))
    assert lend(pool, 2) == [] and pool.lent == 0
    copies = pool.swap_out(0, 1, 5.0)
    assert len(copies) >= 2
    assert lend(pool, 2) == [] and pool.lent == 0, "they are being copied"
    pool.finish_swap_out(0)
    lend(pool, 2)
    assert pool.lent == 2
    check_pool(pool, [])


def test_a_block_that_is_being_swapped_in_is_not_lent_nor_are_those_below_it():
    pool = a_pool(6)
    blocks = pool.allocate(5, 0.0)
    pool.copies.start_swap_in([blocks[4]], 7)
    pool.free(blocks[:3], 0.0)
    assert lend(pool, 2) == [] and pool.lent == 1
    pool.copies.finish_swap_in(7)
    assert lend(pool, 1) == [(4, 0)]


class Life:
    """Random sequences over a pool, and the contents of their blocks: the tokens up to each block's end."""

    def __init__(self, seed):
        self.choose = choose = random.Random(seed)
        self.size = choose.choice((1, 2, 4))
        self.blocks = choose.choice((4, 9, 24))
        host = choose.choice((0, 0, 3, 12))
        rule = RetentionRule(
            EVICTIONS[choose.choice((*EVICTIONS,))], float, choose.choice((1, 2)), block_size=self.size
        )
        self.pool = BlockPool(self.blocks, self.size, rule=rule, host_blocks=host, low_water=0.3)
        self.caches = []
        self.contents = [None] * self.blocks
        self.host = [None] * host
        self.out, self.now, self.step = [], 0.0, 0
        self.moved = self.lent = 0
        self.prefixes = [self.draw(12) for _ in range(2)]

    def draw(self, count):
        return [self.choose.randrange(50) for _ in range(count)]

    def held(self, tokens, index):
        return tuple(tokens[: (index + 1) * self.size])

    def start(self):
        tokens = self.choose.choice(self.prefixes)[: self.choose.randrange(13)] + self.draw(self.choose.randint(1, 6))
        cache = SequenceCache(self.pool, Identity().root() if self.choose.random() < 0.8 else None)
        found = cache.match(tokens)
        if not self.pool.admits(found, len(tokens), 0):
            return
        for index, block in found.device.items():
            assert self.contents[block] == self.held(tokens, index), "what is found is what it says"
        for source, target in cache.allocate(found, len(tokens), self.now):
            self.contents[target] = self.host[source]
        for first, stop in cache.missing(len(tokens)):
            cache.plan(first, stop)
        for index, block in enumerate(cache.blocks):
            if index in found.host:
                assert self.contents[block] == self.held(tokens, index)
            elif index not in found.device:
                self.contents[block] = self.held(tokens, index)
        cache.cache_blocks(tokens)
        self.caches.append((cache, tokens))

    def swap(self):
        copies = self.pool.swap_out(self.step, 4, self.now)
        self.out.append((self.step, [(copy, self.contents[copy.source]) for copy in copies]))
        self.step += 1
        if self.choose.random() < 0.6 and self.out:
            step, copies = self.out.pop(0)
            for (source, target), contents in copies:
                assert self.contents[source] == contents, "it stays as it is until the copy is complete"
                self.host[target] = contents
            self.pool.finish_swap_out(step)

    def lend(self):
        before = self.pool.lent
        moves = self.pool.lend(self.choose.randint(1, 6), self.now, most_moves=self.choose.choice((0, 1, 4, 99)))
        places = dict(moves)
        assert len({*places.values()}) == len(places) and not {*places} & {*places.values()}
        for source, target in moves:
            self.contents[target] = self.contents[source]
        for cache, _ in self.caches:
            cache.move(places)
        line = self.blocks - self.pool.lent
        self.contents[line:] = ["training"] * self.pool.lent
        self.moved, self.lent = self.moved + len(moves), self.lent + self.pool.lent - before

    def act(self):
        self.now += self.choose.random()
        match self.choose.randrange(8):
            case 0 | 1 | 2:
                self.start()
            case 3 if self.caches:
                cache, _ = self.caches.pop(self.choose.randrange(len(self.caches)))
                cache.free(self.now)
            case 4 | 5:
                self.lend()
            case 6:
                self.pool.reclaim(self.choose.randint(0, self.pool.lent))
            case _:
                self.swap()
        self.check()

    def check(self):
        pool = self.pool
        check_pool(pool, [cache.blocks for cache, _ in self.caches])
        assert len(pool._free) + pool.cached + pool.used + pool.lent == self.blocks
        line = self.blocks - pool.lent
        for cache, tokens in self.caches:
            assert all(block < line for block in cache.blocks)
            assert [self.contents[block] for block in cache.blocks] == [
                self.held(tokens, index) for index in range(len(cache.blocks))
            ]


@pytest.mark.parametrize("seed", then_long(20, range(60)))
def test_every_block_table_leads_to_its_sequences_state_whatever_is_lent(seed):
    life = Life(seed)
    for _ in range(200):
        life.act()


def test_random_lives_lend_and_move():
    lives = [Life(seed) for seed in range(20)]
    for life in lives:
        for _ in range(200):
            life.act()
    assert sum(life.moved for life in lives) > 150 and sum(life.lent for life in lives) > 600
