"""The values that pass between planner, loop and executor: requests, rounds of tasks, and returned outputs."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np

from holdfast.cells.cell import Cell, Spec
from holdfast.cells.graph import CellGraph
from holdfast.cells.graph_batch import GraphBatch

SCRATCH = 0
"""The row of padding nodes of a task. No other node has it."""
FIRST_ROW = 1
"""The first row that a node may have."""


class Layout:
    """The layout of outputs: one arena for each shape and dtype, with `width` places in it for each row."""

    def __init__(self, cells: Sequence[Cell]) -> None:
        self.widths: dict[Spec, int] = {}
        """Number of places of a row in each arena."""
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
        """The width of a row in the arena of this shape and dtype; 1 if no cell has such an output."""
        return self.widths.get(Spec(spec.shape, spec.dtype), 1)


class CellRequest(NamedTuple):
    """One request, unfolded."""

    id: str
    graph: CellGraph
    arrival: float = 0.0
    """Time of arrival, in seconds on the monotonic clock."""


class CellRequests(NamedTuple):
    """Several requests, unfolded together. They come in this order, as if they were added one by one."""

    ids: Sequence[str]
    graphs: GraphBatch


class CellOutput(NamedTuple):
    """A request that has ended."""

    request_id: str
    results: Mapping[str, np.ndarray]
    """Arrays [nodes, *shape], by the names that the graph gave to its results."""
    scheduled_at: float
    """Time at which the first of its nodes was planned, in seconds on the monotonic clock."""


class EndedGroup(NamedTuple):
    """Requests that ended in one round, whose results lie in shared arrays."""

    ids: list[str]
    scheduled_at: np.ndarray
    """For each request, `CellOutput.scheduled_at`."""
    results: Mapping[str, tuple[np.ndarray, np.ndarray]]
    """By name, the results of all requests, one after the other, and the end of each request's among them."""
    own: Sequence[Mapping[str, np.ndarray]] = ()
    """For each request, results that lie in arrays of their own. Empty if there are none."""

    def output(self, at: int) -> CellOutput:
        """The output of one request."""
        results = dict(self.own[at]) if self.own else {}
        for name, (array, ends) in self.results.items():
            results[name] = array[int(ends[at - 1]) if at else 0 : int(ends[at])]
        return CellOutput(self.ids[at], results, float(self.scheduled_at[at]))


class CellOutputs(Sequence[CellOutput]):
    """The requests that a round has ended, in order of arrival. An output is made only when it is asked for."""

    __slots__ = ("groups",)

    def __init__(self, groups: Sequence[EndedGroup] = ()) -> None:
        self.groups = groups

    @property
    def ids(self) -> list[str]:
        """The ids of the requests."""
        return self.groups[0].ids if len(self.groups) == 1 else [id for group in self.groups for id in group.ids]

    @property
    def scheduled_at(self) -> np.ndarray:
        """For each request, the time at which the first of its nodes was planned."""
        return np.concatenate([group.scheduled_at for group in self.groups]) if self.groups else np.zeros(0)

    def __len__(self) -> int:
        return sum([len(group.ids) for group in self.groups])

    def __getitem__(self, at: Any) -> Any:
        if isinstance(at, slice):
            return [self[each] for each in range(*at.indices(len(self)))]
        ends = [*accumulate(len(group.ids) for group in self.groups)]
        place = range(len(self))[at]
        number = bisect_right(ends, place)
        return self.groups[number].output(place - (ends[number - 1] if number else 0))

    def __iter__(self) -> Iterator[CellOutput]:
        return (group.output(at) for group in self.groups for at in range(len(group.ids)))


NO_OUTPUTS = CellOutputs()


class Task(NamedTuple):
    """Nodes of one type, one for each row, that run as one batch."""

    rows: np.ndarray
    """The row to which each node's outputs go, int32 [nodes]. No row occurs twice.

    A chain keeps its row while it runs.
    """
    sources: np.ndarray
    """The items that State inputs read, int32 [State inputs, nodes].

    An item is `row * width + place` in the arena of the input's shape and dtype. Below 0 stands for zeros.
    """
    values: tuple[np.ndarray, ...]
    """For each Value input, its values [nodes, *shape]."""
    size: int
    """The supported size that the executor pads the task to."""


class Move(NamedTuple):
    """Rows whose state another worker computed. They are copied before the tasks of the round."""

    worker: int
    rows: np.ndarray
    """The rows, int32, with the same numbers on both workers. Their tasks have completed."""


class Round(NamedTuple):
    """The tasks that one call of Schedule submits to a worker: of one type, run in order (Algorithm 1)."""

    worker: int
    type: int
    tasks: list[Task]
    moves: Sequence[Move] = ()


Returned = Sequence[tuple[np.ndarray, ...]]
"""The outputs that a round returned: for each task, its returned outputs, [nodes, *shape] each."""
