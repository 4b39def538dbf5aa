"""4-bit weights on a CPU in the form that PyTorch's own kernel reads, for activations in bfloat16.

The kernel has vector code for bfloat16 alone, on x86. A group's two factors are rounded to bfloat16. The kernel rounds
no weight, adds up in float32, and rounds the sum. A weight is thus off by up to 2**-8 of the largest number that its
group can hold. Products are as near to the exact ones as with weights that are rounded to bfloat16
(benchmarks/kernels/int4_cpu.py).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

GROUPS = (32, 64, 128, 256)
"""Numbers of inputs with one scale that the kernel knows."""
ROWS = 16
"""The kernel takes rows of weights by multiples of this."""
VECTORS = ("AVX2", "AVX512")
"""Instruction sets that the kernel has vector code for, by PyTorch's names."""
MIDDLE = 8
COLUMNS_AT_A_TIME = 256
"""Number of columns that are dequantized together."""


@dataclass(frozen=True, slots=True)
class Int4CpuWeight:
    """A weight [N, K] of numbers (q - 8) * scale + middle, with q from 0 to 15."""

    data: torch.Tensor  # [N, K / 2] uint8, in the kernel's order
    factors: torch.Tensor  # [K / group, N, 2] bfloat16: scale and middle
    group: int
    """Number of inputs in a group."""

    @property
    def shape(self) -> torch.Size:
        rows, width = self.data.shape
        return torch.Size((rows, 2 * width))

    @property
    def nbytes(self) -> int:
        return self.data.nbytes + self.factors.nbytes

    def linear(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """x [T, K] bfloat16 times the weight transposed, plus bias: [T, N]."""
        product = torch.ops.aten._weight_int4pack_mm_for_cpu(x.contiguous(), self.data, self.group, self.factors)
        return product if bias is None else product.add_(bias)  # type: ignore[no-any-return]

    def dequantized(self, dtype: torch.dtype) -> torch.Tensor:
        """The weight [N, K] in `dtype`, rounded to bfloat16. It is multiplied by unit vectors, which is slow."""
        rows, inputs = self.shape
        whole = torch.empty(rows, inputs, dtype=dtype)
        for first in range(0, inputs, COLUMNS_AT_A_TIME):
            columns = whole[:, first : first + COLUMNS_AT_A_TIME]
            units = torch.eye(columns.shape[1], inputs, dtype=torch.bfloat16).roll(first, 1)
            columns.copy_(self.linear(units, None).t())
        return whole


def is_fit(shape: tuple[int, int], group: int, device: torch.device, dtype: torch.dtype) -> bool:
    """Whether the kernel multiplies activations of `dtype` by a weight of this shape [N, K], and fast."""
    rows, inputs = shape
    fits = rows % ROWS == 0 and inputs % group == 0 and group in GROUPS
    return fits and device.type == "cpu" and dtype == torch.bfloat16 and _capability() in VECTORS


def pack_for_cpu(numbers: torch.Tensor, scale: torch.Tensor, middle: torch.Tensor, group: int) -> Int4CpuWeight:
    """Pack numbers [N, K] uint8 from 0 to 15.

    `scale` and `middle` [N, K / group] are the factor of a group's numbers, and the weight that 8 stands for.
    """
    data = torch.ops.aten._convert_weight_to_int4pack_for_cpu(numbers.int(), 2)
    factors = torch.stack((scale.t(), middle.t()), -1).bfloat16().contiguous()
    return Int4CpuWeight(data, factors, group)


def _capability() -> str:
    return torch.backends.cpu.get_cpu_capability()
