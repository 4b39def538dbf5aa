"""Time products of few rows on a CPU: MKL, which packs a weight each time, against weights that oneDNN packed once.

    python -m benchmarks.kernels.products_cpu [--threads 1] [--rows 1 2 4 8 16 32 64 128] [--rounds 6] [--json FILE]

The weights are those of a layer of `cpu_peers.py`, stored by inputs, as the decoder stores them on a CPU. There are
four copies of each, so that they do not stay in the cache of a core. The two take turns; each figure is the median of
the rounds, in microseconds a product. `LayerOps` packs by these figures.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path

import torch
from torch.nn import functional

from benchmarks.lib.invocation import provenance

SHAPES = {"qkv": (1280, 768), "o": (768, 768), "gate_up": (4096, 768), "down": (768, 2048)}
COPIES = 4


def median_us(weights: list[torch.Tensor], packed: list[torch.Tensor], rows: int, rounds: int) -> tuple[float, float]:
    """Microseconds of a product of `rows` rows: with the plain weights, and with packed ones."""
    x = torch.randn(rows, weights[0].shape[1])
    times: tuple[list[float], list[float]] = ([], [])
    for number in range(rounds + 1):
        for taken, some, in_packed in ((times[0], weights, False), (times[1], packed, True)):
            began = time.perf_counter()
            for weight in some:
                if in_packed:
                    torch.ops.mkldnn._linear_pointwise(x, weight, None, "none", [], "")
                else:
                    functional.linear(x, weight)
            if number:  # the first round does not count
                taken.append((time.perf_counter() - began) / len(some) * 1e6)
    return statistics.median(times[0]), statistics.median(times[1])


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 2, 4, 8, 16, 32, 64, 128])
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--json", type=Path, help="file for the results")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    found = []
    for name, (outputs, inputs) in SHAPES.items():
        weights = [torch.randn(inputs, outputs).t() for _ in range(COPIES)]
        packed = [torch.ops.mkldnn._reorder_linear_weight(weight.contiguous()) for weight in weights]
        for rows in args.rows:
            plain, once = (round(each, 1) for each in median_us(weights, packed, rows, args.rounds))
            found.append({"weight": name, "rows": rows, "us": plain, "packed_us": once})
            print(f"{name:8} {rows:4} rows {plain:10.1f} us, packed {once:10.1f} us: {once / plain:.2f}", flush=True)
    if args.json is not None:
        args.json.write_text(json.dumps(provenance() | {"threads": args.threads, "products": found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
