"""What a product of a Llama-3-8B layer costs in time, clock and power under load, by the library's algorithm.

    python benchmarks/products_power.py [--tokens 2048 8192] [--algorithms 8] [--seconds 0.4] [--rounds 3]

A GPU at its power limit lowers its clock, so the algorithm that is fastest in a burst need not be the fastest in a long
prefill. cuBLASLt names several algorithms for each product, the one that it would take first. Each runs for SECONDS in
turn with the others, ROUNDS times, over the weights of eight layers. Prints one line for each: TFLOP/s, over the first
algorithm's, the clock, the power and picojoules an operation.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import statistics
import time
from dataclasses import dataclass, field
from typing import Any

import pynvml
import torch
from invocation import provenance
from products_gpu import ADDED, LAYERS, SHAPES, Products

COMPUTE_32F, R_32F, R_16BF, TRANSPOSED, WORKSPACE_BYTES = 68, 0, 14, 1, 32 << 20
"""Values of cuBLASLt's enumerations, and the workspace that PyTorch gives it on Hopper."""
TRANSPOSE_A, MOST_WORKSPACE = 3, 1
"""Attributes of a product, and of a preference."""


class Heuristic(ctypes.Structure):
    """cublasLtMatmulHeuristicResult_t."""

    _fields_ = (
        ("algorithm", ctypes.c_uint64 * 8),
        ("workspace", ctypes.c_size_t),
        ("state", ctypes.c_int),
        ("waves", ctypes.c_float),
        ("reserved", ctypes.c_int * 4),
    )


@dataclass
class Turns:
    """What one algorithm did in its turns."""

    rates: list[float] = field(default_factory=list)
    clocks: list[float] = field(default_factory=list)
    watts: list[float] = field(default_factory=list)


class Library:
    """cuBLASLt by ctypes: rows x [M, K] times weights [N, K] transposed, bf16 with float32 sums."""

    def __init__(self) -> None:
        self._lt = ctypes.CDLL("libcublasLt.so.13")
        self._handle = ctypes.c_void_p()
        self._call("cublasLtCreate", ctypes.byref(self._handle))
        self._workspace = torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device="cuda")

    def _call(self, name: str, *arguments: Any) -> None:
        status = getattr(self._lt, name)(*arguments)
        if status:
            raise RuntimeError(f"{name} gives status {status}")

    def describe(self, outputs: int, inputs: int, tokens: int) -> tuple[ctypes.c_void_p, list[ctypes.c_void_p]]:
        """The product's description and the layouts of weights, rows and results, column by column as cuBLAS reads."""
        product = ctypes.c_void_p()
        self._call("cublasLtMatmulDescCreate", ctypes.byref(product), COMPUTE_32F, R_32F)
        transposed = ctypes.c_int(TRANSPOSED)
        self._call("cublasLtMatmulDescSetAttribute", product, TRANSPOSE_A, ctypes.byref(transposed), 4)
        layouts = []
        for rows, columns in ((inputs, outputs), (inputs, tokens), (outputs, tokens)):
            layout = ctypes.c_void_p()
            sizes = ctypes.c_uint64(rows), ctypes.c_uint64(columns), ctypes.c_int64(rows)
            self._call("cublasLtMatrixLayoutCreate", ctypes.byref(layout), R_16BF, *sizes)
            layouts.append(layout)
        return product, layouts

    def algorithms(self, described: tuple[ctypes.c_void_p, list[ctypes.c_void_p]], most: int) -> list[Heuristic]:
        product, (weight, rows, result) = described
        preference = ctypes.c_void_p()
        self._call("cublasLtMatmulPreferenceCreate", ctypes.byref(preference))
        bound = ctypes.c_size_t(WORKSPACE_BYTES)
        self._call("cublasLtMatmulPreferenceSetAttribute", preference, MOST_WORKSPACE, ctypes.byref(bound), 8)
        found, count = (Heuristic * most)(), ctypes.c_int()
        layouts = (weight, rows, result, result)
        self._call(
            "cublasLtMatmulAlgoGetHeuristic",
            self._handle,
            product,
            *layouts,
            preference,
            most,
            found,
            ctypes.byref(count),
        )
        return [each for each in found[: count.value] if each.state == 0]

    def multiply(
        self,
        described: tuple[ctypes.c_void_p, list[ctypes.c_void_p]],
        algorithm: Heuristic,
        weight: torch.Tensor,
        x: torch.Tensor,
        out: torch.Tensor,
        beta: float,
    ) -> None:
        product, (of_weight, of_rows, of_result) = described
        one, kept = ctypes.c_float(1.0), ctypes.c_float(beta)
        pointer = ctypes.c_void_p
        self._call(
            "cublasLtMatmul", self._handle, product, ctypes.byref(one),
            pointer(weight.data_ptr()), of_weight, pointer(x.data_ptr()), of_rows, ctypes.byref(kept),
            pointer(out.data_ptr()), of_result, pointer(out.data_ptr()), of_result, ctypes.byref(algorithm.algorithm),
            pointer(self._workspace.data_ptr()), ctypes.c_size_t(WORKSPACE_BYTES),
            pointer(torch.cuda.current_stream().cuda_stream),
        )  # fmt: skip


def compare(library: Library, products: Products, name: str, tokens: int, args: argparse.Namespace) -> list[Turns]:
    """Run the algorithms of one product in turns."""
    outputs, inputs = SHAPES[name]
    described = library.describe(outputs, inputs, tokens)
    x, out = products.inputs[inputs][:tokens], products.outputs[outputs][:tokens]
    beta = 0.5 if name in ADDED else 0.0
    graphs = []
    for algorithm in library.algorithms(described, args.algorithms):
        if not beta:
            out.zero_()
            library.multiply(described, algorithm, products.weights[name][0], x, out, beta)
            torch.testing.assert_close(out, x @ products.weights[name][0].t(), rtol=2e-2, atol=2e-2)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for weight in products.weights[name]:
                library.multiply(described, algorithm, weight, x, out, beta)
        graphs.append(graph)
    device = pynvml.nvmlDeviceGetHandleByIndex(0)
    found = [Turns() for _ in graphs]
    operations = 2e-12 * tokens * outputs * inputs * LAYERS
    for _ in range(args.rounds):
        for graph, turns in zip(graphs, found, strict=True):
            begin = time.perf_counter()
            count = 0
            while time.perf_counter() - begin < args.seconds:
                for _ in range(4):
                    graph.replay()
                torch.cuda.synchronize()
                count += 4
                turns.watts.append(pynvml.nvmlDeviceGetPowerUsage(device) / 1e3)
                turns.clocks.append(pynvml.nvmlDeviceGetClockInfo(device, pynvml.NVML_CLOCK_SM))
            turns.rates.append(operations * count / (time.perf_counter() - begin))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, nargs="+", default=[2048, 8192])
    parser.add_argument("--algorithms", type=int, default=8)
    parser.add_argument("--seconds", type=float, default=0.4)
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    pynvml.nvmlInit()
    library, products = Library(), Products(max(args.tokens))
    print(json.dumps(provenance()))
    print("product    tokens  algorithm  TFLOP/s  over the first    MHz      W  pJ an operation")
    for tokens in args.tokens:
        for name in SHAPES:
            found = compare(library, products, name, tokens, args)
            first = statistics.median(found[0].rates)
            for number, turns in enumerate(found):
                rate, clock, watts = map(statistics.median, (turns.rates, turns.clocks, turns.watts))
                print(
                    f"{name:9}{tokens:8}{number:11}{rate:9.1f}{rate / first:16.3f}{clock:7.0f}{watts:7.0f}"
                    f"{watts / rate:12.3f}",
                    flush=True,
                )


if __name__ == "__main__":
    main()
