"""The linear layers of a decoder, with the norms, rotations and activations around them, and their backends."""

from __future__ import annotations

from holdfast.lm.kernels.collectives.protocol import Group
from holdfast.lm.kernels.integer.library import library_for, step_library
from holdfast.lm.kernels.linear.fixed_layers import FixedLayerOps
from holdfast.lm.kernels.linear.layers import LayerOps, LayerShape
from holdfast.lm.kernels.linear.library_layers import LibraryLayerOps


def layer_ops_for(
    shape: LayerShape, group: Group | None = None, *, invariant: bool = False, ranks: int = 1
) -> LayerOps:
    """The backend for the device of `shape.inverse_frequencies`: Triton kernels on CUDA, PyTorch elsewhere.

    In bfloat16 on a CPU, it is the library in C, if the install has it. `group` is the devices that share each layer,
    if there are several. `invariant`: the bits of a token's results must not depend on the other tokens. A CPU keeps
    that in whole steps of the library (`whole_steps`), or in steps of one token (`one_by_one`). With `ranks` above 1,
    bits are also the same for any group of as many devices or fewer, if these divide them.

    Raises ValueError for ranks on a CPU without the library.
    """
    if shape.inverse_frequencies.device.type == "cuda":
        # Imported here because a CPU installation has no Triton.
        if invariant:
            from holdfast.lm.kernels.linear.invariant_layers import InvariantLayerOps

            return InvariantLayerOps(shape, group, ranks)
        from holdfast.lm.kernels.linear.fused_layers import FusedLayerOps

        return FusedLayerOps(shape, group)
    if invariant and ranks > 1:
        if (found := step_library(shape.inverse_frequencies.device)) is None:
            raise ValueError("deterministic_ranks takes the library in C on a CPU with AVX2 or AVX-512")
        return FixedLayerOps(shape, found, group, ranks)
    if invariant:
        return LayerOps(shape, group)
    library = library_for(shape.inverse_frequencies.device, shape.dtype)
    return LayerOps(shape, group) if library is None else LibraryLayerOps(shape, library, group)
