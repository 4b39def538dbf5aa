"""Layers of a dynamic cache that grow in place: a new position costs its own bytes, not a copy of all others.

Transformers' `DynamicLayer` joins old and new keys by `torch.cat`, which copies the whole cache of each layer in each
step. These layers write into a buffer with room for more. They are subclasses, at the place that Transformers has for
layers of other kinds, so models see the cache object that they made.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers.cache_utils import Cache, DynamicLayer, DynamicSlidingWindowLayer

from holdfast.lm.types import whole_quanta

WASTE = 1.25
"""A buffer is replaced by a smaller one when it is larger than needed by more than this factor."""


class _Buffers:
    """The memory of the keys and values of one layer, [rows, heads, positions, size] each."""

    __slots__ = ("begin", "end", "keys", "seen", "values")

    def __init__(self, keys: torch.Tensor, values: torch.Tensor, rows: int, positions: int, front: int = 0) -> None:
        """Buffers of `rows` rows and `positions` positions: `front` unwritten columns, then these keys and values."""
        wide = whole_quanta(positions)
        self.keys, self.values = (x.new_empty(rows, *x.shape[1:-2], wide, x.shape[-1]) for x in (keys, values))
        self.begin, self.end = 0, front + keys.shape[-2]
        """The columns in use are [begin, end)."""
        for buffer, given in ((self.keys, keys), (self.values, values)):
            buffer[: given.shape[0]].narrow(-2, front, given.shape[-2]).copy_(given)
        self.seen: torch.Tensor | None = None
        """The view of the keys that was given out last. If the layer has another tensor, these buffers are out of date.
        """

    @property
    def size(self) -> int:
        """Positions of all rows that smaller buffers could save."""
        return self.keys.shape[0] * self.keys.shape[-2]

    def view(self, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of the first `rows` rows, in the columns in use."""
        width = self.end - self.begin
        keys, values = self.keys.narrow(-2, self.begin, width), self.values.narrow(-2, self.begin, width)
        if rows < keys.shape[0]:
            keys, values = keys[:rows], values[:rows]
        self.seen = keys
        return keys, values


class _FixedBuffers(_Buffers):
    """Buffers whose memory belongs to another owner and does not move. Leaving them saves nothing."""

    __slots__ = ()

    def __init__(self, keys: torch.Tensor, values: torch.Tensor, end: int, width: int) -> None:
        """Use these tensors. The columns in use are the last `width` before `end`."""
        self.keys, self.values = keys, values
        self.begin, self.end = end - width, end
        self.seen = None

    @property
    def size(self) -> int:
        return 0


class _Grows(DynamicLayer):  # type: ignore[misc]
    """`keys` and `values` are views of buffers: [rows, heads, positions, size] from `begin` to `end`."""

    keys: torch.Tensor
    values: torch.Tensor
    _buffers: _Buffers | None = None

    def __copy__(self) -> _Grows:
        """A layer that shares keys and values until either of them grows."""
        other = object.__new__(type(self))
        other.__dict__.update(self.__dict__, _buffers=None)
        return other

    @property
    def _is_empty(self) -> bool:
        return not self.is_initialized or self.keys.numel() == 0

    def _own(self) -> _Buffers | None:
        """The buffers, if keys and values are still views of them."""
        own = self._buffers
        return own if own is not None and own.seen is self.keys else None

    def _append(self, keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Append new keys and values to those of the layer. Returns views of all its keys and all its values."""
        rows, more = keys.shape[0], keys.shape[-2]
        own = self._own()
        if self._is_empty:
            self._buffers = own = _Buffers(keys, values, rows, more)
        else:
            width = self.keys.shape[-2] + more
            if own is None or own.end + more > own.keys.shape[-2] or own.size > WASTE * rows * whole_quanta(width):
                self._buffers = own = _Buffers(self.keys, self.values, rows, width)
            for buffer, new in ((own.keys, keys), (own.values, values)):
                place = buffer.narrow(-2, own.end, more)
                (place[:rows] if rows < place.shape[0] else place).copy_(new)
            own.end += more
        self.keys, self.values = own.view(rows)
        return self.keys, self.values

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        return self._append(key_states, value_states)

    def settle(self, keys: torch.Tensor, values: torch.Tensor, end: int) -> None:
        """Move to these buffers [rows or more, heads, positions, size], so that the columns end at `end`.

        The layer grows there as long as it has room. All other columns in the buffers become 0. The buffers may share
        memory with those that the layer is in.
        """
        rows, width = self.keys.shape[0], self.keys.shape[-2]
        for buffer, given in ((keys, self.keys), (values, self.values)):
            shared = buffer.untyped_storage().data_ptr() == given.untyped_storage().data_ptr()
            given = given.clone() if shared else given
            buffer.zero_()
            buffer[:rows].narrow(-2, end - width, width).copy_(given)
        self._buffers = own = _FixedBuffers(keys, values, end, width)
        self.keys, self.values = own.view(rows)

    def settled(self, keys: torch.Tensor) -> int | None:
        """The column after the last one in use if the layer is in these buffers, else None."""
        own = self._own()
        if own is None or own.keys.data_ptr() != keys.data_ptr() or own.keys.shape != keys.shape:
            return None
        return own.end

    def take_column(self) -> None:
        """Count the next column as used. The owner of the buffers that the layer has settled in has written it.

        A counter of positions is left as it is. Raises RuntimeError if there is no next column.
        """
        own = self._own()
        if own is None or own.end == own.keys.shape[-2]:
            raise RuntimeError("the layer has no next column that could have been written")
        own.end += 1
        self.keys, self.values = own.view(self.keys.shape[0])

    def reframe(self, rows: int, begin: int, end: int) -> None:
        """Keep the first `rows` rows and the columns from `begin` to `end`. New rows and columns are 0.

        `begin` may be negative, and `rows` more than there are. Copies only if the buffers have no room.
        """
        had, width = self.keys.shape[0], self.keys.shape[-2]
        if (rows, begin, end) == (had, 0, width):
            return
        own, front = self._own(), max(-begin, 0)
        if own is None or own.keys.shape[0] < rows or own.begin < front:
            keys, values = (x[:rows].narrow(-2, begin + front, end - begin - front) for x in (self.keys, self.values))
            self._buffers = own = _Buffers(keys, values, rows, end - begin, front)
        else:
            own.begin, own.end = own.begin + begin, own.begin + end
        self.keys, self.values = own.view(rows)
        for tensor in (self.keys, self.values):
            if front:
                tensor.narrow(-2, 0, front).zero_()
            if rows > had:
                tensor[had:].zero_()


class GrowingLayer(_Grows):
    """A `DynamicLayer` that grows in place."""


class GrowingWindowLayer(_Grows, DynamicSlidingWindowLayer):  # type: ignore[misc]
    """A `DynamicSlidingWindowLayer` that grows in place.

    After a forward it still has all columns that the forward saw, so that the last ones can be cut. The next forward
    sees only the window's columns, as the mask that Transformers makes expects.
    """

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        self._forget()
        self.cumulative_length += key_states.shape[-2]
        return self._append(key_states, value_states)

    def take_column(self) -> None:
        self._forget()
        super().take_column()

    def _forget(self) -> None:
        """Give up the columns that the next forward does not see."""
        if not self._is_empty:
            width, visible = self.keys.shape[-2], min(self.cumulative_length, self.sliding_window - 1)
            if width > visible:
                self.reframe(self.keys.shape[0], width - visible, width)


class FixedLayer(DynamicLayer):  # type: ignore[misc]
    """A layer of one decode over buffers that do not move: [rows, heads, columns, size] each. Models see all of them.

    The keys and values go to a column that a tensor names, so the same launches serve each decode. Models are given it
    as the last column: then causality hides nothing, and the mask alone says which columns are tokens.
    """

    def __init__(self, keys: torch.Tensor, values: torch.Tensor, column: torch.Tensor) -> None:
        """`column` is int64 [1] on the device: where this decode writes."""
        super().__init__()
        self.keys, self.values, self._column = keys, values, column
        self.dtype, self.device, self.is_initialized = keys.dtype, keys.device, True

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        self.keys.index_copy_(-2, self._column, key_states)
        self.values.index_copy_(-2, self._column, value_states)
        return self.keys, self.values

    def get_seq_length(self) -> int:
        return self.keys.shape[-2] - 1


def growing(state: Any) -> list[_Grows]:
    """The layers of a cache that grow in place and have positions."""
    layers = getattr(state, "layers", None) if isinstance(state, Cache) else None
    return [layer for layer in layers or () if isinstance(layer, _Grows) and layer.is_initialized]


def let_grow(state: Any) -> Any:
    """Replace the layers of exactly Transformers' dynamic classes in a state by ones that grow in place.

    Returns the state.
    """
    for cache in (state, getattr(state, "self_attention_cache", None)):
        layers = getattr(cache, "layers", None)
        if not isinstance(cache, Cache) or not isinstance(layers, list):
            continue
        for index, layer in enumerate(layers):
            kind = {DynamicLayer: GrowingLayer, DynamicSlidingWindowLayer: GrowingWindowLayer}.get(type(layer))
            if kind is not None:
                layers[index] = growing = object.__new__(kind)
                growing.__dict__.update(layer.__dict__)
    return state
