"""Time the paged attention on a GPU: prefill against the matmul rate and SDPA, decode against the copy rate.

    python benchmarks/attention_gpu.py [--tune] [--out results.json]

The shape is Llama-3-8B's (32 query heads, 8 KV heads, size 128, bf16), blocks of 16 tokens in random order. Decodes
run as one CUDA graph over enough layers that no cache outlives a replay in L2. Prints one JSON line a measurement.
"""

from __future__ import annotations

import argparse
import datetime
import json
import platform
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
import triton
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from holdfast.kernels.paged import Launch, PagedAttention
from holdfast.kernels.protocol import Segments

HEADS, KV_HEADS, HEAD_DIM, BLOCK_SIZE = 32, 8, 128, 16
DTYPE = torch.bfloat16


class Variant(PagedAttention):
    """The backend with other launch settings than its own."""

    def __init__(self, settings: dict[str, int]) -> None:
        properties = torch.cuda.get_device_properties("cuda")
        super().__init__(
            device=torch.device("cuda"),
            num_processors=properties.multi_processor_count,
            num_heads=HEADS,
            num_kv_heads=KV_HEADS,
            head_dim=HEAD_DIM,
            block_size=BLOCK_SIZE,
        )
        self.settings = settings
        if "wide_m" in settings:  # settings of the Triton kernel
            self.on_hopper, self.wide_m = False, settings["wide_m"]
        if "work" in settings:
            self.narrow_target = properties.multi_processor_count * settings["work"] // KV_HEADS

    def launch(self, block_m: int, item_bytes: int, tokens: int) -> Launch:
        own = super().launch(block_m, item_bytes, tokens)
        return Launch(
            block_n=self.settings.get("block_n", own.block_n),
            num_warps=self.settings.get("warps", own.num_warps),
            num_stages=self.settings.get("stages", own.num_stages),
        )


def milliseconds(call: Callable[[], object], repeats: int) -> float:
    """Median time of one call by CUDA events."""
    for _ in range(3):
        call()
    times = []
    for _ in range(repeats):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        call()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end))
    return float(np.median(times))


def segments_of(lengths: list[int], stops: list[int]) -> Segments:
    return Segments(
        query_start=np.cumsum([0, *lengths]).astype(np.int32),
        context_stop=np.array(stops, np.int32),
        row=np.arange(len(lengths), dtype=np.int32),
    )


def caches(rows: int, length: int, layers: int) -> tuple[torch.Tensor, torch.Tensor]:
    """A cache of that many layers, and block tables over all its blocks in random order."""
    per_row = -(-length // BLOCK_SIZE)
    cache = torch.empty(layers, 2, rows * per_row, BLOCK_SIZE, KV_HEADS, HEAD_DIM, dtype=DTYPE, device="cuda").normal_()
    return cache, torch.randperm(rows * per_row, device="cuda").view(rows, per_row).int()


def decode(batch: int, context: int, settings: dict[str, int]) -> dict[str, float]:
    """One decode step of `batch` sequences: microseconds a layer, and the rate at which it reads keys and values."""
    attention = Variant(settings)
    layer_bytes = 2 * batch * context * KV_HEADS * HEAD_DIM * DTYPE.itemsize
    layers = max(4, -(-(1 << 29) // layer_bytes))
    cache, tables = caches(batch, context, layers)
    query = torch.randn(batch, HEADS, HEAD_DIM, dtype=DTYPE, device="cuda")
    schedule = attention.schedule(segments_of([1] * batch, [context] * batch))

    def step() -> None:
        for key, value in cache:
            attention.attend(query, key, value, tables, schedule, scale=HEAD_DIM**-0.5)

    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    layer_ms = milliseconds(graph.replay, 20) / layers
    return {
        "us_per_layer": round(layer_ms * 1e3, 2),
        "TB_per_s": round(layer_bytes / layer_ms / 1e9, 3),
        "pieces": len(schedule[0].work) * KV_HEADS,
    }


def prefill(batch: int, length: int, settings: dict[str, int]) -> dict[str, float]:
    """One step of `batch` causal prefills of `length` tokens each."""
    attention = Variant(settings)
    cache, tables = caches(batch, length, 1)
    query = torch.randn(batch * length, HEADS, HEAD_DIM, dtype=DTYPE, device="cuda")
    schedule = attention.schedule(segments_of([length] * batch, [length] * batch))
    key, value = cache[0]
    taken = milliseconds(lambda: attention.attend(query, key, value, tables, schedule, scale=HEAD_DIM**-0.5), 10)
    return rate(batch, length, taken)


def dense(batch: int, length: int, backend: SDPBackend) -> dict[str, float]:
    """The same prefill by SDPA over contiguous keys."""
    query = torch.randn(batch, HEADS, length, HEAD_DIM, dtype=DTYPE, device="cuda")
    key, value = torch.randn(2, batch, KV_HEADS, length, HEAD_DIM, dtype=DTYPE, device="cuda").unbind()

    def call() -> torch.Tensor:
        return functional.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)

    with sdpa_kernel(backend):
        return rate(batch, length, milliseconds(call, 10))


def rate(batch: int, length: int, taken_ms: float) -> dict[str, float]:
    return {
        "ms": round(taken_ms, 4),
        "TFLOP_per_s": round(2 * batch * length**2 * HEADS * HEAD_DIM / taken_ms / 1e9, 1),
    }


def copy_rate() -> float:
    """TB/s of a device-to-device copy, bytes read and written."""
    source = torch.empty(1 << 32, dtype=torch.uint8, device="cuda").fill_(1)
    target = torch.empty_like(source)
    return round(2 * source.nbytes / milliseconds(lambda: target.copy_(source), 10) / 1e9, 3)


WIDE_VARIANTS = [
    {"wide_m": m, "block_n": n, "warps": warps, "stages": stages}
    for m, n, warps, stages in ((256, 64, 8, 3), (256, 64, 8, 2), (128, 64, 4, 3), (128, 128, 8, 3))
]
NARROW_VARIANTS = [
    {"block_n": n, "warps": warps, "stages": stages, "work": work}
    for n, warps, stages in ((64, 2, 3), (64, 4, 2), (128, 4, 2))
    for work in (2, 4, 8)
]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tune", action="store_true", help="time other launch settings too")
    parser.add_argument("--out", type=Path, help="write all lines here as well")
    arguments = parser.parse_args()
    torch.manual_seed(0)
    lines: list[dict[str, object]] = []

    def report(**line: object) -> None:
        lines.append(line)
        print(json.dumps(line), flush=True)

    report(
        command=" ".join(["python", *sys.argv]),
        date=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        device=torch.cuda.get_device_name(),
        torch=torch.__version__,
        triton=triton.__version__,
        python=platform.python_version(),
        copy_TB_per_s=copy_rate(),
    )
    prefills = ((16, 512), (1, 2048), (1, 8192), (1, 16384))
    for settings in [{}, *(WIDE_VARIANTS if arguments.tune else [])]:
        for batch, length in prefills:
            report(work=f"prefill {batch} x {length}", settings=settings, **prefill(batch, length, settings))
    for batch, length in prefills:
        for backend in (SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION):
            work = f"prefill {batch} x {length}"
            report(work=work, peer=f"SDPA {backend.name}, contiguous keys", **dense(batch, length, backend))
    for settings in [{}, *(NARROW_VARIANTS if arguments.tune else [])]:
        for batch, context in ((1, 2048), (32, 1024), (32, 2048), (128, 1024), (128, 2048)):
            report(work=f"decode {batch} x {context}", settings=settings, **decode(batch, context, settings))
    if arguments.out:
        arguments.out.write_text("".join(json.dumps(line) + "\n" for line in lines))


if __name__ == "__main__":
    main()
