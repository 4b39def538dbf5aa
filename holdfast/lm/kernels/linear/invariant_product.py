"""Products on a GPU whose sums have one order for any number of rows."""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

from dataclasses import dataclass, field, replace
from math import gcd

import torch
import triton
import triton.language as tl

from holdfast.lm.kernels.launch import (
    dependent_launch_options,
    launch_dependents,
    shared_bytes,
    wait_for_previous,
)
from holdfast.lm.kernels.linear.library_product import EqualRows, library_pieces, multiply
from holdfast.lm.kernels.linear.packed_tile import packed_constants, packed_tile
from holdfast.lm.kernels.linear.skinny_gemm import (
    FEW,
    FEW_TOKENS,
    FEW_TOKENS_DEEP,
    LEAST_ROW_BYTES,
    MANY_OUTPUTS,
    MORE_TOKENS,
    MORE_TOKENS_CUT,
    SkinnyLaunch,
    skinny_gemm,
)
from holdfast.lm.kernels.packed import PackedWeight

BLOCK_M, BLOCK_N = 64, 128
"""Tokens and outputs of a tile. A tensor core may add up a tile of another height in another order (`Gpu.alike`)."""
PROGRAMS = 264
"""Programs into which a product with few tokens is cut: two for each processor of an H100. The number decides the order
of sums, so it is the same on all devices."""
MOST_PARTS, LEAST_STEPS = 8, 4
"""Largest number of parts of a sum, and fewest steps of a part."""
LEAST_STEP = 16
"""Fewest inputs of a tensor core's tile."""
PLAIN_UNIT, PLAIN_PART, LEAST_PLAIN_PART = 128, 8192, 512
"""For plain weights of 16 bits, inputs of which a part has a multiple, and the most and fewest of a part."""
LONG_PART = 2560
"""Fewest inputs of a part where LEAST_PROGRAMS have work. With shorter ones, prompts lose more than few tokens gain."""
PLAIN_OUTPUTS, PLAIN_PROGRAMS, LEAST_PROGRAMS = 64, 128, 32
"""Outputs of a program with few tokens, and the numbers of programs that fill a device, and that nearly keep its pace.
They decide how sums are cut."""
LARGE_SHARE = 1.5
"""Number of programs for each processor from which tiles of twice as many outputs are faster."""
FEW_ROWS = 64
"""Largest number of tokens for which `skinny_gemm` reads plain weights. It gives the bits of `product_kernel`."""
ADDED_AT_A_TIME = 1024

Multiplied = torch.Tensor | PackedWeight
"""A weight [N, K] that `product` reads."""


@dataclass(frozen=True)
class Tile:
    """The part of a product that one program computes, and how it is compiled. It does not change the bits."""

    rows: int
    outputs: int
    num_warps: int
    num_stages: int
    """Steps of the tile that are in flight at once, if the shared memory has room for them."""

    def stages_within(self, shared: int, step_bytes: int) -> int:
        """Number of steps that fit these bytes. A step has `step_bytes` for each row and output."""
        return max(1, min(self.num_stages, shared // ((self.rows + self.outputs) * step_bytes)))


@dataclass(frozen=True)
class Gpu:
    """The facts of a device that decide how products are launched on it."""

    processors: int
    """Number of processors that a launch is to fill. It does not change the bits."""
    alike: bool
    """Whether all tiles, and `skinny_gemm`, add up numbers of 16 bits alike, so that each product takes the fastest.

    Otherwise all products have one tile, and sums of another order.
    """
    equal_rows: EqualRows = field(default_factory=dict, hash=False)
    """Products that the library computes with the same bits (`equal_sums`). They are computed by it."""


@dataclass(frozen=True)
class SumOrder:
    """How a sum over the inputs of a weight is cut into parts. Each part is added up, then the parts in their order."""

    step: int
    """Inputs of a step of a tensor core's tile."""
    size: int
    """Inputs of a part; the last may have fewer."""
    parts: int


def gpu_of(device: torch.device) -> Gpu:
    """How products are launched on a device, before its tiles are compared (`equal_sums`).

    Tiles were seen to add up alike on an H200 (benchmarks/kernels/invariant_gpu.py). On other kinds of GPUs, and in
    the interpreter, all products have one tile.
    """
    if device.type != "cuda":
        return Gpu(4, alike=False)
    processors = torch.cuda.get_device_properties(device).multi_processor_count
    return Gpu(processors, alike=torch.cuda.get_device_capability(device) == (9, 0))


def order_of(weight: Multiplied, dtype: torch.dtype, gpu: Gpu, *, added: bool = False) -> SumOrder:
    """The order for a weight [N, K], read by activations of this type, on GPUs that are `alike` or not.

    `added`: who reads the parts of a sum adds them up at no extra cost, so plain weights are cut as for few tokens.
    """
    outputs, inputs = weight.shape
    if not is_plain(weight, dtype, gpu):
        return _order_of_packed(outputs, inputs, dtype)
    parts = 1
    if added:
        programs = triton.cdiv(outputs, PLAIN_OUTPUTS)
        wanted = max(round(PLAIN_PROGRAMS / programs), triton.cdiv(inputs, PLAIN_PART))
        most = max(inputs // LONG_PART, triton.cdiv(LEAST_PROGRAMS, programs))
        parts = max(1, min(MOST_PARTS, wanted, most, inputs // LEAST_PLAIN_PART))
    size = triton.cdiv(triton.cdiv(inputs, PLAIN_UNIT), parts) * PLAIN_UNIT
    return SumOrder(64, size, triton.cdiv(inputs, size))


def _order_of_packed(outputs: int, inputs: int, dtype: torch.dtype) -> SumOrder:
    """`order_of` a weight that is packed, or read by float32."""
    step = 64 if dtype.itemsize == 2 else 32
    steps, tiles = triton.cdiv(inputs, step), triton.cdiv(outputs, BLOCK_N)
    parts = max(1, min(MOST_PARTS, PROGRAMS // tiles, steps // LEAST_STEPS))
    size = triton.cdiv(steps, parts) * step
    return SumOrder(step, size, triton.cdiv(inputs, size))


def is_plain(weight: Multiplied, dtype: torch.dtype, gpu: Gpu) -> bool:
    """Whether a weight and its input are plain numbers of 16 bits, on a device that adds up all tiles alike."""
    return isinstance(weight, torch.Tensor) and dtype.itemsize == 2 and gpu.alike


def order_on_ranks(weight: Multiplied, dtype: torch.dtype, gpu: Gpu, slices: int = 0) -> SumOrder:
    """The order for a device's part [N, K] of a weight, which is the same for any number of devices.

    `slices` is the number of slices in the part, of those into which the inputs of the whole weight are cut. 0: the
    part has all inputs, and some of the outputs, whose number then decides nothing.

    Raises ValueError for slices that tensor cores cannot take.
    """
    inputs = weight.shape[1]
    if not slices:
        return order_of(weight, dtype, gpu) if is_plain(weight, dtype, gpu) else _order_of_packed(1, inputs, dtype)
    size = inputs // slices
    step = gcd(size, 64 if dtype.itemsize == 2 else 32)
    if size * slices != inputs or step < LEAST_STEP:
        raise ValueError(f"{inputs} inputs have no {slices} equal slices of a multiple of {LEAST_STEP} numbers")
    return SumOrder(step, size, slices)


@triton.jit
def part_of_tile(
    x_at, there, weight, weight_at, weight_stride_k, scale, extra, unit, read, inputs, begin, end,
    FORM: tl.constexpr, GROUP: tl.constexpr, SCALE_ROWS: tl.constexpr, EVEN: tl.constexpr, FEW: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """The sums [BLOCK_M, BLOCK_N] of one part of a tile of `product_kernel`: its steps from `begin` to `end`."""
    step = tl.arange(0, BLOCK_K)
    added = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for number in range(begin, end):
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
    return added


@triton.jit(do_not_specialize=["rows", "steps", "parts"])
def product_kernel(
    x, weight, scale, extra, unit, bias, out, rows, outputs, inputs, steps, parts, x_stride, weight_stride_n,
    weight_stride_k,
    FORM: tl.constexpr, GROUP: tl.constexpr, SCALE_ROWS: tl.constexpr, APART: tl.constexpr, EVEN: tl.constexpr,
    FEW: tl.constexpr, ONE: tl.constexpr, ADDED: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """One tile of x [rows, inputs] times a weight [outputs, inputs] transposed.

    Program (tile, part) with APART: out [parts, rows, outputs] float32 gets this part of each sum. Else program (tile):
    out [rows, outputs] gets the sums of all parts, plus the bias. The parts are added up one after the other in both
    cases, here or by who reads them, so that a sum has the same bits. EVEN: steps fill the inputs. FEW: a tile holds
    all rows, and reads no more. ONE: a program adds up one part. ADDED: the sums are added to out. With a FORM, the
    weight is a `PackedWeight`, whose numbers are rounded to the type of x, and whose units multiply each part.
    """
    launch_dependents(DEPENDENT)
    tiles_m = tl.cdiv(rows, BLOCK_M)
    tile = tl.program_id(0)
    row = tile % tiles_m * BLOCK_M + tl.arange(0, BLOCK_M)
    output = tile // tiles_m * BLOCK_N + tl.arange(0, BLOCK_N)
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
    wait_for_previous(DEPENDENT)
    all_steps = tl.cdiv(inputs, BLOCK_K)
    if ONE:  # a second sum would take as many registers
        total = part_of_tile(
            x_at, there, weight, weight_at, weight_stride_k, scale, extra, unit, read, inputs,
            first_part * steps, tl.minimum((first_part + 1) * steps, all_steps),
            FORM, GROUP, SCALE_ROWS, EVEN, FEW, BLOCK_M, BLOCK_N, BLOCK_K,
        )  # fmt: skip
    else:
        total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        for part in range(first_part, stop_part):
            total += part_of_tile(
                x_at, there, weight, weight_at, weight_stride_k, scale, extra, unit, read, inputs,
                part * steps, tl.minimum((part + 1) * steps, all_steps),
                FORM, GROUP, SCALE_ROWS, EVEN, FEW, BLOCK_M, BLOCK_N, BLOCK_K,
            )  # fmt: skip
    held = (row < rows)[:, None] & (output < outputs)[None, :]
    place = row.to(tl.int64)[:, None] * outputs + output[None, :]
    if APART:
        place += tl.program_id(1).to(tl.int64) * rows * outputs
    elif bias is not None:
        total += tl.load(bias + output, mask=output < outputs, other=0.0).to(tl.float32)[None, :]
    if ADDED:
        total += tl.load(out + place, mask=held, other=0.0).to(tl.float32)
        tl.debug_barrier()  # several threads may hold the same element
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
    gpu: Gpu,
    order: SumOrder | None = None,
) -> torch.Tensor:
    """x [T, K] times weight [N, K] transposed, plus bias [N]: [T, N] in the dtype of x.

    A row's bits depend neither on the others nor on `gpu.processors`. `order` is by default that of `order_of`.
    """
    order = order or order_of(weight, x.dtype, gpu)
    x, out = _by_rows(x), x.new_empty(len(x), weight.shape[0])
    if not out.numel():
        return out
    if not cuts(x, weight, gpu, order):
        _compute(x, weight, bias, out, order, gpu, apart=False)
        return out
    partials = partial_products(x, weight, gpu=gpu, order=order)
    blocks = triton.cdiv(out.numel(), ADDED_AT_A_TIME)
    add_parts_kernel[(blocks,)](
        partials, bias, out, len(partials), out.numel(), weight.shape[0], BLOCK=ADDED_AT_A_TIME, num_warps=4,
        **dependent_launch_options(out.device),
    )  # fmt: skip
    return out


def gated_product(x: torch.Tensor, weight: Multiplied, bias: torch.Tensor | None, *, gpu: Gpu) -> torch.Tensor | None:
    """silu(gate) * up of x [T, K] times weight [2 N, K], first gate and then up, plus bias [2 N]: [T, N].

    It has the bits of `product` and then `silu_mul`. None for weights, or numbers of rows, without such a kernel.
    """
    launch = skinny_launch(x, weight, order_of(weight, x.dtype, gpu), gpu)
    if launch is None or not isinstance(weight, torch.Tensor):
        return None
    out = x.new_empty(len(x), weight.shape[0] // 2)
    skinny_gemm(x, weight, bias, out[None], launch, gated=True, fixed=True)
    return out


def partial_products(x: torch.Tensor, weight: Multiplied, *, gpu: Gpu, order: SumOrder | None = None) -> torch.Tensor:
    """Partial sums [P, T, N] float32 of x [T, K] times weight [N, K] transposed, to be added up from zero in order.

    P is 1 where cutting would not fill more of the processors. The sum has the same bits either way. `order` is by
    default that of `order_of`, for parts that the reader adds up.
    """
    order = order or order_of(weight, x.dtype, gpu, added=True)
    x = _by_rows(x)
    apart = cuts(x, weight, gpu, order)
    out = x.new_empty(order.parts if apart else 1, len(x), weight.shape[0], dtype=torch.float32)
    if out.numel():
        _compute(x, weight, None, out if apart else out[0], order, gpu, apart=apart)
    return out


def add_product(
    stream: torch.Tensor, x: torch.Tensor, weight: Multiplied, bias: torch.Tensor | None, *, gpu: Gpu
) -> bool:
    """Add x [T, K] times weight [N, K] transposed, plus bias [N], to the stream [T, N] in place, if one kernel can.

    Returns False, and does nothing, where another kernel computes `partial_products`. The bits are those of adding
    their sum and the bias to the stream in float32, in this order, and rounding once.
    """
    order = order_of(weight, x.dtype, gpu, added=True)
    x = _by_rows(x)
    if not stream.numel() or not stream.is_contiguous() or cuts(x, weight, gpu, order):
        return False
    launch = launch_of(x, weight, order, gpu, apart=False)
    pieces = _by_library(x, weight, bias, stream, order, gpu, apart=False, added=True)
    for rows in pieces:
        assert isinstance(weight, torch.Tensor)
        multiply(x[rows], weight, stream[rows], order.size, added=True)
    if pieces:
        return True
    sums = stream.new_empty(0, dtype=torch.float32)
    if isinstance(launch, SkinnyLaunch) or _by_library(x, weight, None, sums, order, gpu, apart=False):
        return False
    run(x, weight, bias, stream, order, launch, apart=False, added=True)
    return True


def slice_products(x: torch.Tensor, weight: Multiplied, slices: int, *, gpu: Gpu) -> torch.Tensor:
    """Products [slices, T, N] float32 of x [T, K] with equal slices of the inputs of weight [N, K].

    See `order_on_ranks` for errors.
    """
    order = order_on_ranks(weight, x.dtype, gpu, slices)
    x, out = _by_rows(x), x.new_empty(slices, len(x), weight.shape[0], dtype=torch.float32)
    if out.numel():
        _compute(x, weight, None, out, order, gpu, apart=True)
    return out


def _compute(
    x: torch.Tensor,
    weight: Multiplied,
    bias: torch.Tensor | None,
    out: torch.Tensor,
    order: SumOrder,
    gpu: Gpu,
    *,
    apart: bool,
) -> None:
    """`run`, by the fastest of the library and this project's kernels."""
    pieces = _by_library(x, weight, bias, out, order, gpu, apart=apart)
    for rows in pieces:
        assert isinstance(weight, torch.Tensor)
        multiply(x[rows], weight, out[..., rows, :], order.size)
    if not pieces:
        run(x, weight, bias, out, order, launch_of(x, weight, order, gpu, apart=apart), apart=apart)


def _by_library(
    x: torch.Tensor,
    weight: Multiplied,
    bias: torch.Tensor | None,
    out: torch.Tensor,
    order: SumOrder,
    gpu: Gpu,
    *,
    apart: bool,
    added: bool = False,
) -> list[slice]:
    """The ranges of rows that the library computes one after the other; empty if it does not compute the product.

    Parts of few rows have programs of their own, which are faster, and no bias is compared.
    """
    if bias is not None or not is_plain(weight, x.dtype, gpu) or not takes_library(len(x), weight, order, gpu):
        return []
    assert isinstance(weight, torch.Tensor)
    return library_pieces(x, weight, out, order.size, apart, gpu.equal_rows, added)


def takes_library(rows: int, weight: Multiplied, order: SumOrder, gpu: Gpu) -> bool:
    """Whether the library may compute this many rows of plain numbers, if its bits are equal."""
    return rows > FEW_ROWS and (order.parts == 1 or _tiles(rows, weight) >= gpu.processors)


def _by_rows(x: torch.Tensor) -> torch.Tensor:
    """x with the numbers of a row next to each other, as kernels read them."""
    return x if x.stride(1) == 1 else x.contiguous()


def cuts(x: torch.Tensor, weight: Multiplied, gpu: Gpu, order: SumOrder) -> bool:
    """Whether different programs add up the parts of each sum."""
    few = _tiles(len(x), weight) < gpu.processors
    return order.parts > 1 and (few or skinny_launch(x, weight, order, gpu) is not None)


def _tiles(rows: int, weight: Multiplied) -> int:
    """Number of small tiles of a product."""
    return -(-rows // BLOCK_M) * -(-weight.shape[0] // BLOCK_N)


def launch_of(x: torch.Tensor, weight: Multiplied, order: SumOrder, gpu: Gpu, *, apart: bool) -> SkinnyLaunch | Tile:
    """The launch of a product of x [T, K] and weight [N, K]: that of `skinny_gemm` where it can be, else a tile.

    It reads no numbers, so the tensors may be on no device.
    """
    few = skinny_launch(x, weight, order, gpu) if apart or order.parts == 1 else None
    return few or tile_for(len(x), weight, x.dtype, gpu=gpu, parts=order.parts if apart else 1)


def skinny_launch(x: torch.Tensor, weight: Multiplied, order: SumOrder, gpu: Gpu) -> SkinnyLaunch | None:
    """The launch of `skinny_gemm` with this order of sums; None if `product_kernel` computes them.

    Tuned on an H200 (benchmarks/kernels/invariant_gpu.py).
    """
    rows, inputs = x.shape
    if not is_plain(weight, x.dtype, gpu) or not 0 < rows <= FEW_ROWS or 2 * inputs < LEAST_ROW_BYTES:
        return None
    assert isinstance(weight, torch.Tensor)
    if weight.stride(1) != 1 or x.stride(1) != 1:
        return None
    outputs, launch = weight.shape[0], FEW_TOKENS_DEEP
    if order.parts == 1 and outputs >= MANY_OUTPUTS:
        launch = FEW_TOKENS if rows <= FEW else MORE_TOKENS
    elif order.parts > 1 and rows > FEW:
        programs = triton.cdiv(outputs, FEW_TOKENS.block_n) * order.parts
        launch = FEW_TOKENS if programs <= PLAIN_PROGRAMS else MORE_TOKENS_CUT
    launch = replace(launch, parts=order.parts)
    if launch.part_length(inputs) != order.size:  # parts have whole steps of PLAIN_UNIT inputs, but perhaps not its own
        launch = replace(FEW_TOKENS, parts=order.parts)
    return launch if order.parts == 1 or launch.part_length(inputs) == order.size else None


def the_tile(weight: Multiplied, dtype: torch.dtype) -> Tile:
    """The one tile of all products with a weight where tiles may not add up alike."""
    if dtype.itemsize > 2:
        return Tile(BLOCK_M, BLOCK_N, 4, 1)
    return Tile(BLOCK_M, BLOCK_N, 4 if isinstance(weight, torch.Tensor) else 8, 4)


def tile_for(rows: int, weight: Multiplied, dtype: torch.dtype, *, gpu: Gpu, parts: int = 1) -> Tile:
    """The tile of `product_kernel`, whose sums are cut into `parts` programs.

    It is the same for any number of rows where it may decide the bits. Tuned on an H200
    (benchmarks/kernels/invariant_gpu.py).
    """
    small = the_tile(weight, dtype)
    if not is_plain(weight, dtype, gpu):
        return small
    outputs, processors = weight.shape[0], gpu.processors

    def programs(tile: Tile) -> int:
        return -(-rows // tile.rows) * -(-outputs // tile.outputs) * parts

    if rows <= BLOCK_M or programs(small) <= processors:
        return replace(small, num_stages=6) if programs(small) <= processors else small
    if parts > 1 and programs(small) <= 2 * processors:  # two of them fit a processor
        return small
    middle, large = Tile(2 * BLOCK_M, BLOCK_N, 8, 4), Tile(2 * BLOCK_M, 2 * BLOCK_N, 8, 4)
    return large if programs(large) >= LARGE_SHARE * processors else middle


def run(
    x: torch.Tensor,
    weight: Multiplied,
    bias: torch.Tensor | None,
    out: torch.Tensor,
    order: SumOrder,
    launch: SkinnyLaunch | Tile,
    *,
    apart: bool,
    added: bool = False,
) -> None:
    """Write the product to out: a part of each sum to each of [parts, T, N] if they are `apart`, else [T, N].

    The numbers of a row of x are next to each other. A `SkinnyLaunch` takes plain weights, and sums that are `apart` or
    have one part. `out` has any float dtype. `added`: a tile adds whole sums to out.
    """
    if isinstance(launch, SkinnyLaunch):
        assert isinstance(weight, torch.Tensor)
        skinny_gemm(x, weight, bias, out if apart else out.view(1, len(x), -1), launch, fixed=True)
        return
    (outputs, inputs), rows = weight.shape, len(x)
    stored: tuple[torch.Tensor | None, ...]
    if isinstance(weight, PackedWeight):
        stored = weight.data, weight.factors, weight.extra, weight.unit
        strides, form = (0, 0), packed_constants(weight)
    else:
        stored, strides = (weight, None, None, None), (weight.stride(0), weight.stride(1))
        form = dict(FORM=0, GROUP=1, SCALE_ROWS=1)
    tiles = triton.cdiv(rows, launch.rows) * triton.cdiv(outputs, launch.outputs)
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
        FEW=rows <= launch.rows,
        ONE=apart or order.parts == 1,
        ADDED=added,
        BLOCK_M=launch.rows,
        BLOCK_N=launch.outputs,
        BLOCK_K=order.step,
        num_warps=launch.num_warps,
        num_stages=launch.stages_within(shared_bytes(x.device), order.step * x.element_size()),
        **dependent_launch_options(x.device),
        # Else a part times its units might be added to the others without being rounded, where one program adds them.
        enable_fp_fusion=stored[3] is None,
    )
