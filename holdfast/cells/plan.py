"""The values that pass between planner, loop and executor: requests, rounds of tasks, and what they gave."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from holdfast.cells.cell import Cell, Spec
from holdfast.cells.graph import CellGraph

SCRATCH = 0
"""A row that no node has. Nodes that only pad a task write to it."""
FIRST_ROW = 1


class Layout:
    """Where outputs lie: one arena for each shape and type, with `width` places in it for each row."""

    def __init__(self, cells: Sequence[Cell]) -> None:
        self.widths: dict[Spec, int] = {}
        """Places of a row in each arena."""
        self._places: dict[tuple[Cell, str], tuple[Spec, int]] = {}
        for cell in cells:
            used: dict[Spec, int] = {}
            for name, output in cell.outputs.items():
                spec = Spec(output.shape, output.dtype)
                self._places[cell, name] = spec, used.setdefault(spec, 0)
                used[spec] += 1
            for spec, width in used.items():
                self.widths[spec] = max(width, self.widths.get(spec, 0))

    def place(self, cell: Cell, output: str) -> tuple[Spec, int]:
        """The arena of an output, and its place within a row."""
        return self._places[cell, output]

    def within(self, cell: Cell, output: str) -> tuple[int, int]:
        """The width of a row in an output's arena, and the output's place in it."""
        spec, place = self._places[cell, output]
        return self.widths[spec], place

    def width_of(self, spec: Spec) -> int:
        """The width of a row in the arena of this shape and type; 1 if no cell has such an output."""
        return self.widths.get(Spec(spec.shape, spec.dtype), 1)


class CellRequest(NamedTuple):
    """One request, unfolded."""

    id: str
    graph: CellGraph
    arrival: float = 0.0
    """Seconds on the monotonic clock."""


class CellOutput(NamedTuple):
    """A request that has ended."""

    request_id: str
    results: Mapping[str, np.ndarray]
    """By the names that its graph gave them; [nodes, *shape]."""
    scheduled_at: float
    """When the first of its nodes was planned."""


class Task(NamedTuple):
    """Nodes of one type, one for each row, that run as one batch."""

    rows: np.ndarray
    """int32 [nodes]: where each node's outputs go. No row comes twice. Rows keep their place while a chain runs."""
    sources: np.ndarray
    """int32 [State inputs, nodes]: `row * width + place` in the arena of the input's shape and type.

    Below 0 is zeros."""
    values: tuple[np.ndarray, ...]
    """For each Value input: [nodes, *shape]."""
    size: int
    """The supported size that the executor pads it to."""


class Move(NamedTuple):
    """Rows whose state another worker computed, to be copied before the tasks of the round."""

    worker: int
    rows: np.ndarray
    """int32: the same rows here and there. Their tasks have completed."""


class Round(NamedTuple):
    """What one call of Schedule submits to a worker: tasks of one type, run in order (Algorithm 1)."""

    worker: int
    type: int
    tasks: list[Task]
    moves: Sequence[Move] = ()


Returned = Sequence[tuple[np.ndarray, ...]]
"""What a round gave: for each task its returned outputs, [nodes, *shape] each."""
