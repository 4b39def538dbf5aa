"""The backend for what a decoder layer computes beside attention."""

from __future__ import annotations

from holdfast.lm.kernels.linear.fp8 import Fp8Weight, Weight, quantize
from holdfast.lm.kernels.linear.torch_layers import ACTIVATIONS, LayerOps, LayerShape, Normed, Rotation

__all__ = [
    "ACTIVATIONS",
    "Fp8Weight",
    "LayerOps",
    "LayerShape",
    "Normed",
    "Rotation",
    "Weight",
    "layer_ops_for",
    "quantize",
]


def layer_ops_for(shape: LayerShape) -> LayerOps:
    """The backend for the device of the shape's frequencies: Triton kernels on CUDA, PyTorch elsewhere."""
    if shape.inverse_frequencies.device.type == "cuda":
        # Triton comes with CUDA builds only, so that a CPU installation works without it.
        from holdfast.lm.kernels.linear.fused_layers import FusedLayerOps

        return FusedLayerOps(shape)
    return LayerOps(shape)
