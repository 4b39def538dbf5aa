"""Executors of cells: they hold the arenas of state, and run rounds of tasks. The executor for CPUs is here.

An arena holds all outputs of one shape and dtype, of all live nodes. A task gathers its State inputs from arenas by
index, runs its cell, and scatters the outputs into the arenas by row.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch.nn import functional

from holdfast.cells import kernels_cpu
from holdfast.cells.cell import Cell, Spec, sizes_by_type
from holdfast.cells.gated import Gated
from holdfast.cells.plan import SCRATCH, Layout, Move, Returned, Round, Task
from holdfast.cells.types import dtype, example
from holdfast.loop.contracts import Executor

Tensors = dict[str, torch.Tensor]
FINE_ROWS = 32
"""Largest number of nodes for which a CPU's matrix product has exactly as many rows. Above it, see `_Linear.rows`."""
LEAST_PACKED = 128
"""Smallest number of outputs of a packed product.

PyTorch's own product is faster with fewer outputs, such as those of label read-outs.
"""


@dataclass(frozen=True, slots=True)
class Copies:
    """Counts of how the State inputs of tasks were read. Inputs that are zeros for all nodes are not counted."""

    gathered: int = 0
    """Number of inputs whose items were copied into one buffer."""
    in_place: int = 0
    """Number of inputs that were read in place, because they were contiguous and in order (BatchMaker, section 2.4.3).
    """
    moved: int = 0
    """Number of rows that were copied from other workers."""


class CellExecutor(Executor[Round, Returned], Protocol):
    """The executor of one worker."""

    arenas: Arenas
    gated: dict[int, tuple[Kind, Gated]]
    """The types that the executor runs in their gated form, by number."""

    def connect(self, executors: Sequence[CellExecutor]) -> None:
        """Set the executor of each worker, so that rows can be copied from it. Needed if there are several workers."""
        ...

    def timed(self, plan: Round) -> float:
        """Run a round while no other is in flight. Returns the seconds that its tasks took."""
        ...

    def copies(self) -> Copies:
        """Counts of how inputs were read so far."""
        ...


class Arenas:
    """The state of all rows on one device: for each shape and dtype, a tensor [capacity * width + 1, *shape].

    The index of an output is `row * width + place`. The last item of each arena is zeros.
    """

    def __init__(self, cells: Sequence[Cell], device: torch.device, capacity: int) -> None:
        self.layout = Layout(cells)
        self.capacity, self.device = capacity, device
        self.items: dict[Spec, torch.Tensor] = {}
        read = [Spec(cell.inputs[name].shape, cell.inputs[name].dtype) for cell in cells for name in cell.states]
        for spec in (*self.layout.widths, *read):
            if spec not in self.items:
                self.items[spec] = example(spec, capacity * self.layout.widths.get(spec, 0) + 1, device)

    def of(self, spec: Spec) -> torch.Tensor:
        """The arena of a State input or an output."""
        return self.items[Spec(spec.shape, spec.dtype)]

    def by_row(self, spec: Spec) -> torch.Tensor:
        """The arena as [capacity, width, *shape], without the zeros at its end."""
        return self.items[spec][:-1].view(self.capacity, self.layout.widths[spec], *spec.shape)


class Kind:
    """A cell type on one device: its cell and sizes, its weights there, and the places of its states and outputs."""

    def __init__(self, cell: Cell, arenas: Arenas, weights: Tensors, sizes: tuple[int, ...]) -> None:
        self.cell, self.weights, self.sizes = cell, weights, sizes
        self.states = [(name, arenas.of(cell.inputs[name])) for name in cell.states]
        self.values, self.returned = cell.values, cell.returned
        self.outputs: list[tuple[str, torch.Tensor, int, int]] = []
        """For each output: its name, its arena, the width of the arena's rows, and its place in a row."""
        for name in cell.outputs:
            spec, place = arenas.layout.place(cell, name)
            self.outputs.append((name, arenas.items[spec], arenas.layout.widths[spec], place))
        self.aliases = False
        """Whether an output of the cell may share memory with an input."""

    def run(self, inputs: Mapping[str, torch.Tensor]) -> Tensors:
        """The outputs of a batch."""
        outputs: Tensors = self.cell.run(self.weights, **inputs)
        return outputs

    def try_out(self, size: int, device: torch.device) -> None:
        """Run the cell once on zeros of this batch size.

        Raises ValueError if the outputs differ from its declaration.
        """
        cell = self.cell
        with torch.inference_mode(False), torch.no_grad():  # inference tensors do not count their changes
            inputs = {name: example(spec, size, device) for name, spec in cell.inputs.items()}
            versions = {name: tensor._version for name, tensor in inputs.items()}
            try:
                outputs = self.run(inputs)
            except Exception as error:
                raise ValueError(f"cell {cell.name} cannot run on a batch of {size}: {error}") from error
        check_outputs(cell, outputs, size, device)
        changed = [name for name, tensor in inputs.items() if tensor._version != versions[name]]
        if changed:
            raise ValueError(f"cell {cell.name} changes its input {changed[0]}; it must leave inputs as they are")
        memory = {tensor.untyped_storage().data_ptr() for tensor in (*inputs.values(), *self.weights.values())}
        self.aliases |= any(tensor.untyped_storage().data_ptr() in memory for tensor in outputs.values())


def kinds_of(
    cells: Sequence[Cell], types: Mapping[Cell, int], arenas: Arenas, sizes: Sequence[tuple[int, ...]] | None = None
) -> list[Kind]:
    """The types in the order of their numbers. Each uses the first of its cells. Shared weights are copied once.

    `sizes` are by type number, by default those of the cells. Raises ValueError for sizes that do not fit.
    """
    copied: dict[tuple[object, ...], torch.Tensor] = {}

    def on_device(weight: object) -> torch.Tensor:
        tensor = torch.as_tensor(weight).detach()
        key = (tensor.data_ptr(), tensor.dtype, tuple(tensor.shape), tensor.stride(), tensor.device)
        return copied.setdefault(key, tensor.to(arenas.device))

    first: dict[int, Cell] = {}
    for cell in cells:
        first.setdefault(types[cell], cell)
    return [
        Kind(first[number], arenas, {name: on_device(weight) for name, weight in first[number].weights.items()}, some)
        for number, some in zip(sorted(first), sizes_by_type(types, sizes), strict=True)
    ]


def check_outputs(cell: Cell, outputs: object, size: int, device: torch.device) -> None:
    """Raise ValueError if the outputs differ from the cell's declaration."""
    if not isinstance(outputs, Mapping):
        raise ValueError(f"cell {cell.name} gives {type(outputs).__name__}; it must give outputs by name")
    if set(outputs) != set(cell.outputs):
        raise ValueError(f"cell {cell.name} gives {', '.join(outputs)}; it declares {', '.join(cell.outputs)}")
    for name, spec in cell.outputs.items():
        given, shape = outputs[name], (size, *spec.shape)
        if not isinstance(given, torch.Tensor) or tuple(given.shape) != shape or given.dtype != dtype(spec):
            found = (
                f"{str(given.dtype).removeprefix('torch.')}{list(given.shape)}"
                if isinstance(given, torch.Tensor)
                else type(given).__name__
            )
            raise ValueError(
                f"output {name} of cell {cell.name} is {found} for a batch of {size}; "
                f"it is declared as {spec.dtype}{list(shape)}"
            )
        if given.device != device:
            raise ValueError(f"output {name} of cell {cell.name} is on {given.device}; its inputs are on {device}")


class CpuExecutor:
    """Runs rounds on a CPU, with PyTorch's operators.

    `collect` computes the oldest round, in the calling thread; `submit` only queues. A task runs with exactly as many
    nodes as it has; on a CPU, padding would only add work. Buffers for gathered inputs are allocated once. Gated cells
    of float32 run with PyTorch's matrix product and the kernels of `kernels_cpu`.
    """

    def __init__(
        self,
        cells: Sequence[Cell],
        types: Mapping[Cell, int],
        *,
        capacity: int,
        sizes: Sequence[tuple[int, ...]] | None = None,
    ) -> None:
        """Allocate arenas of `capacity` rows and try every cell at each of its sizes. Raises ValueError.

        `sizes` are by type number, by default those of the cells.
        """
        self.arenas = Arenas(cells, torch.device("cpu"), capacity)
        self._kinds = kinds_of(cells, types, self.arenas, sizes)
        for kind in self._kinds:
            for size in kind.sizes:
                kind.try_out(size, self.arenas.device)
        largest: dict[Spec, int] = {}
        for kind in self._kinds:
            for name in kind.cell.states:
                spec = Spec(kind.cell.inputs[name].shape, kind.cell.inputs[name].dtype)
                largest[spec] = max(largest.get(spec, 0), kind.sizes[-1])
        self._zeros = {
            id(self.arenas.of(spec)): example(spec, size, self.arenas.device) for spec, size in largest.items()
        }
        self._buffers = [
            [example(kind.cell.inputs[name], kind.sizes[-1], self.arenas.device) for name, _ in kind.states]
            for kind in self._kinds
        ]
        self._gated = [_GatedOnCpu.of(kind, self.arenas) for kind in self._kinds]
        self.gated = {
            number: (kind, kind.cell.gated)
            for number, (kind, gated) in enumerate(zip(self._kinds, self._gated, strict=True))
            if gated is not None and kind.cell.gated is not None
        }
        self._peers: Sequence[CellExecutor] = ()
        self._rounds: deque[Round] = deque()
        self._last_rows = np.zeros(0, np.int64)
        self._last: list[tuple[int, int, int, torch.Tensor]] = []
        """For each output of the previous task: the arena, its width, the place in a row, and the batch of outputs
        itself."""
        self._gathered = self._in_place = self._moved = 0

    def connect(self, executors: Sequence[CellExecutor]) -> None:
        """Set the executor of each worker."""
        self._peers = executors

    def submit(self, plan: Round) -> None:
        """Queue a round."""
        self._rounds.append(plan)

    def collect(self) -> Returned:
        """Compute the oldest round that was submitted."""
        plan = self._rounds.popleft()
        with torch.inference_mode():
            for move in plan.moves:
                self._move(move)
            return [self._run(plan.type, task) for task in plan.tasks]

    def timed(self, plan: Round) -> float:
        """Run a round while no other is in flight. Returns the seconds that it took."""
        began = time.perf_counter()
        self.submit(plan)
        self.collect()
        return time.perf_counter() - began

    def copies(self) -> Copies:
        """Counts of how inputs were read so far."""
        return Copies(self._gathered, self._in_place, self._moved)

    def close(self) -> None:
        """Drop the rounds that were not computed."""
        self._rounds.clear()

    def _move(self, move: Move) -> None:
        rows, source = torch.from_numpy(move.rows), self._peers[move.worker].arenas
        for spec in self.arenas.layout.widths:
            self.arenas.by_row(spec).index_copy_(0, rows.long(), source.by_row(spec).index_select(0, rows))
        self._moved += len(move.rows)
        self._last = []

    def _run(self, number: int, task: Task) -> tuple[np.ndarray, ...]:
        kind, gated, nodes = self._kinds[number], self._gated[number], len(task.rows)
        if gated is not None:
            self._last = []
            returned, gathered = gated.run(task)
            self._gathered += gathered
            return returned
        inputs: Tensors = {}
        for (name, arena), source, buffer in zip(kind.states, task.sources, self._buffers[number], strict=True):
            inputs[name] = self._read(arena, source, buffer, copy=kind.aliases)
        for name, value in zip(kind.values, task.values, strict=True):
            inputs[name] = torch.from_numpy(value)
        outputs = kind.run(inputs)
        if kind.aliases:
            outputs = {name: output.clone() for name, output in outputs.items()}
        self._last_rows = rows = task.rows.astype(np.int64)
        run = _run_of(rows)
        self._last = []
        for name, arena, width, place in kind.outputs:
            output = outputs[name]
            if run is not None:
                first, step = run[0] * width + place, run[1] * width
                arena[first : first + nodes * step : step].copy_(output)
            else:
                arena.index_copy_(0, torch.from_numpy(rows * width + place), output)
            self._last.append((id(arena), width, place, output))
        return tuple([outputs[name].numpy() for name in kind.returned])

    def _read(self, arena: torch.Tensor, source: np.ndarray, buffer: torch.Tensor, *, copy: bool) -> torch.Tensor:
        """A State input as [nodes, *shape]: in place if contiguous and in order, else gathered into the buffer."""
        nodes = len(source)
        if source.min() < 0:
            if source.max() < 0:
                return self._zeros[id(arena)][:nodes]
            source = np.where(source < 0, np.int32(len(arena) - 1), source)
        elif not copy:
            for which, width, place, output in self._last:
                if which == id(arena) and self._is_last(source, width, place):
                    self._in_place += 1
                    return output
            run = _run_of(source)
            if run is not None:
                self._in_place += 1
                return arena[run[0] : run[0] + nodes * run[1] : run[1]]
        self._gathered += 1
        return torch.index_select(arena, 0, torch.from_numpy(np.ascontiguousarray(source)), out=buffer[:nodes])

    def _is_last(self, source: np.ndarray, width: int, place: int) -> bool:
        """Whether a State input is an output of the previous task, for the same rows in the same order."""
        rows = self._last_rows
        if len(rows) != len(source) or int(rows[0]) * width + place != int(source[0]):
            return False
        return bool((rows * width + place == source).all())


class _Linear:
    """x @ weight.T + bias. If PyTorch has oneDNN, the weight is packed once instead of for each product.

    With 1,024 inputs, 2,560 outputs and 8 to 128 rows, this makes products 1.4 to 2 times as fast.
    """

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor) -> None:
        self._weight, self._bias = weight, bias
        self._packed = torch.backends.mkldnn.is_available() and len(weight) >= LEAST_PACKED  # type: ignore[no-untyped-call]
        if self._packed:
            with torch.inference_mode():
                self._weight = torch.ops.mkldnn._reorder_linear_weight(weight)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if self._packed:
            with torch.inference_mode():
                product: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x, self._weight, self._bias, "none", [], "")
                return product
        return functional.linear(x, self._weight, self._bias)

    @staticmethod
    def rows(nodes: int) -> int:
        """Number of rows to compute for `nodes` nodes, at most 1/16 more.

        oneDNN prepares itself for each number of rows, which takes a millisecond, and remembers 1,024 products.
        """
        step = max(1, (1 << (nodes - 1).bit_length()) // FINE_ROWS)
        return -(-nodes // step) * step


class _GatedOnCpu:
    """Runs tasks of a gated float32 cell: gathers the product's input, multiplies, and runs one kernel for the rest."""

    def __init__(self, kind: Kind, gated: Gated, arenas: Arenas) -> None:
        """Allocate the buffers, and compile the kernels by running a task of one node."""
        cell, matrix, most = kind.cell, kind.weights["w"], kind.sizes[-1]
        hidden = len(matrix) // len(gated.gates)
        self._cell, self._linear = cell, _Linear(matrix, kind.weights["b"])
        self._x = torch.zeros(self._linear.rows(most), matrix.shape[1])
        self._gathers: list[Callable[[Task], int]] = []
        column = 0
        for part in gated.parts:
            name, table = (part, None) if isinstance(part, str) else (part[0], kind.weights[part[1]])
            self._gathers.append(self._gather(name, table, column, arenas))
            column += table.shape[1] if table is not None else cell.inputs[name].shape[0]
        forgets = [at for at, gate in enumerate(gated.gates) if gate == "f"]
        order = [*map(gated.gates.index, "iou"), *forgets]
        self._first = np.array([hidden * gate for gate in order], np.int64)
        self._children = np.array([cell.states.index(name) for name in gated.children], np.int64)
        (spec, h_place), (_, c_place) = arenas.layout.place(cell, "h"), arenas.layout.place(cell, "c")
        self._cells = arenas.items[spec].numpy()
        self._places = np.array([h_place, c_place, arenas.layout.widths[spec]], np.int64)
        self._hidden, self._no_h = hidden, torch.zeros(0, hidden)
        self._read_out = gated.read_out
        if gated.read_out is not None:
            label, weight, bias = gated.read_out
            self._scores = _Linear(kind.weights[weight], kind.weights[bias])
            spec, self._label_place = arenas.layout.place(cell, label)
            self._labels, self._label_width = arenas.items[spec].numpy(), arenas.layout.widths[spec]
        values = tuple([np.zeros((1, *cell.inputs[name].shape), cell.inputs[name].dtype) for name in cell.values])
        self.run(Task(np.full(1, SCRATCH, np.int32), np.full((len(cell.states), 1), -1, np.int32), values, 1))

    @classmethod
    def of(cls, kind: Kind, arenas: Arenas) -> _GatedOnCpu | None:
        """The gated form of this type; None unless its cells are gated, are float32, and keep c on the device."""
        gated = kind.cell.gated
        if gated is None or "c" in kind.returned or kind.weights["w"].dtype != torch.float32:
            return None
        return cls(kind, gated, arenas)

    def run(self, task: Task) -> tuple[tuple[np.ndarray, ...], int]:
        """The returned outputs, and the number of gathered State inputs. Raises IndexError for an unknown token."""
        nodes = len(task.rows)
        gathered = sum([gather(task) for gather in self._gathers])
        products = self._linear(self._x[: self._linear.rows(nodes)]).numpy()
        h = torch.zeros(self._linear.rows(nodes), self._hidden) if self._cell.returned else self._no_h
        kernels_cpu.gates(
            products, self._first, task.sources, self._children, self._cells, self._places, task.rows, h.numpy()
        )
        returned = {"h": h.numpy()[:nodes]}
        if self._read_out is not None:
            labels = self._scores(h).argmax(1).numpy()[:nodes].astype(np.int32)
            returned[self._read_out[0]] = labels
            self._labels[task.rows * np.int64(self._label_width) + self._label_place] = labels
        return tuple([returned[name] for name in self._cell.returned]), gathered

    def _gather(self, name: str, table: torch.Tensor | None, column: int, arenas: Arenas) -> Callable[[Task], int]:
        """A function that copies one part of a task's inputs into the columns from `column` on.

        The function returns 1 if the part is a State input, else 0.
        """
        cell, x = self._cell, self._x.numpy()
        is_state = name in cell.states
        place = (cell.states if is_state else cell.values).index(name)
        items = arenas.of(cell.inputs[name]).numpy() if is_state else np.zeros(0)
        rows = np.zeros((0, 0), np.float32) if table is None else table.contiguous().numpy()

        def state(task: Task) -> int:
            return int(kernels_cpu.gather(items, task.sources[place], kernels_cpu.NOWHERE, x, column) > 0)

        def value(task: Task) -> int:
            given = task.values[place]
            x[: len(given), column : column + given.shape[1]] = given
            return 0

        def looked_up(task: Task) -> int:
            numbers = items[task.sources[place]] if is_state else task.values[place]
            copied = kernels_cpu.gather(rows, numbers, 0, x, column)
            if copied < 0:
                raise IndexError(f"{name} of cell {cell.name} is {numbers[-1 - copied]}; it must be below {len(rows)}")
            return 0

        if table is not None:
            return looked_up
        return state if is_state else value


def _run_of(numbers: np.ndarray) -> tuple[int, int] | None:
    """The first of these numbers and the step between them, if they rise by equal steps; else None."""
    first = int(numbers[0])
    if len(numbers) == 1:
        return first, 1
    step = int(numbers[1]) - first
    if step < 1 or int(numbers[-1]) - first != step * (len(numbers) - 1):
        return None
    return (first, step) if len(numbers) == 2 or bool((np.diff(numbers) == step).all()) else None
