"""Which models give the same bits for a token whatever else a step computes, and by what arithmetic.

A number's bits depend on the order in which it is added up. Fast kernels choose that order by the number of rows, so
a batch or a chunk of another size gives other bits. With `CoreConfig.deterministic`, each sum of a token has one order:
on a CPU that of the library in C (`whole_steps`), or that of a token alone (`one_by_one`); on a GPU that of
`InvariantLayerOps` and `InvariantAttention`.
"""

from __future__ import annotations

from importlib.metadata import version
from typing import cast

import torch

from holdfast.lm.kernels.fp8 import Fp8BlockWeight, Fp8Weight, Weight
from holdfast.lm.kernels.int4 import Int4Weight
from holdfast.lm.kernels.integer.library import LEVELS, step_library
from holdfast.lm.kernels.integer.weight import TILE, IntegerWeight
from holdfast.lm.kernels.packed import Form, PackedWeight, packed_nibbles
from holdfast.lm.kernels.stacked import Rows, StackedWeight
from holdfast.lm.models.base import UnsupportedCheckpoint
from holdfast.lm.models.decoder_spec import DecoderSpec

HALVES = 2 * TILE
"""The two halves of a packed gate_up are whole tiles if its outputs are a multiple of this."""


def check_same_bits(spec: DecoderSpec, *, device: torch.device) -> None:
    """Raise UnsupportedCheckpoint if a decoder's bits depend on what else a step computes."""
    if reason := _reason(spec, device):
        raise UnsupportedCheckpoint(f"deterministic is on, and {reason}; leave it out")


def fixed_form(weight: Weight, *, device: torch.device, dtype: torch.dtype) -> Weight:
    """A quantized weight in the form whose products have one order of sums.

    On a GPU all formats are read as a `PackedWeight`. On a CPU the library in C reads integers. Other formats become
    plain numbers there, which take the memory of an unquantized model.
    """
    if isinstance(weight, StackedWeight):
        parts = [fixed_form(cast(Weight, part), device=device, dtype=dtype) for part in weight.parts]
        if device.type == "cuda" or all(isinstance(part, IntegerWeight) for part in parts):
            return StackedWeight(tuple(cast(list[Rows], parts)))
    elif device.type == "cuda":
        return _packed(weight)
    whole = weight.shape[0] % HALVES == 0  # a stack of integers has whole tiles in all parts but the last, or not
    if isinstance(weight, torch.Tensor) or (isinstance(weight, IntegerWeight) and whole):
        return weight
    return weight.dequantized(dtype).contiguous()


def _packed(weight: Weight) -> Weight:
    """A weight on a GPU as a `PackedWeight`; plain numbers, and formats that only a CPU has, as they are."""
    if isinstance(weight, Fp8Weight):
        ones = torch.ones_like(weight.scale)[:, None]
        return PackedWeight(Form.FP8, weight.data, ones, weight.shape[1], unit=weight.scale)
    if isinstance(weight, Fp8BlockWeight):
        return PackedWeight(Form.FP8, weight.data, weight.scale, weight.group, weight.rows)
    if not isinstance(weight, Int4Weight):
        return weight
    chunks = weight.data.view(len(weight.data), -1, weight.half)
    data = packed_nibbles(torch.stack((chunks & 15, chunks >> 4), 2).view(len(weight.data), -1))
    scale, group = weight.scale.float(), weight.group
    low = -weight.zero.float() * scale
    low = low if weight.added is None else low + weight.added
    if group & (group - 1) and group < weight.shape[1]:  # a kernel's groups are powers of two
        scale, low = (each.repeat_interleave(group // weight.half, 1) for each in (scale, low))
        group = weight.half
    return PackedWeight(Form.INT4, data, scale, group, low=low)


def arithmetic_of(device: torch.device, *, one_by_one: bool) -> str:
    """Names of the instructions and kernels by which a device computes. Where they are equal, so are the bits.

    `one_by_one`: a CPU computes one token after the other, by PyTorch.
    """
    if one_by_one:
        return f"token by token, PyTorch {torch.__version__}, threads {torch.get_num_threads()}"
    if device.type == "cpu":
        library = step_library(device)
        assert library is not None, "there are no whole steps without it"
        return LEVELS[library.level]
    return f"{torch.cuda.get_device_name(device)} by Triton {version('triton')}"


def _reason(spec: DecoderSpec, device: torch.device) -> str:
    """Why a decoder's bits depend on what else a step computes; empty if they do not."""
    name = spec.architecture
    if device.type == "cpu":
        return ""
    if spec.recurrence is not None:
        return f"{name} has recurrent layers, whose sums on a GPU depend on where a prompt is cut into chunks"
    if spec.latent is not None:
        return f"{name} has latent attention, which splits a context by the size of the batch on a GPU"
    if spec.layer_specs:
        return f"{name} has layers of several sizes, whose products on a GPU depend on the number of tokens"
    return ""
