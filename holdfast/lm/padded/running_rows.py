"""RunningRows: the batch of rows that decode together, as one state of the model."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from holdfast.lm.padded.driver import Inputs
from holdfast.lm.padded.state_layout import State, StateLayout


class RunningRows:
    """The batch: one state whose rows are right-aligned, with host lists of what each row holds.

    The rows of a plan (`Segment.row`) name sequences; their places in the batch change as others leave. A place is an
    index into `rows` and `lengths`, and into the batch axis of the state. Invariants, which `check` asserts:

    1. The mask of a place is 0 up to `width - length` and 1 behind: no holes. `compact` False gives this up.
    2. Each time leaf is finite, also under the mask.
    3. `width` is the longest length; after `release` some row has no placeholders.
    4. Each row of a plan has at most one place.
    """

    def __init__(self, layout: StateLayout, rows: int, device: torch.device, *, compact: bool = True) -> None:
        """`rows` is the number of rows that plans may name.

        `compact` False leaves shaped rows as the paper prints them, with holes, so the mask is kept as a tensor (tests,
        the paper's figures).
        """
        self.layout = layout
        self.compact = compact
        self.rows: list[int] = []
        """By place, the row of the plans."""
        self.lengths: list[int] = []
        """By place, the number of tokens in the state."""
        self.width = 0
        """Columns of the state: placeholders and tokens."""
        self.state: State | None = None
        """None while the batch is empty."""
        self.last_token = torch.zeros(rows, dtype=torch.int64, device=device)
        """By row of the plans, in the batch or not: the token that it sampled last."""

    def place(self, row: int) -> int | None:
        """The place of a row in the batch."""
        raise NotImplementedError

    def embed(self, row: int, state: State, length: int) -> None:
        """Let a state of one row join the batch (BA-B). Consumes the state."""
        raise NotImplementedError

    def drop(self, row: int) -> None:
        """Let a row leave; the last row takes its place."""
        raise NotImplementedError

    def extract(self, row: int) -> State:
        """The state of one row alone; the row stays."""
        raise NotImplementedError

    def release(self) -> None:
        """Cut the columns that are placeholders in every row."""
        raise NotImplementedError

    def decode_inputs(self) -> Inputs:
        """One token for each place: ids [B, 1] from `last_token`, mask [B, width + 1], positions [B, 1]."""
        raise NotImplementedError

    def shaped_inputs(self, newcomers: Sequence[tuple[int, Sequence[int]]]) -> Inputs:
        """One token for each place, and whole prompts of `newcomers` (row, tokens) beside them (BA-A). Releases first.

        In an empty batch this is a left-padded prefill. `columns` is 0 for running rows and the last for newcomers.
        """
        raise NotImplementedError

    def advance(self, state: State, newcomers: Sequence[tuple[int, Sequence[int]]] = ()) -> None:
        """Take the state that a forward with these inputs gave. With `compact`, cut the junk that shaping leaves."""
        raise NotImplementedError

    def check(self) -> None:
        """Raise RuntimeError if an invariant does not hold. Reads the device: for tests."""
        raise NotImplementedError
