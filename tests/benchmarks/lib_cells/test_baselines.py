from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from benchmarks.lib.cells.baselines import Merging, Padding
from benchmarks.lib.cells.models import parse_tree, sentence, sentence_of_operators, sentence_pair, tree_of_operators
from benchmarks.lib.cells.simulation import ManyWorkers
from benchmarks.lib.cells.workloads import complete_tree, random_trees, sentence_lengths, tokens_for
from holdfast.cells.cell import Cell
from holdfast.cells.graph import CellGraph
from holdfast.cells.plan import CellRequest
from holdfast.cells.planner import CellPlanner
from holdfast.loop.loop import Loop
from tests.benchmarks.lib_cells.in_numpy import (
    VOCABULARY,
    NumpyExecutor,
    encoder_and_decoder,
    lstm_cell,
    lstm_operators,
    tree_cells,
    tree_operators,
)

SIZES = (1, 2, 4, 8, 16, 32, 64)


def serve(
    planner: ManyWorkers, cells: Sequence[Cell], graphs: Sequence[CellGraph], steps: int = 2
) -> tuple[dict[str, dict[str, np.ndarray]], NumpyExecutor]:
    """The results of graphs that arrive a few at a time, and the executor that ran them."""
    executor = NumpyExecutor(cells, 70_000)
    loop: Loop[Any, Any, Any, Any, Any] = Loop(planner.worker(0), executor, steps, lambda: 0.0)
    results = {}
    for begin in range(0, len(graphs), 7):
        for number, graph in enumerate(graphs[begin : begin + 7], start=begin):
            loop.add(CellRequest(str(number), graph))
        for output in loop.step() or ():
            results[output.request_id] = dict(output.results)
    while loop.has_work():
        for output in loop.step() or ():
            results[output.request_id] = dict(output.results)
    return results, executor


def assert_same(ours: dict[str, dict[str, np.ndarray]], theirs: dict[str, dict[str, np.ndarray]]) -> None:
    assert ours.keys() == theirs.keys()
    for request, results in ours.items():
        for name, result in results.items():
            assert theirs[request][name].dtype == result.dtype
            np.testing.assert_allclose(theirs[request][name], result, atol=1e-5)


def sentences(count: int) -> list[np.ndarray]:
    return tokens_for(sentence_lengths(count, 3, clip=60), VOCABULARY, 3)


@pytest.mark.parametrize("width", [1, 10, 40])
@pytest.mark.parametrize("steps", [1, 2])
def test_padding_gives_the_results_of_the_cellular_planner_for_sentences(width: int, steps: int) -> None:
    cell = lstm_cell(sizes=SIZES)
    graphs = [sentence(cell, tokens) for tokens in sentences(40)]
    expected, _ = serve(CellPlanner([cell]), [cell], graphs)
    found, _ = serve(Padding([cell], width=width, most=16), [cell], graphs, steps)
    assert_same(expected, found)


@pytest.mark.parametrize("width", [1, 10, 40])
def test_padding_leaves_the_state_that_a_decoder_reads_alone(width: int) -> None:
    cells = encoder_and_decoder(sizes=SIZES)
    draw = np.random.default_rng(5)
    graphs = [sentence_pair(*cells, tokens, int(draw.integers(1, 40))) for tokens in sentences(40)]
    expected, _ = serve(CellPlanner(cells), cells, graphs)
    found, _ = serve(Padding(cells, width=width, most=16), cells, graphs)
    assert_same(expected, found)


def test_padding_cuts_a_chain_where_it_stops() -> None:
    encoder, decoder = cells = encoder_and_decoder(sizes=SIZES)
    graphs = []
    for tokens in sentences(30):
        graph = CellGraph()
        last = graph.chain(encoder, len(tokens), token=tokens)[-1]
        graph.result("words", graph.chain(decoder, 30, stop=("word", 4), h=(last, "h"), c=(last, "c")), "word")
        graphs.append(graph)
    expected, _ = serve(CellPlanner(cells), cells, graphs)
    found, _ = serve(Padding(cells, width=10, most=16), cells, graphs)
    assert_same(expected, found)
    assert len({len(each["words"]) for each in found.values()}) > 3


def test_padding_runs_a_batch_up_to_the_bound_of_its_bucket() -> None:
    cell = lstm_cell(sizes=SIZES)
    graphs = [sentence(cell, np.zeros(length, np.int64)) for length in (21, 30, 4, 25)]
    _, executor = serve(Padding([cell], width=10, most=16), [cell], graphs)
    assert executor.ran == [("lstm", 3, 4)] * 30 + [("lstm", 1, 1)] * 10


@pytest.mark.parametrize(
    ("whole_turns", "order"),
    [(False, [{"0", "2"}, {"1", "4"}, {"6"}, {"3", "5"}]), (True, [{"0", "2"}, {"3", "5"}, {"1", "4"}, {"6"}])],
)
def test_buckets_take_turns(whole_turns: bool, order: list[set[str]]) -> None:
    cell = lstm_cell(sizes=SIZES)
    planner = Padding([cell], width=10, most=2, whole_turns=whole_turns)
    for number, length in enumerate((5, 15, 5, 5, 15, 5, 25)):
        planner.worker(0).add(CellRequest(str(number), sentence(cell, np.zeros(length, np.int64))))
    loop: Loop[Any, Any, Any, Any, Any] = Loop(planner.worker(0), NumpyExecutor([cell], 1000), 1, lambda: 0.0)
    ended = []
    while loop.has_work():
        ended += [{output.request_id for output in outputs}] if (outputs := loop.step()) else []
    assert ended == order


def test_what_comes_during_a_turn_waits_for_the_next() -> None:
    cell = lstm_cell(sizes=SIZES)
    planner = Padding([cell], width=10, most=1)
    loop: Loop[Any, Any, Any, Any, Any] = Loop(planner.worker(0), NumpyExecutor([cell], 1000), 1, lambda: 0.0)
    for name, length in (("a", 5), ("b", 5), ("c", 15)):
        loop.add(CellRequest(name, sentence(cell, np.zeros(length, np.int64))))
    ended = [output.request_id for output in loop.step() or ()]
    loop.add(CellRequest("late", sentence(cell, np.zeros(5, np.int64))))
    while loop.has_work():
        ended += [output.request_id for output in loop.step() or ()]
    assert ended == ["a", "b", "c", "late"]


@pytest.mark.parametrize("by", ["depth", "agenda"])
def test_merging_gives_the_results_of_the_cellular_planner_for_trees(by: Any) -> None:
    cells = tree_cells(sizes=SIZES)
    trees = random_trees(30, 2)
    tokens = tokens_for([tree.leaves for tree in trees], VOCABULARY, 2)
    graphs = [parse_tree(*cells, tree, given) for tree, given in zip(trees, tokens, strict=True)]
    expected, _ = serve(CellPlanner(cells), cells, graphs)
    found, _ = serve(Merging(cells, by=by, most=8), cells, graphs)
    assert_same(expected, found)


@pytest.mark.parametrize("by", ["depth", "agenda"])
def test_merging_runs_chains_and_pairs(by: Any) -> None:
    cells = encoder_and_decoder(sizes=SIZES)
    graphs = [sentence_pair(*cells, tokens, 1 + len(tokens) // 2) for tokens in sentences(20)]
    expected, _ = serve(CellPlanner(cells), cells, graphs)
    found, _ = serve(Merging(cells, by=by, most=8), cells, graphs)
    assert_same(expected, found)


@pytest.mark.parametrize("by", ["depth", "agenda"])
def test_merging_operators_gives_the_results_of_cells(by: Any) -> None:
    cells, operators = tree_cells(sizes=SIZES), tree_operators(sizes=SIZES)
    every = [part for each in operators for part in (each.linear, each.gates)]
    trees = random_trees(12, 4)
    tokens = tokens_for([tree.leaves for tree in trees], VOCABULARY, 4)
    graphs = [parse_tree(*cells, tree, given) for tree, given in zip(trees, tokens, strict=True)]
    cut = [tree_of_operators(*operators, tree, given) for tree, given in zip(trees, tokens, strict=True)]
    expected, _ = serve(CellPlanner(cells), cells, graphs)
    found, _ = serve(Merging(every, by=by, most=5), every, cut)
    assert_same(expected, found)


def test_merging_operators_gives_the_results_of_a_chain_of_cells() -> None:
    cell, operators = lstm_cell(sizes=SIZES), lstm_operators(sizes=SIZES)
    every = [operators.linear, operators.gates]
    given = sentences(12)
    expected, _ = serve(CellPlanner([cell]), [cell], [sentence(cell, tokens) for tokens in given])
    cut = [sentence_of_operators(operators, tokens) for tokens in given]
    found, executor = serve(Merging(every, by="agenda", most=12), every, cut)
    last = {request: {"probe": results["probe"]} for request, results in expected.items()}
    assert_same(last, found)
    assert {name for name, _, _ in executor.ran} == {"lstm_linear", "lstm_gates"}


def test_one_complete_tree_is_merged_level_by_level() -> None:
    cells = tree_cells(sizes=SIZES)
    graph = parse_tree(*cells, complete_tree(16), np.zeros(16, np.int64))
    for by in ("depth", "agenda"):
        _, executor = serve(Merging(cells, by=by, most=8), cells, [graph])
        assert [(name, nodes) for name, nodes, _ in executor.ran] == [
            ("leaf", 16), ("internal", 8), ("internal", 4), ("internal", 2), ("internal", 1),
        ]  # fmt: skip


def test_the_ideal_runs_equal_trees_node_by_node() -> None:
    cells = tree_cells(sizes=SIZES)
    draw = np.random.default_rng(1)
    graphs = [parse_tree(*cells, complete_tree(16), draw.integers(0, VOCABULARY, 16)) for _ in range(7)]
    expected, _ = serve(CellPlanner(cells), cells, graphs)
    found, executor = serve(Padding(cells, width=1, most=64), cells, graphs)
    assert_same(expected, found)
    assert executor.ran == [("leaf", 7, 8)] * 16 + [("internal", 7, 8)] * 15


def test_an_aborted_request_gives_no_result_and_the_others_theirs() -> None:
    cell = lstm_cell(sizes=SIZES)
    given = sentences(12)
    expected, _ = serve(CellPlanner([cell]), [cell], [sentence(cell, tokens) for tokens in given])
    planner = Padding([cell], width=100, most=6)
    executor = NumpyExecutor([cell], 1000)
    loop: Loop[Any, Any, Any, Any, Any] = Loop(planner.worker(0), executor, 1, lambda: 0.0)
    for number, tokens in enumerate(given):
        loop.add(CellRequest(str(number), sentence(cell, tokens)))
    loop.step()
    loop.abort("2")  # in the batch
    loop.abort("8")  # waits
    loop.abort("none")
    found = {}
    while loop.has_work():
        for output in loop.step() or ():
            found[output.request_id] = dict(output.results)
    assert_same({key: value for key, value in expected.items() if key not in "28"}, found)
    stats = loop.stats()
    assert (stats.waiting, stats.running, stats.rows_used) == (0, 0, 0)


def test_sizes_given_by_type_bound_the_tasks_and_their_padding() -> None:
    cell = lstm_cell(sizes=SIZES)
    planner = Merging([cell], by="depth", most=16, sizes=((6,),))
    for number in range(10):
        planner.add(CellRequest(str(number), sentence(cell, np.zeros(1, np.int64))))
    plan = planner.schedule(0, 0.0)
    assert plan is not None and [(len(task.rows), task.size) for task in plan.tasks] == [(6, 6), (4, 6)]
    with pytest.raises(ValueError, match="most is 7; the cells have sizes up to 6"):
        Padding([cell], width=1, most=7, sizes=((6,),))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda cell: Padding([cell], width=0, most=4), "width is 0; it must be at least 1"),
        (lambda cell: Padding([cell], width=1, most=65), "most is 65; the cells have sizes up to 64"),
        (lambda cell: Merging([cell], by="depth", most=0), "most is 0; it must be at least 1"),
        (lambda cell: Merging([cell], by="depth", most=1, workers=0), "workers is 0; it must be at least 1"),
    ],
)
def test_values_out_of_range_are_named(make: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make(lstm_cell(sizes=SIZES))
