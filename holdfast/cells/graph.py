"""CellGraph: one request as nodes and the edges between them, and how graphs are split into subgraphs. Pure.

graph = CellGraph()
leaves = graph.add(leaf, 3, token=[4, 8, 15])
inner = graph.add(internal, 1, left_h=(leaves[:1], "h"), right_h=(leaves[1:2], "h"))
steps = graph.chain(lstm, 5, token=tokens, h=(inner[0], "h"))
graph.result("label", steps, "label")
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any, NamedTuple

import numpy as np

from holdfast.cells.cell import Cell, Spec

ZEROS = -1
"""In place of a node: a State input of zeros."""
FEW = 16
"""Nodes are looked up one by one among more than so many blocks for each."""
_FIRST = attrgetter("first")


class Read(NamedTuple):
    """A State input of a block: whose outputs it reads."""

    input: str
    output: str
    column: int
    """Which of the block's columns names the nodes."""


@dataclass(slots=True)
class Block:
    """Nodes of one call of `add` or `chain`. Their ids follow one another."""

    cell: Cell
    first: int
    count: int
    values: list[np.ndarray]
    """For each Value input of the cell: [count, *shape]."""
    chain: bool
    stop: tuple[str, int] | None
    """The chain ends early, at a step whose output of this name has this value."""
    columns: list[np.ndarray] = field(default_factory=list)
    """Ids of the nodes whose outputs are read, or ZEROS: [count], or [1] for a chain. No two are the same array."""
    reads: list[Read] = field(default_factory=list)
    whole: bool = False
    """A chain of which no node but the last is read from outside. It is one row."""

    @property
    def rows(self) -> int:
        return 1 if self.whole else self.count

    def unrolled(self) -> Block:
        """A chain as a block of single nodes, each of which reads the one before."""
        before = np.arange(self.first - 1, self.first + self.count - 1)
        columns = [np.full(self.count, column[0]) for column in self.columns]
        reads = [read for read in self.reads if read.input not in self.cell.carried]
        begin = {read.input: read for read in self.reads if read.input in self.cell.carried}
        for name in self.cell.carried:
            if name in begin:
                begun = before.copy()
                begun[0] = self.columns[begin[name].column][0]
                # The first step may read another output than the later ones.
                same = begin[name].output == name or begun[0] == ZEROS
                if not same:
                    first = np.full(self.count, ZEROS)
                    first[0], begun[0] = begun[0], ZEROS
                    reads.append(Read(name, begin[name].output, len(columns)))
                    columns.append(first)
            else:
                begun = before.copy()
                begun[0] = ZEROS
            reads.append(Read(name, name, len(columns)))
            columns.append(begun)
        return Block(self.cell, self.first, self.count, self.values, False, None, columns, reads)


class Result(NamedTuple):
    """A named result of a request: one output of each of these rows, all steps one after the other."""

    name: str
    output: str
    rows: list[int]


class CellGraph:
    """The nodes of one request. Nodes are numbered in the order in which they are added.

    Arrays that it is given are not copied: do not change them later.
    """

    __slots__ = ("_chains", "blocks", "constants", "nodes", "results", "rows")

    def __init__(self) -> None:
        self.blocks: list[Block] = []
        self.nodes = 0
        """How many there are."""
        self.rows = 0
        """The same, where a chain that is one row counts as one."""
        self.results: list[tuple[str, str, Sequence[int]]] = []
        """Name, output, and nodes of each."""
        self.constants: dict[str, np.ndarray] = {}
        """Results that are known without any node, by name."""
        self._chains: list[Block] = []

    def add(self, cell: Cell, count: int = 1, /, **inputs: Any) -> range:
        """Add `count` nodes of one cell; their ids.

        A Value input is an array [count, *shape]. A State input is a pair: the ids of the nodes that it comes from, one
        for each new node or ZEROS, and the name of their output. A State input that is left out is zeros. Nodes of the
        same call may be named, if they come before. Raises ValueError for what does not fit.
        """
        return self._add(cell, count, inputs, False, None)

    def chain(self, cell: Cell, steps: int, /, *, stop: tuple[str, int] | None = None, **inputs: Any) -> range:
        """Add a chain of `steps` nodes; their ids.

        State inputs that have an output's name come from the step before; what is given for them, as (id, output), is
        for the first step. Other State inputs, as (id, output), are the same for each step.
        With `stop` the chain ends at the first step whose returned scalar output of that name has that value; no other
        node may then read its outputs, because steps beyond it may have run already. Raises ValueError for what does
        not fit.
        """
        if not cell.carried:
            raise ValueError(
                f"cell {cell.name} has no State input with an output's name, so it makes no chain; use add"
            )
        if stop is not None and (stop[0] not in cell.returned or cell.outputs[stop[0]].shape):
            raise ValueError(f"a chain of cell {cell.name} cannot stop by {stop[0]}; it must be a returned scalar")
        return self._add(cell, steps, inputs, True, stop)

    def result(self, name: str, nodes: int | Sequence[int], output: str) -> None:
        """Name a result: a returned output of these nodes [nodes, *shape], in their order.

        Of a chain that is not read before its end, all nodes must be named, one after the other. If it stops early, the
        result has no more than its steps up to there.
        """
        self.results.append((name, output, (nodes,) if isinstance(nodes, (int, np.integer)) else nodes))

    def constant(self, name: str, value: np.ndarray) -> None:
        """Name a result that is known already, such as the words of a sentence; it passes to `finish` as it is."""
        self.constants[name] = value

    def partition(self, types: Mapping[Cell, int]) -> Partition:
        """Split this graph into rows and subgraphs. Raises ValueError for cells and results that do not fit."""
        splitter = Splitter(types)
        splitter.check(self)
        return splitter.split([self])

    def _add(self, cell: Cell, count: int, inputs: dict[str, Any], chain: bool, stop: tuple[str, int] | None) -> range:
        if count < 1:
            raise ValueError(f"{count} nodes of cell {cell.name}; there must be at least 1")
        values = []
        for name in cell.values:
            if name not in inputs:
                raise ValueError(f"cell {cell.name} needs the value {name}")
            values.append(_value(cell, name, inputs.pop(name), count))
        block = Block(cell, self.nodes, count, values, chain, stop, whole=chain)
        if inputs:
            self._read(block, inputs)
        self.blocks.append(block)
        if chain:
            self._chains.append(block)
        self.nodes += count
        self.rows += 1 if chain else count
        return range(block.first, block.first + count)

    def _read(self, block: Block, inputs: dict[str, Any]) -> None:
        """Note what a block's State inputs read, once it is known to fit."""
        cell = block.cell
        end = np.arange(block.first, block.first + (1 if block.chain else block.count))
        others = {other.cell for other in self.blocks}
        if not block.chain:
            others.add(cell)
        found: dict[int, int] = {}
        for name, given in inputs.items():
            if name not in cell.states:
                raise ValueError(f"cell {cell.name} has no input {name}; it has {', '.join(cell.inputs)}")
            if not isinstance(given, (tuple, list)) or len(given) != 2:
                raise ValueError(f"input {name} of cell {cell.name} must be a pair: nodes, and their output")
            nodes, output = given
            column = found.get(id(nodes))
            if column is None:
                column = found[id(nodes)] = len(block.columns)
                block.columns.append(_column(block, name, nodes, end))
            wanted = cell.inputs[name]
            for other in others:
                made = other.outputs.get(output)
                if made is None or made.shape != wanted.shape or made.dtype != wanted.dtype:
                    self._check_output(block, name, output, block.columns[column])
                    break
            block.reads.append(Read(name, output, column))
        for chain in self._chains:
            if chain.whole:
                self._cut_if_read_inside(chain, block)

    def _check_output(self, block: Block, name: str, output: str, column: np.ndarray) -> None:
        """Raise ValueError if a node of the column does not give such an output, or one that the input cannot take."""
        wanted = block.cell.inputs[name]
        for other in self._named(block, column):
            given = other.cell.outputs.get(output)
            if given is None or given.shape != wanted.shape or given.dtype != wanted.dtype:
                raise ValueError(_misfit(block.cell, name, wanted, other.cell, output))

    def _named(self, block: Block, column: np.ndarray) -> list[Block]:
        """The blocks of which a column of a new block names nodes, in order. The graph has them in that order, too."""
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
        """Make a chain single nodes if a block reads any but its last."""
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
                chain.whole = False
                self.rows += chain.count - 1
                return


def _value(cell: Cell, name: str, given: Any, count: int) -> np.ndarray:
    spec = cell.inputs[name]
    try:
        array = np.asarray(given, dtype=spec.dtype)
    except (TypeError, ValueError, OverflowError) as error:
        raise ValueError(f"value {name} of cell {cell.name} must be {spec.dtype}: {error}") from error
    if array.shape != (count, *spec.shape):
        raise ValueError(
            f"value {name} of cell {cell.name} has the shape {list(array.shape)}; it needs {[count, *spec.shape]}"
        )
    return array


def _column(block: Block, name: str, nodes: Any, end: np.ndarray) -> np.ndarray:
    """The nodes that an input names, each of which must be below its `end`."""
    column = np.asarray(nodes, dtype=np.intp)
    if column.ndim != 1:
        column = column.reshape(-1)
    if len(column) != len(end):
        raise ValueError(f"input {name} of cell {block.cell.name} names {len(column)} nodes; it needs {len(end)}")
    if len(column) == 1:
        fits = ZEROS <= column.item() < block.first
    else:
        fits = not np.count_nonzero((column < ZEROS) | (column >= end))
    if not fits:
        node = column[(column < ZEROS) | (column >= end)][0]
        raise ValueError(f"input {name} of cell {block.cell.name} names node {node}, which does not come before it")
    return column


def _misfit(cell: Cell, name: str, wanted: Spec, producer: Cell, output: str) -> str:
    given = producer.outputs.get(output)
    if given is None:
        return f"cell {producer.name} has no output {output}; it has {', '.join(producer.outputs)}"
    return (
        f"input {name} of cell {cell.name} is {wanted.dtype}{list(wanted.shape)}, and output {output} of "
        f"cell {producer.name} is {given.dtype}{list(given.shape)}"
    )


@dataclass(slots=True)
class Partition:
    """Graphs as rows, numbered one graph after the other, and subgraphs (BatchMaker, section 2.4.3).

    A row is a node, or a whole chain. A subgraph is known by its first row. Arrays are of intp.
    """

    first: np.ndarray
    """[graphs]: the first row of each graph."""
    types: np.ndarray
    """[rows]"""
    steps: np.ndarray
    """[rows]: nodes of each row."""
    subgraph: np.ndarray
    """[rows]: the first row of its subgraph."""
    reader: np.ndarray
    """[edges]: a row that reads outputs of another. There may be several edges between the same two."""
    producer: np.ndarray
    """[edges]: the row that it reads."""
    inputs: np.ndarray
    """[4, State inputs that are not zeros]: the row, the row it reads, which State input of its cell, which output.

    Outputs are numbered by the Splitter's `outputs`. For a chain these are the inputs of its first step."""


class Splitter:
    """Checks and splits the graphs of one application."""

    def __init__(self, types: Mapping[Cell, int]) -> None:
        """`types` numbers the cells from 0; cells that are equal have one number."""
        self._types = types
        self._circles: dict[tuple[int, ...], bool] = {}
        names = dict.fromkeys(name for cell in types for name in cell.outputs)
        self.outputs = {name: number for number, name in enumerate(names)}
        """The number of each output name."""
        self._input = {cell: {name: number for number, name in enumerate(cell.states)} for cell in types}

    def check(self, graph: CellGraph) -> list[Result]:
        """The results that a graph names, by rows. Raises ValueError for cells and results that do not fit."""
        for block in graph.blocks:
            if block.cell not in self._types:
                raise ValueError(f"cell {block.cell.name} is not one of the application's cells")
        results = [Result(name, output, _rows_of(graph, name, output, nodes)) for name, output, nodes in graph.results]
        if len(results) > 1 and len({result.name for result in results}) < len(results):
            raise ValueError(f"two results have one name: {', '.join(result.name for result in results)}")
        return results

    def split(self, graphs: Sequence[CellGraph]) -> Partition:
        """Split graphs, which were checked, into rows and subgraphs.

        A subgraph is a set of connected nodes of one type. If in a graph types read one another in a circle, nodes of
        it are connected only where as many changes of type lie on the longest paths that lead to them: then no two
        subgraphs wait for each other.
        """
        first: list[int] = []
        blocks: list[int] = []  # of each: type, rows, nodes of each row
        columns: list[np.ndarray] = []
        of_column: list[int] = []  # of each: rows, the first of them, the first node of the graph
        reads: list[int] = []  # of each: column, State input, output
        row = node = 0
        for graph in graphs:
            first.append(row)
            for block in graph.blocks:
                if block.chain and not block.whole:
                    block = block.unrolled()
                rows = block.rows
                blocks += self._types[block.cell], rows, block.count if block.whole else 1
                if block.reads:
                    numbers, begin = self._input[block.cell], len(columns)
                    for name, output, column in block.reads:
                        reads += begin + column, numbers[name], self.outputs[output]
                    for nodes in block.columns:
                        columns.append(nodes)
                        of_column += rows, row, node
                row += rows
            node += graph.nodes
        type_of, rows_of, steps_of = _threes(blocks)
        types, steps = type_of.repeat(rows_of), steps_of.repeat(rows_of)
        if not columns:
            none = np.zeros(0, np.intp)
            return Partition(np.array(first), types, steps, np.arange(row), none, none, np.zeros((4, 0), np.intp))
        lengths, begins, bases = _threes(of_column)
        ends = lengths.cumsum()
        starts = ends - lengths
        producer = np.concatenate(columns)
        real = producer >= 0
        producer += bases.repeat(lengths)
        if node != row:
            producer = np.arange(row).repeat(steps)[producer]
        reader = np.arange(ends[-1]) + (begins - starts).repeat(lengths)
        column, number, output_of = _threes(reads)
        lengths = lengths[column]
        ends = lengths.cumsum()
        edge = np.arange(ends[-1]) + (starts[column] - ends + lengths).repeat(lengths)
        inputs = np.empty((4, len(edge)), np.intp)
        reader.take(edge, out=inputs[0])
        producer.take(edge, out=inputs[1])
        inputs[2], inputs[3] = number.repeat(lengths), output_of.repeat(lengths)
        if np.count_nonzero(real) < len(real):
            inputs = inputs[:, real[edge]]
            reader, producer = reader[real], producer[real]
        found = Partition(np.array(first), types, steps, types, reader, producer, inputs)
        found.subgraph = self._subgraphs(found)
        return found

    def _subgraphs(self, found: Partition) -> np.ndarray:
        types, reader, producer = found.types, found.reader, found.producer
        from_type, to_type = types[producer], types[reader]
        same = from_type == to_type
        if self._in_a_circle(from_type, to_type):
            graph = np.searchsorted(found.first, reader, side="right")
            for number in np.unique(graph):
                mine = np.flatnonzero(graph == number)
                if self._in_a_circle(from_type[mine], to_type[mine]):
                    same[mine] &= _level(reader[mine], producer[mine], same[mine])
        return _connected(len(types), reader[same], producer[same])

    def _in_a_circle(self, from_type: np.ndarray, to_type: np.ndarray) -> bool:
        """Whether types read one another in a circle of more than one."""
        count = len(self._input)
        seen = np.zeros(count * count, bool)
        seen[from_type * count + to_type] = True
        pairs = tuple(np.flatnonzero(seen).tolist())
        if pairs not in self._circles:
            left = {divmod(pair, count) for pair in pairs if pair // count != pair % count}
            while left and (ends := {given for given, _ in left} - {reads for _, reads in left}):
                left = {pair for pair in left if pair[0] not in ends}
            self._circles[pairs] = bool(left)
        return self._circles[pairs]


def _threes(numbers: list[int]) -> np.ndarray:
    """[3, numbers // 3]: the first of each three, the second, and the third."""
    return np.array(numbers, np.intp).reshape(-1, 3).T


def _level(reader: np.ndarray, producer: np.ndarray, same: np.ndarray) -> np.ndarray:
    """Which edges of a graph join rows with as many changes of type on the longest paths to them."""
    changes: dict[int, int] = {}
    order = np.argsort(reader, kind="stable")
    for to, given, alike in zip(reader[order].tolist(), producer[order].tolist(), same[order].tolist(), strict=True):
        changes[to] = max(changes.get(to, 0), changes.get(given, 0) + (not alike))
    level = [changes[to] == changes.get(given, 0) for to, given in zip(reader.tolist(), producer.tolist(), strict=True)]
    return np.array(level, bool)


def _connected(rows: int, one: np.ndarray, other: np.ndarray) -> np.ndarray:
    """The smallest row that each row is connected with, by these edges."""
    # Each set is known by its greatest row until the end: in a tree, where one row reads each, one round finds it.
    own = np.arange(rows)
    greatest = own
    while True:
        high, low = greatest[one], greatest[other]
        apart = high != low
        if not np.count_nonzero(apart):
            break
        high, low = high[apart], low[apart]
        greatest = greatest.copy()
        np.maximum.at(greatest, np.minimum(high, low), np.maximum(high, low))
        while np.count_nonzero((further := greatest[greatest]) != greatest):
            greatest = further
    least = own.copy()
    np.minimum.at(least, greatest, own)
    found: np.ndarray = least[greatest]
    return found


def _rows_of(graph: CellGraph, name: str, output: str, nodes: Sequence[int]) -> list[int]:
    """The rows of a result. Raises ValueError if they do not return such an output, or are part of a longer row."""
    blocks = graph.blocks
    whole = len(blocks) == 1 and blocks[0].whole and isinstance(nodes, range) and nodes == range(blocks[0].count)
    if whole and output in blocks[0].cell.returned:
        return [0]
    if not len(nodes):
        raise ValueError(f"result {name} names no nodes; it needs at least 1")
    chosen = []
    at = 0
    while at < len(nodes):
        node = int(nodes[at])
        if not 0 <= node < graph.nodes:
            raise ValueError(f"result {name} names node {node}; there are {graph.nodes}")
        row = graph.rows
        for block in reversed(blocks):
            row -= block.rows
            if node >= block.first:
                break
        if output not in block.cell.returned:
            raise ValueError(f"result {name}: cell {block.cell.name} does not return an output {output}")
        if block.whole:
            if node != block.first or list(nodes[at : at + block.count]) != list(range(node, node + block.count)):
                raise ValueError(f"result {name} names a part of a chain of {block.count} steps; name all of it")
            chosen.append(row)
            at += block.count
        else:
            chosen.append(row + node - block.first)
            at += 1
    return chosen
