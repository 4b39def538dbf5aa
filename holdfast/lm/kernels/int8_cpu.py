"""8-bit weights on a CPU in the form that PyTorch's own kernel reads, for activations in bfloat16.

The kernel has one scale for each row. GGUF's Q6_K has one for each 16 inputs, so its numbers are rounded once more: by
up to 1/254 of the row's largest number, which is about half of what Q6_K itself rounds off. A weight that loses more
than MOST_LOST, because a few numbers are much larger than the others, is not packed.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

LARGEST = 127.0
MOST_LOST = 0.015
"""The largest distance of a packed weight from the exact one, in relation to it. Normal numbers lose 0.008 or so."""
ROWS_AT_A_TIME = 1024
"""Number of rows that are packed together. They take memory in float32 meanwhile."""


@dataclass(frozen=True, slots=True)
class Int8CpuWeight:
    """A weight [N, K]: each row of `data` times its `scale`."""

    data: torch.Tensor  # [N, K] int8
    scale: torch.Tensor  # [N] bfloat16

    @property
    def shape(self) -> torch.Size:
        return self.data.shape

    @property
    def nbytes(self) -> int:
        return self.data.nbytes + self.scale.nbytes

    def linear(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """x [T, K] bfloat16 times the weight transposed, plus bias: [T, N]."""
        product = torch.ops.aten._weight_int8pack_mm(x.contiguous(), self.data, self.scale)
        return product if bias is None else product.add_(bias)  # type: ignore[no-any-return]

    def dequantized(self, dtype: torch.dtype) -> torch.Tensor:
        """The weight [N, K] in `dtype`, rounded once."""
        return (self.data.float() * self.scale.float()[:, None]).to(dtype)


def fits_int8(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether the kernel multiplies activations of `dtype` on this device, and fast."""
    vectors = torch.backends.cpu.get_cpu_capability() in ("AVX2", "AVX512")
    return device.type == "cpu" and dtype == torch.bfloat16 and vectors


def pack_rows(weight: torch.Tensor) -> Int8CpuWeight | None:
    """Round weight [N, K] float32 to 8 bits by row; None if that loses more than MOST_LOST of it."""
    data = torch.empty(weight.shape, dtype=torch.int8)
    scale = torch.empty(len(weight), dtype=torch.bfloat16)
    lost = whole = 0.0
    for rows, into, factors in zip(*(torch.split(each, ROWS_AT_A_TIME) for each in (weight, data, scale)), strict=True):
        factors.copy_((rows.abs().amax(1) / LARGEST).clamp_(min=torch.finfo(torch.float32).tiny))
        # The scale is rounded first, so that numbers are rounded to multiples of the one that is kept.
        numbers = (rows / factors.float()[:, None]).round_().clamp_(-128, LARGEST)
        into.copy_(numbers)
        lost += float((numbers.mul_(factors.float()[:, None]) - rows).square().sum(dtype=torch.float64))
        whole += float(rows.square().sum(dtype=torch.float64))
    return Int8CpuWeight(data, scale) if lost <= MOST_LOST**2 * whole else None
