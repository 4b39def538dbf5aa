"""4-bit weights (AWQ, GPTQ, GGUF) with one scale and one zero for each group of inputs, in plain PyTorch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.nn import functional

HALVES = (64, 32)
"""The allowed numbers of inputs in half a chunk. The two halves of a chunk share its bytes."""

ROWS_AT_A_TIME = 1024
"""Number of rows that are dequantized together. They take memory in float32 meanwhile."""


@dataclass(frozen=True, slots=True)
class Int4Weight:
    """A weight [N, K] of numbers (q - zero) * scale + added, with q from 0 to 15.

    The inputs lie in chunks of 2 `half`: the low bits of a chunk's bytes hold its first half, the high bits the second.
    A kernel thus reads a tile of bytes as two tiles of weights, each within one group.
    """

    data: torch.Tensor  # [N, K / 2] uint8
    scale: torch.Tensor  # [N, K / group], of any float dtype
    zero: torch.Tensor  # [N, K / group] uint8
    group: int
    """Number of inputs in a group."""
    half: int
    added: torch.Tensor | None = None  # [N, K / group] float32; None: 0

    @property
    def shape(self) -> torch.Size:
        rows, width = self.data.shape
        return torch.Size((rows, 2 * width))

    @property
    def nbytes(self) -> int:
        return sum(each.nbytes for each in (self.data, self.scale, self.zero, self.added) if each is not None)

    def linear(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """x [T, K] times the weight transposed, plus bias: [T, N]. The weight is dequantized first, which is slow."""
        return functional.linear(x, self.dequantized(x.dtype), bias)

    def dequantized(self, dtype: torch.dtype) -> torch.Tensor:
        """The weight [N, K] in `dtype`, rounded once."""
        whole = torch.empty(self.shape, dtype=dtype, device=self.data.device)
        added = torch.zeros_like(self.scale) if self.added is None else self.added
        pieces = (torch.split(each, ROWS_AT_A_TIME) for each in (whole, self.data, self.scale, self.zero, added))
        for into, data, scale, zero, more in zip(*pieces, strict=True):
            chunks = data.view(len(data), -1, self.half)
            numbers = torch.stack((chunks & 15, chunks >> 4), 2).view(len(data), -1)
            plain = dequantize(numbers, scale, zero, self.group)
            into.copy_(plain.view(*more.shape, self.group).add_(more[:, :, None]).view(plain.shape))
        return whole

    def ordered(self, rows: torch.Tensor) -> Int4Weight:
        """The weight with its rows in another order, `rows` [N] int64."""
        added = None if self.added is None else self.added[rows]
        return Int4Weight(self.data[rows], self.scale[rows], self.zero[rows], self.group, self.half, added)


def half_for(inputs: int, group: int) -> int | None:
    """The number of inputs in half a chunk, for rows of `inputs` inputs; None if they cannot be cut into chunks."""
    return next((half for half in HALVES if inputs % (2 * half) == 0 and group % half == 0), None)


def pack(
    numbers: torch.Tensor,
    scale: torch.Tensor,
    zero: torch.Tensor,
    group: int,
    half: int,
    added: torch.Tensor | None = None,
) -> Int4Weight:
    """Pack numbers [N, K] uint8 from 0 to 15, with scale, zero and added [N, K / group]."""
    first, second = numbers.view(len(numbers), -1, 2, half).unbind(2)
    data = (first | second << 4).reshape(len(numbers), -1)
    return Int4Weight(data, scale.contiguous(), zero.contiguous(), group, half, added)


def side_by_side(weights: Sequence[Int4Weight], count: int) -> Int4Weight | None:
    """One weight with the inputs of `count` weights [N, ...], one after the other.

    None if some of them are missing, or if their groups or the order of their numbers differ.
    """
    if len(weights) < count or len({(each.group, each.half, each.added is None) for each in weights}) > 1:
        return None
    first = weights[0]
    data, scale, zero = (torch.cat(each, 1) for each in zip(*((w.data, w.scale, w.zero) for w in weights), strict=True))
    added = [each.added for each in weights if each.added is not None]
    return Int4Weight(data, scale, zero, first.group, first.half, torch.cat(added, 1) if added else None)


def dequantize(numbers: torch.Tensor, scale: torch.Tensor, zero: torch.Tensor, group: int) -> torch.Tensor:
    """(q - zero) * scale in float32, from numbers [N, K], and scale and zero [N, K / group]."""
    grouped = numbers.view(len(numbers), -1, group).float() - zero[:, :, None].float()
    return (grouped * scale[:, :, None].float()).view(numbers.shape)
