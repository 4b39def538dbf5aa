"""The models of the evaluation as cells: LSTM, Seq2Seq and TreeLSTM, and the unfolding of a request into them.

The functions that unfold a request know only the names of a cell's inputs and outputs. So they serve cells that compute
with NumPy, cells that compute with torch, and cells that only stand for a time. LSTM and TreeLSTM also come cut into
operators, which a system without cells batches one by one (DyNet; section 2.7.5).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from benchmarks.lib.cells.workloads import Tree
from holdfast.cells.cell import Cell, Output, State, Value
from holdfast.cells.graph import CellGraph
from holdfast.cells.graph_batch import GraphBatch

Run = Callable[..., Any]
Inputs = dict[str, State | Value]


def lstm_cell(hidden: int, run: Run, weights: Mapping[str, Any] | None = None, **options: Any) -> Cell:
    """token, h, c -> h, c, and `probe`, the first number of h, which stands for a result."""
    state, probe = (hidden,), Output((), returned=True)
    inputs: Inputs = {"token": Value((), "int64"), "h": State(state), "c": State(state)}
    outputs = {"h": Output(state), "c": Output(state), "probe": probe}
    return Cell("lstm", run, inputs, outputs, weights or {}, **options)


def encoder_cell(hidden: int, run: Run, weights: Mapping[str, Any] | None = None, **options: Any) -> Cell:
    """token, h, c -> h, c."""
    state = (hidden,)
    inputs: Inputs = {"token": Value((), "int64"), "h": State(state), "c": State(state)}
    return Cell("encoder", run, inputs, {"h": Output(state), "c": Output(state)}, weights or {}, **options)


def decoder_cell(hidden: int, run: Run, weights: Mapping[str, Any] | None = None, **options: Any) -> Cell:
    """word, h, c -> word, h, c: it reads the word of the step before ("feed previous")."""
    state, options = (hidden,), {"priority": 1, **options}
    inputs = {"word": State((), "int64"), "h": State(state), "c": State(state)}
    outputs = {"word": Output((), "int64", returned=True), "h": Output(state), "c": Output(state)}
    return Cell("decoder", run, inputs, outputs, weights or {}, **options)


def leaf_cell(hidden: int, run: Run, weights: Mapping[str, Any] | None = None, **options: Any) -> Cell:
    """token -> h, c."""
    state = (hidden,)
    outputs = {"h": Output(state), "c": Output(state)}
    return Cell("leaf", run, {"token": Value((), "int64")}, outputs, weights or {}, **options)


def internal_cell(hidden: int, run: Run, weights: Mapping[str, Any] | None = None, **options: Any) -> Cell:
    """left_h, left_c, right_h, right_c -> h, c, and `probe`, the first number of h."""
    state, options = (hidden,), {"priority": 1, **options}
    inputs = {name: State(state) for name in ("left_h", "left_c", "right_h", "right_c")}
    outputs = {"h": Output(state), "c": Output(state), "probe": Output((), returned=True)}
    return Cell("internal", run, inputs, outputs, weights or {}, **options)


def sentence(lstm: Cell, tokens: np.ndarray) -> CellGraph:
    """A chain of LSTM cells. Its result is the returned output of each step."""
    graph = CellGraph()
    (output,) = lstm.returned
    graph.result(output, graph.chain(lstm, len(tokens), token=tokens), output)
    return graph


def sentence_pair(encoder: Cell, decoder: Cell, tokens: np.ndarray, steps: int) -> CellGraph:
    """Encode `tokens`, then decode `steps` words. The first decoder cell reads the word 0, which stands for `<go>`."""
    graph = CellGraph()
    last = graph.chain(encoder, len(tokens), token=tokens)[-1]
    words = graph.chain(decoder, steps, h=(last, "h"), c=(last, "c"))
    graph.result("words", words, "word")
    return graph


def parse_tree(leaf: Cell, internal: Cell, tree: Tree, tokens: np.ndarray) -> CellGraph:
    """A leaf cell for each token and an internal cell for each inner node. The result is the root's returned output."""
    graph = CellGraph()
    graph.add(leaf, tree.leaves, token=tokens)
    left, right = tree.children
    states = {"left_h": (left, "h"), "left_c": (left, "c"), "right_h": (right, "h"), "right_c": (right, "c")}
    nodes = graph.add(internal, len(left), **states)
    (output,) = internal.returned
    graph.result(output, nodes[-1], output)
    return graph


def sentences(lstm: Cell, lengths: np.ndarray, tokens: np.ndarray) -> GraphBatch:
    """The requests of `sentence`, together: the numbers of their words, and all words, one request after the other."""
    batch = GraphBatch(len(lengths))
    (output,) = lstm.returned
    steps = batch.chain(lstm, lengths, token=tokens)
    batch.result(output, steps, output)
    return batch


def sentence_pairs(
    encoder: Cell, decoder: Cell, lengths: np.ndarray, tokens: np.ndarray, steps: np.ndarray
) -> GraphBatch:
    """The requests of `sentence_pair`, together: sentences as for `sentences`, and the numbers of words to write."""
    batch = GraphBatch(len(lengths))
    batch.chain(encoder, lengths, token=tokens)
    last = lengths - 1
    batch.result("words", batch.chain(decoder, steps, h=(last, "h"), c=(last, "c")), "word")
    return batch


def parse_trees(leaf: Cell, internal: Cell, trees: Sequence[Tree], tokens: Sequence[np.ndarray]) -> GraphBatch:
    """The requests of `parse_tree`, together."""
    batch = GraphBatch(len(trees))
    batch.add(leaf, [tree.leaves for tree in trees], token=np.concatenate(tokens))
    left, right = (np.concatenate(sides) for sides in zip(*[tree.children for tree in trees], strict=True))
    states = {"left_h": (left, "h"), "left_c": (left, "c"), "right_h": (right, "h"), "right_c": (right, "c")}
    nodes = batch.add(internal, [len(tree.left) for tree in trees], **states)
    (output,) = internal.returned
    batch.result(output, nodes, output, last=True)
    return batch


@dataclass(frozen=True, slots=True)
class Operators:
    """A recurrent cell cut in two: the matrix product, and all later operations."""

    linear: Cell
    gates: Cell


def sentence_of_operators(lstm: Operators, tokens: np.ndarray) -> CellGraph:
    """The request of `sentence`, operator by operator."""
    graph = CellGraph()
    gates = -1
    every = []
    for token in tokens:
        state: Mapping[str, Any] = {} if gates < 0 else {"h": (gates, "h")}
        product = graph.add(lstm.linear, 1, token=[token], **state)[0]
        state = {} if gates < 0 else {"c": (gates, "c")}
        gates = graph.add(lstm.gates, 1, product=(product, "product"), **state)[0]
        every.append(gates)
    (output,) = lstm.gates.returned
    graph.result(output, every, output)
    return graph


def tree_of_operators(leaf: Operators, internal: Operators, tree: Tree, tokens: np.ndarray) -> CellGraph:
    """The request of `parse_tree`, operator by operator."""
    graph = CellGraph()
    products = graph.add(leaf.linear, tree.leaves, token=tokens)
    made = np.zeros(tree.leaves + len(tree.left), np.intp)
    made[: tree.leaves] = graph.add(leaf.gates, tree.leaves, product=(products, "product"))
    heights, left, right = np.array(tree.heights), np.array(tree.left), np.array(tree.right)
    for height in range(1, tree.heights[-1] + 1):
        mine = np.flatnonzero(heights[tree.leaves :] == height)
        left_nodes, right_nodes = made[left[mine]], made[right[mine]]
        products = graph.add(internal.linear, len(mine), left_h=(left_nodes, "h"), right_h=(right_nodes, "h"))
        given = {"product": (products, "product"), "left_c": (left_nodes, "c"), "right_c": (right_nodes, "c")}
        made[tree.leaves + mine] = graph.add(internal.gates, len(mine), **given)
    (output,) = internal.gates.returned
    graph.result(output, int(made[-1]), output)
    return graph


def lstm_operators(hidden: int, linear: Run, gates: Run, weights: Mapping[str, Any], **options: Any) -> Operators:
    """token, h -> product [4 hidden]; product, c -> h, c, probe."""
    state, product = (hidden,), (4 * hidden,)
    first: Inputs = {"token": Value((), "int64"), "h": State(state)}
    then = {"product": State(product), "c": State(state)}
    last = {"h": Output(state), "c": Output(state), "probe": Output((), returned=True)}
    return Operators(
        Cell("lstm_linear", linear, first, {"product": Output(product)}, weights, **options),
        Cell("lstm_gates", gates, then, last, **options),
    )


def leaf_operators(hidden: int, linear: Run, gates: Run, weights: Mapping[str, Any], **options: Any) -> Operators:
    """token -> product [3 hidden]; product -> h, c."""
    product = (3 * hidden,)
    last = {"h": Output((hidden,)), "c": Output((hidden,))}
    first = {"token": Value((), "int64")}
    return Operators(
        Cell("leaf_linear", linear, first, {"product": Output(product)}, weights, **options),
        Cell("leaf_gates", gates, {"product": State(product)}, last, **options),
    )


def internal_operators(hidden: int, linear: Run, gates: Run, weights: Mapping[str, Any], **options: Any) -> Operators:
    """left_h, right_h -> product [5 hidden]; product, left_c, right_c -> h, c, probe."""
    state, product = (hidden,), (5 * hidden,)
    first = {"left_h": State(state), "right_h": State(state)}
    then = {"product": State(product), "left_c": State(state), "right_c": State(state)}
    last = {"h": Output(state), "c": Output(state), "probe": Output((), returned=True)}
    return Operators(
        Cell("internal_linear", linear, first, {"product": Output(product)}, weights, **options),
        Cell("internal_gates", gates, then, last, **options),
    )
