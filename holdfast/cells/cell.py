"""Classes with which a programmer defines cells, and the fields that clients send and receive. No torch here.

A cell is a part of a model that runs many times for one request: one step of an LSTM, one node of a tree (BatchMaker,
section 2.3.1). Its weights belong to it. Its inputs and outputs are batches, whose first dimension counts the nodes.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

from holdfast.cells.gated import Gated

DTYPES = ("float32", "float16", "bfloat16", "int64", "int32", "bool")
"""Dtypes of inputs and outputs. Values and returned outputs pass through NumPy, so they cannot be bfloat16."""
FIELD_DTYPES = ("float32", "float16", "int64", "int32", "bool", "string")
"""Dtypes of fields that clients send and receive. An array of strings has NumPy's dtype object and holds str."""
DEFAULT_SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)


@dataclass(frozen=True, slots=True)
class Spec:
    """The shape and dtype of one node's part of a batched tensor, without the batch dimension."""

    shape: tuple[int, ...] = ()
    dtype: str = "float32"

    def __post_init__(self) -> None:
        if self.dtype not in DTYPES:
            raise ValueError(f"dtype is {self.dtype!r}; it must be one of {', '.join(DTYPES)}")
        if any(size < 1 for size in self.shape):
            raise ValueError(f"shape is {self.shape}; every dimension must be at least 1")


@dataclass(frozen=True, slots=True)
class State(Spec):
    """An input that is an output of another node, or zeros. It stays on the device."""


@dataclass(frozen=True, slots=True)
class Value(Spec):
    """An input that comes with the request, such as a token."""

    def __post_init__(self) -> None:
        Spec.__post_init__(self)
        _require_numpy(self, "a value")


@dataclass(frozen=True, slots=True)
class Output(Spec):
    """An output, kept on the device for the nodes that read it."""

    returned: bool = False
    """Whether each task also copies the output to the host, as a result of a request or because a chain ends by it."""

    def __post_init__(self) -> None:
        Spec.__post_init__(self)
        if self.returned:
            _require_numpy(self, "a returned output")


def _require_numpy(spec: Spec, name: str) -> None:
    if spec.dtype == "bfloat16":
        raise ValueError(f"{name} cannot be bfloat16; use float32")


@dataclass(frozen=True, eq=False)
class Cell:
    """A type of cell.

    Two cells are the same type only if they compute the same operations, with the same weights, on inputs of the same
    shapes. The executor checks this (section 2.3.1), and nodes of equal types share tasks.
    """

    name: str
    run: Callable[..., Any]
    """The function run(weights, **inputs) -> outputs by name.

    Inputs and outputs are tensors [size, *shape]; weights are tensors of any shape. The function must compute each row
    of a batch independently, and must not change an input.
    """
    inputs: Mapping[str, State | Value]
    outputs: Mapping[str, Output]
    weights: Mapping[str, Any] = field(default_factory=dict)
    """The weights, as tensors by name."""
    priority: int = 0
    """Priority of the cell; the highest runs first.

    Later cells of a graph should have a higher priority, such as a decoder after an encoder.
    """
    sizes: tuple[int, ...] = DEFAULT_SIZES
    """The batch sizes that are prepared at the start, unless `sizes_by_type` gets other ones.

    A task whose number of nodes lies between two sizes is padded up to the larger one.
    """
    gated: Gated | None = None
    """A form of `run` that executors compute with fewer passes over memory. Its results must equal those of `run`."""

    def __post_init__(self) -> None:
        if not self.outputs:
            raise ValueError(f"cell {self.name} has no outputs; it needs at least one")
        if not self.inputs:
            raise ValueError(f"cell {self.name} has no inputs; it needs at least one")
        _check_sizes(self.name, self.sizes)
        for name in self.carried:
            carried, given = self.inputs[name], self.outputs[name]
            if (carried.shape, carried.dtype) != (given.shape, given.dtype):
                raise ValueError(
                    f"input {name} of cell {self.name} is {carried.dtype}{list(carried.shape)}, and output {name} is "
                    f"{given.dtype}{list(given.shape)}; inputs and outputs of one name must be alike"
                )

    @cached_property
    def states(self) -> tuple[str, ...]:
        """The names of the State inputs, in order."""
        return tuple(name for name, spec in self.inputs.items() if isinstance(spec, State))

    @cached_property
    def takes(self) -> dict[str, tuple[tuple[int, ...], str]]:
        """For each State input, its shape and dtype."""
        return {name: (self.inputs[name].shape, self.inputs[name].dtype) for name in self.states}

    @cached_property
    def gives(self) -> dict[str, tuple[tuple[int, ...], str]]:
        """For each output, its shape and dtype."""
        return {name: (output.shape, output.dtype) for name, output in self.outputs.items()}

    @cached_property
    def values(self) -> tuple[str, ...]:
        """The names of the Value inputs, in order."""
        return tuple(name for name, spec in self.inputs.items() if isinstance(spec, Value))

    @cached_property
    def given(self) -> tuple[tuple[str, np.dtype, tuple[int, ...]], ...]:
        """For each Value input, its name, dtype and shape."""
        return tuple((name, np.dtype(self.inputs[name].dtype), self.inputs[name].shape) for name in self.values)

    @cached_property
    def returned(self) -> tuple[str, ...]:
        """The names of the outputs that each task copies to the host."""
        return tuple(name for name, spec in self.outputs.items() if spec.returned)

    @cached_property
    def carried(self) -> tuple[str, ...]:
        """The State inputs that a chain of this cell takes from its previous step: those named as outputs."""
        return tuple(name for name in self.states if name in self.outputs)


def sizes_by_type(
    types: Mapping[Cell, int], sizes: Sequence[tuple[int, ...]] | None = None
) -> tuple[tuple[int, ...], ...]:
    """The batch sizes of each type, by its number: the given ones, or those of its first cell. Raises ValueError."""
    first: dict[int, Cell] = {}
    for cell, number in types.items():
        first.setdefault(number, cell)
    if sizes is None:
        return tuple(first[number].sizes for number in sorted(first))
    if len(sizes) != len(first):
        raise ValueError(f"sizes are given for {len(sizes)} types of cell; there are {len(first)}")
    for number, some in enumerate(sizes):
        _check_sizes(first[number].name, some)
    return tuple(map(tuple, sizes))


def padded_size(sizes: tuple[int, ...], nodes: int) -> int:
    """The supported size that a task of `nodes` nodes is padded to."""
    return sizes[bisect_left(sizes, nodes)]


def _check_sizes(name: str, sizes: tuple[int, ...]) -> None:
    if not sizes or list(sizes) != sorted(set(sizes)) or sizes[0] < 1:
        raise ValueError(f"sizes of cell {name} are {sizes}; they must rise from at least 1")


@dataclass(frozen=True, slots=True)
class Field:
    """An input or output of an application, as clients see it."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    """The shape. -1 is a dimension of any size from 1 to `limit`."""
    limit: int = 4096
    help: str = ""

    def __post_init__(self) -> None:
        if self.dtype not in FIELD_DTYPES:
            raise ValueError(
                f"dtype of field {self.name} is {self.dtype!r}; it must be one of {', '.join(FIELD_DTYPES)}"
            )


Arrays = Mapping[str, np.ndarray]
