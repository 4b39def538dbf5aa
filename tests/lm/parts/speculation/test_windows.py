"""Windows: each row's kept positions follow each other, and a slot always holds the position that it stands for."""

from __future__ import annotations

import random

import pytest

from holdfast.lm.parts.speculation.windows import Kept, Span, Windows


def entered(windows: Windows, *spans: Span, ahead: int = 0) -> list[Kept]:
    kept, shifts = windows.enter(spans, ahead)
    assert not shifts
    return kept


def test_a_chunk_that_samples_nothing_lacks_its_last_position_until_the_next_one_comes() -> None:
    windows = Windows(64)
    first, second = Span("a", 0, 0, 5, 0), Span("a", 0, 5, 8, 1)
    assert entered(windows, first) == [Kept(first, 0, 0)]
    assert entered(windows, second) == [Kept(second, 4, 4)]


def test_rejected_positions_are_written_again() -> None:
    windows = Windows(64)
    verified, following = Span("a", 0, 6, 10, 4), Span("a", 0, 8, 9, 1)
    entered(windows, Span("a", 0, 0, 6, 1))
    assert entered(windows, verified) == [Kept(verified, 6, 6)]
    assert entered(windows, following) == [Kept(following, 8, 8)]


@pytest.mark.parametrize(
    "later",
    [Span("b", 0, 6, 7, 1), Span("a", 0, 8, 9, 1), Span("a", 0, 2, 3, 1)],
    ids=["another sequence", "a step that the head did not read", "a range in front of the kept ones"],
)
def test_a_row_begins_anew_at_a_gap(later: Span) -> None:
    windows = Windows(64)
    entered(windows, Span("a", 0, 3, 6, 1))
    assert entered(windows, later) == [Kept(later, later.start, 0)]


def test_slots_hold_the_positions_that_they_stand_for_through_random_histories() -> None:
    choose = random.Random(0)
    windows, slots = Windows(32), [dict[int, tuple[str, int]]() for _ in range(3)]
    at, names, longest, begun = [0, 0, 0], ["a0", "b0", "c0"], 0, 0
    for step in range(3000):
        spans: list[Span] = []
        for row in range(3):
            chance = choose.random()
            if chance < 0.3:
                continue
            if chance < 0.33:  # another sequence comes to the row, part of which was in the cache
                names[row], at[row] = f"{row} {step}", choose.randrange(20)
            if chance < 0.36:  # a step that the head does not read
                at[row] += choose.randint(1, 3)
            length, sampled = choose.choice((1, 1, 1, 3, 40)), choose.random() < 0.8
            samples = choose.randint(1, min(length, 5)) if sampled else 0
            spans.append(Span(names[row], row, at[row], at[row] + length, samples))
        kept, shifts = windows.enter(spans, ahead := choose.randint(0, 4))
        for row, source, moved in shifts:
            slots[row] = {number: slots[row][source + number] for number in range(moved)}
        for span, first, slot in kept:
            stop = span.stop if span.samples else span.stop - 1
            for number, position in enumerate(range(first, stop)):
                slots[span.row][slot + number] = span.name, position
            held = slot + stop - first
            assert held + ahead <= 32 and first >= 0
            assert stop - first >= span.samples
            base = first - slot
            for number in range(held):  # a query sees all slots up to its own
                assert slots[span.row][number] == (span.name, base + number)
            longest, begun = max(longest, held), begun + (slot == 0)
            at[span.row] = span.stop - choose.randrange(span.samples) if span.samples else span.stop
    assert longest > 24 and begun > 100


def test_a_row_with_two_segments_in_a_step_keeps_those_without_a_gap() -> None:
    windows = Windows(64)
    entered(windows, Span("a", 0, 0, 20, 1))
    again, decode = Span("a", 0, 4, 8, 0), Span("a", 0, 20, 21, 1)
    assert entered(windows, again, decode) == [Kept(decode, 20, 0)]
