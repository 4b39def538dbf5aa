"""The passes of a draft head through its layer: each guesses one token for every row, and the next one reads it."""

from __future__ import annotations

from bisect import bisect_left
from typing import Any, NamedTuple

import torch

from holdfast.lm.kernels.attention.row_attention import RowAttention
from holdfast.lm.kernels.capture import capture
from holdfast.lm.models.head_layer import Caches, HeadLayer

PADDING_SLOT = -(1 << 40)
"""Slot of rows that pad a graph. It stays negative however often it is advanced."""


class Last(NamedTuple):
    """The last positions of S sequences, from which guesses start."""

    hidden: torch.Tensor  # [S, hidden]
    following: torch.Tensor
    """[S] int64 the token after each position."""
    position: torch.Tensor  # [S] int64
    row: torch.Tensor
    """[S] int64 the row of the caches, no two equal."""
    slot: torch.Tensor
    """[S] int64 the position's number in the row."""


class HeadPasses:
    """Runs passes for up to all rows. The inputs of the next pass stay on the device.

    On a GPU a pass is a captured graph, for each power of two of rows. Launched one by one, its some thirty kernels
    take longer on the host than on the device.
    """

    def __init__(self, layer: HeadLayer, caches: Caches, most: int, *, captured: bool) -> None:
        """`most` is the largest number of guesses in a round.

        `captured` asks for graphs. `prepare` makes them, and until then, passes of these sizes are launched one by one.
        """
        self._layer, self._caches = layer, caches
        keys, values = caches
        rows, spec, device = len(keys), layer.head.spec, keys.device
        self._slots, self._rows = keys.shape[1], rows
        self._attention = RowAttention.of(keys, values, spec.heads)
        self._hidden = torch.zeros(rows, spec.hidden, dtype=layer.head.dtype, device=device)
        self._places = torch.zeros(2, rows, dtype=torch.int64, device=device)
        """Position and slot of each row's next query."""
        self._tokens = torch.zeros(rows, dtype=torch.int64, device=device)
        """The token after each of these positions."""
        self._guesses = torch.zeros(most, rows, dtype=torch.int64, device=device)
        self._place = torch.zeros(1, dtype=torch.int64, device=device)
        """Number of guesses that this round has made so far."""
        powers = [1 << power for power in range(rows.bit_length())]
        self._sizes = sorted({*powers, rows}) if captured else []
        """Numbers of rows that have a graph. A round is padded to the next one."""
        self._graphs: dict[int, Any] = {}

    def prepare(self) -> None:
        """Capture the graphs, the largest first, because the others fit into its memory."""
        pool = torch.cuda.graph_pool_handle() if self._sizes else None
        for size in reversed(self._sizes):
            self._pad(0, size)
            self._attention.begin(self._tokens[:0], self._tokens[:0])
            self._place.zero_()
            self._pass(size)  # compiles the kernels
            graph = torch.cuda.CUDAGraph()
            with capture(graph, pool):
                self._pass(size)
            self._graphs[size] = graph

    def guess(self, last: Last, count: int) -> torch.Tensor:
        """The next tokens [S, count] of these sequences. It is valid until the next call.

        The slots after those of `last` must be free: they get the keys and values of guessed tokens.
        """
        number = len(last.row)
        size = self._sizes[bisect_left(self._sizes, number)] if self._sizes else number
        self._hidden[:number].copy_(last.hidden)
        self._tokens[:number].copy_(last.following)
        if size > number:
            self._pad(number, size)
        self._places[0, :number].copy_(last.position)
        torch.add(last.slot, last.row, alpha=self._slots, out=self._places[1, :number])
        self._attention.begin(last.row, last.slot)
        self._place.zero_()
        for _ in range(count):
            if size in self._graphs:
                self._graphs[size].replay()
            else:
                self._pass(size)
        return self._guesses[:count, :number].t()

    def _pad(self, start: int, stop: int) -> None:
        """Make the rows [start, stop) padding, with numbers that stay finite."""
        self._hidden[start:stop].zero_()
        self._tokens[start:stop].zero_()
        self._places[0, start:stop].zero_()
        self._places[1, start:stop].fill_(PADDING_SLOT)

    def _pass(self, size: int) -> None:
        """One pass for the first `size` rows."""
        tokens, (positions, slots) = self._tokens[:size], self._places[:, :size]
        hidden = self._hidden[:size]
        tokens.copy_(self._layer.guess(hidden, tokens, positions, slots, self._caches, self._attention.attend))
        self._guesses[:, :size].index_copy_(0, self._place, tokens[None])
        self._place += 1
        self._places += 1
        self._attention.advance()
