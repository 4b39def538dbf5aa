"""The planner's memory: numbers and ranges."""

from __future__ import annotations

import random

from holdfast.cells.table import Numbers, Ranges


def test_numbers_that_follow_one_another_are_taken_together() -> None:
    numbers = Numbers(1, 10)
    assert numbers.free == 9 and numbers.take(3).tolist() == [1, 2, 3]
    taken = numbers.take(4)
    assert taken.tolist() == [4, 5, 6, 7]
    numbers.give(taken)
    assert numbers.take(2).tolist() == [4, 5] and numbers.free == 4


def test_no_number_is_taken_twice() -> None:
    rng, numbers, taken = random.Random(0), Numbers(1, 50), []
    for _ in range(500):
        if taken and rng.random() < 0.5:
            numbers.give(taken.pop(rng.randrange(len(taken))))
        else:
            taken.append(numbers.take(rng.randint(0, min(5, numbers.free))))
        held = [number for each in taken for number in each.tolist()]
        assert len(set(held)) == len(held) == 49 - numbers.free and set(held) <= set(range(1, 50))


def test_ranges_do_not_overlap_and_keep_their_items_when_the_arrays_grow() -> None:
    rng, ranges = random.Random(0), Ranges([((), "int64"), ((2,), "float32")])
    held: dict[int, tuple[int, int]] = {}
    for number in range(2000):
        if held and rng.random() < 0.4:
            offset = rng.choice(list(held))
            length, mark = held.pop(offset)
            assert (ranges.items[0][offset : offset + length] == mark).all()
            assert (ranges.items[1][offset : offset + length] == mark).all()
            ranges.give(offset, length)
        else:
            length = rng.randint(1, 40)
            offset = ranges.take(length)
            held[offset] = length, number
            for items in ranges.items:
                items[offset : offset + length] = number
    assert ranges.held >= sum(length for length, _ in held.values())
    for offset, (length, _) in held.items():
        ranges.give(offset, length)
    assert ranges.held == 0


def test_freed_ranges_are_used_again_before_the_arrays_grow() -> None:
    ranges = Ranges([((), "int64")])
    for _ in range(10_000):
        ranges.give(ranges.take(700), 700)
    assert len(ranges.items[0]) == 1024


def test_ranges_of_no_arrays_can_be_held() -> None:
    ranges = Ranges([])
    assert [ranges.take(3000), ranges.take(1)] == [0, 4096]
