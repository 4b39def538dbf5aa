"""What a decoder layer computes beside attention, on CUDA: launches of the fused Triton kernels."""

from __future__ import annotations

from itertools import accumulate, pairwise
from typing import Any

import torch
import triton

from holdfast.lm.kernels.dependent_launch import chaining
from holdfast.lm.kernels.linear.fp8 import Fp8Weight, Weight
from holdfast.lm.kernels.linear.fp8_linear import (
    TILE,
    Fp8Rows,
    few_rows_product,
    fp8_launch_for,
    has_tiles,
    quantize_rows,
    tiled_product,
)
from holdfast.lm.kernels.linear.fused_kernels import angles_kernel, norm_kernel, rotate_write_kernel, silu_mul_kernel
from holdfast.lm.kernels.linear.skinny_gemm import ThinLaunch, launch_for, thin_linear
from holdfast.lm.kernels.linear.torch_layers import Gated, LayerOps, LayerShape, Normed, Rotation, Unnormed

ROTATED_AT_A_TIME = 512  # pairs of numbers that one program turns
GATED_AT_A_TIME = 1024  # numbers that one program gates

PIECES = {832: (512, 320), 896: (512, 384)}
"""Tokens whose products with many inputs or outputs cuBLAS (of CUDA 13.0, on an H200) computes faster in two pieces: a
layer's by 12 and 6% under load (benchmarks/products_gpu.py --pieces). It has no good tiles for the whole."""


class FusedLayerOps(LayerOps):
    """`LayerOps` for float32, float16 and bfloat16 on CUDA, all accumulated in float32; every call may be captured.

    Few tokens are bound by launches and by reading weights: `thin_linear` streams these, and its partial sums, the
    residual and the norm are one launch; for one token they are part of the products. More tokens go to cuBLAS, which
    adds the residual as it writes: fewer bytes than an addition later, and one rounding less. With FP8 weights they go
    to FP8 tensor cores, activations quantized by tokens.
    """

    def __init__(self, shape: LayerShape) -> None:
        super().__init__(shape)
        self.block_half = triton.next_power_of_2(shape.head_dim // 2)
        heads = triton.next_power_of_2(shape.num_heads + 2 * shape.num_kv_heads)
        self.block_heads = min(heads, max(1, ROTATED_AT_A_TIME // self.block_half))

    def norm(self, stream: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return self._add_norm(stream, None, None, weight)

    def linear(self, x: Normed, weight: Weight, bias: torch.Tensor | None = None) -> torch.Tensor:
        read, launch = self._reading(x, weight)
        if launch is None:
            return super().linear(read, weight, bias)
        out = read.new_empty(read.shape[0], weight.shape[0])
        self._stream(read, weight, bias, out[None], launch, **self._norm_of(x))
        return out

    def gated_linear(self, x: Normed, weight: Weight, bias: torch.Tensor | None = None) -> Gated:
        if self.shape.activation != "silu":
            return super().gated_linear(self.computed(x), weight, bias)
        width = weight.shape[0] // 2
        read, launch = self._reading(x, weight)
        if launch is not None:
            out = read.new_empty(read.shape[0], width)
            self._stream(read, weight, bias, out[None], launch, gated=True, **self._norm_of(x))
            return out
        gate_up = self._in_pieces(read, weight, bias)
        if isinstance(weight, Fp8Weight) and has_tiles(read, weight) and width % TILE == 0:
            return quantize_rows(gate_up, gated=True)  # as the product that follows reads it
        out = read.new_empty(read.shape[0], width)
        silu_mul_kernel[(len(gate_up), triton.cdiv(width, GATED_AT_A_TIME))](
            gate_up,
            out,
            width,
            gate_up.stride(0),
            out.stride(0),
            BLOCK=GATED_AT_A_TIME,
            num_warps=4,
            **chaining(out.device),
        )
        return out

    def add_linear_norm(
        self,
        stream: torch.Tensor,
        x: Gated,
        weight: Weight,
        bias: torch.Tensor | None,
        norm: torch.Tensor,
    ) -> Normed:
        launch = None if isinstance(x, Fp8Rows) else self.launch(x, weight, cut=True)
        if launch is None:
            if isinstance(weight, Fp8Weight):
                return self._add_norm(stream, self._product(x, weight, None)[None], bias, norm)
            for part in _pieces(len(x)):
                stream[part].addmm_(x[part], weight.t())
            return self._add_norm(stream, None, bias, norm)
        if len(x) == 1:
            thin_linear(x, weight, bias, stream[None], launch, added=True)
            return Unnormed(stream, norm)
        partials = x.new_empty(launch.parts, *stream.shape, dtype=torch.float32)
        self._stream(x, weight, None, partials, launch)
        return self._add_norm(stream, partials, bias, norm)

    def _in_pieces(self, x: torch.Tensor, weight: Weight, bias: torch.Tensor | None) -> torch.Tensor:
        """The library's product [T, N], in as many as it likes best."""
        pieces = _pieces(len(x))
        if len(pieces) == 1 or isinstance(weight, Fp8Weight):
            return super().linear(x, weight, bias)
        out = x.new_empty(len(x), weight.shape[0])
        for part in pieces:
            if bias is None:
                torch.mm(x[part], weight.t(), out=out[part])
            else:
                torch.addmm(bias, x[part], weight.t(), out=out[part])
        return out

    def computed(self, x: Normed | Gated) -> torch.Tensor:
        """The tensor that `add_linear_norm` or `gated_linear` stands for."""
        if isinstance(x, Fp8Rows):
            return x.dequantized(self.shape.dtype)
        return self.norm(x.stream, x.weight) if isinstance(x, Unnormed) else x

    def _product(self, x: Gated, weight: Weight, bias: torch.Tensor | None) -> torch.Tensor:
        if isinstance(weight, Fp8Weight) and (isinstance(x, Fp8Rows) or has_tiles(x, weight)):
            rows = x if isinstance(x, Fp8Rows) else quantize_rows(x)
            return tiled_product(rows, weight, bias, self.shape.dtype)
        return super()._product(x, weight, bias)

    def _stream(
        self,
        x: torch.Tensor,
        weight: Weight,
        bias: torch.Tensor | None,
        out: torch.Tensor,
        launch: ThinLaunch,
        **fused: Any,
    ) -> None:
        """`thin_linear`, or where weights are FP8 and tokens more than one, the same by FP8 tensor cores."""
        if isinstance(weight, Fp8Weight) and len(x) > 1:
            few_rows_product(quantize_rows(x, halves=2), weight, bias, out, launch, **fused)
        else:
            thin_linear(x, weight, bias, out, launch, **fused)

    def _reading(self, x: Normed, weight: Weight) -> tuple[torch.Tensor, ThinLaunch | None]:
        """What a product reads, and its launch: the stream itself where the kernel can norm it."""
        read = x.stream if isinstance(x, Unnormed) else x
        launch = self.launch(read, weight)
        return (self.computed(x) if launch is None else read), launch

    def _norm_of(self, x: Normed) -> dict[str, Any]:
        """The arguments of `thin_linear` for a norm that is still to be computed."""
        return {"norm": x.weight, "eps": self.shape.eps} if isinstance(x, Unnormed) else {}

    def rotation(self, positions: torch.Tensor) -> Rotation:
        """Cosine and sine [T, D / 2] float32."""
        frequencies = self.shape.inverse_frequencies
        half = len(frequencies)
        cosine, sine = frequencies.new_empty(2, len(positions), half)
        angles_kernel[(len(positions),)](
            positions,
            frequencies,
            cosine,
            sine,
            self.shape.amplitude,
            HALF=half,
            BLOCK_HALF=self.block_half,
            num_warps=1,
        )
        return cosine, sine

    def rotate_and_write(
        self,
        qkv: torch.Tensor,
        rotation: Rotation,
        q_norm: torch.Tensor | None,
        k_norm: torch.Tensor | None,
        caches: tuple[torch.Tensor, torch.Tensor],
        slot_mapping: torch.Tensor,
    ) -> torch.Tensor:
        shape = self.shape
        tokens, heads = len(qkv), shape.num_heads + 2 * shape.num_kv_heads
        query = qkv.new_empty(tokens, shape.num_heads, shape.head_dim)
        key_cache, value_cache = caches
        rotate_write_kernel[(tokens, triton.cdiv(heads, self.block_heads))](
            qkv,
            *rotation,
            q_norm,
            k_norm,
            query,
            key_cache,
            value_cache,
            slot_mapping,
            qkv.stride(0),
            *key_cache.stride()[:3],
            *value_cache.stride()[:3],
            shape.eps,
            NUM_HEADS=shape.num_heads,
            NUM_KV_HEADS=shape.num_kv_heads,
            HEAD_DIM=shape.head_dim,
            BLOCK_SIZE=key_cache.shape[1],
            BLOCK_HEADS=self.block_heads,
            BLOCK_HALF=self.block_half,
            num_warps=4,
            **chaining(qkv.device),
        )
        return query

    def launch(self, x: torch.Tensor, weight: Weight, *, cut: bool = False) -> ThinLaunch | None:
        """How `thin_linear` runs a product; None where a library does."""
        if isinstance(weight, Fp8Weight):
            return fp8_launch_for(x, weight, cut=cut)
        return launch_for(x, weight, cut=cut)

    def _add_norm(
        self,
        stream: torch.Tensor,
        partials: torch.Tensor | None,
        bias: torch.Tensor | None,
        weight: torch.Tensor,
    ) -> torch.Tensor:
        """Add partial sums [P, T, hidden] of any float type and a bias to the stream; the norm of the sum."""
        tokens, width = stream.shape
        out = torch.empty_like(stream)
        block = triton.next_power_of_2(width)
        num_warps = max(1, min(16, block // 256))
        norm_kernel[(tokens,)](
            stream,
            partials,
            bias,
            weight,
            out,
            width,
            stream.stride(0),
            out.stride(0),
            self.shape.eps,
            PARTS=0 if partials is None else len(partials),
            BLOCK=block,
            num_warps=num_warps,
            **chaining(stream.device),
        )
        return out


def _pieces(tokens: int) -> list[slice]:
    """The tokens of each of the products that one is computed in."""
    stops = list(accumulate(PIECES.get(tokens, (tokens,)), initial=0))
    return [slice(*ends) for ends in pairwise(stops)]
