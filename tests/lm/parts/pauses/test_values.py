"""Upcomings: which turns are expected, when their state may come back, and which blocks give way to others."""

from math import inf

import pytest

from holdfast.core.pause import NO_PAUSE
from holdfast.lm.parts.pauses import values
from holdfast.lm.parts.pauses.values import Upcoming, Upcomings


def turn(name, *digests, at=10.0, begin=8.0, paused_at=0.0):
    return Upcoming(name, digests or (name,), "", NO_PAUSE, paused_at, begin, at, at + 5.0)


def test_turns_are_due_once_in_the_order_of_their_begins():
    turns = Upcomings(100)
    first, second = turn(b"a", begin=3.0), turn(b"b", begin=1.0)
    turns.add(first)
    turns.add(second)
    assert turns.next_begin == 1.0
    assert turns.due(2.0) == [second]
    assert turns.due(5.0) == [first] and turns.due(9.0) == []
    assert turns.next_begin == inf and len(turns) == 2


def test_a_forgotten_turn_is_never_due():
    turns = Upcomings(100)
    turns.add(turn(b"a", begin=1.0))
    turns.forget(b"a")
    assert turns.next_begin == inf and turns.due(5.0) == [] and not turns.begun_by([b"a"])


def test_a_turn_replaces_the_one_with_its_key():
    turns = Upcomings(100)
    turns.add(turn(b"a", begin=1.0))
    later = turn(b"a", begin=2.0)
    turns.add(later)
    assert len(turns) == 1 and turns.due(5.0) == [later]


def test_a_turn_has_come_when_a_sequence_begins_with_its_prompt():
    turns = Upcomings(100)
    own = turn(b"b", b"a", b"b", b"c")
    turns.add(own)
    assert turns.begun_by([b"a", b"b", b"x"]) == [own]
    assert turns.begun_by([b"a", b"c"]) == []


def test_a_shared_block_is_needed_by_the_first_turn_and_then_by_nobody_known():
    turns = Upcomings(100)
    turns.add(turn(b"a", b"s", b"a", at=10.0))
    turns.add(turn(b"b", b"s", b"b", at=90.0))
    assert turns.is_needed_after(50.0, 0.0, b"b") and not turns.is_needed_after(50.0, 0.0, b"s")
    turns.forget(b"a")
    assert not turns.is_needed_after(50.0, 0.0, b"s") and not turns.is_needed_after(-1.0, 0.0, b"s")


def test_a_pause_of_which_nothing_is_known_is_expected_to_last_three_times_as_long_again():
    turns = Upcomings(100)
    turns.add(turn(b"a", at=inf, begin=inf, paused_at=10.0))
    assert not turns.is_needed_after(26.5, 14.0, b"a") and turns.is_needed_after(25.5, 14.0, b"a")


def test_a_superseded_state_is_needed_after_everything():
    turns = Upcomings(100)
    turns.add(turn(b"a", at=inf, begin=inf, paused_at=-inf))
    assert turns.is_needed_after(1e18, 1.0, b"a")


def test_the_oldest_turns_are_forgotten_beyond_the_limits(monkeypatch):
    turns = Upcomings(4)
    turns.add(turn(b"a", b"1", b"2"))
    turns.add(turn(b"b", b"3", b"4", b"5"))
    assert len(turns) == 1 and turns.begun_by([b"b"])
    turns.add(turn(b"c", *map(bytes, range(50))))
    assert len(turns) == 1, "one turn is kept however long it is"
    monkeypatch.setattr(values, "MOST_TURNS", 2)
    many = Upcomings(100)
    for name in (b"a", b"b", b"c"):
        many.add(turn(name))
    assert len(many) == 2 and not many.begun_by([b"a"])
    with pytest.raises(KeyError):
        many.forget(b"a")
