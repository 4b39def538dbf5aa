"""StateLayout: which axes of a model's state are rows and time, found by probing, and the verbs that follow from it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch

from holdfast.lm.types import RowBytes

State = Any
"""The cache object that a model makes itself, of any class: `DynamicCache`, `xLSTMCache`, a list of tensors."""

LeafKind = Literal["time", "row", "counter", "constant", "other"]


@dataclass(frozen=True, slots=True)
class Leaf:
    """One tensor or number inside a state, by how its shape follows the number of rows and of tokens.

    - time: has an axis for rows and one for positions (keys, values, latents).
    - row: has an axis for rows and none for positions (convolution and recurrent states).
    - counter: equals the number of positions.
    - constant: follows neither.
    - other: grows by another number than 1 a token, so no verb is right for it.
    """

    path: tuple[str | int, ...]
    """Attributes, keys and indices from the state to it."""
    kind: LeafKind
    batch_axis: int | None = None
    time_axis: int | None = None
    window: int | None = None
    """Most positions that a time leaf keeps; None: all."""
    bytes: int = 0
    """Of one position for a time leaf, of one row for a row leaf."""


class StateLayout:
    """The leaves of a model's state, and verbs on states of that layout.

    A row is right-aligned: `[placeholders ... | its tokens]`. A time leaf of a state of width L is min(L, window)
    positions wide. Placeholders are finite: zeros unless a model wrote there.

    Verbs that return a state consume the states that they are given, unless they say otherwise: they may write to them
    or share memory with them. No verb waits for the device. Rows are indices into the batch; lengths and widths are in
    positions. Verbs raise ValueError for a layout with a leaf of kind "other".
    """

    def __init__(self, leaves: Sequence[Leaf]) -> None:
        self.leaves = tuple(leaves)

    @classmethod
    def discover(cls, run: Callable[[int, int], State]) -> StateLayout:
        """Find the axes by comparing states of few rows and tokens.

        `run(rows, tokens)` gives the state after one forward of that many tokens of that many rows. It is called with
        1 row of 5, 6 and 21 tokens and 2 rows of 5.
        """
        raise NotImplementedError

    @property
    def batches(self) -> bool:
        """Whether the verbs know every leaf, so that rows can be merged."""
        raise NotImplementedError

    @property
    def croppable(self) -> bool:
        """Whether a state can be cut to its first positions: each time leaf keeps all, and no leaf is of kind row."""
        raise NotImplementedError

    def row_bytes(self) -> RowBytes:
        """Bytes of the state of one row, by its length."""
        raise NotImplementedError

    def width(self, state: State) -> int:
        """Positions of the widest time leaf, without slack; 0 if there is none."""
        raise NotImplementedError

    def merge(self, states: Sequence[State], lengths: Sequence[int]) -> State:
        """One batch of these states of one row each, in this order. Its width is the longest length."""
        raise NotImplementedError

    def embed(self, batch: State, width: int, row: int, newcomer: State, length: int) -> State:
        """Put a state of one row and this length into the batch, at `row`: one of its rows, or the next one.

        The batch's width becomes max(width, length). If the newcomer is the shorter, no other row is touched (Baton
        §4.2, case 1); otherwise all are extended in front by placeholders (case 2).
        """
        raise NotImplementedError

    def filter(self, batch: State, rows: Sequence[int]) -> State:
        """The batch with these rows alone, in this order; the width stays."""
        raise NotImplementedError

    def extract(self, batch: State, row: int, length: int) -> State:
        """The last `length` positions of one row, as a state of its own. A copy: the batch stays valid."""
        raise NotImplementedError

    def cut(self, state: State, width: int) -> State:
        """The state without the positions behind the first `width`. Raises ValueError where row leaves make that wrong.

        Of a row with a window, only positions that it still keeps can stay.
        """
        raise NotImplementedError

    def release(self, batch: State, width: int) -> State:
        """The batch with its last `width` positions alone: placeholders in front of all rows go (Baton §4.1.3)."""
        raise NotImplementedError

    def to(self, state: State, device: torch.device, *, pinned: bool = False) -> State:
        """A copy on a device, without waiting for it; `pinned` for one in locked host memory. `state` stays valid."""
        raise NotImplementedError

    def copy(self, state: State) -> State:
        """A state that shares no memory with this one, which stays valid."""
        raise NotImplementedError

    def tensors(self, state: State) -> list[torch.Tensor]:
        """The tensors of its leaves, for tests and for events of other streams."""
        raise NotImplementedError
