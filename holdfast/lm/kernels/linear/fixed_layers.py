"""The operations of a decoder layer on a CPU, with the same bits for a token on any number of ranks."""

from __future__ import annotations

from collections.abc import Callable

import torch

from holdfast.lm.kernels.collectives.protocol import Group
from holdfast.lm.kernels.fp8 import Weight
from holdfast.lm.kernels.integer.library import Library
from holdfast.lm.kernels.integer.step import LibraryProduct
from holdfast.lm.kernels.linear.layers import Change, Gated, LayerOps, LayerShape, Normed, nothing
from holdfast.lm.kernels.linear.rank_sums import sum_over_devices


class FixedLayerOps(LayerOps):
    """`LayerOps` of plain weights whose products are those of the library in C, for steps of one token.

    PyTorch computes the other operations. Their sizes are those of a whole layer, or of a head.
    """

    def __init__(self, shape: LayerShape, library: Library, group: Group | None, ranks: int) -> None:
        """Sums are cut into slices for `ranks` devices, a multiple of those of the group."""
        super().__init__(shape, group)
        self._library, self._slices = library, ranks // (1 if group is None else group.size)
        self._products: dict[tuple[int, int], tuple[torch.Tensor, list[LibraryProduct]]] = {}
        """By a weight's address and the number of its slices, the weight and the product of each slice."""

    def _linear(self, x: Gated, weight: Weight, bias: torch.Tensor | None) -> torch.Tensor:
        found = self._partials(x, weight, 1)[0]
        return (found if bias is None else found + bias).to(self.shape.dtype)

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
        """See `LayerOps.add_linear_norm`. Raises TypeError for a change: adapters are not cut into slices."""
        if change is not None or first is not nothing:
            raise TypeError("adapters have no sums whose bits are the same on any number of ranks")
        added = sum_over_devices(self._partials(x, weight, self._slices), self.group)
        if bias is not None:
            added += bias
        stream += added.to(stream.dtype) if out_norm is None else self.norm(added.to(stream.dtype), out_norm)
        return self.norm(stream, norm)

    def _partials(self, x: torch.Tensor, weight: Weight, slices: int) -> torch.Tensor:
        """Partial sums [slices, T, N] float32 of x [T, K] times weight [N, K] transposed, over equal slices of K.

        Raises TypeError for a weight that is not plain numbers.
        """
        if not isinstance(weight, torch.Tensor):
            raise TypeError(f"a {type(weight).__name__} has no sums whose bits are the same on any number of ranks")
        key = weight.data_ptr(), slices
        if key not in self._products:
            pieces = torch.tensor_split(weight, slices, 1) if slices > 1 else (weight,)
            products = [LibraryProduct(self._library, piece, weight.dtype) for piece in pieces]
            self._products[key] = weight, products
        inputs = torch.tensor_split(x.float(), slices, 1)
        products = self._products[key][1]
        return torch.stack([each.of(own.contiguous()) for each, own in zip(products, inputs, strict=True)])
