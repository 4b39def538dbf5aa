"""Which models give the same bits for a token whatever else a step computes, and by what arithmetic.

A number's bits depend on the order in which it is added up. Fast kernels choose that order by the number of rows, so
a batch or a chunk of another size gives other bits. With `CoreConfig.deterministic`, each sum of a token has one order:
on a CPU that of the library in C (`whole_steps`), on a GPU that of `InvariantLayerOps` and `InvariantAttention`.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib.metadata import version

import torch

from holdfast.lm.kernels.fp8 import Weight
from holdfast.lm.kernels.integer.library import LEVELS, step_library
from holdfast.lm.kernels.integer.step import DTYPES
from holdfast.lm.models.base import UnsupportedCheckpoint
from holdfast.lm.models.decoder_spec import DecoderSpec
from holdfast.lm.models.layer_weights import LayerWeights
from holdfast.lm.models.whole_steps import LINEAR, is_plain

QUANTIZED = "has quantized weights here, whose kernels depend on the number of tokens"


def check_same_bits(spec: DecoderSpec, *, device: torch.device, dtype: torch.dtype, quantized: bool) -> None:
    """Raise UnsupportedCheckpoint if a decoder's bits depend on what else a step computes."""
    if reason := _reason(spec, device, dtype, quantized):
        raise UnsupportedCheckpoint(f"deterministic is on, and {reason}; leave it out")


def check_plain_weights(spec: DecoderSpec, layers: Sequence[LayerWeights], head: Weight) -> None:
    """Raise UnsupportedCheckpoint if some weights are not plain numbers, as those of a GGUF file may be."""
    weights = (head, *(getattr(layer, name) for layer in layers for name in LINEAR))
    if not all(isinstance(weight, torch.Tensor) for weight in weights):
        raise UnsupportedCheckpoint(f"deterministic is on, and {spec.architecture} {QUANTIZED}; leave it out")


def arithmetic_of(device: torch.device) -> str:
    """Names of the instructions and kernels by which a device computes. Where they are equal, so are the bits."""
    if device.type == "cpu":
        library = step_library(device)
        assert library is not None, "check_same_bits raises without it"
        return LEVELS[library.level]
    return f"{torch.cuda.get_device_name(device)} by Triton {version('triton')}"


def _reason(spec: DecoderSpec, device: torch.device, dtype: torch.dtype, quantized: bool) -> str:
    """Why a decoder's bits depend on what else a step computes; empty if they do not."""
    name = spec.architecture
    if spec.experts is not None:
        return f"{name} is a mixture of experts: how their products are added up depends on the tokens of each expert"
    if spec.recurrence is not None:
        return f"{name} has recurrent layers, whose sums depend on where a prompt is cut into chunks"
    if spec.latent is not None:
        return f"{name} has latent attention, which splits a context by the size of the batch"
    if quantized:
        return f"{name} {QUANTIZED}"
    if not is_plain(spec):
        return f"{name} is not among the models that can be: Llama, Mistral, Qwen 2 and 3, Gemma 2 and 3, Phi 3"
    if device.type == "cuda":
        return ""
    if dtype not in DTYPES:
        return f"dtype is {str(dtype).removeprefix('torch.')}: on a CPU it is for float32 and bfloat16"
    if step_library(device) is None:
        return "it takes the library in C on a CPU with AVX2 or AVX-512, which is not here (docs/installing.md)"
    return ""
