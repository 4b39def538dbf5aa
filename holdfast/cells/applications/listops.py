"""`listops`: a binary TreeLSTM that computes expressions such as `[MAX 2 9 [MIN 4 7 ] 0 ]`.

The task and its binary trees are from Nangia and Bowman, "ListOps", 2018: MAX, MIN, MED (median, rounded down) and SM
(sum, modulo 10) of 2 to 5 digits or lists. Each token is a leaf. The tokens of a list are joined from the left:
`(((([MAX 2) 9) ...) 0) ])`. The TreeLSTM is that of Tai, Socher and Manning, 2015, section 3.2, with two children.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from holdfast.cells.applications.weights import DIRECTORY, Weights, read_weights
from holdfast.cells.cell import Arrays, Field
from holdfast.cells.graph import CellGraph
from holdfast.cells.graph_batch import GraphBatch
from holdfast.cells.nn import ReadOut, TreeWeights, read_out_cell, tree_internal_cell, tree_leaf_cell

OPERATORS = ("MAX", "MIN", "MED", "SM")
DIGITS = 10
CLOSE = DIGITS + len(OPERATORS)
"""The token `]`. A digit is its own token; the operators follow the digits."""
VOCABULARY = CLOSE + 1
LEAST_VALUES, MOST_VALUES = 2, 5
MOST_TOKENS, MOST_DEPTH = 200, 8

_TOKEN = re.compile(r"\s*(\[\s*\w*|\]|\d+|\S)")


class Tree(NamedTuple):
    """A binary tree. The tokens are the first nodes, in order. The internal nodes follow, children before parents."""

    tokens: list[int]
    left: list[int]
    right: list[int]
    """The left and right child of each internal node."""

    @property
    def root(self) -> int:
        return len(self.tokens) + len(self.left) - 1


def parse(text: str) -> Tree:
    """The binary tree of an expression. Raises ValueError that names the fault and the limit."""
    tokens: list[int] = []
    left: list[int] = []
    right: list[int] = []
    joined: list[tuple[int, int]] = []  # for each open list: the node and the number of values so far
    root = -1
    names = [match[1] for match in _TOKEN.finditer(text)]
    if not names:
        raise ValueError("the expression is empty; it needs at least a digit")
    if len(names) > MOST_TOKENS:
        raise ValueError(f"the expression has {len(names)} tokens; at most {MOST_TOKENS} are allowed")
    leaves = len(names)

    def join(first: int, second: int) -> int:
        left.append(first)
        right.append(second)
        return leaves + len(left) - 1

    for node, name in enumerate(names):
        if root >= 0:
            raise ValueError(f"{name!r} follows the end of the expression; one list or digit is allowed")
        tokens.append(_token(name))
        if tokens[-1] == CLOSE:
            if not joined:
                raise ValueError(f"token {node + 1} is a ] that closes no list")
            head, values = joined.pop()
            if not LEAST_VALUES <= values <= MOST_VALUES:
                raise ValueError(
                    f"the list that ends at token {node + 1} has {values} values; "
                    f"{LEAST_VALUES} to {MOST_VALUES} are allowed"
                )
            value = join(head, node)
        elif tokens[-1] >= DIGITS:
            joined.append((node, 0))
            if len(joined) > MOST_DEPTH:
                raise ValueError(f"lists are nested {len(joined)} deep; at most {MOST_DEPTH} are allowed")
            continue
        else:
            value = node
        if joined:
            head, values = joined[-1]
            joined[-1] = join(head, value), values + 1
        else:
            root = value
    if joined:
        raise ValueError(f"{len(joined)} lists are not closed; each [ needs a ]")
    return Tree(tokens, left, right)


def _token(name: str) -> int:
    if name == "]":
        return CLOSE
    if name.isdecimal() and name.isascii():
        if len(name) > 1:
            raise ValueError(f"{name} is not a digit; values are 0 to 9")
        return int(name)
    operator = name[1:].strip() if name.startswith("[") else name
    if not name.startswith("["):
        raise ValueError(f"{name!r} is not a token; there are digits, ], and [ with one of {', '.join(OPERATORS)}")
    if operator not in OPERATORS:
        raise ValueError(f"operator is {operator!r}; it must be one of {', '.join(OPERATORS)}")
    return DIGITS + OPERATORS.index(operator)


class ListOps:
    """The application `listops`: `text` is an expression, `value` its digit."""

    name = "listops"
    inputs = (
        Field("text", "string", (1,), help="An expression of MAX, MIN, MED and SM, such as [MAX 2 9 [MIN 4 7 ] 0 ]."),
    )
    outputs = (Field("value", "int32", (1,), help="The value of the expression, 0 to 9."),)

    def __init__(self, weights: Weights) -> None:
        tree = TreeWeights(weights["leaf_w"], weights["leaf_b"], weights["w"], weights["b"])
        self.leaf = tree_leaf_cell("listops-leaf", tree, weights["embedding"])
        self.internal = tree_internal_cell("listops-internal", tree)
        self.read = read_out_cell("listops-read", ReadOut(weights["value_w"], weights["value_b"]))
        self.cells = (self.leaf, self.internal, self.read)

    def unfold(self, inputs: Arrays) -> CellGraph:
        """A leaf for each token, an internal node for each pair, and one node that reads the root."""
        tree = parse(str(inputs["text"][0]))
        graph = CellGraph()
        graph.add(self.leaf, len(tree.tokens), token=tree.tokens)
        if tree.left:
            children = {
                f"{side}_{state}": (nodes, state)
                for side, nodes in (("left", tree.left), ("right", tree.right))
                for state in ("h", "c")
            }
            graph.add(self.internal, len(tree.left), **children)
        graph.result("value", graph.add(self.read, h=(tree.root, "h")), "label")
        return graph

    def unfold_many(self, inputs: Sequence[Arrays]) -> GraphBatch:
        """The nodes of `unfold`, for each."""
        trees = [parse(str(each["text"][0])) for each in inputs]
        batch = GraphBatch(len(trees))
        batch.add(self.leaf, [len(tree.tokens) for tree in trees], token=[at for tree in trees for at in tree.tokens])
        left = [node for tree in trees for node in tree.left]
        right = [node for tree in trees for node in tree.right]
        states = {"left_h": (left, "h"), "left_c": (left, "c"), "right_h": (right, "h"), "right_c": (right, "c")}
        batch.add(self.internal, [len(tree.left) for tree in trees], **states)
        root = batch.add(self.read, [1] * len(trees), h=([tree.root for tree in trees], "h"))
        batch.result("value", root, "label")
        return batch

    def finish(self, results: Arrays) -> Arrays:
        """The value, unchanged."""
        return results


def load(directory: Path = DIRECTORY) -> ListOps:
    """The application with the weights in a folder, by default those that come with Holdfast."""
    return ListOps(read_weights("listops", directory)[0])
