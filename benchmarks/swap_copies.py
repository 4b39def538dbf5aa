"""Ways to copy scattered blocks between the tiers: how fast each is, and what it costs a computation beside it.

usage: python benchmarks/swap_copies.py [--json FILE] [--blocks 48 256]

The cache is a Llama-3-8B's: a block of one layer's keys or values is 32 KB, apart from the next. Each way copies the
same random blocks, alone and beside a computation in CUDA graphs (the linear layers of that shape over 32 and over
1,024 tokens). Hidden is the share of the copy's time by which the computation is not delayed. Needs a GPU.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from holdfast.lm.kernels.cache import copy_kernel as copies
from holdfast.lm.kernels.cache.kv_cache import KVCache

LAYERS, BLOCK, KV_HEADS, HEAD = 32, 16, 8, 128
RUN = BLOCK * KV_HEADS * HEAD * 2
Copy = Callable[[int, torch.cuda.Stream], None]
"""Copies all blocks of one layer."""
Launch = tuple[int, int, int, int]
"""Programs, elements and warps of each, and launches for all layers."""
LAUNCHES: list[Launch] = [
    (2, 16384, 8, 1),
    (4, 16384, 8, 1),
    (4, 16384, 8, 4),
    (4, 16384, 16, 1),
    (6, 16384, 8, 1),
    (8, 8192, 8, 1),
    (8, 16384, 8, 1),
    (16, 4096, 4, 1),
]


class Attributes(ctypes.Structure):
    """CUmemcpyAttributes: order of access to the source, two location hints of two numbers each, flags."""

    _fields_ = (("order", ctypes.c_int), ("hints", ctypes.c_int * 4), ("flags", ctypes.c_uint))


def by_engine(source: torch.Tensor, target: torch.Tensor, pairs: np.ndarray, flags: int, order: int) -> Copy:
    """The copy engine, one call a layer for all runs (the driver's cuMemcpyBatchAsync, CUDA 12.8 and later)."""
    batch = ctypes.CDLL("libcuda.so.1").cuMemcpyBatchAsync
    size = ctypes.c_size_t
    count = 2 * len(pairs)
    sizes, index, failed = np.full(count, RUN, np.uint64), (size * 1)(0), size(0)
    attributes = Attributes(order=order, flags=flags)

    def copy(layer: int, stream: torch.cuda.Stream) -> None:
        parts = np.arange(2)[:, None]
        from_ = source.data_ptr() + ((2 * layer + parts) * source.shape[2] + pairs[:, 0]) * RUN
        to = target.data_ptr() + ((2 * layer + parts) * target.shape[2] + pairs[:, 1]) * RUN
        from_, to = from_.astype(np.uint64).ravel(), to.astype(np.uint64).ravel()
        status = batch(
            ctypes.c_void_p(to.ctypes.data),
            ctypes.c_void_p(from_.ctypes.data),
            ctypes.c_void_p(sizes.ctypes.data),
            size(count),
            ctypes.byref(attributes),
            ctypes.byref(index),
            size(1),
            ctypes.byref(failed),
            ctypes.c_void_p(stream.cuda_stream),
        )
        if status:
            raise RuntimeError(f"cuMemcpyBatchAsync: error {status} at {failed.value}")

    return copy


def by_kernel(source: torch.Tensor, target: torch.Tensor, pairs: np.ndarray, launch: Launch) -> Copy:
    """Holdfast's kernel, which accesses host memory directly; one launch for each group of layers."""
    programs, tile, warps, groups = launch
    from_, to = torch.tensor(pairs.T.copy()).cuda()
    size = LAYERS // groups

    def copy(layer: int, stream: torch.cuda.Stream) -> None:
        if layer % size == 0:
            copies.PROGRAMS_IN = copies.PROGRAMS_OUT = programs
            copies.TILE, copies.WARPS = tile, warps
            part = slice(layer, layer + size)
            with torch.cuda.stream(stream):
                copies.copy_runs(source[part], from_, target[part], to)

    return copy


def linear_layers(x: torch.Tensor, weights: list[torch.Tensor]) -> torch.cuda.CUDAGraph:
    """A graph of all layers' matrix products over the tokens of `x`."""
    for weight in weights:
        F.linear(x, weight)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for weight in weights:
            F.linear(x, weight)
    return graph


def measure(copy: Copy | None, compute: torch.cuda.CUDAGraph | None, repeat: int) -> tuple[float, float]:
    """Milliseconds of copies and computation, started together; medians of five."""
    main, side = torch.cuda.current_stream(), torch.cuda.Stream()
    took: list[tuple[float, float]] = []
    for _ in range(6):
        torch.cuda.synchronize()
        torch.cuda._sleep(4_000_000)  # the host runs ahead, so that launches cost nothing
        start, computed, copied, began = (torch.cuda.Event(enable_timing=True) for _ in range(4))
        start.record()
        side.wait_event(start)
        if compute is not None:
            for _ in range(repeat):
                compute.replay()
        computed.record()
        with torch.cuda.stream(side):
            began.record()
        if copy is not None:
            for layer in range(LAYERS):
                copy(layer, side)
        with torch.cuda.stream(side):
            copied.record()
        torch.cuda.synchronize()
        took.append((start.elapsed_time(copied), start.elapsed_time(computed)))
    main.synchronize()
    return statistics.median(t[0] for t in took[1:]), statistics.median(t[1] for t in took[1:])


def host_ms(copy: Copy) -> float:
    """Host milliseconds to start the copies; the median of five."""
    side, took = torch.cuda.Stream(), []
    for _ in range(5):
        torch.cuda.synchronize()
        began = time.perf_counter()
        for layer in range(LAYERS):
            copy(layer, side)
        took.append(1e3 * (time.perf_counter() - began))
    torch.cuda.synchronize()
    return statistics.median(took)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--blocks", type=int, nargs="+", default=[48, 256])
    arguments = parser.parse_args()
    shape: dict[str, Any] = dict(
        layers=LAYERS, block_size=BLOCK, num_kv_heads=KV_HEADS, head_dim=HEAD, dtype=torch.bfloat16
    )
    device = KVCache.allocate(num_blocks=2048, device="cuda", **shape)
    host = KVCache.allocate(num_blocks=1024, device="cpu", **shape)
    host = KVCache(host.data.view(torch.int16).fill_(7).view(torch.bfloat16).pin_memory())
    weights = [torch.randn(53248, 4096, dtype=torch.bfloat16, device="cuda") * 0.01 for _ in range(LAYERS)]
    x = torch.randn(1024, 4096, dtype=torch.bfloat16, device="cuda")
    computations = {"32 tokens": (linear_layers(x[:32], weights), 4), "1024 tokens": (linear_layers(x, weights), 1)}
    alone = {name: measure(None, graph, repeat)[1] for name, (graph, repeat) in computations.items()}
    print(json.dumps(dict(computation_ms={name: round(ms, 2) for name, ms in alone.items()})), flush=True)
    rows = []
    for count in arguments.blocks:
        draw = np.random.default_rng(1)
        pairs = np.stack([draw.permutation(1024)[:count], draw.permutation(2048)[:count]], 1)
        total = count * 2 * LAYERS * RUN
        for way, (source, target, ends) in dict(
            into=(host.data, device.data, pairs), out=(device.data, host.data, pairs[:, ::-1].copy())
        ).items():
            ways: dict[str, Copy] = {
                f"kernel, {p} programs of {t} in {w} warps, {g} launches": by_kernel(source, target, ends, (p, t, w, g))
                for p, t, w, g in LAUNCHES
            }
            ways["a batch of runs a layer"] = by_engine(source, target, ends, 0, 1)
            for name, copy in ways.items():
                try:
                    copy_ms, _ = measure(copy, None, 1)
                    row: dict[str, Any] = dict(blocks=count, way=way, how=name, gb_s=round(total / copy_ms / 1e6, 1))
                    row["host_ms"] = round(host_ms(copy), 2)
                    for beside, (graph, repeat) in computations.items():
                        with_ms, compute_ms = measure(copy, graph, repeat)
                        row[f"gb_s beside {beside}"] = round(total / with_ms / 1e6, 1)
                        row[f"hidden beside {beside}"] = round(1 - (compute_ms - alone[beside]) / copy_ms, 3)
                except Exception as error:
                    row = dict(blocks=count, way=way, how=name, error=repr(error))
                rows.append(row)
                print(json.dumps(row), flush=True)
    torch.cuda.synchronize()
    if arguments.json:
        arguments.json.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
