"""The operations of a decoder layer in bfloat16 on a CPU, by the library in C where it has them."""

from __future__ import annotations

from collections.abc import Callable

import torch

from holdfast.lm.kernels.collectives.protocol import Group
from holdfast.lm.kernels.fp8 import Weight
from holdfast.lm.kernels.integer.library import Library
from holdfast.lm.kernels.linear.layers import Change, Gated, LayerOps, LayerShape, Normed, Rotation, nothing
from holdfast.lm.kernels.lora.protocol import Finish


class LibraryLayerOps(LayerOps):
    """`LayerOps` in bfloat16 on a CPU. RMS norms, SiLU gates and rotations are one call each.

    PyTorch takes several operations for each. Every one of them waits for memory, because the weights have just
    replaced its code and data in the caches. Sums are in float32 and rounded once. PyTorch computes all others.
    """

    def __init__(self, shape: LayerShape, library: Library, group: Group | None = None) -> None:
        super().__init__(shape, group)
        self._library = library

    def _plain_norm(self, stream: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        if self.shape.layer_norm or stream.ndim != 2 or not self._takes(stream, weight):
            return super()._plain_norm(stream, weight)
        return self._library.norm(stream, None, weight, self.shape.eps)

    def gate(self, gate_up: torch.Tensor, adapters: Finish | None = None) -> torch.Tensor:
        if self.shape.activation != "silu" or not self.shape.gated or not self._takes(gate_up):
            return super().gate(gate_up, adapters)
        if adapters is not None:
            adapters.add(gate_up)
        return self._library.gate(gate_up)

    def gated_linear(self, x: Normed, weight: Weight, bias: torch.Tensor | None = None) -> Gated:
        return self.gate(self.linear(x, weight, bias))

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
        alone = self.group is None and out_norm is None and change is None and bias is None
        packed = not isinstance(weight, torch.Tensor)
        if not (alone and packed and len(norm) and not self.shape.layer_norm and self._takes(stream, norm)):
            return super().add_linear_norm(stream, x, weight, bias, norm, first, out_norm, change)
        first()
        return self._library.norm(stream, self._linear(x, weight, None), norm, self.shape.eps)

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
        plain = q_norm is None and not shape.unit_v_norm and shape.num_kv_heads > 0 and self._rotates
        if not (plain and self._takes(qkv, *caches) and slot_mapping.dtype == torch.int64):
            return super().rotate_and_write(qkv, rotation, q_norm, k_norm, caches, slot_mapping)
        return self._library.rotate(qkv, rotation, caches, slot_mapping, shape.num_heads)

    def _takes(self, *tensors: torch.Tensor) -> bool:
        """Whether the library reads all of them as they are."""
        return all(each.dtype == torch.bfloat16 and each.is_contiguous() for each in tensors)
