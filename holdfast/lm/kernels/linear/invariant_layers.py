"""The operations of a decoder layer on CUDA, with the same bits for a token whatever else a step computes."""

from __future__ import annotations

from collections.abc import Callable

import torch

from holdfast.lm.kernels.collectives.protocol import Group
from holdfast.lm.kernels.fp8 import Weight
from holdfast.lm.kernels.linear.fused_layers import FusedLayerOps
from holdfast.lm.kernels.linear.invariant_product import partial_products, product
from holdfast.lm.kernels.linear.layers import Change, Gated, LayerShape, Normed, nothing


class InvariantLayerOps(FusedLayerOps):
    """`FusedLayerOps` of plain weights on one device, whose products are those of `product`.

    The other kernels have a program for each token, or compute each number by itself.
    """

    def __init__(self, shape: LayerShape, group: Group | None = None) -> None:
        """Raises ValueError for a group: its devices would add up parts of each sum."""
        if group is not None:
            raise ValueError("deterministic is on, and several devices share the layers; drop one")
        super().__init__(shape)
        device = shape.inverse_frequencies.device
        on_gpu = device.type == "cuda"  # else the interpreter, in tests
        self._processors = torch.cuda.get_device_properties(device).multi_processor_count if on_gpu else 4

    def linear(self, x: Normed, weight: Weight, bias: torch.Tensor | None = None) -> torch.Tensor:
        return product(self.computed(x), _plain(weight), bias, processors=self._processors)

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
        first()
        if self.shape.layer_norm or out_norm is not None or change is not None or not len(norm):
            return self._add_separately(stream, x, weight, bias, norm, out_norm, change)
        return self._normed(stream, partial_products(x, _plain(weight), processors=self._processors), bias, norm)

    def _linear(self, x: Gated, weight: Weight, bias: torch.Tensor | None) -> torch.Tensor:
        return self.linear(x, weight, bias)

    def _projected(self, x: Gated, weight: Weight) -> torch.Tensor:
        return self.linear(x, weight)


def _plain(weight: Weight) -> torch.Tensor:
    """A weight, if it is plain numbers. Raises TypeError for others."""
    if not isinstance(weight, torch.Tensor):
        raise TypeError(f"a {type(weight).__name__} has no product whose bits are the same in any step")
    return weight
