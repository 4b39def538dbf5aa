"""The planner's memory as arrays: rows, subgraphs, requests, and ranges of values and results. Pure."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

NOBODY = -1
"""Number that stands for no row, no worker or no source."""


class Numbers:
    """The numbers from `first` to `end`, each free or taken."""

    def __init__(self, first: int, end: int) -> None:
        self._stack = np.arange(end - 1, first - 1, -1)
        self.free = len(self._stack)

    def take(self, count: int) -> np.ndarray:
        """Take `count` free numbers; there must be enough. Consecutive numbers are taken together if possible."""
        self.free -= count
        return self._stack[self.free : self.free + count][::-1].copy()

    def give(self, numbers: np.ndarray) -> None:
        """Make these numbers free."""
        self._stack[self.free : self.free + len(numbers)] = numbers[::-1]
        self.free += len(numbers)


ROW = np.dtype(
    [
        # Rows.
        ("at", "i8"),  # place of its next step's values and results in the type's ranges
        ("end", "i8"),  # one beyond the place of its last step; where a chain stopped, once it has
        ("order", "i8"),  # position in the queue of its type, once it is in it
        ("subgraph", "i4"),
        ("request", "i4"),
        ("type", "i4"),
        ("open", "i4"),  # number of edges from rows of its own subgraph that are not wholly submitted
        ("after", "i8"),  # start of the list of rows of its own subgraph that read it; then the list's length
        ("after_count", "i4"),
        ("fresh", "?"),  # whether nothing of it is submitted yet
        ("lost", "?"),  # whether later results are dropped: its request was aborted, or its chain has stopped
        ("place", "i4"),  # a number that rises in the order of the graph
        ("stop_by", "i4"),  # number of the returned output that may end it
        ("stop_at", "i8"),
        ("begin", "i8"),  # place of its first step's values
        ("round", "i8"),  # last round that has a node of it, with several workers
        ("home", "i4"),  # worker that ran its last step
        ("copies", "u8"),  # workers that have its state, as bits
        ("next", "i4"),  # the next row of its request; NOBODY for the last one
        # Subgraphs.
        ("queue", "i8"),  # position in the queue of its type, once it is in it; a row's position adds its `place`
        ("rows_left", "i4"),  # number of rows that have not ended
        ("needs", "i4"),  # number of edges from subgraphs that have not ended
        ("readers", "i8"),  # start of the list of subgraphs that read it; then the list's length
        ("readers_count", "i4"),
        ("starts_count", "i4"),
        ("starts", "i8"),  # list of its rows that wait for none of its own; empty for one row, or if ready at once
        ("last_round", "i8"),  # last round that has a node of it
        ("pinned", "i4"),  # worker of its last round, until that has completed; no other worker may run its nodes
        # Requests.
        ("batch", "i4"),  # number of the batch in which it was given its rows
        ("left", "i4"),  # subgraphs that have not ended
        ("rows", "i4"),  # number of its rows
        ("arrival", "i8"),  # number in order of arrival
        ("started", "f8"),  # time when its first node was planned; below 0 before that
        ("stopped", "?"),  # whether a chain of it has stopped; later steps of the chain may be in flight
    ],
    align=True,
)
"""The data of one live node, or chain of nodes. Row 0 of a table is never used for one.

A subgraph and a request are each identified by their first row, which holds their fields.
"""


def empty_table(capacity: int) -> np.ndarray:
    """An empty table, [capacity] of ROW."""
    table = np.zeros(capacity, ROW)
    table["home"] = table["pinned"] = table["stop_by"] = NOBODY
    return table


class Queues:
    """The rows that have a ready node, by type: `rows[type, begin:end]`, where `bounds[type]` is (begin, end)."""

    def __init__(self, types: int, capacity: int) -> None:
        self.rows = np.zeros((types, 2 * capacity), np.int32)
        self.bounds = np.full((types, 2), capacity, np.int64)

    def length(self, type_: int) -> int:
        """Number of rows in a type's queue."""
        begin, end = self.bounds[type_].tolist()
        return int(end - begin)


class Ranges:
    """Arrays of items of equal length. A range covers the same items of all of them."""

    def __init__(self, kinds: Sequence[tuple[tuple[int, ...], str]]) -> None:
        self.items = [np.zeros((1024, *shape), dtype=dtype) for shape, dtype in kinds]
        self.held = 0
        """Number of items in ranges that are not free."""
        self._end = 0
        self._length = 1024
        self._free: dict[int, list[int]] = {}

    def take(self, length: int) -> int:
        """Allocate a range and return its offset.

        Lengths are rounded up to a power of two, so that freed ranges fit again.
        """
        length = 1 << (length - 1).bit_length()
        self.held += length
        if free := self._free.get(length):
            return free.pop()
        offset, self._end = self._end, self._end + length
        if self._end > self._length:
            self._length = max(2 * self._length, self._end)
            self.items = [_longer(items, self._length) for items in self.items]
        return offset

    def give(self, offset: int, length: int) -> None:
        """Free a range."""
        length = 1 << (length - 1).bit_length()
        self.held -= length
        self._free.setdefault(length, []).append(offset)


def _longer(items: np.ndarray, length: int) -> np.ndarray:
    longer = np.zeros((length, *items.shape[1:]), dtype=items.dtype)
    longer[: len(items)] = items
    return longer
