"""Products on a GPU whose sums have one order for any number of rows."""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

from dataclasses import dataclass
from math import gcd

import torch
import triton
import triton.language as tl

from holdfast.lm.kernels.launch import dependent_launch_options, launch_dependents, wait_for_previous
from holdfast.lm.kernels.linear.packed_tile import packed_constants, packed_tile
from holdfast.lm.kernels.packed import PackedWeight

BLOCK_M, BLOCK_N = 64, 128
"""Tokens and outputs of a tile. A tensor core may add up a tile of another height in another order."""
PROGRAMS = 264
"""Programs into which a product with few tokens is cut: two for each processor of an H100. The number decides the order
of sums, so it is the same on all devices."""
MOST_PARTS, LEAST_STEPS = 8, 4
"""Largest number of parts of a sum, and fewest steps of a part."""
LEAST_STEP = 16
"""Fewest inputs of a tensor core's tile."""
ADDED_AT_A_TIME = 1024

Multiplied = torch.Tensor | PackedWeight
"""A weight [N, K] that `product` reads."""


@dataclass(frozen=True)
class Tile:
    """What one program computes at a time, and how it is compiled. It does not change the bits."""

    rows: int
    outputs: int
    num_warps: int
    num_stages: int


@dataclass(frozen=True)
class SumOrder:
    """How a sum over the inputs of a weight is cut into parts. Each part is added up, then the parts in their order."""

    step: int
    """Inputs of a step of a tensor core's tile."""
    size: int
    """Inputs of a part; the last may have fewer."""
    parts: int


def order_of(shape: torch.Size, dtype: torch.dtype) -> SumOrder:
    """The order for a weight of shape [N, K], read by activations of this type. It depends on nothing else."""
    outputs, inputs = shape
    step = 64 if dtype.itemsize == 2 else 32
    steps, tiles = triton.cdiv(inputs, step), triton.cdiv(outputs, BLOCK_N)
    parts = max(1, min(MOST_PARTS, PROGRAMS // tiles, steps // LEAST_STEPS))
    size = triton.cdiv(steps, parts) * step
    return SumOrder(step, size, triton.cdiv(inputs, size))


def order_on_ranks(shape: torch.Size, dtype: torch.dtype, slices: int = 0) -> SumOrder:
    """The order for a device's part [N, K] of a weight, which is the same for any number of devices.

    `slices` is the number of slices in the part, of those into which the inputs of the whole weight are cut. 0: the
    part has all inputs, and some of the outputs, whose number then decides nothing.

    Raises ValueError for slices that tensor cores cannot take.
    """
    inputs = shape[1]
    if not slices:
        return order_of(torch.Size((1, inputs)), dtype)
    size = inputs // slices
    step = gcd(size, 64 if dtype.itemsize == 2 else 32)
    if size * slices != inputs or step < LEAST_STEP:
        raise ValueError(f"{inputs} inputs have no {slices} equal slices of a multiple of {LEAST_STEP} numbers")
    return SumOrder(step, size, slices)


@triton.jit(do_not_specialize=["rows", "steps", "parts"])
def product_kernel(
    x, weight, scale, extra, unit, bias, out, rows, outputs, inputs, steps, parts, x_stride, weight_stride_n,
    weight_stride_k,
    FORM: tl.constexpr, GROUP: tl.constexpr, SCALE_ROWS: tl.constexpr, APART: tl.constexpr, EVEN: tl.constexpr,
    FEW: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """One tile of x [rows, inputs] times a weight [outputs, inputs] transposed.

    Program (tile, part) with APART: out [parts, rows, outputs] float32 gets this part of each sum. Else program (tile):
    out [rows, outputs] gets the sums of all parts, plus the bias. The parts are added up one after the other in both
    cases, here or by who reads them, so that a sum has the same bits. EVEN: steps fill the inputs. FEW: a tile holds
    all rows, and reads no more. With a FORM, the weight is a `PackedWeight`, whose numbers are rounded to the type of
    x, and whose units multiply each part.
    """
    launch_dependents(DEPENDENT)
    tiles_m = tl.cdiv(rows, BLOCK_M)
    tile = tl.program_id(0)
    row = tile % tiles_m * BLOCK_M + tl.arange(0, BLOCK_M)
    output = tile // tiles_m * BLOCK_N + tl.arange(0, BLOCK_N)
    step = tl.arange(0, BLOCK_K)
    # Tiles at the edge read a row or an output again in place of one that is not there, and do not write it. If there
    # is one tile of rows, it reads weights for few of them, and reading rows again would take as long.
    x_at = x + tl.minimum(row, rows - 1).to(tl.int64)[:, None] * x_stride
    read = tl.minimum(output, outputs - 1)
    weight_at = weight + read.to(tl.int64)[None, :] * weight_stride_n
    first_part, stop_part = 0, parts
    if APART:
        first_part = tl.program_id(1)
        stop_part = first_part + 1
    there = (row < rows)[:, None]
    total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    wait_for_previous(DEPENDENT)
    for part in range(first_part, stop_part):
        added = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        for number in range(part * steps, tl.minimum((part + 1) * steps, tl.cdiv(inputs, BLOCK_K))):
            at = number * BLOCK_K + step  # the compiler sees that it begins at whole steps, and copies ahead
            if FEW:
                own = tl.load(x_at + at[None, :], mask=there & (at < inputs)[None, :], other=0.0)
            elif EVEN:
                own = tl.load(x_at + at[None, :])
            else:
                own = tl.load(x_at + at[None, :], mask=(at < inputs)[None, :], other=0.0)
            if FORM > 0:
                tile_of_weight = packed_tile(
                    weight, scale, extra, read, number * BLOCK_K, inputs,
                    FORM, GROUP, SCALE_ROWS, BLOCK_N, BLOCK_K, EVEN,
                )  # fmt: skip
                numbers = tl.trans(tile_of_weight.to(own.dtype))
            elif EVEN:
                numbers = tl.load(weight_at + at[:, None] * weight_stride_k)
            else:
                numbers = tl.load(weight_at + at[:, None] * weight_stride_k, mask=(at < inputs)[:, None], other=0.0)
            added = tl.dot(own, numbers, added, input_precision="ieee")
        if unit is not None:
            added *= tl.load(unit + read)[None, :]
        total += added
    held = (row < rows)[:, None] & (output < outputs)[None, :]
    place = row.to(tl.int64)[:, None] * outputs + output[None, :]
    if APART:
        place += tl.program_id(1).to(tl.int64) * rows * outputs
    elif bias is not None:
        total += tl.load(bias + output, mask=output < outputs, other=0.0).to(tl.float32)[None, :]
    tl.store(out + place, total.to(out.dtype.element_ty), mask=held)


@triton.jit(do_not_specialize=["parts", "count"])
def add_parts_kernel(partials, bias, out, parts, count, outputs, BLOCK: tl.constexpr, DEPENDENT: tl.constexpr):
    """out = the sums of partials [parts, count] and a bias [outputs] for each row. Program (some numbers)."""
    launch_dependents(DEPENDENT)
    wait_for_previous(DEPENDENT)
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    held = at < count
    total = tl.zeros([BLOCK], tl.float32)
    place = partials + at
    for _ in range(parts):
        total += tl.load(place, mask=held, other=0.0)
        place += count
    if bias is not None:
        total += tl.load(bias + at % outputs, mask=held, other=0.0).to(tl.float32)
    tl.store(out + at, total.to(out.dtype.element_ty), mask=held)


def product(
    x: torch.Tensor,
    weight: Multiplied,
    bias: torch.Tensor | None,
    *,
    processors: int,
    order: SumOrder | None = None,
) -> torch.Tensor:
    """x [T, K] times weight [N, K] transposed, plus bias [N]: [T, N] in the dtype of x.

    A row's bits do not depend on the others, nor on `processors`, the number of them that the launch is to fill.
    `order` is by default that of `order_of`.
    """
    order = order or order_of(weight.shape, x.dtype)
    out = x.new_empty(len(x), weight.shape[0])
    if not out.numel():
        return out
    if not cuts(x, weight, processors, order):
        _launch(x, weight, bias, out, order, apart=False)
        return out
    partials = partial_products(x, weight, processors=processors, order=order)
    blocks = triton.cdiv(out.numel(), ADDED_AT_A_TIME)
    add_parts_kernel[(blocks,)](
        partials, bias, out, len(partials), out.numel(), weight.shape[0], BLOCK=ADDED_AT_A_TIME, num_warps=4,
        **dependent_launch_options(out.device),
    )  # fmt: skip
    return out


def partial_products(
    x: torch.Tensor, weight: Multiplied, *, processors: int, order: SumOrder | None = None
) -> torch.Tensor:
    """Partial sums [P, T, N] float32 of x [T, K] times weight [N, K] transposed, to be added up from zero in order.

    P is 1 where cutting would not fill more of the `processors`. The sum has the same bits either way. `order` is by
    default that of `order_of`.
    """
    order = order or order_of(weight.shape, x.dtype)
    apart = cuts(x, weight, processors, order)
    out = x.new_empty(order.parts if apart else 1, len(x), weight.shape[0], dtype=torch.float32)
    if out.numel():
        _launch(x, weight, None, out, order, apart=apart)
    return out


def slice_products(x: torch.Tensor, weight: Multiplied, slices: int) -> torch.Tensor:
    """Products [slices, T, N] float32 of x [T, K] with equal slices of the inputs of weight [N, K].

    See `order_on_ranks` for errors.
    """
    order = order_on_ranks(weight.shape, x.dtype, slices)
    out = x.new_empty(slices, len(x), weight.shape[0], dtype=torch.float32)
    if out.numel():
        _launch(x, weight, None, out, order, apart=True)
    return out


def cuts(x: torch.Tensor, weight: Multiplied, processors: int, order: SumOrder) -> bool:
    """Whether different programs add up the parts of each sum."""
    tiles = triton.cdiv(len(x), BLOCK_M) * triton.cdiv(weight.shape[0], BLOCK_N)
    return tiles < processors and order.parts > 1


def _launch(
    x: torch.Tensor,
    weight: Multiplied,
    bias: torch.Tensor | None,
    out: torch.Tensor,
    order: SumOrder,
    *,
    apart: bool,
    tile: Tile | None = None,
) -> None:
    """Write the product to out: a part of each sum to each of [parts, T, N] if they are `apart`, else [T, N]."""
    (outputs, inputs), rows = weight.shape, len(x)
    packed = isinstance(weight, PackedWeight)
    stored: tuple[torch.Tensor | None, ...]
    if isinstance(weight, PackedWeight):
        stored = weight.data, weight.factors, weight.extra, weight.unit
        strides, form = (0, 0), packed_constants(weight)
    else:
        stored, strides = (weight, None, None, None), (weight.stride(0), weight.stride(1))
        form = dict(FORM=0, GROUP=1, SCALE_ROWS=1)
    if x.stride(1) != 1:
        x = x.contiguous()
    stages = 4 if x.element_size() == 2 else 1
    tile = tile or Tile(BLOCK_M, BLOCK_N, 8 if packed else 4, stages)
    tiles = triton.cdiv(rows, tile.rows) * triton.cdiv(outputs, tile.outputs)
    product_kernel[(tiles, order.parts if apart else 1)](
        x,
        *stored,
        bias,
        out,
        rows,
        outputs,
        inputs,
        order.size // order.step,
        order.parts,
        x.stride(0),
        *strides,
        **form,
        APART=apart,
        EVEN=inputs % order.step == 0,
        FEW=rows <= tile.rows,
        BLOCK_M=tile.rows,
        BLOCK_N=tile.outputs,
        BLOCK_K=order.step,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        **dependent_launch_options(x.device),
        # Else a part times its units might be added to the others without being rounded, where one program adds them.
        enable_fp_fusion=stored[3] is None,
    )
