"""The products of a Llama-3-8B layer and its LM head by number of tokens: cuBLAS's kernels and their times.

    python -m benchmarks.kernels.products_gpu [--tokens 512 640 768] [--libraries cublas cublaslt] [--out result.jsonl]

Each product runs over the weights of eight layers as one CUDA graph; medians of replays. Activations and weights are
random: equal or zero ones take less power and run faster. `--seconds` then runs all products of a layer in turns for
that long and prints the times of the first and the last tenth: a GPU at its power limit slows down. `--pieces
896=512+384` compares whole products with one or all of them computed in pieces of these tokens, in turn under load.
Writes one JSON line for each measurement.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from benchmarks.lib.invocation import provenance

LAYERS = 8
SHAPES = {"qkv": (6144, 4096), "o": (4096, 4096), "gate_up": (28672, 4096), "down": (4096, 14336)}
"""Outputs and inputs of each product. The results of `o` and `down` are added to the residual."""
HEAD = {"head": (128256, 4096)}
"""Outputs and inputs of the LM head. It is no product of a layer."""
ADDED = ("o", "down")
TOKENS = [*range(256, 1025, 64), 1152, 1280, 1536, 2048, 4096, 8192]


class Products:
    """Weights of eight layers and eight heads, and activations for the largest number of tokens."""

    def __init__(self, most: int) -> None:
        def normal(*shape: int, std: float = 1.0) -> torch.Tensor:
            return torch.empty(shape, dtype=torch.bfloat16, device="cuda").normal_(std=std)

        shapes = SHAPES | HEAD
        self.weights = {name: [normal(*shape, std=0.02) for _ in range(LAYERS)] for name, shape in shapes.items()}
        self.inputs = {width: normal(most, width) for width in {shape[1] for shape in shapes.values()}}
        self.outputs = {width: normal(most, width) for width in {shape[0] for shape in shapes.values()}}

    def run(self, name: str, layer: int, pieces: list[int]) -> None:
        weight = self.weights[name][layer]
        first = 0
        for tokens in pieces:
            part = slice(first, first + tokens)
            x, out = self.inputs[weight.shape[1]][part], self.outputs[weight.shape[0]][part]
            if name in ADDED:
                out.addmm_(x, weight.t(), beta=0.5)  # as fast as 1, and stays finite
            else:
                torch.mm(x, weight.t(), out=out)
            first += tokens

    def graph(self, pieces: dict[str, list[int]]) -> torch.cuda.CUDAGraph:
        """A graph of these products, in turn through the layers."""
        graph = torch.cuda.CUDAGraph()
        for name in pieces:
            self.run(name, 0, pieces[name])
        with torch.cuda.graph(graph):
            for layer in range(LAYERS):
                for name in pieces:
                    self.run(name, layer, pieces[name])
        return graph


def timed(work: Callable[[], object]) -> float:
    """Milliseconds of the work on the device."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    work()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end)


def kernel_names(products: Products, tokens: list[int]) -> dict[tuple[str, int], str]:
    """For each product and token count, the kernels that the library launches."""
    wanted = [(name, count) for count in tokens for name in SHAPES | HEAD]
    names = {}
    with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as profiler:
        for name, count in wanted:
            with torch.profiler.record_function(f"product {name} {count}"):
                products.run(name, 0, [count])
            torch.cuda.synchronize()
    spans = sorted(
        (event.time_range.start, event.name)
        for event in profiler.events()
        if event.device_type == DeviceType.CUDA and not event.name.startswith(("product ", "Memcpy", "Memset"))
    )
    marks = sorted((e.time_range.start, e.name) for e in profiler.events() if e.name.startswith("product "))
    for key in wanted:
        begin = next(at for at, name in marks if name == f"product {key[0]} {key[1]}")
        end = min((at for at, name in marks if at > begin and name.split()[1:] != [key[0], str(key[1])]), default=1e18)
        names[key] = " + ".join(name.split("(")[0][:80] for at, name in spans if begin <= at < end)
    return names


def by_tokens(products: Products, tokens: list[int], library: str) -> list[dict[str, Any]]:
    torch.backends.cuda.preferred_blas_library(library)
    names = kernel_names(products, tokens)
    lines = []
    for count in tokens:
        for name, (outputs, inputs) in (SHAPES | HEAD).items():
            graph = products.graph({name: [count]})
            graph.replay()
            us = 1e3 * statistics.median(timed(graph.replay) for _ in range(5)) / LAYERS
            lines.append(
                dict(
                    tokens=count,
                    product=name,
                    library=library,
                    us=round(us, 2),
                    tflop_s=round(2e-6 * count * outputs * inputs / us, 1),
                    kernel=names[name, count],
                )
            )
    return lines


def sustained(products: Products, tokens: int, seconds: float) -> dict[str, Any]:
    """Microseconds per layer at the start and at the end of a long run of all products in turn."""
    graph = products.graph({name: [tokens] for name in SHAPES})
    time.sleep(0.5)
    times: list[float] = []
    begin = time.perf_counter()
    while time.perf_counter() - begin < seconds:
        times.append(1e3 * timed(graph.replay) / LAYERS)
    tenth = max(1, len(times) // 10)
    first, last = statistics.median(times[:tenth]), statistics.median(times[-tenth:])
    work = 2e-6 * tokens * sum(outputs * inputs for outputs, inputs in SHAPES.values())
    return dict(
        tokens=tokens,
        product="all, in turns",
        seconds=seconds,
        first_us=round(first, 1),
        last_us=round(last, 1),
        tflop_s=[round(work / first, 1), round(work / last, 1)],
    )


def in_pieces(products: Products, pieces: list[int]) -> dict[str, Any]:
    """Microseconds per layer with whole products, with one of them in pieces, and with all, in turn under load."""
    whole = {name: [sum(pieces)] for name in SHAPES}
    ways = {"whole": whole, **{name: whole | {name: pieces} for name in SHAPES}, "all": dict.fromkeys(SHAPES, pieces)}
    graphs = {label: products.graph(way) for label, way in ways.items()}
    begin = time.perf_counter()
    while time.perf_counter() - begin < 0.2:
        timed(graphs["whole"].replay)
    times: dict[str, list[float]] = {label: [] for label in graphs}
    for turn in range(8):
        for label in list(graphs)[:: 1 if turn % 2 else -1]:
            times[label].append(1e3 * timed(graphs[label].replay) / LAYERS)
    us = {label: round(statistics.median(taken), 1) for label, taken in times.items()}
    return dict(tokens=sum(pieces), pieces=pieces, us=us)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", nargs="*", type=int, default=TOKENS)
    parser.add_argument("--libraries", nargs="*", default=["cublas", "cublaslt"])
    parser.add_argument("--seconds", type=float, default=0.0)
    parser.add_argument("--sustained", nargs="*", type=int, default=[1024, 2048, 8192], help="tokens of those runs")
    parser.add_argument("--pieces", nargs="*", default=[], metavar="TOKENS=TOKENS+TOKENS")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    lines = [provenance()]
    pieces = [[int(part) for part in text.split("=")[-1].split("+")] for text in arguments.pieces]
    products = Products(max(arguments.tokens + arguments.sustained + [sum(parts) for parts in pieces]))
    for library in arguments.libraries:
        lines += by_tokens(products, arguments.tokens, library)
        if arguments.seconds:
            lines += [dict(library=library, **sustained(products, n, arguments.seconds)) for n in arguments.sustained]
    torch.backends.cuda.preferred_blas_library("cublas")
    lines += [in_pieces(products, parts) for parts in pieces]
    text = "".join(json.dumps(line) + "\n" for line in lines)
    print(text, end="")
    if arguments.out:
        arguments.out.write_text(text)


if __name__ == "__main__":
    main()
