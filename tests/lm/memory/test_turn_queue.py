"""TurnQueue: the lowest value first, whatever comes and goes, against a search through everything."""

import random
from math import inf

import pytest

from holdfast.core.pause import Pause
from holdfast.lm.memory import turn_queue
from holdfast.lm.memory.gaps import BINS, EDGES
from holdfast.lm.memory.prefix_index import PrefixIndex
from holdfast.lm.memory.retention import EVICTIONS, IdleBlocks, RetentionRule
from holdfast.lm.memory.turn_queue import TurnQueue, make_turns
from holdfast.lm.memory.turns import Departure, Forecast, Start


def rule(eviction="pauses", cost=lambda position: 1.0, chunk_blocks=1):
    turns = make_turns(eviction)
    return RetentionRule(EVICTIONS[eviction], cost=cost, chunk_blocks=chunk_blocks, block_size=1, turns=turns)


class World:
    """Conversations that end, and the blocks that they leave in a tier."""

    def __init__(self, capacity=100, **options):
        self.rule = rule(**options)
        self.turns = self.rule.turns
        self.queue = self.rule.order(capacity)
        self.calls = 0

    def leave(self, name, blocks, now, kind="", tenant="", hits=0, common=0, first=0, **pause):
        """The sequence of conversation `name` ends; its blocks are the chunks from `first` on."""
        self.calls += 2
        departure = Departure(f"request {name}", tenant, Pause(kind, **pause))
        self.turns.left([name.encode()], departure, Start(hits, common), self.calls - 1, now)
        indices = range(first, first + len(blocks))
        self.queue.add_all(blocks, indices, (now, self.calls - 1))

    def resume(self, name, now):
        return self.turns.begin([b"before", name.encode()], 0, now)

    def teach(self, kind, gap, count=100, now=0.0, tenant="", **pause):
        for number in range(count):
            self.leave(f"{kind} {number}", [], now, kind, tenant, **pause)
            if gap < inf:
                self.resume(f"{kind} {number}", now + gap)

    def order(self, now):
        victims, blocks = self.queue.victims(now), []
        while (chunk := victims.pop()) is not None:
            blocks += chunk.blocks
        return blocks


def test_the_state_of_a_call_that_soon_ends_outlasts_that_of_a_person():
    world = World()
    world.teach("tool:search", 2.0)
    world.teach("person", 300.0)
    world.leave("by a person", [1], 1000.0, "person")
    world.leave("by a tool", [2], 999.0, "tool:search")
    assert world.order(1000.5) == [1, 2]


def test_a_call_that_is_overdue_is_worth_less_than_a_person_who_thinks():
    world = World()
    world.teach("tool:search", 2.0)
    world.teach("person", 300.0)
    world.leave("by a person", [1], 1000.0, "person")
    world.leave("by a tool", [2], 999.0, "tool:search")
    world.queue.victims(1000.5)
    assert world.order(1200.0) == [2, 1]


def test_within_a_turn_the_cheapest_chunk_goes_first_and_costs_compare_between_turns():
    world = World(cost=float)
    world.leave("one", [10, 11, 12], 0.0)
    world.leave("other", [20, 21, 22, 23], 0.0)
    assert world.order(5.0) == [10, 20, 11, 21, 12, 22, 23]


def test_superseded_state_goes_first_and_what_it_shares_stays():
    world = World()
    world.leave("kept", [1], 0.0, "person")
    world.leave("branch", [2, 3], 100.0, "branch", superseded=True)
    assert world.order(100.0) == [2, 3, 1]


def test_a_note_after_the_end_changes_the_value_at_once():
    world = World()
    world.leave("one", [1], 99.0)
    world.leave("other", [2], 100.0)
    assert world.turns.note("request other", Pause(superseded=True), 100.5)
    assert not world.turns.note("request other", Pause("person"), 100.6), "superseded state is forgotten"
    assert not world.turns.note("request unknown", Pause("person"), 100.6)
    assert world.order(101.0) == [2, 1]


def test_a_note_of_another_kind_moves_the_gap_to_that_kind():
    world = World()
    world.teach("tool:slow", 1000.0)
    world.teach("tool:fast", 1.0)
    world.leave("one", [1], 2000.0, "tool:slow")
    world.leave("other", [2], 2000.0, "tool:slow")
    world.turns.note("request other", Pause("tool:fast"), 2000.1)
    assert world.order(2000.2) == [1, 2]
    before = world.turns.kinds.find("", "tool:slow").gaps.rates.chances
    world.resume("other", 2001.0)
    assert world.turns.kinds.find("", "tool:slow").gaps.rates.chances == pytest.approx(before, abs=0.01)


def test_a_true_hint_decides_when_state_is_kept():
    world = World()
    world.leave("soon", [1], 0.0, expected=12.0)
    world.leave("later", [2], 0.0, expected=500.0)
    assert world.order(10.0) == [2, 1]
    world = World()
    world.leave("was due", [1], 0.0, expected=12.0)
    world.leave("due", [2], 0.0, expected=500.0)
    assert world.order(450.0) == [1, 2]


def test_wrong_hints_stop_counting():
    world, draw = World(), random.Random(1)
    for number in range(60):
        world.leave(f"{number}", [], 0.0, "tool:x", expected=10 ** draw.uniform(-1, 3))
        world.resume(f"{number}", 20.0)
    world.leave("claims", [1], 1000.0, "tool:x", expected=1.0)
    world.leave("silent", [2], 1000.0, "tool:x")
    forecasts = [world.turns.forecast(world.turns.turn(1000.0, world.calls - back)) for back in (3, 1)]
    assert forecasts[0] == forecasts[1]


def test_state_that_a_client_wants_kept_goes_last_until_that_time():
    world = World()
    world.leave("kept", [1], 0.0, keep_until=50.0)
    world.leave("other", [2], 40.0)
    assert world.order(49.0) == [2, 1]
    world.leave("kept", [1], 0.0, keep_until=50.0)
    world.leave("other", [2], 40.0)
    assert world.order(51.0) == [1, 2]


def test_a_tenant_keeps_no_more_than_its_share_of_the_tier():
    world = World(capacity=20)
    world.leave("honest", [100, 101], 0.0, tenant="honest")
    for number in range(6):
        world.leave(f"{number}", [2 * number, 2 * number + 1], 1.0, tenant="liar", keep_until=1000.0 + number)
    order = world.order(5.0)
    kept = order[-10:]
    assert len(kept) == 20 // 2 and set(kept) == {*range(10)}, "what is to be kept for longest is released first"
    assert {100, 101} < set(order[:4])


def test_a_value_of_state_to_keep_is_never_below_another_value():
    world = World()
    world.leave("kept", [1], 0.0, keep_until=50.0)
    assert world.queue.victims(1.0).pop(below=1e12) is None
    assert world.queue.victims(1.0).pop(below=inf).blocks == [1]


def test_blocks_given_up_first_go_before_superseded_ones():
    world = World()
    world.leave("old", [1], 10.0, superseded=True)
    world.leave("given away", [2], 20.0)
    world.queue.renew(2, (-inf, 99))
    assert world.order(30.0) == [2, 1]


def test_of_ttl_a_tool_call_is_kept_for_its_learned_time_and_all_else_is_lru():
    world = World(eviction="ttl")
    world.teach("tool:search", 10.0)
    world.leave("tool", [1], 100.0, "tool:search")
    world.leave("person", [2], 104.0, "person")
    world.leave("newer", [3], 105.0, "person")
    assert world.order(106.0) == [2, 3, 1]
    world.leave("tool", [1], 100.0, "tool:search")
    world.leave("person", [2], 104.0, "person")
    assert world.order(130.0) == [1, 2]


def test_of_hits_the_conversation_with_fewest_turns_goes_first():
    world = World(eviction="hits")
    world.leave("long", [1], 0.0, hits=7)
    world.leave("short", [2], 5.0, hits=1)
    world.leave("older", [3], 1.0, hits=1)
    assert world.order(10.0) == [3, 2, 1]


def test_gaps_are_learned_from_state_that_was_evicted_long_before():
    world = World()
    world.leave("one", [1], 0.0, "tool:x")
    world.order(1.0)
    world.resume("one", 7.0)
    assert world.turns.kinds.find("", "tool:x").gaps.rates.needed_within(5.0, 5.0) > 0.7


def test_a_conversation_counts_its_turns_and_a_branch_starts_where_the_trunk_ended():
    world = World()
    world.leave("trunk", [1], 0.0, "branch", hits=2)
    first, second = world.resume("trunk", 1.0), world.resume("trunk", 2.0)
    assert first == Start(3, 0, 2, b"trunk", 2, "branch") and second == Start(4, 0, 2, b"trunk", 2, "branch")
    world.leave("chat", [2], 0.0, "person", hits=2)
    assert world.resume("chat", 3.0) == Start(3, 0, 0, b"chat", 2, "person")
    assert world.resume("chat", 3.0) == Start(3, 0, 0, b"chat", 2, "person"), "another answer to the same turn"


@pytest.mark.always("pauses-0", "ttl-1", "hits-2")
@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("eviction", ["pauses", "ttl", "hits"])
def test_victims_come_by_value_over_long_histories(eviction, seed):
    """Against a search through all blocks. A group may lag by a tick, so the queue looks twice."""
    draw = random.Random(seed)
    world = World(capacity=400, eviction=eviction, cost=lambda position: 1.0 + position)
    cost = world.rule.class_cost if eviction == "pauses" else lambda number: 1.0
    here, now, fresh = {}, 0.0, iter(range(10_000))
    for step in range(400):
        now += 10 ** draw.uniform(-2, 1.5)
        act = draw.random()
        if act < 0.55:
            kind = draw.choice(("person", "tool:a", "tool:b", ""))
            blocks = [next(fresh) for _ in range(draw.randrange(1, 6))]
            hint = 10 ** draw.uniform(-1, 2) if draw.random() < 0.3 else None
            name = f"{step}" if hint is None else f"hinted {step}"  # these never come back: no trust changes
            world.leave(name, blocks, now, kind, hits=draw.randrange(4), expected=hint)
            here |= {block: ((now, world.calls - 1), chunk) for chunk, block in enumerate(blocks)}
        elif act < 0.7 and here:
            world.resume(f"{draw.randrange(step)}", now)
        elif act < 0.8 and here:
            gone = draw.sample(sorted(here), min(3, len(here)))
            assert world.queue.remove([*gone, 99_999]) == [99_999]
            for block in gone:
                del here[block]
        elif here:
            world.queue.victims(now)
            now += 0.02
            victims = world.queue.victims(now)
            for _ in range(3):
                chunk = victims.pop()
                if chunk is None:
                    break
                worths = {
                    block: cost(chunk_of) * world.turns.worth(*use, now) for block, (use, chunk_of) in here.items()
                }
                (victim,) = chunk.blocks
                assert chunk.value == pytest.approx(worths[victim], rel=1e-9)
                assert chunk.value <= min(worths.values()) * (1 + 1e-9)
                assert chunk.use == here.pop(victim)[0]
        assert set(world.queue.blocks) == set(here)
    assert {world.queue.last_use(block) for block in here} == {use for use, _ in here.values()}


def test_blocks_are_found_moved_and_taken_with_their_uses():
    world = World(chunk_blocks=2)
    world.leave("one", [0, 1, 2], 3.0)
    index = PrefixIndex(10)
    for block in range(3):
        index.add(block, bytes([block]), block)
    assert world.queue.among(0, 10, index) == [((3.0, 1), block, bytes([block])) for block in range(3)]
    world.queue.move(1, 7)
    assert world.queue.last_use(1) is None and world.queue.last_use(7) == (3.0, 1)
    assert world.queue.take(2) == (3.0, 1)
    assert world.queue.victims(5.0).pop().blocks == [0, 7]
    assert not world.queue.blocks


def test_an_idle_tier_holds_nothing_but_its_blocks():
    """No list grows with the conversations that have come and gone."""
    world = World()
    for number in range(3000):
        world.leave(f"{number}", [number], float(number), keep_until=1e6)
        world.queue.victims(number + 0.5)
        world.queue.remove([number])
    queue = world.queue
    assert isinstance(queue, TurnQueue) and not queue._groups and not queue._places and not queue._tenants
    assert len(queue._due) < 100
    queue.victims(3001.0)
    assert not queue._kept and not queue._buckets


def test_moving_a_group_through_all_ages_takes_few_steps_however_many_blocks_it_has():
    world = World(capacity=10_000)
    world.leave("large", [*range(5000)], 0.0)
    placed = []
    place = world.queue._place
    world.queue._place = lambda group, now: placed.append(now) or place(group, now)
    for edge in EDGES[1:40]:
        world.queue.victims(edge * 1.01)
    assert len(placed) <= 40


class Drawn:
    """Worths that a test draws."""

    def __init__(self, draw):
        self.worths = self.fresh(draw)

    @staticmethod
    def fresh(draw):
        level, steep = 10 ** draw.uniform(-3, 0), draw.uniform(-0.2, 0.2)
        return tuple(level * 2 ** (steep * number + draw.uniform(-2, 2)) for number in range(BINS))

    def drift(self, draw, most):
        self.worths = tuple(worth * most ** draw.uniform(-1, 1) for worth in self.worths)


class Drawing:
    """A world in which the kind of a pause is the number of its worths."""

    def __init__(self, draw, monkeypatch, capacity=1000, sources=4):
        self.sources = [Drawn(draw) for _ in range(sources)]
        self.scales = [10 ** draw.uniform(-1, 1) for _ in range(sources)]
        self.world = World(capacity=capacity, cost=lambda position: 1.0 + position % 7)
        monkeypatch.setattr(self.world.turns, "_appraise", self.appraise)
        monkeypatch.setattr(turn_queue, "TICK", 0.0)

    def appraise(self, turn):
        number = int(turn.pause.kind)
        return Forecast(self.sources[number], self.scales[number])

    def value(self, use, chunk, now):
        return self.world.rule.class_cost(chunk) * self.world.turns.worth(*use, now)


@pytest.mark.always("[0-2]")
@pytest.mark.parametrize("seed", range(8))
def test_parked_groups_never_change_the_order(seed, monkeypatch):
    """Against a search through all chunks, while worths drift, jump, and more or less has to be given up."""
    draw = random.Random(seed)
    drawing = Drawing(draw, monkeypatch)
    world, here, now, fresh, parked = drawing.world, {}, 0.0, iter(range(100_000)), 0
    for step in range(300):
        now += 10 ** draw.uniform(-2, 1)
        for number in range(draw.randrange(6)):
            blocks = [next(fresh) for _ in range(draw.randrange(1, 6))]
            world.leave(f"{step} {number}", blocks, now, str(draw.randrange(4)))
            here |= {block: ((now, world.calls - 1), chunk) for chunk, block in enumerate(blocks)}
        if draw.random() < 0.3:
            draw.choice(drawing.sources).drift(draw, draw.choice((1.05, 3.0)))
        victims = world.queue.victims(now)
        for _ in range(draw.choice((0, 1, 4, 4, 30))):
            chunk = victims.pop()
            if chunk is None:
                assert not here
                break
            (victim,) = chunk.blocks
            assert chunk.value == pytest.approx(drawing.value(*here[victim], now), rel=1e-9)
            assert chunk.value <= min(drawing.value(*each, now) for each in here.values()) * (1 + 1e-9)
            del here[victim]
        parked += sum(len(each.entries) for each in world.queue._parked.values())
    assert parked > 1000, "the history has to test them"


def test_groups_far_above_what_is_given_up_are_not_looked_at(monkeypatch):
    drawing = Drawing(random.Random(0), monkeypatch, sources=2)
    world, low, high = drawing.world, *drawing.sources
    low.worths, high.worths = (1.0,) * BINS, (1000.0,) * BINS
    for number in range(500):
        world.leave(f"high {number}", [number], 0.0, "1")
    for number in range(500, 1000):
        world.leave(f"low {number}", [number], 0.0, "0")
    world.queue.victims(0.5).pop()
    looked_at, place = [], world.queue._place
    monkeypatch.setattr(world.queue, "_place", lambda group, now: looked_at.append(group) or place(group, now))
    for edge in EDGES[30:60]:
        assert world.queue.victims(edge).pop().blocks[0] >= 500
    assert all(block >= 500 for group in looked_at for block in group.blocks)


def test_a_kind_whose_hints_are_no_longer_believed_is_looked_at_again():
    world = World()
    for number in range(100):
        world.leave(f"other {number}", [1000 + number], 0.0)
    world.leave("one", [1], 1000.0, "tool:x", expected=2.0)
    world.queue.victims(1000.5).pop()
    group = world.queue.blocks[1]
    assert world.turns.forecast(group.turn).source is group.turn.kind.ratios
    before, _ = world.queue._places[group.use]
    assert before in world.queue._parked.values()
    for _ in range(20):
        group.turn.kind.judge(500.0, 2.0)
    assert not group.turn.kind.believes_hints
    world.queue.victims(1000.6)
    place, _ = world.queue._places[group.use]
    assert place is not before and group.use in place.entries and group.use not in before.entries


def test_idle_blocks_of_the_device_follow_the_order():
    made = rule()
    idle = IdleBlocks(made, 10)
    made.turns.left([b"a"], Departure("a", "", Pause(superseded=True)), Start(), 1, 0.0)
    idle.retained.add_all((1,), (0,), (0.0, 1))
    made.turns.left([b"b"], Departure("b"), Start(), 2, 0.0)
    idle.retained.add_all((2,), (0,), (0.0, 2))
    assert idle.reclaim(1, 5.0, 1) == [1]
