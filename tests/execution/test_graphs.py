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
    assert GraphSizes.of(20, 600).largest() == GraphSizes((20,), (600,), (20,), (20,))


def test_a_step_of_few_segments_runs_a_body_with_room_for_few() -> None:
    sizes = GraphSizes.of(256, 2048)
    assert sizes.body(900, 33) == (960, 64)
    assert sizes.body(900, 65) == sizes.body(900, 256) == (960, 256)
    assert sizes.body(900, 300) == (960, 256), "several ranges of one sequence: attention says whether they fit"


@pytest.mark.parametrize("most", [1, 20, 64, 65, 512])
def test_there_is_a_body_for_every_step(most: int) -> None:
    sizes = GraphSizes.of(most, 300)
    bodies = sizes.bodies()
    assert bodies == sorted(set(bodies), reverse=True)
    for tokens in range(1, 301):
        for segments in range(1, min(most, tokens) + 1):
            body = sizes.body(tokens, segments)
            assert body in bodies and body[0] >= tokens and body[1] >= segments
