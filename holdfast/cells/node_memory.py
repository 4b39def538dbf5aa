"""The values and results of all nodes, by type, in memory that the requests of a batch hold together. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate

import numpy as np

from holdfast.cells.cell import Cell
from holdfast.cells.graph import CellGraph
from holdfast.cells.graph_batch import GraphBatch
from holdfast.cells.table import Ranges


@dataclass(slots=True, eq=False)
class Batch:
    """Requests that were given rows together. Their ranges are free once all of them have ended."""

    number: int
    rows: np.ndarray
    """The rows of the requests, one request after the other."""
    held: list[tuple[Ranges, int, int]] = field(default_factory=list)
    """Memory, offset and length of each range."""
    offsets: list[int] = field(default_factory=list)
    """For each type, the offset of its nodes' values and results."""

    def hold(self, ranges: Ranges, length: int) -> int:
        """Allocate a range. Returns its offset."""
        offset = ranges.take(length)
        self.held.append((ranges, offset, length))
        return offset


class NodeMemory:
    """The memory of a planner's nodes, and the batches that hold it."""

    def __init__(self, cells: Sequence[Cell], types: Mapping[Cell, int], capacity: int) -> None:
        """`cells` has a cell of each type, `types` the number of each cell's type. At most `capacity` batches."""
        self._types = types
        self._values = [len(cell.values) for cell in cells]
        held = [
            [*(cell.inputs[name] for name in cell.values), *(cell.outputs[name] for name in cell.returned)]
            for cell in cells
        ]
        self.ranges = [Ranges([(spec.shape, spec.dtype) for spec in specs]) for specs in held]
        """For each type, the memory of its nodes' values and then of their returned outputs."""
        self.links = Ranges([((), "int64")])
        """Memory of the links from nodes to their readers (`algorithm.enter`)."""
        self.left = np.zeros(capacity, np.int64)
        """Number of requests of each batch that hold rows."""
        self._batches: dict[int, Batch] = {}
        """The batches that hold ranges, by number."""
        self._free = [*range(capacity - 1, -1, -1)]

    def begin(self, rows: np.ndarray, requests: int) -> Batch:
        """Begin a batch of requests that have these rows."""
        batch = Batch(self._free.pop(), rows)
        self._batches[batch.number] = batch
        self.left[batch.number] = requests
        return batch

    def end(self, number: int) -> None:
        """Free the ranges of a batch of which no request is left."""
        for ranges, offset, length in self._batches.pop(number).held:
            ranges.give(offset, length)
        self._free.append(number)

    def store(self, graphs: Sequence[CellGraph], batch: Batch) -> list[tuple[int, ...]]:
        """Store the values of these graphs in ranges of `batch`.

        Returns, for each graph, the number of nodes of each type before it.
        """
        types = self._types
        if len(self.ranges) == 1:
            ends = list(accumulate([graph.nodes for graph in graphs]))
            values = [block.values for graph in graphs for block in graph.blocks]
            batch.offsets = [self._store(0, ends[-1], values, batch)]
            return [(end,) for end in [0, *ends[:-1]]]
        nodes = [0] * len(self.ranges)
        by_type: list[list[list[np.ndarray]]] = [[] for _ in self.ranges]
        starts = []
        for graph in graphs:
            starts.append(tuple(nodes))
            for block in graph.blocks:
                number = types[block.cell]
                nodes[number] += block.count
                by_type[number].append(block.values)
        batch.offsets = [
            self._store(number, total, given, batch) if total else 0
            for number, (total, given) in enumerate(zip(nodes, by_type, strict=True))
        ]
        return starts

    def store_batch(self, graphs: GraphBatch, types: Sequence[int], batch: Batch) -> list[np.ndarray]:
        """Store the values of a batch's nodes. Returns, for each block, the index of each request's first node.

        `types` are those of the blocks. The nodes of a type lie one request after the other, and those of a request one
        block after the other.
        """
        begins: dict[int, np.ndarray] = {}
        for type_, ranges in enumerate(self.ranges):
            mine = [block for block, own in enumerate(types) if own == type_]
            if not mine:
                batch.offsets.append(0)
                continue
            nodes = np.sum([graphs.blocks[number].counts for number in mine], axis=0)
            ends = nodes.cumsum()
            offset = batch.hold(ranges, int(ends[-1]))
            batch.offsets.append(offset)
            begin = offset + ends - nodes
            for number in mine:
                block = graphs.blocks[number]
                begins[number] = begin
                for items, value in zip(ranges.items, block.values, strict=False):
                    if len(mine) == 1:
                        items[offset : offset + len(value)] = value
                    else:
                        before = block.counts.cumsum() - block.counts
                        items[np.arange(len(value)) + (begin - before).repeat(block.counts)] = value
                begin = begin + block.counts
        return [begins[number] for number in range(len(types))]

    def _store(self, type_: int, total: int, values: list[list[np.ndarray]], batch: Batch) -> int:
        """Hold a range for `total` nodes of a type, and store their blocks' values there. Returns its offset."""
        ranges = self.ranges[type_]
        offset = batch.hold(ranges, total)
        for position in range(self._values[type_]):
            items = ranges.items[position][offset : offset + total]
            np.concatenate([each[position] for each in values], out=items)
        return offset
