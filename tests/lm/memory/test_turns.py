"""Turns: what sequences leave, what they continue, and what notes say of them later; on the pools of an engine."""

import random

import pytest

from holdfast.core.pause import Pause
from holdfast.lm.memory import turns as module
from holdfast.lm.memory.block_pool import BlockPool
from holdfast.lm.memory.kept_rows import KeptRows
from holdfast.lm.memory.retention import EVICTIONS, RetentionRule
from holdfast.lm.memory.sequence_cache import SequenceCache
from holdfast.lm.memory.turn_queue import make_turns
from holdfast.lm.memory.turns import NEW, Departure, Start, TurnTracker
from holdfast.lm.types import TierCopied

ROOT = bytes(32)


class Engine:
    """A pool of blocks of one token, and sequences that begin and end."""

    def __init__(self, blocks=64, host=0, eviction="pauses"):
        self.turns = make_turns(eviction)
        self.rule = RetentionRule(
            EVICTIONS[eviction], cost=lambda position: 1.0, chunk_blocks=1, block_size=1, turns=self.turns
        )
        self.pool = BlockPool(blocks, 1, rule=self.rule, host_blocks=host, low_water=0.0)
        self.step = 0

    def start(self, tokens, now):
        cache = SequenceCache(self.pool, ROOT)
        cache.allocate(cache.match(tokens), len(tokens), now)
        for start, stop in cache.missing(len(tokens)):
            cache.plan(start, stop)
        cache.cache_blocks(tokens)
        return cache

    def run(self, tokens, now, end=None, request="", tenant="", prompt=0, **pause):
        """A sequence from its start to its end. Its last token is cached as well."""
        cache = self.start(tokens, now)
        cache.end(tokens, now if end is None else end, Departure(request, tenant, Pause(**pause), prompt))

    def evicted(self, count, now):
        """The tokens of the next blocks to be evicted, in order."""
        names = {cached: digest for digest, cached in self.pool._cached.items()}
        victims = self.pool._idle.retained.victims(now)
        chunks = [victims.pop() for _ in range(count)]
        return [names[block] for chunk in chunks for block in chunk.blocks]

    def digests(self, tokens):
        cache = SequenceCache(self.pool, ROOT)
        return list(cache.usable_digests([*tokens, 0]))


def test_the_next_turn_ends_the_gap_of_the_turn_that_it_continues():
    engine = Engine()
    engine.run([1, 2, 3], 0.0, kind="tool:x")
    assert len(engine.turns) == 1
    engine.run([1, 2, 3, 4, 5], 7.0, kind="person")
    assert len(engine.turns) == 1, "the longer turn has taken its place"
    assert engine.turns.kinds.find("", "tool:x").gaps.rates.needed_within(4.0, 8.0) > 0.7


def test_a_waiting_sequence_ends_the_gap_when_it_arrives():
    engine = Engine()
    engine.run([1, 2, 3], 0.0, kind="tool:x")
    waiting = SequenceCache(engine.pool, ROOT)
    waiting.touch([1, 2, 3, 4], 2.0)
    assert len(engine.turns) == 0
    waiting.allocate(waiting.match([1, 2, 3, 4]), 4, 500.0)
    assert engine.turns.kinds.find("", "tool:x").gaps.rates.needed_within(1.5, 1.0) > 0.5


def test_the_answer_that_is_given_anew_leaves_what_came_before_it():
    engine = Engine()
    engine.run([1, 2, 3], 0.0, kind="person")
    engine.run([1, 2, 3, 4, 5], 10.0, superseded=True)
    assert engine.evicted(2, 11.0) == engine.digests([1, 2, 3, 4, 5])[3:]
    assert len(engine.turns) == 1, "the turn before is open again, so the other answer will continue it"
    assert engine.start([1, 2, 3, 6], 12.0)._start == Start(2, 0, 0, engine.digests([1, 2, 3])[-1], 3, "person")


def test_a_finished_branch_takes_its_turns_with_it_and_leaves_the_trunk():
    engine = Engine()
    engine.run([1, 2, 3], 0.0, kind="branch")
    engine.run([1, 2, 3, 4], 1.0, kind="tool:x")
    engine.run([1, 2, 3, 4, 5], 3.0, kind="branch", superseded=True)
    assert engine.evicted(2, 4.0) == engine.digests([1, 2, 3, 4, 5])[3:]
    assert engine.start([1, 2, 3, 7], 12.0)._start.kind == "branch"


def test_what_other_conversations_share_is_not_superseded_with_one_of_them():
    engine = Engine()
    engine.run([1, 2, 8], 0.0, kind="person")
    engine.run([1, 2, 9, 9], 5.0, superseded=True)
    assert engine.evicted(2, 6.0) == engine.digests([1, 2, 9, 9])[2:]


def test_a_note_supersedes_only_what_came_since_the_turn_before():
    engine = Engine(host=8)
    engine.run([1, 2, 3], 0.0, kind="person")
    engine.run([1, 2, 3, 4, 5], 10.0, request="old", kind="person")
    assert engine.turns.note("old", Pause("person", superseded=True), 11.0)
    kinds = {engine.turns.turn(*use).pause for use in engine.pool._idle.retained._groups}
    assert kinds == {Pause("person"), Pause("person", superseded=True)}
    assert engine.evicted(2, 11.0) == engine.digests([1, 2, 3, 4, 5])[3:]
    assert engine.evicted(3, 11.0) == engine.digests([1, 2, 3])


def test_a_note_that_comes_after_the_other_answer_has_begun_supersedes_the_first_one():
    engine = Engine()
    engine.run([1, 2, 3], 0.0, kind="person")
    engine.run([1, 2, 3, 4, 5, 6], 10.0, request="old", kind="person", prompt=4)
    other = engine.start([1, 2, 3, 4, 7], 20.0)
    assert other._start.length == 4, "it continues the turn as far as the prompt goes"
    assert engine.turns.note("old", Pause("person", superseded=True), 21.0)
    engine.run([9], 0.5, kind="person")
    assert engine.evicted(2, 22.0) == engine.digests([1, 2, 3, 4, 5, 6])[4:]
    assert not engine.turns.note("old", Pause("person"), 23.0)


def test_a_turn_whose_answer_comes_back_in_other_tokens_is_continued_all_the_same():
    engine = Engine()
    engine.run([1, 2, 3, 4], 0.0, kind="tool:x", prompt=2)
    assert engine.start([1, 2, 8, 9], 7.0)._start.length == 2
    assert len(engine.turns) == 0
    assert engine.turns.kinds.find("", "tool:x").gaps.rates.needed_within(4.0, 8.0) > 0.7


def test_short_prompts_after_one_system_prompt_do_not_continue_each_other():
    engine = Engine()
    for number in range(10):
        engine.run([1, 2, 30 + number], float(number), kind="person", prompt=2)
    assert len(engine.turns) == 9, "only the first was taken for a turn of the second"


def test_a_note_reaches_the_copies_on_the_host():
    engine = Engine(blocks=4, host=8)
    engine.run([1, 2], 0.0, request="a", kind="person")
    engine.run([3, 4], 5.0, request="b", kind="person")
    for step in range(4):
        engine.pool.fits(4, ())
        engine.pool.swap_out(step, 0, 6.0)
        engine.pool.copied(TierCopied(swapped_out=step))
    assert engine.pool.swapped_out == 4
    engine.turns.note("b", Pause(superseded=True), 7.0)
    victims, host = engine.pool.host.victims(8.0), engine.pool.host
    gone = [victims.pop().blocks[0] for _ in range(2)]
    assert gone == host.find_all(engine.digests([3, 4]))


def test_a_suspended_sequence_goes_on_as_the_one_that_it_was():
    engine = Engine()
    engine.run([1, 2], 0.0, kind="person")
    cache = engine.start([1, 2, 3], 5.0)
    before = cache._start
    cache.suspend([1, 2, 3], 6.0)
    cache.allocate(cache.match([1, 2, 3, 4]), 4, 7.0)
    assert cache._start == before and before.digest


def test_state_of_the_same_digest_replaces_the_open_turn():
    engine = Engine()
    first, second = engine.start([1, 2], 0.0), engine.start([1, 2], 0.0)
    for number, cache in enumerate((first, second)):
        cache.end([1, 2], 1.0 + number, Departure(f"{number}", "", Pause("person")))
    assert len(engine.turns) == 1
    assert not engine.turns.note("0", Pause("person"), 3.0) and engine.turns.note("1", Pause("person"), 3.0)
    gaps = engine.turns.kinds.find("", "person").gaps
    assert sum(gaps._open) + sum(gaps._ended) == pytest.approx(gaps._weight(2.0))


def test_open_turns_are_bounded_and_the_oldest_is_forgotten(monkeypatch):
    monkeypatch.setattr(module, "MOST_OPEN", 10)
    tracker = TurnTracker()
    for number in range(100):
        digests = [b"prompt %d" % number, b"%d" % number]
        tracker.left(digests, Departure(f"{number}"), NEW, 2 * number, float(number), prompt=1)
    assert {len(tracker), len(tracker._calls), len(tracker._requests), len(tracker._prompts)} == {10}
    assert len(tracker._prompt_ends) == 10
    assert tracker.note("95", Pause("person"), 101.0) and not tracker.note("5", Pause("person"), 101.0)
    assert len(tracker._due) <= 2 * 10 + 65


def test_the_time_at_which_a_gap_is_looked_at_again_is_always_later():
    """A clock that has run for weeks rounds away the smallest differences."""
    for number in range(200):
        time = 3e6 + number / 7
        turn = module.Turn(time, Departure(), module.Kind(), NEW, length=1, prompt=0, prompt_end=b"")
        turn.begin()
        for edge in module.EDGES[1:-2]:
            now = time + edge
            assert now < turn.advance(now) <= now + max(1e-3, edge)


def test_a_reused_request_id_names_the_later_turn():
    tracker = TurnTracker()
    tracker.left([b"a"], Departure("same"), NEW, 1, 0.0)
    tracker.left([b"b"], Departure("same"), NEW, 2, 1.0)
    tracker.begin([b"a"], 0, 2.0)
    assert tracker.note("same", Pause(superseded=True), 3.0)
    assert tracker.begin([b"b"], 0, 4.0) == Start()


def test_worth_of_a_use_that_no_turn_left_is_one_over_its_age():
    tracker = TurnTracker()
    tracker.left([b"a"], Departure("", "", Pause(superseded=True)), NEW, 1, 0.0)
    assert tracker.worth(0.0, 1, 5.0) == 0.0
    assert tracker.worth(0.5, 1, 5.0) > 0.0, "another use with the number of that call"
    assert tracker.worth(0.0, 9, 10.0) == pytest.approx(tracker.worth(0.0, 9, 1000.0) * 100, rel=0.3)


def test_rows_are_given_up_by_the_pauses_of_their_conversations():
    turns = make_turns("pauses")
    rule = RetentionRule(EVICTIONS["pauses"], cost=lambda position: 1.0, turns=turns)
    kept = KeptRows(lambda length: length, rule, croppable=False)
    for number in range(60):  # tools take 2 s, people 300
        for kind, gap in (("tool:x", 2.0), ("person", 300.0)):
            tokens = [number, len(kind), *range(20)]
            kept.left(ROOT, tokens, Departure("", "", Pause(kind)), NEW, 0.0)
            kept.begin(ROOT, [*tokens, 5], gap)
    by_tool, by_person = [7, *range(20)], [8, *range(20)]
    for slot, (tokens, kind) in enumerate(((by_tool, "tool:x"), (by_person, "person"))):
        kept.left(ROOT, tokens, Departure("", "", Pause(kind)), NEW, 1000.0)
        kept.add(slot, ROOT, tokens, 1000.0)
    assert kept.victims(1001.0, on_host=False) == [1, 0]
    assert kept.victims(1060.0, on_host=False) == [0, 1]


def test_a_conversation_that_goes_on_from_an_earlier_turn_has_replaced_what_came_after_it():
    engine = Engine()
    engine.run([1, 2, 3], 0.0, kind="tool:x")
    engine.run([1, 2, 3, 4, 5], 10.0, kind="tool:x")
    engine.run([1, 2, 3, 4, 5, 6], 20.0, kind="tool:x")
    other = engine.start([1, 2, 3, 7, 8], 30.0)
    assert other._start == Start(1, 0, 0, engine.digests([1, 2, 3])[-1], 3, "tool:x")
    old = engine.turns._open[engine.digests([1, 2, 3, 4, 5, 6])[-1]]
    assert old.pause.kind == "replaced" and old.tenant == ""
    other.end([1, 2, 3, 7, 8], 31.0, Departure("", "", Pause("tool:x")))
    uses = {use[0]: group for use, group in engine.pool._idle.retained._groups.items()}
    assert len(uses[31.0].blocks) == 5, "the conversation's own blocks are not counted as those of many"
    assert uses[20.0].turn is old, "the blocks that only the old branch has go by its new kind"


def test_the_branch_that_replaces_is_replaced_in_turn():
    engine = Engine()
    engine.run([1, 2], 0.0, kind="person")
    engine.run([1, 2, 3], 1.0, kind="person")
    engine.run([1, 2, 4], 2.0, kind="person")
    engine.start([1, 2, 5], 3.0)
    kinds = {name: engine.turns._open[engine.digests(name)[-1]].pause.kind for name in ((1, 2, 3), (1, 2, 4))}
    assert kinds == {(1, 2, 3): "replaced", (1, 2, 4): "replaced"}


def test_a_replaced_turn_that_goes_on_teaches_that_such_turns_do():
    engine = Engine()
    for number in range(20):
        at, first = 100.0 * number, 10 * number + 10
        engine.run([first], at, kind="person")
        engine.run([first, first + 1], at + 1, kind="person")
        engine.run([first, first + 2], at + 2, kind="person")
        engine.run([first, first + 1, first + 3], at + 9, kind="person")
    assert engine.turns.kinds.find("", "replaced").gaps.rates.needed_within(4.0, 8.0) > 0.4


def test_the_prompt_of_many_is_not_taken_for_a_turn_of_each():
    engine = Engine()
    engine.run([1, 2], 0.0, kind="person")
    starts = [engine.start([1, 2, 10 + number], 1.0 + number)._start for number in range(module.MOST_ANSWERS + 1)]
    assert starts[-2].common == 0 and starts[-2].length == 2
    assert starts[-1] == Start(common=2)


def test_turns_that_were_continued_are_bounded_and_the_oldest_is_forgotten(monkeypatch):
    monkeypatch.setattr(module, "MOST_OPEN", 3)
    engine = Engine()
    for number in range(5):
        engine.run([number + 10], float(number), kind="person")
        engine.start([number + 10, 1], number + 0.5)
    assert len(engine.turns._passed) == 3
    assert engine.start([10, 2], 9.0)._start == Start(common=1)


def test_the_pace_of_a_conversation_goes_from_turn_to_turn():
    engine, tokens = Engine(), [1]
    for number in range(12):
        engine.run([100 + number], 0.0, kind="tool:x")
        engine.start([100 + number, 1], 1.0)
    now = 10.0
    for turn in range(3):
        engine.run(tokens, now, kind="tool:x")
        tokens, now = [*tokens, turn + 2], now + 4.0
    pace = engine.start(tokens, now)._start.pace
    assert pace.seen == 3 and pace.factor > 1.5, "its calls take four times as long as those of others"


def test_a_conversation_at_its_pace_outlasts_one_whose_call_is_overdue():
    engine, draw = Engine(blocks=4096), random.Random(0)
    for number in range(60):
        pace, now, tokens = 20.0 ** draw.random(), 100.0 * number, [1000 + 100 * number]
        for turn in range(6):
            engine.run(tokens, now, kind="tool:x")
            tokens, now = [*tokens, 1000 + 100 * number + turn + 1], now + pace
    turns = {}
    for name, pace in (("slow", 19.0), ("fast", 1.0)):
        now, tokens = 9000.0, [name == "slow"]
        for turn in range(5):
            engine.run(tokens, now, kind="tool:x")
            tokens, now = [*tokens, 50 + turn + 10 * (name == "slow")], now + pace
        turns[name] = engine.turns._open[engine.digests(tokens[:-1])[-1]]
    worths = {name: engine.turns.forecast(turn).worth(12.0) for name, turn in turns.items()}
    assert worths["slow"] > 3 * worths["fast"]
