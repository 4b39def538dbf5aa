"""Baselines for cellular batching: planners that batch whole graphs, over the same cells, tasks and executor.

All of them form a fixed batch of requests for an idle worker, run all of its cells, and return its results together. No
request joins or leaves in between (BatchMaker, section 2.2.3). They differ in the nodes of one task:

- `Padding` (MXNet, TensorFlow; section 2.7.1): requests of one structure, of lengths within one bucket. Step by step
  the whole batch runs up to the bucket's upper bound. The buckets take turns.
- `Merging` (TensorFlow Fold, DyNet): any requests, whose equal nodes are merged into one task, by depth or by agenda.

A batch is held as flat arrays over the rows of all its requests. A row is a node or a chain, as in the planner of
cells.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate
from typing import Literal, NamedTuple

import numpy as np

from holdfast.cells.cell import Cell, padded_size, sizes_by_type
from holdfast.cells.graph import CellGraph
from holdfast.cells.partition import Result, Splitter
from holdfast.cells.plan import FIRST_ROW, CellOutput, CellRequest, Layout, Returned, Round, Task
from holdfast.cells.planner import MAX_TASKS, CellStats, CellWorker
from holdfast.cells.table import NOBODY, Numbers

CAPACITY = 65536


class Taken(NamedTuple):
    """A queued request with its graph."""

    request: CellRequest
    results: list[Result]

    @property
    def graph(self) -> CellGraph:
        return self.request.graph


class FixedBatches(ABC):
    """Forms a batch when a worker is idle, and returns its results together. `worker(n)` is the Planner of worker n."""

    def __init__(
        self,
        cells: Sequence[Cell],
        types: Mapping[Cell, int] | None = None,
        *,
        most: int,
        sizes: Sequence[tuple[int, ...]] | None = None,
        workers: int = 1,
        max_tasks: int = MAX_TASKS,
        capacity: int = CAPACITY,
    ) -> None:
        """`most` bounds the requests of a batch, `capacity` the rows. `sizes` are by type number, else the cells'.

        `max_tasks` bounds the tasks of a round. A batch's rounds follow one another on its worker, so it changes only
        their number. Raises ValueError for a number that is out of range.
        """
        for name, value in (("most", most), ("workers", workers), ("max_tasks", max_tasks), ("capacity", capacity - 1)):
            if value < 1:
                raise ValueError(f"{name} is {value}; it must be at least 1")
        self.types = dict(types) if types is not None else {cell: number for number, cell in enumerate(cells)}
        self.sizes = sizes_by_type(self.types, sizes)
        self.most, self.max_tasks = most, max_tasks
        first_of = {number: cell for cell, number in reversed(self.types.items())}
        self.cells = [first_of[number] for number in sorted(first_of)]
        self.layout = Layout(cells)
        self.splitter = Splitter(self.types)
        self.numbers = Numbers(FIRST_ROW, capacity)
        self._capacity = capacity
        self._waiting: dict[str, Taken] = {}
        """Requests that are in no batch, in the order of arrival."""
        self._alive: set[str] = set()
        """Ids of requests in batches."""
        self._aborted: set[str] = set()
        """Ids of aborted requests whose batches still run. Their results are dropped."""
        self._batches: list[Batch | None] = [None] * workers

    def worker(self, number: int) -> CellWorker:
        """The planner of one worker."""
        return CellWorker(self, number)

    def add(self, request: CellRequest) -> None:
        """Queue a request. Raises ValueError, with the reason, if it can never run."""
        if request.id in self._waiting or request.id in self._alive or request.id in self._aborted:
            raise ValueError(f"request id {request.id} is already in use; give each its own")
        results, rows = self.splitter.check(request.graph), request.graph.rows
        if not rows:
            raise ValueError("the graph has no nodes; it needs at least 1")
        if 2 * rows > self._capacity - FIRST_ROW:
            raise ValueError(
                f"the graph has {rows} nodes, where a chain counts as one; at most {self._capacity // 2} fit"
            )
        self._waiting[request.id] = taken = Taken(request, results)
        self.queue(taken)

    def abort(self, request_id: str) -> None:
        """End a request at once. In a batch it runs on to the end, and its results are dropped."""
        if self._waiting.pop(request_id, None) is None and request_id in self._alive:
            self._alive.remove(request_id)
            self._aborted.add(request_id)

    def schedule(self, worker: int, now: float) -> Round | None:
        """The next round of the worker's batch, or of a new batch if it has none. None while a planned batch runs."""
        batch = self._batches[worker]
        if batch is None:
            taken = self.take()
            if not taken:
                return None
            for each in taken:
                del self._waiting[each.request.id]
                self._alive.add(each.request.id)
            batch = self._batches[worker] = Batch(self, taken, now)
            batch.rounds = self.plan(batch, worker)
        made = next(batch.rounds, None)
        batch.flying += made is not None
        return made

    def update(self, plan: Round, result: Returned) -> list[CellOutput]:
        """Record that a worker's oldest round has completed, and with its last round the whole batch."""
        batch = self._batches[plan.worker]
        assert batch is not None
        for (kind, offsets), outputs in zip(batch.sent.popleft(), result, strict=True):
            kept = offsets >= 0
            for items, output in zip(batch.results[kind], outputs, strict=True):
                items[offsets[kept]] = output[kept]
        batch.flying -= 1
        batch.nodes_left -= sum(len(task.rows) for task in plan.tasks)
        if batch.nodes_left:
            return []
        self._batches[plan.worker] = None
        batch.free()
        ended = []
        for ending in batch.read():
            if ending.request_id in self._aborted:
                self._aborted.remove(ending.request_id)
            else:
                self._alive.remove(ending.request_id)
                ended.append(ending)
        return ended

    def has_work(self) -> bool:
        """Whether any request has not ended."""
        return bool(self._waiting or self._alive)

    def stats(self) -> CellStats:
        """The current queues and rows. Ready nodes are not counted, because a batch's order is fixed."""
        total = self._capacity - FIRST_ROW
        return CellStats(
            waiting=len(self._waiting),
            running=len(self._alive),
            rows_used=total - self.numbers.free,
            rows_total=total,
            ready=(0,) * len(self.cells),
            tasks=tuple(
                sum(kind == number for b in self._batches if b is not None for sent in b.sent for kind, _ in sent)
                for number in range(len(self.cells))
            ),
        )

    def queue(self, taken: Taken) -> None:  # noqa: B027
        """Put a waiting request into the queue of its kind, if the class has such queues."""

    def waits(self, taken: Taken) -> bool:
        """Whether a request is in no batch and was not aborted."""
        return self._waiting.get(taken.request.id) is taken

    @abstractmethod
    def take(self) -> list[Taken]:
        """The requests of the next batch, taken from the waiting ones."""

    @abstractmethod
    def plan(self, batch: Batch, worker: int) -> Iterator[Round]:
        """The batch's rounds, each formed when it is asked for. Sets `batch.nodes_left` before the first."""


class Batch:
    """The requests of one batch as flat arrays over their rows, and the results of their tasks."""

    def __init__(self, planner: FixedBatches, taken: list[Taken], now: float) -> None:
        self.taken = taken
        self.rounds: Iterator[Round] = iter(())
        self.flying = 0
        """Number of rounds in flight."""
        self.nodes_left = 0
        """Number of nodes that have not completed, including padding."""
        self.sent: deque[list[tuple[int, np.ndarray]]] = deque()
        """For each round in flight and each task: its type, and the place of each node's results; below 0 for none."""
        self._planner, self._now = planner, now
        found = planner.splitter.split([each.graph for each in taken])
        total = len(found.types)
        self.first = np.append(found.first, total)
        """For each request, its first row; then the end."""
        self.kind, self.steps = found.types, found.steps
        """For each row, its type and its number of nodes."""
        self.reader, self.producer = found.reader, found.producer
        """Edges: rows that read others, and the rows that they read."""
        self._held = planner.numbers.take(total)
        self.at = self._held.astype(np.int64)
        """For each row, the place of its state."""
        self.spill = self.at
        """For each row, the place for results beyond its end."""
        self._spilled = self._held[:0]
        states = max(len(cell.states) for cell in planner.cells)
        self.source = np.full((states, total), NOBODY, np.int64)
        """For each State input and row, the item that the first step reads."""
        self._read_inputs(found.inputs)
        self.carried = self.source.copy()
        """For each State input and row, the item that later steps read."""
        self.offset = np.zeros(total, np.int64)
        """For each row, the start of its values and results among those of its type."""
        self.values: list[list[np.ndarray]] = []
        """For each type and Value input, the values of all steps of all rows of the type."""
        self.results: list[list[np.ndarray]] = []
        """For each type and returned output, the results of all steps of all rows of the type."""
        for number, cell in enumerate(planner.cells):
            mine = np.flatnonzero(self.kind == number)
            for name in cell.carried:
                width, place = planner.layout.within(cell, name)
                self.carried[cell.states.index(name), mine] = self.at[mine] * width + place
            ends = np.cumsum(self.steps[mine])
            self.offset[mine] = ends - self.steps[mine]
            count = int(ends[-1]) if len(mine) else 0
            blocks = [block for each in taken for block in each.graph.blocks if planner.types[block.cell] == number]
            given = range(len(cell.values)) if count else ()
            self.values.append([np.concatenate([block.values[place] for block in blocks]) for place in given])
            outputs = [cell.outputs[name] for name in cell.returned]
            self.results.append([np.zeros((count, *output.shape), output.dtype) for output in outputs])

    def _read_inputs(self, inputs: np.ndarray) -> None:
        """Find the places of State inputs; `inputs` as in a Partition."""
        planner = self._planner
        reader, producer, position, output = inputs.T
        for name, number in planner.splitter.outputs.items():
            for kind, cell in enumerate(planner.cells):
                if name in cell.outputs:
                    mine = (output == number) & (self.kind[producer] == kind)
                    width, place = planner.layout.within(cell, name)
                    self.source[position[mine], reader[mine]] = self.at[producer[mine]] * width + place

    def spill_read_rows(self) -> None:
        """Give rows that others read a second place, so that steps beyond their end do not change their state."""
        read = np.unique(self.producer)
        self.spill = self.at.copy()
        self._spilled = self._planner.numbers.take(len(read))
        self.spill[read] = self._spilled

    def task(self, kind: int, rows: np.ndarray, steps: np.ndarray) -> tuple[Task, np.ndarray]:
        """A task of one node of each of these rows, at these steps, and the places of its results."""
        cell = self._planner.cells[kind]
        inside = steps < self.steps[rows]
        source = np.where(steps == 0, self.source[:, rows], self.carried[:, rows])
        outside = np.flatnonzero(~inside & (self.spill[rows] != self.at[rows]))
        if len(outside):
            for name in cell.carried:
                width, place = self._planner.layout.within(cell, name)
                beyond = rows[outside]
                later = self.spill[beyond] * width + place
                source[cell.states.index(name), outside] = np.where(steps[outside] == self.steps[beyond], NOBODY, later)
        offsets = self.offset[rows] + np.minimum(steps, self.steps[rows] - 1)
        made = Task(
            np.where(inside, self.at[rows], self.spill[rows]).astype(np.int32),
            np.ascontiguousarray(source[: len(cell.states)], np.int32),
            tuple(values[offsets] for values in self.values[kind]),
            padded_size(self._planner.sizes[kind], len(rows)),
        )
        return made, np.where(inside, offsets, NOBODY)

    def round(self, worker: int, kind: int, made: Sequence[tuple[Task, np.ndarray]]) -> Round:
        """Tasks of one type as the next round."""
        self.sent.append([(kind, offsets) for _, offsets in made])
        return Round(worker, kind, [task for task, _ in made])

    def free(self) -> None:
        """Free the rows."""
        self._planner.numbers.give(self._held)
        self._planner.numbers.give(self._spilled)

    def read(self) -> Iterator[CellOutput]:
        """The results of each request. A chain that ends by its `stop` is cut there."""
        for first, (request, results) in zip(self.first, self.taken, strict=False):
            before = [0, *accumulate(block.rows for block in request.graph.blocks)]
            found = {}
            for result in results:
                parts = []
                for number, start, end in result.parts:
                    index = int(first) + before[number] + (0 if request.graph.blocks[number].whole else start)
                    kind, begin = int(self.kind[index]), int(self.offset[index])
                    names = self._planner.cells[kind].returned
                    span = slice(begin, begin + end - start)
                    part = self.results[kind][names.index(result.output)][span]
                    if (stop := request.graph.blocks[number].stop) is not None:
                        by, value = stop
                        at = np.flatnonzero(self.results[kind][names.index(by)][span] == value)
                        part = part[: at[0] + 1] if len(at) else part
                    parts.append(part)
                found[result.name] = np.concatenate(parts)
            yield CellOutput(request.id, found, self._now)


class Padding(FixedBatches):
    """Padding with buckets, as in MXNet and TensorFlow (section 2.7.1).

    Bucket i of a structure holds requests whose first chain has a length in (width * i, width * (i + 1)]. The buckets
    take turns. There is no timeout: a bucket starts its turn with the requests that it holds, at most `most`. With
    `whole_turns` its turn lasts until all of these have run. Otherwise a turn is one batch; the fullest bucket then
    gets no more batches than the others, and the rates that the paper reports cannot be served. Every chain of a batch
    runs up to the bound of the bucket. A later chain, whose length is not known before, runs up to the next multiple of
    the width from the longest of the batch on. A chain that may stop runs to its largest number of steps.

    With requests that are all alike it is the ideal: a graph that is fixed once and runs node by node, `most` requests
    at a time (section 2.7.5).
    """

    def __init__(
        self,
        cells: Sequence[Cell],
        types: Mapping[Cell, int] | None = None,
        *,
        width: int,
        most: int,
        whole_turns: bool = True,
        sizes: Sequence[tuple[int, ...]] | None = None,
        workers: int = 1,
        max_tasks: int = MAX_TASKS,
        capacity: int = CAPACITY,
    ) -> None:
        """Parameters of `FixedBatches`, and the buckets' `width` in steps.

        `most` is at most the smallest largest size.
        """
        super().__init__(cells, types, most=most, sizes=sizes, workers=workers, max_tasks=max_tasks, capacity=capacity)
        if width < 1:
            raise ValueError(f"width is {width}; it must be at least 1")
        largest = min(some[-1] for some in self.sizes)
        if most > largest:
            raise ValueError(f"most is {most}; the cells have sizes up to {largest}")
        self._width = width
        self._buckets: dict[tuple[object, ...], deque[Taken]] = {}
        self._turn: list[tuple[object, ...]] = []
        """The buckets in the order of their turns, the next one first."""
        self._whole_turns = whole_turns
        self._granted = 0
        """Number of requests that the first bucket may still run before its turn ends."""

    def queue(self, taken: Taken) -> None:
        first = taken.graph.blocks[0]
        key = self._structure(taken.graph), (first.count - 1) // self._width if first.whole else 0
        if key not in self._buckets:
            self._buckets[key] = deque()
            self._turn.append(key)
        self._buckets[key].append(taken)

    def _structure(self, graph: CellGraph) -> tuple[object, ...]:
        """A key that is equal for graphs that differ at most in the lengths of their chains."""
        firsts = np.array([block.first for block in graph.blocks])
        rows = np.cumsum([0, *(block.rows for block in graph.blocks)])[:-1]
        whole = np.array([block.whole for block in graph.blocks])

        def row_of(nodes: np.ndarray) -> np.ndarray:
            block = np.searchsorted(firsts, nodes, side="right") - 1
            return np.where(nodes < 0, nodes, rows[block] + np.where(whole[block], 0, nodes - firsts[block]))

        return tuple(
            (
                self.types[block.cell],
                block.whole,
                block.rows,
                tuple(block.reads),
                tuple(row_of(column).tobytes() for column in block.columns),
            )
            for block in graph.blocks
        )

    def take(self) -> list[Taken]:
        for place, key in enumerate(self._turn):
            bucket = self._buckets[key]
            while bucket and not self.waits(bucket[0]):
                bucket.popleft()
            if bucket:
                self._turn = self._turn[place:] + self._turn[:place]
                if place or not self._granted:
                    self._granted = len(bucket) if self._whole_turns else 1
                rows = bucket[0].graph.rows
                most = min(self.most, self.numbers.free // (2 * rows))
                taken: list[Taken] = []
                while bucket and len(taken) < most:
                    each = bucket.popleft()
                    taken += [each] if self.waits(each) else []
                self._granted -= min(self._granted, len(taken))
                if not self._granted:
                    self._turn.append(self._turn.pop(0))
                return taken
        return []

    def plan(self, batch: Batch, worker: int) -> Iterator[Round]:
        batch.spill_read_rows()
        count = batch.taken[0].graph.rows
        rows = batch.first[:-1, None] + np.arange(count)
        bounds = -(-batch.steps[rows].max(axis=0) // self._width) * self._width
        bounds = np.where(batch.steps[rows].max(axis=0) == 1, 1, bounds)  # a node is not a chain
        batch.nodes_left = int(bounds.sum()) * len(batch.taken)
        return self._rounds(batch, worker, rows, bounds)

    def _rounds(self, batch: Batch, worker: int, rows: np.ndarray, bounds: np.ndarray) -> Iterator[Round]:
        made: list[tuple[Task, np.ndarray]] = []
        last = -1
        for place, bound in enumerate(bounds.tolist()):
            kind = int(batch.kind[rows[0, place]])
            for step in range(bound):
                if made and (kind != last or len(made) == self.max_tasks):
                    yield batch.round(worker, last, made)
                    made = []
                last = kind
                made.append(batch.task(kind, rows[:, place], np.full(len(rows), step)))
        yield batch.round(worker, last, made)


class Merging(FixedBatches):
    """Graphs of a fixed set of requests merged into one, as in TensorFlow Fold and DyNet (section 2.2.3).

    By "depth", nodes of one type at one distance from the inputs are one task (Fold). By "agenda", the next type is the
    one whose remaining nodes have the smallest average depth, with all of its ready nodes (DyNet). The graphs determine
    which nodes are merged: give cells for Fold, and their operators for DyNet. A task larger than the cell's largest
    size is split.
    """

    def __init__(
        self,
        cells: Sequence[Cell],
        types: Mapping[Cell, int] | None = None,
        *,
        by: Literal["depth", "agenda"],
        most: int,
        sizes: Sequence[tuple[int, ...]] | None = None,
        workers: int = 1,
        max_tasks: int = MAX_TASKS,
        capacity: int = CAPACITY,
    ) -> None:
        """Parameters of `FixedBatches`, and the order of merging."""
        super().__init__(cells, types, most=most, sizes=sizes, workers=workers, max_tasks=max_tasks, capacity=capacity)
        self._by = by

    def take(self) -> list[Taken]:
        taken: list[Taken] = []
        free = self.numbers.free
        for each in self._waiting.values():
            free -= each.graph.rows
            if len(taken) == self.most or free < 0:
                break
            taken.append(each)
        return taken

    def plan(self, batch: Batch, worker: int) -> Iterator[Round]:
        batch.nodes_left = int(batch.steps.sum())
        begins = _depths(batch)
        return self._depth(batch, worker, begins) if self._by == "depth" else self._agenda(batch, worker, begins)

    def _rounds(self, batch: Batch, worker: int, kind: int, rows: np.ndarray, steps: np.ndarray) -> Iterator[Round]:
        """Rounds with one node of each of these rows, in tasks of at most the cell's largest size."""
        most = self.sizes[kind][-1]
        begins = range(0, len(rows), most)
        for first in range(0, len(begins), self.max_tasks):
            some = begins[first : first + self.max_tasks]
            made = [batch.task(kind, rows[at : at + most], steps[at : at + most]) for at in some]
            yield batch.round(worker, kind, made)

    def _depth(self, batch: Batch, worker: int, begins: np.ndarray) -> Iterator[Round]:
        kinds = np.unique(batch.kind).tolist()
        of_kind = [np.flatnonzero(batch.kind == kind) for kind in kinds]
        for depth in range(int((begins + batch.steps).max())):
            for kind, mine in zip(kinds, of_kind, strict=True):
                rows = mine[(begins[mine] <= depth) & (depth < begins[mine] + batch.steps[mine])]
                if len(rows):
                    yield from self._rounds(batch, worker, kind, rows, depth - begins[rows])

    def _agenda(self, batch: Batch, worker: int, begins: np.ndarray) -> Iterator[Round]:
        order = np.argsort(batch.producer, kind="stable")
        readers = batch.reader[order]
        bounds = np.searchsorted(batch.producer[order], np.arange(len(batch.steps) + 1))
        waits = np.bincount(batch.reader, minlength=len(batch.steps))
        left, step = batch.steps.copy(), np.zeros(len(waits), np.int64)
        ready = np.flatnonzero(waits == 0)
        agenda = {kind: ready[batch.kind[ready] == kind] for kind in np.unique(batch.kind).tolist()}
        depths = np.zeros(len(self.cells))
        nodes = np.zeros(len(self.cells))
        np.add.at(depths, batch.kind, batch.steps * begins + batch.steps * (batch.steps - 1) / 2)
        np.add.at(nodes, batch.kind, batch.steps)
        while any(map(len, agenda.values())):
            kind = min(
                (each for each, rows in agenda.items() if len(rows)), key=lambda each: depths[each] / nodes[each]
            )
            rows = agenda[kind]
            yield from self._rounds(batch, worker, kind, rows, step[rows])
            depths[kind] -= float((begins[rows] + step[rows]).sum())
            nodes[kind] -= len(rows)
            step[rows] += 1
            left[rows] -= 1
            agenda[kind] = rows[left[rows] > 0]
            spans = [readers[bounds[row] : bounds[row + 1]] for row in rows[left[rows] == 0].tolist()]
            if not spans:
                continue
            freed = np.concatenate(spans)
            np.subtract.at(waits, freed, 1)
            freed = np.unique(freed[waits[freed] == 0])
            for each, waiting in agenda.items():
                mine = freed[batch.kind[freed] == each]
                if len(mine):
                    agenda[each] = np.concatenate([waiting, mine])


def _depths(batch: Batch) -> np.ndarray:
    """For each row, the depth of its first node: the number of nodes on the longest path that leads to it."""
    begins = np.zeros(len(batch.steps), np.int64)
    while True:
        later = begins.copy()
        np.maximum.at(later, batch.reader, begins[batch.producer] + batch.steps[batch.producer])
        if np.array_equal(later, begins):
            return begins
        begins = later
