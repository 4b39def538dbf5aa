"""Products with one order of sums on a GPU: which tiles give the same bits, and how long each takes next to cuBLAS.

    python -m benchmarks.kernels.invariant_gpu [--shapes 1b 8b] [--rows 32 64 128 256 2048] [--json FILE]
    python -m benchmarks.kernels.invariant_gpu --weights down --parts 2 --rows 32 64 2048

First come the numbers of rows at which cuBLAS has the bits of an engine's kernels (`equal_sums.rows_of_library`), and
how long it took to find them. Then, for each weight of a Llama of that size and each number of rows, a product is timed
by cuBLAS, by cuBLAS with the same parts (`library`), by `product_kernel` with several tiles, and for few rows by
`skinny_gemm_kernel` with the same parts. `--quick` takes only the tiles that engines have. Times are of CUDA graphs
over more weights than the L2 cache holds. The bits of each are compared with those of the first tile. Prints a line for
each weight and number of rows as it is measured: the tile, us, and `=` for the same bits or `!` for others. A name's
end is the number of parts that have programs of their own.
"""

from __future__ import annotations

import argparse
import json
import logging
import statistics
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise, product
from pathlib import Path
from typing import Any

import torch
import triton

from benchmarks.lib.invocation import provenance
from holdfast.lm.kernels.launch import dependent_launch_options
from holdfast.lm.kernels.linear.equal_sums import adds_alike, rows_of_library
from holdfast.lm.kernels.linear.invariant_product import FEW_ROWS, SumOrder, Tile, gpu_of, order_of, run
from holdfast.lm.kernels.linear.library_product import ROWS, multiply
from holdfast.lm.kernels.linear.skinny_gemm import SkinnyLaunch, skinny_gemm_kernel

SHAPES = {
    "1b": {"qkv": (3072, 2048), "o": (2048, 2048), "gate_up": (16384, 2048), "down": (2048, 8192)},
    "8b": {"qkv": (6144, 4096), "o": (4096, 4096), "gate_up": (28672, 4096), "down": (4096, 14336),
           "head": (128256, 4096)},
}  # fmt: skip
"""Outputs and inputs of the weights of Llama-3.2-1B and Llama-3-8B."""
ADDED_BY_NORM = ("o", "down")
TILES = (
    Tile(64, 128, 4, 4), Tile(64, 128, 4, 6), Tile(64, 64, 4, 6), Tile(64, 256, 8, 4), Tile(128, 128, 8, 4),
    Tile(128, 128, 4, 3), Tile(128, 256, 8, 3), Tile(128, 256, 8, 4), Tile(256, 128, 8, 3),
)  # fmt: skip
ENGINES_TILES = (Tile(64, 128, 4, 4), Tile(64, 128, 4, 6), Tile(128, 128, 8, 4), Tile(128, 256, 8, 4))
SKINNY = (
    SkinnyLaunch(64, 128, 4, 4), SkinnyLaunch(64, 128, 4, 6), SkinnyLaunch(128, 128, 8, 4), SkinnyLaunch(128, 64, 4, 6),
    SkinnyLaunch(32, 128, 4, 6), SkinnyLaunch(32, 256, 4, 4), SkinnyLaunch(32, 256, 8, 4),
)  # fmt: skip
RING_BYTES = 160 << 20
"""Bytes of weights that pass before one is read again."""
MOST_SKINNY = 64
ROUNDS = 5


def order_for(inputs: int, parts: int) -> SumOrder:
    size = triton.cdiv(inputs // 64, parts) * 64
    return SumOrder(64, size, triton.cdiv(inputs, size))


def by_tile(x: torch.Tensor, weight: torch.Tensor, order: SumOrder, tile: Tile, apart: bool) -> torch.Tensor:
    dtype = torch.float32 if order.parts > 1 else x.dtype
    out = x.new_empty(order.parts if apart else 1, len(x), len(weight), dtype=dtype)
    run(x, weight, None, out, order, tile, apart=apart)
    return out


def by_skinny(x: torch.Tensor, weight: torch.Tensor, order: SumOrder, launch: SkinnyLaunch) -> torch.Tensor:
    rows, (outputs, inputs) = len(x), weight.shape
    out = x.new_empty(order.parts, rows, outputs, dtype=torch.float32 if order.parts > 1 else x.dtype)
    skinny_gemm_kernel[(triton.cdiv(outputs, launch.block_n), order.parts)](
        x, None, weight, None, None, out, rows, outputs, inputs, order.size, x.stride(0), weight.stride(0),
        out.stride(0), out.stride(1), 0.0, GATED=False, ADDED=False, ROUNDED=True, SCALE_ROWS=1, GROUP=0,
        BLOCK_M=max(16, triton.next_power_of_2(rows)), **launch.options(inputs), **dependent_launch_options(x.device),
    )  # fmt: skip
    return out


def by_library(x: torch.Tensor, weight: torch.Tensor, order: SumOrder) -> torch.Tensor:
    out = x.new_empty(len(x), len(weight), dtype=torch.float32 if order.parts > 1 else x.dtype)
    multiply(x, weight, out, order.size)
    return out[None]


def joined(partials: torch.Tensor) -> torch.Tensor:
    total = torch.zeros_like(partials[0])
    for part in partials:
        total += part
    return total


def microseconds(call: Callable[[torch.Tensor], object], ring: list[torch.Tensor]) -> float:
    """Time of one call in a graph of one for each weight of the ring, median of some."""
    call(ring[0])
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for weight in ring:
            call(weight)
    graph.replay()
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(ROUNDS + 1)]
    for mark in marks[:-1]:
        mark.record()
        graph.replay()
    marks[-1].record()
    torch.cuda.synchronize()
    return 1e3 * statistics.median(one.elapsed_time(two) for one, two in pairwise(marks)) / len(ring)


def calls(
    rows: int, order: SumOrder, tiles: Sequence[Tile]
) -> dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]]:
    """The ways to compute a product of this many rows, by name."""
    found: dict[str, Any] = {}
    for tile in tiles:
        if tile.rows > max(64, 2 * rows):
            continue
        name = f"{tile.rows}x{tile.outputs}w{tile.num_warps}s{tile.num_stages}"
        found[name] = lambda x, weight, tile=tile: by_tile(x, weight, order, tile, False)
        if order.parts > 1 and rows <= 256:
            found[f"{name}/{order.parts}"] = lambda x, weight, tile=tile: by_tile(x, weight, order, tile, True)
    if rows > FEW_ROWS:
        found["library"] = lambda x, weight: by_library(x, weight, order)
    for launch in SKINNY if rows <= MOST_SKINNY else ():
        name = f"skinny{launch.block_n}x{launch.block_k}w{launch.num_warps}s{launch.num_stages}/{order.parts}"
        found[name] = lambda x, weight, launch=launch: by_skinny(x, weight, order, launch)
    return found


def measured(
    weights: list[torch.Tensor], rows: int, order: SumOrder, tiles: Sequence[Tile]
) -> dict[str, tuple[float, str]]:
    """Microseconds of each way, and whether it gives the first one's bits, the fastest first."""
    x = torch.randn(rows, weights[0].shape[1], device="cuda", dtype=torch.bfloat16)
    ways = calls(rows, order, tiles)
    found = {}

    def compiled(name: str) -> str:
        try:
            with torch.cuda.device(x.device):  # a new thread has chosen none
                ways[name](x, weights[0])
        except Exception as error:  # a tile that does not fit the shared memory, say
            return type(error).__name__
        return ""

    with ThreadPoolExecutor(12) as pool:
        failures = dict(zip(ways, pool.map(compiled, ways), strict=True))
    wanted = joined(next(iter(ways.values()))(x, weights[0]))
    plain = torch.mm(x, weights[0].t())
    same = " " if order.parts > 1 else "=" if torch.equal(plain, wanted) else "!"  # it has one part, if it cuts nothing
    found["cublas"] = microseconds(lambda weight: torch.mm(x, weight.t()), weights), same
    for name, way in ways.items():
        if failures[name]:
            print(f"    {name}: {failures[name]}", flush=True)
            continue
        same = "=" if torch.equal(joined(way(x, weights[0])), wanted) else "!"
        found[name] = microseconds(lambda weight, way=way: way(x, weight), weights), same
    return dict(sorted(found.items(), key=lambda item: item[1][0]))


def compare(shape: str) -> None:
    """Print at which numbers of rows the library has the bits of an engine's kernels, for all weights of a shape."""
    weights = [torch.empty(size, device="cuda", dtype=torch.bfloat16) for size in SHAPES[shape].values()]
    gpu = gpu_of(weights[0].device)
    began = time.perf_counter()
    alike = adds_alike(weights, torch.bfloat16, gpu)
    torch.cuda.synchronize()
    print(f"{shape}: kernels add up {'alike' if alike else 'unlike'}, {time.perf_counter() - began:.2f} s", flush=True)
    began = time.perf_counter()
    equal = rows_of_library(weights, torch.bfloat16, gpu)
    torch.cuda.synchronize()
    print(f"{shape}: the library was compared in {time.perf_counter() - began:.2f} s", flush=True)
    for kind, rows in equal.items():
        others = [each for each in ROWS if each not in rows]
        print(f"  {kind.outputs} x {kind.inputs}, {kind.parts} parts: equal at {len(rows)} of {len(ROWS)} numbers of "
              f"rows; not at, or not compared: {others}", flush=True)  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=[*SHAPES])
    parser.add_argument("--rows", nargs="+", type=int, default=[32, 64, 128, 256, 2048])
    parser.add_argument("--weights", nargs="+", choices=SHAPES["8b"], default=[*SHAPES["8b"]])
    parser.add_argument("--parts", nargs="+", type=int, help="parts of the sums that a norm adds to the stream")
    parser.add_argument("--quick", action="store_true", help="only the tiles that engines have")
    parser.add_argument("--json", type=Path, help="file for the results")
    args = parser.parse_args()
    torch.manual_seed(0)
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    for shape in args.shapes:
        compare(shape)
    report = []
    for shape in args.shapes:
        for name, (outputs, inputs) in SHAPES[shape].items():
            if name not in args.weights:
                continue
            count = max(1, RING_BYTES // (2 * outputs * inputs))
            weights = [torch.randn(outputs, inputs, device="cuda", dtype=torch.bfloat16) for _ in range(count)]
            added = name in ADDED_BY_NORM
            orders = [order_of(weights[0], torch.bfloat16, gpu_of(weights[0].device), added=added)]
            if added and args.parts:
                orders = [order_for(inputs, parts) for parts in args.parts]
            for rows, order in product(args.rows, orders):
                found = measured(weights, rows, order, ENGINES_TILES if args.quick else TILES)
                report.append({"shape": shape, "weight": name, "rows": rows, "parts": order.parts, "ways": found})
                line = "  ".join(f"{way} {us:.1f}{same}" for way, (us, same) in found.items())
                print(f"{shape} {name} {rows} rows, {order.parts} parts: {line}", flush=True)
    if args.json is not None:
        args.json.write_text(json.dumps({**provenance(), "results": report}, indent=1) + "\n")


if __name__ == "__main__":
    main()
