"""The first projection of a mixer that is not attention alone, with the adapters of a step."""

from __future__ import annotations

from collections.abc import Callable

import torch

from holdfast.lm.kernels.fp8 import Weight
from holdfast.lm.kernels.linear.layers import LayerOps, Normed
from holdfast.lm.kernels.lora.protocol import Lora, LoraStack, StepAdapters
from holdfast.lm.models.base import StepInput


class Projection:
    """A projection of the normed stream, which adapters may change."""

    def __init__(self, weight: Weight, bias: torch.Tensor | None, index: int) -> None:
        """`weight` is [rows, hidden], and `bias` [rows]. `index` is the layer's number among those of the device."""
        self._weight, self._bias, self._index = weight, bias, index

    def of(self, ops: LayerOps, normed: Normed, step: StepInput) -> torch.Tensor:
        """The projection [T, rows] of the normed stream, and what adapters change of it."""
        adapters = step.adapters
        if adapters is None:
            return self._product(ops, normed, self._bias)
        x, stack = ops.computed(normed), adapters.layers[self._index].qkv
        assert stack is not None
        return with_adapters(lambda bias: self._product(ops, x, bias), x, self._bias, stack, adapters, adapters.tokens)

    def _product(self, ops: LayerOps, x: Normed, bias: torch.Tensor | None) -> torch.Tensor:
        return ops.linear(x, self._weight, bias)


class SplitProjection(Projection):
    """A projection whose last rows have a weight of their own."""

    def __init__(self, weight: Weight, bias: torch.Tensor | None, index: int, tail: torch.Tensor) -> None:
        """`tail` [last rows, hidden] has no bias."""
        super().__init__(weight, bias, index)
        self._tail = tail

    def _product(self, ops: LayerOps, x: Normed, bias: torch.Tensor | None) -> torch.Tensor:
        computed = ops.computed(x)
        return torch.cat((super()._product(ops, computed, bias), ops.linear(computed, self._tail)), dim=1)


def with_adapters(
    product: Callable[[torch.Tensor | None], torch.Tensor],
    x: torch.Tensor,
    bias: torch.Tensor | None,
    stack: LoraStack,
    adapters: StepAdapters,
    lora: Lora,
) -> torch.Tensor:
    """The product of x [T, K] with a weight, plus bias, with the adapters' changes: [T, N].

    `product` computes it, plus the bias that it is given.
    """
    finish = lora.begin(x, stack)
    out = product(None if adapters.scaled else bias)
    finish.add(out)
    if adapters.scaled:  # gains do not scale the bias
        lora.scale(out, stack)
        if bias is not None:
            out += bias
    return out
