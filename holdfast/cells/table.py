"""The planner's memory as arrays: rows, subgraphs, requests, and ranges of values and results. Pure."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

NOBODY = -1
"""In place of a row, a worker or a source."""


class Numbers:
    """The numbers from `first` to `end`, each free or taken."""

    def __init__(self, first: int, end: int) -> None:
        self._stack = np.arange(end - 1, first - 1, -1)
        self.free = len(self._stack)

    def take(self, count: int) -> np.ndarray:
        """So many free numbers, which must be there. Those that follow one another come together where they can."""
        self.free -= count
        return self._stack[self.free : self.free + count][::-1].copy()

    def give(self, numbers: np.ndarray) -> None:
        """Free numbers again."""
        self._stack[self.free : self.free + len(numbers)] = numbers[::-1]
        self.free += len(numbers)


ROW = np.dtype(
    [
        # Rows.
        ("at", "i8"),  # where the values of its next step lie, and where its results will lie
        ("end", "i8"),  # one beyond those of its last step; where a chain stopped, once it has
        ("order", "i8"),  # its place in the queue of its type, once it is there
        ("subgraph", "i4"),
        ("request", "i4"),
        ("type", "i4"),
        ("open", "i4"),  # edges from rows of its own subgraph that are not wholly submitted
        ("after", "i8"),  # the rows of its own subgraph that read it: where they are listed, and how many they are
        ("after_count", "i4"),
        ("fresh", "?"),  # nothing of it is submitted yet
        ("lost", "?"),  # results of it that come yet are lost: its request was aborted, or it has stopped
        ("place", "i4"),  # it rises in the order of the graph
        ("stop_by", "i4"),  # the returned output that may end it
        ("stop_at", "i8"),
        ("begin", "i8"),  # where the values of its first step lie
        ("round", "i8"),  # the last round that has a node of it, where there are several workers
        ("home", "i4"),  # the worker that ran its last step
        ("copies", "u8"),  # the workers, as bits, that have its state
        # Subgraphs.
        ("queue", "i8"),  # its place in the queue of its type, once it is there; that of its rows adds their `place`
        ("rows_left", "i4"),  # rows that have not ended
        ("needs", "i4"),  # edges from subgraphs that have not ended
        ("readers", "i8"),  # the subgraphs that read it: where they are listed, and how many they are
        ("readers_count", "i4"),
        ("starts_count", "i4"),
        ("starts", "i8"),  # its rows that wait for no other of its own; none if it is one row, or was ready at once
        ("last_round", "i8"),  # the last round that has a node of it
        ("pinned", "i4"),  # the worker of its last round until that has completed: no node of it may run elsewhere now
        # Requests.
        ("left", "i4"),  # subgraphs that have not ended
        ("arrival", "i8"),  # its number, in order of arrival
        ("started", "f8"),  # when its first node was planned; below 0 before that
        ("stopped", "?"),  # a chain of it has stopped, and later steps of that chain may be in flight
    ],
    align=True,
)
"""What is kept of a node, or chain of nodes, that lives. Row 0 of a table is none of them.

A subgraph is known by its first row, and so is a request: what belongs to them stands there.
"""


def empty_table(capacity: int) -> np.ndarray:
    """[capacity] of ROW."""
    table = np.zeros(capacity, ROW)
    table["home"] = table["pinned"] = table["stop_by"] = NOBODY
    return table


class Queues:
    """The rows that have a ready node, by type: `rows[type, begin:end]`, where `bounds[type]` is begin and end."""

    def __init__(self, types: int, capacity: int) -> None:
        self.rows = np.zeros((types, 2 * capacity), np.int32)
        self.bounds = np.full((types, 2), capacity, np.int64)

    def length(self, type_: int) -> int:
        """How many rows wait."""
        begin, end = self.bounds[type_].tolist()
        return int(end - begin)


class Ranges:
    """Arrays of items, alike in length. A range of all of them is held together."""

    def __init__(self, kinds: Sequence[tuple[tuple[int, ...], str]]) -> None:
        self.items = [np.zeros((1024, *shape), dtype=dtype) for shape, dtype in kinds]
        self.held = 0
        """Items in ranges that are not free."""
        self._end = 0
        self._length = 1024
        self._free: dict[int, list[int]] = {}

    def take(self, length: int) -> int:
        """Offset of a free range. Lengths are rounded up to a power of two, so that freed ranges fit again."""
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
        """Free a range again."""
        length = 1 << (length - 1).bit_length()
        self.held -= length
        self._free.setdefault(length, []).append(offset)


def _longer(items: np.ndarray, length: int) -> np.ndarray:
    longer = np.zeros((length, *items.shape[1:]), dtype=items.dtype)
    longer[: len(items)] = items
    return longer
