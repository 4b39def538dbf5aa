"""Time a layer's products with 4-bit weights on a CPU, against the same weights in float32 and in bfloat16.

    python -m benchmarks.kernels.int4_cpu [--threads 2] [--rows 1 8 128] [--rounds 6] [--json FILE]

The sizes are those of a layer with 2,048 hidden units and an MLP of 5,504. A group of 32 weights has a scale and a
minimum, as in GGUF's Q4_K. Plain weights are stored by inputs, as the decoder stores them. There are two copies of each
weight, which no cache holds. The three take turns; a figure is the median of the rounds, in milliseconds for the four
products of a layer. `error` is the distance from the exact product, in relation to it.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from torch.nn import functional

from benchmarks.lib.invocation import provenance
from holdfast.lm.kernels.int4_cpu import MIDDLE, Int4CpuWeight, pack_for_cpu

SHAPES = {"qkv": (3072, 2048), "o": (2048, 2048), "gate_up": (11008, 2048), "down": (2048, 5504)}
GROUP = 32
COPIES = 2
Product = Callable[[torch.Tensor], torch.Tensor]


def draw(outputs: int, inputs: int) -> tuple[Int4CpuWeight, torch.Tensor]:
    """A packed weight, and its numbers in float32 before they were packed."""
    numbers = torch.randint(16, (outputs, inputs), dtype=torch.uint8)
    scale = torch.rand(outputs, inputs // GROUP) * 0.002 + 0.001
    low = -scale * (4 + 8 * torch.rand_like(scale))
    plain = (numbers.view(outputs, -1, GROUP) * scale[..., None] + low[..., None]).view(outputs, inputs)
    return pack_for_cpu(numbers, scale, MIDDLE * scale + low, GROUP), plain


def products() -> dict[str, list[tuple[Product, int]]]:
    """The products of the layer's copies by type of the weights, each with its number of inputs."""
    found: dict[str, list[tuple[Product, int]]] = {"float32": [], "bfloat16": [], "packed": []}
    for _ in range(COPIES):
        for outputs, inputs in SHAPES.values():
            packed, plain = draw(outputs, inputs)
            for dtype in (torch.float32, torch.bfloat16):
                stored = plain.t().to(dtype).contiguous().t()
                found[str(dtype).removeprefix("torch.")].append((partial(functional.linear, weight=stored), inputs))
            found["packed"].append((partial(packed.linear, bias=None), inputs))
    return found


def milliseconds(some: list[tuple[Product, int]], rows: int, dtype: torch.dtype) -> float:
    """The time of one layer's products."""
    inputs = {inputs: torch.randn(rows, inputs, dtype=dtype) for _, inputs in some}
    began = time.perf_counter()
    for product, width in some:
        product(inputs[width])
    return (time.perf_counter() - began) * 1e3 / COPIES


def errors() -> dict[str, float]:
    """The mean distance of products in bfloat16 from the exact ones, with rounded and with packed weights."""
    packed, plain = draw(*SHAPES["qkv"])
    x = torch.randn(64, SHAPES["qkv"][1]).bfloat16()
    exact = x.double() @ plain.double().t()
    found = {"bfloat16": functional.linear(x, plain.bfloat16()), "packed": packed.linear(x, None)}
    return {name: float((each.double() - exact).norm() / exact.norm()) for name, each in found.items()}


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 128])
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--json", type=Path, help="file for the results")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    layer, found = products(), []
    for rows in args.rows:
        times: dict[str, list[float]] = {name: [] for name in layer}
        for number in range(args.rounds + 1):
            for name, some in layer.items():
                taken = milliseconds(some, rows, torch.float32 if name == "float32" else torch.bfloat16)
                if number:  # the first round does not count
                    times[name].append(taken)
        found.append({"rows": rows, **{name: round(statistics.median(each), 2) for name, each in times.items()}})
        print(f"{rows:4} rows: " + ", ".join(f"{name} {found[-1][name]} ms" for name in layer), flush=True)
    error = errors()
    print("error: " + ", ".join(f"{name} {each:.3%}" for name, each in error.items()))
    if args.json is not None:
        settings = {"threads": args.threads, "layer_ms": found, "errors": error}
        args.json.write_text(json.dumps(provenance() | settings, indent=1) + "\n")


if __name__ == "__main__":
    main()
