"""Layouts of ranks, and how layers are split into stages."""

from __future__ import annotations

from itertools import product

import pytest

from holdfast.core.layout import Layout, split_layers


def slowest(counts: tuple[int, ...], layer: float, embedding: float, head: float) -> float:
    """The largest cost of a stage."""
    costs = [count * layer for count in counts]
    costs[0] += embedding
    costs[-1] += head
    return max(costs)


def test_a_rank_is_a_shard_of_a_stage() -> None:
    layout = Layout(tp=2, pp=3)
    assert layout.ranks == 6
    places = [(layout.stage_of(rank), layout.shard_of(rank)) for rank in range(6)]
    assert places == list(product(range(3), range(2)))
    assert [rank for stage in range(3) for rank in layout.ranks_of(stage)] == list(range(6))
    assert layout.drawing_rank == 4 and Layout(tp=2).drawing_rank == 0


@pytest.mark.parametrize("sizes", [dict(tp=0), dict(pp=0), dict(tp=-1)])
def test_a_layout_without_ranks_is_refused(sizes: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="must be at least 1"):
        Layout(**sizes)


@pytest.mark.whole_product
@pytest.mark.parametrize("layers", [1, 2, 3, 5, 7])
@pytest.mark.parametrize("stages", [1, 2, 3])
@pytest.mark.parametrize(("embedding", "head"), [(0.0, 0.0), (0.0, 2.4), (0.5, 1.2), (3.0, 0.1), (0.0, 9.0)])
def test_no_other_split_has_a_faster_slowest_stage(layers: int, stages: int, embedding: float, head: float) -> None:
    if stages > layers:
        with pytest.raises(ValueError, match=f"pp is {stages}; the model has {layers} layers"):
            split_layers(layers, stages, layer_cost=1.0, embedding_cost=embedding, head_cost=head)
        return
    split = split_layers(layers, stages, layer_cost=1.0, embedding_cost=embedding, head_cost=head)
    assert [index for stage in split for index in stage] == list(range(layers))
    counts = tuple(len(stage) for stage in split)
    assert min(counts) >= 1
    every = [each for each in product(range(1, layers + 1), repeat=stages) if sum(each) == layers]
    assert slowest(counts, 1.0, embedding, head) == min(slowest(each, 1.0, embedding, head) for each in every)


def test_the_stage_of_the_head_has_fewer_layers() -> None:
    assert [len(stage) for stage in split_layers(32, 4, layer_cost=1.0, embedding_cost=0.0, head_cost=2.4)] == [
        9, 9, 8, 6,
    ]  # fmt: skip
