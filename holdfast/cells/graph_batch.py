"""GraphBatch: many requests whose graphs have the same blocks, unfolded together into arrays. Pure.

batch = GraphBatch(2)  # two trees, with 3 and 2 leaves
leaves = batch.add(leaf, [3, 2], token=[4, 8, 15, 16, 23])
inner = batch.add(internal, [2, 1], left_h=([0, 3, 0], "h"), right_h=([1, 2, 1], "h"))
batch.result("label", inner, "label", last=True)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from holdfast.cells.cell import Cell
from holdfast.cells.compiled import compiled
from holdfast.cells.graph import ZEROS, Read, check_chain, misfit, value_array

MOST_BLOCKS = 62
"""Largest number of blocks of a batch. The blocks that one reads are noted as bits of an int64."""


@dataclass(slots=True)
class BatchBlock:
    """The nodes of one call of `add` or `chain`: for each request, its nodes have consecutive ids."""

    cell: Cell
    counts: np.ndarray
    """Number of nodes of each request, int64 [requests]."""
    values: list[np.ndarray]
    """For each Value input of the cell, its values [nodes, *shape], one request after the other."""
    chain: bool
    """Whether each request's nodes are a chain. A chain is one row, and only its last node is read by other blocks."""
    stop: tuple[str, int] | None
    """The returned output and the value at which a chain ends early; None if it does not."""
    columns: list[np.ndarray] = field(default_factory=list)
    """Arrays of ids of the nodes whose outputs are read, or ZEROS: [nodes], or [requests] for a chain."""
    reads: list[Read] = field(default_factory=list)

    def part(self, begin: int, end: int) -> BatchBlock:
        """The block of the requests from `begin` to `end`."""
        first, last = int(self.counts[:begin].sum()), int(self.counts[:end].sum())
        of_column = slice(begin, end) if self.chain else slice(first, last)
        return BatchBlock(
            self.cell,
            self.counts[begin:end],
            [value[first:last] for value in self.values],
            self.chain,
            self.stop,
            [column[of_column] for column in self.columns],
            self.reads,
        )


class BatchResult(NamedTuple):
    """A named result that each request of a batch has: one output of its nodes of a block."""

    name: str
    block: int
    output: str
    last: bool
    """Whether the result is that of the last node alone."""


class GraphBatch:
    """The nodes of several requests. A request's nodes are numbered as in a CellGraph: block by block, from 0.

    Given arrays are not copied: do not change them later.
    """

    __slots__ = ("blocks", "constants", "nodes", "requests", "results")

    def __init__(self, requests: int) -> None:
        if requests < 1:
            raise ValueError(f"a batch of {requests} requests; there must be at least 1")
        self.requests = requests
        self.blocks: list[BatchBlock] = []
        self.nodes = np.zeros(requests, np.int64)
        """Number of nodes of each request so far."""
        self.results: list[BatchResult] = []
        self.constants: dict[str, Sequence[np.ndarray]] = {}
        """Results that are known without running any node, by name: one for each request."""

    @property
    def rows(self) -> np.ndarray:
        """Number of rows of each request, int64 [requests]. A chain is one row."""
        rows = np.zeros(self.requests, np.int64)
        for block in self.blocks:
            rows += 1 if block.chain else block.counts
        return rows

    def add(self, cell: Cell, counts: Sequence[int] | np.ndarray, /, **inputs: Any) -> int:
        """Add `counts[r]` nodes of one cell to each request r; 0 adds none. Returns the number of the block.

        Inputs are given as to `CellGraph.add`, one request after the other: Value inputs [nodes, *shape], and State
        inputs as (nodes, output), where nodes are numbered within their request. Raises ValueError for inputs that do
        not fit.
        """
        return self._add(cell, counts, inputs, False, None)

    def chain(
        self,
        cell: Cell,
        steps: Sequence[int] | np.ndarray,
        /,
        *,
        stop: tuple[str, int] | None = None,
        **inputs: Any,
    ) -> int:
        """Add a chain of `steps[r]` nodes to each request r. Returns the number of the block.

        The inputs are as for `CellGraph.chain`, one request after the other: State inputs are (nodes, output) with one
        node for each request. Other blocks may read a chain's last node only. Raises ValueError for inputs that do not
        fit.
        """
        check_chain(cell, stop)
        return self._add(cell, steps, inputs, True, stop)

    def result(self, name: str, block: int, output: str, *, last: bool = False) -> None:
        """Name a result: a returned output of all nodes of a block [nodes, *shape], or of the `last` node alone."""
        if not 0 <= block < len(self.blocks):
            raise ValueError(f"result {name} names block {block}; there are {len(self.blocks)}")
        cell = self.blocks[block].cell
        if output not in cell.returned:
            raise ValueError(f"result {name}: cell {cell.name} does not return an output {output}")
        if any(result.name == name for result in self.results):
            raise ValueError(f"two results have one name: {name}")
        if last and self.blocks[block].counts.min() < 1:
            raise ValueError(f"result {name} is that of the last node of block {block}; a request has none there")
        self.results.append(BatchResult(name, block, output, last))

    def constant(self, name: str, values: Sequence[np.ndarray]) -> None:
        """Name a result that is known already, one for each request. `finish` receives it unchanged."""
        if len(values) != self.requests:
            raise ValueError(f"constant {name} has {len(values)} values for {self.requests} requests")
        self.constants[name] = values

    def part(self, begin: int, end: int) -> GraphBatch:
        """The batch of the requests from `begin` to `end`."""
        if (begin, end) == (0, self.requests):
            return self
        some = GraphBatch(end - begin)
        some.blocks = [block.part(begin, end) for block in self.blocks]
        some.nodes, some.results = self.nodes[begin:end], self.results
        some.constants = {name: values[begin:end] for name, values in self.constants.items()}
        return some

    def _add(self, cell: Cell, given: Any, inputs: dict[str, Any], chain: bool, stop: tuple[str, int] | None) -> int:
        if len(self.blocks) == MOST_BLOCKS:
            raise ValueError(f"the batch has {MOST_BLOCKS} blocks; more do not fit")
        whole = np.array(given)
        if whole.shape != (self.requests,) or whole.dtype.kind not in "iu":
            raise ValueError(
                f"counts of cell {cell.name} are {whole.dtype}{list(whole.shape)}; they must be int[{self.requests}]"
            )
        counts = whole.astype(np.int64)
        if counts.min() < (1 if chain else 0):
            raise ValueError(
                f"{counts.min()} nodes of cell {cell.name} in a request; there must be at least {1 if chain else 0}"
            )
        total = int(counts.sum())
        values = []
        for name, kind, shape in cell.given:
            if name not in inputs:
                raise ValueError(f"cell {cell.name} needs the value {name}")
            values.append(value_array(cell, name, inputs.pop(name), kind, (total, *shape)))
        block = BatchBlock(cell, counts, values, chain, stop)
        if inputs:
            self._read(block, inputs)
        self.blocks.append(block)
        self.nodes = self.nodes + counts
        return len(self.blocks) - 1

    def _read(self, block: BatchBlock, inputs: Mapping[str, Any]) -> None:
        """Record the outputs that a block's State inputs read, after checking that they fit."""
        cell = block.cell
        blocks = self.blocks if block.chain else [*self.blocks, block]  # nodes of one call may read one another
        counts = np.stack([each.counts for each in blocks]) if blocks else np.zeros((0, self.requests), np.int64)
        chains = np.array([each.chain for each in blocks], np.bool_)
        readers = np.ones(self.requests, np.int64) if block.chain else block.counts
        total = int(readers.sum())
        found: dict[int, tuple[int, int]] = {}
        for name, given in inputs.items():
            wanted = cell.takes.get(name)
            if wanted is None:
                raise ValueError(f"cell {cell.name} has no input {name}; it has {', '.join(cell.inputs)}")
            if not isinstance(given, (tuple, list)) or len(given) != 2:
                raise ValueError(f"input {name} of cell {cell.name} must be a pair: nodes, and their output")
            nodes, output = given
            if id(nodes) not in found:
                column = np.array(nodes, np.intp).reshape(-1)
                if len(column) != total:
                    raise ValueError(f"input {name} of cell {cell.name} names {len(column)} nodes; it needs {total}")
                misplaced, inside, named = _check_named(column, readers, block.chain, self.nodes, counts, chains)
                if misplaced >= 0:
                    raise ValueError(
                        f"input {name} of cell {cell.name} names node {column[misplaced]}, "
                        "which does not come before it in its request"
                    )
                if inside >= 0:
                    raise ValueError(
                        f"input {name} of cell {cell.name} reads node {column[inside]}, which is within a chain; "
                        "in a batch, only the last node of a chain is read"
                    )
                found[id(nodes)] = len(block.columns), named
                block.columns.append(column)
            place, named = found[id(nodes)]
            for number, other in enumerate(blocks):
                if named >> number & 1:
                    if other.stop is not None:
                        raise ValueError(f"a chain of cell {other.cell.name} that may stop is read by another node")
                    if other.cell.gives.get(output) != wanted:
                        raise ValueError(misfit(cell, name, other.cell, output))
            block.reads.append((name, output, place))


@compiled
def _check_named(
    column: np.ndarray,
    readers: np.ndarray,
    chain: bool,
    before: np.ndarray,
    counts: np.ndarray,
    chains: np.ndarray,
) -> tuple[int, int, int]:
    """Check the nodes that a block reads: `readers[r]` entries of `column` for each request r.

    `before` [requests] is the number of nodes of earlier blocks, `counts` [blocks, requests] that of each block, and
    `chains` [blocks] whether it is a chain. Returns the first index that does not come before its reader, the first
    within a chain (each -1 if there is none), and the blocks that are read, as bits.
    """
    at = named = 0
    for request in range(len(readers)):
        for place in range(readers[request]):
            node = column[at]
            if node < ZEROS or node >= before[request] + (0 if chain else place):
                return at, -1, named
            if node >= 0:
                block = 0
                while node >= counts[block, request]:
                    node -= counts[block, request]
                    block += 1
                if chains[block] and node != counts[block, request] - 1:
                    return -1, at, named
                named |= 1 << block
            at += 1
    return -1, -1, named
