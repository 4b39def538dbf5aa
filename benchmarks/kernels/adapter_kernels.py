"""The LoRA kernels of a Llama-3-8B layer on a GPU, compared with the layer's own products and a bound by bytes.

    python -m benchmarks.kernels.adapter_kernels [--tokens 32 128 2048] [--adapters 1 4 32] [--rank 16]
                                                 [--out result.jsonl]
    TRITON_INTERPRET=1 python -m benchmarks.kernels.adapter_kernels --tiny      # a trial on a CPU

By product, `us` has the microseconds of one call. `base` is the layer's own product, by cuBLAS; `shrink` and `expand`
are the two launches of its adapters, and `both` is one after the other. `together` is the base with both as the decoder
runs them, which in steps of few tokens is in parallel. For gate and up, `gate` is silu(gate) * up alone, and
`gated` is the expand that computes it as well: the decoder takes it in steps of more than 512 tokens. `bytes_us` is the
time that a call's bytes take at the rate of a device-to-device copy: weights, and the adapters that are used, are read
once, and activations are read and written. `layer` is all four products in turns.

Every token has an adapter, in turns. The table has 32 slots, however many are used. A figure is the median of 20
replays of one CUDA graph, whose calls go through the weights and slots of more layers than L2 holds, as a model does.
Activations and weights are random, bf16. Writes one JSON line for each measurement.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.kernels.gemv_gpu import RING_BYTES, captured, copy_rate, milliseconds
from benchmarks.lib.invocation import provenance
from holdfast.lm.kernels.launch import SideStream
from holdfast.lm.kernels.linear.fused_layers import silu_mul
from holdfast.lm.kernels.lora.groups import groups_of, most_tiles, tiles_of
from holdfast.lm.kernels.lora.protocol import LoraStack
from holdfast.lm.kernels.lora.shrink_expand import TiledLora

SLOTS, LAYERS = 32, 32
SHAPES = {
    "qkv": (4096, (4096, 1024, 1024)),
    "o": (4096, (4096,)),
    "gate_up": (4096, (14336, 14336)),
    "down": (14336, (4096,)),
}
"""For each product, its inputs and the outputs of each part."""
ADDED = ("o", "down")
"""Products whose results are added to the residual, which their adapters change at the same time."""
TINY = {"qkv": (64, (64, 32, 32)), "o": (64, (64,)), "gate_up": (64, (96, 96)), "down": (96, (64,))}
Call = Callable[[], object]


@dataclass(frozen=True, slots=True)
class Sizes:
    """The sizes of the measurement: for a GPU, or small ones for a CPU."""

    device: torch.device
    dtype: torch.dtype
    shapes: dict[str, tuple[int, tuple[int, ...]]]
    rank: int
    slots: int
    layers: int
    ring_bytes: int
    """Bytes of weights that pass before one is read again, if there are enough."""

    def random(self, *size: int, spread: float = 1.0) -> torch.Tensor:
        return torch.empty(size, dtype=self.dtype, device=self.device).normal_(std=spread)

    def microseconds(self, calls: Sequence[Call]) -> float:
        """Microseconds of one call, with all calls in turn."""

        def run() -> None:
            for call in calls:
                call()

        if self.device.type == "cuda":
            return 1e3 * milliseconds(captured(run)) / len(calls)
        began = time.perf_counter()
        run()
        return 1e6 * (time.perf_counter() - began) / len(calls)

    def stack(self, name: str) -> LoraStack:
        """Adapters in all slots of one layer's product."""
        inputs, widths = self.shapes[name]
        parts = len(widths)
        return LoraStack(
            a=self.random(self.slots, parts, self.rank, inputs, spread=inputs**-0.5),
            b=self.random(self.slots, self.rank, sum(widths)),
            rank=torch.full((self.slots, parts), self.rank, dtype=torch.int32, device=self.device),
            scale=torch.full((self.slots, parts), 0.01, device=self.device),
            ends=tuple(np.cumsum(widths).tolist()),
        )

    def lora(self, tokens: int, adapters: Sequence[int]) -> TiledLora:
        """Tokens that have these slots in turn, as a batch uploads them."""
        room = most_tiles(tokens, self.slots)
        tiles = tiles_of(groups_of(np.resize(np.array(adapters), tokens)), tokens)
        lists = [tiles.order, *(np.resize(each, room) for each in (tiles.slot, tiles.start, tiles.count)), tiles.used]
        counts = torch.zeros(3 * room, dtype=torch.int32, device=self.device)
        return TiledLora(tokens, *(torch.from_numpy(each).to(self.device) for each in lists), counts)


class Product:
    """One of a layer's products, with the adapters of all layers and enough weights for a ring."""

    def __init__(self, sizes: Sizes, name: str) -> None:
        self.sizes, self.name = sizes, name
        self.inputs, widths = sizes.shapes[name]
        self.outputs, self.parts = sum(widths), len(widths)
        copies = max(2, -(-sizes.ring_bytes // (self.inputs * self.outputs * sizes.dtype.itemsize)))
        self.weights = [sizes.random(self.outputs, self.inputs, spread=0.02) for _ in range(copies)]
        self.stacks = [sizes.stack(name) for _ in range(sizes.layers)]

    def adapter_bytes(self, adapters: int) -> tuple[int, int]:
        """Bytes of A and of B."""
        each = adapters * self.sizes.rank * self.sizes.dtype.itemsize
        return each * self.parts * self.inputs, each * self.outputs

    def calls(self, tokens: int, adapters: int) -> dict[str, list[Call]]:
        """For each timed operation, enough calls for a ring, each with other weights."""
        sizes = self.sizes
        x, out, residual = (sizes.random(tokens, width) for width in (self.inputs, self.outputs, self.outputs))
        sets = [range(first, first + adapters) for first in range(0, sizes.slots - adapters + 1, adapters)]
        loras = [sizes.lora(tokens, slots) for slots in sets]
        places = [(lora, stack) for lora in loras for stack in self.stacks]
        places = places[: max(2, -(-sizes.ring_bytes // sum(self.adapter_bytes(adapters))))]
        low = places[0][0]._shrink(x, places[0][1])
        side = SideStream(sizes.device)

        def base(weight: torch.Tensor) -> None:
            torch.mm(x, weight.t(), out=out)

        def both(lora: TiledLora, stack: LoraStack) -> None:
            lora._expand(out, lora._shrink(x, stack), stack)

        def together(index: int, lora: TiledLora, stack: LoraStack) -> None:
            changed = residual if self.name in ADDED else None
            finish = replace(lora, beside=side).begin(x, stack, changed)
            base(self.weights[index % len(self.weights)])
            if finish.gated is not None:
                finish.gated(out)
            else:
                finish.add(out if changed is None else changed)

        found: dict[str, list[Call]] = {
            "base": [partial(base, weight) for weight in self.weights],
            "shrink": [partial(lora._shrink, x, stack) for lora, stack in places],
            "expand": [partial(lora._expand, out, low, stack) for lora, stack in places],
            "both": [partial(both, *place) for place in places],
            "together": [partial(together, index, *place) for index, place in enumerate(places)],
        }
        if self.name == "gate_up":
            found["gate"] = [lambda: silu_mul(out)] * 2
            found["gated"] = [partial(lora._gated_expand, out, low, stack) for lora, stack in places]
        return found

    def least_bytes(self, tokens: int, adapters: int) -> dict[str, int]:
        """Smallest number of bytes that each kernel can move."""
        (a, b), size = self.adapter_bytes(adapters), self.sizes.dtype.itemsize
        x, low = size * tokens * self.inputs, size * tokens * self.parts * self.sizes.rank
        out = size * tokens * self.outputs
        found = {"shrink": a + x + low, "expand": b + low + 2 * out, "both": a + b + x + 2 * low + 2 * out}
        found["base"] = size * self.inputs * self.outputs + x + out
        if self.name == "gate_up":
            found["gated"] = b + low + out + out // 2
        return found


def measured(products: Sequence[Product], tokens: int, adapters: int, rate: float | None) -> list[dict[str, Any]]:
    """A line for each product, and one for the layer. `rate` is the rate of a copy in TB/s, if there is a GPU."""
    lines = []
    layer: dict[str, list[list[Call]]] = {"base": [], "both": [], "together": []}
    for product in products:
        calls = product.calls(tokens, adapters)
        line: dict[str, Any] = dict(product=product.name, tokens=tokens, adapters=adapters)
        line["us"] = {name: round(product.sizes.microseconds(each), 2) for name, each in calls.items()}
        if rate is not None:
            least = product.least_bytes(tokens, adapters)
            line["bytes_us"] = {name: round(count / rate / 1e6, 2) for name, count in least.items()}
        lines.append(line)
        for name, kept in layer.items():
            kept.append(calls[name])
    sizes = products[0].sizes
    us = {}
    for name, rows in layer.items():
        turns = [call for row in zip(*rows, strict=False) for call in row]
        us[name] = round(len(products) * sizes.microseconds(turns), 2)
    return [*lines, dict(product="layer", tokens=tokens, adapters=adapters, us=us)]


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", nargs="+", type=int, default=[32, 128, 2048])
    parser.add_argument("--adapters", nargs="+", type=int, default=[1, 4, 32], help=f"used at once, at most {SLOTS}")
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--tiny", action="store_true", help="little of everything: a trial on a CPU")
    parser.add_argument("--out", type=Path, help="write every measurement here, a JSON line each")
    args = parser.parse_args()
    most = min(SLOTS, *args.tokens)
    if not all(1 <= adapters <= most for adapters in args.adapters):
        parser.error(f"--adapters is {args.adapters}; each must lie between 1 and {most}, of slots or of tokens")
    torch.manual_seed(0)
    if args.tiny:
        sizes = Sizes(torch.device("cpu"), torch.float32, TINY, args.rank, SLOTS, layers=2, ring_bytes=0)
    else:
        sizes = Sizes(torch.device("cuda"), torch.bfloat16, SHAPES, args.rank, SLOTS, LAYERS, RING_BYTES)
    rate = None if args.tiny else copy_rate()
    about = provenance() | dict(rank=args.rank, slots=SLOTS)
    if rate is not None:
        about["copy_TB_per_s"] = round(rate, 3)
    lines = [about]
    print(json.dumps(about), flush=True)
    products = [Product(sizes, name) for name in sizes.shapes]
    for tokens in args.tokens:
        for adapters in args.adapters:
            found = measured(products, tokens, adapters, rate)
            print("".join(json.dumps(line) + "\n" for line in found), end="", flush=True)
            lines += found
    if args.out:
        args.out.write_text("".join(json.dumps(line) + "\n" for line in lines))


if __name__ == "__main__":
    main()
