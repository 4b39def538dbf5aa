"""Time skinny GEMMs on a GPU, and a decoder layer around attention, against cuBLAS and PyTorch.

    python -m benchmarks.kernels.gemv_gpu [--tune] [--fp8 | --int4] [--shape 70b] [--split N]
                                          [--tokens 1 2 4 8 16 32 64]
        [--out results.json]

The shapes are Llama-3-8B's or 70B's, bf16; layers are 8B's. A product is timed with the operations that the decoder
fuses to it (residual and norm, or the gate), as one CUDA graph over more weights than L2 holds. Its figure is the
weights' bytes over that time, as a share of the rate of a device-to-device copy. `--tune` times launches other than the
rule's. With `--fp8` the weights are FP8, with `--int4` of 4 bits; only PyTorch's product is timed for comparison,
beyond 64 tokens. With `--split` the products are those of one of N devices that share each layer. Prints a table,
writes JSON lines.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch
from triton.runtime.errors import OutOfResources

from benchmarks.lib.invocation import provenance
from holdfast.lm.kernels.fp8 import Fp8Weight, Weight, quantize
from holdfast.lm.kernels.int4 import HALVES, Int4Weight, pack
from holdfast.lm.kernels.linear.fused_layers import FusedLayerOps
from holdfast.lm.kernels.linear.layers import LayerOps, LayerShape
from holdfast.lm.kernels.linear.skinny_gemm import SkinnyLaunch

HIDDEN, INNER, HEADS, KV_HEADS, HEAD_DIM, VOCAB = 4096, 14336, 32, 8, 128, 128256
QKV = (HEADS + 2 * KV_HEADS) * HEAD_DIM
SHAPES = {
    "8b": dict(qkv=(QKV, HIDDEN), o=(HIDDEN, HIDDEN), gate_up=(2 * INNER, HIDDEN), down=(HIDDEN, INNER)),
    "70b": dict(qkv=(10240, 8192), o=(8192, 8192), gate_up=(57344, 8192), down=(8192, 28672)),
}
"""For each product except the LM head, rows and columns of its weight."""
DTYPE = torch.bfloat16
RING_BYTES = 400_000_000  # weights that pass before one is read again

KINDS = {"qkv": "linear", "o": "add_norm", "gate_up": "gated", "down": "add_norm", "lm_head": "linear"}
"""For each product, the operations that are timed with it."""


def weight_size(shape: str, product: str, split: int) -> tuple[int, int]:
    """Rows and columns of the weight of one of `split` devices."""
    sizes = SHAPES[shape]
    outputs, inputs = sizes.get(product, (VOCAB, sizes["qkv"][1]))
    return (outputs, inputs // split) if KINDS[product] == "add_norm" else (outputs // split, inputs)


ONE_TOKEN = [  # rows of weights, inputs at a time, warps, stages
    *((4, 1024, 4, 4), (8, 256, 2, 4), (8, 512, 4, 3), (8, 1024, 4, 3), (16, 256, 4, 4), (16, 256, 4, 6)),
    *((16, 512, 4, 3), (16, 512, 8, 4), (32, 128, 4, 4), (32, 256, 4, 4), (32, 256, 8, 4)),
]
FEW_TOKENS = [
    *((16, 256, 4, 4), (16, 512, 4, 3), (32, 128, 4, 5), (32, 256, 4, 3), (32, 256, 4, 4), (32, 256, 8, 4)),
    *((64, 128, 4, 4), (64, 128, 8, 4), (64, 256, 4, 3)),
    *((16, 256, 2, 4), (32, 256, 2, 4), (64, 64, 4, 6)),
    *((64, 128, 4, 6), (128, 128, 8, 4), (128, 64, 4, 6)),
]
MORE_TOKENS = [
    *((64, 128, 4, 4), (64, 64, 4, 6), (128, 64, 4, 6), (128, 64, 8, 4), (128, 128, 8, 3), (256, 64, 8, 4)),
]
PARTS = (1, 2, 4, 8)
FP8_ONE_TOKEN = [
    *((16, 256, 4, 6), (16, 512, 4, 4), (8, 512, 4, 4), (8, 1024, 4, 3), (32, 256, 4, 4), (32, 256, 8, 4)),
    *((16, 256, 2, 6), (8, 512, 2, 4), (8, 512, 4, 6), (8, 256, 2, 6)),
]
INT4_TOKENS = [  # the inputs of one iteration are a chunk
    *((64, 128, 4, 3), (64, 128, 4, 4), (64, 128, 4, 8), (64, 128, 8, 4), (128, 128, 4, 4), (128, 128, 8, 4)),
    *((16, 128, 4, 6), (32, 128, 4, 6)),
]
FP8_FEW_TOKENS = [
    *((64, 128, 4, 3), (64, 128, 4, 4), (64, 128, 4, 6), (128, 128, 4, 4), (128, 128, 8, 4), (128, 128, 8, 3)),
    *((64, 256, 4, 3), (128, 256, 8, 3), (256, 128, 8, 3)),
]


def shape() -> LayerShape:
    powers = torch.arange(0, HEAD_DIM, 2, dtype=torch.float32, device="cuda") / HEAD_DIM
    return LayerShape(
        num_heads=HEADS,
        num_kv_heads=KV_HEADS,
        head_dim=HEAD_DIM,
        eps=1e-5,
        activation="silu",
        dtype=DTYPE,
        inverse_frequencies=500000.0**-powers,
    )


class Fixed(FusedLayerOps):
    """The fused kernels with one launch for every product; None: cuBLAS."""

    def __init__(self, fixed: SkinnyLaunch | None) -> None:
        super().__init__(shape())
        self.fixed = fixed

    def launch(self, x: torch.Tensor, weight: Weight, *, cut: bool = False, gated: bool = False) -> SkinnyLaunch | None:
        return self.fixed


def milliseconds(call: Callable[[], object]) -> float:
    """Median time of one call by CUDA events."""
    for _ in range(3):
        call()
    times = []
    for _ in range(20):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        call()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end))
    return float(np.median(times))


def captured(work: Callable[[], object]) -> Callable[[], object]:
    """The work as a CUDA graph, after a first run that compiles it."""
    work()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    return graph.replay


def copy_rate() -> float:
    """Rate of a device-to-device copy in TB/s, bytes read and written."""
    source = torch.empty(1 << 32, dtype=torch.uint8, device="cuda").fill_(1)
    target = torch.empty_like(source)
    return 2 * source.nbytes / milliseconds(lambda: target.copy_(source)) / 1e9


def random(*size: int, spread: float = 1.0) -> torch.Tensor:
    return torch.empty(size, dtype=DTYPE, device="cuda").normal_(std=spread)


def product_time(ops: LayerOps, kind: str, weights: Sequence[Weight], tokens: int) -> float:
    """Microseconds of one product with its fused operations, over several weights [N, K] in turn."""
    x, norm = random(tokens, weights[0].shape[1]), random(weights[0].shape[0])
    stream = random(tokens, weights[0].shape[0])

    def run() -> None:
        for weight in weights:
            if kind == "linear":
                ops.linear(x, weight)
            elif kind == "gated":
                ops.gated_linear(x, weight)
            else:
                ops.add_linear_norm(stream, x, weight, None, norm)

    return milliseconds(captured(run)) / len(weights) * 1e3


def layer_time(ops: LayerOps, tokens: int) -> float:
    """Microseconds of one layer without its attention."""
    weights = [(QKV, HIDDEN), (HIDDEN, HEADS * HEAD_DIM), (2 * INNER, HIDDEN), (HIDDEN, INNER)]
    qkv, o, gate_up, down = (random(*size, spread=0.01) for size in weights)
    stream, norm = random(tokens, HIDDEN), random(HIDDEN)
    cache = torch.zeros(2, -(-tokens // 16), 16, KV_HEADS, HEAD_DIM, dtype=DTYPE, device="cuda")
    at = torch.arange(tokens, device="cuda")
    rotation = ops.rotation(at)

    def run() -> None:
        normed = ops.norm(stream, norm)
        for _ in range(4):
            query = ops.rotate_and_write(ops.linear(normed, qkv), rotation, None, None, (cache[0], cache[1]), at)
            normed = ops.add_linear_norm(stream, query.flatten(1), o, None, norm)
            normed = ops.add_linear_norm(stream, ops.gated_linear(normed, gate_up), down, None, norm)

    return milliseconds(captured(run)) / 4 * 1e3


def random_int4(outputs: int, inputs: int, group: int = 128) -> Int4Weight:
    numbers = torch.randint(16, (outputs, inputs), dtype=torch.uint8, device="cuda")
    scale = random(outputs, inputs // group).abs_().mul_(0.001)
    zero = torch.randint(16, scale.shape, dtype=torch.uint8, device="cuda")
    return pack(numbers, scale, zero, group, HALVES[0])


def candidates(kind: str, tokens: int, weight: Weight) -> list[SkinnyLaunch]:
    one, few = (
        (FP8_ONE_TOKEN, FP8_FEW_TOKENS)
        if isinstance(weight, Fp8Weight)
        else (ONE_TOKEN, FEW_TOKENS if tokens <= 32 else MORE_TOKENS)
    )
    if isinstance(weight, Int4Weight):
        one = few = INT4_TOKENS
    return [
        SkinnyLaunch(*settings, parts)
        for settings in (one if tokens == 1 else few)
        for parts in (PARTS if kind == "add_norm" and tokens > 1 else (1,))
    ]


def brief(launch: SkinnyLaunch | None) -> str:
    if launch is None:
        return "PyTorch"
    return f"{launch.block_n}x{launch.block_k} w{launch.num_warps} s{launch.num_stages} p{launch.parts}"


def compare(name: str, tokens: int, weights: Sequence[Weight], rate: float, tune: bool) -> list[dict[str, object]]:
    """Time cuBLAS, the rule's launch and, when tuning, other launches. Prints a line with the best."""
    kind, weight_bytes = KINDS[name], weights[0].nbytes
    own = FusedLayerOps(shape())
    rule = own.launch(random(tokens, weights[0].shape[1]), weights[0], cut=kind == "add_norm", gated=kind == "gated")
    lines: list[dict[str, object]] = []
    plain = isinstance(weights[0], torch.Tensor)
    firsts = [None, rule] if plain else [rule]
    for launch in [*firsts, *(candidates(kind, tokens, weights[0]) if tune and (plain or rule is not None) else [])]:
        try:
            taken = product_time(Fixed(launch), kind, weights, tokens)
        except OutOfResources as refused:
            print(f"  {brief(launch)}: {refused}", flush=True)
            continue
        share = weight_bytes / taken / 1e6 / rate
        lines.append(dict(product=name, tokens=tokens, launch=brief(launch), us=round(taken, 2), share=round(share, 3)))
    others = sorted(lines[len(firsts) :], key=lambda line: float(str(line["share"])), reverse=True)[:3]
    shown = [f"{line['share']:.3f} ({line['launch']})" for line in [*lines[: len(firsts)], *others]]
    print(f"{name:8} {tokens:6}   " + "  ".join(shown), flush=True)
    return lines


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tune", action="store_true", help="time other launches than the rule's too")
    parser.add_argument("--fp8", action="store_true", help="FP8 weights; layers are left out")
    parser.add_argument("--int4", action="store_true", help="4-bit weights in groups of 128; layers are left out")
    parser.add_argument("--products", nargs="*", choices=KINDS, default=list(KINDS))
    parser.add_argument("--shape", choices=SHAPES, default="8b")
    parser.add_argument("--split", type=int, default=1, help="devices that share each layer")
    parser.add_argument("--tokens", nargs="*", type=int, default=[1, 2, 4, 8, 16, 32, 64])
    parser.add_argument("--layers", nargs="*", type=int, default=[1, 2, 4, 8, 16, 64, 256, 2048], metavar="TOKENS")
    parser.add_argument("--out", type=Path, help="write every measurement here, a JSON line each")
    arguments = parser.parse_args()
    torch.manual_seed(0)
    rate = copy_rate()
    lines: list[dict[str, object]] = [provenance() | dict(copy_TB_per_s=round(rate, 3))]
    print(json.dumps(lines[0]), flush=True)
    print("product  tokens   share of the copy rate: PyTorch, the rule's launch, the best of the others", flush=True)
    for name in arguments.products:
        outputs, inputs = weight_size(arguments.shape, name, arguments.split)
        size = 1 if arguments.fp8 else 0.5 if arguments.int4 else DTYPE.itemsize
        copies = max(1, math.ceil(RING_BYTES / (outputs * inputs * size)))
        weights: list[Weight]
        if arguments.int4:
            weights = [random_int4(outputs, inputs) for _ in range(copies)]
        else:
            drawn = (random(outputs, inputs, spread=0.01) for _ in range(copies))
            weights = [quantize(weight) if arguments.fp8 else weight for weight in drawn]
        for tokens in arguments.tokens:
            lines += compare(name, tokens, weights, rate, arguments.tune)
        del weights
    for tokens in () if arguments.fp8 or arguments.int4 else arguments.layers:
        plain, fused = layer_time(LayerOps(shape()), tokens), layer_time(FusedLayerOps(shape()), tokens)
        lines.append(
            dict(work="layer without attention", tokens=tokens, pytorch_us=round(plain, 1), us=round(fused, 1))
        )
        print(f"layer without attention, {tokens:4} tokens: PyTorch {plain:.1f} us, fused {fused:.1f} us", flush=True)
    if arguments.out:
        arguments.out.write_text("".join(json.dumps(line) + "\n" for line in lines))


if __name__ == "__main__":
    main()
