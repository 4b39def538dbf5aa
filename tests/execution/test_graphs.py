"""Which sizes are captured; that graphs compute what the model computes is shown by the parity tests on a GPU."""

from __future__ import annotations

import pytest

from holdfast.execution.graphs import GraphSizes


@pytest.mark.parametrize("most", [1, 2, 3, 7, 8, 100, 256, 300, 512, 1000])
def test_every_batch_up_to_the_most_has_a_size_not_much_larger(most: int) -> None:
    sizes = GraphSizes.of(most, 2048).decodes
    assert list(sizes) == sorted(set(sizes))
    assert sizes[-1] == most
    for count in range(1, most + 1):
        padded = next(size for size in sizes if size >= count)
        assert padded - count <= max(7, count // 8)


@pytest.mark.parametrize("budget", [1, 16, 64, 100, 512, 2048, 5000, 16_640])
def test_mixed_steps_are_padded_by_an_eighth_or_a_tile(budget: int) -> None:
    sizes = GraphSizes.of(256, budget).tokens
    assert list(sizes) == sorted(set(sizes))
    assert sizes[-1] == budget
    for count in range(1, budget + 1):
        padded = next(size for size in sizes if size >= count)
        assert padded - count <= max(127, count // 8)
    assert len(sizes) <= 60


def test_no_more_rows_sample_than_there_are_tokens() -> None:
    sizes = GraphSizes.of(256, 48)
    assert sizes.decodes[-1] == sizes.rows[-1] == sizes.tokens[-1] == 48


def test_the_largest_of_each_stands_for_all() -> None:
    assert GraphSizes.of(20, 600).largest() == GraphSizes((20,), (600,), (20,))
