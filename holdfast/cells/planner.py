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
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np

from holdfast.cells import algorithm
from holdfast.cells.cell import Cell, Output, State, Value, padded_size, sizes_by_type
from holdfast.cells.graph import ZEROS, CellGraph
from holdfast.cells.graph_batch import GraphBatch
from holdfast.cells.node_memory import Batch, NodeMemory
from holdfast.cells.partition import Partition, Splitter
from holdfast.cells.plan import (
    FIRST_ROW,
    NO_OUTPUTS,
    CellOutputs,
    CellRequest,
    CellRequests,
    Layout,
    Move,
    Returned,
    Round,
    Task,
)
from holdfast.cells.results import Alone, Result, ResultTable
from holdfast.cells.table import NOBODY, Numbers, Queues, Ranges, empty_table
from holdfast.cells.waiting import Lone, Lot

MAX_TASKS = 5
"""MaxTasksToSubmit (Algorithm 1, line 3): the largest number of tasks in a round."""
CAPACITY = 16384
"""The default number of rows."""
ADMITTED = 128
"""Number of waiting requests that get rows before a round, even if the round is full without them.

If it is full, the rest could not run in it, and the device would wait while they get rows.
"""
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

    def add(self, request: CellRequest | CellRequests) -> None: ...

    def abort(self, request_id: str) -> None: ...

    def schedule(self, worker: int, now: float) -> Round | None: ...

    def update(self, plan: Round, result: Returned) -> CellOutputs: ...

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

    def update(self, plan: Round, result: Returned, now: float) -> CellOutputs:
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
        layout, by_type = Layout(cells), sizes_by_type(self.types, sizes)
        first_of = {number: cell for cell, number in reversed(self.types.items())}
        firsts = [first_of[number] for number in range(len(by_type))]
        self._memory = NodeMemory(firsts, self.types, capacity)
        self._kinds = [
            _Kind(number, cell, some, layout, ranges)
            for number, (cell, some, ranges) in enumerate(zip(firsts, by_type, self._memory.ranges, strict=True))
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
        self._results = ResultTable(self._memory.ranges, capacity)
        self._where: dict[str, int] = {}
        """For each request: its first row, or if it has none yet, -1 minus the number of its lot."""
        self._lots: dict[int, Lone | Lot] = {}
        """Requests that wait, by the number of the call of `add`, oldest first."""
        self._adds = 0
        """Number of calls of `add`."""
        self._waiting = 0
        """Number of requests that wait."""
        self._stops = False
        """Whether any chain so far may end early."""
        self._sent: list[deque[_Sent]] = [deque() for _ in range(workers)]
        """Rounds in flight, by worker, oldest first."""
        self._rounds = 0
        """Number of rounds that were planned."""
        self._completed = [0] * workers
        """Number of completed rounds, by worker."""
        self._retired: list[tuple[list[int], np.ndarray]] = []
        """Requests that ended early, by their first rows. They are free once each worker has completed this number of
        rounds.
        """
        self._numbers = Numbers(FIRST_ROW, capacity)
        self._table = empty_table(capacity)
        self._sources = np.full((capacity, self._widths.shape[1]), NOBODY, np.int32)
        self._queues = Queues(len(self._kinds), capacity)
        self._counts = np.zeros(2, np.int64)

    def worker(self, number: int) -> CellWorker:
        """The planner of one worker."""
        return CellWorker(self, number)

    def add(self, request: CellRequest | CellRequests) -> None:
        """Queue requests. Raises ValueError, with the reason, if one can never run; then none of them is queued."""
        lot = self._lone(request) if isinstance(request, CellRequest) else self._lot(request)
        where = dict.fromkeys(lot.ids, -1 - self._adds)
        if len(where) < len(lot.ids) or not self._where.keys().isdisjoint(where):
            twice = next(id for at, id in enumerate(lot.ids) if id in self._where or id in lot.ids[:at])
            raise ValueError(f"request id {twice} is already in use; give each its own")
        self._where |= where
        self._lots[self._adds] = lot
        self._adds += 1
        self._waiting += len(where)

    def abort(self, request_id: str) -> None:
        """End a request at once. Ignores a request that has ended.

        Its nodes in flight still run, and their results are dropped.
        """
        first = self._where.pop(request_id, None)
        if first is None:
            return
        if first < 0:
            self._waiting -= 1
            if self._lots[-1 - first].drop(request_id):
                del self._lots[-1 - first]
            return
        firsts = np.array([first])
        self._table["lost"][algorithm.rows_of(self._table, firsts)] = True
        algorithm.leave(self._table, self._queues.rows, self._queues.bounds)
        self._retire(firsts)

    def schedule(self, worker: int, now: float) -> Round | None:
        """Algorithm 1, Schedule (lines 4 to 11). None if nothing can be formed for this worker."""
        if self._lots:
            self._admit()
        for kind in self._choose():
            plan = self._batch(kind, worker, now)
            if plan is not None:
                return plan
        return None

    def update(self, plan: Round, result: Returned) -> CellOutputs:
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
        firsts, started, early = algorithm.complete(
            self._table,
            self._queues.rows,
            self._queues.bounds,
            self._memory.links.items[0],
            self._counts,
            sent.rows,
            sent.at,
            sent.last,
            stops,
        )
        ended = self._finish(firsts, started, early) if len(firsts) else NO_OUTPUTS
        if self._retired:
            self._free_retired()
        return ended

    def requests_of(self, task: Task) -> list[str]:
        """The requests of a task's nodes, in the order of the nodes. Call it before the next `update` or `abort`."""
        return self._results.ids(self._table["request"][task.rows])

    def has_work(self) -> bool:
        """Whether any request has not ended."""
        return bool(self._where)

    def stats(self) -> CellStats:
        """The current queues and rows."""
        total = self._capacity - FIRST_ROW
        return CellStats(
            waiting=self._waiting,
            running=len(self._where) - self._waiting,
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

    def _lone(self, request: CellRequest) -> Lone:
        """A request to queue. Raises ValueError if it can never run."""
        graph = request.graph
        results = self._places_of(graph)
        if not graph.rows:
            raise ValueError("the graph has no nodes; it needs at least 1")
        self._check_rows(graph.rows)
        return Lone((request.id,), graph, results)

    def _lot(self, requests: CellRequests) -> Lot:
        """Requests to queue. Raises ValueError if one can never run."""
        graphs = requests.graphs
        if len(requests.ids) != graphs.requests:
            raise ValueError(f"there are {len(requests.ids)} ids for {graphs.requests} requests")
        form, rows = self._results.form_of(graphs, self.types, self._held), graphs.rows
        if rows.min() < 1:
            raise ValueError("a request of the batch has no nodes; each needs at least 1")
        self._check_rows(int(rows.max()))
        return Lot(list(requests.ids), graphs, form, np.cumsum(rows))

    def _check_rows(self, rows: int) -> None:
        if rows > self._capacity - FIRST_ROW:
            raise ValueError(
                f"the graph has {rows} nodes, where a chain counts as one; at most {self._capacity - FIRST_ROW} fit"
            )

    def _places_of(self, graph: CellGraph) -> list[Result]:
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
        """Give rows to waiting requests, first come, first served, while there are enough for a whole graph.

        After ADMITTED requests, the rest waits for a later round if this one is full.
        """
        waiting = self._waiting
        while self._lots and (waiting - self._waiting < ADMITTED or not self._full()):
            number, lot = next(iter(self._lots.items()))
            if isinstance(lot, Lone):
                if not self._admit_alone():
                    return
            elif not self._admit_lot(number, lot):
                return

    def _full(self) -> bool:
        """Whether some type has enough ready rows to fill a whole round of all workers."""
        return any(
            algorithm.fills(
                self._table,
                self._queues.rows[kind.number],
                self._queues.bounds[kind.number],
                kind.most * self._workers,
                self._max_tasks,
            )
            for kind in self._kinds
        )

    def _admit_alone(self) -> bool:
        """Give rows to waiting requests that were added alone, at most ADMITTED, up to the first lot.

        Returns False if there are no rows.
        """
        free = self._numbers.free
        lots: list[Lone] = []
        numbers = []
        for number, lot in self._lots.items():
            if not isinstance(lot, Lone):
                break
            free -= lot.graph.rows
            if free < 0 or len(lots) == ADMITTED:
                break
            lots.append(lot)
            numbers.append(number)
        if not lots:
            return False
        for number in numbers:
            del self._lots[number]
        graphs = [lot.graph for lot in lots]
        found = self._splitter.split(graphs)
        batch = self._memory.begin(self._numbers.take(len(found.types)), len(lots))
        starts = self._memory.store(graphs, batch)
        rows = batch.rows
        firsts = found.first.tolist()
        numbers = rows[found.first].tolist()
        for lot, start, first, end, row in zip(lots, starts, firsts, [*firsts[1:], len(rows)], numbers, strict=True):
            offsets = [offset + before for offset, before in zip(batch.offsets, start, strict=True)]
            (id,) = lot.ids
            self._where[id] = row
            self._results.note_alone(row, id, Alone(lot.results, lot.graph.constants, offsets, rows[first:end]))
        self._enter(found, batch, self._stops_alone(graphs))
        self._waiting -= len(lots)
        return True

    def _admit_lot(self, number: int, lot: Lot) -> bool:
        """Give rows to requests of a lot, up to one that was aborted. False if there are no rows for the next one."""
        begin, end = lot.next_run(self._numbers.free)
        if begin == end:
            return False
        graphs, ids = lot.graphs.part(begin, end), lot.ids[begin:end]
        found = self._splitter.split_batch(graphs)
        batch = self._memory.begin(self._numbers.take(len(found.types)), len(ids))
        firsts = batch.rows[found.first]
        begins = self._memory.store_batch(graphs, lot.form.types, batch)
        stops, chains = _stops_of(graphs, batch.rows, found.first)
        self._results.note(firsts, ids, lot.form, graphs, begins, chains)
        self._where.update(zip(ids, firsts.tolist(), strict=True))
        for type_, block in zip(lot.form.types, graphs.blocks, strict=True):
            if block.stop is not None:
                self._kinds[type_].stops = self._stops = True
        self._enter(found, batch, stops)
        self._waiting -= len(ids)
        if lot.admitted(end):
            del self._lots[number]
        return True

    def _enter(self, found: Partition, batch: Batch, stops: np.ndarray) -> None:
        rows = batch.rows
        link = batch.hold(self._memory.links, len(rows) + len(found.reader)) if len(found.reader) else 0
        algorithm.enter(
            self._table,
            self._sources,
            self._queues.rows,
            self._queues.bounds,
            self._memory.links.items[0],
            self._counts,
            rows,
            *found,
            np.array(batch.offsets),
            link,
            stops,
            self._widths,
            self._places,
            batch.number,
        )

    def _stops_alone(self, graphs: Sequence[CellGraph]) -> np.ndarray:
        """The chains of these graphs that may stop, as `enter` takes them."""
        if not any(graph.chains_stop for graph in graphs):
            return NO_CHAINS
        stops, row = [], 0
        for graph in graphs:
            for block in graph.blocks:
                if block.stop is not None:
                    stops.append((row, block.cell.returned.index(block.stop[0]), block.stop[1]))
                    self._kinds[self.types[block.cell]].stops = self._stops = True
                row += block.rows
        return np.array(stops, np.int64)

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
            self._memory.links.items[0],
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

    def _finish(self, firsts: np.ndarray, started: np.ndarray, early: np.ndarray) -> CellOutputs:
        """End the requests that have these first rows. `early` marks those of which steps may be in flight."""
        ended = self._results.read(self._table, firsts, started)
        for id in ended.ids:
            del self._where[id]
        if self._stops and early.any():
            self._retire(firsts[early])
            firsts = firsts[~early]
        if len(firsts):
            self._free(firsts)
        return ended

    def _retire(self, firsts: np.ndarray) -> None:
        """Free requests that ended early once none of their tasks can be in flight."""
        if any(self._sent):
            rounds = [done + len(sent) for done, sent in zip(self._completed, self._sent, strict=True)]
            self._retired.append((rounds, firsts))
        else:
            self._free(firsts)

    def _free_retired(self) -> None:
        while self._retired and all(map(int.__le__, self._retired[0][0], self._completed)):
            self._free(self._retired.pop(0)[1])

    def _free(self, firsts: np.ndarray) -> None:
        """Free the rows and ranges of requests."""
        self._results.forget(firsts)
        rows, batches = algorithm.free(self._table, firsts, self._memory.left)
        self._numbers.give(rows)
        for number in batches.tolist():
            self._memory.end(number)


def _stops_of(graphs: GraphBatch, rows: np.ndarray, first: np.ndarray) -> tuple[np.ndarray, list[np.ndarray | None]]:
    """The chains of a batch that may stop: as `enter` takes them, and for each block their rows in the table.

    `rows` are those of the batch, and `first` is that of a Partition.
    """
    chains: list[np.ndarray | None] = [None] * len(graphs.blocks)
    if all(block.stop is None for block in graphs.blocks):
        return NO_CHAINS, chains
    stops, at = [], first
    for number, block in enumerate(graphs.blocks):
        if block.stop is not None:
            output, value = block.stop
            entry = np.empty((len(at), 3), np.int64)
            entry[:, 0], entry[:, 1], entry[:, 2] = at, block.cell.returned.index(output), value
            stops.append(entry)
            chains[number] = rows[at]
        at = at + (1 if block.chain else block.counts)
    return np.concatenate(stops), chains


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

    def __init__(self, number: int, cell: Cell, sizes: tuple[int, ...], layout: Layout, ranges: Ranges) -> None:
        self.number = number
        self.cell, self.sizes = cell, sizes
        self.most, self.least = sizes[-1], sizes[0]
        self.widths = np.array([layout.width_of(cell.inputs[name]) for name in cell.states], np.int64)
        """Width of the arena of each State input."""
        carried = [(cell.states.index(name), *layout.within(cell, name)) for name in cell.carried]
        self.carried = np.array(carried, np.int64).reshape(-1, 3)
        """Position, arena's width and place of each State input that a chain takes from its previous step."""
        self.ranges = ranges
        """Memory of each node's values and then its returned outputs."""
        self.position = {name: len(cell.values) + number for number, name in enumerate(cell.returned)}
        """The position of each returned output in `ranges`, after the values."""
        self.tasks = 0
        """Number of tasks in flight."""
        self.batches: Counter[int] = Counter()
        """Number of tasks so far, by their number of nodes."""
        self.stops = False
        """Whether any chain of this type may end early."""


def prepare() -> None:
    """Compile the planning functions, so that no request waits for them.

    This takes seconds on a machine's first start, and then much less.
    """
    outputs = {"state": Output(), "word": Output((), "int32", returned=True), "score": Output(returned=True)}
    step = Cell("step", dict, {"token": Value((), "int32"), "state": State()}, outputs)
    planner = CellPlanner([step], workers=2, capacity=16)
    for stop in (("word", 1), ("score", 1)):
        graph = CellGraph()
        graph.chain(step, 2, token=[0, 0], stop=stop)
        graph.add(step, 2, token=[0, 0], state=([ZEROS, ZEROS], "state"))
        planner.add(CellRequest(stop[0], graph))
    batch = GraphBatch(1)
    batch.chain(step, [2], token=[0, 0])
    batch.add(step, [1], token=[0], state=([1], "state"))
    planner.add(CellRequests(("batch",), batch))
    plan = planner.schedule(0, 0.0)
    planner._full()
    planner.abort("score")
    while plan is not None:
        sizes = [len(task.rows) for task in plan.tasks]
        planner.update(plan, [(np.ones(size, np.int32), np.ones(size, np.float32)) for size in sizes])
        plan = planner.schedule(0, 0.0)
