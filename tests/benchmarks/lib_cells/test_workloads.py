from __future__ import annotations

import numpy as np
import pytest

from benchmarks.lib.cells.workloads import (
    Tree,
    complete_tree,
    poisson_arrivals,
    random_tree,
    random_trees,
    sentence_lengths,
    tokens_for,
)


def test_sentences_are_as_long_as_those_of_wmt() -> None:
    lengths = sentence_lengths(100_000, 1)
    assert abs(lengths.mean() - 24) < 0.3
    assert 0.99 < (lengths < 100).mean() < 0.998
    assert lengths.min() >= 1 and 300 < lengths.max() <= 330
    assert 45 <= np.quantile(lengths, 0.9) <= 48


def test_clipped_lengths_are_drawn_again_and_not_cut() -> None:
    lengths = sentence_lengths(20_000, 1, clip=50)
    assert lengths.max() == 50
    assert (lengths == 50).mean() < 0.01


def test_fixed_lengths_are_all_the_same_and_seeds_differ() -> None:
    assert set(sentence_lengths(100, 1, fixed=24)) == {24}
    assert (sentence_lengths(100, 1) == sentence_lengths(100, 1)).all()
    assert (sentence_lengths(100, 1) != sentence_lengths(100, 2)).any()


def test_arrivals_are_poisson() -> None:
    gaps = np.diff(poisson_arrivals(50_000, 200.0, 1))
    assert abs(gaps.mean() * 200 - 1) < 0.02
    assert abs(gaps.std() / gaps.mean() - 1) < 0.02


def test_every_shape_of_a_tree_is_equally_likely() -> None:
    draw = np.random.default_rng(1)
    shapes: dict[Tree, int] = {}
    for _ in range(5000):
        tree = random_tree(4, draw)
        shapes[tree] = shapes.get(tree, 0) + 1
    assert len(shapes) == 5  # Catalan number of 3
    assert max(shapes.values()) - min(shapes.values()) < 200


def test_trees_are_like_those_of_treebank() -> None:
    trees = random_trees(3000, 1)
    leaves = np.array([tree.leaves for tree in trees])
    assert 19 < leaves.mean() < 20.5 and leaves.min() >= 2 and leaves.max() <= 56
    heights = np.array([tree.height for tree in trees])
    assert 9.9 < heights[leaves == 19].mean() < 11.3


def test_a_tree_has_one_root_and_children_before_parents() -> None:
    for tree in random_trees(200, 3):
        inner = len(tree.left)
        assert inner == tree.leaves - 1
        assert sorted([*tree.left, *tree.right]) == list(range(tree.leaves + inner - 1))
        for number, (left, right) in enumerate(zip(tree.left, tree.right, strict=True), start=tree.leaves):
            assert max(left, right) < number


def test_a_complete_tree_of_16_leaves_has_4_levels() -> None:
    tree = complete_tree(16)
    assert (tree.leaves, len(tree.left), tree.height) == (16, 15, 4)
    with pytest.raises(ValueError, match="leaves is 12; it must be a power of two"):
        complete_tree(12)


def test_tokens_have_the_lengths_asked_for() -> None:
    tokens = tokens_for([3, 1, 7], 5, 1)
    assert [len(each) for each in tokens] == [3, 1, 7]
    assert all(((each >= 0) & (each < 5)).all() for each in tokens)


def test_values_out_of_range_are_named() -> None:
    with pytest.raises(ValueError, match="rate is 0; it must be above 0"):
        poisson_arrivals(1, 0, 1)
    with pytest.raises(ValueError, match="clip is 0 and fixed None"):
        sentence_lengths(1, 1, clip=0)
