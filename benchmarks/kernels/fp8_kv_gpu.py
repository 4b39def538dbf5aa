"""Paged attention over a cache in FP8 and over one in bfloat16, on a GPU: decodes, prefills, and their difference.

    python -m benchmarks.kernels.fp8_kv_gpu [--out results.json]

The shape is Llama-3-8B's (32 query heads, 8 KV heads, size 128), blocks of 16 tokens in random order. The bfloat16
cache holds the values of the FP8 one, so both kernels read the same numbers. Each is a CUDA graph over enough layers
to leave nothing in L2 between replays. Graphs are replayed in turn, and medians count.
"""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path

import numpy as np
import torch

from benchmarks.lib.invocation import provenance
from holdfast.lm.kernels.attention.backends import attention_for
from holdfast.lm.kernels.attention.protocol import Segments
from holdfast.lm.kernels.fp8 import FP8

HEADS, KV_HEADS, HEAD_DIM, BLOCK_SIZE = 32, 8, 128, 16
DTYPE = torch.bfloat16
LAYERS_BYTES = 1 << 29
ROUNDS = 15
WORK = (
    (1, 1, 640),
    (32, 1, 600),
    (128, 1, 600),
    (256, 1, 670),
    (32, 1, 2048),
    (1, 1, 8192),
    (1, 2048, 2048),
    (1, 8192, 8192),
)
"""Number of sequences, number of query tokens of each, and the position at which they stop."""


def compare(batch: int, length: int, stop: int) -> dict[str, float | str]:
    """Microseconds per layer, over both caches, of one step of `batch` segments of `length` tokens each."""
    cache_bytes = 2 * batch * stop * KV_HEADS * HEAD_DIM
    layers = max(1, min(64, -(-LAYERS_BYTES // cache_bytes))) if length == 1 else 1
    width = -(-stop // BLOCK_SIZE)
    tables = torch.randperm(batch * width, device="cuda").view(batch, width).int()
    shape = (layers, 2, batch * width, BLOCK_SIZE, KV_HEADS, HEAD_DIM)
    rounded = torch.randn(shape, dtype=DTYPE, device="cuda").to(FP8)
    query = torch.randn(batch * length, HEADS, HEAD_DIM, dtype=DTYPE, device="cuda")
    segments = Segments(
        query_start=(np.arange(batch + 1) * length).astype(np.int32),
        context_stop=np.full(batch, stop, np.int32),
        row=np.arange(batch, dtype=np.int32),
    )
    graphs, results = {}, {}
    for name, cache in (("bfloat16", rounded.to(DTYPE)), ("fp8", rounded)):
        heads = {"num_heads": HEADS, "num_kv_heads": KV_HEADS, "head_dim": HEAD_DIM}
        attention = attention_for("cuda", block_size=BLOCK_SIZE, cache_dtype=cache.dtype, **heads)
        metadata = attention.make_metadata(segments)

        def step(attention=attention, cache=cache, metadata=metadata) -> torch.Tensor:
            for keys, values in cache:
                out = attention.attend(query, keys, values, tables, metadata, scale=HEAD_DIM**-0.5)
            return out

        results[name] = step().float()
        torch.cuda.synchronize()
        graphs[name] = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graphs[name]):
            step()
    times: dict[str, list[float]] = {name: [] for name in graphs}
    for _ in range(ROUNDS):
        for name, graph in graphs.items():
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            graph.replay()
            end.record()
            end.synchronize()
            times[name].append(1e3 * begin.elapsed_time(end) / layers)
    taken = {name: statistics.median(each) for name, each in times.items()}
    line: dict[str, float | str] = {"work": f"{batch} x {length} tokens that end at {stop}"}
    line |= {f"{name}_us": round(microseconds, 2) for name, microseconds in taken.items()}
    line["fp8_over_bfloat16"] = round(taken["fp8"] / taken["bfloat16"], 3)
    if length == 1:
        line["fp8_TB_per_s"] = round(cache_bytes / taken["fp8"] / 1e6, 3)
    else:
        line["fp8_TFLOP_per_s"] = round(2 * batch * stop**2 * HEADS * HEAD_DIM / taken["fp8"] / 1e6, 1)
    difference = (results["fp8"] - results["bfloat16"]).norm() / results["bfloat16"].norm()
    return line | {"difference": round(float(difference), 5)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="write all lines here as well")
    arguments = parser.parse_args()
    torch.manual_seed(0)
    lines = [provenance()]
    print(json.dumps(lines[0]), flush=True)
    for work in WORK:
        lines.append(compare(*work))
        print(json.dumps(lines[-1]), flush=True)
    if arguments.out:
        arguments.out.write_text("".join(json.dumps(line) + "\n" for line in lines))


if __name__ == "__main__":
    main()
