"""Finds out on a device whether the kernels of its products add up a sum alike, before the first step.

`invariant_product` computes a product by the tile, or the skinny GEMM, that is fastest for its rows. That keeps the
bits only where all of them add up a sum in one order, which no document of a GPU promises. So the sums of random
numbers are compared, bit for bit, for each shape of weight and each kernel that may read it. Products of many rows are
faster by PyTorch's library, whose own order is compared next, for each number of rows.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache, partial

import torch
import triton

from holdfast.core.version import __version__
from holdfast.lm.kernels.fp8 import Weight
from holdfast.lm.kernels.linear.fused_layers import silu_mul
from holdfast.lm.kernels.linear.invariant_product import (
    Gpu,
    SumOrder,
    Tile,
    cuts,
    launch_of,
    order_of,
    order_on_ranks,
    run,
    skinny_launch,
    takes_library,
    the_tile,
)
from holdfast.lm.kernels.linear.library_product import MOST_SUM_BYTES, ROWS, EqualRows, LibraryKind, multiply
from holdfast.lm.kernels.linear.skinny_gemm import SkinnyLaunch, skinny_gemm
from holdfast.lm.kernels.stacked import StackedWeight

log = logging.getLogger("holdfast.engine")

LOOKED_UP = (*range(1, 66), *range(129, 1024, 64), *(1 << power for power in range(10, 21)))
"""Numbers of tokens for which kernels are looked up. One tile takes over from another over at least a doubling."""
COMPARED_ROWS = 257
"""Most rows of a comparison: two tiles of the largest height, and a row of a third."""
COMPARED_OUTPUTS = 320
"""Most outputs of a comparison: a tile of the largest width, and a part of a second."""
SMALL = 2.0**-20
"""About the size of rounding errors of the sums that cancel in a comparison."""
LARGEST_WEIGHT, LARGEST_OUTPUT = 1 << 30, 1 << 29
"""Most bytes of a weight, and of a product, for which the library is compared. That takes about four times as many."""


@dataclass(frozen=True)
class Shape:
    """The shape of a plain weight, whose products are compared."""

    outputs: int
    inputs: int
    by_rows: bool
    """Whether the numbers of a row are next to each other; else those of a column are."""

    def drawn(self, outputs: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Random numbers in the layout of such a weight, for this many of the outputs. On the device `meta`, none."""
        size = (outputs, self.inputs) if self.by_rows else (self.inputs, outputs)
        found = _random(*size, dtype=dtype, device=device).mul_(self.inputs**-0.5)
        return found if self.by_rows else found.t()


@dataclass(frozen=True)
class Way:
    """A kernel that may compute a product."""

    launch: SkinnyLaunch | Tile
    apart: bool
    """Whether it writes each part of a sum; else it writes their sum."""
    height: int
    """Rows that its program has room for; 0 for a tile with several programs, which is compiled in another way."""


def adds_alike(weights: Iterable[Weight], dtype: torch.dtype, gpu: Gpu, slices: int = 0) -> bool:
    """Whether all kernels that read these weights add up a sum with the same bits. If not, a warning says which differ.

    `dtype` is that of the activations. `slices` is `order_on_ranks`'s; 0: sums are not cut for several ranks. Packed
    weights are left out, as they have one tile. The outcome for a shape is kept for the life of the process.
    """
    found = _compared(weights, dtype)
    if not found:
        return True
    device, shapes = found[0].device, _shapes(found)
    compared = partial(_differing, dtype=dtype, device=device, gpu=gpu, slices=slices)
    if device.type == "cuda":
        # Imported here because it takes a GPU's driver. It compiles kernels in several processes.
        from holdfast.lm.kernels.compilation import compile_once

        launch = partial(_launch_all, tuple(shapes), dtype=dtype, device=device, gpu=gpu, slices=slices)
        capability = torch.cuda.get_device_capability(device)
        compile_once(launch, "equal sums", __version__, capability, dtype, gpu, slices, *shapes)
    differing = {shape: names for shape in shapes if (names := compared(shape))}
    for shape, names in differing.items():
        log.warning(
            "holdfast: on this %s, sums of %d inputs in %s have other bits by %s than by the tile of %s. So "
            "deterministic products have that tile alone, which takes longer",
            torch.cuda.get_device_name(device) if device.type == "cuda" else device.type, shape.inputs,
            str(dtype).removeprefix("torch."), " and ".join(names), the_tile(found[0], dtype),
        )  # fmt: skip
    return not differing


def rows_of_library(weights: Iterable[Weight], dtype: torch.dtype, gpu: Gpu, slices: int = 0) -> EqualRows:
    """The products with these weights, and numbers of rows, that the library computes with the bits of these kernels.

    The arguments are those of `adds_alike`, which has found its kernels alike. A line of the log names the numbers of
    rows at which the library has other bits. The outcome for a shape is kept for the life of the process.
    """
    equal: dict[LibraryKind, tuple[int, ...]] = {}
    found = _compared(weights, dtype)
    for shape in _shapes(found):
        for kind, (order, rows) in _kinds_of_library(shape, dtype, gpu, slices).items():
            try:
                differing = _differing_in_library(kind, order, rows, found[0].device, gpu)
            except torch.OutOfMemoryError:
                log.info("holdfast: no memory is left to compare %s, so the library computes none", _words(kind))
                continue
            if differing:
                log.info(
                    "holdfast: the library has other bits for %s and %s rows, so kernels of Holdfast compute those",
                    _words(kind), ", ".join(map(str, differing)),
                )  # fmt: skip
            equal[kind] = tuple(each for each in rows if each not in differing)
    return equal


def _words(kind: LibraryKind) -> str:
    """The kind of product, in words."""
    cut = f" in parts of {kind.part}" if kind.parts > 1 else ""
    what = "added sums" if kind.added else "sums"
    return f"{what} of {kind.inputs} inputs{cut} in {str(kind.dtype).removeprefix('torch.')}, {kind.outputs} outputs"


def _kinds_of_library(
    shape: Shape, dtype: torch.dtype, gpu: Gpu, slices: int
) -> dict[LibraryKind, tuple[SumOrder, tuple[int, ...]]]:
    """The products with a weight that the library may compute: the order of their sums and their rows, ascending."""
    found: dict[LibraryKind, tuple[SumOrder, tuple[int, ...]]] = {}
    weight = shape.drawn(shape.outputs, dtype, torch.device("meta"))
    if not shape.by_rows or weight.nbytes > LARGEST_WEIGHT:
        return found
    for number, order in enumerate(_orders(weight, dtype, gpu, slices)):
        apart = bool(number and slices)
        kind = LibraryKind(shape.outputs, shape.inputs, order.size, dtype, number > 0, apart)
        in_place = [kind._replace(wide=False, added=True)] if kind.wide and kind.parts == 1 and not slices else []
        for each in (kind, *in_place):
            item = torch.float32.itemsize if each.wide else dtype.itemsize
            most = LARGEST_OUTPUT // (shape.outputs * item * (each.parts if apart else 1))
            if each.parts > 1 and not apart:
                most = min(most, MOST_SUM_BYTES // (4 * shape.outputs))
            rows = tuple(count for count in ROWS if count <= most and takes_library(count, weight, order, gpu))
            if each.fits and rows:
                found[each] = order, rows
    return found


@cache
@torch.inference_mode()
def _differing_in_library(
    kind: LibraryKind, order: SumOrder, rows: tuple[int, ...], device: torch.device, gpu: Gpu
) -> tuple[int, ...]:
    """The numbers of rows at which the library's bits differ from those of this project's kernels.

    The products are whole, as the library's kernel depends on all sizes. Rounding to 16 bits would hide most
    differences, so in every second row, and in each part of a sum, the numbers cancel and rounding errors are left.
    """
    weight = _random(kind.outputs, kind.inputs, dtype=kind.dtype, device=device).mul_(kind.inputs**-0.5)
    x = _random(rows[-1], kind.inputs, dtype=kind.dtype, device=device)
    for begin in range(0, kind.inputs, kind.part):
        half = min(kind.part, kind.inputs - begin) // 2
        one, other = slice(begin, begin + half), slice(begin + half, begin + 2 * half)
        weight[:, other] = weight[:, one]
        x[1::2, other] = -x[1::2, one]
    out = _room_for_sums(kind, x)
    wanted = _own_sums(kind, order, x, weight, out.clone(), gpu)
    differing = []
    for count in rows:
        found = out[..., :count, :].clone(memory_format=torch.contiguous_format)
        multiply(x[:count], weight, found, kind.part, added=kind.added)
        if not torch.equal(found, wanted[..., :count, :]):
            differing.append(count)
    return tuple(differing)


def _room_for_sums(kind: LibraryKind, x: torch.Tensor) -> torch.Tensor:
    """Memory for a product, as `multiply` writes it. If sums are added to it, it has numbers of their size."""
    if kind.added:
        stream = _random(len(x), kind.outputs, dtype=kind.dtype, device=x.device)
        stream[1::2] *= SMALL
        return stream
    sizes = (kind.parts,) if kind.apart else ()
    return x.new_empty(*sizes, len(x), kind.outputs, dtype=torch.float32 if kind.wide else kind.dtype)


def _own_sums(
    kind: LibraryKind, order: SumOrder, x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor, gpu: Gpu
) -> torch.Tensor:
    """The product by this project's kernels, written to out as by `multiply`."""
    launch = launch_of(x, weight, order, gpu, apart=kind.apart)
    run(x, weight, None, out, order, launch, apart=kind.apart, added=kind.added)
    return out


def _compared(weights: Iterable[Weight], dtype: torch.dtype) -> list[torch.Tensor]:
    """The weights whose products are compared: of plain numbers of 16 bits, in the activations' type."""
    return [each for each in _plain(weights) if each.dtype == dtype and dtype.itemsize == 2]


def _shapes(weights: Iterable[torch.Tensor]) -> list[Shape]:
    """The shapes of these weights, each once."""
    return [*dict.fromkeys(Shape(each.shape[0], each.shape[1], each.stride(1) == 1) for each in weights)]


def _plain(weights: Iterable[Weight]) -> Iterator[torch.Tensor]:
    """The matrices of plain numbers among these weights, and among the parts of stacks."""
    for weight in weights:
        if isinstance(weight, StackedWeight):
            yield from _plain(weight.parts)  # type: ignore[arg-type]  # its parts are weights
        elif isinstance(weight, torch.Tensor) and weight.dim() == 2 and weight.numel():
            yield weight


def _launch_all(shapes: Iterable[Shape], *, dtype: torch.dtype, device: torch.device, gpu: Gpu, slices: int) -> None:
    """Launch the kernels of all comparisons, whatever they compute."""
    for shape in shapes:
        list(_results(shape, dtype, device, gpu, slices))
        for kind, (order, rows) in _kinds_of_library(shape, dtype, gpu, slices).items():
            weight = torch.empty(kind.outputs, kind.inputs, dtype=dtype, device=device)
            x = weight.new_empty(rows[-1], kind.inputs)
            _own_sums(kind, order, x, weight, _room_for_sums(kind, x), gpu)


@cache
def _differing(shape: Shape, *, dtype: torch.dtype, device: torch.device, gpu: Gpu, slices: int) -> tuple[str, ...]:
    """The kernels whose sums differ from those of the one tile, in words."""
    results = _results(shape, dtype, device, gpu, slices)
    return tuple(dict.fromkeys(name for name, found, wanted in results if not torch.equal(found, wanted)))


@torch.inference_mode()
def _results(
    shape: Shape, dtype: torch.dtype, device: torch.device, gpu: Gpu, slices: int
) -> Iterator[tuple[str, torch.Tensor, torch.Tensor]]:
    """For each kernel and order of sums, its name, its sums, and those of the one tile, which should have their bits.

    Sums are compared in float32, as rounding to 16 bits would hide most differences. A weight of few outputs takes the
    place of the whole one, which would take as much memory again.
    """
    outputs = shape.outputs
    if outputs > COMPARED_OUTPUTS:
        outputs = COMPARED_OUTPUTS + outputs % 16  # kernels are compiled anew for numbers that 16 does not divide
    weight = shape.drawn(outputs, dtype, device)
    x = _random(COMPARED_ROWS, shape.inputs, dtype=dtype, device=device)
    for order, ways in _ways(shape, dtype, gpu, slices).items():
        parts = x.new_empty(order.parts, len(x), outputs, dtype=torch.float32)
        run(x, weight, None, parts, order, the_tile(weight, dtype), apart=True)
        whole = torch.zeros_like(parts[0])
        for part in parts:
            whole += part
        for way, several in ways.items():
            for rows in {min(each, COMPARED_ROWS) for each in several}:
                found = parts.new_empty(order.parts if way.apart else 1, rows, outputs)
                run(x[:rows], weight, None, found if way.apart else found[0], order, way.launch, apart=way.apart)
                yield str(way.launch), found, parts[:, :rows] if way.apart else whole[None, :rows]
        for rows, launch in _gated(shape, order, dtype, gpu).items():
            if outputs % 2 == 0:
                found = x.new_empty(1, rows, outputs // 2)
                skinny_gemm(x[:rows], weight, None, found, launch, gated=True, fixed=True)
                yield f"gated {launch}", found[0], silu_mul(whole[:rows].to(dtype))


def _orders(weight: torch.Tensor, dtype: torch.dtype, gpu: Gpu, slices: int) -> list[SumOrder]:
    """The orders of sums over the inputs of a weight: of a product, and of one that is added to the stream."""
    if not slices:
        return [order_of(weight, dtype, gpu), order_of(weight, dtype, gpu, added=True)]
    found = [order_on_ranks(weight, dtype, gpu)]
    try:
        return [*found, order_on_ranks(weight, dtype, gpu, slices)]
    except ValueError:  # it is no weight that adds to the stream: those can be cut (`check_same_bits`)
        return found


def _ways(shape: Shape, dtype: torch.dtype, gpu: Gpu, slices: int) -> dict[SumOrder, dict[Way, list[int]]]:
    """By order of sums, the kernels that may compute a product, and the least and the most rows of each."""
    nowhere = torch.device("meta")
    weight = shape.drawn(shape.outputs, dtype, nowhere)
    rows = torch.empty(max(LOOKED_UP), shape.inputs, dtype=dtype, device=nowhere)
    found: dict[SumOrder, dict[Way, list[int]]] = {}
    for number, order in enumerate(_orders(weight, dtype, gpu, slices)):
        ways = found.setdefault(order, {})
        for count in LOOKED_UP:
            x = rows[:count]
            apart = number > 0 if slices else cuts(x, weight, gpu, order)
            launch = launch_of(x, weight, order, gpu, apart=apart)
            way = Way(launch, apart, _height(launch, count))
            ways[way] = [min(count, *ways.get(way, [count])), max(count, *ways.get(way, [count]))]
    return found


def _height(launch: SkinnyLaunch | Tile, rows: int) -> int:
    """`Way.height` for this number of rows."""
    if isinstance(launch, SkinnyLaunch):
        return max(16, int(triton.next_power_of_2(rows)))
    return launch.rows if rows <= launch.rows else 0


def _gated(shape: Shape, order: SumOrder, dtype: torch.dtype, gpu: Gpu) -> dict[int, SkinnyLaunch]:
    """The launches of `gated_product`, by numbers of rows for which each is compiled anew; empty if it cuts sums."""
    weight = shape.drawn(shape.outputs, dtype, torch.device("meta"))
    found: dict[int, SkinnyLaunch] = {}
    for rows in (1, 16, 32, 64):
        launch = skinny_launch(weight[:1].expand(rows, -1), weight, order, gpu) if order.parts == 1 else None
        if launch is not None:
            found[rows] = launch
    return found


def _random(*size: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Random numbers, the same for a size; on the device `meta` none."""
    if device.type == "meta":
        return torch.empty(size, dtype=dtype, device=device)
    generator = torch.Generator(device).manual_seed(size[0])
    return torch.randn(size, generator=generator, dtype=dtype, device=device)
