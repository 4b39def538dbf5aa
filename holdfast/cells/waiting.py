"""Requests of cells that have no rows yet: added alone, or together. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from holdfast.cells.graph import CellGraph
from holdfast.cells.graph_batch import GraphBatch
from holdfast.cells.results import Form, Result


class Lone(NamedTuple):
    """A request that was added alone and waits."""

    ids: tuple[str]
    graph: CellGraph
    results: list[Result]

    def drop(self, id: str) -> bool:
        """Drop a request. Returns whether none is left."""
        return True


@dataclass(slots=True, eq=False)
class Lot:
    """Requests that were added together, and wait in this order."""

    ids: list[str]
    graphs: GraphBatch
    form: Form
    row_ends: np.ndarray
    """Number of rows of the requests up to each one."""
    begin: int = 0
    """The first request that waits."""
    dropped: set[int] = field(default_factory=set)
    """Aborted requests, from `begin` on."""

    def drop(self, id: str) -> bool:
        """Drop a request. Returns whether none is left."""
        self.dropped.add(self.ids.index(id, self.begin))
        return self.admitted(self.begin)

    def next_run(self, rows: int) -> tuple[int, int]:
        """The begin and end of the next requests, up to an aborted one, that fit into this number of rows."""
        before = int(self.row_ends[self.begin - 1]) if self.begin else 0
        end = int(np.searchsorted(self.row_ends, before + rows, side="right"))
        return self.begin, min([end, *self.dropped])

    def admitted(self, end: int) -> bool:
        """Move `begin` to `end`, or beyond it while requests were aborted. Returns whether none is left."""
        while end in self.dropped:
            self.dropped.remove(end)
            end += 1
        self.begin = end
        return end == len(self.ids)
