"""RunningRows: the batch of rows that decode together, as one state of the model."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from holdfast.lm.kernels.upload import upload
from holdfast.lm.padded import shaping
from holdfast.lm.padded.driver import Inputs
from holdfast.lm.padded.state_layout import State, StateLayout

Newcomers = Sequence[tuple[int, Sequence[int]]]
"""Rows that join by shaping: the row's index in the plans, and its whole prompt."""


class RunningRows:
    """The batch: one state whose rows are right-aligned, with host lists of what each row holds.

    The rows of a plan (`Segment.row`) name sequences; their places in the batch change as others leave. A place is an
    index into `rows` and `lengths`, and into the batch axis of the state. Invariants, which `check` asserts:

    1. The mask of a place is 0 up to `width - length` and 1 after it: no holes. `compact` False gives this up.
    2. Each time leaf is finite, also under the mask.
    3. `width` is the longest length: some row has no placeholders. With `compact` False this holds for the columns in
       front of each row's first token, and only after `release`.
    4. Each row of a plan has at most one place.
    """

    def __init__(self, layout: StateLayout, rows: int, device: torch.device, *, compact: bool = True) -> None:
        """`rows` is the number of rows that plans may name.

        `compact` False leaves shaped rows as the paper prints them, with holes, so the mask is kept as a tensor (tests,
        the paper's figures).
        """
        self.layout = layout
        self.device = device
        self.compact = compact
        self.rows: list[int] = []
        """Row in the plans of each place."""
        self.lengths: list[int] = []
        """Number of tokens in the state of each place."""
        self.width = 0
        """Number of columns of the state: placeholders and tokens."""
        self.state: State | None = None
        """The state of the batch; None while it is empty."""
        self.last_token = torch.zeros(rows, dtype=torch.int64, device=device)
        """The token that each row of the plans sampled last, in the batch or not."""
        self._places: dict[int, int] = {}
        self._starts: list[int] = []
        """Number of columns before the first token of each place: the paper's index. Only if not compact."""
        self._mask = torch.zeros(0, 0, dtype=torch.int64, device=device)
        """The mask [places, width]. Only if not compact."""
        self._next_mask = self._mask
        """The mask after the next `advance`. Only if not compact."""

    def place(self, row: int) -> int | None:
        """The place of a row in the batch; None if it is not there."""
        return self._places.get(row)

    def embed(self, row: int, state: State, length: int) -> None:
        """Add a state of one row to the batch (BA-B). Consumes the state. Raises ValueError for a row that is in."""
        if row in self._places:
            raise ValueError(f"row {row} is in the batch already, at place {self._places[row]}")
        self.release()
        place = len(self.rows)
        if self.state is None:
            self.state = state
        else:
            self.state = self.layout.embed(self.state, self.width, place, state, length)
        if not self.compact:
            self._mask = embedded_mask(self._mask, place, length)
            wider = self._mask.shape[1] - self.width
            self._starts = [start + wider for start in self._starts]
        self.width = max(self.width, length)
        self._append(row, length, self.width - length)

    def drop(self, *rows: int) -> None:
        """Remove rows; the last rows take their places. Raises ValueError for a row that is not in the batch."""
        if missing := [row for row in rows if row not in self._places]:
            raise ValueError(f"rows {missing} are not in the batch, which has the rows {self.rows}")
        order = list(range(len(self.rows)))
        for place in sorted((self._places[row] for row in rows), reverse=True):
            order[place] = order[-1]
            order.pop()
        if not order:
            self.clear()
            return
        self.state = self.layout.filter(self.state, order)
        self.rows, self.lengths = ([each[place] for place in order] for each in (self.rows, self.lengths))
        if not self.compact:
            self._starts = [self._starts[place] for place in order]
            self._mask = self._mask.index_select(0, upload(order, self.device))
        self._places = {row: place for place, row in enumerate(self.rows)}
        if self.compact:
            self.release()

    def clear(self) -> None:
        """Give up all rows and the state."""
        self.rows, self.lengths, self._starts, self._places = [], [], [], {}
        self.width, self.state = 0, None
        self._mask = self._next_mask = self._mask.new_zeros(0, 0)

    def extract(self, row: int) -> State:
        """The state of one row alone; the row stays. With `compact` False, the row must have no holes."""
        place = self._places[row]
        length = self.lengths[place]
        if not self.compact and self.width - self._starts[place] != length:
            raise ValueError(f"row {row} has placeholders between its tokens, so its state cannot be taken out")
        return self.layout.extract(self.state, place, length)

    def release(self) -> None:
        """Cut the columns that are placeholders in every row."""
        if self.state is None:
            return
        free = self.width - max(self.lengths) if self.compact else min(self._starts)
        if free:
            self.width -= free
            self.state = self.layout.release(self.state, self.width)
            if not self.compact:
                self._starts = [start - free for start in self._starts]
                self._mask = self._mask[:, free:]

    def set_last(self, rows: Sequence[int], tokens: Sequence[int]) -> None:
        """Set the last tokens of rows, if the host knows them."""
        pair = upload([*rows, *tokens], self.device)
        self.last_token.index_copy_(0, pair[: len(rows)], pair[len(rows) :])

    def decode_inputs(self) -> Inputs:
        """Inputs of one token for each place: ids [B, 1] from `last_token`, mask [B, width + 1], positions [B, 1]."""
        inputs = decode_inputs(*self._on_device())
        self._next_mask = inputs.mask
        return inputs

    def shaped_inputs(self, newcomers: Newcomers) -> Inputs:
        """Inputs of one token for each place, together with whole prompts of `newcomers` (row, tokens) (BA-A).

        Releases first.

        In an empty batch this is a left-padded prefill. `columns` is 0 for running rows and the last for newcomers.
        `advance` must follow: the state has the newcomers' rows from now on.
        """
        if self.state is None:
            inputs = shaping.left_padded([tokens for _, tokens in newcomers], self.device)
        else:
            self.release()
            last, mask, lengths = self._on_device()
            running, added = len(self.rows), len(newcomers)
            for place in range(running, running + added):
                self.state = self.layout.blank(self.state, self.width, place)
            last, mask, lengths = (
                torch.cat((each, each.new_zeros(added, *each.shape[1:]))) for each in (last, mask, lengths)
            )
            prompts = {running + index: tokens for index, (_, tokens) in enumerate(newcomers)}
            inputs = shaping.shaped_inputs(last, mask, lengths, prompts)
        self._next_mask = inputs.mask
        return inputs

    def advance(self, state: State, newcomers: Newcomers = ()) -> None:
        """Take over the state after a forward of one token for each row, and of the whole prompts of `newcomers`.

        With `compact`, cut the placeholder columns that the newcomers' prompts added to the other rows.
        """
        running, before = len(self.rows), self.width
        longest = max((len(tokens) for _, tokens in newcomers), default=1)
        self.state = state
        self.lengths = [length + 1 for length in self.lengths]
        self.width = before + longest
        if not self.compact:
            self._mask = self._next_mask
        if not newcomers or not running or not self.compact:
            for row, tokens in newcomers:
                self._append(row, len(tokens), self.width - len(tokens))
            return
        layout = self.layout
        alone = [
            layout.extract(state, place, len(tokens)) for place, (_, tokens) in enumerate(newcomers, start=running)
        ]
        self.width = before + 1
        self.state = layout.cut(state, self.width)
        for newcomer, (row, tokens) in zip(alone, newcomers, strict=True):
            self.state = layout.embed(self.state, self.width, len(self.rows), newcomer, len(tokens))
            self.width = max(self.width, len(tokens))
            self._append(row, len(tokens), 0)

    def check(self) -> None:
        """Raise RuntimeError if an invariant does not hold. Reads the device: for tests."""
        if len(set(self.rows)) != len(self.rows) or self._places != {row: at for at, row in enumerate(self.rows)}:
            raise RuntimeError(f"rows {self.rows} have the places {self._places}")
        if len(self.lengths) != len(self.rows) or (self.state is None) != (not self.rows):
            raise RuntimeError(f"rows {self.rows} have the lengths {self.lengths} and the state {self.state}")
        if self.compact and self.width != max(self.lengths, default=0):
            raise RuntimeError(f"the width is {self.width} and the lengths are {self.lengths}")
        if not self.compact and self._mask.sum(1).tolist() != self.lengths:
            raise RuntimeError(f"the masks have {self._mask.sum(1).tolist()} tokens and the lengths are {self.lengths}")
        if self.state is None:
            return
        grown = any(leaf.kind == "time" and leaf.window is None for leaf in self.layout.leaves)
        if grown and self.layout.width(self.state) != self.width:
            raise RuntimeError(f"the state has {self.layout.width(self.state)} columns and the batch {self.width}")
        for tensor in self.layout.tensors(self.state):
            if tensor.is_floating_point() and not bool(torch.isfinite(tensor).all()):
                raise RuntimeError(f"a leaf of shape {tuple(tensor.shape)} is not finite")

    def _append(self, row: int, length: int, start: int) -> None:
        """Give a row the next place."""
        self._places[row] = len(self.rows)
        self.rows.append(row)
        self.lengths.append(length)
        if not self.compact:
            self._starts.append(start)

    def _on_device(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """The last tokens [B], the mask [B, width] and the lengths [B], by place, in one upload."""
        rows, lengths = upload([*self.rows, *self.lengths], self.device).view(2, -1)
        mask = right_aligned(lengths, self.width) if self.compact else self._mask
        return self.last_token.index_select(0, rows), mask, lengths


def right_aligned(lengths: torch.Tensor, width: int) -> torch.Tensor:
    """The mask [B, width] int64 of rows of these lengths [B]: placeholders in front, then the tokens."""
    columns = torch.arange(width, device=lengths.device)
    return (columns >= (width - lengths)[:, None]).to(torch.int64)


def embedded_mask(mask: torch.Tensor, row: int, length: int) -> torch.Tensor:
    """The mask after a state of `length` tokens was embedded in `row`: one of the B rows, or the next one (BA-13).

    mask [B, L] becomes [B or B + 1, max(L, length)]. A state that is shorter than L is aligned at the end of its row
    (case 1). For a longer one all rows are extended in front by placeholders (case 2).
    """
    rows, width = mask.shape
    wide = max(width, length)
    embedded = mask.new_zeros(max(rows, row + 1), wide)
    embedded[:rows, wide - width :] = mask
    embedded[row, : wide - length] = 0
    embedded[row, wide - length :] = 1
    return embedded


def decode_inputs(last: torch.Tensor, mask: torch.Tensor, lengths: torch.Tensor) -> Inputs:
    """One token for each of B rows: ids [B, 1] from last [B], mask [B, L] and a column of ones, positions [B, 1]."""
    return Inputs(last[:, None], torch.cat((mask, mask.new_ones(len(mask), 1)), 1), lengths[:, None])
