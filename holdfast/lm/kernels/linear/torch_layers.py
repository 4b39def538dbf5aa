"""What a decoder layer computes beside attention, by PyTorch: for CPUs, and the oracle of the Triton kernels."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional

from holdfast.lm.kernels.cache.kv_cache import write_slots
from holdfast.lm.kernels.linear.fp8 import Fp8Weight, Weight

ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": functional.silu,
    "gelu": functional.gelu,
    "gelu_pytorch_tanh": lambda x: functional.gelu(x, approximate="tanh"),
}

Rotation = tuple[torch.Tensor, torch.Tensor]
"""What `rotation` gave for the positions of a step: cosine and sine, laid out as the same object's kernels like it."""


@dataclass(frozen=True, kw_only=True)
class LayerShape:
    """What is the same in all layers of a decoder."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    eps: float
    """Of every RMS norm."""
    activation: str
    """A key of ACTIVATIONS."""
    dtype: torch.dtype
    """Of weights and activations."""
    inverse_frequencies: torch.Tensor
    """Radians a position, [D / 2] float32, on the device that computes."""
    amplitude: float = 1.0
    """What cosine and sine are multiplied with."""


@dataclass(frozen=True)
class Unnormed:
    """The RMS norm of a stream of one token times a weight, left to the product that reads it."""

    stream: torch.Tensor  # [1, hidden]
    weight: torch.Tensor  # [hidden]


Normed = Any
"""What `add_linear_norm` gave, for `linear` and `gated_linear` of the same object: a tensor, or how to get it."""

Gated = Any
"""What `gated_linear` gave, for `add_linear_norm` of the same object: a tensor, or its FP8 form."""


class LayerOps:
    """The computations of a decoder layer around `Attention`, over T packed tokens.

    Projections and their neighbours are one call, so that a backend may fuse them: the residual stream is added to in
    place by the projection that ends each half of a layer, and what comes out is normed for the next half.
    """

    def __init__(self, shape: LayerShape) -> None:
        self.shape = shape

    def norm(self, stream: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """RMS norm [T, hidden] times weight [hidden], accumulated in float32, in the dtype of the stream."""
        return functional.rms_norm(stream, weight.shape, weight, self.shape.eps)

    def linear(self, x: Normed, weight: Weight, bias: torch.Tensor | None = None) -> torch.Tensor:
        """x [T, K] times weight [N, K] transposed, plus bias [N]: [T, N]."""
        return self._product(x, weight, bias)

    def gated_linear(self, x: Normed, weight: Weight, bias: torch.Tensor | None = None) -> Gated:
        """activation(gate) * up, [T, N], of the projections gate over up, stacked in weight [2 N, K] and bias [2 N]."""
        gate, up = self._product(x, weight, bias).chunk(2, dim=-1)
        return ACTIVATIONS[self.shape.activation](gate).mul_(up)

    def add_linear_norm(
        self,
        stream: torch.Tensor,
        x: Gated,
        weight: Weight,
        bias: torch.Tensor | None,
        norm: torch.Tensor,
    ) -> Normed:
        """Add the projection of x to the stream [T, hidden] in place; `norm` of the sum."""
        if isinstance(weight, Fp8Weight):
            stream += self._product(x, weight, None)
        else:
            stream.addmm_(x, weight.t())
        if bias is not None:
            stream += bias
        return self.norm(stream, norm)

    def rotation(self, positions: torch.Tensor) -> Rotation:
        """Cosine and sine of the angles of positions [T] int64, computed in float32; good for all layers of a step."""
        cosine, sine = self._angles(positions)
        cosine, sine = cosine[:, None].to(self.shape.dtype), sine[:, None].to(self.shape.dtype)
        # Whole heads, [T, 1, D]: the sine negative where the other half is subtracted.
        return torch.cat((cosine, cosine), dim=-1), torch.cat((-sine, sine), dim=-1)

    def rotate_and_write(
        self,
        qkv: torch.Tensor,
        rotation: Rotation,
        q_norm: torch.Tensor | None,
        k_norm: torch.Tensor | None,
        caches: tuple[torch.Tensor, torch.Tensor],
        slot_mapping: torch.Tensor,
    ) -> torch.Tensor:
        """Turn queries and keys, put keys and values into the cache; the queries [T, H, D].

        qkv [T, (H + 2 Hkv) D] holds queries, keys and values, in this order. Where q_norm and k_norm [D] are given
        (both or neither), queries and keys are normed within each head first. The first half of a head is turned
        against its second half (GPT-NeoX's pairing, that of Transformers). Caches and slot_mapping are those of
        `Attention.write`.
        """
        shape = self.shape
        heads, kv_heads, dim = shape.num_heads, shape.num_kv_heads, shape.head_dim
        turned, value = torch.split(qkv.view(-1, heads + 2 * kv_heads, dim), [heads + kv_heads, kv_heads], dim=1)
        if q_norm is not None and k_norm is not None:
            query, key = torch.split(turned, [heads, kv_heads], dim=1)
            turned = torch.cat((self.norm(query, q_norm), self.norm(key, k_norm)), dim=1)
        cosine, sine = rotation
        turned = (turned * cosine).addcmul_(turned.roll(dim // 2, -1), sine)
        query, key = torch.split(turned, [heads, kv_heads], dim=1)
        write_slots(key, value, *caches, slot_mapping)
        return query

    def _product(self, x: Gated, weight: Weight, bias: torch.Tensor | None) -> torch.Tensor:
        """x times weight transposed, plus bias. FP8 is converted for the occasion: right, and slower than without."""
        if isinstance(weight, Fp8Weight):
            weight = weight.dequantized(x.dtype)
        return functional.linear(x, weight, bias)

    def _angles(self, positions: torch.Tensor) -> Rotation:
        """Cosine and sine, [T, D / 2] float32 with the amplitude in them."""
        angles = positions[:, None].float() * self.shape.inverse_frequencies
        cosine, sine = angles.cos(), angles.sin()
        if self.shape.amplitude != 1.0:
            cosine, sine = cosine * self.shape.amplitude, sine * self.shape.amplitude
        return cosine, sine
