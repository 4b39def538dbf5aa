"""CellGraph: one request as nodes and the edges between them. Pure.

graph = CellGraph()
leaves = graph.add(leaf, 3, token=[4, 8, 15])
inner = graph.add(internal, 1, left_h=(leaves[:1], "h"), right_h=(leaves[1:2], "h"))
steps = graph.chain(lstm, 5, token=tokens, h=(inner[0], "h"))
graph.result("label", steps, "label")
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

import numpy as np

from holdfast.cells.cell import Cell
from holdfast.cells.compiled import compiled

ZEROS = -1
"""The node number that stands for a State input of zeros."""
FEW = 16
"""Largest number of blocks per node for which the block of each node is looked up separately."""
_FIRST = attrgetter("first")


Read = tuple[str, str, int]
"""A State input of a block: its name, the name of the output that it reads, and an index in `Block.columns`.

The array at that index holds the ids of the nodes whose output is read.
"""


@dataclass(slots=True)
class Block:
    """The nodes of one call of `add` or `chain`. Their ids are consecutive."""

    cell: Cell
    first: int
    count: int
    values: list[np.ndarray]
    """For each Value input of the cell, its values [count, *shape]."""
    chain: bool
    stop: tuple[str, int] | None
    """The returned output and the value at which the chain ends early; None if it does not."""
    whole: bool
    """Whether this is a chain whose outputs other blocks read only at its last node. It is then one row."""
    rows: int
    """Number of rows: 1 if `whole`, else `count`."""
    columns: Sequence[np.ndarray] = ()
    """Arrays of ids of the nodes whose outputs are read, or ZEROS: [count], or [1] for a chain.

    No two are the same object.
    """
    reads: Sequence[Read] = ()

    def unrolled(self) -> Block:
        """The chain as a block of single nodes, each of which reads the previous one."""
        before = np.arange(self.first - 1, self.first + self.count - 1)
        columns = [np.full(self.count, column[0]) for column in self.columns]
        reads = [read for read in self.reads if read[0] not in self.cell.carried]
        begin = {name: (output, self.columns[column][0]) for name, output, column in self.reads}
        for name in self.cell.carried:
            begun = before.copy()
            output, begun[0] = begin.get(name, (name, ZEROS))
            if output != name and begun[0] != ZEROS:
                # The first step reads a different output from the later ones.
                first = np.full(self.count, ZEROS)
                first[0], begun[0] = begun[0], ZEROS
                reads.append((name, output, len(columns)))
                columns.append(first)
            reads.append((name, name, len(columns)))
            columns.append(begun)
        return Block(self.cell, self.first, self.count, self.values, False, None, False, self.count, columns, reads)


class CellGraph:
    """The nodes of one request. Nodes are numbered in the order in which they are added.

    Given arrays are not copied: do not change them later.
    """

    __slots__ = (
        "_cells",
        "_chains",
        "_common",
        "_noted",
        "blocks",
        "chains_stop",
        "constants",
        "nodes",
        "results",
        "rows",
    )

    def __init__(self) -> None:
        self.blocks: list[Block] = []
        self.nodes = 0
        """Number of nodes so far."""
        self.rows = 0
        """Number of rows so far. A chain that is one row counts as one."""
        self.results: list[tuple[str, str, Sequence[int]]] = []
        """For each result: its name, its output, and its nodes."""
        self.constants: dict[str, np.ndarray] = {}
        """Results that are known without running any node, by name."""
        self.chains_stop = False
        """Whether any chain may end early."""
        self._noted = 0
        """Number of blocks whose cells are in `_cells`. Only graphs with edges need these, so `_read` adds the rest."""
        self._cells: set[Cell] | None = None
        self._common: Mapping[str, tuple[tuple[int, ...], str]] = {}
        """Shape and dtype, by name, of the outputs that all cells in `_cells` have in common."""
        self._chains: list[Block] = []

    def add(self, cell: Cell, count: int = 1, /, **inputs: Any) -> range:
        """Add `count` nodes of one cell. Returns their ids.

        A Value input is an array [count, *shape]. A State input is a pair: node ids, one for each new node or ZEROS,
        and the name of the output of these nodes that it reads. A State input that is left out is zeros. Earlier nodes
        of the same call may be named. Raises ValueError for inputs that do not fit.
        """
        return self._add(cell, count, inputs, False, None)

    def chain(self, cell: Cell, steps: int, /, *, stop: tuple[str, int] | None = None, **inputs: Any) -> range:
        """Add a chain of `steps` nodes. Returns their ids.

        State inputs with the name of an output come from the previous step; an (id, output) given for such an input is
        for the first step. Other State inputs, as (id, output), are equal in all steps. With `stop`, the chain ends at
        the first step whose returned scalar output of that name has that value. No other node may then read the chain's
        outputs, because later steps may have run already. Raises ValueError for inputs that do not fit.
        """
        check_chain(cell, stop)
        return self._add(cell, steps, inputs, True, stop)

    def result(self, name: str, nodes: int | Sequence[int], output: str) -> None:
        """Name a result: a returned output of these nodes [nodes, *shape], in their order.

        If a chain is read only at its end, all its nodes must be named, in order. If it stops early, the result has
        only the steps up to the stop.
        """
        self.results.append((name, output, (nodes,) if isinstance(nodes, (int, np.integer)) else nodes))

    def constant(self, name: str, value: np.ndarray) -> None:
        """Name a result that is known already, such as the words of a sentence. `finish` receives it unchanged."""
        self.constants[name] = value

    def _add(self, cell: Cell, count: int, inputs: dict[str, Any], chain: bool, stop: tuple[str, int] | None) -> range:
        if count < 1:
            raise ValueError(f"{count} nodes of cell {cell.name}; there must be at least 1")
        values = []
        for name, kind, shape in cell.given:
            if name not in inputs:
                raise ValueError(f"cell {cell.name} needs the value {name}")
            given, whole = inputs.pop(name), (count, *shape)
            if type(given) is not np.ndarray or given.dtype is not kind or given.shape != whole:
                given = value_array(cell, name, given, kind, whole)
            values.append(given)
        first, rows = self.nodes, 1 if chain else count
        block = Block(cell, first, count, values, chain, stop, chain, rows)
        if inputs:
            self._read(block, inputs)
        if chain:
            self._chains.append(block)
            self.chains_stop |= stop is not None
        self.rows += rows
        self.blocks.append(block)
        self.nodes = first + count
        return range(first, first + count)

    def _note_outputs(self, cell: Cell) -> None:
        """Update `_common` with a cell: it keeps the outputs that all cells of the graph have in common."""
        if self._cells is None:
            self._cells, self._common = {cell}, cell.gives
        elif cell not in self._cells:
            gives = cell.gives
            self._common = {name: kind for name, kind in self._common.items() if gives.get(name) == kind}
            self._cells.add(cell)

    def _read(self, block: Block, inputs: dict[str, Any]) -> None:
        """Record the outputs that a block's State inputs read, after checking that they fit."""
        for earlier in self.blocks[self._noted :]:
            self._note_outputs(earlier.cell)
        self._noted = len(self.blocks)
        if not block.chain:  # nodes of one call may read one another
            self._note_outputs(block.cell)
        takes, common = block.cell.takes, self._common
        columns: list[np.ndarray] = []
        reads: list[Read] = []
        block.columns, block.reads = columns, reads
        found: dict[int, int] = {}
        for name, given in inputs.items():
            wanted = takes.get(name)
            if wanted is None:
                raise ValueError(f"cell {block.cell.name} has no input {name}; it has {', '.join(block.cell.inputs)}")
            if not isinstance(given, (tuple, list)) or len(given) != 2:
                raise ValueError(f"input {name} of cell {block.cell.name} must be a pair: nodes, and their output")
            nodes, output = given
            column = found.get(id(nodes))
            if column is None:
                column = found[id(nodes)] = len(columns)
                columns.append(_column(block, name, nodes))
            if common.get(output) != wanted:
                self._check_output(block, name, output, columns[column])
            reads.append((name, output, column))
        for chain in self._chains:
            if chain.whole:
                self._cut_if_read_inside(chain, block)

    def _check_output(self, block: Block, name: str, output: str, column: np.ndarray) -> None:
        """Raise ValueError if a node of the column lacks this output, or if the input cannot take it."""
        wanted = block.cell.takes[name]
        for other in self._named(block, column):
            if other.cell.gives.get(output) != wanted:
                raise ValueError(misfit(block.cell, name, other.cell, output))

    def _named(self, block: Block, column: np.ndarray) -> list[Block]:
        """The blocks whose nodes a column of a new block names, in the order of the graph."""
        blocks = self.blocks
        if len(column) == 1 or FEW * len(column) < len(blocks):
            own = len(blocks)
            numbers = {
                bisect_right(blocks, node, key=_FIRST) - 1 if node < block.first else own for node in column.tolist()
            }
        else:
            firsts = np.array([*map(_FIRST, blocks), block.first])
            numbers = set((np.searchsorted(firsts, column, side="right") - 1).tolist())
        return [block if number == len(blocks) else blocks[number] for number in sorted(numbers - {ZEROS})]

    def _cut_if_read_inside(self, chain: Block, block: Block) -> None:
        """Split a chain into single nodes if a block reads a node other than its last."""
        last = chain.first + chain.count - 1
        end = last if chain.stop is None else last + 1
        for column in block.columns:
            if len(column) == 1:
                inside = chain.first <= column.item() < end
            else:
                inside = np.count_nonzero((column >= chain.first) & (column < end)) > 0
            if inside and chain.stop is not None:
                raise ValueError(f"a chain of cell {chain.cell.name} that may stop is read by another node")
            if inside:
                chain.whole, chain.rows = False, chain.count
                self.rows += chain.count - 1
                return


def check_chain(cell: Cell, stop: tuple[str, int] | None) -> None:
    """Raise ValueError for a cell that makes no chain, or an output by which a chain cannot stop."""
    if not cell.carried:
        raise ValueError(f"cell {cell.name} has no State input with an output's name, so it makes no chain; use add")
    if stop is not None and (stop[0] not in cell.returned or cell.outputs[stop[0]].shape):
        raise ValueError(f"a chain of cell {cell.name} cannot stop by {stop[0]}; it must be a returned scalar")


def value_array(cell: Cell, name: str, given: Any, dtype: np.dtype, shape: tuple[int, ...]) -> np.ndarray:
    """A Value input as an array of this dtype and shape. Raises ValueError if it does not fit."""
    try:
        array = np.asarray(given, dtype)
    except (TypeError, ValueError, OverflowError) as error:
        raise ValueError(f"value {name} of cell {cell.name} must be {dtype}: {error}") from error
    if array.shape != shape:
        raise ValueError(f"value {name} of cell {cell.name} has the shape {list(array.shape)}; it needs {list(shape)}")
    return array


def _column(block: Block, name: str, nodes: Any) -> np.ndarray:
    """The nodes that an input names. Each must come before the node that reads it."""
    column = np.ascontiguousarray(nodes, dtype=np.intp)
    if column.ndim != 1:
        column = column.reshape(-1)
    count = 1 if block.chain else block.count
    if len(column) != count:
        raise ValueError(f"input {name} of cell {block.cell.name} names {len(column)} nodes; it needs {count}")
    if count == 1:
        misplaced = -1 if ZEROS <= column.item() < block.first else 0
    else:
        misplaced = _first_misplaced(column if column.flags.writeable else column.copy(), block.first)
    if misplaced >= 0:
        raise ValueError(
            f"input {name} of cell {block.cell.name} names node {column[misplaced]}, which does not come before it"
        )
    return column


@compiled
def _first_misplaced(column: np.ndarray, first: int) -> int:
    """The first index at which a column names a node that does not come before its reader; -1 if there is none.

    The readers are numbered from `first` on.
    """
    for place in range(len(column)):
        if column[place] < ZEROS or column[place] >= first + place:
            return place
    return -1


def misfit(cell: Cell, name: str, producer: Cell, output: str) -> str:
    """Why a State input of a cell cannot take an output of another one."""
    wanted, given = cell.inputs[name], producer.outputs.get(output)
    if given is None:
        return f"cell {producer.name} has no output {output}; it has {', '.join(producer.outputs)}"
    return (
        f"input {name} of cell {cell.name} is {wanted.dtype}{list(wanted.shape)}, and output {output} of "
        f"cell {producer.name} is {given.dtype}{list(given.shape)}"
    )
