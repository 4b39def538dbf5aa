"""Planners of cells on a virtual clock: the times of tasks on a device, and the delays of requests.

The planner is the one that serves. Only the executor is virtual: a round takes the time that the device's costs say.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from holdfast.cells.cell import Cell
from holdfast.cells.plan import CellOutput, CellRequest, Returned, Round, Task
from holdfast.core.cell_cost import CellCost
from holdfast.loop.contracts import Planner

CellLoopPlanner = Planner[CellRequest, Round, Returned, list[CellOutput], Any]


class ManyWorkers(Protocol):
    """A planner of cells for several workers."""

    def worker(self, number: int) -> CellLoopPlanner:
        """The planner of one worker."""
        ...


@dataclass(frozen=True)
class Device:
    """Times of tasks on a device and its host."""

    costs: Mapping[str, CellCost]
    """Cost of each cell, by the cell's name."""
    task_seconds: float = 0.0
    """Host time of each task, in which the device waits: scheduling and launching."""
    gather_seconds: float = 0.0
    """Seconds to copy one State input of one node.

    A task whose rows are those of the task before it needs no copies.
    """
    move_seconds: float = 0.0
    """Seconds to copy one row from another device."""
    node_seconds: float = 0.0
    """Host time of each node, in which the device waits: building and merging graphs."""
    _cache: dict[tuple[str, int], float] = field(default_factory=dict, repr=False)

    def seconds(self, cell: Cell, task: Task, *, same: bool) -> float:
        """Seconds of a task. With `same`, its rows are those of the task before it."""
        nodes = len(task.rows)
        key = cell.name, task.size
        if key not in self._cache:
            self._cache[key] = self.costs[cell.name].at(task.size)
        gather = 0.0 if same else self.gather_seconds * nodes * len(cell.states)
        return self._cache[key] + self.task_seconds + gather + self.node_seconds * nodes


LSTM_V100 = CellCost((64, 256, 512), (185e-6, 470e-6, 784e-6))
"""One LSTM step, hidden 1,024: 185 us at 64 and 784 us at 512 (Figure 2.3), 20% less throughput at 256 than at 512
(section 2.7.4), flat below 64 and linear above 512."""
DECODER_TIMES = 3.0
"""Time of a decoder cell divided by that of an encoder cell, so that decoding is 75% of the computation (section
2.7.4).
"""
DECODER_V100 = CellCost((64, 256), (DECODER_TIMES * 185e-6, DECODER_TIMES * 470e-6))
"""Cost of a decoder cell: linear above 256, its best batch size."""
INTERNAL_V100, LEAF_V100 = LSTM_V100.times(10 / 8), LSTM_V100.times(3 / 8)
"""Costs of TreeLSTM cells, for which the paper gives no time.

By their weights: 10 and 3 hidden^2, an LSTM step has 8.
"""
LINEAR_SHARE = 2 / 3
"""Share of the matrix product in a cell's time, if operators are batched one by one."""

V100 = Device(
    {
        "lstm": LSTM_V100,
        "encoder": LSTM_V100,
        "decoder": DECODER_V100,
        "leaf": LEAF_V100,
        "internal": INTERNAL_V100,
        **{
            f"{cell}_{part}": cost.times(share)
            for cell, cost in (("lstm", LSTM_V100), ("leaf", LEAF_V100), ("internal", INTERNAL_V100))
            for part, share in (("linear", LINEAR_SHARE), ("gates", 1 - LINEAR_SHARE))
        },
    }
)
"""Bare cells: a fixed graph without scheduling and gather, in which the padding baselines run."""


@dataclass(frozen=True, slots=True)
class Served:
    """Times of served requests, in seconds. Each array has one element per request, in the order of arrival."""

    arrival: np.ndarray
    scheduled: np.ndarray
    """Time at which the first cell of the request was planned."""
    finished: np.ndarray
    """Time at which the result was returned; infinite if that was not within the run."""

    @property
    def latency(self) -> np.ndarray:
        """Seconds from arrival to result."""
        latency: np.ndarray = self.finished - self.arrival
        return latency

    @property
    def queuing(self) -> np.ndarray:
        """Seconds from arrival to the start of execution."""
        queuing: np.ndarray = self.scheduled - self.arrival
        return queuing

    @property
    def computation(self) -> np.ndarray:
        """Seconds from the start of execution to the result; infinite without a result."""
        done = np.isfinite(self.finished)
        computation: np.ndarray = np.full(len(done), np.inf)
        np.subtract(self.finished, self.scheduled, out=computation, where=done)
        return computation

    def after(self, share: float) -> Served:
        """The requests without the first `share`, which met a system that was filling up."""
        first = int(share * len(self.arrival))
        return Served(self.arrival[first:], self.scheduled[first:], self.finished[first:])

    def p(self, percent: float) -> float:
        """A percentile of the latency, in seconds."""
        return float(np.quantile(self.latency, percent / 100, method="lower"))

    def throughput(self, share: float = 0.0) -> float:
        """Results per second, from the arrival after the first `share` of the requests to the last arrival."""
        first, last = self.arrival[int(share * len(self.arrival))], self.arrival[-1]
        return float(((self.finished > first) & (self.finished <= last)).sum() / (last - first))

    def answered(self, share: float) -> float:
        """Results divided by arrivals in the same time. Below 1, the queue grows."""
        first, last = self.arrival[int(share * len(self.arrival))], self.arrival[-1]
        return self.throughput(share) * float(last - first) / float((self.arrival > first).sum())


@dataclass(slots=True)
class Ran:
    """One simulated run."""

    served: Served
    sizes: list[int]
    """Number of nodes of each task."""
    unchanged: int
    """Number of tasks that needed no gather, because their rows were those of the task before."""
    seconds: float
    """Time at which the last round ended."""


def simulate(
    planner: ManyWorkers,
    types: Mapping[int, Cell],
    device: Device,
    requests: Sequence[CellRequest],
    *,
    workers: int = 1,
    steps_in_flight: int = 1,
    until: float = float("inf"),
) -> Ran:
    """Serve requests, in the order of their arrival, on `workers` devices: all of them, or until a given time.

    A worker schedules when fewer than `steps_in_flight` of its rounds have not ended: 1 is the paper's idle worker. A
    request's result is returned when the round of its last cell ends.
    """
    planners = [planner.worker(number) for number in range(workers)]
    place = {request.id: at for at, request in enumerate(requests)}
    arrival = np.array([request.arrival for request in requests])
    scheduled, finished = np.full(len(requests), np.inf), np.full(len(requests), np.inf)
    flying: list[deque[Round]] = [deque() for _ in range(workers)]
    free_at, last_rows = [0.0] * workers, [np.zeros(0, np.int32)] * workers
    ends: list[tuple[float, int]] = []
    run = Ran(Served(arrival, scheduled, finished), [], 0, 0.0)
    added = 0
    now = 0.0
    while added < len(requests) or ends:
        now = min(
            arrival[added] if added < len(requests) else np.inf,
            ends[0][0] if ends else np.inf,
        )
        if all(len(rounds) == steps_in_flight for rounds in flying):
            now = ends[0][0]
        if now > until:
            break
        while added < len(requests) and arrival[added] <= now:
            planners[0].add(requests[added])
            added += 1
        while ends and ends[0][0] <= now:
            _, number = heapq.heappop(ends)
            plan = flying[number].popleft()
            for output in planners[number].update(plan, _nothing(plan, types[plan.type]), now):
                scheduled[place[output.request_id]] = output.scheduled_at
                finished[place[output.request_id]] = now
        for number, worker in enumerate(planners):
            while len(flying[number]) < steps_in_flight and (made := worker.schedule(now)) is not None:
                at = max(now, free_at[number])
                at += device.move_seconds * sum(len(move.rows) for move in made.moves)
                for task in made.tasks:
                    same = np.array_equal(task.rows, last_rows[number])
                    last_rows[number] = task.rows
                    run.unchanged += same
                    run.sizes.append(len(task.rows))
                    at += device.seconds(types[made.type], task, same=same)
                free_at[number] = at
                flying[number].append(made)
                heapq.heappush(ends, (at, number))
    run.seconds = now
    return run


def _nothing(plan: Round, cell: Cell) -> Returned:
    """Zeros for the returned outputs of the round's tasks."""
    shapes = [(cell.outputs[name].shape, cell.outputs[name].dtype) for name in cell.returned]
    return [tuple(np.zeros((len(task.rows), *shape), dtype) for shape, dtype in shapes) for task in plan.tasks]


def highest(sustained: Callable[[float], bool], low: float, high: float, near: float = 1.02) -> float:
    """The highest rate, to within a factor `near`, for which `sustained` holds. `low` must hold; `high` may move up."""
    while sustained(high):
        low, high = high, 1.5 * high
    while high / low > near:
        middle = (low * high) ** 0.5
        low, high = (middle, high) if sustained(middle) else (low, middle)
    return low
