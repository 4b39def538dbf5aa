"""Time products with packed weights as integers on a CPU, against PyTorch's kernel for 4 bits and a bound by bytes.

    python -m benchmarks.kernels.integer_cpu [--threads 2] [--rows 1 2 4 8 16 64] [--rounds 7] [--json FILE]

A weight has 8,192 outputs and 2,048 inputs. There are twelve copies of each, which no cache holds. The weights take
turns; a figure is the median of the rounds, in milliseconds for one product. `bound` is the time in which memory gives
the weight's bytes: the bandwidth is that of a sum over 512 MiB, the best of the rounds. `error` is the distance of the
product from that of unrounded activations in float64, in relation to it.

It needs the library of integer products: `python hatch_build.py` compiles it.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks.lib.invocation import provenance
from holdfast.lm.kernels.int4_cpu import pack_for_cpu
from holdfast.lm.kernels.integer.library import LEVELS, Library, library
from holdfast.lm.kernels.integer.weight import OFFSETS, pack_integers

OUTPUTS, INPUTS, COPIES = 8192, 2048, 12
LARGE = 1 << 27
"""Number of float32 numbers whose sum measures the bandwidth."""


def weights(own: Library) -> dict[str, list[Any]]:
    """The copies by kind of weight."""
    found: dict[str, list[Any]] = {"PyTorch, 4 bits": []}
    for bits in OFFSETS:
        for _ in range(COPIES):
            numbers = torch.randint(1 << bits, (OUTPUTS, INPUTS), dtype=torch.uint8)
            scale = torch.rand(OUTPUTS, INPUTS // (16 if bits == 6 else 32)) * 0.002 + 0.001
            low = -scale * 8 if bits == 4 else None
            found.setdefault(f"{bits} bits", []).append(pack_integers(own, numbers, scale, low, bits))
            if low is not None:
                found["PyTorch, 4 bits"].append(pack_for_cpu(numbers, scale, torch.zeros_like(scale), 32))
    return found


def timed(some: list[Any], x: torch.Tensor) -> float:
    """Milliseconds for one product, all copies in turn."""
    began = time.perf_counter()
    for weight in some:
        weight.linear(x, None)
    return (time.perf_counter() - began) * 1e3 / len(some)


def bandwidth(rounds: int) -> float:
    """Bytes a second that the threads read together."""
    large, taken = torch.ones(LARGE), []
    for _ in range(rounds + 1):
        began = time.perf_counter()
        large.sum()
        taken.append(time.perf_counter() - began)
    return large.nbytes / min(taken[1:])


def errors(layer: dict[str, list[Any]]) -> dict[str, float]:
    x = torch.randn(64, INPUTS).bfloat16()
    found = {}
    for name, (weight, *_) in layer.items():
        exact = x.double() @ weight.dequantized(torch.float64).t()
        found[name] = round(float((weight.linear(x, None).double() - exact).norm() / exact.norm()), 5)
    return found


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 2, 4, 8, 16, 64])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--json", type=Path, help="file for the results")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    own = library()
    if own is None:
        sys.exit("this checkout has no library of integer products: run python hatch_build.py")
    layer, found = weights(own), []
    speed = bandwidth(args.rounds)
    bounds = {name: some[0].nbytes / speed * 1e3 for name, some in layer.items()}
    print(f"{LEVELS[own.level]}, {args.threads} threads, {speed / 1e9:.1f} GB/s")
    print("bound: " + ", ".join(f"{name} {bound:.3f} ms" for name, bound in bounds.items()))
    for rows in args.rows:
        times: dict[str, list[float]] = {name: [] for name in layer}
        x = torch.randn(rows, INPUTS).bfloat16()
        for number in range(args.rounds + 1):
            for name, some in layer.items():
                taken = timed(some, x)
                if number:  # the first round does not count
                    times[name].append(taken)
        found.append({"rows": rows, **{name: round(statistics.median(each), 3) for name, each in times.items()}})
        print(f"{rows:4} rows: " + ", ".join(f"{name} {found[-1][name]} ms" for name in layer), flush=True)
    error = errors(layer)
    print("error: " + ", ".join(f"{name} {each:.2%}" for name, each in error.items()))
    if args.json is not None:
        settings = {"instructions": LEVELS[own.level], "threads": args.threads, "bandwidth": round(speed / 1e9, 1)}
        rest = {"bound_ms": {name: round(bound, 3) for name, bound in bounds.items()}, "ms": found, "errors": error}
        args.json.write_text(json.dumps(provenance() | settings | rest, indent=1) + "\n")


if __name__ == "__main__":
    main()
