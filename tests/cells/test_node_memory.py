"""The values of nodes lie by type, one request after the other, and are held until a batch ends."""

from __future__ import annotations

import numpy as np

from holdfast.cells.cell import Cell, Output, State, Value
from holdfast.cells.graph import CellGraph
from holdfast.cells.graph_batch import GraphBatch
from holdfast.cells.node_memory import NodeMemory

WORD = {"word": Value((), "int32"), "state": State()}
ENCODER = Cell("encoder", dict, WORD, {"state": Output()})
DECODER = Cell("decoder", dict, WORD, {"state": Output(), "score": Output((2,), returned=True)})


def memory_of(*cells: Cell) -> NodeMemory:
    return NodeMemory(cells, {cell: number for number, cell in enumerate(cells)}, 8)


def graph(*blocks: tuple[Cell, list[int]]) -> CellGraph:
    made = CellGraph()
    for cell, words in blocks:
        made.chain(cell, len(words), word=words)
    return made


def words_of(memory: NodeMemory, type_: int, offset: int, count: int) -> list[int]:
    """The words of this many nodes."""
    found: list[int] = memory.ranges[type_].items[0][offset : offset + count].tolist()
    return found


def rows(count: int) -> np.ndarray:
    return np.arange(1, count + 1)


def test_values_of_graphs_lie_by_type_one_graph_after_the_other() -> None:
    memory = memory_of(ENCODER, DECODER)
    graphs = [graph((ENCODER, [1, 2]), (DECODER, [3])), graph((DECODER, [4, 5])), graph((ENCODER, [6]))]
    batch = memory.begin(rows(4), len(graphs))
    assert memory.store(graphs, batch) == [(0, 0), (2, 1), (2, 3)]
    assert words_of(memory, 0, batch.offsets[0], 3) == [1, 2, 6]
    assert words_of(memory, 1, batch.offsets[1], 3) == [3, 4, 5]
    assert len(memory.ranges[1].items) == 2, "results have memory next to the values"
    alone = memory_of(ENCODER)
    batch = alone.begin(rows(2), 2)
    assert alone.store([graph((ENCODER, [7, 8])), graph((ENCODER, [9]))], batch) == [(0,), (2,)]
    assert words_of(alone, 0, batch.offsets[0], 3) == [7, 8, 9]


def test_a_batch_of_one_type_of_graphs_lies_as_its_graphs_would() -> None:
    memory = memory_of(ENCODER, DECODER)
    graphs = GraphBatch(2)
    graphs.chain(ENCODER, [2, 1], word=[1, 2, 5])
    graphs.chain(ENCODER, [1, 2], word=[3, 6, 7])
    graphs.chain(DECODER, [1, 1], word=[4, 8])
    batch = memory.begin(rows(6), 2)
    first, second, last = memory.store_batch(graphs, [0, 0, 1], batch)
    at = batch.offsets[0]
    assert words_of(memory, 0, at, 6) == [1, 2, 3, 5, 6, 7]
    assert (first - at).tolist() == [0, 3] and (second - at).tolist() == [2, 4]
    assert words_of(memory, 1, int(last[0]), 2) == [4, 8]


def test_ranges_are_held_until_their_own_batch_ends_and_then_taken_again() -> None:
    memory = memory_of(ENCODER, DECODER)
    one, two = (memory.begin(rows(1), 3) for _ in range(2))
    for batch in (one, two):
        memory.store([graph((ENCODER, [1, 2]))], batch)
        batch.hold(memory.links, 4)
    assert memory.left[[one.number, two.number]].tolist() == [3, 3] and one.number != two.number
    assert (memory.ranges[0].held, memory.ranges[1].held, memory.links.held) == (4, 0, 8)
    memory.end(one.number)
    assert (memory.ranges[0].held, memory.links.held) == (2, 4)
    three = memory.begin(rows(1), 1)
    memory.store([graph((ENCODER, [3, 4]))], three)
    assert three.number == one.number and three.offsets == one.offsets != two.offsets
    assert words_of(memory, 0, two.offsets[0], 2) == [1, 2]
