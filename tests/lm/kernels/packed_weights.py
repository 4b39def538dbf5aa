"""Random packed weights of each form, and the numbers that they stand for, for the tests of what reads them."""

from __future__ import annotations

import torch

from holdfast.lm.kernels.mxfp4 import NUMBERS
from holdfast.lm.kernels.packed import Form, PackedWeight, packed_nibbles, packed_sixes

GROUPS = {Form.FP8: 64, Form.INT8: 32, Form.INT6: 16, Form.INT4: 32, Form.FP4: 16}


def draw_packed(
    form: Form, *shape: int, device: str = "cpu", group: int = 0, rows: int = 1
) -> tuple[PackedWeight, torch.Tensor]:
    """A weight of this shape [..., N, K] with a standard deviation of about 1 / sqrt(K), and its float64 numbers."""
    *before, inputs = shape
    generator = torch.Generator().manual_seed(sum(shape) + form)
    group = group or GROUPS[form]
    groups, size = (*before[:-1], before[-1] // rows, inputs // group), inputs**-0.5

    def uniform(low: float, high: float, *sizes: int) -> torch.Tensor:
        return torch.rand(sizes, generator=generator) * (high - low) + low

    def integers(low: int, stop: int, sizes: tuple[int, ...]) -> torch.Tensor:
        return torch.randint(low, stop, sizes, generator=generator)

    low = coarse = unit = None
    if form is Form.FP8:
        numbers = (torch.randn(shape, generator=generator) * 100).clamp(-448, 448).to(torch.float8_e4m3fn)
        data, scale = numbers, uniform(0.2, 2, *groups) * size / 100
    elif form is Form.INT8:
        data = numbers = integers(-128, 128, shape).to(torch.int8)
        scale = (uniform(0.2, 2, *groups) * size / 70).half()
    elif form is Form.INT6:
        drawn = integers(0, 64, shape).to(torch.uint8)
        numbers, data = drawn.int() - 32, packed_sixes(drawn)
        scale = integers(-127, 128, groups).to(torch.int8)
        coarse = (uniform(0.5, 2, *before, inputs // 256) * size / 1200).half()
    elif form is Form.INT4:
        numbers = integers(0, 16, shape).to(torch.uint8)
        data, scale = packed_nibbles(numbers), uniform(0.2, 2, *groups) * size / 5
        low = -scale * uniform(4, 10, *groups)
    else:
        codes = integers(0, 16, shape).to(torch.uint8)
        numbers, data = torch.tensor(NUMBERS)[codes.int()], packed_nibbles(codes)
        scale, unit = (uniform(0.2, 2, *groups) * 100).to(torch.float8_e4m3fn), uniform(0.5, 2, *before) * size / 300
    factor = scale.double()
    if coarse is not None:
        factor = factor * coarse.double().repeat_interleave(256 // group, -1)
    plain = numbers.double() * factor.repeat_interleave(rows, -2).repeat_interleave(group, -1)
    if low is not None:
        plain += low.double().repeat_interleave(group, -1)
    if unit is not None:
        plain *= unit.double()[..., None]

    def put(each: torch.Tensor | None) -> torch.Tensor | None:
        return None if each is None else each.to(device)

    weight = PackedWeight(
        form, data.to(device), scale.to(device), group, rows, low=put(low), coarse=put(coarse), unit=put(unit)
    )
    return weight, plain.to(device)
