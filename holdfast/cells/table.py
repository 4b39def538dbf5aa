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


class Table:
    """One row for each node, or chain of nodes, that lives. Row 0 is none of them.

    A subgraph is known by its first row, and so is a request: what belongs to them stands there.
    """

    def __init__(self, capacity: int, states: int) -> None:
        self.numbers = Numbers(1, capacity)

        # Rows.
        self.type = np.zeros(capacity, np.int32)
        self.at = np.zeros(capacity, np.int64)
        """Where the values of its next step lie, and where its results will lie."""
        self.begin = np.zeros(capacity, np.int64)
        """Where those of its first step lie."""
        self.end = np.zeros(capacity, np.int64)
        """One beyond those of its last step; where a chain stopped, once it has."""
        self.fresh = np.zeros(capacity, bool)
        """Nothing of it is submitted yet."""
        self.lost = np.zeros(capacity, bool)
        """Results of it that come yet are lost: its request was aborted, or it has stopped."""
        self.open = np.zeros(capacity, np.int64)
        """Edges from rows of its own subgraph that are not wholly submitted."""
        self.place = np.zeros(capacity, np.int64)
        """It rises in the order of the graph."""
        self.order = np.zeros(capacity, np.int64)
        """Its place in the queue of its type, once it is there."""
        self.source = np.full((max(states, 1), capacity), NOBODY, np.int32)
        """Where the State inputs of its next step lie."""
        self.stop_by = np.full(capacity, NOBODY, np.int32)
        """The returned output that may end it."""
        self.stop_at = np.zeros(capacity, np.int64)
        self.round = np.zeros(capacity, np.int64)
        """The last round that has a node of it, where there are several workers."""
        self.home = np.full(capacity, NOBODY, np.int32)
        """The worker that ran its last step."""
        self.copies = np.zeros(capacity, np.int64)
        """The workers, as bits, that have its state."""
        self.subgraph = np.zeros(capacity, np.intp)
        self.request = np.zeros(capacity, np.intp)
        self.after = Lists(capacity)
        """Rows of its own subgraph that read it."""

        # Subgraphs.
        self.starts = Lists(capacity)
        """Its rows that wait for no other of its own. None are listed for a subgraph that is one row, or ready."""
        self.queue = np.zeros(capacity, np.int64)
        """Its place in the queue of its type, once it is there; that of its rows is this and their `place`."""
        self.rows_left = np.zeros(capacity, np.int64)
        """Rows that have not ended."""
        self.needs = np.zeros(capacity, np.int64)
        """Edges from subgraphs that have not ended."""
        self.readers = Lists(capacity)
        """Subgraphs that read it."""
        self.last_round = np.zeros(capacity, np.int64)
        """The last round that has a node of it."""
        self.pinned = np.full(capacity, NOBODY, np.int32)
        """The worker of its last round until that round has completed: no node of it may run elsewhere now."""

        # Requests.
        self.left = np.zeros(capacity, np.int64)
        """Subgraphs that have not ended."""
        self.arrival = np.zeros(capacity, np.int64)
        """Its number, in order of arrival."""
        self.started = np.zeros(capacity)
        """When its first node was planned; below 0 before that."""
        self.stopped = np.zeros(capacity, bool)
        """A chain of it has stopped, and later steps of that chain may be in flight."""


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


class Lists:
    """For each of so many numbers a list of others."""

    def __init__(self, capacity: int) -> None:
        self.ranges = Ranges([((), "int64")])
        self._start = np.zeros(capacity, np.int64)
        self._length = np.zeros(capacity, np.int64)

    def clear(self, keys: np.ndarray) -> None:
        """Give these numbers empty lists."""
        self._length[keys] = 0

    def write(self, keys: np.ndarray, members: np.ndarray) -> int:
        """Add each member to the list of its key; the lists of all these keys must be empty. Offset of their range."""
        offset = self.ranges.take(len(keys))
        order = np.argsort(keys, kind="stable")
        keys = keys[order]
        self.ranges.items[0][offset : offset + len(keys)] = members[order]
        starts = (keys[1:] != keys[:-1]).nonzero()[0] + 1
        bounds = np.concatenate(([0], starts, [len(keys)]))
        keys = keys[bounds[:-1]]
        self._start[keys] = bounds[:-1] + offset
        self._length[keys] = bounds[1:] - bounds[:-1]
        return offset

    def of(self, keys: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The members of the lists of these numbers, one list after the other, and how many each list has."""
        lengths = self._length[keys]
        if not np.count_nonzero(lengths):
            return lengths[:0], lengths
        ends = lengths.cumsum()
        at = np.arange(ends[-1]) + np.repeat(self._start[keys] - ends + lengths, lengths)
        return self.ranges.items[0][at], lengths


def distinct(numbers: np.ndarray) -> np.ndarray:
    """These numbers, each once, in order."""
    if len(numbers) < 2:
        return numbers
    numbers = np.sort(numbers)
    new = np.empty(len(numbers), bool)
    new[0] = True
    np.not_equal(numbers[1:], numbers[:-1], out=new[1:])
    once: np.ndarray = numbers[new]
    return once
