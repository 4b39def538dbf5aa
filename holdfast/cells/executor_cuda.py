"""The executor of cells for CUDA: graphs for each type and size, which find their tasks by a cursor on the device.

`submit` writes the words of a round's tasks into a pinned ring, copies them with one copy to the same place of a ring
on the device, and replays a graph for each task, or for each run of tasks of one size. It waits for nothing. The last
kernel of a task adds 1 to a counter in pinned memory, which `collect` polls (BatchMaker, section 2.5). By then the
returned outputs are in a pinned ring.
"""

from __future__ import annotations

import ctypes
import math
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass
from functools import cache
from itertools import groupby
from operator import attrgetter
from typing import Any

import numpy as np
import torch

from holdfast.cells import kernels
from holdfast.cells.cell import Cell, Spec, State
from holdfast.cells.executor import Arenas, CellExecutor, Copies, Kind, Tensors, kinds_of
from holdfast.cells.gated import Gated
from holdfast.cells.kernels import HEADER, RETURNED_UNIT, Signals, Source, unit_of
from holdfast.cells.plan import SCRATCH, Move, Returned, Round, Task
from holdfast.cells.planner import MAX_TASKS
from holdfast.cells.types import example
from holdfast.core.collector import collector_off

ALIGNED_WORDS = 4
SPINS = 50
"""Number of polls for a round's end before `collect` begins to sleep between polls."""
SLEEP_SECONDS = 20e-6
"""Seconds of one sleep of `collect`."""
SLEEPS_PER_CHECK = 1000
"""Number of sleeps of `collect` between two checks for a failure of the device."""
PR_SET_TIMERSLACK = 29
HELD_CYCLES, MOST_HELD_CYCLES = 1 << 20, 1 << 31
"""Cycles that the device waits before a timed round: half a millisecond at first, up to a second."""
NO_SOURCE = -1


Run = tuple[int, Callable[[], None]]
"""A number of successive tasks of one size, and the function that starts them."""
_SIZE = attrgetter("size")


def run_lengths(max_tasks: int) -> tuple[int, ...]:
    """The numbers of successive tasks that have a graph: those of a whole round, then of a half, down to 1."""
    lengths = [max_tasks]
    while lengths[-1] > 1:
        lengths.append(lengths[-1] // 2)
    return tuple(lengths)


class TaskWords:
    """The layout of a task of one type and size: the places of its parts in words, and of its outputs in bytes."""

    def __init__(self, cell: Cell, size: int) -> None:
        self.size = size
        self.sources = {name: HEADER + (1 + place) * size for place, name in enumerate(cell.states)}
        at = _aligned(HEADER + (1 + len(cell.states)) * size)
        self.head = HEADER + (1 + len(cell.states)) * size
        """Number of words of header, rows and sources."""
        self.values: dict[str, tuple[int, int, tuple[int, ...], np.dtype]] = {}
        """For each Value input: its first word, its number of words, its shape, its dtype."""
        for name in cell.values:
            shape, dtype = (size, *cell.inputs[name].shape), np.dtype(cell.inputs[name].dtype)
            items = math.prod(shape)
            self.values[name] = at, items, shape, dtype
            at = _aligned(at - (-items * dtype.itemsize // 4))
        self.words = at
        self.returned: dict[str, tuple[int, int, tuple[int, ...], np.dtype]] = {}
        """For each returned output: its first byte, the bytes of one node, one node's shape, its dtype."""
        at = 0
        for name in cell.returned:
            shape, dtype = cell.outputs[name].shape, np.dtype(cell.outputs[name].dtype)
            item = math.prod(shape) * dtype.itemsize
            self.returned[name] = at, item, shape, dtype
            at += -(-size * item // RETURNED_UNIT) * RETURNED_UNIT
        self.returned_bytes = at


@cache
def _sleep_precisely(thread: int) -> None:
    """Lower the longest delay that Linux may add to this thread's sleeps from 50 microseconds to 1.

    `thread` is the thread's id, so that the cache makes the system call once for each thread.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_TIMERSLACK, 1000, 0, 0, 0)


def _aligned(words: int) -> int:
    return -(-words // ALIGNED_WORDS) * ALIGNED_WORDS


def _bytes(spec: Spec) -> int:
    item = 2 if spec.dtype == "bfloat16" else np.dtype(spec.dtype).itemsize
    return math.prod(spec.shape) * item


@dataclass(slots=True)
class _Flight:
    """A round in flight."""

    type: int
    tasks: list[tuple[int, TaskWords, int]]
    """For each task: the number of nodes, its layout, and the byte at which its returned outputs begin."""
    target: int
    """The counter's value when the round's last task has completed."""


class CudaExecutor:
    """Runs rounds on one CUDA device, on its own stream.

    On a CPU device it runs the same kernels under Triton's interpreter, at once and without graphs, for tests.
    """

    def __init__(
        self,
        cells: Sequence[Cell],
        types: Mapping[Cell, int],
        device: str,
        *,
        capacity: int,
        sizes: Sequence[tuple[int, ...]] | None = None,
        max_tasks: int = MAX_TASKS,
        rounds_in_flight: int = 2,
    ) -> None:
        """Allocate arenas of `capacity` rows and capture every cell at each of its sizes.

        `sizes` are by type number, by default those of the cells. Rounds have at most `max_tasks` tasks, and at most
        `rounds_in_flight` may be in flight. Raises ValueError for a cell that differs from its declaration.
        """
        self.device = torch.device(device)
        self._max_tasks, self._rounds_in_flight = max_tasks, rounds_in_flight
        self._run_lengths = run_lengths(max_tasks)
        self._stream = torch.cuda.Stream(self.device) if self.device.type == "cuda" else None  # type: ignore[no-untyped-call]
        with self._on_stream():
            self.arenas = Arenas(cells, self.device, capacity)
            self._kinds = kinds_of(cells, types, self.arenas, sizes)
            self.gated = {
                number: (kind, gated)
                for number, kind in enumerate(self._kinds)
                if (gated := _gated_of(kind)) is not None
            }
            self._words = [{size: TaskWords(kind.cell, size) for size in kind.sizes} for kind in self._kinds]
            most = [max(each.values(), key=lambda words: words.words) for each in self._words]
            states = max(len(kind.cell.states) for kind in self._kinds)
            largest = max(kind.sizes[-1] for kind in self._kinds)
            self._most_moved = states * largest * max_tasks
            """Largest number of rows that a round can move: no more than its tasks read."""
            self._round_words = _aligned(max_tasks * max(words.words for words in most) + self._most_moved)
            self._ring_words = self._round_words * (rounds_in_flight + 1)
            self._task_bytes = max(words.returned_bytes for words in most)
            self._returned_bytes = max(self._task_bytes, RETURNED_UNIT) * (max_tasks * (rounds_in_flight + 1) + 1)
            self._signals = Signals(
                ring=torch.zeros(self._ring_words, dtype=torch.int32, device=self.device),
                cursor=torch.zeros(1, dtype=torch.int32, device=self.device),
                tickets=torch.zeros(2, dtype=torch.int32, device=self.device),
                done=self._pinned(1, torch.int64),
                returned=self._pinned(self._returned_bytes, torch.uint8),
            )
            self._staged = self._pinned(self._ring_words, torch.int32)
            self._bodies: list[Callable[[], None]] = []
            """The captured functions. They hold the tables and buffers that graphs read, so they must stay alive."""
            self._runs = self._materialize()
        self._host_words, self._done = self._staged.numpy(), self._signals.done.numpy()
        self._host_returned = self._signals.returned.numpy()
        self._at = self._returned_at = 0
        self._submitted = 0
        self._in_flight: deque[_Flight] = deque()
        self._peers: list[tuple[dict[int, torch.Tensor], int] | None] = []
        self._moved = 0
        self._held_cycles = HELD_CYCLES

    def connect(self, executors: Sequence[CellExecutor]) -> None:
        """Set the executor of each worker. Raises ValueError if this device cannot read another's memory."""
        self._peers = [None if each is self else self._move_tables(each.arenas) for each in executors]

    def submit(self, plan: Round) -> None:
        """Start a round. Raises RuntimeError if too many are in flight, ValueError if the round is too large."""
        if len(self._in_flight) == self._rounds_in_flight:
            raise RuntimeError(f"{len(self._in_flight)} rounds are in flight; at most {self._rounds_in_flight} may be")
        if len(plan.tasks) > self._max_tasks:
            raise ValueError(f"the round has {len(plan.tasks)} tasks; at most {self._max_tasks} fit")
        layouts = [self._words[plan.type][task.size] for task in plan.tasks]
        begin = at = self._at
        flight = _Flight(plan.type, [], self._submitted + len(plan.tasks))
        for place, (task, words) in enumerate(zip(plan.tasks, layouts, strict=True)):
            end = at + words.words
            if place + 1 == len(plan.tasks):
                moves_at = end
                end = _aligned(end + sum(len(move.rows) for move in plan.moves))
                self._at = end if end + self._round_words <= self._ring_words else 0
            following = end if place + 1 < len(plan.tasks) else self._at
            returned_at = self._returned_at
            if returned_at + words.returned_bytes > self._returned_bytes:
                returned_at = 0
            self._returned_at = returned_at + words.returned_bytes
            self._stage(task, words, at, following, returned_at)
            flight.tasks.append((len(task.rows), words, returned_at))
            at = end
        moves = []
        for move in plan.moves:
            self._host_words[moves_at : moves_at + len(move.rows)] = move.rows
            moves.append((move, moves_at))
            moves_at += len(move.rows)
        with self._on_stream():
            self._signals.ring[begin:at].copy_(self._staged[begin:at], non_blocking=True)
            for move, moves_at in moves:
                self._move(move, moves_at)
            self._launch(plan)
        self._submitted = flight.target
        self._in_flight.append(flight)

    def _launch(self, plan: Round) -> None:
        """Replay graphs for a round's tasks. Successive tasks of one size share a launch."""
        runs, tasks = self._runs[plan.type], plan.tasks
        for size, some in groupby(tasks, _SIZE):
            left = len(list(some))
            for length, replay in runs[size]:
                while left >= length:
                    replay()
                    left -= length

    def collect(self) -> Returned:
        """Wait for the oldest round.

        Its arrays lie in the ring until `rounds_in_flight` + 1 later rounds are submitted.

        Raises RuntimeError if the device has failed.
        """
        flight = self._in_flight[0]
        self._wait(flight.target)
        self._in_flight.popleft()
        found = []
        for nodes, words, begin in flight.tasks:
            outputs = []
            for at, item, shape, dtype in words.returned.values():
                raw = self._host_returned[begin + at : begin + at + nodes * item]
                outputs.append(raw.view(dtype).reshape(nodes, *shape))
            found.append(tuple(outputs))
        return found

    def timed(self, plan: Round) -> float:
        """Run a round while no other is in flight. Returns the seconds that the device took, once all was queued.

        Raises RuntimeError if queuing a round takes the host longer than a second.
        """
        if self._stream is None:
            began = time.perf_counter()
            self.submit(plan)
            self.collect()
            return time.perf_counter() - began
        while True:
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
            with self._on_stream():
                # The device waits until the host has queued everything.
                torch.cuda._sleep(self._held_cycles)  # type: ignore[no-untyped-call]
                begin.record()
                self.submit(plan)
                end.record()
                queued = not begin.query()  # type: ignore[no-untyped-call]
            self.collect()
            end.synchronize()
            if queued:
                return float(begin.elapsed_time(end)) / 1e3
            if self._held_cycles > MOST_HELD_CYCLES:
                raise RuntimeError("the host cannot queue a round within a second, so its tasks cannot be timed")
            self._held_cycles *= 2

    def copies(self) -> Copies:
        """The number of moved rows. Kernels read inputs where they are, so other reads are not counted."""
        return Copies(moved=self._moved)

    def close(self) -> None:
        """Wait for the device, unless it has failed, and release the graphs."""
        if self._stream is not None:
            with suppress(RuntimeError):
                self._stream.synchronize()
        self._runs.clear()
        self._bodies.clear()
        self._in_flight.clear()

    def _stage(self, task: Task, words: TaskWords, at: int, following: int, returned_at: int) -> None:
        """Write a task's words into the pinned ring. Padding nodes read zeros and write to SCRATCH."""
        ring, nodes, size = self._host_words, len(task.rows), words.size
        ring[at], ring[at + 1], ring[at + 2] = following, nodes, returned_at // RETURNED_UNIT
        head = ring[at + HEADER : at + words.head].reshape(-1, size)
        head[0, :nodes] = task.rows
        head[1:, :nodes] = task.sources
        if nodes < size:
            head[0, nodes:] = SCRATCH
            head[1:, nodes:] = NO_SOURCE
        for value, (first, items, shape, dtype) in zip(task.values, words.values.values(), strict=True):
            target = ring[at + first : at + words.words].view(dtype)[:items].reshape(shape)
            target[:nodes] = value
            if nodes < size:
                target[nodes:] = 0

    def _wait(self, target: int) -> None:
        """Wait until `target` tasks have completed."""
        done = self._done
        for _ in range(SPINS):
            if done[0] >= target:
                return
        _sleep_precisely(threading.get_ident())
        sleeps = 0
        while done[0] < target:
            time.sleep(SLEEP_SECONDS)
            sleeps += 1
            if sleeps % SLEEPS_PER_CHECK == 0 and (self._stream is None or self._stream.query()) and done[0] < target:
                raise RuntimeError(f"the device is idle after {done[0]} tasks; {target} were submitted")

    # The functions below run once, at the start.

    def _on_stream(self) -> AbstractContextManager[object]:
        return nullcontext() if self._stream is None else torch.cuda.stream(self._stream)

    def _pinned(self, length: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.zeros(length, dtype=dtype, pin_memory=self.device.type == "cuda")

    def _materialize(self) -> list[dict[int, list[Run]]]:
        """The runs of tasks that one launch starts, by type and size, the longest first.

        The words are zeros here, so all of a task's nodes are padding.
        """
        pool = torch.cuda.graph_pool_handle() if self._stream is not None else None
        made: list[dict[int, list[Run]]] = []
        for number, kind in enumerate(self._kinds):
            buffers = _Buffers(kind, self._words[number], self.arenas, self._signals)
            runs: dict[int, list[Run]] = {}
            for size in reversed(kind.sizes):
                kind.try_out(size, self.device)
                body = buffers.body(size)
                self._bodies.append(body)
                with torch.inference_mode():
                    body()
                    runs[size] = [(length, self._captured(body, length, pool)) for length in self._run_lengths]
            made.append(runs)
        self._signals.tickets.zero_()
        if self._stream is not None:
            self._stream.synchronize()
        self._signals.done.zero_()
        return made

    def _captured(self, body: Callable[[], None], length: int, pool: Any) -> Callable[[], None]:
        """A function that runs `length` tasks, one after the other; on a GPU, by a graph."""

        def run() -> None:
            for _ in range(length):
                body()

        if self._stream is None:
            return run
        self._stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        with collector_off():
            graph.capture_begin(pool=pool, capture_error_mode="thread_local")
            try:
                run()
            finally:
                graph.capture_end()
        return graph.replay

    def _move_tables(self, theirs: Arenas) -> tuple[dict[int, torch.Tensor], int]:
        """The tables of `kernels.move_rows` for another worker's arenas, and the largest row in units."""
        if theirs.device != self.device:
            if self.device.type != "cuda" or theirs.device.type != "cuda":
                raise ValueError(f"workers are on {theirs.device} and {self.device}; all must be CPUs or all GPUs")
            if not torch.cuda.can_device_access_peer(self.device, theirs.device):
                raise ValueError(f"{self.device} cannot read the memory of {theirs.device}; use one of them only")
            probe = torch.zeros(
                1, device=self.device
            )  # copying between two devices maps the memory of each into the other
            probe.to(theirs.device).to(self.device)
        tables: dict[int, list[list[int]]] = {}
        widest = 1
        for spec, width in self.arenas.layout.widths.items():
            unit = unit_of(_bytes(spec) * width)
            units = _bytes(spec) * width // unit
            widest = max(widest, units)
            entry = [theirs.items[spec].data_ptr(), self.arenas.items[spec].data_ptr(), units]
            tables.setdefault(unit, []).append(entry)
        return {unit: _table(lines, self.device) for unit, lines in tables.items()}, widest

    def _move(self, move: Move, begin: int) -> None:
        peer = self._peers[move.worker]
        assert peer is not None, "a worker was asked to move rows from itself"
        tables, widest = peer
        kernels.move_rows(self._signals, tables, widest, begin, len(move.rows))
        self._moved += len(move.rows)


def _gated_of(kind: Kind) -> Gated | None:
    """The gated form in which tasks of a type run; None if they run as `run`."""
    return kind.cell.gated if "c" not in kind.returned else None


class _Buffers:
    """The fixed memory of one type's tasks, and the kernels of a task of each size."""

    def __init__(self, kind: Kind, words: Mapping[int, TaskWords], arenas: Arenas, signals: Signals) -> None:
        self._kind, self._cell, self._words = kind, kind.cell, words
        self._arenas, self._signals, self._device = arenas, signals, arenas.device
        self._gated = _gated_of(kind)
        largest = kind.sizes[-1]
        kind.weights = {name: weight.contiguous() for name, weight in kind.weights.items()}
        if self._gated is None:
            self._inputs = {name: example(spec, largest, self._device) for name, spec in self._cell.inputs.items()}
        else:
            w = kind.weights["w"]
            self._parts = torch.empty(largest, w.shape[1], dtype=w.dtype, device=self._device)
            self._products = torch.empty(largest, w.shape[0], dtype=w.dtype, device=self._device)
            hidden = len(w) // len(self._gated.gates)
            self._h: torch.Tensor | None = None
            if self._gated.read_out is not None or "h" in kind.returned:
                self._h = torch.empty(largest, hidden, dtype=w.dtype, device=self._device)

    def body(self, size: int) -> Callable[[], None]:
        """A function that launches the kernels of a task of this size on the current stream."""
        if self._gated is not None:
            return self._gated_body(self._gated, size)
        tables = _tables_of({name: self._scatter_entries(name, size) for name in self._cell.outputs}, self._device)
        gather, widest = self._gather_tables(size)
        inputs = {name: buffer[:size] for name, buffer in self._inputs.items()}

        def run() -> None:
            kernels.gather(self._signals, gather, widest, size)
            self._write(self._kind.run(inputs), tables, size)

        return run

    def _gated_body(self, gated: Gated, size: int) -> Callable[[], None]:
        cell, words, layout = self._cell, self._words[size], self._arenas.layout
        weights = self._kind.weights
        parts = [self._source(part, words) for part in gated.parts]
        joined, products = self._parts[:size], self._products[:size]
        h = None if self._h is None else self._h[:size]
        arena, width = self._arenas.of(cell.outputs["h"]), layout.width_of(cell.outputs["h"])
        places = layout.place(cell, "h")[1], layout.place(cell, "c")[1]
        children = [words.sources[name] for name in gated.children]
        returned = {"h": self._scatter_entries("h", size)} if "h" in words.returned else {}
        tables = _tables_of(returned, self._device)

        def run() -> None:
            kernels.concatenate(self._signals, parts, joined, size)
            torch.mm(joined, weights["w"].t(), out=products)
            last = h is None
            kernels.gates(
                self._signals, gated.gates, products, weights["b"], arena, width, places, children, h, last=last
            )
            if gated.read_out is not None and h is not None:
                name, matrix, bias = gated.read_out
                spec, place = layout.place(cell, name)
                kernels.read_out(
                    self._signals,
                    torch.nn.functional.linear(h, weights[matrix], weights[bias]),
                    self._arenas.items[spec],
                    layout.widths[spec],
                    place,
                    words.returned[name][0] if name in words.returned else None,
                    last=not returned,
                )
            if h is not None and returned:
                self._write({"h": h}, tables, size)

        return run

    def _source(self, part: str | tuple[str, str], words: TaskWords) -> Source:
        """The source of one part of a gated cell's inputs."""
        if isinstance(part, str):
            spec = self._cell.inputs[part]
            wide = math.prod(spec.shape)
            if isinstance(spec, State):
                return Source(kernels.BY_INDEX, self._arenas.of(spec), wide, words.sources[part])
            return Source(kernels.VALUE, self._signals.ring, wide, words.values[part][0])
        name, weight = part
        items = self._kind.weights[weight]
        if isinstance(self._cell.inputs[name], State):
            arena = self._arenas.of(self._cell.inputs[name])
            return Source(kernels.BY_WORD, items, items.shape[1], words.sources[name], arena)
        return Source(kernels.BY_INDEX, items, items.shape[1], words.values[name][0])

    def _gather_tables(self, size: int) -> tuple[dict[int, torch.Tensor], int]:
        words = self._words[size]
        lines: dict[int, list[list[int]]] = {}
        widest = 1
        for name, spec in self._cell.inputs.items():
            if isinstance(spec, State):
                source, offset = self._arenas.of(spec), words.sources[name]
            else:
                source, offset = self._signals.ring, words.values[name][0]
            item = _bytes(spec)
            widest = max(widest, item // unit_of(item))
            entry = kernels.gather_entry(source, self._inputs[name], item, offset, not isinstance(spec, State))
            lines.setdefault(unit_of(item), []).append(entry)
        return {unit: _table(each, self._device) for unit, each in lines.items()}, widest

    def _scatter_entries(self, name: str, size: int) -> tuple[int, list[int]]:
        """The unit in which an output is written, and its line of the table."""
        spec, place = self._arenas.layout.place(self._cell, name)
        returned = self._words[size].returned
        at = returned[name][0] if name in returned else None
        item = _bytes(spec)
        return unit_of(item), kernels.scatter_entry(
            self._arenas.items[spec], item, self._arenas.layout.widths[spec], place, at
        )

    def _write(self, outputs: Tensors, tables: dict[int, _Scatter], size: int) -> None:
        """Write outputs, and end the task if there are any."""
        for number, (unit, table) in enumerate(tables.items()):
            batch = [outputs[name].contiguous() for name in table.names]
            last = number + 1 == len(tables)
            kernels.scatter(self._signals, batch, table.lines, unit, table.widest, size, last=last)


@dataclass(frozen=True, slots=True)
class _Scatter:
    """The outputs that are written in one unit."""

    names: list[str]
    lines: torch.Tensor
    widest: int


def _tables_of(entries: Mapping[str, tuple[int, list[int]]], device: torch.device) -> dict[int, _Scatter]:
    made = {}
    for unit in {unit for unit, _ in entries.values()}:
        names = [name for name, entry in entries.items() if entry[0] == unit]
        lines = [entries[name][1] for name in names]
        made[unit] = _Scatter(names, _table(lines, device), max(line[1] for line in lines))
    return made


def _table(lines: Sequence[Sequence[int]], device: torch.device) -> torch.Tensor:
    return torch.tensor(lines, dtype=torch.int64, device=device)
