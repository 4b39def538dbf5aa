"""The operations of a decoder layer on CUDA, with the same bits for a token whatever else a step computes."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import cast

import torch

from holdfast.lm.kernels.collectives.protocol import Group
from holdfast.lm.kernels.fp8 import Weight
from holdfast.lm.kernels.linear.equal_sums import adds_alike, rows_of_library
from holdfast.lm.kernels.linear.experts.experts import Experts
from holdfast.lm.kernels.linear.experts.launches import fixed_experts
from holdfast.lm.kernels.linear.fused_layers import FusedLayerOps
from holdfast.lm.kernels.linear.invariant_product import (
    Multiplied,
    add_product,
    gated_product,
    gpu_of,
    order_on_ranks,
    partial_products,
    product,
    slice_products,
)
from holdfast.lm.kernels.linear.layers import Change, Gated, LayerShape, Normed, nothing
from holdfast.lm.kernels.linear.rank_sums import sum_over_devices
from holdfast.lm.kernels.packed import PackedWeight
from holdfast.lm.kernels.stacked import StackedWeight


class InvariantLayerOps(FusedLayerOps):
    """`FusedLayerOps` on one device, whose products are those of `product`, and whose experts have one launch.

    Weights are plain numbers, or in the form of `same_bits.fixed_form`. The other kernels have a program for each
    token, or compute each number by itself.
    """

    def __init__(self, shape: LayerShape, group: Group | None = None, ranks: int = 1) -> None:
        """Sums are cut into slices for `ranks` devices, a power of two; 1: they are not.

        They have the same bits on all groups whose number of devices divides it. Raises ValueError for other groups.
        """
        super().__init__(shape, group)
        size = 1 if group is None else group.size
        if ranks % size:
            raise ValueError(f"{size} devices share the layers, and sums are cut for {ranks} ranks; give a multiple")
        self._slices = ranks // size if ranks > 1 else 0
        """Number of this device's slices of the inputs of a projection that adds to the stream; 0: there are none."""
        self._gpu = gpu_of(shape.inverse_frequencies.device)

    def settle(self, weights: Iterable[Weight]) -> str:
        given = list(weights)
        alike = self._gpu.alike and adds_alike(given, self.shape.dtype, self._gpu, self._slices)
        if self.group is not None:  # all devices take the same kernels, also if they are of different kinds
            own = torch.tensor([alike], dtype=torch.int64, device=self.shape.inverse_frequencies.device)
            alike = bool(self.group.gather(own).min())
        equal = rows_of_library(given, self.shape.dtype, self._gpu, self._slices) if alike else {}
        self._gpu = replace(self._gpu, alike=alike, equal_rows=equal)
        return "" if alike else ", one tile"

    def linear(self, x: Normed, weight: Weight, bias: torch.Tensor | None = None) -> torch.Tensor:
        if isinstance(weight, StackedWeight):
            read = self.computed(x)
            return torch.cat([self.linear(read, cast(Weight, rows), own) for rows, own in weight.with_biases(bias)], 1)
        read, own = self.computed(x), _multiplied(weight)
        order = order_on_ranks(own, read.dtype, self._gpu) if self._slices else None
        return product(read, own, bias, gpu=self._gpu, order=order)

    def gated_linear(self, x: Normed, weight: Weight, bias: torch.Tensor | None = None) -> Gated:
        if self.shape.activation == "silu" and self.shape.gated and not isinstance(weight, StackedWeight):
            read = self.computed(x)
            found = gated_product(read, _multiplied(weight), bias, gpu=self._gpu)
            return self.gate(self.linear(read, weight, bias)) if found is None else found
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
        if self._slices:
            return self._add_slices(stream, x, weight, bias, norm, out_norm, change)
        if self.shape.layer_norm or out_norm is not None or change is not None or not len(norm):
            return self._add_separately(stream, x, weight, bias, norm, out_norm, change)
        if isinstance(weight, StackedWeight):
            return self._normed(stream, self.linear(x, weight)[None], bias, norm)
        own = _multiplied(weight)
        if add_product(stream, x, own, bias, gpu=self._gpu):
            return self._normed(stream, None, None, norm)
        return self._normed(stream, partial_products(x, own, gpu=self._gpu), bias, norm)

    def _add_slices(
        self,
        stream: torch.Tensor,
        x: Gated,
        weight: Weight,
        bias: torch.Tensor | None,
        norm: torch.Tensor,
        out_norm: torch.Tensor | None,
        change: Change | None,
    ) -> Normed:
        """`add_linear_norm` with sums that are cut for several ranks. Raises TypeError for adapters, which are not."""
        if change is not None or self.shape.layer_norm:
            raise TypeError("adapters and layer norms have no sums whose bits are the same on any number of ranks")
        slices = slice_products(x, _multiplied(weight), self._slices, gpu=self._gpu)
        added = sum_over_devices(slices, self.group)
        if out_norm is None and len(norm):
            return self._normed(stream, added[None], bias, norm)
        if bias is not None:
            added += bias
        stream += added.to(stream.dtype) if out_norm is None else self.norm(added.to(stream.dtype), out_norm)
        return self.norm(stream, norm)

    def add_experts_norm(self, stream: torch.Tensor, x: Normed, experts: Experts, norm: torch.Tensor) -> Normed:
        found = self._experts(self.computed(x), experts)
        if self.shape.layer_norm or not len(norm):
            stream += _sum_in_order(found)
            return self.norm(stream, norm)
        return self._normed(stream, found, None, norm)

    def _experts_output(self, x: Normed, experts: Experts) -> torch.Tensor:
        return _sum_in_order(self._experts(self.computed(x), experts))

    def _experts(self, x: torch.Tensor, experts: Experts) -> torch.Tensor:
        """The outputs of each token's experts times their shares, [per_token, T, hidden]."""
        return fixed_experts(x, experts, partial_products(x, experts.router, gpu=self._gpu))

    def _linear(self, x: Gated, weight: Weight, bias: torch.Tensor | None) -> torch.Tensor:
        return self.linear(x, weight, bias)

    def _projected(self, x: Gated, weight: Weight) -> torch.Tensor:
        return self.linear(x, weight)


def _sum_in_order(outputs: torch.Tensor) -> torch.Tensor:
    """The sum [T, hidden] of outputs [R, T, hidden], one after the other."""
    total = outputs[0]
    for each in outputs[1:]:
        total = total + each
    return total


def _multiplied(weight: Weight) -> Multiplied:
    """A weight, if `product` reads it. Raises TypeError for others."""
    if not isinstance(weight, torch.Tensor | PackedWeight):
        raise TypeError(f"a {type(weight).__name__} has no product whose bits are the same in any step")
    return weight
