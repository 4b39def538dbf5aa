"""StateBytes: the state of one row as bytes that another process with the same model can read."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from holdfast.lm.padded.state_layout import Leaf, State, StateLayout, capped

INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.int64}
"""A type that NumPy knows, by the size of an element. Elements are only copied."""


@dataclass(frozen=True, slots=True)
class _Field:
    """A leaf whose numbers are written."""

    leaf: Leaf
    shape: tuple[int, ...]
    """Its shape in the template: one row, any number of positions."""
    dtype: torch.dtype

    def shape_of(self, length: int) -> tuple[int, ...]:
        """Its shape in a state of this many positions."""
        shape, time = [*self.shape], self.leaf.time_axis
        if time is not None:
            shape[time] = capped(length, self.leaf.window)
        return tuple(shape)

    def bytes_of(self, length: int) -> int:
        """Its bytes in a state of this many positions."""
        size = self.dtype.itemsize
        for each in self.shape_of(length):
            size *= each
        return size


class StateBytes:
    """Writes the numbers of a state's leaves one after another, and reads them into a copy of a template.

    Layout, template and length say where each leaf begins and what shape it has, so the bytes are numbers alone: those
    of `RowBytes.of(length)`. Leaves of large elements come first, so that each leaf is aligned to its elements.
    Counters, constants and columns before a window follow from the length, and are not written.

    The work is NumPy's, in one thread. PyTorch would start a team of threads for each thread that calls it.
    """

    def __init__(self, layout: StateLayout, template: State) -> None:
        """`template` is the state of one row on the CPU, which the model has made itself. It must stay unchanged.

        Raises ValueError for a layout with leaves that follow neither rows nor tokens.
        """
        if not layout.batches:
            other = next((leaf.path for leaf in layout.leaves if leaf.kind == "other"), "a part")
            raise ValueError(f"{other} of the model's state follows neither rows nor tokens")
        self._layout, self._template = layout, template
        parts = [*layout.parts(template, "time"), *layout.parts(template, "row")]
        fields = [_Field(leaf, tuple(part.shape), part.dtype) for leaf, part in parts if isinstance(part, torch.Tensor)]
        self._fields = sorted(fields, key=lambda field: -field.dtype.itemsize)

    @property
    def description(self) -> str:
        """The order, types and shapes of the numbers, in words. Equal for models whose states can be exchanged."""
        return repr([(field.leaf, field.shape_of(0), str(field.dtype)) for field in self._fields])

    def size(self, length: int) -> int:
        """Bytes of a state of this many positions."""
        return sum(field.bytes_of(length) for field in self._fields)

    @torch.inference_mode()
    def check(self, state: State, length: int) -> None:
        """Raises ValueError if a state that the model has made is another one once it is written and read again."""
        data = torch.frombuffer(bytearray(b"".join(self.written(state, length))), dtype=torch.uint8)
        again = self._layout.leaf_values(self.read(data, length))
        for path, value in self._layout.leaf_values(self._framed(state, length)).items():
            if path not in again or not _equal(value, again[path]):
                raise ValueError(f"{path} of the model's state is not the same once it is written and read again")

    def _framed(self, state: State, length: int) -> State:
        """The state without columns before a window."""
        return self._layout.extract(state, 0, length)

    @torch.inference_mode()
    def written(self, state: State, length: int) -> list[memoryview]:
        """The numbers of a state on the CPU, in place where they lie together. The state must stay unchanged."""
        values = {leaf.path: part for kind in ("time", "row") for leaf, part in self._parts(state, kind)}
        return [self._numbers(field, values[field.leaf.path], length) for field in self._fields]

    def _parts(self, state: State, kind: str) -> list[tuple[Leaf, torch.Tensor]]:
        found = self._layout.parts(state, "time" if kind == "time" else "row")
        return [(leaf, part) for leaf, part in found if isinstance(part, torch.Tensor)]

    def _numbers(self, field: _Field, part: torch.Tensor, length: int) -> memoryview:
        wanted = field.shape_of(length)
        time = field.leaf.time_axis
        if time is not None:
            kept = min(part.shape[time], wanted[time])
            part = part.narrow(time, part.shape[time] - kept, kept)
        given = part.view(INTEGERS[part.element_size()]).numpy()
        if time is not None and part.shape[time] < wanted[time]:
            front = [(wanted[time] - part.shape[time] if axis == time else 0, 0) for axis in range(given.ndim)]
            given = np.pad(given, front)
        return np.ascontiguousarray(given).reshape(-1).view(np.uint8).data

    @torch.inference_mode()
    def read(self, data: torch.Tensor, length: int) -> State:
        """The state of these bytes, uint8 [size or more]. It shares their memory. Raises ValueError if they are few."""
        if len(data) < self.size(length):
            raise ValueError(f"{len(data)} bytes are fewer than the {self.size(length)} of {length} positions")
        state, start = self._layout.copy(self._template), 0
        for field in self._fields:
            stop = start + field.bytes_of(length)
            part = data[start:stop].view(field.dtype).view(field.shape_of(length))
            state, start = self._layout.put(state, [(field.leaf, part)]), stop
        return self._layout.counted(state, length)


def _equal(one: torch.Tensor | int, other: torch.Tensor | int) -> bool:
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return one.shape == other.shape and one.dtype == other.dtype and torch.equal(one, other)
    return type(one) is type(other) and bool(one == other)
