"""Which sizes are captured; that graphs compute what the model computes is shown by the parity tests on a GPU."""

from __future__ import annotations

import pytest

from holdfast.execution.graphs import graph_sizes


@pytest.mark.parametrize("most", [1, 2, 3, 7, 8, 100, 256, 300, 512, 1000])
def test_every_batch_up_to_the_most_has_a_size_not_much_larger(most: int) -> None:
    sizes = graph_sizes(most)
    assert sizes == sorted(set(sizes))
    assert sizes[-1] == most
    for count in range(1, most + 1):
        padded = next(size for size in sizes if size >= count)
        assert padded - count <= max(7, count // 8)
