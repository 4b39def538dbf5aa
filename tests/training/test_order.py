"""The order of examples: each occurs once an epoch, with any interruptions."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.training.order import Order, example_at, pack


@given(count=st.integers(1, 300), seed=st.integers(0, 2**63 - 1), epoch=st.integers(0, 1000))
def test_an_epoch_s_order_is_a_permutation(count: int, seed: int, epoch: int) -> None:
    order = [example_at(at, count=count, seed=seed, epoch=epoch) for at in range(count)]
    assert sorted(order) == [*range(count)]


def test_orders_differ_by_seed_and_epoch_and_not_between_calls() -> None:
    def order(seed: int, epoch: int) -> list[int]:
        return [example_at(at, count=100, seed=seed, epoch=epoch) for at in range(100)]

    orders = [order(1, 0), order(1, 1), order(2, 0), [*range(100)]]
    assert all(a != b for i, a in enumerate(orders) for b in orders[:i])
    assert order(1, 0) == orders[0]


def test_neighbours_do_not_stay_neighbours() -> None:
    order = [example_at(at, count=1000, seed=5, epoch=0) for at in range(1000)]
    assert sum(abs(a - b) == 1 for a, b in pairwise(order)) < 10


@given(count=st.integers(1, 60), batch=st.integers(1, 20), epochs=st.integers(1, 3), seed=st.integers(0, 99))
def test_every_step_s_examples_are_each_example_once_an_epoch(count: int, batch: int, epochs: int, seed: int) -> None:
    order = Order(count, batch, epochs, seed)
    seen: list[int] = []
    for step in range(order.steps):
        seen += order.examples(step)
        if order.ends_epoch(step):
            assert sorted(seen) == [*range(count)]
            seen.clear()
    assert not seen


def test_no_example_is_lost_or_repeated_over_1000_random_kills() -> None:
    """A state covers all stored steps. A kill loses the other steps, and the run resumes after the state."""
    chance = random.Random(0)
    order = Order(501, 8, 40, 7)
    state: list[tuple[int, ...]] = []
    computed: list[tuple[int, ...]] = []
    kills = 0
    while len(state) < order.steps:
        if len(state) + len(computed) < order.steps:
            computed.append(order.examples(len(state) + len(computed)))
        event = chance.random()
        if event < 0.3 and kills < 1000:
            kills += 1
            computed.clear()
        elif event < 0.7:
            state += computed
            computed.clear()
    assert kills == 1000
    for epoch in range(order.epochs):
        steps = state[epoch * order.steps_per_epoch : (epoch + 1) * order.steps_per_epoch]
        assert sorted(example for step in steps for example in step) == [*range(order.count)]


@given(st.lists(st.integers(1, 10), max_size=30), st.integers(10, 40))
def test_packing_keeps_order_and_fills_within_the_limit(lengths: list[int], limit: int) -> None:
    packed = pack(range(len(lengths)), lengths, limit)
    assert [example for part in packed for example in part] == [*range(len(lengths))]
    sums = [sum(lengths[example] for example in part) for part in packed]
    assert all(0 < total <= limit for total in sums)
    assert all(a + lengths[part[0]] > limit for a, part in zip(sums, packed[1:], strict=False))


def test_an_example_above_the_limit_is_refused_with_both_numbers() -> None:
    with pytest.raises(ValueError, match=r"example 1 has 11 tokens; a micro-batch holds 10"):
        pack([0, 1], [3, 11], 10)
