"""Graphs of cells: the inputs that they refuse."""

from __future__ import annotations

import random
import time
from typing import Any

import numpy as np
import pytest

from holdfast.cells.cell import Cell, Output, State, Value
from holdfast.cells.graph import ZEROS, CellGraph
from holdfast.cells.partition import Splitter
from tests.cells.oracle import ONE, PAIR, Recipe, integer_cell

LSTM = integer_cell("lstm", {"h": PAIR, "c": ONE}, {"h": (PAIR, False), "c": (ONE, False), "y": (ONE, True)})
LEAF = integer_cell("leaf", {}, {"h": (PAIR, True)})
INNER = integer_cell("inner", {"left": PAIR, "right": PAIR}, {"h": (PAIR, True), "y": (ONE, True)})
DECODER = integer_cell("decoder", {"h": PAIR, "context": PAIR}, {"h": (PAIR, False), "z": (PAIR, True)})
TYPES = {LSTM: 0, LEAF: 1, INNER: 2, DECODER: 3}


# Refused inputs.


@pytest.mark.parametrize("count", [0, -1])
def test_at_least_one_node_is_added(count: int) -> None:
    for call in (CellGraph().add, CellGraph().chain):
        with pytest.raises(ValueError, match=f"{count} nodes of cell lstm; there must be at least 1"):
            call(LSTM, count, uid=[])


def test_values_must_be_there_and_have_the_shape_and_type_of_the_input() -> None:
    with pytest.raises(ValueError, match="cell leaf needs the value uid"):
        CellGraph().add(LEAF, 1)
    with pytest.raises(ValueError, match=r"value uid of cell leaf has the shape \[3\]; it needs \[2\]"):
        CellGraph().add(LEAF, 2, uid=[1, 2, 3])
    for given in (["a"], [2**70], [None], [[1, 2], [3]]):
        with pytest.raises(ValueError, match="value uid of cell leaf must be int64"):
            CellGraph().add(LEAF, 1, uid=given)


def test_inputs_must_be_the_cell_s() -> None:
    with pytest.raises(ValueError, match="cell leaf has no input token; it has uid"):
        CellGraph().add(LEAF, 1, uid=[0], token=[1])


@pytest.mark.parametrize("given", [0, [0], "h", ([0], "h", 1), None])
def test_a_state_input_is_a_pair(given: Any) -> None:
    graph = CellGraph()
    graph.add(LEAF, 1, uid=[0])
    with pytest.raises(ValueError, match="input left of cell inner must be a pair"):
        graph.add(INNER, 1, uid=[0], left=given)


def test_a_state_input_names_one_node_for_each_new_one() -> None:
    graph = CellGraph()
    leaves = graph.add(LEAF, 3, uid=range(3))
    with pytest.raises(ValueError, match="input left of cell inner names 3 nodes; it needs 2"):
        graph.add(INNER, 2, uid=range(2), left=(leaves, "h"))
    with pytest.raises(ValueError, match="input h of cell lstm names 3 nodes; it needs 1"):
        graph.chain(LSTM, 2, uid=range(2), h=(leaves, "h"))


@pytest.mark.parametrize("nodes", [[0, 3], [0, 4], [-2, 0], [9, 0]])
def test_a_node_reads_only_nodes_before_it(nodes: list[int]) -> None:
    graph = CellGraph()
    graph.add(LEAF, 2, uid=range(2))
    bad = next(node for index, node in enumerate(nodes) if not ZEROS <= node < 2 + index)
    with pytest.raises(ValueError, match=f"names node {bad}, which does not come before it"):
        graph.add(INNER, 2, uid=range(2), left=(nodes, "h"))
    with pytest.raises(ValueError, match=f"names node {bad}, which does not come before it"):
        graph.chain(LSTM, 2, uid=range(2), h=(bad, "h"))
    graph.add(INNER, 2, uid=range(2), left=([ZEROS, 2], "h"), right=([1, ZEROS], "h"))


def test_an_output_must_exist_and_fit_the_input() -> None:
    graph = CellGraph()
    leaves = graph.add(LEAF, 2, uid=range(2))
    inner = graph.add(INNER, 1, uid=[0])
    with pytest.raises(ValueError, match="cell leaf has no output c; it has h"):
        graph.add(LSTM, 1, uid=[0], c=(leaves[:1], "c"))
    with pytest.raises(
        ValueError, match=r"input h of cell lstm is int64\[2\], and output y of cell inner is int64\[\]"
    ):
        graph.add(LSTM, 1, uid=[0], h=(inner, "y"))
    graph.add(LSTM, 1, uid=[0], c=(inner, "y"))
    other = Cell("other", lambda weights: {}, {"x": Value()}, {"h": Output((2,), "float32")})
    node = graph.add(other, 1, x=[0.5])
    with pytest.raises(ValueError, match=r"is int64\[2\], and output h of cell other is float32\[2\]"):
        graph.add(LSTM, 1, uid=[0], h=(node, "h"))


def test_nodes_of_one_call_read_only_outputs_that_their_own_cell_gives() -> None:
    graph = CellGraph()
    graph.chain(DECODER, 1, uid=[0])
    with pytest.raises(ValueError, match="cell inner has no output z; it has h, y"):
        graph.add(INNER, 2, uid=range(2), left=([0, 1], "z"))
    graph.add(INNER, 2, uid=range(2), left=([0, 1], "h"))


def test_only_a_cell_that_carries_state_makes_a_chain() -> None:
    with pytest.raises(ValueError, match="cell leaf has no State input with an output's name"):
        CellGraph().chain(LEAF, 2, uid=range(2))


def test_a_chain_stops_only_by_a_returned_scalar() -> None:
    for output in ("h", "c", "x"):
        with pytest.raises(ValueError, match=f"a chain of cell lstm cannot stop by {output}"):
            CellGraph().chain(LSTM, 2, uid=range(2), stop=(output, 1))
    vector = Cell("v", lambda weights: {}, {"h": State((2,))}, {"h": Output((2,), returned=True)})
    with pytest.raises(ValueError, match="cannot stop by h"):
        CellGraph().chain(vector, 2, stop=("h", 1))


@pytest.mark.parametrize("node", [0, 1, 2])
def test_nobody_reads_a_chain_that_may_stop(node: int) -> None:
    graph = CellGraph()
    graph.chain(LSTM, 3, uid=range(3), stop=("y", 1))
    with pytest.raises(ValueError, match="a chain of cell lstm that may stop is read by another node"):
        graph.add(INNER, 2, uid=range(2), left=([ZEROS, node], "h"))
    with pytest.raises(ValueError, match="a chain of cell lstm that may stop is read by another node"):
        graph.chain(DECODER, 1, uid=[0], context=(node, "h"))


def test_results_name_nodes_that_return_the_output() -> None:
    graph = CellGraph()
    leaves = graph.add(LEAF, 2, uid=range(2))
    steps = graph.chain(LSTM, 3, uid=range(3))
    for nodes, output, message in (
        ([], "h", "result r names no nodes"),
        ([0, 5], "h", "result r names node 5; there are 5"),
        (-1, "h", "result r names node -1; there are 5"),
        (leaves, "y", "result r: cell leaf does not return an output y"),
        (steps, "h", "result r: cell lstm does not return an output h"),
        (steps[:2], "y", "result r names a part of a chain of 3 steps; name all of it"),
        (steps[1:], "y", "result r names a part of a chain of 3 steps; name all of it"),
        ([2, 3, 3], "y", "result r names a part of a chain of 3 steps; name all of it"),
    ):
        graph.results.clear()
        graph.result("r", nodes, output)
        with pytest.raises(ValueError, match=message):
            Splitter(TYPES).check(graph)
    graph.results.clear()
    graph.result("r", np.array([2, 3, 4]), "y")
    graph.result("leaf", leaves[1], "h")
    assert [result.parts for result in Splitter(TYPES).check(graph)] == [[(1, 0, 3)], [(0, 1, 2)]]
    graph.result("r", steps, "y")
    with pytest.raises(ValueError, match="two results have one name: r, leaf, r"):
        Splitter(TYPES).check(graph)


def test_any_step_of_a_cut_chain_may_be_a_result() -> None:
    recipe = Recipe(0, random.Random(0))
    steps = recipe.chain(LSTM, 3, {})
    recipe.add(INNER, 1, {"left": ([steps[1]], "h")})
    recipe.graph.result("second", steps[1], "y")
    assert [result.parts for result in Splitter(TYPES).check(recipe.graph)] == [[(0, 1, 2)]]


def test_cells_must_be_the_application_s() -> None:
    graph = CellGraph()
    graph.add(LEAF, 1, uid=[0])
    with pytest.raises(ValueError, match="cell leaf is not one of the application's cells"):
        Splitter({LSTM: 0}).check(graph)


READ = integer_cell("read", {"h": PAIR}, {"label": (ONE, True)})


def wrongly_judged(seed: int) -> str:
    """The error in judging a block over a random graph, some of whose cells give no h; empty if there is none."""
    choose = random.Random(seed)
    graph, cells = CellGraph(), []
    for _ in range(choose.choice((1, 3, 60))):
        cell, count = choose.choice((LEAF, INNER, READ)), choose.randint(1, 4)
        graph.add(cell, count, uid=range(count))
        cells += [cell] * count
    reader, count = choose.choice((INNER, READ)), choose.choice((1, 2, 5, 40))
    cells += [reader] * count
    whole = choose.random() < 0.5  # only nodes that give h
    named = []
    for place in range(count):
        before = range(len(cells) - count + place)
        fit = [node for node in before if cells[node] is not READ] if whole else before
        named.append(choose.choice([*fit, ZEROS]) if choose.random() < 0.9 else ZEROS)
    given = {"h" if reader is READ else "left": (named, "h")}
    lacking = any(cells[node] is READ for node in named if node != ZEROS)
    try:
        graph.add(reader, count, uid=range(count), **given)
    except ValueError as error:
        right = lacking and "cell read has no output h; it has label" in str(error)
        return "" if right else f"refused: {error}"
    return "taken, although a node gives no h" if lacking else ""


def test_a_node_without_the_output_is_found_wherever_it_is_named() -> None:
    """A block is refused if and only if it names a node of a cell that gives no h."""
    assert {seed: wrong for seed in range(300) if (wrong := wrongly_judged(seed))} == {}


def test_looking_for_outputs_does_not_slow_down_graphs_of_thousands_of_blocks() -> None:
    """A tree of 3,000 blocks takes hardly longer where one cell lacks the output that the others read."""

    def build(mixed: bool) -> float:
        began = time.process_time()
        graph = CellGraph()
        level = [graph.add(LEAF, 1, uid=[0])[0] for _ in range(1500)]
        if mixed:
            graph.add(READ, 1, uid=[0], h=(level[0], "h"))
        while len(level) > 1:
            pairs = zip(level[::2], level[1::2], strict=False)
            above = [graph.add(INNER, 1, uid=[0], left=(left, "h"), right=(right, "h"))[0] for left, right in pairs]
            level = above + level[2 * len(above) :]
        assert len(graph.blocks) == 2999 + mixed
        return time.process_time() - began

    alike, mixed = (min(build(each) for _ in range(3)) for each in (False, True))
    assert mixed < 4 * alike + 0.05


def test_a_result_may_name_every_other_node_or_nodes_in_any_order() -> None:
    graph = CellGraph()
    first = graph.add(LEAF, 3, uid=range(3))
    graph.add(LEAF, 4, uid=range(4))
    for nodes, parts in (
        (range(0, 7, 2), [(0, 0, 1), (0, 2, 3), (1, 1, 2), (1, 3, 4)]),
        (range(6, -1, -3), [(1, 3, 4), (1, 0, 1), (0, 0, 1)]),
        (range(1, 6), [(0, 1, 3), (1, 0, 3)]),
        ([0, 1, 2, 3], [(0, 0, 3), (1, 0, 1)]),
        ([2, 1], [(0, 2, 3), (0, 1, 2)]),
        (first, [(0, 0, 3)]),
    ):
        graph.results.clear()
        graph.result("r", nodes, "h")
        (result,) = Splitter(TYPES).check(graph)
        assert result.parts == parts
