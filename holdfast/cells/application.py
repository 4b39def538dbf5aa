"""The interface of an application: its cells, and how it unfolds a request into a graph of them. No torch here."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

from holdfast.cells.cell import Arrays, Cell, Field
from holdfast.cells.graph import CellGraph
from holdfast.cells.graph_batch import GraphBatch


class Application(Protocol):
    """An application that is served: it unfolds a request into a graph of its cells, and reads the graph's results."""

    name: str
    cells: tuple[Cell, ...]
    inputs: tuple[Field, ...]
    outputs: tuple[Field, ...]

    def unfold(self, inputs: Arrays) -> CellGraph:
        """The graph of one request. Raises ValueError for unusable inputs, naming the value and the limit.

        Dtypes, ranks and dimensions have already been checked against `inputs`.
        """
        ...

    def finish(self, results: Arrays) -> Arrays:
        """Turn the results that the graph names into the outputs that the client receives."""
        ...


@runtime_checkable
class UnfoldsMany(Protocol):
    """An application that also unfolds many requests at once, which costs less for each of them."""

    def unfold_many(self, inputs: Sequence[Arrays]) -> GraphBatch:
        """The graphs of requests, in this order, as `unfold` would make them.

        Raises ValueError if one of them is unusable. All of them are then given to `unfold`, one by one.
        """
        ...
