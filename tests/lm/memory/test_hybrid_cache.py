"""HybridCache: where a sequence can start, which states are saved, and the copies of blocks that are partly full."""

import pytest

from holdfast.core.types import Identity
from holdfast.lm.memory.block_pool import BlockPool
from holdfast.lm.memory.digests import block_digests
from holdfast.lm.memory.hybrid_cache import LEAST_GAIN, LONG, HybridCache
from holdfast.lm.memory.retention import RetentionRule
from holdfast.lm.memory.snapshots import StateKey
from holdfast.lm.memory.state_pool import StatePool
from holdfast.lm.types import BlockCopy, BlockMove, KeptInputs, StateCopy, StatePlan, StateShape, TierCopied
from tests.hybrid import check_states
from tests.invariants import check_pool

ROOT = Identity("model").root()
SIZE = 4


class Memory:
    """Blocks and states, with plans made one after the other."""

    def __init__(self, blocks=16, rows=4, snapshots=4, host_blocks=0, forks=True, places=0):
        rule = RetentionRule(cost=float, chunk_blocks=1, block_size=SIZE)
        self.pool = BlockPool(blocks, SIZE, rule=rule.from_the_end(), host_blocks=host_blocks)
        shape = StateShape(snapshots=snapshots, slot_bytes=1, places=places)
        self.states = StatePool(shape, rows, self.pool, rule)
        self.forks = forks
        self.now = 0.0
        self.steps = 0

    def sequence(self, root=ROOT):
        return HybridCache(self.pool, self.states, root, forks=self.forks)

    def start(self, tokens, row=0, root=ROOT):
        """A sequence that has begun in a row. Returns it, and the copies from the host."""
        self.now += 1
        cache = self.sequence(root)
        copies = cache.allocate(cache.match(tokens), len(tokens), self.now)
        cache.occupy(row)
        return cache, copies

    def run(self, tokens, row=0, root=ROOT):
        """A sequence that has computed these tokens, segment after segment, each with a plan."""
        cache, _ = self.start(tokens, row, root)
        self.compute(cache, len(tokens))
        cache.cache_blocks(tokens)
        return cache

    def compute(self, cache, length):
        while missing := cache.missing(length):
            (piece,) = missing
            cache.plan(*piece)
            self.plan()

    def end(self, tokens, row=0):
        """Compute these tokens and end: the state is saved."""
        cache = self.run(tokens, row)
        self.now += 1
        assert cache.end(tokens, self.now)

    def plan(self):
        self.now += 1
        self.steps += 1
        plans = self.states.plan(self.now)
        check_states(self.states)
        return plans[0] if plans else StatePlan()

    def found(self, tokens):
        return self.sequence().match(tokens).positions(SIZE)


def test_a_sequence_without_kept_state_starts_with_zeros():
    memory = Memory()
    cache, _ = memory.start(range(6))
    assert memory.plan() == StatePlan(starts=(StateCopy(-1, 0),))
    assert cache.missing(6) == ((0, 6),)


def test_the_next_turn_starts_where_the_last_one_ended():
    memory = Memory()
    memory.end(range(8))
    cache, _ = memory.start(range(11), row=1)
    assert memory.plan() == StatePlan(saves=(StateCopy(0, 4),), starts=(StateCopy(4, 1),))
    assert cache.missing(11) == ((8, 11),)


def test_the_last_block_of_a_turn_is_copied_for_the_next_one_if_it_is_not_full():
    memory = Memory()
    first = memory.run(range(10))
    tail = first.blocks[2]
    first.end(range(10), memory.now)
    cache, _ = memory.start(range(13), row=1)
    assert memory.states.tails == [tail] and cache.blocks[:2] == first.blocks[:2] + cache.blocks[:2]
    check_pool(memory.pool, [cache.blocks, [tail]])
    assert memory.plan().tails == (BlockMove(tail, cache.blocks[2]),)
    assert cache.blocks[2] != tail and cache.missing(13) == ((10, 13),)
    check_pool(memory.pool, [cache.blocks])


def test_two_forks_start_with_the_same_snapshot_and_copies_of_their_own():
    memory = Memory()
    memory.end(range(10))
    memory.plan()
    one, _ = memory.start([*range(10), 50], row=1)
    other, _ = memory.start([*range(10), 60], row=2)
    plan = memory.plan()
    assert plan.starts == (StateCopy(4, 1), StateCopy(4, 2))
    assert {move.target for move in plan.tails} == {one.blocks[2], other.blocks[2]}
    assert len({move.source for move in plan.tails}) == 1


def test_a_snapshot_serves_only_tokens_that_begin_with_all_of_its_own_and_have_one_more():
    memory = Memory()
    memory.end(range(10))
    assert memory.found(range(11)) == 10
    assert memory.found(range(10)) == 0
    assert memory.found([*range(9), 99, 98]) == 0
    assert memory.found([99, *range(1, 11)]) == 0


def test_a_snapshot_of_less_than_a_block_is_found():
    memory = Memory()
    memory.end(range(3))
    assert memory.found(range(4)) == 3


def test_a_snapshot_with_a_hole_before_it_is_not_found():
    memory = Memory(blocks=4)
    memory.end(range(8))
    memory.end(range(12))
    assert memory.found(range(13)) == 12
    memory.pool.give_way(block_digests(ROOT, range(4), SIZE))
    taken = memory.pool.allocate(2, memory.now)  # one free block, and the first of the sequence
    memory.pool.free(taken, memory.now)
    assert memory.found(range(13)) == 0


def test_another_tenant_finds_no_snapshot():
    memory = Memory()
    memory.end(range(10))
    other = memory.sequence(Identity("model", tenant="other").root())
    assert other.match(range(11)).positions(SIZE) == 0


def test_a_sequence_that_shares_nothing_saves_and_finds_nothing():
    memory = Memory()
    private = memory.run(range(8), root=None)
    private.end(range(8), memory.now)
    assert memory.plan() == StatePlan() and memory.found(range(9)) == 0
    memory.end(range(8))
    assert memory.sequence(None).match(range(9)).positions(SIZE) == 0


def test_the_longest_snapshot_is_found():
    memory = Memory()
    memory.end(range(6))
    memory.end(range(7))
    memory.end(range(13))
    assert [memory.found(range(length)) for length in (7, 8, 13, 14)] == [6, 7, 7, 13]


def test_a_snapshot_whose_blocks_are_dropped_is_not_found():
    memory = Memory(blocks=6)
    memory.end(range(10))
    memory.end(range(100, 120))  # takes five of six blocks
    assert memory.found(range(11)) == 0


def test_the_last_blocks_of_idle_conversations_are_dropped_first():
    memory = Memory(blocks=6)
    memory.end(range(8))
    memory.end(range(14))
    memory.plan()
    assert memory.found(range(15)) == 14
    memory.run(range(100, 110), row=1)
    assert memory.found(range(15)) == 8, "its first blocks are still there for an earlier snapshot"


def test_an_ended_sequence_with_unknown_tokens_in_flight_saves_no_state():
    memory = Memory()
    cache = memory.run(range(10))
    cache.end(range(9), memory.now)
    assert memory.plan() == StatePlan()


def test_a_preempted_sequence_goes_on_where_it_was():
    memory = Memory()
    cache = memory.run(range(10))
    assert not cache.suspend(range(10), memory.now)
    found = cache.match(range(11))
    cache.allocate(found, 11, memory.now)
    cache.occupy(3)
    assert memory.plan() == StatePlan(
        saves=(StateCopy(0, 4),), starts=(StateCopy(4, 3),), tails=(BlockMove(*found.copied, cache.blocks[2]),)
    )
    assert cache.missing(11) == ((10, 11),)


def test_a_sequence_that_ends_before_a_plan_fills_its_row_saves_nothing():
    memory = Memory()
    memory.end(range(10))
    memory.plan()
    cache, _ = memory.start(range(12), row=1)
    cache.end(range(12), memory.now)
    assert memory.plan() == StatePlan()
    check_pool(memory.pool, [])


def test_a_sequence_that_computed_nothing_since_its_snapshot_saves_nothing():
    memory = Memory(snapshots=1)
    memory.end(range(10))
    cache, _ = memory.start(range(12), row=1)
    memory.plan()
    memory.end(range(100, 110))
    memory.plan()
    cache.end(range(12), memory.now)
    assert memory.plan() == StatePlan()


def test_the_state_is_saved_where_a_known_prefix_ends():
    memory = Memory()
    memory.end([*range(8), 50, 51])
    memory.plan()
    prompt = [*range(8), 60, 61, 62]
    cache, _ = memory.start(prompt, row=1)
    assert cache.missing(len(prompt)) == ((0, 8),), "it is computed up to the end of the known prefix"
    cache.plan(0, 8)
    assert memory.found([*range(8), 70]) == 0, "the state is there only after the plan"
    memory.plan()
    assert cache.missing(len(prompt)) == ((8, 11),)
    assert memory.found([*range(8), 70]) == 8
    assert memory.plan().saves == (StateCopy(1, 5),)


def test_without_forks_a_prompt_is_not_cut():
    memory = Memory(forks=False)
    memory.end([*range(8), 50, 51])
    cache, _ = memory.start([*range(8), 60, 61, 62])
    assert cache.missing(11) == ((0, 11),)


def test_a_long_prompt_keeps_its_state_for_another_answer_while_slots_are_free():
    memory = Memory(blocks=LONG, snapshots=1)
    prompt = range(LONG + 1)
    cache, _ = memory.start(prompt)
    assert cache.missing(LONG + 1) == ((0, LONG),)
    memory.compute(cache, LONG + 1)
    cache.cache_blocks(prompt)
    assert memory.found(prompt) == LONG
    memory.plan()
    other, _ = memory.start(range(5, LONG + 7), row=1)
    assert other.missing(LONG + 2) == ((0, LONG + 2),), "no slot is free"


def test_a_long_prompt_that_may_use_no_kept_state_is_not_cut():
    memory = Memory(blocks=LONG)
    cache = memory.sequence()
    cache.allocate(cache.match(range(1)), LONG + 1, 0.0)
    assert cache.missing(LONG + 1) == ((0, LONG + 1),)


def test_a_sequence_announces_the_state_that_it_will_save_until_it_stops():
    memory = Memory()
    memory.end([*range(8), 50, 51])
    memory.plan()
    prompt = [*range(8), 60, 61, 62]
    cache, _ = memory.start(prompt, row=1)
    assert memory.sequence().match(prompt).coming == block_digests(ROOT, range(8), SIZE)[1]
    assert memory.sequence().match(range(7)).coming == b"", "it has fewer tokens than that state"
    cache.suspend(prompt, memory.now)
    assert memory.sequence().match(prompt).coming == b""
    memory.start(prompt, row=1)[0].plan(0, 8)
    memory.plan()
    assert memory.sequence().match(prompt).coming == b"", "it has come"


def test_a_short_prompt_is_not_cut():
    memory = Memory(blocks=LONG)
    assert memory.start(range(LONG - 1))[0].missing(LONG - 1) == ((0, LONG - 1),)


def test_a_sequence_that_takes_the_whole_pool_does_without_a_snapshot_that_needs_a_copy():
    memory = Memory(blocks=4)
    memory.end(range(10))
    memory.end(range(12))
    memory.plan()
    assert memory.found(range(12)) == 10
    assert memory.found(range(16)) == 12, "full blocks are shared, not copied"
    memory = Memory(blocks=4)
    memory.end(range(10))
    assert memory.found(range(13)) == 0


def test_the_copied_block_counts_as_needed():
    memory = Memory(blocks=4)
    memory.end(range(10))
    memory.plan()
    found = memory.sequence().match(range(12))
    assert memory.pool.needed(found, 12) == 4
    assert memory.pool.admits(found, 12, 0) and not memory.pool.admits(found, 12, 1)


def test_a_partial_block_of_the_host_fills_the_sequences_own_block():
    memory = Memory(blocks=4, host_blocks=8)
    memory.end(range(10))
    memory.plan()
    digest = next(iter(memory.states.snapshots())).key.tail_digest
    for step in range(3):
        memory.pool.fits(4, ())
        memory.pool.swap_out(step, 0, memory.now)
        memory.pool.copied(TierCopied(step, step))
    memory.run(range(100, 116), row=1, root=None).end((), memory.now)
    on_host = memory.pool.find_on_host(digest)
    cache, copies = memory.start(range(11), row=2)
    assert copies[-1] == BlockCopy(on_host, cache.blocks[2]) and len(copies) == 3
    assert memory.states.tails == [] and cache.missing(11) == ((10, 11),)
    assert memory.pool.find_all((digest,)) == [None], "the sequence goes on writing to its block"
    check_pool(memory.pool, [cache.blocks])


def test_a_waiting_sequence_keeps_its_snapshot_and_blocks_recent():
    memory = Memory(snapshots=2)
    memory.end(range(10))
    memory.end(range(100, 110))
    memory.plan()
    memory.sequence().touch(range(11), memory.now + 1)
    memory.now += 1
    memory.end(range(200, 210))
    assert (memory.found(range(11)), memory.found(range(100, 111))) == (10, 0)


def drafting(places=8):
    """A sequence that has computed six tokens in row 0, and verifies a draft after the next one."""
    memory = Memory(places=places)
    cache = memory.run(range(6))
    cache.grow(memory.now)
    cache.planned = 7
    assert cache.draft(6, 10) == 10
    return memory, cache, memory.plan().verifies[0].places


def test_a_draft_has_a_place_for_each_token_and_no_position_counts_before_its_result():
    memory, cache, places = drafting()
    assert len(set(places)) == 4 and memory.states.free_places == 4
    assert cache.planned == 6 and cache.missing(7) == ((6, 7),)
    assert memory.plan() == StatePlan(), "nothing moves on before the result"


@pytest.mark.parametrize(("places", "stop"), [(0, 7), (1, 7), (2, 8), (3, 9), (4, 10)])
def test_a_draft_is_cut_where_no_place_is_free(places, stop):
    memory = Memory(places=places)
    cache = memory.run(range(6))
    cache.grow(memory.now)
    cache.planned = 7
    assert cache.draft(6, 10) == stop
    assert cache.planned == (7 if stop == 7 else 6), "without a draft, the decode is planned as any other"
    assert len(memory.plan().verifies) == (stop > 7)


def test_a_draft_is_cut_where_the_blocks_end():
    memory = Memory(places=8)
    cache = memory.run(range(6))
    cache.planned = 7
    assert (cache.capacity, cache.draft(6, 10)) == (8, 8)
    assert len(memory.plan().verifies[0].places) == 2


@pytest.mark.parametrize("count", [1, 2, 4])
def test_the_plan_after_the_result_moves_the_state_on_by_the_accepted_tokens(count):
    memory, cache, places = drafting()
    cache.accept(count)
    assert (cache.planned, memory.states.free_places) == (6 + count, 8)
    assert memory.plan() == StatePlan(replays=(KeptInputs(0, places[:count]),))
    assert memory.plan() == StatePlan()


def test_a_draft_without_accepted_tokens_leaves_the_state():
    memory, cache, _ = drafting()
    cache.accept(0)
    assert (cache.planned, memory.states.free_places, memory.plan()) == (6, 8, StatePlan())


def test_a_turn_that_ends_with_its_draft_is_saved_after_the_accepted_tokens():
    memory, cache, places = drafting()
    cache.accept(3)
    cache.end(range(10), memory.now)
    assert memory.plan() == StatePlan(replays=(KeptInputs(0, places[:3]),), saves=(StateCopy(0, 4),))
    assert memory.found(range(12)) == 9


def test_a_turn_that_ends_in_the_middle_of_its_draft_is_saved_at_its_last_token():
    memory, cache, places = drafting()
    cache.accept(4)
    cache.end(range(8), memory.now)
    assert memory.plan() == StatePlan(replays=(KeptInputs(0, places[:2]),), saves=(StateCopy(0, 4),))
    assert memory.found(range(12)) == 8


def test_a_sequence_that_leaves_before_its_result_is_saved_without_the_draft():
    memory, cache, _ = drafting()
    cache.end(range(7), memory.now)
    assert memory.states.free_places == 8
    assert memory.plan() == StatePlan(saves=(StateCopy(0, 4),))
    assert memory.found(range(12)) == 6


def test_a_sequence_that_keeps_nothing_leaves_its_draft_behind():
    memory = Memory(places=8)
    cache = memory.run(range(6), root=None)
    for accepted in (False, True):
        cache, _ = memory.start(range(6), root=None)
        memory.compute(cache, 6)
        cache.planned = 7
        cache.draft(6, 8)
        memory.plan()
        if accepted:
            cache.accept(2)
        cache.end(range(9), memory.now)
        assert (memory.states.free_places, memory.plan()) == (8, StatePlan())


def test_places_of_accepted_tokens_serve_the_next_draft_of_the_same_plan():
    memory, cache, places = drafting(places=4)
    cache.accept(4)
    cache.grow(memory.now)
    cache.planned = 11
    assert cache.draft(10, 12) == 12
    plan = memory.plan()
    assert plan.replays == (KeptInputs(0, places),)
    assert {*plan.verifies[0].places} < {*places}


class Disk:
    """A tier below the host that has all blocks and states of one conversation."""

    def __init__(self, memory, tokens, length=None, gone=()):
        length = len(tokens) if length is None else length
        digests = block_digests(ROOT, tokens[: length // SIZE * SIZE], SIZE)
        self.key = StateKey.of(ROOT, digests, tokens, length, SIZE)
        self.blocks = [*digests, *([self.key.tail_digest] if self.key.tail else [])]
        there = {digest for at, digest in enumerate(self.blocks) if at not in gone}
        memory.pool.serve_below(there.__contains__)
        memory.states.serve_below(self)

    def has(self, digest):
        return digest == self.key.digest

    def keys(self, parent):
        return [self.key] if parent == self.key.parent else []

    def offer(self, snapshot):
        raise AssertionError("nothing goes to the host in these tests")


def test_a_sequence_lacks_the_blocks_the_tail_and_the_state_that_only_the_disk_has():
    memory, tokens = Memory(), [*range(22)]
    disk = Disk(memory, tokens)
    lacking = memory.sequence().lacking([*tokens, 99])
    assert lacking == {**dict(enumerate(disk.blocks)), -22: disk.key.digest} and len(disk.blocks) == 6


def test_what_the_memory_has_of_a_start_is_not_lacking():
    memory, tokens = Memory(), [*range(22)]
    disk = Disk(memory, tokens)
    memory.end(tokens[:4])
    memory.run(tokens[:9])
    lacking = memory.sequence().lacking([*tokens, 99])
    assert [*lacking] == [2, 3, 4, 5, 4 - 22]
    assert memory.sequence(None).lacking([*tokens, 99]) == {}, "a sequence that shares nothing finds nothing"
    assert disk.key.length == 22


def test_a_snapshot_in_memory_lacks_only_its_blocks():
    memory, tokens = Memory(blocks=16), [*range(20)]
    memory.end(tokens)
    disk = Disk(memory, tokens)
    assert memory.sequence().lacking([*tokens, 99]) == {}
    memory.pool.allocate(12, 9.0)  # this evicts the last block
    assert memory.sequence().lacking([*tokens, 99]) == {4: disk.blocks[4], -20: b""}


@pytest.mark.parametrize("gone", [(0,), (3,), (5,)], ids=["the first block", "a block", "the tail"])
def test_a_state_whose_blocks_are_not_all_on_the_disk_is_not_read(gone):
    memory, tokens = Memory(), [*range(22)]
    Disk(memory, tokens, gone=gone)
    assert memory.sequence().lacking([*tokens, 99]) == {}


def test_a_state_that_saves_few_tokens_is_not_read():
    memory = Memory()
    for length, read in ((LEAST_GAIN, True), (LEAST_GAIN - 1, False)):
        Disk(memory, [*range(length)])
        assert bool(memory.sequence().lacking([*range(length), 99])) == read


def test_a_tail_for_which_the_pool_has_no_second_block_is_not_read():
    tokens = [*range(22)]
    for blocks, read in ((8, True), (6, False)):
        memory = Memory(blocks=blocks)
        Disk(memory, tokens)
        assert bool(memory.sequence().lacking([*tokens, 99])) == read


@pytest.mark.parametrize("first", [True, False], ids=["the table is above its source", "the source is above the table"])
def test_a_tail_is_copied_between_the_new_places_of_blocks_that_moved(first):
    memory = Memory(blocks=12)
    filler, tokens = memory.sequence(None), [0] * 16
    if not first:
        filler.allocate(filler.match(tokens), len(tokens), memory.now)
    memory.end(list(range(10)))
    if first:
        filler.allocate(filler.match(tokens), len(tokens), memory.now)
    else:
        filler.end(tokens, memory.now)
    cache, _ = memory.start(list(range(13)), row=1)
    if first:
        filler.end(tokens, memory.now)
    (source,) = memory.states.tails
    above = max(cache.blocks[2], source)
    assert (above == source) != first
    places = dict(memory.pool.lend(12 - above, memory.now, most_moves=12))
    assert above in places
    target = places.get(cache.blocks[2], cache.blocks[2])
    cache.move(places)
    (plan,) = memory.states.plan(memory.now)
    assert plan.tails == (BlockMove(places.get(source, source), target),) and cache.blocks[2] == target
