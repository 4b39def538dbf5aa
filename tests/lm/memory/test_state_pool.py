"""StatePool: slots for snapshots, which snapshot goes first, and copies between the tiers."""

import pytest

from holdfast.core.pause import Pause
from holdfast.core.types import Identity
from holdfast.lm.memory.block_pool import BlockPool
from holdfast.lm.memory.digests import block_digests
from holdfast.lm.memory.retention import EVICTIONS, RetentionRule
from holdfast.lm.memory.snapshots import NO_SLOT, NOTHING_KEPT, Snapshot, StateKey
from holdfast.lm.memory.state_pool import StatePool
from holdfast.lm.memory.turn_queue import make_turns
from holdfast.lm.memory.turns import NEW, Departure
from holdfast.lm.types import COPIES_AHEAD_BYTES, StateCopy, StateShape
from tests.hybrid import check_states

ROOT = Identity("model").root()
SIZE = 4
ROWS = 2


def cost(position):
    return 1.0 + position


class States:
    """States whose KV blocks are all kept, unless a test drops them."""

    def __init__(self, snapshots=3, host=0, slot_bytes=1, eviction="retention", low_water=0.25):
        turns = make_turns(eviction)
        rule = RetentionRule(EVICTIONS[eviction], cost=cost, chunk_blocks=1, block_size=SIZE, turns=turns)
        self.blocks = BlockPool(64, SIZE, rule=rule.from_the_end())
        shape = StateShape(snapshots=snapshots, host_snapshots=host, slot_bytes=slot_bytes)
        self.pool = StatePool(shape, ROWS, self.blocks, rule, low_water=low_water)
        self.now = 0.0

    def key(self, tokens):
        return StateKey.of(
            ROOT, block_digests(ROOT, tokens[: len(tokens) // SIZE * SIZE], SIZE), tokens, len(tokens), SIZE
        )

    def snapshot(self, tokens, previous=NOTHING_KEPT, **options):
        """A snapshot of these tokens whose last KV block is kept."""
        key = self.key(tokens)
        digest = key.tail_digest or key.parent
        if self.blocks.find_all((digest,)) == [None]:
            (block,) = self.blocks.allocate(1, self.now)
            self.blocks.cache_block(block, digest, len(tokens) // SIZE)
            self.blocks.free([block], self.now)
        return Snapshot(key, previous, **options)

    def save(self, tokens, previous=NOTHING_KEPT, row=0, **options):
        """The snapshot, which a plan has saved."""
        self.now += 1
        snapshot = self.snapshot(tokens, previous, **options)
        assert self.pool.save(row, snapshot, self.now)
        self.plan()
        return snapshot

    def plan(self):
        plans = self.pool.plan(self.now)
        check_states(self.pool)
        return plans

    def kept(self, *snapshots):
        return [snapshot.is_kept for snapshot in snapshots]


TURN = list(range(4))
OTHER, THIRD, FOURTH = ([number] * 4 for number in (10, 20, 30))


def test_a_saved_state_can_be_found_at_once_and_is_copied_before_the_rows_are_filled():
    states = States()
    states.pool.save(0, snapshot := states.snapshot(TURN), 1.0)
    assert states.pool.find(ROOT, [snapshot.key.parent], [*TURN, 4]) is snapshot
    states.pool.start(0, snapshot)
    (plan,) = states.plan()
    assert (plan.saves, plan.starts) == ((StateCopy(0, snapshot.slot),), (StateCopy(snapshot.slot, 0),))
    assert list(plan.__dataclass_fields__).index("saves") < list(plan.__dataclass_fields__).index("starts")
    assert states.plan() == ()


def test_slots_for_snapshots_come_after_those_of_the_rows():
    states = States(snapshots=2)
    assert sorted(states.save(tokens).slot for tokens in (TURN, OTHER)) == [ROWS, ROWS + 1]


def test_free_kept_and_used_slots_are_all_slots():
    states = States()
    pool = states.pool
    assert (pool.free, pool.kept, pool.used) == (3, 0, 0)
    pool.save(0, states.snapshot(TURN), 1.0)
    assert (pool.free, pool.kept, pool.used) == (2, 0, 1)
    states.plan()
    assert (pool.free, pool.kept, pool.used) == (2, 1, 0)
    assert pool.stats()["snapshots_kept"] == 1 and pool.stats()["snapshots_saved"] == 1


def test_a_state_that_is_kept_already_is_not_saved_again():
    states = States(snapshots=2)
    first, other = states.save(TURN), states.save(OTHER)
    assert states.pool.save(1, states.snapshot(TURN), 5.0) and states.plan() == ()
    states.save(THIRD)
    assert states.kept(first, other) == [True, False], "the first counts as used"


def test_the_snapshot_that_is_cheapest_to_compute_again_goes_first():
    states = States(snapshots=2)
    long, short = states.save([*range(40)]), states.save(OTHER)
    states.save(THIRD)
    assert states.kept(long, short) == [True, False]


def test_the_cost_of_a_snapshot_begins_at_the_one_before_it():
    states = States(snapshots=3)
    first = states.save([*range(40)], shared=True)
    after = states.save([*range(44)], first)
    other = states.save([100 + each for each in range(20)])
    states.save(FOURTH)
    assert states.kept(first, after, other) == [True, False, True]


def test_a_snapshot_whose_predecessor_is_dropped_costs_all_tokens_since_the_one_before_that():
    states = States(snapshots=3)
    first = states.save([*range(20)])
    after = states.save([*range(24)], first)
    before = states.pool.value(after, states.now + 10)
    states.save(OTHER)
    states.save(THIRD)
    assert states.kept(first, after) == [False, True]
    values = before, states.pool.value(after, states.now + 8)
    assert values == pytest.approx((cost(22) * 4 / 10, cost(12) * 24 / 10))


def test_the_longest_unused_goes_first_among_equal_costs():
    states = States(snapshots=2)
    first, other = states.save(TURN), states.save(OTHER)
    states.pool.touch(first, states.now + 1)
    states.now += 1
    states.save(THIRD)
    assert states.kept(first, other) == [True, False]


def test_age_alone_decides_if_the_rule_says_so():
    states = States(snapshots=2, eviction="lru")
    long, short = states.save([*range(40)]), states.save(OTHER)
    states.save(THIRD)
    assert states.kept(long, short) == [False, True]


def test_a_snapshot_without_its_kv_blocks_goes_before_all_others():
    states = States(snapshots=2)
    long, short = states.save([*range(40)]), states.save(OTHER)
    (block,) = states.blocks.find_all((long.key.parent,))
    states.blocks.give_way([long.key.parent])
    taken = states.blocks.allocate(63, states.now)
    assert block in taken
    states.blocks.free(taken, states.now)
    assert states.pool.value(long, states.now) == 0
    states.save(THIRD)
    assert states.kept(long, short) == [False, True]


def test_a_snapshot_that_its_conversation_has_left_behind_goes_before_the_latest():
    states = States(snapshots=3)
    other = states.save(OTHER)
    first = states.save([*range(40)])
    latest = states.save([*range(44)], first)
    states.save(THIRD)
    assert states.kept(other, first, latest) == [True, False, True]


@pytest.mark.parametrize("reason", ["a prefix of several", "two starts"])
def test_a_snapshot_that_serves_several_sequences_stays_although_one_has_gone_on(reason):
    states = States(snapshots=3)
    other = states.save(OTHER)
    first = states.save([*range(40)], shared=reason == "a prefix of several")
    for row in range(2 * (reason == "two starts")):
        states.pool.start(row, first)
        states.plan()
    states.save([*range(80)], first)
    states.save(THIRD)
    assert states.kept(other, first) == [False, True]


def test_snapshots_that_the_next_plan_needs_are_not_given_up():
    states = States(snapshots=2)
    first = states.save(TURN)
    states.pool.start(1, first)
    assert states.pool.save(0, states.snapshot(OTHER), 2.0)
    third = states.snapshot(THIRD)
    assert not states.pool.save(0, third, 3.0) and not third.is_kept
    states.plan()
    assert states.pool.save(0, third, 4.0)


def test_the_kv_block_of_a_dropped_tail_goes_first():
    states = States(snapshots=1)
    dropped, other = states.save([*range(6)]), states.snapshot(OTHER)
    states.blocks.touch(states.blocks.find_all((dropped.key.tail_digest,)), (), states.now + 1)
    states.pool.save(0, other, states.now + 2)
    states.blocks.allocate(states.blocks.available - 1, states.now + 2)
    tail, last = states.blocks.find_all((dropped.key.tail_digest, other.key.parent))
    assert tail is None and last is not None


def test_few_ready_slots_have_the_snapshot_of_the_lowest_value_copied_to_the_host():
    states = States(snapshots=2, host=2, low_water=0.5)
    first = states.save(TURN)
    assert first.host == NO_SLOT, "half of the slots are free"
    second = states.save(OTHER)
    states.plan()
    assert (first.host, second.host) == (0, NO_SLOT), "one of two slots can be had at once again"


def test_a_snapshot_leaves_the_device_by_way_of_the_host():
    states = States(snapshots=1, host=2)
    first = states.save(TURN)
    (plan,) = states.plan()
    assert plan.swap_out == (StateCopy(first.slot, first.host),)
    assert states.plan() == (), "it is copied once"
    states.save(OTHER)
    assert first.is_on_host and states.pool.stats()["snapshots_dropped"] == 0
    states.pool.start(1, first)
    (plan,) = states.plan()
    assert plan.swap_in == (StateCopy(first.host, 1),) and plan.starts == ()


def test_snapshots_on_the_host_too_give_up_their_slots_first():
    states = States(snapshots=3, host=1)
    first = states.save(TURN)
    costly = states.save([*range(100, 140)])
    states.save(OTHER)
    states.plan()
    assert [each.host for each in (first, costly)] == [0, NO_SLOT]
    states.pool.touch(first, states.now + 100)
    states.now += 100
    states.save(THIRD)
    assert first.is_on_host and costly.slot != NO_SLOT


def test_a_snapshot_that_is_used_again_makes_room_on_a_full_host():
    states = States(snapshots=2, host=1, low_water=1.0)
    first, other = states.save(TURN), states.save(OTHER)
    states.plan()
    assert [each.host for each in (first, other)] == [0, NO_SLOT]
    states.pool.start(1, first)
    states.plan()
    assert first.slot != NO_SLOT and (first.host, other.host) == (NO_SLOT, 0)


def test_a_full_host_gives_up_the_lowest_value_and_copies_stop():
    states = States(snapshots=1, host=1)
    short = states.save(TURN)
    states.plan()
    long = states.save([*range(100, 140)])
    (plan,) = states.plan()
    assert plan.swap_out == (StateCopy(long.slot, 0),) and states.kept(short, long) == [False, True]
    again = states.save(OTHER)
    states.now += 100
    assert states.plan() == () and states.kept(long, again) == [True, True], "the host keeps what is worth more"


def test_copies_to_the_host_do_not_push_each_other_out_for_ever():
    states = States(snapshots=4, host=1, low_water=1.0)
    for number in range(4):
        states.save([number] * 4)
    assert sum(bool(states.plan()) for _ in range(20)) <= 2


def test_a_plan_copies_no_more_than_its_share_of_bytes():
    states = States(snapshots=4, host=4, slot_bytes=COPIES_AHEAD_BYTES // 2, low_water=1.0)
    for number in range(4):
        states.pool.save(0, states.snapshot([number] * 4), 1.0)
    states.plan()
    assert [len(plan.swap_out) for _ in range(2) for plan in states.plan()] == [2, 2]


def test_no_rows_or_no_snapshots_are_refused():
    for rows, snapshots in ((0, 1), (1, 0)):
        with pytest.raises(ValueError, match=f"{rows} rows and {snapshots} snapshots"):
            StatePool(StateShape(snapshots=snapshots, slot_bytes=1), rows, BlockPool(4, SIZE), RetentionRule())


class Below:
    """A tier below the host, with the states of `keys`. It notes what it is offered."""

    def __init__(self, *keys):
        self.keys_there, self.offered = list(keys), []

    def has(self, digest):
        return digest in [key.digest for key in self.keys_there]

    def keys(self, parent):
        return [key for key in self.keys_there if key.parent == parent]

    def offer(self, snapshot):
        self.offered.append(snapshot)


def with_disk(*keys, snapshots=3, host=2):
    states = States(snapshots=snapshots, host=host)
    states.pool.serve_below(below := Below(*keys))
    return states, below


def test_snapshots_go_to_the_host_while_the_device_is_idle_and_are_offered_once_they_are_there():
    states, below = with_disk()
    first, second = states.save(TURN), states.save(OTHER)
    assert states.plan() == () and states.pool.unflushed and not states.pool.is_flushing
    states.pool.flush(True)
    assert states.pool.is_flushing
    (plan,) = states.plan()
    assert {copy.source for copy in plan.swap_out} == {first.slot, second.slot}
    assert below.offered == [] and not states.pool.can_flush
    states.pool.end_copies()
    assert {*below.offered} == {first, second}
    assert states.plan() == (), "nothing is left"


def test_a_state_that_is_to_be_saved_asks_for_a_plan_while_the_device_is_idle():
    states, _ = with_disk()
    states.pool.save(0, states.snapshot(TURN), 1.0)
    states.pool.flush(True)
    assert states.pool.is_flushing
    (plan,) = states.plan()
    assert plan.saves and not plan.swap_out, "a plan copies to the host what plans before it have saved"
    assert states.pool.is_flushing and states.plan()[0].swap_out


def test_the_most_valuable_snapshot_is_flushed_first():
    states, below = with_disk(host=1)
    states.save(TURN)
    long = states.save([*range(100, 140)])
    states.pool.flush(True)
    (plan,) = states.plan()
    assert plan.swap_out == (StateCopy(long.slot, 0),)
    assert not states.pool.can_flush, "what is on the host is nowhere else"
    below.keys_there.append(long.key)
    assert states.pool.can_flush and len(states.plan()[0].swap_out) == 1
    assert (long.slot != NO_SLOT, long.host) == (True, NO_SLOT)


def test_a_snapshot_that_the_disk_has_is_not_flushed_again():
    states, below = with_disk()
    below.keys_there.append(states.save(TURN).key)
    states.pool.flush(True)
    assert not states.pool.unflushed and states.plan() == ()


def test_a_flush_takes_no_slot_that_the_same_plan_fills():
    states = States(host=1, low_water=1.0)
    states.pool.serve_below(below := Below())
    states.pool.save(0, first := states.snapshot(TURN), 1.0)
    states.pool.save(1, states.snapshot(OTHER), 9.0)
    states.plan()
    below.keys_there.append(first.key)
    states.pool.flush(True)
    (plan,) = states.plan()
    assert [copy.target for copy in plan.swap_out] == [0]


def test_a_held_snapshot_keeps_its_slot_on_the_host():
    states, below = with_disk(host=1)
    first = states.save(TURN)
    states.pool.flush(True)
    states.plan()
    below.keys_there.append(first.key)
    first.holds = 1
    states.save(OTHER)
    assert not states.pool.can_flush and states.plan() == ()
    states.pool.start(0, first)
    assert first.host == 0, "it is being written"
    states.plan()
    first.holds = 0
    assert states.pool.can_flush


def test_a_state_from_below_is_found_on_the_host():
    states, _ = with_disk()
    key = states.snapshot(TURN).key
    slot = states.pool.reserve_on_host(1.0)
    check_states(states.pool)
    assert states.pool.find(ROOT, [key.parent], [*TURN, 4]) is NOTHING_KEPT
    snapshot = states.pool.cache_on_host(slot, key, 1.0)
    assert states.pool.find(ROOT, [key.parent], [*TURN, 4]) is snapshot and snapshot.is_on_host
    states.pool.start(1, snapshot)
    assert states.plan()[0].swap_in == (StateCopy(slot, 1),)
    check_states(states.pool)


def test_a_state_that_the_memory_has_got_meanwhile_gives_its_slot_back():
    states, _ = with_disk()
    slot = states.pool.reserve_on_host(1.0)
    saved = states.save(TURN)
    assert states.pool.cache_on_host(slot, saved.key, 1.0) is saved and saved.host == NO_SLOT
    check_states(states.pool)


def test_states_from_below_take_half_of_the_host_and_hold_it_while_sequences_wait():
    states, _ = with_disk(host=4)
    slots = [states.pool.reserve_on_host(1.0) for _ in range(3)]
    assert slots[2] == NO_SLOT and NO_SLOT not in slots[:2]
    snapshot = states.pool.cache_on_host(slots[0], states.snapshot(TURN).key, 1.0)
    snapshot.holds = 1
    assert states.pool.reserve_on_host(1.0) == NO_SLOT
    states.pool.cancel_on_host(slots[1])
    assert states.pool.reserve_on_host(1.0) != NO_SLOT


def test_a_state_from_below_takes_the_slot_of_a_snapshot_that_the_device_has_too():
    states, _ = with_disk(host=1)
    both = states.save(TURN)
    states.pool.flush(True)
    states.plan()
    mark = states.pool.mark
    assert states.pool.reserve_on_host(1.0) == 0 and (both.host, both.is_kept) == (NO_SLOT, True)
    assert not states.pool.is_quiet(mark), "the copy to this slot is under way"
    states.pool.end_copies()
    assert states.pool.is_quiet(mark)


def test_the_longest_state_of_any_tier_is_known_by_its_key():
    states, below = with_disk()
    tokens = [*TURN, *OTHER, 11, 12]
    key = states.snapshot(tokens).key
    states.save(TURN)
    digests = block_digests(ROOT, tokens[:8], SIZE)
    assert states.pool.find_anywhere(ROOT, digests, [*tokens, 1]).length == 4
    below.keys_there.append(key)
    assert states.pool.find_anywhere(ROOT, digests, [*tokens, 1]) == key
    assert states.pool.find_anywhere(ROOT, digests, tokens).length == 4, "the last token must be computed"
    assert states.pool.find_anywhere(ROOT, digests[:1], [*tokens, 1]).length == 4, "a block before it is gone"
    assert states.pool.find_anywhere(ROOT, digests, [*tokens[:-1], 99, 1]).length == 4, "another tail"


def test_the_tail_of_a_state_on_the_disk_stays_when_its_snapshot_leaves_the_memory():
    states, below = with_disk(snapshots=1, host=0)
    given_way = []
    states.blocks.give_way = given_way.append
    first = states.save([*TURN, 1])
    below.keys_there.append(first.key)
    second = states.save([*OTHER, 1])
    assert (first.is_kept, given_way, states.pool.dropped) == (False, [], 0)
    states.save([*THIRD, 1])
    assert (given_way, states.pool.dropped) == ([[second.key.tail_digest]], 1)


# Other engines.

ONE, TWO, THREE = ([*range(start, start + 2 * SIZE)] for start in (0, 100, 200))


def chain(tokens):
    return block_digests(ROOT, tokens, SIZE)


def test_a_state_that_another_engine_wants_is_copied_to_the_host_and_stays_while_it_is_held():
    states = States(host=1)
    kept = states.save(ONE)
    states.pool.want_on_host(kept.key)
    assert states.pool.wants_copies and states.pool.coming_to_host(kept.key) and not states.pool.hold(kept.key)
    (plan,) = states.plan()
    assert plan.swap_out == (StateCopy(kept.slot, kept.host),)
    assert not states.pool.wants_copies and not states.pool.coming_to_host(kept.key)
    held, mark = states.pool.hold(kept.key), states.pool.mark
    assert held == [kept] and not states.pool.is_quiet(mark), "the copy has not ended"
    states.pool.end_copies()
    assert states.pool.is_quiet(mark)
    other = states.save(TWO)
    states.pool.want_on_host(other.key)
    assert states.plan() == () and not states.pool.coming_to_host(other.key), "the only slot is held"
    states.pool.release(kept)
    states.pool.want_on_host(other.key)
    (plan,) = states.plan()
    assert plan.swap_out == (StateCopy(other.slot, 0),) and kept.host == NO_SLOT and kept.slot != NO_SLOT


def test_a_state_that_is_still_to_be_saved_is_copied_by_the_plan_after_that():
    states = States(host=1)
    snapshot = states.snapshot(ONE)
    states.pool.save(0, snapshot, 1.0)
    states.pool.want_on_host(snapshot.key)
    (plan,) = states.plan()
    assert plan.saves and not plan.swap_out and states.pool.wants_copies
    assert states.plan()[0].swap_out


def test_two_wanted_states_never_get_one_slot_of_the_host():
    states = States(host=1)
    first, second = states.save(ONE), states.save(TWO)
    for each in (first, second):
        states.pool.want_on_host(each.key)
    copies = [plan.swap_out for _ in range(2) for plan in states.plan()]
    assert [len(each) for each in copies] == [1, 1], "each plan copies one"
    assert (first.host, second.host) == (NO_SLOT, 0)


def test_a_wanted_state_evicts_none_of_more_worth_from_the_host():
    states = States(snapshots=1, host=1, low_water=1.0)
    long = states.save([*range(300, 340)])
    assert states.plan()[0].swap_out
    short = states.save(ONE)
    assert long.is_on_host
    states.now += 1000
    states.pool.want_on_host(short.key)
    assert states.plan() == () and long.is_on_host and short.host == NO_SLOT


def test_the_states_after_the_last_block_that_has_any_are_found_the_latest_used_first():
    states = States(snapshots=4)
    states.save(ONE[:SIZE])
    early = states.save(ONE)
    late = states.save([*ONE, 9], early)
    states.blocks.cache_block(*states.blocks.allocate(1, 9.0), chain(ONE)[-1], 1)
    longer = ONE + [7] * 3 * SIZE
    assert states.pool.after(chain(longer)) == [late, early]
    states.pool.touch(early, 20.0)
    assert states.pool.after(chain(longer)) == [early, late]
    assert states.pool.after(chain(TWO)) == []


def test_a_state_without_its_last_block_is_not_offered_to_other_engines():
    states = States()
    kept = states.save(ONE)
    assert states.pool.after(chain(ONE)) == [kept]
    states.blocks.allocate(64, 5.0)
    assert states.pool.after(chain(ONE)) == []


def test_a_state_that_another_engine_has_got_goes_first():
    states = States(snapshots=2)
    old, moved = states.save(ONE), states.save(TWO)
    states.pool.give_way([chain(TWO)[-1]])
    states.save(THREE)
    assert old.is_kept and not moved.is_kept


def test_a_state_that_arrives_is_held_and_offered_to_the_tier_below():
    states, below = with_disk()
    slot = states.pool.reserve_on_host(1.0)
    (found,) = states.pool.receive(slot, states.key(ONE), 2.0)
    assert found.host == slot and found.holds == 1 and below.offered == [found]
    states.pool.release(found)
    assert found.holds == 0


def test_a_state_that_arrives_where_the_device_has_it_frees_its_slot():
    states = States(host=1)
    kept = states.save(ONE)
    slot = states.pool.reserve_on_host(1.0)
    assert states.pool.receive(slot, kept.key, 2.0) == []
    check_states(states.pool)
    assert kept.host == NO_SLOT and states.pool.reserve_on_host(3.0) == slot


def test_a_key_follows_the_block_before_its_tail_alone():
    states = States()
    for tokens in (ONE, [*ONE, 5], [*ONE, 5, 6, 7]):
        key = states.key(tokens)
        assert key.follows(1, SIZE) and not key.follows(0, SIZE) and not key.follows(2, SIZE)
        assert not key._replace(length=key.length + SIZE).follows(1, SIZE)
    assert not states.key([*ONE, 5])._replace(tail_digest=bytes(32)).follows(1, SIZE)
    assert not states.key(ONE)._replace(tail_digest=bytes(32)).follows(1, SIZE)


def left(states, tokens, tenant, until, number):
    """Save the state of a turn that has ended, whose client wants it kept."""
    snapshot = states.save(tokens)
    departure = Departure(f"{number}", tenant, Pause("person", keep_until=until))
    states.blocks.rule.turns.left([snapshot.key.parent], departure, NEW, 2 * number, states.now)
    return snapshot


@pytest.mark.parametrize("eviction", ["pauses", "retention"])
def test_a_snapshot_that_a_client_wants_kept_outlasts_newer_ones_until_its_time(eviction):
    states = States(snapshots=2, eviction=eviction)
    wanted = left(states, TURN, "one", 100.0, 1)
    other = left(states, OTHER, "two", None, 2)
    states.now = 50.0
    third = left(states, THIRD, "two", None, 3)
    assert wanted.is_kept is (eviction == "pauses") and other.is_kept is not wanted.is_kept
    states.now = 200.0
    left(states, FOURTH, "two", None, 4)
    assert not wanted.is_kept and third.is_kept


def test_a_tenant_keeps_no_more_snapshots_than_its_share():
    states = States(snapshots=4, eviction="pauses")
    greedy = [left(states, [number] * 4, "greedy", 1e6 + number, number) for number in (1, 2, 3)]
    honest = left(states, OTHER, "honest", None, 9)
    states.now = 20.0
    states.save(THIRD)
    assert honest.is_kept and states.kept(*greedy) == [True, True, False]
