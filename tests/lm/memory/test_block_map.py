"""The block map: it reports where each conversation's blocks lie, a few at a time, and changes nothing."""

import random

import pytest

from holdfast.lm.memory import block_map
from holdfast.lm.memory.block_map import BY_AGE, BlockMap
from holdfast.lm.memory.block_pool import BlockPool
from holdfast.lm.memory.prices import Prices
from holdfast.lm.parts.tiers.lower_tiers import LowerTiers
from holdfast.lm.tiers import LowerShape
from tests.scheduling import answer, create_requests, create_scheduler


class Watched:
    """A scheduler whose block map meets each request that is planned, and the rows as last reported."""

    def __init__(self, **options):
        self.scheduler = create_scheduler(block_size=4, max_model_len=256, **options)
        self.pool = self.scheduler.queues.pool
        self.map = BlockMap(self.pool)
        self.rows = {}

    def step(self, now):
        plan = self.scheduler.schedule(now)
        if plan is None:
            return
        for segment in plan.segments:
            if segment.sequence_id in self.scheduler.entries:
                self.map.meet(segment.sequence_id, self.scheduler.entries[segment.sequence_id].cache)
        self.scheduler.update(plan, answer(plan), now)

    def run(self, name, prompt, now, max_tokens=1):
        """Run a request from start to end, alone. Returns its conversation afterwards."""
        (request,) = create_requests(prompt, max_tokens=max_tokens)
        self.scheduler.add(type(request)(name, request.prompt, request.params))
        while self.scheduler.has_work():
            self.step(now)
        self.look(now)
        return next(row for row in self.rows.values() if row.request == name)

    def look(self, now):
        for row in self.map.everything(self.scheduler.entries, now):
            if row.state == "gone":
                self.rows.pop(row.number)
            else:
                self.rows[row.number] = row
        return self.rows


def letters(row):
    return "".join(letter * count for letter, count in row.runs)


def test_a_request_that_continues_a_conversation_has_its_number():
    watched = Watched(blocks=32)
    first = watched.run("a", tuple(range(20)), 1.0)
    other = watched.run("b", tuple(range(500, 520)), 2.0)
    again = watched.run("c", (*range(20), 90, 91, 92, 93, 94), 3.0)
    assert (first.number, again.number) == (1, 1) and other.number == 2
    assert letters(again) == "dddddd" and again.state == "idle" and again.last == 3.0


def test_a_branch_is_a_conversation_of_its_own():
    watched = Watched(blocks=32)
    watched.run("a", tuple(range(20)), 1.0)
    branch = watched.run("b", (*range(12), *range(600, 612)), 2.0)
    assert branch.number == 2 and letters(branch) == "dddddd"


def test_chunks_are_seen_to_go_to_the_host_and_to_come_back():
    watched = Watched(blocks=8, host_blocks=32)
    assert letters(watched.run("a", tuple(range(20)), 0.0)) == "ddddd"
    watched.run("b", tuple(range(1000, 1030)), 50.0)
    watched.run("c", tuple(range(2000, 2030)), 60.0)
    assert letters(watched.rows[1]) == "hhhhh"
    assert watched.rows[1].cost > 0
    back = watched.run("d", (*range(20), 99, 98), 70.0)
    assert back.number == 1 and letters(back) == "bbbbb"


def test_a_dropped_front_is_seen():
    watched = Watched(blocks=8)
    watched.run("a", tuple(range(20)), 0.0)
    watched.run("b", tuple(range(1000, 1020)), 50.0)
    assert letters(watched.rows[1]) == "--ddd"


def test_a_running_request_shows_what_is_still_to_be_computed():
    watched = Watched(blocks=32, budget=8)
    (request,) = create_requests(tuple(range(32)), max_tokens=2)
    watched.scheduler.add(request)
    watched.step(0.0)
    (row,) = watched.look(0.0).values()
    assert (row.state, letters(row)) == ("running", "uu-----u")


def test_blocks_that_were_idle_before_are_grouped_by_their_last_use():
    watched = Watched(blocks=32, host_blocks=32)
    watched.run("a", tuple(range(20)), 1.0)
    watched.run("b", tuple(range(500, 512)), 2.0)
    watched.map, watched.rows = BlockMap(watched.pool), {}
    rows = watched.look(5.0)
    assert [(row.request, row.state, row.last, letters(row)) for row in rows.values()] == [
        ("", "idle", 1.0, "ddddd"),
        ("", "idle", 2.0, "ddd"),
    ]
    again = watched.run("c", (*range(20), 7, 7, 7, 7, 7), 6.0)
    assert again.number == 1, "its tail is known"


def test_a_conversation_without_blocks_is_reported_for_a_while_and_then_forgotten():
    watched = Watched(blocks=8)
    watched.run("a", tuple(range(20)), 0.0)
    watched.run("b", tuple(range(1000, 1030)), 50.0)
    assert letters(watched.rows[1]) == "-----"
    watched.look(50.0 + block_map.KEPT_SECONDS)
    assert 1 in watched.rows
    watched.look(51.0 + block_map.KEPT_SECONDS)
    assert 1 not in watched.rows


def test_the_longest_idle_are_forgotten_beyond_the_limit(monkeypatch):
    monkeypatch.setattr(block_map, "MOST_CONVERSATIONS", 3)
    watched = Watched(blocks=64)
    for number in range(6):
        watched.run(str(number), tuple(range(100 * number, 100 * number + 8)), float(number))
    watched.look(9.0)
    assert sorted(watched.rows) == [4, 5, 6]


def test_one_call_looks_at_no_more_blocks_than_it_is_given(monkeypatch):
    watched = Watched(blocks=64)
    watched.run("a", tuple(range(100)), 0.0)
    seen, tiers = [], watched.pool.tiers
    monkeypatch.setattr(watched.pool, "tiers", lambda digests: seen.append(len(digests)) or tiers(digests))
    told = []
    for _ in range(12):
        before = sum(seen)
        told += watched.map.advance({}, 1.0, 8)
        assert sum(seen) - before <= 8
    assert sum(seen) >= 25 and told == [], "and nothing has changed since"


def open_talks(watched):
    """The conversations whose last request has not ended."""
    return {name.partition("/")[0] for name in watched.scheduler.entries}


def test_in_random_histories_each_block_of_the_device_is_reported_where_it_is():
    draw = random.Random(5)
    watched = Watched(blocks=24, host_blocks=16, max_sequences=4)
    watched.look(0.0)
    histories, now = {}, 0.0
    for turn in range(120):
        now += draw.choice((0.5, 20.0))
        talk = draw.choice([each for each in range(8) if f"{each}" not in open_talks(watched)])
        history = histories.get(talk, ()) + tuple(
            10_000 * (talk + 1) + 100 * turn + at for at in range(draw.randint(2, 14))
        )
        if len(history) > 60:
            history = history[-8:]
        histories[talk] = history
        (request,) = create_requests(history, max_tokens=1)
        watched.scheduler.add(type(request)(f"{talk}/{turn}", history, request.params))
        for _ in range(draw.randint(1 if len(open_talks(watched)) < 4 else 9, 9)):
            watched.step(now)
        rows = watched.look(now).values()
        placed = "".join(letters(row) for row in rows)
        on_device = sum(placed.count(letter) for letter in "uidob")
        assert on_device == watched.pool.used + watched.pool.cached
        idle = sum(placed.count(letter) for letter in "dob")
        assert idle == watched.pool.cached
        assert placed.count("h") + placed.count("b") <= watched.pool.host.cached


def stored(*groups):
    """A disk that holds these conversations: each the time of its last use and its digests by place."""
    shape = LowerShape(1 << 22, 32)
    pool = BlockPool(8, 4, host_blocks=8)
    lower = LowerTiers(pool, shape, Prices(None, block_size=4, block_bytes=1 << 22), 0.0)
    slot = 0
    for last, digests in groups:
        for place, digest in digests.items():
            lower.disk.take([slot])
            lower.disk.cache_block(slot, digest, place, (last, slot))
            slot += 1
    return pool, lower


def digests(*numbers):
    return {place: bytes([number]) * 32 for place, number in enumerate(numbers)}


def test_conversations_that_only_the_disk_has_are_found_by_the_time_of_their_last_use():
    late = digests(9, 8, 7, 6)
    del late[1]
    blocks = BlockMap(*stored((1.0, digests(1, 2, 3)), (2.0, late), (1.0, digests(4, 5))))
    rows = {row.number: row for row in blocks.everything({}, 5.0)}
    assert sorted((row.last, letters(row)) for row in rows.values()) == [(1.0, "kk"), (1.0, "kkk"), (2.0, "k?kk")]
    assert all(row.state == "idle" and row.cost > 0 for row in rows.values())


def test_a_block_is_reported_in_the_fastest_tier_that_has_it():
    pool, lower = stored((1.0, digests(1, 2, 3)))
    blocks = BlockMap(pool, lower)
    blocks.everything({}, 5.0)
    host, _ = pool.host.reserve(1e9, pool.host.victims(5.0))
    pool.host.cache_block(host, digests(1)[0], 0, (5.0, 1))
    lower.fetch({1: digests(1, 2)[1]}, 6.0)
    (row,) = blocks.everything({}, 6.0)
    assert letters(row) == "hfk"


def test_the_front_that_only_the_disk_has_belongs_to_the_conversation_whose_rest_is_on_the_host():
    whole = digests(1, 2, 3, 4)
    pool, lower = stored((1.0, {0: whole[0], 1: whole[1]}), (1.0, digests(9)))
    for place in (2, 3):
        host, _ = pool.host.reserve(1e9, pool.host.victims(1.0))
        pool.host.cache_block(host, whole[place], place, (1.0, 7))
    rows = BlockMap(pool, lower).everything({}, 5.0)
    assert sorted(map(letters, rows)) == ["k", "kkhh"]


def test_a_large_disk_is_searched_during_the_rounds_of_known_conversations():
    groups = [(float(number), digests(*range(4 * number, 4 * number + 4))) for number in range(8)]
    blocks = BlockMap(*stored(*groups))
    looks = [len(blocks.advance({}, 9.0, 8)) for _ in range(80)]
    assert sum(looks) == 8 and max(looks) <= 2 and not looks[0]


def test_blocks_of_the_disk_that_a_known_conversation_has_are_no_conversation_of_their_own():
    whole = digests(1, 2, 3)
    pool, lower = stored((1.0, whole), (4.0, digests(5, 6)))
    for place, contents in whole.items():
        host, _ = pool.host.reserve(1e9, pool.host.victims(1.0))
        pool.host.cache_block(host, contents, place, (3.0, 7))
    rows = BlockMap(pool, lower).everything({}, 5.0)
    assert sorted((row.last, letters(row)) for row in rows) == [(3.0, "hhh"), (4.0, "kk")]


def test_what_the_disk_has_behind_the_end_of_a_conversation_is_another_one():
    pool, lower = stored((1.0, digests(1, 2, 3, 4)))
    late = digests(8, 9)
    host, _ = pool.host.reserve(1e9, pool.host.victims(1.0))
    pool.host.cache_block(host, late[1], 1, (1.0, 7))  # of the same time, its first block unknown
    rows = BlockMap(pool, lower).everything({}, 5.0)
    assert sorted(map(letters, rows)) == ["?h", "kkkk"]


def test_a_request_met_twice_counts_once_and_one_beside_an_open_one_is_a_branch():
    watched = Watched(blocks=32, budget=64)
    first, second = create_requests(tuple(range(20)), tuple(range(20)), max_tokens=9)
    for request in (first, second):
        watched.scheduler.add(request)
    for _ in range(3):
        watched.step(1.0)
    rows = watched.look(1.0)
    assert sorted((row.number, row.request, row.state) for row in rows.values()) == [
        (1, "0", "running"),
        (2, "1", "running"),
    ]
    while watched.scheduler.has_work():
        watched.step(2.0)
    assert [row.state for row in watched.look(3.0).values()] == ["idle", "idle"]


def test_a_request_that_waits_again_after_a_preemption_is_told_as_waiting():
    watched = Watched(blocks=32)
    (request,) = create_requests(20, max_tokens=8)
    watched.scheduler.add(request)
    watched.step(1.0)
    watched.scheduler.queues.preempt(watched.scheduler.entries["0"], 1.0)
    (row,) = watched.look(2.0).values()
    assert (row.state, letters(row), row.cost) == ("waiting", "ddddd", 0.0)


def test_the_costs_of_places_are_those_of_the_rule():
    watched = Watched(blocks=6)
    assert watched.map.costs() == [(place, 4.0 * (place + 1)) for place in (0, 1, 2, 4)]


def test_the_id_of_an_earlier_request_of_a_conversation_may_come_again():
    watched = Watched(blocks=64)
    watched.run("a", tuple(range(20)), 1.0)
    assert watched.run("b", (*range(20), 90, 91, 92, 93, 94), 2.0).number == 1
    other = watched.run("a", tuple(range(500, 520)), 3.0)
    assert (other.number, letters(other)) == (2, "ddddd")
    assert sorted((row.number, row.request) for row in watched.rows.values()) == [(1, "b"), (2, "a")]


@pytest.mark.parametrize("eviction", ["pauses", "retention"])
def test_an_idle_conversation_has_the_worth_of_the_eviction_in_force(eviction):
    watched = Watched(blocks=32, eviction=eviction)
    watched.run("a", tuple(range(20)), 1.0)
    (early,) = watched.look(1.5).values()
    (late,) = watched.look(500.0).values()
    if eviction == "retention":
        assert early.worth == late.worth == BY_AGE
    else:
        assert early.worth > 10 * late.worth > 0.0, "the row is reported again when its worth has changed"
