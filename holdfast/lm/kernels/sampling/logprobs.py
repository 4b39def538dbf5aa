"""Log probabilities of sampled tokens and of the most probable ones, on the device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch.nn import functional

from holdfast.core.types import TokenLogprobs
from holdfast.lm.kernels.rows import each_row

NUMBERS_AT_ONCE = 1 << 24
"""Largest number of logits that are normalised at once, which bounds the memory for them."""

LINE = 32
"""Numbers in float32 of a line of a GPU's memory."""


class Logprobs(NamedTuple):
    """Log probabilities of the tokens in T sampled rows."""

    own: torch.Tensor  # [T] float32
    """The log probability of each row's token."""
    top: torch.Tensor  # [T, K] float32
    """The log probabilities of the most probable tokens of each row, in descending order, and of N named tokens."""
    top_ids: torch.Tensor  # [T, K] int64
    rank: torch.Tensor | None = None  # [T] int64
    """Number of tokens at each place that are at least as probable as the token there, itself included; None if not
    asked for."""

    def on_host(self) -> Logprobs:
        """A copy in pinned memory of the host. It is complete once the work on the current stream is done."""
        if self.own.device.type == "cpu":
            return self
        given = [each for each in self if each is not None]
        pinned = [torch.empty(each.shape, dtype=each.dtype, pin_memory=True) for each in given]
        return Logprobs(*[into.copy_(each, non_blocking=True) for into, each in zip(pinned, given, strict=True)])

    def of_rows(self, wanted: Sequence[int | None], named: Sequence[int] = ()) -> tuple[TokenLogprobs | None, ...]:
        """The records of the sampled tokens; None for a token whose entry in `wanted` is None.

        An entry of `wanted` is the number of most probable tokens in the record, and one of `named` that of its named
        tokens; empty: no row has any. The rows here are those of the other entries, in their order.
        """
        counts = [count for count in wanted if count is not None]
        others = [number for number, count in zip(named, wanted, strict=True) if count is not None] if named else ()
        records = iter(self.records(counts, others))
        return tuple(None if count is None else next(records) for count in wanted)

    def records(self, wanted: Sequence[int], named: Sequence[int] = ()) -> list[TokenLogprobs]:
        """The records of all rows. `wanted` has the number of most probable tokens in each.

        `named` has the number of named tokens in each, which follow them; empty: no row has any.
        """
        first = self.top.shape[1] - max(named, default=0)  # The column of the first named token.
        likely = self.top[:, :first].tolist(), self.top_ids[:, :first].tolist()
        rows = zip(wanted, self.own.tolist(), *likely, strict=True)
        records = [TokenLogprobs(own, tuple(ids[:count]), tuple(top[:count])) for count, own, top, ids in rows]
        named_ids, named_top = (each.numpy() for each in (self.top_ids[:, first:], self.top[:, first:]))
        for row, count in enumerate(named):
            if count:
                own, ids, top = records[row]
                ids, top = (*ids, *named_ids[row, :count].tolist()), (*top, *named_top[row, :count].tolist())
                records[row] = TokenLogprobs(own, ids, top)
        return records


def filled(rows: Sequence[Sequence[int]]) -> npt.NDArray[np.int64]:
    """Token ids of each row as an array [R, most of any row], with 0 in places that a row does not have."""
    found = np.zeros((len(rows), max(map(len, rows), default=0)), np.int64)
    for number, row in enumerate(rows) if found.size else ():
        found[number, : len(row)] = row
    return found


def log_probabilities(
    logits: torch.Tensor,
    tokens: torch.Tensor,
    most: int,
    named: torch.Tensor | None = None,
    *,
    alone: bool = False,
    ranked: bool = False,
) -> Logprobs:
    """The log probabilities of tokens [T] int64 after logits [T, V], and of the `most` most probable ones.

    After these come those of the tokens `named` [T, N] int64. With `ranked`, the result has the rank of each token.
    Sums are float32. With `alone`, a row's bits do not depend on the other rows. Does not wait for the device.
    """
    most = min(most, logits.shape[-1])
    own, top, ids, rank = [], [], [], []
    rows = max(1, NUMBERS_AT_ONCE // logits.shape[-1])
    if named is None:
        named = tokens.new_empty(len(tokens), 0)
    parts = (torch.split(each, rows) for each in (logits, tokens, named))
    for some, chosen, others in zip(*parts, strict=True):
        normal = each_row(normalised, some) if alone else some.float().log_softmax(-1)
        own.append(normal.gather(1, chosen[:, None])[:, 0])
        best = (ranks(normal) if alone else normal).topk(most, dim=-1).indices
        top.append(torch.cat((normal.gather(1, best), normal.gather(1, others)), 1))
        ids.append(torch.cat((best, others), 1))
        if ranked:
            rank.append((normal >= own[-1][:, None]).sum(-1))
    return Logprobs(torch.cat(own), torch.cat(top), torch.cat(ids), torch.cat(rank) if ranked else None)


def ranks(numbers: torch.Tensor) -> torch.Tensor:
    """Different integers [T, V] in the order of numbers [T, V] float32; the lower index is larger among equals.

    How a GPU finds the largest numbers depends on the number of rows, and so does its choice among equals.
    """
    bits = numbers.view(torch.int32).long()
    ascending = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    return (ascending << 32) - torch.arange(numbers.shape[1], device=numbers.device)


def normalised(logits: torch.Tensor) -> torch.Tensor:
    """Log probabilities [T, V] float32 of logits [T, V], each row with the bits that it has by itself.

    A GPU's kernel reads rows from their first whole line of memory on, so all rows get a width of whole lines.
    """
    width = logits.shape[-1]
    padded = functional.pad(logits.float(), (0, -width % LINE), value=-torch.inf)
    return padded.log_softmax(-1)[:, :width].contiguous()
