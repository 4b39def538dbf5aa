"""FP8 (e4m3) weights with one scale for each output row, or for each block, in plain PyTorch."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn import functional

from holdfast.lm.kernels.int4 import Int4Weight
from holdfast.lm.kernels.int4_cpu import Int4CpuWeight
from holdfast.lm.kernels.int8_cpu import Int8CpuWeight
from holdfast.lm.kernels.integer.weight import IntegerWeight
from holdfast.lm.kernels.packed import PackedWeight
from holdfast.lm.kernels.stacked import StackedWeight

FP8 = torch.float8_e4m3fn
LARGEST = 448.0
"""The largest FP8 number. FP8 has no infinity; a number that rounds above this becomes NaN."""

FIRST_CAPABILITY = (9, 0)
"""Lowest compute capability of GPUs that run GEMMs with FP8 weights.

GPUs of 8.9 multiply FP8 too, but have too little shared memory.
"""

ROWS_AT_A_TIME = 1024
"""Number of rows of a weight that are quantized together. They take memory in float32 meanwhile."""


@dataclass(frozen=True, slots=True)
class Fp8Weight:
    """A weight [N, K]: each row of `data` times its `scale`."""

    data: torch.Tensor  # [N, K] float8_e4m3fn
    scale: torch.Tensor  # [N] float32

    @property
    def shape(self) -> torch.Size:
        return self.data.shape

    @property
    def nbytes(self) -> int:
        return self.data.nbytes + self.scale.nbytes

    def linear(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """x [T, K] times the weight transposed, plus bias: [T, N]. The weight is dequantized first, which is slow."""
        return functional.linear(x, self.dequantized(x.dtype), bias)

    def dequantized(self, dtype: torch.dtype) -> torch.Tensor:
        """The weight [N, K] in `dtype`, rounded once."""
        wide = torch.promote_types(dtype, torch.float32)
        return (self.data.to(wide) * self.scale[:, None].to(wide)).to(dtype)

    def ordered(self, rows: torch.Tensor) -> Fp8Weight:
        """The weight with its rows in another order, `rows` [N] int64."""
        return Fp8Weight(self.data.view(torch.uint8)[rows].view(FP8), self.scale[rows])


@dataclass(frozen=True, slots=True)
class Fp8BlockWeight:
    """A weight [N, K]: each block of `rows` by `group` numbers of `data` times its `scale`."""

    data: torch.Tensor  # [N, K] float8_e4m3fn
    scale: torch.Tensor  # [N / rows, K / group] float32
    rows: int
    """Number of rows of a block, which divides N."""
    group: int
    """Number of inputs of a block, which divides K."""

    @property
    def shape(self) -> torch.Size:
        return self.data.shape

    @property
    def nbytes(self) -> int:
        return self.data.nbytes + self.scale.nbytes

    def linear(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """x [T, K] times the weight transposed, plus bias: [T, N]. The weight is dequantized first, which is slow."""
        return functional.linear(x, self.dequantized(x.dtype), bias)

    def dequantized(self, dtype: torch.dtype) -> torch.Tensor:
        """The weight [N, K] in `dtype`, rounded once."""
        whole = torch.empty(self.shape, dtype=dtype, device=self.data.device)
        wide = torch.promote_types(dtype, torch.float32)
        step = -(-ROWS_AT_A_TIME // self.rows) * self.rows
        pieces = (torch.split(each, step) for each in (whole, self.data))
        for into, data, scale in zip(*pieces, torch.split(self.scale, step // self.rows), strict=True):
            blocks = data.to(wide).view(len(scale), self.rows, -1, self.group)
            into.copy_((blocks * scale[:, None, :, None].to(wide)).view(data.shape))
        return whole


Weight = (
    torch.Tensor
    | Fp8Weight
    | Fp8BlockWeight
    | Int4Weight
    | Int4CpuWeight
    | Int8CpuWeight
    | IntegerWeight
    | PackedWeight
    | StackedWeight
)
"""A weight [N, K] of a linear layer."""


def row_maxima(weight: torch.Tensor) -> torch.Tensor:
    """The largest magnitude of each row of weight [N, K]: [N] float32."""
    return torch.cat([rows.abs().amax(dim=1).float() for rows in torch.split(weight, ROWS_AT_A_TIME)])


def quantize(weight: torch.Tensor, maxima: torch.Tensor | None = None) -> Fp8Weight:
    """Quantize weight [N, K] of any float dtype. The scales make each row's largest magnitude LARGEST.

    `maxima` [N] are the `row_maxima` of the whole rows, if weight has only some of their columns.
    """
    data = torch.empty(weight.shape, dtype=FP8, device=weight.device)
    scale = (row_maxima(weight) if maxima is None else maxima) / LARGEST
    # For a row of zeros the scale is the smallest normal number, which keeps the quotients finite.
    scale.clamp_(min=torch.finfo(torch.float32).tiny)
    pieces = (torch.split(each, ROWS_AT_A_TIME) for each in (weight, data, scale))
    for rows, into, factors in zip(*pieces, strict=True):
        into.copy_((rows.float() / factors[:, None]).clamp_(-LARGEST, LARGEST))
    return Fp8Weight(data, scale)
