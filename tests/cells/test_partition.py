"""The split of graphs into rows and subgraphs."""

from __future__ import annotations

import random
from collections.abc import Mapping

import numpy as np
import pytest

from holdfast.cells.cell import Cell
from holdfast.cells.graph import CellGraph
from holdfast.cells.partition import Partition, Splitter
from tests.cells.oracle import ONE, PAIR, integer_cell, random_cells, random_recipe, split

LSTM = integer_cell("lstm", {"h": PAIR, "c": ONE}, {"h": (PAIR, False), "c": (ONE, False), "y": (ONE, True)})
LEAF = integer_cell("leaf", {}, {"h": (PAIR, True)})
INNER = integer_cell("inner", {"left": PAIR, "right": PAIR}, {"h": (PAIR, True), "y": (ONE, True)})
DECODER = integer_cell("decoder", {"h": PAIR, "context": PAIR}, {"h": (PAIR, False), "z": (PAIR, True)})
TYPES = {LSTM: 0, LEAF: 1, INNER: 2, DECODER: 3}


def partition(graph: CellGraph, types: Mapping[Cell, int]) -> Partition:
    splitter = Splitter(types)
    splitter.check(graph)
    return splitter.split([graph])


def subgraphs(found: Partition) -> list[list[int]]:
    return [np.flatnonzero(found.subgraph == head).tolist() for head in np.unique(found.subgraph)]


def sources(found: Partition) -> list[tuple[int, ...]]:
    return sorted(tuple(each) for each in found.inputs.tolist())


# Rows and subgraphs.


def test_a_complete_tree_of_16_leaves_has_17_subgraphs() -> None:
    graph = CellGraph()
    level = list(graph.add(LEAF, 16, uid=range(16)))
    while len(level) > 1:
        level = list(
            graph.add(
                INNER, len(level) // 2, uid=range(len(level) // 2), left=(level[::2], "h"), right=(level[1::2], "h")
            )
        )
    found = partition(graph, TYPES)
    assert subgraphs(found) == [[leaf] for leaf in range(16)] + [list(range(16, 31))]
    assert found.types.tolist() == [1] * 16 + [2] * 15 and found.steps.tolist() == [1] * 31


def test_an_encoder_and_a_decoder_are_two_rows_and_two_subgraphs() -> None:
    graph = CellGraph()
    encoder = graph.chain(LSTM, 5, uid=range(5))
    graph.chain(DECODER, 3, uid=range(3), h=(encoder[-1], "h"), context=(encoder[-1], "h"))
    found = partition(graph, TYPES)
    assert graph.nodes == 8 and graph.rows == 2
    assert found.steps.tolist() == [5, 3] and found.subgraph.tolist() == [0, 1]
    outputs = Splitter(TYPES).outputs
    assert sources(found) == [(1, 0, 0, outputs["h"]), (1, 0, 1, outputs["h"])]


def test_a_chain_that_is_read_inside_is_one_row_for_each_step() -> None:
    graph = CellGraph()
    begin = graph.add(LEAF, 1, uid=[0])
    encoder = graph.chain(LSTM, 3, uid=range(3), h=(begin[0], "h"))
    assert graph.rows == 2
    graph.chain(DECODER, 2, uid=range(2), context=(encoder[1], "h"))
    assert graph.rows == 5
    found = partition(graph, TYPES)
    assert found.steps.tolist() == [1, 1, 1, 1, 2] and found.subgraph.tolist() == [0, 1, 1, 1, 4]
    h, c = (Splitter(TYPES).outputs[name] for name in "hc")
    assert sources(found) == [(1, 0, 0, h), (2, 1, 0, h), (2, 1, 1, c), (3, 2, 0, h), (3, 2, 1, c), (4, 2, 1, h)]


def test_the_first_step_of_a_cut_chain_may_begin_with_another_output() -> None:
    graph = CellGraph()
    first = graph.chain(DECODER, 2, uid=range(2))
    cut = graph.chain(DECODER, 3, uid=range(3), h=(first[-1], "z"))
    graph.add(DECODER, 1, uid=[0], h=([cut[1]], "h"))
    h, z = (Splitter(TYPES).outputs[name] for name in "hz")
    assert sources(partition(graph, TYPES)) == [(1, 0, 0, z), (2, 1, 0, h), (3, 2, 0, h), (4, 2, 0, h)]


def test_types_that_read_one_another_in_a_circle_make_subgraphs_that_do_not_wait_for_each_other() -> None:
    graph = CellGraph()
    first = graph.add(INNER, 1, uid=[0])
    middle = graph.add(DECODER, 1, uid=[0], context=(first, "h"))
    graph.add(INNER, 1, uid=[0], left=(first, "h"), right=(middle, "h"))
    assert subgraphs(partition(graph, TYPES)) == [[0], [1], [2]]


@pytest.mark.parametrize("first", range(0, 1000, 250))
def test_random_graphs_are_split_into_connected_nodes_of_one_type(first: int) -> None:
    for seed in range(first, first + 250):
        rng = random.Random(seed)
        cells = random_cells(rng)
        types = {cell: number for number, cell in enumerate(cells)}
        recipes = [random_recipe(cells, 0, rng) for _ in range(3)]
        together = Splitter(types).split([recipe.graph for recipe in recipes])
        row = 0
        for recipe, begin in zip(recipes, together.first.tolist(), strict=True):
            assert begin == row
            alone = partition(recipe.graph, types)
            rows = recipe.graph.rows
            assert rows == recipe.rows() == len(alone.steps) and alone.steps.sum() == len(recipe.nodes)
            assert (together.subgraph[row : row + rows] == alone.subgraph + row).all()
            of_node = dict(zip(recipe.nodes, np.repeat(np.arange(rows), alone.steps).tolist(), strict=True))
            wanted = {frozenset(of_node[node] for node in nodes) for nodes in split(recipe.nodes)}
            assert {frozenset(rows) for rows in subgraphs(alone)} == wanted
            check_no_circle(alone)
            row += rows


def check_no_circle(found: Partition) -> None:
    """Subgraphs can end one after another, each after all subgraphs that it reads."""
    waits = {head: set() for head in found.subgraph.tolist()}
    for reader, producer in zip(found.subgraph[found.reader], found.subgraph[found.producer], strict=True):
        if reader != producer:
            waits[int(reader)].add(int(producer))
    while waits:
        ready = [head for head, needs in waits.items() if not needs & waits.keys()]
        assert ready
        for head in ready:
            del waits[head]
