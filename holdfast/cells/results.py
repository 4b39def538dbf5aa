"""The results of requests: where they lie among those of all nodes, and their copies once a request has ended. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

from holdfast.cells.cell import Cell
from holdfast.cells.graph_batch import GraphBatch
from holdfast.cells.plan import CellOutputs, EndedGroup
from holdfast.cells.table import NOBODY, Ranges

ALONE = 0
"""The form of requests that were added one by one."""

Place = tuple[int, int, int, int, int]
"""The place of some nodes' results: type, position, begin, end, chain.

The position is that of the output among the values and returned outputs of the type. `begin` and `end` count the nodes
of the type from the request's first. The chain is one that may have stopped before `end`, as a row of the request, from
0; NOBODY for other nodes.
"""
Result = tuple[str, list[Place]]
"""A result of a request: its name and places."""


class Form(NamedTuple):
    """The blocks and results that batches of one kind have in common."""

    number: int
    types: tuple[int, ...]
    """The type of each block."""
    results: tuple[tuple[str, int, int, int, bool], ...]
    """For each result: its name, its type, the position of its output there, its block, whether it is the last node's.
    """


@dataclass(slots=True, eq=False)
class Alone:
    """The results of a request that was added alone."""

    places: list[Result]
    constants: Mapping[str, np.ndarray]
    offsets: list[int]
    """For each type, the index of the request's first node."""
    rows: np.ndarray
    """The rows of the request, in order."""


class ResultTable:
    """The id and the places of the results of each request that has rows, by its first row."""

    def __init__(self, ranges: Sequence[Ranges], capacity: int) -> None:
        """`ranges` hold the values and returned outputs of nodes, by type."""
        self._ranges = ranges
        self._forms: dict[Any, Form] = {}
        self._by_number: list[Form | None] = [None]
        self._form = np.zeros(capacity, np.int32)
        self._ids = np.full(capacity, None, object)
        self._own = np.full(capacity, None, object)
        """For each request, its Alone, or the constants of a request of a batch by name, or None."""
        self._spans = np.zeros((capacity, 0, 3), np.int64)
        """For each result of a request of a batch: its first node, its end, and the row whose chain may end earlier."""

    def form_of(self, batch: GraphBatch, types: Mapping[Cell, int], held: Mapping[tuple[Cell, str], Any]) -> Form:
        """The form of a batch. `held` has the type and position of each returned output.

        Raises ValueError for a cell that is not in `types`.
        """
        key = (
            tuple([(block.cell, block.chain, block.stop is not None) for block in batch.blocks]),
            tuple(batch.results),
            tuple(batch.constants),
        )
        found = self._forms.get(key)
        if found is None:
            for block in batch.blocks:
                if block.cell not in types:
                    raise ValueError(f"cell {block.cell.name} is not one of the application's cells")
            found = Form(
                len(self._by_number),
                tuple([types[block.cell] for block in batch.blocks]),
                tuple(
                    [
                        (name, *held[batch.blocks[block].cell, output], block, last)
                        for name, block, output, last in batch.results
                    ]
                ),
            )
            self._forms[key] = found
            self._by_number.append(found)
            missing = len(found.results) - self._spans.shape[1]
            if missing > 0:
                more = np.zeros((len(self._spans), missing, 3), np.int64)
                self._spans = np.concatenate([self._spans, more], axis=1)
        return found

    def note_alone(self, first: int, id: str, request: Alone) -> None:
        """Note a request that was added alone."""
        self._form[first], self._ids[first], self._own[first] = ALONE, id, request

    def note(
        self,
        firsts: np.ndarray,
        ids: Sequence[str],
        form: Form,
        batch: GraphBatch,
        begins: Sequence[np.ndarray],
        chains: Sequence[np.ndarray | None],
    ) -> None:
        """Note the requests of a batch.

        For each block, `begins` has the index of each request's first node, and `chains` the row of a chain that may
        stop.
        """
        self._form[firsts] = form.number
        self._ids[firsts] = ids
        for number, (_, _, _, block, _) in enumerate(form.results):
            chain = chains[block]
            self._spans[firsts, number, 0] = begins[block]
            self._spans[firsts, number, 1] = begins[block] + batch.blocks[block].counts
            self._spans[firsts, number, 2] = NOBODY if chain is None else chain
        if batch.constants:
            names = list(batch.constants)
            own = np.empty(len(firsts), object)
            own[:] = [dict(zip(names, values, strict=True)) for values in zip(*batch.constants.values(), strict=True)]
            self._own[firsts] = own

    def ids(self, firsts: np.ndarray) -> list[str]:
        """The ids of requests."""
        found: list[str] = self._ids[firsts].tolist()
        return found

    def forget(self, firsts: np.ndarray) -> None:
        """Drop what is noted about requests whose rows are free."""
        self._ids[firsts] = None
        self._own[firsts] = None

    def read(self, table: np.ndarray, firsts: np.ndarray, started: np.ndarray) -> CellOutputs:
        """The outputs of requests that have ended, in this order. They are copies."""
        forms = self._form[firsts]
        cuts = [0, len(firsts)]
        if len(firsts) > 1:
            cuts[1:1] = (np.flatnonzero(forms[1:] != forms[:-1]) + 1).tolist()
        groups = []
        for begin, end in pairwise(cuts):
            some, form = firsts[begin:end], self._by_number[forms[begin]]
            if form is None:
                own = [self._read_alone(table, request) for request in self._own[some].tolist()]
                groups.append(EndedGroup(self.ids(some), started[begin:end], {}, own))
            else:
                results = {
                    name: self._gather(table, type_, position, self._spans[some, number], last)
                    for number, (name, type_, position, _, last) in enumerate(form.results)
                }
                own = self._own[some].tolist()
                groups.append(EndedGroup(self.ids(some), started[begin:end], results, own if own[0] else ()))
        return CellOutputs(groups)

    def _gather(
        self, table: np.ndarray, type_: int, position: int, spans: np.ndarray, last: bool
    ) -> tuple[np.ndarray, np.ndarray]:
        """A result of several requests: their nodes' outputs, one after the other, and the end of each among them."""
        begins, ends, chains = spans.T
        if chains[0] != NOBODY:
            ends = table["end"][chains]
        items = self._ranges[type_].items[position]
        if last:
            return items.take(ends - 1, axis=0), np.arange(1, len(spans) + 1)
        lengths = ends - begins
        bounds = np.cumsum(lengths)
        at = np.arange(bounds[-1]) + (begins - bounds + lengths).repeat(lengths)
        return items.take(at, axis=0), bounds

    def _read_alone(self, table: np.ndarray, request: Alone) -> dict[str, np.ndarray]:
        results = dict(request.constants) if request.constants else {}
        for name, places in request.places:
            found = []
            for type_, position, begin, end, chain in places:
                offset = request.offsets[type_]
                end = offset + end if chain == NOBODY else table["end"].item(request.rows[chain])
                found.append(self._ranges[type_].items[position][offset + begin : end])
            # The memory will later hold other results.
            results[name] = found[0].copy() if len(found) == 1 else np.concatenate(found)
        return results
