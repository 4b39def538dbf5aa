"""Weights of 4, 6 and 8 bits that a CPU multiplies as integers.

Activations are rounded to 8 bits, with a scale for each 32 inputs of a row, as llama.cpp does. So an activation moves
by up to 1/254 of the largest one of its 32. Numbers of a weight are kept. Its scales and lows are rounded to float16,
in relation to the largest scale of their row: by up to 2**-11 of each.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from holdfast.lm.kernels.integer.library import Library
from holdfast.lm.kernels.large_pages import empty_in_large_pages
from holdfast.lm.kernels.packed import Form, PackedWeight, unpacked

TILE, BLOCK, VECTOR = 16, 32, 4
"""Rows and inputs that lie together, and inputs of a vector. products.c draws the layout (integer.h)."""
OFFSETS = {4: 0, 6: 32, 8: 128}
"""The number that stands for 0, by bits."""
TILES_AT_A_TIME = 64
"""Number of tiles that are packed or dequantized together, which bounds the memory for them."""
MOST_LOW = 1024.0
"""The largest low in relation to the largest scale of its row that leaves the scales as they are."""


@dataclass(frozen=True, slots=True)
class IntegerWeight:
    """A weight [N, K] in the library's layout."""

    library: Library
    data: torch.Tensor  # [tiles, K / 32, bytes of a block] uint8
    factors: torch.Tensor  # [tiles, 16] float32: the factor of each row
    bits: int
    outputs: int
    """Number of rows, N. The last tile may have more."""

    @property
    def shape(self) -> torch.Size:
        return torch.Size((self.outputs, self.data.shape[1] * BLOCK))

    @property
    def nbytes(self) -> int:
        return self.data.nbytes + self.factors.nbytes

    def linear(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """x [T, K] in float32 or bfloat16 times the weight transposed, plus bias: [T, N]."""
        if x.shape[1] != self.shape[1]:
            raise ValueError(f"activations have {x.shape[1]} inputs, and the weight has {self.shape[1]}")
        product = self.library.product(self.data, self.factors, self.bits, x, self.outputs)
        return product if bias is None else product.add_(bias)

    def dequantized(self, dtype: torch.dtype) -> torch.Tensor:
        """The weight [N, K] in `dtype`, rounded once."""
        wide = torch.promote_types(dtype, torch.float32)
        whole = torch.empty(self.shape, dtype=dtype)
        for into, data, factors in zip(
            torch.split(whole, TILES_AT_A_TIME * TILE),
            torch.split(self.data, TILES_AT_A_TIME),
            torch.split(self.factors, TILES_AT_A_TIME),
            strict=True,
        ):
            rows = _plain(data, self.bits, wide) * factors.to(wide)[..., None, None, None]
            into.copy_(rows.view(-1, into.shape[1])[: len(into)])
        return whole


def fits(inputs: int, group: int) -> bool:
    """Whether rows of this many inputs, with a scale for each group of them, have the library's layout."""
    return inputs % BLOCK == 0 and group % BLOCK == 0


def pack_integers(
    library: Library, numbers: torch.Tensor, scale: torch.Tensor, low: torch.Tensor | None, bits: int
) -> IntegerWeight:
    """Pack numbers [N, K] uint8 below 2**bits.

    `scale` [N, K / 32], or [N, K / 16] of 6 bits, are the factors of numbers less their offset. `low` [N, K / 32] is
    added to weights of 4 bits. Raises ValueError for other shapes, and for scales that are not finite.
    """
    rows, inputs = numbers.shape
    parts = inputs // BLOCK * (2 if bits == 6 else 1)
    if inputs % BLOCK or bits not in OFFSETS or scale.shape != (rows, parts) or (low is None) != (bits != 4):
        raise ValueError(f"a weight [{rows}, {inputs}] of {bits} bits with scales {[*scale.shape]} cannot be packed")
    scale = scale.float()
    factors = scale.abs().amax(1)
    if low is not None:
        factors = torch.maximum(factors, low.float().abs().amax(1) / MOST_LOW)
    if not bool(factors.isfinite().all()):
        raise ValueError("a scale of the weight is not finite")
    factors = torch.where(factors == 0, 1.0, factors)
    header = [(each.float() / factors[:, None]).half() for each in (scale, low) if each is not None]
    pieces = [torch.split(each, TILES_AT_A_TIME * TILE) for each in (numbers, *header)]
    packed = [_packed(whole, parts, bits) for whole, *parts in zip(*pieces, strict=True)]
    tiles = sum(map(len, packed))
    data = torch.cat(packed, out=empty_in_large_pages(tiles, *packed[0].shape[1:], dtype=torch.uint8))
    return IntegerWeight(library, data, _tiles(factors, 1.0), bits, rows)


def integers_of(library: Library, weight: PackedWeight) -> IntegerWeight:
    """A weight [N, K] of INT4, INT6 or INT8 in the library's layout.

    Raises ValueError for other forms, and where a group is not 32 inputs, or 16 of INT6.
    """
    bits, scale = weight.form.bits, weight.scale.float()
    if weight.form not in (Form.INT4, Form.INT6, Form.INT8):
        raise ValueError(f"a weight of {weight.form.name} has no integers")
    if weight.coarse is not None:
        coarse = weight.coarse.float()
        scale = (scale.view(*coarse.shape, -1) * coarse[..., None]).flatten(1)
    # Adding the offset to signed bytes is the same as to unsigned ones.
    numbers = unpacked(weight.data, weight.form).view(torch.uint8) + OFFSETS[bits]
    return pack_integers(library, numbers, scale, weight.low, bits)


def _tiles(rows: torch.Tensor, rest: float = 0) -> torch.Tensor:
    """Rows [N, ...] as tiles [tiles, 16, ...], with `rest` in rows that the last one lacks."""
    missing = -len(rows) % TILE
    if missing:
        rows = torch.cat((rows, rows.new_full((missing, *rows.shape[1:]), rest)))
    return rows.reshape(-1, TILE, *rows.shape[1:])


def _packed(numbers: torch.Tensor, header: list[torch.Tensor], bits: int) -> torch.Tensor:
    """Numbers [N, K] and what belongs to each block of them as tiles [tiles, K / 32, bytes]."""
    blocks = numbers.shape[1] // BLOCK
    # A vector has 64 bytes: [tiles, blocks, vectors, 64].
    tiles = _tiles(numbers).view(-1, TILE, blocks, 8, VECTOR).permute(0, 2, 3, 1, 4).flatten(3)
    # Scales of a block follow each other row by row: [tiles, blocks, count, 16].
    before = [
        _tiles(each).view(-1, TILE, blocks, each.shape[1] // blocks).permute(0, 2, 3, 1).flatten(2) for each in header
    ]
    parts = [each.contiguous().view(torch.uint8) for each in before]
    if bits == 8:
        return torch.cat((*parts, tiles.flatten(2)), 2)
    low = tiles & 15
    parts.append((low[:, :, 0::2] | low[:, :, 1::2] << 4).flatten(2))
    if bits == 6:
        first, second, third, fourth = (tiles >> 4).view(len(tiles), blocks, 2, 4, -1).unbind(3)
        parts.append((first | second << 2 | third << 4 | fourth << 6).flatten(2))
    return torch.cat(parts, 2)


def _plain(data: torch.Tensor, bits: int, wide: torch.dtype) -> torch.Tensor:
    """The numbers [tiles, 16, K / 32, 2, 16] of tiles before the factors of their rows."""
    header = 32 if bits == 8 else 64
    tiles, blocks, _ = data.shape
    scales = data[..., :header].contiguous().view(torch.float16).view(tiles, blocks, -1, TILE).permute(0, 3, 1, 2)
    scales, own = scales.to(wide), data[..., header:]
    if bits == 8:
        vectors = own.reshape(tiles, blocks, 8, TILE, VECTOR)
    else:
        pairs = own[..., :256].reshape(tiles, blocks, 4, TILE, VECTOR)
        vectors = torch.stack((pairs & 15, pairs >> 4), 3).flatten(2, 3)
    if bits == 6:
        high = own[..., 256:].reshape(tiles, blocks, 2, 1, TILE, VECTOR)
        shifts = torch.tensor((0, 2, 4, 6), dtype=torch.uint8)[:, None, None]
        vectors = vectors | ((high >> shifts & 3) << 4).flatten(2, 3)
    numbers = vectors.permute(0, 3, 1, 2, 4).reshape(tiles, TILE, blocks, 2, 16).to(wide)
    if bits == 4:
        return numbers * scales[..., :1, None] + scales[..., 1:, None]
    return (numbers - OFFSETS[bits]) * scales[..., None]
