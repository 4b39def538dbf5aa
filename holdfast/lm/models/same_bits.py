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
from holdfast.lm.models.checkpoint_errors import UnsupportedCheckpoint
from holdfast.lm.models.decoder_spec import DecoderSpec
from holdfast.lm.models.whole_steps import is_plain

PLAIN = "Llama, Mistral, Qwen 2 and 3, Gemma 2 and 3, and Phi 3"
GPU_ORDER = 4
"""Number of the order of sums on GPUs, which is raised when the order changes: stored state of another one has other
bits."""
SLICE = 16
"""A slice of a sum is a multiple of this many inputs, which tensor cores take at once."""
HALVES = 2 * TILE
"""The two halves of a packed gate_up are whole tiles if its outputs are a multiple of this."""


def check_same_bits(spec: DecoderSpec, *, device: torch.device, ranks: int = 1) -> None:
    """Raise UnsupportedCheckpoint if a decoder's bits depend on what else a step computes.

    With `ranks` above 1, its bits must be the same for any number of devices that divides them. Stages need no check:
    on GPUs, each layer is computed as on one device, and on CPUs, all tokens one by one.
    """
    if reason := _reason(spec, device):
        raise UnsupportedCheckpoint(f"deterministic is on, and {reason}; leave it out")
    if ranks > 1 and (reason := _reason_of_ranks(spec, device, ranks)):
        raise UnsupportedCheckpoint(f"deterministic_ranks is {ranks}, and {reason}")


def _reason_of_ranks(spec: DecoderSpec, device: torch.device, ranks: int) -> str:
    """Why a decoder's bits depend on the number of ranks, up to `ranks`; empty if they do not."""
    name = spec.architecture
    if not is_plain(spec):
        return f"{name} is not among the models whose sums are cut for ranks: {PLAIN}"
    if device.type == "cpu" and step_library(device) is None:
        return "it takes the library in C on a CPU with AVX2 or AVX-512, which is not here (docs/installing.md)"
    for what, number, unit in (
        ("query heads", spec.num_heads, 1),
        ("key heads", spec.num_kv_heads, 1),
        ("inputs of attention's last projection", spec.num_heads * spec.head_dim, SLICE),
        ("inputs of the MLP's last projection", spec.intermediate_size, SLICE),
    ):
        if number % (ranks * unit):
            multiple = "" if unit == 1 else f" of a multiple of {unit}"
            return f"{name} has {number} {what}, which have no {ranks} equal parts{multiple}; give a smaller number"
    return ""


def fixed_form(weight: Weight, *, device: torch.device, dtype: torch.dtype, ranks: int = 1) -> Weight:
    """A quantized weight in the form whose products have one order of sums.

    On a GPU all formats are read as a `PackedWeight`. On a CPU the library in C reads integers. Other formats become
    plain numbers there, which take the memory of an unquantized model, and so do all with `ranks` above 1.
    """
    if device.type == "cpu" and ranks > 1:
        return weight if isinstance(weight, torch.Tensor) else weight.dequantized(dtype).t().contiguous().t()
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


def arithmetic_of(device: torch.device, changes: str = "", *, ranks: int, one_by_one: bool) -> str:
    """Names of the instructions and kernels by which devices compute. Where they are equal, so are the bits.

    `changes` are those of `LayerOps.settle`, `ranks` those of `check_same_bits`. `one_by_one`: a CPU computes one token
    after the other, by PyTorch.
    """
    return _name_of(device, one_by_one=one_by_one) + changes + f", for {ranks} ranks" * (ranks > 1)


def _name_of(device: torch.device, *, one_by_one: bool) -> str:
    """`arithmetic_of` one device."""
    if one_by_one:
        return f"token by token, PyTorch {torch.__version__}, threads {torch.get_num_threads()}"
    if device.type == "cpu":
        library = step_library(device)
        assert library is not None, "there are no whole steps without it"
        return LEVELS[library.level]
    return f"{torch.cuda.get_device_name(device)} by Triton {version('triton')}, order {GPU_ORDER}"


def _reason(spec: DecoderSpec, device: torch.device) -> str:
    """Why a decoder's bits depend on what else a step computes; empty if they do not."""
    name = spec.architecture
    if device.type == "cpu":
        return ""
    if spec.latent is not None:
        return f"{name} has latent attention, which splits a context by the size of the batch on a GPU"
    if not is_plain(spec) and (spec.layer_specs or (spec.experts is None and spec.recurrence is None)):
        return (
            f"{name} is not among the models that have been checked on a GPU: {PLAIN}, mixtures of experts, and models "
            "with recurrent layers"
        )
    return ""
