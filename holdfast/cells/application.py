"""The interface of an application: its cells, and how it unfolds a request into a graph of them. No torch here."""

from __future__ import annotations

from typing import Protocol

from holdfast.cells.cell import Arrays, Cell, Field
from holdfast.cells.graph import CellGraph


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
