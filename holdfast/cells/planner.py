"""The planner of cells: BatchMaker's request processor and Algorithm 1, over arrays. Pure.

All nodes that live are rows of one table; a chain is one row. A task is then a part of its type's queue, however many
nodes it has, and a row's number also says where its state lies on the device. A request holds its rows until it ends.

What the paper leaves open (section 2.4.3): a worker for which nothing can be formed stays idle until a request or a
completion comes. If all ready nodes of the chosen type are pinned to other workers, the next type is tried; of types
with equal priority, the first defined is. A batch between two sizes is padded up. The queue of a type is in the order
in which its subgraphs became ready; those that do so together, by the completion of one round, are in the order in
which their requests came, and then in the order of the graph, as nodes within a subgraph are. Requests join when the
next round is formed, first come, first served, while there are rows for a whole graph. The rows of a request that ended
early, because it was aborted or a chain of it stopped, are free once the rounds in flight at that time have completed.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import NamedTuple

import numpy as np

from holdfast.cells.cell import Cell
from holdfast.cells.graph import Block, CellGraph, Partition, Result, Splitter
from holdfast.cells.plan import FIRST_ROW, CellOutput, CellRequest, Layout, Move, Returned, Round, Task
from holdfast.cells.table import NOBODY, Ranges, Table, distinct
from holdfast.cells.worker_view import WorkerView

MAX_TASKS = 5
"""MaxTasksToSubmit (Algorithm 1, line 3)."""
CAPACITY = 16384
MOST_WORKERS = 62
NOT_STARTED = -1.0
GRAPH = -1
"""In place of the type of a chain: a request that is not a single chain."""


@dataclass(frozen=True, slots=True)
class CellStats:
    """The planner as it stands."""

    waiting: int
    """Requests that have no rows yet."""
    running: int
    """Requests that have rows."""
    rows_used: int
    rows_total: int
    ready: tuple[int, ...]
    """Ready nodes by type."""
    tasks: tuple[int, ...]
    """Tasks in flight by type."""
    types: tuple[str, ...] = ()
    """The name of each type's first cell."""
    batches: tuple[Mapping[int, int], ...] = ()
    """By type: how many tasks of each number of nodes were planned so far."""


class CellPlanner:
    """The requests, their graphs, and which nodes run next on which worker. Worker n's Planner is `worker(n)`."""

    def __init__(
        self,
        cells: Sequence[Cell],
        types: Mapping[Cell, int] | None = None,
        *,
        workers: int = 1,
        max_tasks: int = MAX_TASKS,
        capacity: int = CAPACITY,
    ) -> None:
        """`types` numbers the cells from 0, equal ones alike; by default each is its own type. `capacity` is in rows.

        Raises ValueError for what is out of range.
        """
        for name, value, least in (("workers", workers, 1), ("max_tasks", max_tasks, 1), ("capacity", capacity, 2)):
            if value < least:
                raise ValueError(f"{name} is {value}; it must be at least {least}")
        if workers > MOST_WORKERS:
            raise ValueError(f"workers is {workers}; it must be at most {MOST_WORKERS}")
        self.types = dict(types) if types is not None else {cell: number for number, cell in enumerate(cells)}
        self._layout = Layout(cells)
        first_of = {number: cell for cell, number in reversed(self.types.items())}
        self._kinds = [_Kind(number, first_of[number], self._layout) for number in sorted(first_of)]
        self._splitter = Splitter(self.types)
        self._widths, self._places = self._arenas()
        self._workers, self._max_tasks, self._capacity = workers, max_tasks, capacity
        self._waiting: dict[str, _Request] = {}
        self._running: dict[str, _Request] = {}
        self._by_row: dict[int, _Request] = {}
        """Running requests by their first row."""
        self._sent: list[deque[_Sent]] = [deque() for _ in range(workers)]
        """Rounds in flight."""
        self._rounds = 0
        """Rounds that were planned."""
        self._completed = [0] * workers
        """Rounds of each worker."""
        self._retired: list[tuple[list[int], list[_Request]]] = []
        """Requests that ended early, and how many rounds of each worker must complete before their rows are free."""
        self._table = Table(capacity, max(len(kind.cell.states) for kind in self._kinds))
        self._arrived = 0
        """Requests that were given rows."""
        self._released = 0
        """Subgraphs that were passed to a queue."""
        self._place_bits = capacity.bit_length()
        """Bits of a row's order that hold its place in its subgraph. The bits above order the subgraphs."""

    def worker(self, number: int) -> CellWorker:
        """The planner of one worker."""
        return CellWorker(self, number)

    def add(self, request: CellRequest) -> None:
        """Queue a request. Raises ValueError, with the reason, if it can never run."""
        if request.id in self._waiting or request.id in self._running:
            raise ValueError(f"request id {request.id} is already in use; give each its own")
        graph = request.graph
        results = self._splitter.check(graph)
        if not graph.rows:
            raise ValueError("the graph has no nodes; it needs at least 1")
        if graph.rows > self._capacity - FIRST_ROW:
            raise ValueError(
                f"the graph has {graph.rows} nodes, where a chain counts as one; "
                f"at most {self._capacity - FIRST_ROW} fit"
            )
        block = graph.blocks[0]
        chain = self.types[block.cell] if block.whole and len(graph.blocks) == 1 else GRAPH
        self._waiting[request.id] = _Request(request.id, graph, results, chain)

    def abort(self, request_id: str) -> None:
        """End a request at once. Ignores one that has ended. Its nodes in flight run on, and their results are lost."""
        if self._waiting.pop(request_id, None) is not None:
            return
        request = self._running.pop(request_id, None)
        if request is not None:
            del self._by_row[int(request.rows[0])]
            self._table.lost[request.rows] = True
            self._leave_queues(request.rows, self._kinds)
            self._retire([request])

    def schedule(self, worker: int, now: float) -> Round | None:
        """Algorithm 1, Schedule (lines 4 to 11). None if nothing can be formed for this worker."""
        if self._waiting:
            self._admit()
        for kind in self._kinds:
            if kind.released:
                kind.ready = np.concatenate([kind.ready, *kind.released])
                kind.released.clear()
        for kind in self._choose():
            tasks = self._batch(kind, worker, now)
            if tasks is not None:
                return tasks
        return None

    def update(self, plan: Round, result: Returned) -> list[CellOutput]:
        """Note that a worker's oldest round has completed; the requests that this ends."""
        kind, sent = self._kinds[plan.type], self._sent[plan.worker].popleft()
        self._completed[plan.worker] += 1
        kind.tasks -= len(sent.tasks)
        first = len(kind.cell.values)
        for task, outputs in zip(sent.tasks, result, strict=True):
            for items, output in zip(kind.ranges.items[first:], outputs, strict=True):
                items[task.at] = output
        if self._workers > 1:
            self._unpin(sent)
        if kind.stops:
            last = self._stop(kind, sent.tasks, result)
        else:
            last = [task.last for task in sent.tasks if len(task.last)]
            if self._retired:
                last = [rows[~self._table.lost[rows]] for rows in last]
        ended = self._end(np.concatenate(last)) if last else []
        if self._retired:
            self._free_retired()
        return ended

    def requests_of(self, task: Task) -> list[str]:
        """The requests of a task's nodes, in its order. Call it before the next `update` or `abort`."""
        return [self._by_row[first].id for first in self._table.request[task.rows].tolist()]

    def has_work(self) -> bool:
        """Whether any request has not ended."""
        return bool(self._waiting or self._running)

    def stats(self) -> CellStats:
        """Queues and rows as they stand."""
        total = self._capacity - FIRST_ROW
        return CellStats(
            waiting=len(self._waiting),
            running=len(self._running),
            rows_used=total - self._table.numbers.free,
            rows_total=total,
            ready=tuple(len(kind.ready) + sum(map(len, kind.released)) for kind in self._kinds),
            tasks=tuple(kind.tasks for kind in self._kinds),
            types=tuple(kind.cell.name for kind in self._kinds),
            batches=tuple(dict(kind.batches) for kind in self._kinds),
        )

    # The request processor: requests become rows; subgraphs are released when all that they need has ended.

    def _arenas(self) -> tuple[np.ndarray, np.ndarray]:
        """Widths of the arenas of State inputs [types, inputs], and places of outputs in their rows [types, names]."""
        names = self._splitter.outputs
        widths = np.ones((len(self._kinds), max(1, *(len(kind.cell.states) for kind in self._kinds))), np.int64)
        places = np.zeros((len(self._kinds), len(names)), np.int64)
        for kind in self._kinds:
            widths[kind.number, : len(kind.widths)] = kind.widths[:, 0]
            for name in kind.cell.outputs:
                places[kind.number, names[name]] = self._layout.within(kind.cell, name)[1]
        return widths, places

    def _admit(self) -> None:
        """Give rows to waiting requests, first come, first served, while there are enough for a whole graph."""
        free = self._table.numbers.free
        admitted: list[_Request] = []
        for request in self._waiting.values():
            free -= request.graph.rows
            if free < 0:
                break
            admitted.append(request)
        if not admitted:
            return
        if len(admitted) == len(self._waiting):
            self._running.update(self._waiting)
            self._waiting.clear()
        else:
            for request in admitted:
                self._running[request.id] = self._waiting.pop(request.id)
        for chain, together in groupby(admitted, key=lambda request: request.chain):
            requests = list(together)
            batch = _Batch(len(requests))
            for request in requests:
                request.batch = batch
            if chain == GRAPH:
                self._enter_graphs(requests, batch)
            else:
                self._enter_chains(self._kinds[chain], requests, batch)

    def _enter_chains(self, kind: _Kind, requests: list[_Request], batch: _Batch) -> None:
        """Give rows to requests that are a single chain of this type each."""
        table, count = self._table, len(requests)
        chains = [request.graph.blocks[0] for request in requests]
        rows = table.numbers.take(count)
        self._write_rows(rows, rows, rows)
        self._write_requests(rows)
        table.left[rows] = table.rows_left[rows] = 1
        table.open[rows] = table.needs[rows] = 0
        self._write_steps(kind, rows, np.array([chain.count for chain in chains]), chains, batch)
        table.place[rows] = 0
        self._queue(rows, rows, rows)
        for at, (request, row) in enumerate(zip(requests, rows.tolist(), strict=True)):
            request.rows = rows[at : at + 1]
            self._by_row[row] = request

    def _enter_graphs(self, requests: list[_Request], batch: _Batch) -> None:
        """Give rows to requests, whatever their graphs."""
        table = self._table
        found = self._splitter.split([request.graph for request in requests])
        total = len(found.types)
        rows = table.numbers.take(total)
        counts = np.diff(found.first, append=total)
        self._write_rows(rows, rows[found.subgraph], np.repeat(rows[found.first], counts))
        self._write_requests(rows[found.first])
        table.place[rows] = np.arange(total)
        for request, first, count in zip(requests, found.first.tolist(), counts.tolist(), strict=True):
            request.rows = rows[first : first + count]
            self._by_row[int(rows[first])] = request
        reader, producer, position, output = found.inputs
        inputs, outputs = self._widths.shape[1], self._places.shape[1]
        sources = rows[producer] * self._widths.take(found.types[reader] * inputs + position)
        sources += self._places.take(found.types[producer] * outputs + output)
        table.source.reshape(-1)[position * self._capacity + rows[reader]] = sources
        of_kind: dict[int, list[Block]] = {}
        for request in requests:
            for block in request.graph.blocks:
                of_kind.setdefault(self.types[block.cell], []).append(block)
        for number, blocks in of_kind.items():
            mine = (found.types == number).nonzero()[0]
            self._write_steps(self._kinds[number], rows[mine], found.steps[mine], blocks, batch)
        self._link(found, rows, batch)

    def _link(self, found: Partition, rows: np.ndarray, batch: _Batch) -> None:
        """Write which rows and subgraphs wait for which, and pass those that wait for none to the queues."""
        table, total = self._table, len(rows)
        reads, gives = found.subgraph[found.reader], found.subgraph[found.producer]
        inside = reads == gives
        outside = ~inside
        opens = np.bincount(found.reader[inside], minlength=total)
        needs = np.bincount(reads[outside], minlength=total)
        sizes = np.bincount(found.subgraph, minlength=total)
        table.open[rows], table.needs[rows], table.rows_left[rows] = opens, needs, sizes
        heads = sizes.nonzero()[0]
        bounds = np.append(np.searchsorted(heads, found.first), len(heads))
        table.left[rows[found.first]] = bounds[1:] - bounds[:-1]
        first = (opens == 0).nonzero()[0]
        own = found.subgraph[first]
        waits = needs[own] > 0
        listed = waits & (sizes[own] > 1)
        for lists, keys, members in (
            (table.after, found.producer[inside], found.reader[inside]),
            (table.readers, gives[outside], reads[outside]),
            (table.starts, own[listed], first[listed]),
        ):
            if len(keys):
                batch.hold(lists.ranges, lists.write(rows[keys], rows[members]), len(keys))
        heads = heads[needs[heads] == 0]
        ready = rows[first[~waits]]
        self._queue(rows[heads], ready, table.subgraph[ready])

    def _write_rows(self, rows: np.ndarray, subgraph: np.ndarray, request: np.ndarray) -> None:
        """Write what all new rows have in common."""
        table = self._table
        table.subgraph[rows], table.request[rows] = subgraph, request
        table.fresh[rows] = True
        table.stop_by[rows] = NOBODY
        for source in table.source:
            source[rows] = NOBODY
        for lists in (table.after, table.starts, table.readers):
            lists.clear(rows)

    def _write_requests(self, firsts: np.ndarray) -> None:
        table = self._table
        table.arrival[firsts] = np.arange(self._arrived, self._arrived + len(firsts))
        self._arrived += len(firsts)
        table.started[firsts] = NOT_STARTED
        table.stopped[firsts] = False

    def _write_steps(
        self, kind: _Kind, rows: np.ndarray, steps: np.ndarray, blocks: Sequence[Block], batch: _Batch
    ) -> None:
        """Give all rows of a type, which are those of these blocks, room for their values and results."""
        table = self._table
        ends = np.cumsum(steps)
        total = int(ends[-1])
        offset = kind.ranges.take(total)
        batch.hold(kind.ranges, offset, total)
        for position in range(len(kind.cell.values)):
            items = kind.ranges.items[position][offset : offset + total]
            np.concatenate([block.values[position] for block in blocks], out=items)
        ends += offset
        table.type[rows], table.end[rows] = kind.number, ends
        table.at[rows] = table.begin[rows] = ends - steps
        if any(block.stop for block in blocks):
            kind.stops = True
            at = 0
            for block in blocks:
                if block.stop is not None:
                    table.stop_by[rows[at]] = kind.cell.returned.index(block.stop[0])
                    table.stop_at[rows[at]] = block.stop[1]
                at += block.rows

    def _release(self, subgraphs: np.ndarray) -> None:
        """Pass subgraphs, whose external dependencies are met, to the queues of their types, in this order."""
        rows, lengths = self._table.starts.of(subgraphs)
        if len(rows):
            single = subgraphs[lengths == 0]
            self._queue(subgraphs, np.concatenate([single, rows]), np.concatenate([single, subgraphs.repeat(lengths)]))
        else:
            self._queue(subgraphs, subgraphs, subgraphs)

    def _queue(self, subgraphs: np.ndarray, rows: np.ndarray, own: np.ndarray) -> None:
        """Pass subgraphs to the queues of their types, in this order. These of their rows are ready."""
        table = self._table
        released = self._released
        self._released += len(subgraphs)
        table.queue[subgraphs] = np.arange(released, self._released) << self._place_bits
        order = table.queue[own] + table.place[rows]
        table.order[rows] = order
        rows = rows[order.argsort()]
        types = table.type[rows]
        for kind in self._kinds:
            mine = rows[types == kind.number]
            if len(mine):
                kind.released.append(mine)

    # Algorithm 1.

    def _choose(self) -> list[_Kind]:
        """The types in the order in which they are tried. The first is that of lines 5 to 10."""
        ready = [kind for kind in self._kinds if len(kind.ready)]
        if len(ready) < 2:
            return ready
        best = [kind for kind in ready if len(kind.ready) >= kind.most]
        best = best or [kind for kind in ready if not kind.tasks]
        return sorted(ready, key=lambda kind: (kind in best, kind.cell.priority), reverse=True)

    def _batch(self, kind: _Kind, worker: int, now: float) -> Round | None:
        """Batch (lines 12 to 23)."""
        tasks: list[Task] = []
        moves: list[Move] = []
        self._rounds += 1
        sent = _Sent(self._rounds, [], [])
        while len(tasks) < self._max_tasks:
            chosen = self._form(kind, worker)
            rows = kind.ready[: kind.most].copy() if chosen is None else kind.ready[chosen]
            if not len(rows) or (tasks and len(rows) < kind.least):
                break
            sources = self._table.source[: len(kind.cell.states)].take(rows, axis=1)
            if self._workers > 1:
                self._pin(sent, rows, sources, worker, kind, moves)
            task, at, last = self._submit(kind, rows, sources, now)
            tasks.append(task)
            sent.tasks.append(_SentTask(rows, at, rows[last]))
            if np.count_nonzero(last):
                kind.take_out(chosen, last)
                self._open_readers(kind, rows[last])
        if not tasks:
            return None
        kind.tasks += len(tasks)
        self._sent[worker].append(sent)
        return Round(worker, kind.number, tasks, moves)

    def _form(self, kind: _Kind, worker: int) -> np.ndarray | None:
        """FormBatchedTask (lines 24 to 32): positions in the type's queue, or None for as many as fit from its front.

        Each row there has one ready node.
        """
        if self._workers == 1:
            return None
        table = self._table
        look = 2 * kind.most
        while True:
            pinned = table.pinned.take(table.subgraph.take(kind.ready[:look]))
            found: np.ndarray = ((pinned == NOBODY) | (pinned == worker)).nonzero()[0]
            if len(found) >= kind.most or look >= len(kind.ready):
                return found[: kind.most]
            look *= 4

    def _submit(
        self, kind: _Kind, rows: np.ndarray, sources: np.ndarray, now: float
    ) -> tuple[Task, np.ndarray, np.ndarray]:
        """SubmitBatchedTask (line 17): the task, where its values and results lie, and which rows it completes."""
        table = self._table
        at = table.at.take(rows)
        values = tuple([items.take(at, axis=0) for items in kind.ranges.items[: len(kind.cell.values)]])
        following = at + 1
        table.at[rows] = following
        fresh = rows[table.fresh.take(rows)]
        if len(fresh):
            table.fresh[fresh] = False
            for position, width, place in kind.carried:
                table.source[position, fresh] = fresh * width + place
            requests = table.request[fresh]
            table.started[requests[table.started[requests] == NOT_STARTED]] = now
        kind.batches[len(rows)] += 1
        task = Task(rows.astype(np.int32), sources, values, kind.cell.size_of(len(rows)))
        return task, at, following == table.end.take(rows)

    def _open_readers(self, kind: _Kind, last: np.ndarray) -> None:
        """UpdateNodesDependency (line 18): rows of the same subgraphs become ready, since tasks run in order."""
        table = self._table
        after, _ = table.after.of(last)
        if len(after):
            np.subtract.at(table.open, after, 1)
            opened = distinct(after[table.open[after] == 0])
            if len(opened):
                table.order[opened] = table.queue[table.subgraph[opened]] + table.place[opened]
                ready = np.concatenate([kind.ready, opened])
                kind.ready = ready[table.order[ready].argsort(kind="stable")]

    def _pin(
        self, sent: _Sent, rows: np.ndarray, sources: np.ndarray, worker: int, kind: _Kind, moves: list[Move]
    ) -> None:
        """Pin the subgraphs (lines 20 and 21), and note which state must come from other workers before."""
        table = self._table
        new = table.round.take(rows) != sent.round
        if not np.count_nonzero(new):
            return
        rows = rows[new]
        table.round[rows] = sent.round
        mine = table.subgraph.take(rows)
        table.pinned[mine] = worker
        table.last_round[mine] = sent.round
        sent.pinned.append(mine)
        read = sources[:, new] // kind.widths
        absent = (read >= 0) & ((table.copies.take(read, mode="wrap") >> worker) & 1 == 0)
        if np.count_nonzero(absent):
            read = distinct(read[absent])
            homes = table.home[read]
            for home in distinct(homes).tolist():
                moves.append(Move(home, read[homes == home]))
            table.copies[read] |= 1 << worker
        table.home[rows] = worker
        table.copies[rows] = 1 << worker

    # Completion.

    def _unpin(self, sent: _Sent) -> None:
        """Unpin the subgraphs that have no task in flight any more. A worker's rounds complete in order."""
        mine = np.concatenate(sent.pinned)
        self._table.pinned[mine[self._table.last_round[mine] == sent.round]] = NOBODY

    def _stop(self, kind: _Kind, tasks: list[_SentTask], result: Returned) -> list[np.ndarray]:
        """End the chains whose `stop` is met before their last step: these rows, and others that the round ends."""
        table = self._table
        ended: list[np.ndarray] = []
        stopped: list[np.ndarray] = []
        for task, outputs in zip(tasks, result, strict=True):
            rows = task.rows
            stops = np.zeros(len(rows), bool)
            for number, output in enumerate(outputs):
                if output.ndim == 1:
                    stops |= (table.stop_by[rows] == number) & (output == table.stop_at[rows])
            stops &= ~table.lost[rows] & (task.at + 1 < table.end[rows])
            ended.append(task.last[~table.lost[task.last]])
            if np.count_nonzero(stops):
                table.end[rows[stops]] = task.at[stops] + 1
                rows = rows[stops]
                table.lost[rows] = True
                table.stopped[table.request[rows]] = True
                stopped.append(rows)
        if stopped:
            self._leave_queues(np.concatenate(stopped), [kind])
        return ended + stopped

    def _end(self, rows: np.ndarray) -> list[CellOutput]:
        """These rows have run their last step: end subgraphs and requests, and release subgraphs that waited."""
        table = self._table
        subgraphs = table.subgraph[rows]
        np.subtract.at(table.rows_left, subgraphs, 1)
        subgraphs = distinct(subgraphs[table.rows_left[subgraphs] == 0])
        requests = table.request[subgraphs]
        np.subtract.at(table.left, requests, 1)
        requests = requests[table.left[requests] == 0]
        readers, _ = table.readers.of(subgraphs)
        if len(readers):
            np.subtract.at(table.needs, readers, 1)
            readers = distinct(readers[table.needs[readers] == 0])
            if len(readers):
                order = np.lexsort((table.place[readers], table.arrival[table.request[readers]]))
                self._release(readers[order])
        return self._finish(distinct(requests)) if len(requests) else []

    def _finish(self, firsts: np.ndarray) -> list[CellOutput]:
        """End the requests that have these first rows, in the order in which they came."""
        table = self._table
        firsts = firsts[np.argsort(table.arrival[firsts])]
        stopped = table.stopped[firsts].tolist()
        done: list[_Request] = []
        early: list[_Request] = []
        ended = []
        for first, begin, end, started, stops in zip(
            firsts.tolist(),
            table.begin[firsts].tolist(),
            table.end[firsts].tolist(),
            table.started[firsts].tolist(),
            stopped,
            strict=True,
        ):
            request = self._by_row.pop(first)
            del self._running[request.id]
            results = dict(request.graph.constants)
            for result in request.results:
                if request.chain == GRAPH:
                    results[result.name] = self._read(request, result)
                else:
                    results[result.name] = self._kinds[request.chain].returned(result.output)[begin:end].copy()
            ended.append(CellOutput(request.id, results, started))
            (early if stops else done).append(request)
        if early:
            self._retire(early)
        if done:
            self._free(done)
        return ended

    def _read(self, request: _Request, result: Result) -> np.ndarray:
        """A result of a request that has ended: [nodes, *shape]."""
        table = self._table
        parts = []
        for place in result.rows:
            row = request.rows[place]
            parts.append(self._kinds[table.type[row]].returned(result.output)[table.begin[row] : table.end[row]])
        return parts[0].copy() if len(parts) == 1 else np.concatenate(parts)

    def _leave_queues(self, rows: np.ndarray, kinds: Iterable[_Kind]) -> None:
        """Take rows out of the queues."""
        gone = np.zeros(self._capacity, bool)
        gone[rows] = True
        for kind in kinds:
            kind.ready = kind.ready[~gone[kind.ready]]
            kind.released = [each[~gone[each]] for each in kind.released]

    def _retire(self, requests: list[_Request]) -> None:
        """Free requests that ended early once no task of theirs can be in flight."""
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
        rows = np.concatenate([request.rows for request in requests])
        self._table.lost[rows] = False
        self._table.numbers.give(rows)
        for request in requests:
            request.batch.leave()


CellWorker = WorkerView[CellStats]


class _SentTask(NamedTuple):
    """A task in flight."""

    rows: np.ndarray
    at: np.ndarray
    """Where the results of each row go."""
    last: np.ndarray
    """The rows whose last step it is."""


class _Sent(NamedTuple):
    """A round in flight."""

    round: int
    """Its number."""
    tasks: list[_SentTask]
    pinned: list[np.ndarray]
    """The subgraphs of its nodes. None are kept for a single worker."""


class _Kind:
    """A cell type: its queue, and what of its cell the planner looks up often."""

    def __init__(self, number: int, cell: Cell, layout: Layout) -> None:
        self.number = number
        self.cell = cell
        self.most, self.least = cell.sizes[-1], cell.sizes[0]
        widths = [layout.width_of(cell.inputs[name]) for name in cell.states]
        self.widths = np.array(widths, np.int32).reshape(-1, 1)
        """Of the arena of each State input: [State inputs, 1]."""
        self.carried = [(cell.states.index(name), *layout.within(cell, name)) for name in cell.carried]
        held = [cell.inputs[name] for name in cell.values] + [cell.outputs[name] for name in cell.returned]
        self.ranges = Ranges([(spec.shape, spec.dtype) for spec in held])
        """The values and then the returned outputs of each node."""
        self._position = {name: len(cell.values) + number for number, name in enumerate(cell.returned)}
        self.ready = np.zeros(0, np.intp)
        """Rows that have a ready node, in queue order."""
        self.released: list[np.ndarray] = []
        """Rows that join the queue's end before the next round is formed."""
        self.tasks = 0
        """Tasks in flight."""
        self.batches: Counter[int] = Counter()
        """Tasks so far by their number of nodes."""
        self.stops = False
        """Whether any chain of it may end early."""

    def returned(self, output: str) -> np.ndarray:
        """A returned output of all nodes."""
        return self.ranges.items[self._position[output]]

    def take_out(self, chosen: np.ndarray | None, last: np.ndarray) -> None:
        """Take out of the queue those rows of a task that have no step left."""
        count = len(last) if chosen is None else int(chosen[-1]) + 1
        front = self.ready[:count]
        if chosen is None:
            kept = front[~last]
        else:
            keep = np.ones(count, bool)
            keep[chosen] = ~last
            kept = front[keep]
        self.ready = self.ready[count - len(kept) :]
        self.ready[: len(kept)] = kept


@dataclass(slots=True)
class _Batch:
    """Requests that were given rows together. Their ranges are free when all of them have ended."""

    left: int
    held: list[tuple[Ranges, int, int]] = field(default_factory=list)
    """Offset and length of each."""

    def hold(self, ranges: Ranges, offset: int, length: int) -> None:
        self.held.append((ranges, offset, length))

    def leave(self) -> None:
        self.left -= 1
        if not self.left:
            for ranges, offset, length in self.held:
                ranges.give(offset, length)


class _Request:
    """A request that has not ended."""

    __slots__ = ("batch", "chain", "graph", "id", "results", "rows")
    batch: _Batch
    rows: np.ndarray
    """The table's rows of its graph, once it has any."""

    def __init__(self, id: str, graph: CellGraph, results: list[Result], chain: int) -> None:
        self.id = id
        self.graph = graph
        self.results = results
        self.chain = chain
        """The type of its only chain, or GRAPH."""
