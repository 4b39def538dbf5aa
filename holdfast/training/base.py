"""The base model of tuning jobs: its sizes for the planner, and a digest by which a job recognises it."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import Field, fields
from typing import Any

import torch

from holdfast.core.training_cost import TrainingShape
from holdfast.lm.kernels.fp8 import Fp8Weight
from holdfast.lm.kernels.int4 import Int4Weight
from holdfast.lm.models.decoder import Decoder
from holdfast.lm.models.decoder_spec import DecoderSpec

AT_A_TIME = 1 << 22
"""Number of elements that are summed at once."""
PERIOD = 65_521
"""A prime. An element is weighted by its index modulo this, so exchanging two elements changes the sum."""


def training_shape(decoder: DecoderSpec) -> TrainingShape:
    """The sizes that the cost of training depends on."""
    q, kv = decoder.num_heads * decoder.head_dim, decoder.num_kv_heads * decoder.head_dim
    return TrainingShape(
        num_layers=decoder.num_layers,
        attention_weights=decoder.hidden_size * (2 * q + 2 * kv),
        mlp_weights=3 * decoder.hidden_size * decoder.intermediate_size,
        head_weights=decoder.vocab_size * decoder.hidden_size,
    )


@torch.no_grad()
def digest_of_model(model: Decoder) -> str:
    """A digest of all weights as they are on the device, and of the model's options. A job may resume if it is equal.

    It distinguishes models that differ by accident, dtype or training; it is no proof against forgery. It takes one
    pass over the weights: for 16 GB on an H200 about 10 ms of reading, and a few times that for 64-bit sums.
    """
    found = hashlib.sha256(repr((model.decoder, str(model.spec.dtype))).encode())
    for name, tensor in _weights(model):
        found.update(f"{name} {tuple(tensor.shape)} {_sums(tensor)}".encode())
    return found.hexdigest()


def _weights(model: Decoder) -> Iterator[tuple[str, torch.Tensor]]:
    for name in ("embedding", "norm", "lm_head"):
        yield name, getattr(model, name)
    for index, layer in enumerate(model.layers):
        for field in fields(layer):
            value, name = getattr(layer, field.name), f"{index}.{field.name}"
            if isinstance(value, torch.Tensor):
                yield name, value
            elif isinstance(value, Fp8Weight | Int4Weight):
                yield from ((f"{name}.{each.name}", getattr(value, each.name)) for each in tensors_of(value))


def tensors_of(weight: Fp8Weight | Int4Weight) -> list[Field[Any]]:
    """The fields of a quantized weight that are tensors."""
    return [each for each in fields(weight) if isinstance(getattr(weight, each.name), torch.Tensor)]


def _sums(tensor: torch.Tensor) -> tuple[int, int]:
    """The sum of a tensor's elements, read as integers, and the sum of each times its index.

    Both are 64 bits, wrapping.
    """
    whole = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.dtype.itemsize]
    rows = tensor if tensor.dim() > 1 else tensor[None]
    plain = weighted = torch.zeros((), dtype=torch.int64, device=tensor.device)
    at_once = max(1, AT_A_TIME // rows.shape[1])
    columns = torch.arange(rows.shape[1], dtype=torch.int64, device=tensor.device) % PERIOD + 1
    for first in range(0, len(rows), at_once):
        part = rows[first : first + at_once].contiguous().view(whole).to(torch.int64)
        lines = torch.arange(first, first + len(part), dtype=torch.int64, device=tensor.device) % PERIOD + 1
        plain = plain + part.sum()
        weighted = weighted + ((part * columns).sum(1) * lines).sum()
    return int(plain), int(weighted)
