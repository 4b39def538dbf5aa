"""Reads the blocks of GGUF's common formats on any device, as plain numbers or in the forms that kernels read.

The package gguf has all formats, but one thread.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch

from holdfast.lm.kernels.packed import COARSE, Form, PackedWeight, packed_nibbles, packed_sixes
from holdfast.lm.models.checkpoint_errors import DamagedCheckpoint

BYTES_AT_A_TIME = {"cpu": 1 << 17, "cuda": 1 << 24}
"""Number of stored bytes that are dequantized together, by device: on a CPU what fits its cache."""
GROUP = 32
"""Number of 4-bit numbers with one scale, in all formats that have them."""


class FourBits(NamedTuple):
    """Rows of numbers q * scale + low, with q from 0 to 15, and a scale and a low for each GROUP of them."""

    numbers: torch.Tensor  # [N, K] uint8
    scale: torch.Tensor  # [N, K / GROUP] float32
    low: torch.Tensor  # [N, K / GROUP] float32

    def plain(self) -> torch.Tensor:
        """The numbers [B, K] of blocks, whose fields are still [B, K / GROUP, GROUP] and [B, K / GROUP, 1]."""
        return (self.numbers * self.scale + self.low).flatten(1)


def dequantized(data: np.ndarray[Any, Any], kind: Any, device: torch.device) -> torch.Tensor:
    """The numbers of stored rows, in float32 on `device`. `kind` is the format, a `GGMLQuantizationType`."""
    if kind.name in ("F32", "F16", "F64"):
        return torch.from_numpy(np.require(data, requirements="W")).to(device).float()
    if kind.name not in FORMATS:
        from gguf import dequantize

        return torch.from_numpy(np.require(dequantize(data, kind), np.float32, "W")).to(device)
    width = data.shape[-1]
    rows = data.reshape(-1, width)
    step = max(1, BYTES_AT_A_TIME[device.type] // width)
    found = []
    for start in range(0, max(len(rows), 1), step):
        part = rows[start : start + step]
        found.append(FORMATS[kind.name][1](_blocks(part, kind, device)).reshape(len(part), -1))
    return torch.cat(found).reshape(*data.shape[:-1], -1)


def four_bits(data: np.ndarray[Any, Any], kind: Any, device: torch.device) -> FourBits | None:
    """Stored rows [N, bytes] as their 4-bit numbers, on `device`; None for a format with other numbers of bits."""
    if kind.name not in FOUR_BITS:
        return None
    blocks = _blocks(data, kind, device)
    return FourBits(*(part.reshape(len(data), -1) for part in FOUR_BITS[kind.name](blocks)))


def packed(data: np.ndarray[Any, Any], kind: Any, device: torch.device) -> PackedWeight | None:
    """Stored rows [N, bytes] in the form that kernels read, on `device`; None for a format without one."""
    if kind.name not in PACKED:
        return None
    return PACKED[kind.name](_blocks(data, kind, device), len(data))


def _blocks(rows: np.ndarray[Any, Any], kind: Any, device: torch.device) -> torch.Tensor:
    """The blocks [B, bytes] of stored rows, on `device`."""
    size, width = FORMATS[kind.name][0], rows.shape[-1]
    if width % size:
        raise DamagedCheckpoint(f"a row of {kind.name} has {width} bytes; it must have a multiple of {size}")
    return torch.from_numpy(np.require(rows, requirements="W")).to(device).reshape(-1, size)


def _half(blocks: torch.Tensor, at: int) -> torch.Tensor:
    """The float16 at a byte of each block, as float32 [B, 1]."""
    return blocks[:, at : at + 2].contiguous().view(torch.float16).float()


def _nibbles(data: torch.Tensor) -> torch.Tensor:
    """Low and high four bits of bytes [B, C, N], in the order [B, C, 2, N]."""
    return torch.stack((data & 15, data >> 4), 2)


def _bf16(blocks: torch.Tensor) -> torch.Tensor:
    return blocks.contiguous().view(torch.bfloat16).float()


def _q8_0(blocks: torch.Tensor) -> torch.Tensor:
    """32 signed bytes after a scale."""
    return blocks[:, 2:].view(torch.int8).float() * _half(blocks, 0)


def _q4_0_bits(blocks: torch.Tensor) -> FourBits:
    """32 numbers of four bits after a scale; 8 stands for 0."""
    scale = _half(blocks, 0)[..., None]
    return FourBits(_nibbles(blocks[:, None, 2:]).flatten(2), scale, -8 * scale)


def _q4_0(blocks: torch.Tensor) -> torch.Tensor:
    return _q4_0_bits(blocks).plain()


def _k_scales(blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Scale and offset [B, 8, 1] of each 32 numbers in a block of Q4_K or Q5_K. They have six bits each."""
    first, second, third = blocks[:, 4:16].reshape(-1, 3, 4).unbind(1)
    scale = torch.cat((first & 63, third & 15 | first >> 6 << 4), 1).float() * _half(blocks, 0)
    offset = torch.cat((second & 63, third >> 4 | second >> 6 << 4), 1).float() * _half(blocks, 2)
    return scale[..., None], offset[..., None]


def _q4_k_bits(blocks: torch.Tensor) -> FourBits:
    """256 numbers of four bits, with a scale and an offset for each 32."""
    scale, offset = _k_scales(blocks)
    return FourBits(_nibbles(blocks[:, 16:].reshape(-1, 4, 32)).reshape(-1, 8, 32), scale, -offset)


def _q4_k(blocks: torch.Tensor) -> torch.Tensor:
    return _q4_k_bits(blocks).plain()


def _q5_k(blocks: torch.Tensor) -> torch.Tensor:
    """256 numbers of five bits, whose fifth bits are apart, with a scale and an offset for each 32."""
    scale, offset = _k_scales(blocks)
    which = torch.arange(8, dtype=torch.uint8, device=blocks.device)[:, None]
    fifth = blocks[:, None, 16:48] >> which & 1
    numbers = _nibbles(blocks[:, 48:].reshape(-1, 4, 32)).reshape(-1, 8, 32) | fifth << 4
    return (numbers * scale - offset).flatten(1)


def _sixes(blocks: torch.Tensor) -> torch.Tensor:
    """The numbers [B, 256] of six bits of Q6_K, whose upper two are apart; 32 stands for 0."""
    low = _nibbles(blocks[:, :128].reshape(-1, 2, 64)).reshape(-1, 2, 4, 32)
    shifts = torch.tensor((0, 2, 4, 6), dtype=torch.uint8, device=blocks.device)[:, None]
    high = blocks[:, 128:192].reshape(-1, 2, 1, 32) >> shifts & 3
    return (low | high << 4).reshape(-1, COARSE)


def _q6_k(blocks: torch.Tensor) -> torch.Tensor:
    """256 numbers of six bits, with a scale for each 16."""
    numbers = _sixes(blocks).float() - 32
    scale = blocks[:, 192:208].contiguous().view(torch.int8).float() * _half(blocks, 208)
    return (numbers.reshape(-1, 16, 16) * scale[..., None]).flatten(1)


FORMATS: dict[str, tuple[int, Callable[[torch.Tensor], torch.Tensor]]] = {
    "BF16": (2, _bf16),
    "Q8_0": (34, _q8_0),
    "Q4_0": (18, _q4_0),
    "Q4_K": (144, _q4_k),
    "Q5_K": (176, _q5_k),
    "Q6_K": (210, _q6_k),
}
"""For each format, the bytes of a block, and what computes the numbers of blocks [B, bytes]."""

FOUR_BITS: dict[str, Callable[[torch.Tensor], FourBits]] = {"Q4_0": _q4_0_bits, "Q4_K": _q4_k_bits}
"""For each format of 4-bit numbers, what finds them in blocks [B, bytes]. A block's numbers are those of a row."""


def _packed_q8_0(blocks: torch.Tensor, rows: int) -> PackedWeight:
    numbers, scale = blocks[:, 2:].view(torch.int8), blocks[:, :2].contiguous().view(torch.float16)
    return PackedWeight(Form.INT8, numbers.reshape(rows, -1), scale.reshape(rows, -1), GROUP)


def _packed_q6_k(blocks: torch.Tensor, rows: int) -> PackedWeight:
    scale, coarse = blocks[:, 192:208].contiguous().view(torch.int8), blocks[:, 208:].contiguous().view(torch.float16)
    data = packed_sixes(_sixes(blocks).reshape(rows, -1))
    return PackedWeight(Form.INT6, data, scale.reshape(rows, -1), COARSE // 16, coarse=coarse.reshape(rows, -1))


def _packed_fours(find: Callable[[torch.Tensor], FourBits]) -> Callable[[torch.Tensor, int], PackedWeight]:
    def pack(blocks: torch.Tensor, rows: int) -> PackedWeight:
        numbers, scale, low = (part.reshape(rows, -1) for part in find(blocks))
        return PackedWeight(Form.INT4, packed_nibbles(numbers), scale, GROUP, low=low)

    return pack


PACKED: dict[str, Callable[[torch.Tensor, int], PackedWeight]] = {
    "Q8_0": _packed_q8_0,
    "Q6_K": _packed_q6_k,
    **{name: _packed_fours(find) for name, find in FOUR_BITS.items()},
}
"""For each format that kernels read, what packs the blocks [B, bytes] of this many rows."""
