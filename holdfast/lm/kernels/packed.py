"""Weights that stay packed as a checkpoint stores them, with scales for small groups of inputs, in plain PyTorch.

A number is q * scale, with these forms of q:

- FP8: e4m3, with a scale for each block (DeepSeek, Qwen).
- INT8: from -128 to 127, with a scale for each 32 inputs (GGUF's Q8_0).
- INT6: from -32 to 31, with a small integer for each 16 inputs, and a factor of these for each 256 (GGUF's Q6_K).
- INT4: from 0 to 15, with a scale and a low, which is added, for each group (GGUF's Q4_K and Q4_0, AWQ, GPTQ).
- FP4: e2m1, with an e4m3 scale for each 16 inputs and a float32 factor for each row (NVFP4).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import IntEnum

import torch
from torch.nn import functional

E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
"""The number of each 4-bit code of FP4."""
COARSE = 256
"""Number of inputs of INT6 with one factor of their scales."""
MIDDLE = 32
"""The 6-bit number that stands for 0."""
ROWS_AT_A_TIME = 1024
"""Number of rows that are dequantized together. They take memory in float32 meanwhile."""


class Form(IntEnum):
    """The form of packed numbers. Kernels know forms by their number."""

    FP8 = 1
    INT8 = 2
    INT6 = 3
    INT4 = 4
    FP4 = 5

    @property
    def bits(self) -> int:
        """Number of bits that one number takes in `data`."""
        return {Form.FP8: 8, Form.INT8: 8, Form.INT6: 6, Form.INT4: 4, Form.FP4: 4}[self]


@dataclass(frozen=True, slots=True)
class PackedWeight:
    """A weight [N, K], or the weights [E, N, K] of E experts.

    Numbers of 4 bits lie in pairs of neighbouring inputs, the first one in the low bits of a byte. A row of INT6 has
    the low four bits of all numbers in this way, and then the high two bits of all, four neighbours in a byte.
    """

    form: Form
    data: torch.Tensor  # [..., N, K bits / 8]: float8_e4m3fn, int8, or uint8
    scale: torch.Tensor  # [..., N / rows, K / group]: of any dtype; of FP4 float8_e4m3fn, of INT6 int8
    group: int
    """Number of inputs in a group."""
    rows: int = 1
    """Number of rows that share their scales."""
    low: torch.Tensor | None = None  # [..., N, K / group] float32: the number added to each group of INT4
    coarse: torch.Tensor | None = None  # [..., N, K / COARSE]: the factors of the scales of INT6
    unit: torch.Tensor | None = None  # [..., N] float32: the factor of each row of FP4

    @property
    def shape(self) -> torch.Size:
        *before, width = self.data.shape
        return torch.Size((*before, width * 8 // self.form.bits))

    @property
    def nbytes(self) -> int:
        parts = (self.data, self.scale, self.low, self.coarse, self.unit)
        return sum(each.nbytes for each in parts if each is not None)

    @property
    def factors(self) -> torch.Tensor:
        """The scales as kernels read them: those of FP4 as bytes, since older GPUs do not know e4m3."""
        return self.scale.view(torch.uint8) if self.form is Form.FP4 else self.scale

    @property
    def extra(self) -> torch.Tensor | None:
        """The second tensor by which groups become numbers: that of INT4 or of INT6."""
        return self.low if self.coarse is None else self.coarse

    def linear(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """x [T, K] times the weight transposed, plus bias: [T, N]. The weight is dequantized first, which is slow."""
        return functional.linear(x, self.dequantized(x.dtype), bias)

    def matrix(self, expert: int, dtype: torch.dtype) -> torch.Tensor:
        """The weight [N, K] of one expert in `dtype`, rounded once."""
        parts = (self.data, self.scale, self.low, self.coarse, self.unit)
        data, scale, low, coarse, unit = (None if each is None else each[expert] for each in parts)
        assert data is not None and scale is not None
        return PackedWeight(self.form, data, scale, self.group, self.rows, low, coarse, unit).dequantized(dtype)

    def dequantized(self, dtype: torch.dtype) -> torch.Tensor:
        """The whole weight in `dtype`, rounded once."""
        whole = torch.empty(self.shape, dtype=dtype, device=self.data.device)
        rows, step = whole.view(-1, self.shape[-1]), -(-ROWS_AT_A_TIME // self.rows) * self.rows
        for first in range(0, len(rows), step):
            into = rows[first : first + step]
            into.copy_(self._numbers(first, len(into), torch.promote_types(dtype, torch.float32)))
        return whole

    def _numbers(self, first: int, count: int, wide: torch.dtype) -> torch.Tensor:
        """The numbers [count, K] of rows from `first` on, all experts' rows being one sequence, in a wide dtype."""

        def part(tensor: torch.Tensor, rows: int = 1) -> torch.Tensor:
            own = tensor.reshape(-1, tensor.shape[-1])[first // rows : (first + count) // rows].to(wide)
            return own.repeat_interleave(rows, 0) if rows > 1 else own

        scale = part(self.scale, self.rows)
        if self.coarse is not None:
            coarse = part(self.coarse)
            scale = (scale.view(*coarse.shape, -1) * coarse[..., None]).view(scale.shape)
        data = self.data.reshape(-1, self.data.shape[-1])[first : first + count]
        numbers = unpacked(data, self.form).to(wide).view(*scale.shape, -1) * scale[..., None]
        if self.low is not None:
            numbers += part(self.low)[..., None]
        if self.unit is not None:
            numbers *= self.unit.reshape(-1)[first : first + count, None, None].to(wide)
        return numbers.flatten(1)


def joined(parts: Sequence[PackedWeight]) -> PackedWeight:
    """One weight with the rows of all parts, which have one form and one size of groups and of blocks of rows."""
    return parts[0] if len(parts) == 1 else _combined(parts, torch.cat)


def stacked(experts: Sequence[PackedWeight]) -> PackedWeight:
    """The weights [E, N, K] of experts, from one [N, K] of each."""
    return _combined(experts, torch.stack)


def are_alike(parts: Sequence[PackedWeight]) -> bool:
    """Whether `joined` can join them."""
    return len({(each.form, each.group, each.rows, each.shape[-1]) for each in parts}) == 1


def _combined(parts: Sequence[PackedWeight], combine: Callable[[list[torch.Tensor]], torch.Tensor]) -> PackedWeight:
    def every(name: str) -> torch.Tensor | None:
        held = [tensor for each in parts if (tensor := getattr(each, name)) is not None]
        return combine(held) if held else None

    first, data, scale = parts[0], every("data"), every("scale")
    assert data is not None and scale is not None
    return PackedWeight(first.form, data, scale, first.group, first.rows, every("low"), every("coarse"), every("unit"))


def unpacked(data: torch.Tensor, form: Form) -> torch.Tensor:
    """The numbers [..., K] of packed rows before their scales, as integers or float32."""
    if form in (Form.FP8, Form.INT8):
        return data.float() if form is Form.FP8 else data
    if form is Form.INT6:
        width = data.shape[-1] // 3
        low, high = _nibbles(data[..., : 2 * width]), data[..., 2 * width :]
        shifts = torch.tensor((0, 2, 4, 6), dtype=torch.uint8, device=data.device)
        upper = (high[..., None] >> shifts & 3).flatten(-2)
        return (low | upper << 4).to(torch.int8) - MIDDLE
    numbers = _nibbles(data)
    if form is Form.INT4:
        return numbers
    return torch.tensor(E2M1, device=data.device)[numbers.int()]


def packed_nibbles(numbers: torch.Tensor) -> torch.Tensor:
    """Numbers [..., K] uint8 from 0 to 15 as bytes [..., K / 2], in the order of `PackedWeight`."""
    first, second = numbers.view(*numbers.shape[:-1], -1, 2).unbind(-1)
    return first | second << 4


def packed_sixes(numbers: torch.Tensor) -> torch.Tensor:
    """Numbers [..., K] uint8 from 0 to 63 as bytes [..., 3 K / 4], in the order of `PackedWeight`."""
    upper = (numbers >> 4).view(*numbers.shape[:-1], -1, 4)
    high = upper[..., 0] | upper[..., 1] << 2 | upper[..., 2] << 4 | upper[..., 3] << 6
    return torch.cat((packed_nibbles(numbers & 15), high), -1)


def _nibbles(data: torch.Tensor) -> torch.Tensor:
    """The low and the high four bits of bytes [..., B], as [..., 2 B]."""
    return torch.stack((data & 15, data >> 4), -1).flatten(-2)
