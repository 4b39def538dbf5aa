"""Types of cells.

Two cells have one type if their operations, weights, and the shapes of inputs and outputs are equal.
"""

from __future__ import annotations

import hashlib
from collections.abc import Hashable, Iterable, Sequence
from typing import Any

import torch
from torch.fx import GraphModule, Node
from torch.fx.experimental.proxy_tensor import make_fx
from torch.overrides import TorchFunctionMode

from holdfast.cells.cell import Cell, Spec

TRACED_SIZE = 2
"""Number of nodes in the batch with which a cell is traced. Tracing runs the cell once."""


def number(cells: Sequence[Cell]) -> dict[Cell, int]:
    """The type of each cell, from 0 in order of appearance (BatchMaker, section 2.3.1).

    Two cells have one number only if the names and specs of their inputs and outputs are equal, their priorities and
    sizes are equal, they compute the same operations, and their weights share memory or hold equal bytes. A cell that
    differs from all others in these names, specs, priorities and sizes is not traced. Raises ValueError for a cell that
    cannot be traced, such as one that branches by a tensor's contents.
    """
    alike: dict[Hashable, list[Cell]] = {}
    for cell in dict.fromkeys(cells):
        alike.setdefault(_signature(cell), []).append(cell)
    same_as: dict[Cell, Cell] = {}
    for group in alike.values():
        distinct: list[tuple[Cell, Hashable, list[torch.Tensor]]] = []
        for cell in group:
            operations, weights = trace(cell) if len(group) > 1 else ((), [])
            for other, other_operations, other_weights in distinct:
                if operations == other_operations and all(map(_equal, weights, other_weights)):
                    same_as[cell] = other
                    break
            else:
                distinct.append((cell, operations, weights))
                same_as[cell] = cell
    numbers: dict[Cell, int] = {}
    for cell in dict.fromkeys(cells):
        numbers[cell] = numbers[same_as[cell]] if same_as[cell] in numbers else len(set(numbers.values()))
    return numbers


def trace(cell: Cell) -> tuple[Hashable, list[torch.Tensor]]:
    """A cell's operations, in a form that is equal for equal operations, and the weights that they use, in that order.

    Tensors that `run` closes over count as weights. Raises ValueError if the cell cannot be traced.
    """
    names = list(cell.weights)
    weights = [torch.as_tensor(cell.weights[name]) for name in names]
    device = weights[0].device if weights else torch.device("cpu")
    inputs = [example(spec, TRACED_SIZE, device) for spec in cell.inputs.values()]

    def run(*tensors: torch.Tensor) -> list[torch.Tensor]:
        given = dict(zip(names, tensors[: len(names)], strict=True))
        outputs = cell.run(given, **dict(zip(cell.inputs, tensors[len(names) :], strict=True)))
        return [outputs[name] for name in cell.outputs]

    try:
        with torch.no_grad():
            graph = make_fx(run)(*weights, *inputs)
    except (RuntimeError, TypeError, KeyError, IndexError, AttributeError) as error:
        raise ValueError(f"cell {cell.name} cannot be traced: {error}") from error
    return _canonical(graph, weights)


def fingerprint(cell: Cell) -> str:
    """A digest that is equal for cells that take equal time: they call the same functions on tensors of equal shapes.

    The calls are those for a batch of zeros; the cell is run once. Dtypes count, too; the numbers in weights do not.
    """
    weights = {name: torch.as_tensor(weight) for name, weight in cell.weights.items()}
    device = next((weight.device for weight in weights.values()), torch.device("cpu"))
    inputs = {name: example(spec, TRACED_SIZE, device) for name, spec in cell.inputs.items()}
    with torch.no_grad(), _Operations() as done:
        cell.run(weights, **inputs)
    kinds = [(name, type(spec).__name__, spec) for name, spec in (*cell.inputs.items(), *cell.outputs.items())]
    return hashlib.sha256(repr((kinds, _shapes(weights.values()), done.lines, cell.gated)).encode()).hexdigest()[:16]


class _Operations(TorchFunctionMode):
    """Records the PyTorch functions that are called while it is entered, and their arguments."""

    def __init__(self) -> None:
        self.lines: list[Hashable] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__qualname__", None) or repr(func)
        self.lines.append((name, _described((args, kwargs or {}))))
        return func(*args, **(kwargs or {}))


def _described(value: Any) -> Hashable:
    """An argument of an operation, where a tensor is represented by its shape and dtype."""
    if isinstance(value, torch.Tensor):
        return tuple(value.shape), str(value.dtype)
    if isinstance(value, (list, tuple)):
        return tuple(map(_described, value))
    if isinstance(value, dict):
        return tuple((key, _described(each)) for key, each in value.items())
    return repr(value)


def example(spec: Spec, size: int, device: torch.device) -> torch.Tensor:
    """A batch of zeros of this spec."""
    return torch.zeros(size, *spec.shape, dtype=dtype(spec), device=device)


def dtype(spec: Spec) -> torch.dtype:
    """The torch dtype of a Spec."""
    found: torch.dtype = getattr(torch, spec.dtype)
    return found


def _signature(cell: Cell) -> Hashable:
    """The properties that two cells of one type share, besides their operations."""
    inputs = tuple((name, type(spec), spec.shape, spec.dtype) for name, spec in cell.inputs.items())
    outputs = tuple((name, spec.shape, spec.dtype, spec.returned) for name, spec in cell.outputs.items())
    return inputs, outputs, cell.priority, cell.sizes


def _canonical(graph: GraphModule, weights: Sequence[torch.Tensor]) -> tuple[Hashable, list[torch.Tensor]]:
    """The graph with its nodes numbered, and each weight named by its first use.

    Weights that no operation uses are left out, and so are the names of weights.
    """
    numbers: dict[Node, Hashable] = {}
    placeholders: dict[Node, int] = {}
    used: list[torch.Tensor] = []
    lines: list[Hashable] = []

    def name(node: Node) -> Hashable:
        if node not in numbers:
            at = placeholders[node]
            if at < len(weights):
                numbers[node] = ("weight", len(used))
                used.append(weights[at])
            else:
                numbers[node] = ("input", at - len(weights))
        return numbers[node]

    def read(value: Any) -> Hashable:
        if isinstance(value, Node):
            return name(value)
        if isinstance(value, (list, tuple)):
            return (type(value).__name__, *map(read, value))
        if isinstance(value, dict):
            return ("dict", *((key, read(each)) for key, each in value.items()))
        return type(value).__name__, repr(value)

    for node in graph.graph.nodes:
        if node.op == "placeholder":
            placeholders[node] = len(placeholders)
        elif node.op == "get_attr":
            numbers[node] = ("weight", len(used))
            used.append(getattr(graph, str(node.target)))
        else:
            lines.append((node.op, str(node.target), read(node.args), read(node.kwargs)))
            numbers[node] = ("node", len(lines))
    return (*lines, *_shapes(used)), used


def _shapes(tensors: Iterable[torch.Tensor]) -> list[Hashable]:
    return [(tuple(tensor.shape), tensor.dtype, tensor.device) for tensor in tensors]


def _equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors of equal shapes and types share memory or hold equal bytes."""
    if one.data_ptr() == other.data_ptr() and one.stride() == other.stride():
        return True
    return torch.equal(*(each.detach().contiguous().view(-1).view(torch.uint8) for each in (one, other)))
