"""MXFP4 weights of experts: 4-bit numbers, with a power of two for each 32 inputs, in plain PyTorch."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from holdfast.lm.kernels.packed import E2M1, PackedWeight

NUMBERS = E2M1
"""The number of each 4-bit code (OCP Microscaling Formats 1.0, §5.3.3)."""
LARGEST = 6.0
SPREAD = (sum(number**2 for number in NUMBERS) / len(NUMBERS)) ** 0.5
"""The standard deviation of the numbers, if all are equally likely."""
BLOCK = 32
"""Number of inputs that share one scale."""
BIAS = 127
"""The scale s stands for the factor 2**(s - BIAS) (§5.4.1)."""
NO_NUMBER = 255
"""The scale that stands for NaN."""
ROWS_AT_A_TIME = 256
"""Number of rows that are dequantized together, which stay in a core's cache."""


@dataclass(frozen=True, slots=True)
class Mxfp4Matrices:
    """The weights [E, N, K] of E experts. A byte holds two neighbouring inputs, the first one in its low bits.

    The factor of scale 0, 2**-127, counts as 0: PyTorch and kernels may flush numbers that small.
    """

    data: torch.Tensor  # [E, N, K / 2] uint8
    scale: torch.Tensor  # [E, N, K / BLOCK] uint8

    @property
    def shape(self) -> torch.Size:
        experts, rows, width = self.data.shape
        return torch.Size((experts, rows, 2 * width))

    @property
    def nbytes(self) -> int:
        return self.data.nbytes + self.scale.nbytes

    def matrix(self, expert: int, dtype: torch.dtype) -> torch.Tensor:
        """The weight [N, K] of one expert in `dtype`, rounded once; not rounded in bfloat16 and float32."""
        whole = torch.empty(self.shape[1:], dtype=dtype, device=self.data.device)
        pieces = (torch.split(each, ROWS_AT_A_TIME) for each in (whole, self.data[expert], self.scale[expert]))
        for into, data, scale in zip(*pieces, strict=True):
            into.copy_(dequantize(data, scale))
        return whole


ExpertWeights = torch.Tensor | Mxfp4Matrices | PackedWeight
"""The weights [E, N, K] of E experts."""


def matrix_of(weights: ExpertWeights, expert: int, dtype: torch.dtype) -> torch.Tensor:
    """The weight [N, K] of one expert for activations of `dtype`."""
    return weights[expert] if isinstance(weights, torch.Tensor) else weights.matrix(expert, dtype)


def dequantize(data: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """The numbers [..., K] of data [..., K / 2] and scales [..., K / BLOCK], both uint8. They are exact in bfloat16."""
    pairs = _pairs(data.device).index_select(0, data.flatten().int())
    # The bits of a power of two are its exponent. This is several times as fast as ldexp.
    factors = (scale.short() << 7).view(torch.bfloat16)
    numbers = pairs.view(torch.bfloat16).view(*scale.shape, BLOCK)
    return numbers.mul_(factors[..., None]).flatten(-2)


def _pairs(device: torch.device) -> torch.Tensor:
    """For each byte, its two numbers in bfloat16, as one int32. One look-up then gives both."""
    numbers = torch.tensor(NUMBERS, device=device, dtype=torch.bfloat16)
    return torch.stack((numbers.repeat(16), numbers.repeat_interleave(16)), 1).view(torch.int32).flatten()
