"""The operations of the backward pass around GEMMs, and their backends."""

from __future__ import annotations

from holdfast.lm.kernels.collectives.protocol import Group
from holdfast.lm.kernels.linear import layer_ops_for
from holdfast.lm.kernels.linear.layers import LayerShape
from holdfast.lm.kernels.training.ops import TrainingOps


def training_ops_for(shape: LayerShape, group: Group | None = None) -> TrainingOps:
    """The backend for the device of `shape.inverse_frequencies`: Triton kernels on CUDA, PyTorch elsewhere.

    `group` is the devices that share each layer, if there are several.
    """
    layers = layer_ops_for(shape, group)
    if shape.inverse_frequencies.device.type == "cuda":
        # Imported here because a CPU installation has no Triton.
        from holdfast.lm.kernels.training.fused_ops import FusedTrainingOps

        return FusedTrainingOps(layers)
    return TrainingOps(layers)
