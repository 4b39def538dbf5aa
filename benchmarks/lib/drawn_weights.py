"""Weights of a peer's model, drawn as Holdfast draws random ones: normal, and norms of 1.

vLLM's own dummy weights are all at most 0.001. Its attention is then uniform and its activations are nearly 0, and a
GPU at its power limit may be faster with such numbers. vLLM's process imports this module, so it imports nothing.
"""

from __future__ import annotations

from typing import Any

STD = 0.02
"""Standard deviation of weights, that of Llama 3's config (`initializer_range`)."""


def redraw(model: Any) -> None:
    """Draw all floating-point parameters of a module again, in place, as captured graphs read the same memory."""
    for weight in model.parameters():
        if weight.is_floating_point():
            weight.data.fill_(1.0) if weight.dim() == 1 else weight.data.normal_(0.0, STD)


class DrawsWeights:
    """Method that vLLM's worker gets by `--worker-extension-cls`, for a call of `/collective_rpc`."""

    def draw_weights_again(self) -> dict[str, float]:
        """Draw the weights. Returns the least and the most standard deviation of a matrix."""
        model = self.get_model()  # type: ignore[attr-defined]  # a method of the worker
        redraw(model)
        drawn = [weight for weight in model.parameters() if weight.is_floating_point() and weight.dim() > 1]
        found = [float(weight.data[:1024].float().std()) for weight in drawn]
        return {"matrices": len(found), "least": min(found), "most": max(found)}
