"""Time one layer of a decode step on a GPU, attention included, by launch and split of the attention.

    python -m benchmarks.kernels.decode_layer_gpu [--work 32x600 1x8192] [--split N] [--tune] [--out results.jsonl]

The shape is Llama-3-8B's, or that of one of N devices that share it, bf16, blocks of 16 in random order. Four layers
are one CUDA graph, with the kernels in a step's order; a layer's weights drive the keys of the one before out of L2.
Attention's time is that of the layers minus that of the same layers without attention; its share is the time of copying
its keys and values over that.
"""

from __future__ import annotations

import argparse
import itertools
import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from benchmarks.kernels.gemv_gpu import (
    DTYPE,
    HEAD_DIM,
    HEADS,
    HIDDEN,
    INNER,
    KV_HEADS,
    QKV,
    captured,
    copy_rate,
    milliseconds,
    random,
)
from benchmarks.kernels.gemv_gpu import shape as layer_shape
from benchmarks.lib.invocation import provenance
from holdfast.lm.kernels.attention.paged import Launch, PagedAttention
from holdfast.lm.kernels.attention.protocol import Segments
from holdfast.lm.kernels.linear.fused_layers import FusedLayerOps

BLOCK_SIZE, LAYERS = 16, 4
WORK = ("1x640", "1x8192", "8x2048", "32x600", "32x2048", "128x600", "256x670")
LAUNCHES = [
    dict(block_n=n, num_warps=warps, num_stages=stages)
    for n, warps, stages in (
        *((16, 1, 6), (16, 1, 8), (32, 1, 4), (32, 1, 6), (32, 2, 4), (32, 2, 6), (64, 2, 3), (64, 2, 4)),
        *((32, 4, 4), (32, 4, 6), (64, 4, 3), (64, 4, 4), (64, 8, 3), (64, 8, 4), (128, 8, 3)),
    )
]


class Variant(PagedAttention):
    """The backend with other launch settings, and every context split into `parts`."""

    def __init__(self, settings: dict[str, int], split: int) -> None:
        properties = torch.cuda.get_device_properties("cuda")
        super().__init__(
            device=torch.device("cuda"),
            num_processors=properties.multi_processor_count,
            num_heads=HEADS // split,
            num_kv_heads=KV_HEADS // split,
            head_dim=HEAD_DIM,
            block_size=BLOCK_SIZE,
        )
        self.settings = settings
        if "parts" in settings:
            self.tiles.split_narrow = self._in_parts

    def _in_parts(self, keys: npt.NDArray[np.int32]) -> int:
        unit = self.settings.get("unit", 32)
        return -(-int(keys.max()) // (self.settings["parts"] * unit)) * unit

    def launch(self, block_m: int, item_bytes: int, tokens: int) -> Launch:
        own = super().launch(block_m, item_bytes, tokens)
        names = {field.name for field in fields(own)}
        return replace(own, **{name: value for name, value in self.settings.items() if name in names})


class Layers:
    """Layers of one batch and context; the weights are made once for all batches."""

    def __init__(self, weights: list[torch.Tensor], batch: int, context: int, split: int) -> None:
        shape = replace(layer_shape(), num_heads=HEADS // split, num_kv_heads=KV_HEADS // split)
        self.ops, self.weights, self.batch, self.split = FusedLayerOps(shape), weights, batch, split
        per_row = -(-context // BLOCK_SIZE)
        self.cache = random(2, batch * per_row, BLOCK_SIZE, KV_HEADS // split, HEAD_DIM)
        self.tables = torch.randperm(batch * per_row, device="cuda").view(batch, per_row).int()
        last = context - 1
        self.slots = self.tables[:, last // BLOCK_SIZE].long() * BLOCK_SIZE + last % BLOCK_SIZE
        self.stream, self.norm = random(batch, HIDDEN), random(HIDDEN)
        self.rotation = self.ops.rotation(torch.full((batch,), last, device="cuda"))
        self.segments = Segments(
            np.arange(batch + 1, dtype=np.int32),
            np.full(batch, context, np.int32),
            np.arange(batch, dtype=np.int32),
        )

    def work(self, settings: dict[str, int] | None) -> Callable[[], None] | None:
        """The layers with this attention launch (None: without attention); None if the split does not fit."""
        qkv, o, gate_up, down = self.weights
        ops, attention = self.ops, Variant(settings or {}, self.split)
        metadata = attention.reserve(self.batch)
        if not attention.refill(metadata, self.segments):
            return None
        key, value = self.cache

        def run() -> None:
            normed = ops.norm(self.stream, self.norm)
            for _ in range(LAYERS):
                query = ops.rotate_and_write(
                    ops.linear(normed, qkv), self.rotation, None, None, (key, value), self.slots
                )
                if settings is not None:
                    query = attention.attend(query, key, value, self.tables, metadata, scale=HEAD_DIM**-0.5)
                normed = ops.add_linear_norm(self.stream, query.flatten(1), o, None, self.norm)
                normed = ops.add_linear_norm(self.stream, ops.gated_linear(normed, gate_up), down, None, self.norm)

        return run

    def microseconds(self, settings: dict[str, int] | None) -> float | None:
        """Microseconds of one layer."""
        run = self.work(settings)
        return None if run is None else milliseconds(captured(run)) / LAYERS * 1e3


def candidates(batch: int, tune: bool) -> list[dict[str, int]]:
    if not tune:
        return [{}]
    cuts = [dict(parts=parts) for parts in ((1, 2) if batch > 16 else (4, 8) if batch > 4 else (10, 20, 32))]
    return [{}, *(launch | cut for launch, cut in itertools.product(LAUNCHES, cuts))]


def compile_all(layers: Layers, tried: list[dict[str, int]], threads: int) -> None:
    """Run each launch once, in several threads, because most of the time is compiling."""
    launches = {tuple((name, value) for name, value in one.items() if name != "parts"): one for one in tried}

    @torch.inference_mode()
    def run(settings: dict[str, int]) -> None:
        work = layers.work(settings)
        if work is not None:
            work()

    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(run, launches.values()))
    torch.cuda.synchronize()


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", nargs="*", default=list(WORK), metavar="BATCHxCONTEXT")
    parser.add_argument("--split", type=int, default=1, help="devices that share each layer")
    parser.add_argument("--tune", action="store_true", help="time other launches and cuts than the rule's")
    parser.add_argument("--threads", type=int, default=12, help="that compile kernels")
    parser.add_argument("--out", type=Path, help="write every measurement here, a JSON line each")
    arguments = parser.parse_args()
    torch.manual_seed(0)
    rate = copy_rate()
    lines: list[dict[str, Any]] = [provenance() | dict(copy_TB_per_s=round(rate, 3))]
    print(json.dumps(lines[0]), flush=True)
    split = arguments.split
    sizes = ((QKV // split, HIDDEN), (HIDDEN, HIDDEN // split), (2 * INNER // split, HIDDEN), (HIDDEN, INNER // split))
    weights = [random(*size, spread=0.01) for size in sizes]
    for name in arguments.work:
        batch, context = map(int, name.split("x"))
        layers = Layers(weights, batch, context, split)
        tried = candidates(batch, arguments.tune)
        compile_all(layers, tried, arguments.threads)
        without = layers.microseconds(None)
        assert without is not None
        fewest = 2 * batch * context * KV_HEADS // split * HEAD_DIM * DTYPE.itemsize / rate / 1e6
        for settings in tried:
            taken = layers.microseconds(settings)
            if taken is not None:
                added = taken - without
                share = round(fewest / added, 3)
                lines.append(dict(work=name, settings=settings, us=round(taken, 2), added=round(added, 2), share=share))
        own, *others = (line for line in lines if line.get("work") == name)
        print(f"{name}: without attention {without:.1f} us, bytes {fewest:.1f}; own +{own['added']} ({own['share']})")
        for line in sorted(others, key=lambda line: line["us"])[:6]:
            print(f"    +{line['added']} ({line['share']}) {line['settings']}", flush=True)
        if arguments.out:
            arguments.out.write_text("".join(json.dumps(line) + "\n" for line in lines))
        del layers


if __name__ == "__main__":
    main()
