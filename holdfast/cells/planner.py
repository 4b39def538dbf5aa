"""The planner of cells: BatchMaker's request processor and Algorithm 1, over arrays. Pure.

All live nodes are rows of one table; a chain is one row. A task is then a part of its type's queue, for any number of
nodes, and a row's number also gives its state's place on the device. A request holds its rows until it ends.

The paper leaves some points open (section 2.4.3). They are decided here as follows:

- A worker for which nothing can be formed stays idle until a request or a completion comes.
- If all ready nodes of the chosen type are pinned to other workers, the next type is tried. Among types with equal
  priority, the first defined goes first.
- A batch between two sizes is padded up.
- The queue of a type is in the order in which its subgraphs became ready. Subgraphs that become ready together, by the
  completion of one round, are in the order in which their requests came, and then in the order of the graph. Nodes
  within a subgraph are in the order of the graph, too.
- Requests join when the next round is formed, first come, first served, while there are rows for a whole graph.
- A request ends early if it is aborted or a chain of it stops. Its rows are free once the rounds in flight at that
  time have completed.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import NamedTuple, Protocol

import numpy as np

from holdfast.cells import algorithm
from holdfast.cells.cell import Cell, Output, State, Value, padded_size, sizes_by_type
from holdfast.cells.graph import ZEROS, CellGraph
from holdfast.cells.partition import Splitter
from holdfast.cells.plan import FIRST_ROW, CellOutput, CellRequest, Layout, Move, Returned, Round, Task
from holdfast.cells.table import NOBODY, Numbers, Queues, Ranges, empty_table

MAX_TASKS = 5
"""MaxTasksToSubmit (Algorithm 1, line 3): the largest number of tasks in a round."""
CAPACITY = 16384
"""The default number of rows."""
MOST_WORKERS = 62
"""Largest number of workers. A row's `copies` has one bit for each worker."""
NO_STOPS = np.zeros(0, np.bool_)
NO_CHAINS = np.zeros((0, 3), np.int64)


@dataclass(frozen=True, slots=True)
class CellStats:
    """The current state of the planner."""

    waiting: int
    """Number of requests that have no rows yet."""
    running: int
    """Number of requests that have rows."""
    rows_used: int
    rows_total: int
    ready: tuple[int, ...]
    """Number of ready nodes, by type."""
    tasks: tuple[int, ...]
    """Number of tasks in flight, by type."""
    types: tuple[str, ...] = ()
    """The name of each type's first cell."""
    batches: tuple[Mapping[int, int], ...] = ()
    """For each type, the number of tasks planned so far, by their number of nodes."""


class SharedPlanner(Protocol):
    """A planner of rounds for several workers."""

    def add(self, request: CellRequest) -> None: ...

    def abort(self, request_id: str) -> None: ...

    def schedule(self, worker: int, now: float) -> Round | None: ...

    def update(self, plan: Round, result: Returned) -> list[CellOutput]: ...

    def has_work(self) -> bool: ...

    def stats(self) -> CellStats: ...


class CellWorker:
    """One worker's Planner. Its rounds come from the planner that all workers share."""

    def __init__(self, planner: SharedPlanner, number: int) -> None:
        self.add, self.abort, self.has_work, self.stats = planner.add, planner.abort, planner.has_work, planner.stats
        self._planner, self._number = planner, number

    def schedule(self, now: float) -> Round | None:
        """The next round of this worker. None if nothing can be formed before a round in flight ends."""
        return self._planner.schedule(self._number, now)

    def update(self, plan: Round, result: Returned, now: float) -> list[CellOutput]:
        """Apply the result of the oldest round in flight. Returns the requests that it ends."""
        return self._planner.update(plan, result)


class CellPlanner:
    """The requests, their graphs, and the choice of nodes that run next on each worker.

    `worker(n)` is the Planner of worker n.
    """

    def __init__(
        self,
        cells: Sequence[Cell],
        types: Mapping[Cell, int] | None = None,
        *,
        sizes: Sequence[tuple[int, ...]] | None = None,
        workers: int = 1,
        max_tasks: int = MAX_TASKS,
        capacity: int = CAPACITY,
    ) -> None:
        """`types` numbers the cells from 0; equal cells share a number. By default each cell is its own type.

        `capacity` is in rows. `sizes` are batch sizes by type number, by default those of the cells. Raises ValueError
        for a number that is out of range.
        """
        for name, value, least in (("workers", workers, 1), ("max_tasks", max_tasks, 1), ("capacity", capacity, 2)):
            if value < least:
                raise ValueError(f"{name} is {value}; it must be at least {least}")
        if workers > MOST_WORKERS:
            raise ValueError(f"workers is {workers}; it must be at most {MOST_WORKERS}")
        self.types = dict(types) if types is not None else {cell: number for number, cell in enumerate(cells)}
        layout = Layout(cells)
        first_of = {number: cell for cell, number in reversed(self.types.items())}
        self._kinds = [
            _Kind(number, first_of[number], some, layout)
            for number, some in enumerate(sizes_by_type(self.types, sizes))
        ]
        self._held = {
            (cell, output): (number, self._kinds[number].position[output])
            for cell, number in self.types.items()
            for output in cell.returned
        }
        """The type of each cell and the position of each of its returned outputs in the type's ranges."""
        self._splitter = Splitter(self.types)
        self._widths, self._places = self._arenas(layout)
        self._workers, self._max_tasks, self._capacity = workers, max_tasks, capacity
        self._waiting: dict[str, tuple[CellGraph, list[_Result]]] = {}
        self._running: dict[str, _Request] = {}
        self._by_row: dict[int, _Request] = {}
        """Running requests, by their first row."""
        self._sent: list[deque[_Sent]] = [deque() for _ in range(workers)]
        """Rounds in flight, by worker, oldest first."""
        self._rounds = 0
        """Number of rounds that were planned."""
        self._completed = [0] * workers
        """Number of completed rounds, by worker."""
        self._retired: list[tuple[list[int], list[_Request]]] = []
        """Requests that ended early. Their rows are free once each worker has completed this number of rounds."""
        self._numbers = Numbers(FIRST_ROW, capacity)
        self._table = empty_table(capacity)
        self._sources = np.full((capacity, self._widths.shape[1]), NOBODY, np.int32)
        self._queues = Queues(len(self._kinds), capacity)
        self._links = Ranges([((), "int64")])
        self._counts = np.zeros(2, np.int64)

    def worker(self, number: int) -> CellWorker:
        """The planner of one worker."""
        return CellWorker(self, number)

    def add(self, request: CellRequest) -> None:
        """Queue a request. Raises ValueError, with the reason, if it can never run."""
        if request.id in self._waiting or request.id in self._running:
            raise ValueError(f"request id {request.id} is already in use; give each its own")
        graph = request.graph
        results = self._places_of(graph)
        if not graph.rows:
            raise ValueError("the graph has no nodes; it needs at least 1")
        if graph.rows > self._capacity - FIRST_ROW:
            raise ValueError(
                f"the graph has {graph.rows} nodes, where a chain counts as one; "
                f"at most {self._capacity - FIRST_ROW} fit"
            )
        self._waiting[request.id] = graph, results

    def abort(self, request_id: str) -> None:
        """End a request at once. Ignores a request that has ended.

        Its nodes in flight still run, and their results are dropped.
        """
        if self._waiting.pop(request_id, None) is not None:
            return
        request = self._running.pop(request_id, None)
        if request is not None:
            rows = request.rows
            del self._by_row[int(rows[0])]
            self._table["lost"][rows] = True
            algorithm.leave(self._table, self._queues.rows, self._queues.bounds)
            self._retire([request])

    def schedule(self, worker: int, now: float) -> Round | None:
        """Algorithm 1, Schedule (lines 4 to 11). None if nothing can be formed for this worker."""
        if self._waiting:
            self._admit()
        for kind in self._choose():
            plan = self._batch(kind, worker, now)
            if plan is not None:
                return plan
        return None

    def update(self, plan: Round, result: Returned) -> list[CellOutput]:
        """Apply the end of a worker's oldest round. Returns the requests that this ends."""
        kind, sent = self._kinds[plan.type], self._sent[plan.worker].popleft()
        self._completed[plan.worker] += 1
        kind.tasks -= len(sent.ends)
        first = len(kind.cell.values)
        stops = np.zeros(len(sent.rows), np.bool_) if kind.stops else NO_STOPS
        begin = 0
        for end, outputs in zip(sent.ends, result, strict=True):
            for items, output in zip(kind.ranges.items[first:], outputs, strict=True):
                items[sent.at[begin:end]] = output
            if kind.stops:
                for number, output in enumerate(outputs):
                    if output.ndim == 1:
                        wide = output.astype(np.float64 if output.dtype.kind == "f" else np.int64)
                        algorithm.find_stops(self._table, sent.rows[begin:end], number, wide, stops[begin:end])
            begin = end
        if self._workers > 1:
            algorithm.unpin(self._table, sent.pinned, sent.round)
        firsts = algorithm.complete(
            self._table,
            self._queues.rows,
            self._queues.bounds,
            self._links.items[0],
            self._counts,
            sent.rows,
            sent.at,
            sent.last,
            stops,
        )
        ended = self._finish(firsts) if len(firsts) else []
        if self._retired:
            self._free_retired()
        return ended

    def requests_of(self, task: Task) -> list[str]:
        """The requests of a task's nodes, in the order of the nodes. Call it before the next `update` or `abort`."""
        return [self._by_row[first].id for first in self._table["request"][task.rows].tolist()]

    def has_work(self) -> bool:
        """Whether any request has not ended."""
        return bool(self._waiting or self._running)

    def stats(self) -> CellStats:
        """The current queues and rows."""
        total = self._capacity - FIRST_ROW
        return CellStats(
            waiting=len(self._waiting),
            running=len(self._running),
            rows_used=total - self._numbers.free,
            rows_total=total,
            ready=tuple(self._queues.length(kind.number) for kind in self._kinds),
            tasks=tuple(kind.tasks for kind in self._kinds),
            types=tuple(kind.cell.name for kind in self._kinds),
            batches=tuple(dict(kind.batches) for kind in self._kinds),
        )

    # The request processor: requests become rows.

    def _arenas(self, layout: Layout) -> tuple[np.ndarray, np.ndarray]:
        """Widths of the arenas of State inputs [types, inputs], and places of outputs in their rows [types, names]."""
        names = self._splitter.outputs
        widths = np.ones((len(self._kinds), max(1, *(len(kind.cell.states) for kind in self._kinds))), np.int64)
        places = np.zeros((len(self._kinds), len(names)), np.int64)
        for kind in self._kinds:
            widths[kind.number, : len(kind.widths)] = kind.widths
            for name in kind.cell.outputs:
                places[kind.number, names[name]] = layout.within(kind.cell, name)[1]
        return widths, places

    def _places_of(self, graph: CellGraph) -> list[_Result]:
        """The results of a graph and their places. Raises ValueError for cells and results that do not fit."""
        blocks, named = graph.blocks, graph.results
        if len(blocks) == 1 and len(named) == 1:
            block, (name, output, nodes) = blocks[0], named[0]
            found = self._held.get((block.cell, output))
            if found is not None and isinstance(nodes, range) and nodes == range(block.count):
                return [(name, [(*found, 0, block.count, NOBODY if block.stop is None else 0)])]
        checked = self._splitter.check(graph)
        of_block: list[tuple[int, int]] = []  # for each block: nodes of its type before it, its chain
        before = [0] * len(self._kinds)
        row = 0
        for block in blocks:
            number = self.types[block.cell]
            of_block.append((before[number], NOBODY if block.stop is None else row))
            before[number] += block.count
            row += block.rows
        results = []
        for name, output, parts in checked:
            places = []
            for at, begin, end in parts:
                offset, chain = of_block[at]
                places.append((*self._held[blocks[at].cell, output], offset + begin, offset + end, chain))
            results.append((name, places))
        return results

    def _admit(self) -> None:
        """Give rows to waiting requests, first come, first served, while there are enough for a whole graph."""
        free = self._numbers.free
        ids: list[str] = []
        for id, (graph, _) in self._waiting.items():
            free -= graph.rows
            if free < 0:
                break
            ids.append(id)
        if not ids:
            return
        graphs, results = zip(*map(self._waiting.pop, ids), strict=True)
        found = self._splitter.split(graphs)
        rows = self._numbers.take(len(found.types))
        batch = _Batch(rows, len(ids))
        stops, starts = self._make_room(graphs, batch)
        running, by_row = self._running, self._by_row
        firsts = found.first.tolist()
        ends = [*firsts[1:], len(rows)]
        for id, graph, places, start, first, end, number in zip(
            ids, graphs, results, starts, firsts, ends, rows[found.first].tolist(), strict=True
        ):
            running[id] = by_row[number] = _Request(id, batch, first, end, start, graph.constants, places)
        link = batch.hold(self._links, len(rows) + len(found.reader)) if len(found.reader) else 0
        algorithm.enter(
            self._table,
            self._sources,
            self._queues.rows,
            self._queues.bounds,
            self._links.items[0],
            self._counts,
            rows,
            *found,
            np.array(batch.offsets),
            link,
            stops,
            self._widths,
            self._places,
        )

    def _make_room(self, graphs: Sequence[CellGraph], batch: _Batch) -> tuple[np.ndarray, list[tuple[int, ...]]]:
        """Store the values of these graphs in ranges of `batch`.

        Returns the chains that may stop, for `enter`, and for each graph the number of nodes of each type before it.
        """
        types, kinds = self.types, self._kinds
        if len(kinds) == 1 and not any(graph.chains_stop for graph in graphs):
            ends = list(accumulate([graph.nodes for graph in graphs]))
            batch.offsets = [
                self._store(kinds[0], ends[-1], [block.values for graph in graphs for block in graph.blocks], batch)
            ]
            return NO_CHAINS, [(end,) for end in [0, *ends[:-1]]]
        nodes = [0] * len(kinds)
        values: list[list[list[np.ndarray]]] = [[] for _ in kinds]
        stops: list[tuple[int, int, int]] = []
        starts = []
        row = 0
        for graph in graphs:
            starts.append(tuple(nodes))
            for block in graph.blocks:
                number = types[block.cell]
                nodes[number] += block.count
                values[number].append(block.values)
                if block.stop is not None:
                    stops.append((row, block.cell.returned.index(block.stop[0]), block.stop[1]))
                    kinds[number].stops = True
                row += block.rows
        batch.offsets = [
            self._store(kind, total, given, batch) if total else 0
            for kind, total, given in zip(kinds, nodes, values, strict=True)
        ]
        return np.array(stops, np.int64).reshape(-1, 3), starts

    def _store(self, kind: _Kind, total: int, values: list[list[np.ndarray]], batch: _Batch) -> int:
        """Hold a range for `total` nodes of a type, and store their blocks' values there. Returns its offset."""
        offset = batch.hold(kind.ranges, total)
        for position in range(len(kind.cell.values)):
            items = kind.ranges.items[position][offset : offset + total]
            np.concatenate([each[position] for each in values], out=items)
        return offset

    # Algorithm 1.

    def _choose(self) -> list[_Kind]:
        """The types in the order in which they are tried. The first type is the choice of lines 5 to 10."""
        lengths = {kind: self._queues.length(kind.number) for kind in self._kinds}
        ready = [kind for kind in self._kinds if lengths[kind]]
        if len(ready) < 2:
            return ready
        best = [kind for kind in ready if lengths[kind] >= kind.most]
        best = best or [kind for kind in ready if not kind.tasks]
        return sorted(ready, key=lambda kind: (kind in best, kind.cell.priority), reverse=True)

    def _batch(self, kind: _Kind, worker: int, now: float) -> Round | None:
        """Batch (lines 12 to 23)."""
        most, states = self._max_tasks * kind.most, len(kind.widths)
        rows, at, last = np.empty(most, np.int32), np.empty(most, np.int64), np.empty(most, np.bool_)
        read, ends = np.empty(most * states, np.int32), np.empty(self._max_tasks, np.int64)
        self._rounds += 1
        several = self._workers > 1
        pinned = np.empty(most if several else 0, np.int64)
        moved = np.empty((most * states if several else 0, 2), np.int64)
        count, pins, moves = algorithm.batch(
            self._table,
            self._sources,
            self._queues.rows,
            self._queues.bounds,
            self._links.items[0],
            kind.number,
            kind.least,
            kind.most,
            kind.carried,
            now,
            rows,
            read,
            at,
            last,
            ends,
            worker,
            self._rounds if several else 0,
            kind.widths,
            pinned,
            moved,
        )
        if not count:
            return None
        kind.tasks += count
        bounds: list[int] = ends[:count].tolist()
        total = bounds[-1]
        self._sent[worker].append(
            _Sent(self._rounds, rows[:total], at[:total], last[:total], bounds, pinned[:pins].copy())
        )
        values = [items.take(at[:total], axis=0) for items in kind.ranges.items[: len(kind.cell.values)]]
        tasks, begin = [], 0
        for end in bounds:
            nodes = end - begin
            kind.batches[nodes] += 1
            tasks.append(
                Task(
                    rows[begin:end],
                    read[begin * states : end * states].reshape(states, nodes),
                    tuple([each[begin:end] for each in values]),
                    padded_size(kind.sizes, nodes),
                )
            )
            begin = end
        return Round(worker, kind.number, tasks, _moves(moved[:moves]) if moves else [])

    # Completion.

    def _finish(self, firsts: np.ndarray) -> list[CellOutput]:
        """End the requests that have these first rows."""
        early: list[_Request] = []
        done: list[_Request] = []
        ended = []
        running, by_row, kinds = self._running, self._by_row, self._kinds
        for first, started, stopped in zip(
            firsts.tolist(),
            self._table["started"][firsts].tolist(),
            self._table["stopped"][firsts].tolist(),
            strict=True,
        ):
            request = by_row.pop(first)
            del running[request.id]
            results = dict(request.constants) if request.constants else {}
            batch, starts = request.batch, request.starts
            for name, places in request.places:
                found = []
                for number, position, begin, end, chain in places:
                    offset = batch.offsets[number] + starts[number]
                    end = offset + end if chain == NOBODY else self._table["end"].item(request.row(chain))
                    found.append(kinds[number].ranges.items[position][offset + begin : end])
                # The memory will later hold other results.
                results[name] = found[0].copy() if len(found) == 1 else np.concatenate(found)
            ended.append(CellOutput(request.id, results, started))
            (early if stopped else done).append(request)
        if early:
            self._retire(early)
        if done:
            self._free(done)
        return ended

    def _retire(self, requests: list[_Request]) -> None:
        """Free requests that ended early once none of their tasks can be in flight."""
        if any(self._sent):
            rounds = [done + len(sent) for done, sent in zip(self._completed, self._sent, strict=True)]
            self._retired.append((rounds, requests))
        else:
            self._free(requests)

    def _free_retired(self) -> None:
        while self._retired and all(map(int.__le__, self._retired[0][0], self._completed)):
            self._free(self._retired.pop(0)[1])

    def _free(self, requests: list[_Request]) -> None:
        """Free the rows and ranges of requests."""
        rows = np.concatenate([request.batch.rows[request.first : request.end] for request in requests])
        self._table["lost"][rows] = False
        self._numbers.give(rows)
        for batch, count in Counter([request.batch for request in requests]).items():
            batch.leave(count)


def _moves(moved: np.ndarray) -> list[Move]:
    """The moves of a round, grouped by the worker that has the state."""
    rows, homes = moved[:, 0].astype(np.int32), moved[:, 1]
    return [Move(home, rows[homes == home]) for home in np.unique(homes).tolist()]


class _Sent(NamedTuple):
    """A round in flight: its nodes, one task after the other."""

    round: int
    """The number of the round, from 1."""
    rows: np.ndarray
    at: np.ndarray
    """For each node, the place of its results."""
    last: np.ndarray
    """Whether each node is its row's last step."""
    ends: list[int]
    """The end of each task among the nodes."""
    pinned: np.ndarray
    """The subgraphs of the nodes. Empty with a single worker."""


class _Kind:
    """A cell type, with the facts about its cell that the planner looks up often, and its values and results."""

    def __init__(self, number: int, cell: Cell, sizes: tuple[int, ...], layout: Layout) -> None:
        self.number = number
        self.cell, self.sizes = cell, sizes
        self.most, self.least = sizes[-1], sizes[0]
        self.widths = np.array([layout.width_of(cell.inputs[name]) for name in cell.states], np.int64)
        """Width of the arena of each State input."""
        carried = [(cell.states.index(name), *layout.within(cell, name)) for name in cell.carried]
        self.carried = np.array(carried, np.int64).reshape(-1, 3)
        """Position, arena's width and place of each State input that a chain takes from its previous step."""
        held = [cell.inputs[name] for name in cell.values] + [cell.outputs[name] for name in cell.returned]
        self.ranges = Ranges([(spec.shape, spec.dtype) for spec in held])
        """Memory for each node's values and then its returned outputs."""
        self.position = {name: len(cell.values) + number for number, name in enumerate(cell.returned)}
        """The position of each returned output in `ranges`, after the values."""
        self.tasks = 0
        """Number of tasks in flight."""
        self.batches: Counter[int] = Counter()
        """Number of tasks so far, by their number of nodes."""
        self.stops = False
        """Whether any chain of this type may end early."""


@dataclass(slots=True, eq=False)
class _Batch:
    """Requests that were given rows together. Their ranges are free once all of them have ended."""

    rows: np.ndarray
    """The rows of the requests, one request after the other."""
    left: int
    """Number of requests that have not ended."""
    held: list[tuple[Ranges, int, int]] = field(default_factory=list)
    """Memory, offset and length of each range."""
    offsets: list[int] = field(default_factory=list)
    """For each type, the offset of its nodes' values and results."""

    def hold(self, ranges: Ranges, length: int) -> int:
        """Allocate a range. Returns its offset."""
        offset = ranges.take(length)
        self.held.append((ranges, offset, length))
        return offset

    def leave(self, count: int) -> None:
        """Count requests that have ended, and free the ranges after the last."""
        self.left -= count
        if not self.left:
            for ranges, offset, length in self.held:
                ranges.give(offset, length)


_Place = tuple[int, int, int, int, int]
"""The place of some nodes' results: type, position, begin, end, chain.

The position is that of the output among the values and returned outputs of the type. `begin` and `end` count the nodes
of the type from the request's first. The chain is one that may have stopped before `end`, as a row of the request, from
0; NOBODY for other nodes.
"""
_Result = tuple[str, list[_Place]]
"""A result of a request: its name and places."""


@dataclass(slots=True, eq=False)
class _Request:
    """A request that has rows."""

    id: str
    batch: _Batch
    first: int
    """The first of its rows among those of its batch."""
    end: int
    """The end of its rows among those of its batch."""
    starts: tuple[int, ...]
    """For each type, the number of nodes of the batch that come before its own."""
    constants: Mapping[str, np.ndarray]
    places: list[_Result]

    @property
    def rows(self) -> np.ndarray:
        return self.batch.rows[self.first : self.end]

    def row(self, number: int) -> int:
        """One of its rows, counted from 0."""
        return int(self.batch.rows[self.first + number])


def prepare() -> None:
    """Compile the planning functions, so that no request waits for them.

    This takes seconds on a machine's first start, and then much less.
    """
    outputs = {"state": Output(), "word": Output((), "int32", returned=True), "score": Output(returned=True)}
    step = Cell("step", dict, {"token": Value((), "int32"), "state": State()}, outputs)
    planner = CellPlanner([step], workers=2, capacity=8)
    for stop in (("word", 1), ("score", 1)):
        graph = CellGraph()
        graph.chain(step, 2, token=[0, 0], stop=stop)
        graph.add(step, 2, token=[0, 0], state=([ZEROS, ZEROS], "state"))
        planner.add(CellRequest(stop[0], graph))
    plan = planner.schedule(0, 0.0)
    planner.abort("score")
    if plan is not None:
        sizes = [len(task.rows) for task in plan.tasks]
        planner.update(plan, [(np.ones(size, np.int32), np.ones(size, np.float32)) for size in sizes])
