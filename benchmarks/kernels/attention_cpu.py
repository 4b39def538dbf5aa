"""Time the paged attention on a CPU, one thread, against SDPA over contiguous keys of the same shape.

    python -m benchmarks.kernels.attention_cpu [--threads N]

SDPA's time is its better one: with enable_gqa, or with the query heads of a KV head as rows of one product. It reads
contiguous keys; ours finds them through the block table. Prints a table; the ratio is ours over SDPA's.
"""

from __future__ import annotations

import argparse
import platform
import time
from collections.abc import Callable

import numpy as np
import torch
from torch.nn import functional

from holdfast.lm.kernels.attention.backends import attention_for
from holdfast.lm.kernels.attention.protocol import Segments

HEADS, KV_HEADS, BLOCK_SIZE = 8, 4, 16


def medians(calls: list[Callable[[], object]], seconds: float = 1.5) -> list[float]:
    """Median milliseconds of each call; calls take turns, so that other load hits all alike."""
    times: list[list[float]] = [[] for _ in calls]
    for call in calls:
        call()
    end = time.perf_counter() + seconds * len(calls)
    while time.perf_counter() < end:
        for call, taken in zip(calls, times, strict=True):
            begin = time.perf_counter()
            call()
            taken.append((time.perf_counter() - begin) * 1e3)
    return [float(np.median(taken)) for taken in times]


def compare(batch: int, new: int, context: int, head_dim: int, dtype: torch.dtype) -> tuple[float, float, float]:
    """Milliseconds of ours, of SDPA with enable_gqa and of SDPA over grouped rows: `batch` segments of `new` tokens."""
    attention = attention_for("cpu", num_heads=HEADS, num_kv_heads=KV_HEADS, head_dim=head_dim, block_size=BLOCK_SIZE)
    per_row = context // BLOCK_SIZE
    cache = torch.randn(4, 2, batch * per_row, BLOCK_SIZE, KV_HEADS, head_dim).to(dtype)
    tables = torch.randperm(batch * per_row).view(batch, per_row).int()
    metadata = attention.make_metadata(
        Segments(
            query_start=(np.arange(batch + 1) * new).astype(np.int32),
            context_stop=np.full(batch, context, np.int32),
            row=np.arange(batch, dtype=np.int32),
        )
    )
    query = torch.randn(batch * new, HEADS, head_dim).to(dtype)
    key, value = cache[1]
    scale = head_dim**-0.5
    near_query = query.view(batch, new, HEADS, head_dim).transpose(1, 2).contiguous()
    near_key, near_value = torch.randn(2, batch, KV_HEADS, context, head_dim).to(dtype)
    mask = torch.ones(new, context, dtype=torch.bool).tril(context - new)
    rows = near_query.reshape(batch, KV_HEADS, -1, head_dim)
    row_mask = mask.repeat(HEADS // KV_HEADS, 1)
    ours, gqa, grouped = medians(
        [
            lambda: attention.attend(query, key, value, tables, metadata, scale=scale),
            lambda: functional.scaled_dot_product_attention(
                near_query, near_key, near_value, None if new == 1 else mask, enable_gqa=True
            ),
            lambda: functional.scaled_dot_product_attention(rows, near_key, near_value, None if new == 1 else row_mask),
        ]
    )
    return ours, gqa, grouped


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=1)
    torch.set_num_threads(parser.parse_args().threads)
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads, {platform.processor() or platform.machine()}")
    print(f"{HEADS} heads over {KV_HEADS}; ms a layer")
    print("segments   x new x context   D  dtype          ours  SDPA gqa  SDPA rows  ratio to the better")
    for batch, new, context in ((32, 1, 512), (8, 1, 512), (32, 1, 128), (1, 1, 2048), (1, 512, 512), (2, 256, 2048)):
        for head_dim in (32, 64):
            for dtype in (torch.float32, torch.bfloat16):
                ours, gqa, grouped = compare(batch, new, context, head_dim, dtype)
                print(
                    f"{batch:8} x {new:5} x {context:7} {head_dim:4}  {str(dtype)[6:]:9}"
                    f"{ours:9.3f} {gqa:9.3f} {grouped:10.3f} {ours / min(gqa, grouped):6.2f}"
                )


if __name__ == "__main__":
    main()
