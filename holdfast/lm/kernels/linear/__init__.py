"""The linear layers of a decoder, with the norms, rotations and activations around them, and their backends."""

from __future__ import annotations

from holdfast.lm.kernels.collectives.protocol import Group
from holdfast.lm.kernels.integer.library import library_for
from holdfast.lm.kernels.linear.layers import LayerOps, LayerShape
from holdfast.lm.kernels.linear.library_layers import LibraryLayerOps


def layer_ops_for(shape: LayerShape, group: Group | None = None, *, invariant: bool = False) -> LayerOps:
    """The backend for the device of `shape.inverse_frequencies`: Triton kernels on CUDA, PyTorch elsewhere.

    In bfloat16 on a CPU, it is the library in C, if the install has it. `group` is the devices that share each layer,
    if there are several. `invariant`: the bits of a token's results must not depend on the other tokens. On a CPU
    only the library's whole steps keep that (`whole_steps`).
    """
    if shape.inverse_frequencies.device.type == "cuda":
        # Imported here because a CPU installation has no Triton.
        if invariant:
            from holdfast.lm.kernels.linear.invariant_layers import InvariantLayerOps

            return InvariantLayerOps(shape, group)
        from holdfast.lm.kernels.linear.fused_layers import FusedLayerOps

        return FusedLayerOps(shape, group)
    library = library_for(shape.inverse_frequencies.device, shape.dtype)
    return LayerOps(shape, group) if library is None else LibraryLayerOps(shape, library, group)
