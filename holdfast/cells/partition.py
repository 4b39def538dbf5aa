"""The split of graphs into rows and subgraphs (BatchMaker, section 2.4.3). Pure."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from holdfast.cells.cell import Cell
from holdfast.cells.compiled import compiled
from holdfast.cells.graph import Block, CellGraph
from holdfast.cells.graph_batch import GraphBatch


class Part(NamedTuple):
    """Consecutive nodes of one block, from `begin` to `end`, counted within the block."""

    block: int
    begin: int
    end: int


class Result(NamedTuple):
    """A named result of a request: one output of these nodes, one part after the other."""

    name: str
    output: str
    parts: list[Part]


class Partition(NamedTuple):
    """Graphs as rows, numbered one graph after the other, and subgraphs (BatchMaker, section 2.4.3).

    A row is a node, or a whole chain. A subgraph is identified by its first row. Arrays have dtype intp.
    """

    first: np.ndarray
    """The first row of each graph, [graphs]."""
    types: np.ndarray
    """The type of each row, [rows]."""
    steps: np.ndarray
    """Number of nodes of each row, [rows]."""
    subgraph: np.ndarray
    """The first row of each row's subgraph, [rows]."""
    reader: np.ndarray
    """The row that reads, [edges]. There may be several edges between the same two rows."""
    producer: np.ndarray
    """The row that is read, [edges]."""
    inputs: np.ndarray
    """The State inputs that are not zeros, [inputs, 4]: the row, the row it reads, the input's number, the output.

    Outputs are numbered by the Splitter's `outputs`. For a chain these are the inputs of its first step.
    """


class Splitter:
    """Checks and splits the graphs of one application."""

    def __init__(self, types: Mapping[Cell, int]) -> None:
        """`types` numbers the cells from 0. Equal cells have the same number."""
        self._types = types
        names = dict.fromkeys(name for cell in types for name in cell.outputs)
        self.outputs = {name: number for number, name in enumerate(names)}
        """The number of each output name."""
        self._input = {cell: {name: number for number, name in enumerate(cell.states)} for cell in types}

    def check(self, graph: CellGraph) -> list[Result]:
        """The results that a graph names. Raises ValueError for cells and results that do not fit."""
        types = self._types
        for block in graph.blocks:
            if block.cell not in types:
                raise ValueError(f"cell {block.cell.name} is not one of the application's cells")
        results = [Result(name, output, _parts_of(graph, name, output, nodes)) for name, output, nodes in graph.results]
        if len(results) > 1 and len({result.name for result in results}) < len(results):
            raise ValueError(f"two results have one name: {', '.join(result.name for result in results)}")
        return results

    def split(self, graphs: Sequence[CellGraph]) -> Partition:
        """Split graphs that have been checked into rows and subgraphs.

        A subgraph is a set of connected nodes of one type. If types of a graph read one another in a circle, two
        subgraphs could wait for each other. In such a graph, nodes are therefore connected only if the longest paths
        that lead to them have equally many changes of type.
        """
        types, inputs, outputs = self._types, self._input, self.outputs
        if all(graph.rows == 1 for graph in graphs):
            return self._split_chains(graphs)
        counts: list[int] = []  # for each graph: rows, nodes
        blocks: list[int] = []  # for each block: type, rows, nodes of each row
        columns: list[np.ndarray] = []
        of_column: list[int] = []  # for each column: the first row that reads by it, the first node of the graph
        reads: list[int] = []  # for each read: column, State input, output
        row = node = 0
        for graph in graphs:
            counts += graph.rows, graph.nodes
            for block in graph.blocks:
                if block.chain and not block.whole:
                    block = block.unrolled()
                cell, rows = block.cell, block.rows
                blocks += types[cell], rows, block.count if block.whole else 1
                if block.reads:
                    numbers, begin = inputs[cell], len(columns)
                    for name, output, column in block.reads:
                        reads += begin + column, numbers[name], outputs[output]
                    columns += block.columns
                    of_column += (row, node) * len(block.columns)
                row += rows
            node += graph.nodes
        none = np.zeros(0, np.intp)
        return Partition(
            *_split(
                len(self._input),
                np.array(counts, np.intp).reshape(-1, 2),
                np.array(blocks, np.intp).reshape(-1, 3),
                np.array([len(column) for column in columns], np.intp),
                np.array(of_column, np.intp).reshape(-1, 2),
                np.concatenate(columns) if columns else none,
                np.array(reads, np.intp).reshape(-1, 3),
            )
        )

    def split_batch(self, batch: GraphBatch) -> Partition:
        """Split a batch whose cells have been checked into rows and subgraphs, as `split` does its graphs."""
        blocks, none = batch.blocks, np.zeros(0, np.intp)
        types = np.array([self._types[block.cell] for block in blocks], np.intp)
        if len(blocks) == 1 and blocks[0].chain and not blocks[0].reads:
            rows = np.arange(batch.requests)
            return Partition(rows, types.repeat(batch.requests), blocks[0].counts, rows, none, none, none.reshape(0, 4))
        columns: list[np.ndarray] = []
        block_of: list[int] = []
        reads: list[tuple[int, int, int]] = []  # column, State input, output
        for number, block in enumerate(blocks):
            inputs, begin = self._input[block.cell], len(columns)
            reads += [(begin + place, inputs[name], self.outputs[output]) for name, output, place in block.reads]
            columns += block.columns
            block_of += [number] * len(block.columns)
        ends = np.cumsum([len(column) for column in columns], dtype=np.intp)
        return Partition(
            *_split_batch(
                len(self._input),
                types,
                np.array([block.chain for block in blocks], np.bool_),
                np.stack([block.counts for block in blocks]),
                np.concatenate(columns) if columns else none,
                ends,
                np.array(block_of, np.intp),
                np.array(reads, np.intp).reshape(-1, 3),
            )
        )

    def _split_chains(self, graphs: Sequence[CellGraph]) -> Partition:
        """The Partition of graphs of one row each, which have no edges."""
        rows = np.arange(len(graphs))
        types = np.array([self._types[graph.blocks[0].cell] for graph in graphs], np.intp)
        steps = np.array([graph.nodes for graph in graphs], np.intp)
        none = np.zeros(0, np.intp)
        return Partition(rows, types, steps, rows, none, none, none.reshape(0, 4))


@compiled
def _split(
    types_count: int,
    counts: np.ndarray,
    blocks: np.ndarray,
    lengths: np.ndarray,
    of_column: np.ndarray,
    named: np.ndarray,
    reads: np.ndarray,
) -> tuple[np.ndarray, ...]:
    """The arrays of a Partition.

    `lengths` has the length of each column, and `named` all nodes that the columns name.
    """
    first = np.empty(len(counts), np.intp)
    total = nodes = 0
    for graph in range(len(counts)):
        first[graph] = total
        total += counts[graph, 0]
        nodes += counts[graph, 1]
    types, steps = np.empty(total, np.intp), np.empty(total, np.intp)
    at = 0
    for block in range(len(blocks)):
        for _ in range(blocks[block, 1]):
            types[at], steps[at] = blocks[block, 0], blocks[block, 2]
            at += 1
    row_of = np.empty(nodes if nodes != total else 0, np.intp)
    if nodes != total:
        at = 0
        for row in range(total):
            for _ in range(steps[row]):
                row_of[at] = row
                at += 1
    columns = len(lengths)
    begins = np.empty(columns, np.intp)
    reader, producer = np.empty(len(named), np.intp), np.empty(len(named), np.intp)
    edges = at = 0
    for column in range(columns):
        begins[column] = at
        for place in range(lengths[column]):
            if named[at] >= 0:
                node = named[at] + of_column[column, 1]
                producer[edges] = row_of[node] if nodes != total else node
                reader[edges] = of_column[column, 0] + place
                edges += 1
            at += 1
    reader, producer = reader[:edges], producer[:edges]
    count = 0
    for read in range(len(reads)):
        count += lengths[reads[read, 0]]
    inputs = np.empty((count, 4), np.intp)
    count = 0
    for read in range(len(reads)):
        column = reads[read, 0]
        for place in range(lengths[column]):
            node = named[begins[column] + place]
            if node >= 0:
                node += of_column[column, 1]
                inputs[count, 0] = of_column[column, 0] + place
                inputs[count, 1] = row_of[node] if nodes != total else node
                inputs[count, 2], inputs[count, 3] = reads[read, 1], reads[read, 2]
                count += 1
    subgraph = _subgraphs(types_count, first, types, reader, producer)
    return first, types, steps, subgraph, reader, producer, inputs[:count]


@compiled
def _split_batch(
    types_count: int,
    types: np.ndarray,
    chains: np.ndarray,
    counts: np.ndarray,
    named: np.ndarray,
    ends: np.ndarray,
    block_of: np.ndarray,
    reads: np.ndarray,
) -> tuple[np.ndarray, ...]:
    """The arrays of a Partition of a batch.

    `types` and `chains` [blocks] are those of the blocks, `counts` [blocks, requests] the numbers of nodes. `named` has
    the nodes that the columns name, one column after the other, `ends` the end of each column in it, and `block_of` the
    block that reads by it.
    """
    blocks, requests = counts.shape
    total = 0
    for block in range(blocks):
        total += requests if chains[block] else counts[block].sum()
    first = np.empty(requests, np.intp)
    row_types, steps = np.empty(total, np.intp), np.empty(total, np.intp)
    reader, producer = np.empty(len(named), np.intp), np.empty(len(named), np.intp)
    most = 0
    for read in range(len(reads)):
        column = reads[read, 0]
        most += ends[column] - (ends[column - 1] if column else 0)
    inputs = np.empty((most, 4), np.intp)
    next_of = np.zeros(len(ends), np.intp)  # the next entry of each column
    for column in range(1, len(ends)):
        next_of[column] = ends[column - 1]
    begins = np.empty(blocks, np.intp)  # the first row of each block of a request
    row_of = np.empty(len(named), np.intp)  # the row that each entry names; below 0 for zeros
    row = edges = count = 0
    for request in range(requests):
        first[request] = row
        for block in range(blocks):
            begins[block] = row
            nodes = counts[block, request]
            rows = 1 if chains[block] else nodes
            row_types[row : row + rows] = types[block]
            steps[row : row + rows] = nodes if chains[block] else 1
            row += rows
        for column in range(len(ends)):
            block = block_of[column]
            entries = 1 if chains[block] else counts[block, request]
            for place in range(entries):
                at = next_of[column] + place
                node, other = named[at], 0
                row_of[at] = -1
                if node >= 0:
                    while node >= counts[other, request]:
                        node -= counts[other, request]
                        other += 1
                    row_of[at] = begins[other] + (0 if chains[other] else node)
                    reader[edges], producer[edges] = begins[block] + place, row_of[at]
                    edges += 1
        for read in range(len(reads)):
            column = reads[read, 0]
            block = block_of[column]
            entries = 1 if chains[block] else counts[block, request]
            for place in range(entries):
                given = row_of[next_of[column] + place]
                if given >= 0:
                    inputs[count, 0], inputs[count, 1] = begins[block] + place, given
                    inputs[count, 2], inputs[count, 3] = reads[read, 1], reads[read, 2]
                    count += 1
        for column in range(len(ends)):
            block = block_of[column]
            next_of[column] += 1 if chains[block] else counts[block, request]
    subgraph = _subgraphs(types_count, first, row_types, reader[:edges], producer[:edges])
    return first, row_types, steps, subgraph, reader[:edges], producer[:edges], inputs[:count]


@compiled
def _subgraphs(
    types_count: int, first: np.ndarray, types: np.ndarray, reader: np.ndarray, producer: np.ndarray
) -> np.ndarray:
    """The smallest row of each row's subgraph."""
    edges = len(reader)
    same = types[reader] == types[producer]
    if _in_a_circle(types_count, types, reader, producer, 0, edges):
        # Edges of one graph are adjacent.
        begin = 0
        for graph in range(len(first)):
            beyond = first[graph + 1] if graph + 1 < len(first) else len(types)
            end = begin
            while end < edges and reader[end] < beyond:
                end += 1
            if _in_a_circle(types_count, types, reader, producer, begin, end):
                _part_by_level(first[graph], beyond, reader[begin:end], producer[begin:end], same[begin:end])
            begin = end
    found = np.arange(len(types))
    for edge in range(edges):
        if same[edge]:
            one, other = _root(found, reader[edge]), _root(found, producer[edge])
            found[max(one, other)] = min(one, other)
    for row in range(len(types)):
        found[row] = found[found[row]]  # a row's root comes before it, so the root's entry is final already
    return found


@compiled
def _root(parent: np.ndarray, row: int) -> int:
    while parent[row] != row:
        parent[row] = parent[parent[row]]
        row = parent[row]
    return row


@compiled
def _in_a_circle(
    types_count: int, types: np.ndarray, reader: np.ndarray, producer: np.ndarray, begin: int, end: int
) -> bool:
    """Whether two or more types read one another in a circle, by the edges from `begin` to `end`."""
    reads = np.zeros((types_count, types_count), np.bool_)
    for edge in range(begin, end):
        reads[types[reader[edge]], types[producer[edge]]] = True
    left = np.ones(types_count, np.bool_)
    changed = True
    while changed:
        changed = False
        for type_ in range(types_count):
            if left[type_]:
                waits = False
                for other in range(types_count):
                    waits |= other != type_ and left[other] and reads[type_, other]
                if not waits:
                    left[type_] = False
                    changed = True
    return bool(left.any())


@compiled
def _part_by_level(first: int, end: int, reader: np.ndarray, producer: np.ndarray, same: np.ndarray) -> None:
    """Clear `same` for a graph's edges between rows whose longest paths have different numbers of changes of type."""
    changes = np.zeros(end - first, np.intp)
    for edge in np.argsort(reader, kind="mergesort"):  # a row comes after all rows that it reads
        to, given = reader[edge] - first, producer[edge] - first
        changes[to] = max(changes[to], changes[given] + (0 if same[edge] else 1))
    for edge in range(len(reader)):
        same[edge] &= changes[reader[edge] - first] == changes[producer[edge] - first]


def _parts_of(graph: CellGraph, name: str, output: str, nodes: Sequence[int]) -> list[Part]:
    """The nodes of a result.

    Raises ValueError if they do not return this output, or are only a part of a whole chain.
    """
    blocks, count = graph.blocks, len(nodes)
    if (
        len(blocks) == 1
        and isinstance(nodes, range)
        and nodes == range(blocks[0].count)
        and output in blocks[0].cell.returned
    ):
        return [Part(0, 0, count)]
    if not count:
        raise ValueError(f"result {name} names no nodes; it needs at least 1")
    in_turn = count == 1 or (isinstance(nodes, range) and nodes.step == 1)
    parts: list[Part] = []
    at = 0
    while at < count:
        node = int(nodes[at])
        if not 0 <= node < graph.nodes:
            raise ValueError(f"result {name} names node {node}; there are {graph.nodes}")
        number = bisect_right(blocks, node, key=_first) - 1 if len(blocks) > 1 else 0
        block = blocks[number]
        if output not in block.cell.returned:
            raise ValueError(f"result {name}: cell {block.cell.name} does not return an output {output}")
        begin, end = node - block.first, node - block.first + 1
        if in_turn:
            end = min(begin + count - at, block.count)
        elif block.whole:
            end = block.count if list(nodes[at : at + block.count]) == list(range(node, node + block.count)) else end
        if block.whole and (begin or end < block.count):
            raise ValueError(f"result {name} names a part of a chain of {block.count} steps; name all of it")
        at += end - begin
        if parts and parts[-1].block == number and parts[-1].end == begin:
            begin = parts.pop().begin
        parts.append(Part(number, begin, end))
    return parts


def _first(block: Block) -> int:
    return block.first
