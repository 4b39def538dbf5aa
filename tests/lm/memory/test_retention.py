"""Retention: the lowest value first, whatever comes and goes, against a search through everything."""

import random
import sys

import pytest

from holdfast.lm.config import EngineConfig
from holdfast.lm.memory.prefix_index import PrefixIndex
from holdfast.lm.memory.retention import EVICTIONS, MIN_AGE, IdleBlocks, Retention, RetentionRule, cost_by_position


def rule(eviction="retention", chunk_blocks=1, cost=float, block_size=1):
    return RetentionRule(EVICTIONS[eviction], cost=cost, chunk_blocks=chunk_blocks, block_size=block_size)


def order(retention, now):
    """All victims, chunk by chunk."""
    victims, chunks = retention.victims(now), []
    while (chunk := victims.pop()) is not None:
        chunks.append(chunk.blocks)
    return chunks


def add(retention, block, index, last, release):
    """Block `index` of a sequence, last used at `last`, by call `release`."""
    retention.add_all((block,), (index,), (last, release))


def conversation(retention, first, chunks, last, release, chunk_blocks=1):
    """Blocks `first`, `first` + 1, … of one conversation."""
    for index in range(chunks * chunk_blocks):
        add(retention, first + index, index, last, release)


def test_leading_chunks_of_old_conversations_are_evicted_first():
    retention = Retention(rule())
    conversation(retention, 0, 3, last=0.0, release=1)
    conversation(retention, 10, 3, last=60.0, release=2)
    # At 90 the ages are 90 and 30: values 1, 2, 3 over 90 and over 30.
    victims = retention.victims(90.0)
    assert victims.pop() == (pytest.approx(1 / 90), [0], (0.0, 1))
    assert victims.pop() == (pytest.approx(2 / 90), [1], (0.0, 1))
    rest = [victims.pop() for _ in range(4)]
    assert {block for _, (block,), _ in rest[:2]} == {2, 10}, "worth the same"
    assert [block for _, (block,), _ in rest[2:]] == [11, 12]
    assert victims.pop() is None and len(retention.blocks) == 0


def test_the_order_of_eviction_changes_as_time_passes():
    retention = Retention(rule())
    add(retention, 0, 8, 0.0, 1)  # cost 9, old
    add(retention, 1, 0, 90.0, 2)  # cost 1, young
    assert order(retention, 92.0) == [[0], [1]]
    add(retention, 0, 8, 0.0, 1)
    add(retention, 1, 0, 90.0, 2)
    assert order(retention, 900.0) == [[1], [0]]


def test_blocks_of_one_chunk_are_evicted_together_unless_freed_apart():
    retention = Retention(rule(chunk_blocks=2))
    conversation(retention, 0, 2, last=1.0, release=1, chunk_blocks=2)
    conversation(retention, 10, 1, last=1.0, release=2, chunk_blocks=2)
    assert order(retention, 5.0) == [[0, 1], [10, 11], [2, 3]]


def test_lru_ignores_cost_and_can_evict_whole_conversations():
    for name, expected in (("lru", [[0], [1], [2], [10]]), ("lru-conversation", [[0, 1, 2], [10]])):
        retention = Retention(rule(name))
        conversation(retention, 0, 3, last=1.0, release=1)
        conversation(retention, 10, 1, last=1.0, release=2)
        assert order(retention, 5.0) == expected


def test_tail_first_evicts_chunk_by_chunk_from_the_end_also_of_blocks_that_come_late():
    for late in (False, True):
        retention = Retention(rule("tail-first"))
        if late:
            add(retention, 20, 0, 9.0, 0)
        retention.add_all((2, 1, 0), (2, 1, 0), (1.0, 1))
        add(retention, 10, 0, 2.0, 2)
        assert order(retention, 10.0) == [[2], [1], [0], [10], *[[20]] * late]


def test_chunks_used_again_together_are_still_evicted_one_by_one_in_their_order():
    retention = Retention(rule("lru"))
    conversation(retention, 0, 3, last=1.0, release=1)
    for block in range(3):
        retention.renew(block, (2.0, 2))
    assert order(retention, 5.0) == [[0], [1], [2]]


def test_pop_leaves_chunks_whose_value_reaches_the_bound():
    retention = Retention(rule())
    conversation(retention, 0, 2, last=0.0, release=1)
    victims = retention.victims(10.0)
    assert victims.pop(below=0.1) is None
    assert victims.pop(below=0.11) == (pytest.approx(0.1), [0], (0.0, 1))
    assert len(retention.blocks) == 1 and 1 in retention.blocks and 0 not in retention.blocks


def test_removed_blocks_are_not_evicted_and_late_blocks_are_evicted_in_order():
    retention = Retention(rule("lru"))
    for block, last in enumerate((1.0, 2.0, 4.0, 5.0)):
        add(retention, block, 0, last, block)
    retention.remove([1])
    add(retention, 9, 0, 3.0, 9)
    assert order(retention, 10.0) == [[0], [9], [2], [3]]


def test_adding_a_late_block_does_not_walk_past_younger_blocks():
    """Each block that completes its copy to the host was idle for longer than all blocks freed meanwhile."""
    retention, count = Retention(rule("lru")), 4000
    for block in range(count):
        add(retention, block, 0, 1000.0 + block, block)
    steps = 0

    def count_lines(frame, event, argument):
        nonlocal steps
        steps += 1
        return count_lines

    before = sys.gettrace()
    sys.settrace(count_lines)
    try:
        for block in range(100):
            add(retention, count + block, 0, float(block), block)
    finally:
        sys.settrace(before)
    assert steps < 100 * 50, "none walks past those that are younger"
    assert order(retention, 9000.0)[:101] == [[count + block] for block in range(100)] + [[0]]


def test_costs_within_a_class_differ_by_at_most_a_sixteenth():
    """32 exact classes, then 16 a doubling: chunks of one class lie within a sixteenth of each other."""
    classes = {}
    retention_rule = rule(chunk_blocks=2, block_size=16)
    for index in range(0, 1 << 16, 2):
        classes.setdefault(retention_rule.cost_class(index), []).append(index // 2)
    assert len(classes) <= 200
    for number, chunks in classes.items():
        assert chunks[-1] - chunks[0] <= chunks[0] / 16
        assert retention_rule.class_cost(number) == (chunks[0] + 1) * 32


def test_the_rule_follows_the_configuration_and_rounds_chunks_up_to_blocks():
    made = RetentionRule.of(EngineConfig(eviction="lru", chunk_size=40, block_size=16), float)
    assert (made.eviction, made.chunk_blocks, made.block_size) == (EVICTIONS["lru"], 3, 16)


def test_the_unmeasured_cost_doubles_at_the_balance_position():
    assert cost_by_position(0) == 1.0
    assert cost_by_position(1000, balance=1000) == 2.0


@pytest.mark.parametrize("seed", range(20))
def test_victims_match_a_brute_force_search(seed):
    choose = random.Random(seed)
    eviction = choose.choice(list(EVICTIONS))
    retention_rule = rule(eviction, cost=lambda position: 1.0 + position / 7)
    retention, held, now = Retention(retention_rule), {}, 0.0
    for block in range(600):
        now += choose.choice((0.0, 0.5, 3.0))
        if held and choose.random() < 0.3:
            gone = choose.choice(list(held))
            retention.remove([gone])
            del held[gone]
        last = now if choose.random() < 0.8 else now * choose.random()
        index = choose.choice((0, 1, 5, 31, 40, 41, 42, 43, 300))
        add(retention, block, index, last, block)
        held[block] = (retention_rule.class_cost(retention_rule.cost_class(index)), last)
        if choose.random() < 0.3:
            victims = retention.victims(now)
            for _ in range(choose.randint(1, 4)):
                values = {block: cost / max(now - last, MIN_AGE) for block, (cost, last) in held.items()}
                taken = victims.pop()
                assert (taken is None) == (not held)
                if taken is not None:
                    value, (victim,), _ = taken
                    assert value == values[victim] == min(values.values())
                    del held[victim]
    assert len(retention.blocks) == len(held) and set(retention.blocks) == set(held)


@pytest.mark.parametrize("seed", range(20))
def test_adding_and_removing_in_bulk_equals_one_by_one(seed):
    choose = random.Random(seed)
    retention_rule = rule(choose.choice(list(EVICTIONS)), chunk_blocks=choose.choice((1, 2, 3)))
    together, alone, held, now = Retention(retention_rule), Retention(retention_rule), [], 0.0
    for release in range(60):
        now += choose.choice((0.0, 0.5, 3.0))
        last = now if choose.random() < 0.8 else now * choose.random()
        blocks = [1000 * release + at for at in range(choose.randrange(120))]
        indices = [choose.randrange(5) + at for at in range(len(blocks))]
        together.add_all(blocks, indices, (last, release))
        for block, index in zip(blocks, indices, strict=True):
            add(alone, block, index, last, release)
        held += blocks
        gone = choose.sample(held, len(held) // 3)
        others = [-1, *choose.sample(gone, len(gone) // 4)]
        assert together.remove(gone) == [] and together.remove(others) == others
        for block in gone:
            alone.remove([block])
        held = [block for block in held if block in together.blocks]
        assert set(held) == set(together.blocks) == set(alone.blocks)
    assert order(together, now + 5.0) == order(alone, now + 5.0)


@pytest.mark.parametrize("seed", range(20))
def test_idle_blocks_are_reclaimed_in_the_order_of_their_last_use_whatever_happens_to_them(seed):
    choose = random.Random(seed)
    idle, retained, reclaimable, now = IdleBlocks(rule("lru")), {}, [], 0.0
    for block in range(400):
        now += 1.0
        here = [*retained, *reclaimable]
        if not here or choose.random() < 0.5:
            idle.retained.add_all((block,), (0,), (now, block))
            retained[block] = now
            continue
        chosen, act = choose.choice(here), choose.choice(("touch", "first", "move"))
        if act == "touch":
            idle.touch(chosen, (now, block))
            if chosen in retained:
                retained[chosen] = now
            else:
                reclaimable.remove(chosen)
                reclaimable.append(chosen)
        elif act == "first":
            idle.put_first(chosen, (-now, block))
            if chosen in retained:
                retained[chosen] = -now
            else:
                reclaimable.remove(chosen)
                reclaimable.insert(0, chosen)
        else:
            idle.move(chosen, 1000 + block)
            if chosen in retained:
                retained[1000 + block] = retained.pop(chosen)
            else:
                reclaimable.remove(chosen)
                reclaimable.append(1000 + block)
        assert (list(idle.reclaimable), set(idle.retained.blocks)) == (reclaimable, set(retained))
        if choose.random() < 0.25:
            count, batch = choose.randint(0, min(4, len(retained) + len(reclaimable))), choose.randint(1, 3)
            if count > len(reclaimable):
                evicted = sorted(retained, key=retained.__getitem__)[: max(count - len(reclaimable), batch)]
                reclaimable += evicted
                for each in evicted:
                    del retained[each]
            assert idle.reclaim(count, now, batch) == reclaimable[:count]
            del reclaimable[:count]


def test_only_retained_blocks_of_the_asked_range_are_listed_with_use_place_and_digest():
    index, retention = PrefixIndex(8), Retention(rule())
    for block, place in ((1, 4), (2, 5), (5, 6)):
        index.add(block, bytes([block]), place)
        add(retention, block, place, float(block), 7)
    add(retention, 3, 0, 1.0, 8)  # not cached any longer
    assert retention.among(0, 5, index) == [((1.0, 7), 4, b"\1"), ((2.0, 7), 5, b"\2")]
    assert retention.among(2, 6, index) == [((2.0, 7), 5, b"\2"), ((5.0, 7), 6, b"\5")]


def test_a_block_has_a_last_use_while_it_is_there_and_gives_it_back():
    retention = Retention(rule())
    conversation(retention, 0, 2, last=3.0, release=4)
    assert (retention.last_use(1), retention.last_use(9)) == ((3.0, 4), None)
    retention.renew(1, (5.0, 6))
    assert retention.take(1) == (5.0, 6) and retention.last_use(1) is None
    assert order(retention, 9.0) == [[0]]


@pytest.mark.parametrize("seed", range(5))
def test_many_late_blocks_that_come_and_go_stay_in_order(seed):
    choose, retention = random.Random(seed), Retention(rule("lru"))
    add(retention, 0, 0, 1e6, 0)
    held = {0: 1e6}
    for block in range(1, 600):
        held[block] = float(choose.randrange(1000))
        add(retention, block, 0, held[block], block)
        if choose.random() < 0.8 and len(held) > 20:
            gone = choose.choice([each for each in held if each])
            retention.remove([gone])
            del held[gone]
    assert order(retention, 2e6) == [[block] for block in sorted(held, key=lambda block: (held[block], block))]
