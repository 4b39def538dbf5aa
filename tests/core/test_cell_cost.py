"""The cost of cells: interpolation between measured sizes, and the rule that picks batch sizes."""

import json
from dataclasses import asdict
from itertools import pairwise
from math import inf, nan

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.core.cell_cost import LEAST_SAVING, NEAR_BEST, CellCost, choose_sizes

POWERS = tuple(1 << power for power in range(12))
V100 = CellCost((64, 256, 512), (185e-6, 470e-6, 784e-6))


def test_a_batch_takes_the_time_measured_at_its_size():
    assert [V100.at(size) for size in V100.sizes] == list(V100.seconds)


def test_time_is_flat_before_the_first_size_a_power_law_between_and_linear_after_the_last():
    cost = CellCost((4, 16), (1.0, 4.0))
    assert cost.at(1) == cost.at(3) == 1.0
    assert cost.at(8) == pytest.approx(2.0)
    assert CellCost((4, 16), (1.0, 2.0)).at(8) == pytest.approx(2**0.5)
    assert cost.at(48) == pytest.approx(12.0)
    assert cost.throughput(48) == pytest.approx(4.0)
    assert cost.times(3).at(8) == pytest.approx(6.0)


@pytest.mark.parametrize(
    ("sizes", "seconds", "message"),
    [
        ((), (), "0 sizes and 0 times"),
        ((1, 2), (1.0,), "2 sizes and 1 times"),
        ((2, 1), (1.0, 1.0), "must rise"),
        ((0, 1), (1.0, 1.0), "from at least 1"),
        ((1, 1), (1.0, 1.0), "must rise"),
        ((1, 8), (1.0, 0.0), "at 8 is 0.0 seconds"),
        ((1, 8), (1.0, -1.0), "at 8 is -1.0 seconds"),
        ((1, 8), (inf, 1.0), "at 1 is inf seconds"),
        ((1, 8), (nan, 1.0), "at 1 is nan seconds"),
    ],
)
def test_invalid_costs_are_refused(sizes, seconds, message):
    with pytest.raises(ValueError, match=message):
        CellCost(sizes, seconds)


def test_a_cost_survives_json():
    assert msgspec.convert(json.loads(json.dumps(asdict(V100))), CellCost) == V100


def test_the_papers_lstm_gets_512_and_no_sizes_where_its_time_is_flat():
    assert choose_sizes(V100, POWERS) == (1, 64, 128, 256, 512)


def test_a_size_beyond_the_knee_is_taken_only_if_it_gives_more_than_a_few_percent():
    times = {1: 20.0, 64: 22.0, 256: 44.0, 512: 80.0}
    slightly = CellCost((*times, 1024), (*times.values(), 2 * 80.0 * (NEAR_BEST + 0.01)))
    clearly = CellCost((*times, 1024), (*times.values(), 2 * 80.0 * (NEAR_BEST - 0.01)))
    assert choose_sizes(slightly)[-1] == 512
    assert choose_sizes(clearly)[-1] == 1024


def test_a_smaller_size_is_kept_only_if_it_saves_a_tenth_of_the_next_larger_one():
    cost = CellCost((1, 2, 4, 8), (3.0, 8 * (1 - LEAST_SAVING) + 0.1, 8 * (1 - LEAST_SAVING), 8.0))
    assert choose_sizes(cost) == (1, 4, 8)


def test_small_steps_add_up_until_they_save_enough():
    cost = CellCost((1, 2, 3, 4), (0.70, 0.88, 0.94, 1.0))
    assert choose_sizes(cost) == (1, 2, 4)


def test_a_size_that_takes_longer_than_a_larger_one_is_left_out():
    assert choose_sizes(CellCost((1, 2, 4, 8), (1.0, 9.0, 4.0, 6.0))) == (1, 4, 8)


def test_the_smallest_size_is_always_kept_and_may_be_the_only_one():
    assert choose_sizes(CellCost((2, 4, 8), (1.0, 1.01, 1.02))) == (2, 8)
    assert choose_sizes(CellCost((2, 4, 8), (1.0, 3.0, 7.0))) == (2,)


@given(st.lists(st.floats(1e-6, 1.0), min_size=1, max_size=len(POWERS)))
def test_chosen_sizes_follow_the_rule_for_any_measurement(seconds):
    cost = CellCost(POWERS[: len(seconds)], tuple(seconds))
    chosen = choose_sizes(cost)
    best = max(map(cost.throughput, cost.sizes))
    assert list(chosen) == sorted(set(chosen)) and set(chosen) <= set(cost.sizes)
    assert chosen[0] == cost.sizes[0]
    assert cost.throughput(chosen[-1]) >= NEAR_BEST * best
    assert all(cost.throughput(size) < NEAR_BEST * best for size in cost.sizes if size < chosen[-1])
    pairs = list(pairwise(chosen))
    assert all(cost.at(low) <= (1 - LEAST_SAVING) * cost.at(high) for low, high in pairs[1:])
    for low, high in pairs:
        between = [size for size in cost.sizes if low < size < high]
        assert all(cost.at(size) > (1 - LEAST_SAVING) * cost.at(high) for size in between)
