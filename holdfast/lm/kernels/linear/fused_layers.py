"""The operations of a decoder layer on CUDA: the choice of kernel or library call for each, and the launches."""

from __future__ import annotations

from collections.abc import Callable
from itertools import accumulate, pairwise
from typing import Any, cast

import torch
import triton

from holdfast.lm.kernels.collectives.protocol import Group
from holdfast.lm.kernels.fp8 import Fp8BlockWeight, Fp8Weight, Weight
from holdfast.lm.kernels.int4 import Int4Weight
from holdfast.lm.kernels.launch import dependent_launch_options
from holdfast.lm.kernels.linear.experts.experts import Experts
from holdfast.lm.kernels.linear.experts.launches import experts_of_few, grouped_experts, reads_by_pair
from holdfast.lm.kernels.linear.fp8_block_linear import (
    block_launch_for,
    fp8_block_gemm,
    quantize_groups,
    takes_groups,
)
from holdfast.lm.kernels.linear.fp8_linear import (
    TILE,
    Fp8Rows,
    fp8_gemm,
    fp8_launch_for,
    fp8_skinny_gemm,
    has_tiles,
    quantize_rows,
)
from holdfast.lm.kernels.linear.fused_kernels import (
    angles_kernel,
    embed_kernel,
    head_squares_kernel,
    norm_kernel,
    rotate_write_kernel,
    scale_heads_kernel,
    silu_mul_kernel,
)
from holdfast.lm.kernels.linear.int4_linear import int4_dequantized, int4_launch_for, int4_skinny_gemm
from holdfast.lm.kernels.linear.latent_kernels import rotate_write_latent_kernel
from holdfast.lm.kernels.linear.layers import Change, Gated, LayerOps, Normed, NormInParts, Rotation, Unnormed, nothing
from holdfast.lm.kernels.linear.packed_linear import packed_dequantized, packed_launch_for, packed_skinny_gemm
from holdfast.lm.kernels.linear.skinny_gemm import SkinnyLaunch, launch_for, skinny_gemm
from holdfast.lm.kernels.lora.protocol import Finish
from holdfast.lm.kernels.packed import PackedWeight
from holdfast.lm.kernels.stacked import StackedWeight

ROTATED_AT_A_TIME = 512
"""Number of pairs of numbers that one program rotates."""
GATED_AT_A_TIME = 1024
"""Number of elements that one program gates or scales."""
SQUARES_AT_A_TIME = 128
"""Number of tokens whose sums of squares, two each, travel as one row.

One row per token would mean one wait per token.
"""

PIECES = {832: (512, 320), 896: (512, 384)}
"""Token counts whose GEMMs cuBLAS computes faster in two pieces, because it has no good tiles for the whole.

With CUDA 13.0 on an H200, a layer's GEMMs take 12% and 6% less time under load (benchmarks/kernels/products_gpu.py
--pieces).
"""


class FusedLayerOps(LayerOps):
    """`LayerOps` for float32, float16 and bfloat16 on CUDA, accumulated in float32. CUDA graphs may capture every call.

    Steps of few tokens are bound by launches and by reading weights. `skinny_gemm` reads the weights, and one more
    launch adds its partial sums, the residual and the norm; for one token these are part of the GEMMs. Steps of more
    tokens use cuBLAS, which adds the residual as it writes: this moves fewer bytes than a later addition, and rounds
    once less. With FP8 weights they use FP8 tensor cores, with activations quantized by token, or by token and group of
    inputs if the weights are in blocks; packed weights are dequantized first.
    """

    def embed(self, ids: torch.Tensor, embedding: torch.Tensor, first: int = 0) -> torch.Tensor:
        if self.group is None:
            return super().embed(ids, embedding, first)
        tokens, width = len(ids), embedding.shape[1]
        rows = self.group.room((tokens, width), embedding.dtype)
        embed_kernel[(tokens, triton.cdiv(width, GATED_AT_A_TIME))](
            ids, embedding, rows, first, len(embedding), width, embedding.stride(0), BLOCK=GATED_AT_A_TIME, num_warps=4
        )
        return self.group.all_reduce(rows)

    def norm(self, stream: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        if self.shape.layer_norm or not len(weight):
            return super().norm(stream, weight)
        return self._normed(stream, None, None, weight)

    def linear(self, x: Normed, weight: Weight, bias: torch.Tensor | None = None) -> torch.Tensor:
        if isinstance(x, NormInParts):
            return self._linear_of_parts(x, weight, bias)
        if isinstance(weight, StackedWeight):
            read = self.computed(x)
            return torch.cat([self.linear(read, cast(Weight, rows), own) for rows, own in weight.with_biases(bias)], 1)
        x = self._as_read(x, weight)
        read, launch = self._input_and_launch(x, weight)
        if launch is None:
            return super().linear(read, weight, bias)
        out = read.new_empty(read.shape[0], weight.shape[0])
        self._run_skinny(read, weight, bias, out[None], launch, **self._norm_of(x))
        return out

    def gated_linear(self, x: Normed, weight: Weight, bias: torch.Tensor | None = None) -> Gated:
        if self.shape.activation != "silu" or not self.shape.gated:
            return super().gate(self.linear(x, weight, bias))
        if isinstance(weight, StackedWeight):
            return silu_mul(self.linear(x, weight, bias))
        width = weight.shape[0] // 2
        if isinstance(x, NormInParts):
            read, gate_up = x.stream, self._linear_of_parts(x, weight, bias)
        else:
            x = self._as_read(x, weight)
            read, launch = self._input_and_launch(x, weight, gated=True)
            if launch is not None:
                out = read.new_empty(read.shape[0], width)
                self._run_skinny(read, weight, bias, out[None], launch, gated=True, **self._norm_of(x))
                return out
            gate_up = self._in_pieces(read, weight, bias)
        if isinstance(weight, Fp8Weight) and has_tiles(read, weight) and width % TILE == 0:
            return quantize_rows(gate_up, gated=True)  # the next GEMM reads FP8
        return silu_mul(gate_up)

    def gate(self, gate_up: torch.Tensor, adapters: Finish | None = None) -> torch.Tensor:
        if self.shape.activation != "silu" or not self.shape.gated:
            return super().gate(gate_up, adapters)
        if adapters is not None:
            if adapters.gated is not None:
                return adapters.gated(gate_up)
            adapters.add(gate_up)
        return silu_mul(gate_up)

    def add_linear_norm(
        self,
        stream: torch.Tensor,
        x: Gated,
        weight: Weight,
        bias: torch.Tensor | None,
        norm: torch.Tensor,
        first: Callable[[], None] = nothing,
        out_norm: torch.Tensor | None = None,
        change: Change | None = None,
    ) -> Normed:
        if self.shape.layer_norm or out_norm is not None or change is not None or not len(norm):
            first()
            return self._add_separately(stream, x, weight, bias, norm, out_norm, change)
        launch = None if isinstance(x, Fp8Rows) else self.launch(x, weight, cut=True)
        if self.group is not None:
            if launch is None and (in_parts := self._begin_sum(stream, x, weight, bias, norm)) is not None:
                first()
                return in_parts
            partials = self._partials(self.group, x, weight, launch)
            first()
            return self.group.add_norm(stream, partials, bias, norm, self.shape.eps)
        if launch is None:
            if not isinstance(weight, torch.Tensor):
                partials = self._linear(x, weight, None)[None]
                first()
                return self._normed(stream, partials, bias, norm)
            first()
            for part in _pieces(len(x)):
                stream[part].addmm_(x[part], weight.t())
            return self._normed(stream, None, bias, norm)
        if len(x) == 1 and isinstance(weight, torch.Tensor | Fp8Weight | Fp8BlockWeight):
            first()
            skinny_gemm(x, weight, bias, stream[None], launch, added=True)
            return Unnormed(stream, norm)
        partials = x.new_empty(launch.parts, *stream.shape, dtype=torch.float32)
        self._run_skinny(x, weight, None, partials, launch)
        first()
        return self._normed(stream, partials, bias, norm)

    def add_experts_norm(self, stream: torch.Tensor, x: Normed, experts: Experts, norm: torch.Tensor) -> Normed:
        if self.shape.layer_norm:
            return super().add_experts_norm(stream, x, experts, norm)
        if not reads_by_pair(len(stream), experts):
            partials = grouped_experts(self.computed(x), experts)
            if self.group is not None:
                return self.group.add_norm(stream, partials, None, norm, self.shape.eps)
            return self._normed(stream, partials, None, norm)
        read = x.stream if isinstance(x, Unnormed) else x
        if self.group is not None:
            partials = self.group.room((1, *stream.shape), torch.float32)
            experts_of_few(read, experts, partials[0], added=False, **self._norm_of(x))
            return self.group.add_norm(stream, partials, None, norm, self.shape.eps)
        experts_of_few(read, experts, stream, added=True, **self._norm_of(x))
        return Unnormed(stream, norm) if len(stream) == 1 else self._normed(stream, None, None, norm)

    def _experts_output(self, x: Normed, experts: Experts) -> torch.Tensor:
        if not reads_by_pair(len(x), experts):
            return grouped_experts(x, experts).sum(0)
        out = torch.empty_like(x)
        experts_of_few(x, experts, out, added=False)
        return out

    def _partials(self, group: Group, x: Gated, weight: Weight, launch: SkinnyLaunch | None) -> torch.Tensor:
        """This device's partial sums [P, T, outputs] of the projection of x, for the group to add up."""
        outputs = weight.shape[0]
        if launch is not None:
            partials = group.room((launch.parts, len(x), outputs), torch.float32)
            self._run_skinny(x, weight, None, partials, launch)
            return partials
        if not isinstance(weight, torch.Tensor):
            return self._linear(x, weight, None)[None]
        partials = group.room((1, len(x), outputs), x.dtype)
        self._linear_into(partials[0], x, weight, None)
        return partials

    def _in_pieces(self, x: torch.Tensor, weight: Weight, bias: torch.Tensor | None) -> torch.Tensor:
        """The library's GEMM [T, N], in the pieces of PIECES."""
        if len(_pieces(len(x))) == 1 or not isinstance(weight, torch.Tensor):
            return super().linear(x, weight, bias)
        out = x.new_empty(len(x), weight.shape[0])
        self._linear_into(out, x, weight, bias)
        return out

    def _projected(self, x: Gated, weight: Weight) -> torch.Tensor:
        return super()._projected(x, weight) if isinstance(x, Fp8Rows) else self.linear(x, weight)

    def _linear_into(self, out: torch.Tensor, x: Gated, weight: Weight, bias: torch.Tensor | None) -> None:
        if not isinstance(weight, torch.Tensor):
            super()._linear_into(out, x, weight, bias)
            return
        for part in _pieces(len(x)):
            super()._linear_into(out[part], x[part], weight, bias)

    def computed(self, x: Normed) -> torch.Tensor:
        return self.norm(x.stream, x.weight) if isinstance(x, Unnormed) else super().computed(x)

    def _linear(self, x: Gated, weight: Weight, bias: torch.Tensor | None) -> torch.Tensor:
        if isinstance(weight, Fp8Weight) and (isinstance(x, Fp8Rows) or has_tiles(x, weight)):
            rows = x if isinstance(x, Fp8Rows) else quantize_rows(x)
            return fp8_gemm(rows, weight, bias, self.shape.dtype)
        if isinstance(weight, StackedWeight):
            return torch.cat([self._linear(x, cast(Weight, rows), own) for rows, own in weight.with_biases(bias)], 1)
        if isinstance(weight, Fp8BlockWeight) and takes_groups(x):
            return fp8_block_gemm(quantize_groups(x, weight.group), weight, bias, self.shape.dtype)
        if isinstance(weight, Int4Weight):
            weight = int4_dequantized(weight, x.dtype)
        if isinstance(weight, PackedWeight):
            weight = packed_dequantized(weight, x.dtype)
        return super()._linear(x, weight, bias)

    def _run_skinny(
        self,
        x: torch.Tensor,
        weight: Weight,
        bias: torch.Tensor | None,
        out: torch.Tensor,
        launch: SkinnyLaunch,
        **fused: Any,
    ) -> None:
        """The skinny GEMM of packed weights, `fp8_skinny_gemm` for FP8 and several tokens, else `skinny_gemm`."""
        if isinstance(weight, Int4Weight):
            int4_skinny_gemm(x, weight, bias, out, launch, **fused)
        elif isinstance(weight, PackedWeight):
            packed_skinny_gemm(x, weight, bias, out, launch, **fused)
        elif isinstance(weight, Fp8Weight | Fp8BlockWeight) and len(x) > 1:
            fp8_skinny_gemm(quantize_rows(x, halves=2), weight, bias, out, launch, **fused)
        elif isinstance(weight, torch.Tensor | Fp8Weight | Fp8BlockWeight):
            skinny_gemm(x, weight, bias, out, launch, **fused)

    def _input_and_launch(
        self, x: Normed, weight: Weight, *, gated: bool = False
    ) -> tuple[torch.Tensor, SkinnyLaunch | None]:
        """The input of a GEMM and its launch. A skinny GEMM norms the stream itself."""
        read = x.stream if isinstance(x, Unnormed) else x
        launch = self.launch(read, weight, gated=gated)
        return (self.computed(x) if launch is None else read), launch

    def _as_read(self, x: Normed, weight: Weight) -> Normed:
        """x in the form that a GEMM with this weight accepts. A GEMM with packed weights computes no norm."""
        return self.computed(x) if isinstance(weight, Int4Weight | PackedWeight) else x

    def _norm_of(self, x: Normed) -> dict[str, Any]:
        """The arguments that make `skinny_gemm` compute a pending norm."""
        return {"norm": x.weight, "eps": self.shape.eps} if isinstance(x, Unnormed) else {}

    def rotation(self, positions: torch.Tensor) -> Rotation:
        """Cosine and sine [T, D / 2] float32 of the angles of positions [T]."""
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
            BLOCK_HALF=triton.next_power_of_2(self.shape.head_dim // 2),
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
        q_norm, k_norm = self._norm_written(qkv, q_norm, k_norm)
        tokens, heads = len(qkv), shape.num_heads + 2 * shape.num_kv_heads
        query = qkv.new_empty(tokens, shape.num_heads, shape.head_dim)
        key_cache, value_cache = caches
        block_half = triton.next_power_of_2(shape.head_dim // 2)
        block_heads = min(triton.next_power_of_2(heads), max(1, ROTATED_AT_A_TIME // block_half))
        rotate_write_kernel[(tokens, triton.cdiv(heads, block_heads))](
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
            BLOCK_HEADS=block_heads,
            BLOCK_HALF=block_half,
            UNIT_VALUES=shape.unit_v_norm,
            num_warps=4,
            **dependent_launch_options(qkv.device),
        )
        return query

    def norm_with(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        out = x.new_empty(x.shape)
        self._run_norm(x, None, None, weight, out, eps)
        return out

    def rotate_and_write_latent(
        self,
        query: torch.Tensor,
        latent: torch.Tensor,
        rotation: Rotation,
        norm: torch.Tensor,
        eps: float,
        cache: torch.Tensor,
        slot_mapping: torch.Tensor,
    ) -> None:
        tokens, heads, width = query.shape
        half = (width - len(norm)) // 2
        block_half = triton.next_power_of_2(half)
        block_heads = min(triton.next_power_of_2(heads), max(1, ROTATED_AT_A_TIME // block_half))
        rotate_write_latent_kernel[(tokens, triton.cdiv(heads, block_heads))](
            query,
            latent,
            *rotation,
            norm,
            cache,
            slot_mapping,
            *query.stride()[:2],
            latent.stride(0),
            *cache.stride()[:2],
            heads,
            eps,
            RANK=len(norm),
            HALF=half,
            BLOCK_SIZE=cache.shape[1],
            BLOCK_R=triton.next_power_of_2(len(norm)),
            BLOCK_HALF=block_half,
            BLOCK_HEADS=block_heads,
            num_warps=4,
            **dependent_launch_options(query.device),
        )

    def _norm_whole(self, qkv: torch.Tensor, q_norm: torch.Tensor, k_norm: torch.Tensor) -> None:
        if self.group is None:
            super()._norm_whole(qkv, q_norm, k_norm)
            return
        tokens, q_width, k_width = len(qkv), len(q_norm), len(k_norm)
        rows, options = triton.cdiv(tokens, SQUARES_AT_A_TIME), dependent_launch_options(qkv.device)
        squares = self.group.room((rows, 2 * SQUARES_AT_A_TIME), torch.float32)
        block = triton.next_power_of_2(q_width)
        head_squares_kernel[(rows * SQUARES_AT_A_TIME,)](
            qkv,
            squares,
            tokens,
            q_width,
            k_width,
            qkv.stride(0),
            self.shape.kv_copies,
            BLOCK_Q=block,
            BLOCK_K=triton.next_power_of_2(k_width),
            num_warps=max(1, min(16, block // 256)),
            **options,
        )
        sums = self.group.all_reduce(squares)
        scale_heads_kernel[(tokens, triton.cdiv(q_width + k_width, GATED_AT_A_TIME))](
            qkv,
            sums,
            q_norm,
            k_norm,
            q_width,
            k_width,
            *self._whole_widths(q_norm, k_norm),
            qkv.stride(0),
            self.shape.eps,
            BLOCK=GATED_AT_A_TIME,
            num_warps=4,
            **options,
        )

    def launch(self, x: torch.Tensor, weight: Weight, *, cut: bool = False, gated: bool = False) -> SkinnyLaunch | None:
        """The launch of a skinny GEMM; None if the library computes it.

        With `cut`, partial sums are allowed. With `gated`, the result is gated.
        """
        if isinstance(weight, Fp8Weight):
            return fp8_launch_for(x, weight, cut=cut)
        if isinstance(weight, Fp8BlockWeight):
            return block_launch_for(x, weight, cut=cut)
        if isinstance(weight, Int4Weight):
            return int4_launch_for(x, weight, cut=cut)
        if isinstance(weight, PackedWeight):
            return packed_launch_for(x, weight, cut=cut)
        return launch_for(x, weight, cut=cut, gated=gated) if isinstance(weight, torch.Tensor) else None

    def _normed(
        self, stream: torch.Tensor, partials: torch.Tensor | None, bias: torch.Tensor | None, weight: torch.Tensor
    ) -> torch.Tensor:
        """`_add_norm` into a new tensor."""
        out = torch.empty_like(stream)
        self._add_norm(stream, partials, bias, weight, out)
        return out

    def _add_norm(
        self,
        stream: torch.Tensor,
        partials: torch.Tensor | None,
        bias: torch.Tensor | None,
        weight: torch.Tensor,
        out: torch.Tensor,
    ) -> None:
        self._run_norm(stream, partials, bias, weight, out, self.shape.eps)

    def _run_norm(
        self,
        stream: torch.Tensor,
        partials: torch.Tensor | None,
        bias: torch.Tensor | None,
        weight: torch.Tensor,
        out: torch.Tensor,
        eps: float,
    ) -> None:
        """`_add_norm` with this number under the root."""
        tokens, width = stream.shape
        block = triton.next_power_of_2(width)
        norm_kernel[(tokens,)](
            stream,
            partials,
            bias,
            weight,
            out,
            width,
            stream.stride(0),
            out.stride(0),
            eps,
            PARTS=0 if partials is None else len(partials),
            BLOCK=block,
            num_warps=max(1, min(16, block // 256)),
            **dependent_launch_options(stream.device),
        )


def silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """silu(gate) * up, [T, N], of gate_up [T, 2 N]."""
    width = gate_up.shape[1] // 2
    out = gate_up.new_empty(len(gate_up), width)
    silu_mul_kernel[(len(gate_up), triton.cdiv(width, GATED_AT_A_TIME))](
        gate_up,
        out,
        width,
        gate_up.stride(0),
        out.stride(0),
        BLOCK=GATED_AT_A_TIME,
        num_warps=4,
        **dependent_launch_options(out.device),
    )
    return out


def _pieces(tokens: int) -> list[slice]:
    """The ranges of tokens whose GEMMs are computed one after the other."""
    stops = list(accumulate(PIECES.get(tokens, (tokens,)), initial=0))
    return [slice(*ends) for ends in pairwise(stops)]
