"""The base model of tuning jobs: its sizes for the planner, and a digest by which a job recognises it."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import MISSING, Field, fields, is_dataclass, replace
from itertools import chain
from typing import Any, NamedTuple

import torch

from holdfast.core.training_cost import TrainingShape
from holdfast.lm.execution.stage_link import StageLink
from holdfast.lm.kernels.fp8 import Weight
from holdfast.lm.kernels.mxfp4 import Mxfp4Matrices
from holdfast.lm.kernels.packed import PackedWeight
from holdfast.lm.models.decoder import Decoder
from holdfast.lm.models.decoder_spec import MLP_FIELDS, DecoderSpec, elements_of, layer_shapes
from holdfast.lm.models.halves import layer_halves
from holdfast.lm.models.layer_weights import LayerWeights
from holdfast.lm.models.shard import layer_pieces
from holdfast.training.stages import Stages

AT_A_TIME = 1 << 22
"""Number of elements that are summed at once."""
PERIOD = 65_521
"""A prime. An element is weighted by its index modulo this, so exchanging two elements changes the sum."""


def training_shape(decoder: DecoderSpec) -> TrainingShape:
    """The sizes that the cost of training depends on. A mixture's MLP has the experts of one token."""
    shapes, recurrence = layer_shapes(decoder), decoder.recurrence
    mlp = elements_of(shapes["gate_up"]) + elements_of(shapes["down"])
    if decoder.mlps:  # an MLP without a gate
        mlp = 2 * decoder.hidden_size * decoder.intermediate_size
    if (experts := decoder.experts) is not None:
        rule = experts.rule
        inner = rule.per_token * experts.intermediate_size + experts.shared_size
        chosen = rule.matrices * decoder.hidden_size * inner
        mlp = sum(chosen if sparse else mlp for sparse in experts.sparse) // decoder.num_layers
    recurrent = 0
    if recurrence is not None:
        projections = recurrence.shapes(decoder.hidden_size)
        recurrent = elements_of(projections["mixer_in"]) + elements_of(projections["mixer_out"])
    return TrainingShape(
        num_layers=decoder.num_layers,
        attention_weights=elements_of(shapes["qkv"]) + elements_of(shapes["o"]),
        mlp_weights=mlp,
        head_weights=decoder.vocab_size * decoder.hidden_size,
        recurrence_weights=recurrent,
        layers=() if recurrence is None else layer_halves(decoder),
    )


@torch.no_grad()
def digest_of_model(model: Decoder) -> str:
    """A digest of all weights as they are on the device, and of the model's options. A job may resume if it is equal.

    It distinguishes models that differ by accident, dtype or training; it is no proof against forgery. It takes one
    pass over the weights: for 16 GB on an H200 about 10 ms of reading, and a few times that for 64-bit sums.
    """
    return digest_of_tensors(_about(model), _weights(model))


def _about(model: Decoder) -> str:
    """The options of a model as text, for its digest."""
    return f"{described(model.decoder)} {model.spec.dtype}"


def described(value: object) -> str:
    """A value as text. A dataclass has only the fields that differ from their defaults.

    So a later version may add a field with a default, and the text of older values stays the same.
    """
    if is_dataclass(value) and not isinstance(value, type):
        given = {field.name: getattr(value, field.name) for field in fields(value) if not _is_default(value, field)}
        return f"{type(value).__name__}{described(given)}"
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key!r}: {described(each)}" for key, each in value.items()) + "}"
    if isinstance(value, tuple | list):
        return "(" + ", ".join(map(described, value)) + ")"
    return repr(value)


def _is_default(value: object, field: Field[Any]) -> bool:
    """Whether a dataclass has the default in a field."""
    default = field.default if field.default_factory is MISSING else field.default_factory()
    return default is not MISSING and bool(getattr(value, field.name) == default)


@torch.no_grad()
def digest_of_tensors(about: str, tensors: Iterable[tuple[str, torch.Tensor]]) -> str:
    """A digest of named tensors as they are on the device, and of a text about them. See `digest_of_model`."""
    found = hashlib.sha256(about.encode())
    for name, tensor in tensors:
        found.update(f"{name} {tuple(tensor.shape)} {_sums(tensor)}".encode())
    return found.hexdigest()


@torch.no_grad()
def digest_of_module(module: torch.nn.Module, about: str) -> str:
    """A digest of a module's parameters and buffers, and of a text about it. See `digest_of_model`."""
    tensors = [*module.named_parameters(), *module.named_buffers()]
    whole = ((f"{name} {tensor.dtype}", tensor) for name, tensor in tensors if tensor.numel())
    return digest_of_tensors(about, whole)


@torch.no_grad()
def digest_of_shards(model: Decoder, link: StageLink | None = None) -> str:
    """`digest_of_model` of the model that ranks share, on rank 0. All ranks call this at the same time.

    The digest is that of the whole model, so a job goes on under another layout. That of a mixture of experts depends
    on the layout. `link` leads to the other stages.
    """
    if model.group is None and model.shard.first and model.shard.last:
        return digest_of_model(model)
    places = _places(model)
    sums = torch.tensor([*chain.from_iterable(place.sums for place in places.values())], dtype=torch.int64)
    if model.group is not None:
        sums = model.group.gather(sums.to(model.spec.device)).sum(0).cpu()
    sums = Stages(model.shard, model.decoder.num_layers, link).at_first(sums.to(model.spec.device)).cpu()
    found = hashlib.sha256(_about(model).encode())
    for (name, place), pair in zip(places.items(), sums.view(-1, 2).tolist(), strict=True):
        found.update(f"{name} {place.shape} {tuple(pair)}".encode())
    return found.hexdigest()


class _Place(NamedTuple):
    """A tensor of the whole model."""

    shape: tuple[int, ...]
    sums: tuple[int, int] = (0, 0)
    """The sums (`_sums`) of the part that this device has, unless an earlier device has the same part."""


def _places(model: Decoder) -> dict[str, _Place]:
    """The tensors of the whole model by name, in the order of `_weights`, and the experts of each layer together."""
    spec, shard = model.decoder, model.shard
    found: dict[str, _Place] = {}
    tokens = shard.vocabulary(spec.vocab_size)
    shape: tuple[int, ...] = (spec.vocab_size, spec.embedding_size)
    found["embedding"] = _Place(shape, _sums(model.embedding, tokens.start) if shard.first else (0, 0))
    if spec.head_bias:
        own_bias = model.lm_head_bias
        found["lm_head_bias"] = _Place(shape[:1], (0, 0) if own_bias is None else _sums(own_bias, tokens.start))
    leads = shard.first and shard.index == 0
    if model.norm.numel():
        found["norm"] = _Place(tuple(model.norm.shape), _sums(model.norm) if leads else (0, 0))
    head = dequantized(model.lm_head)
    assert isinstance(head, torch.Tensor)
    found["lm_head"] = _Place(shape, _sums(head, tokens.start) if shard.last else (0, 0))
    hidden, narrow = spec.hidden_size, spec.embedding_width
    others = {
        "project_in": (hidden, narrow),
        "project_out": (narrow, hidden),
        "positions": (spec.position_rows, hidden),
    }
    for name, sizes in others.items():
        value = getattr(model, name)
        if all(sizes):
            found[name] = _Place(sizes, (0, 0) if value is None or shard.index else _sums(value))
    sparse = spec.experts.sparse if spec.experts is not None else (False,) * spec.num_layers
    own = layer_pieces(spec, shard)
    before = layer_pieces(spec, replace(shard, index=shard.index - 1)) if shard.index else {}
    for index in range(spec.num_layers):
        for field in fields(LayerWeights):
            pieces = own.get(field.name)
            layer = model.layers[index - shard.layers.start] if index in shard.layers else None
            value = None if layer is None else dequantized(getattr(layer, field.name))
            name = f"{index}.{field.name}"
            if field.name == "experts" and sparse[index]:
                experts = [] if layer is None else [_sums(tensor) for _, tensor in _tensors(layer.experts)]
                plain, weighted = (sum(each[place] for each in experts) for place in range(2))
                found[name] = _Place((), (_wrapped(plain), _wrapped(weighted)))
            if pieces is None or (sparse[index] and field.name in MLP_FIELDS):
                continue
            whole = (sum(piece.whole[0] for piece in pieces), *pieces[0].whole[1:])
            plain = weighted = row = 0
            if isinstance(value, torch.Tensor):
                rows = torch.split(value, [piece.shape[0] for piece in pieces])
                for part, (piece, tensor) in enumerate(zip(pieces, rows, strict=True)):
                    held = len(tensor) > 0  # a norm of another device's head has no numbers here
                    if held and (not before or before[field.name][part] != piece):
                        starts = [each.start for each in piece.own]
                        starts[0] += row
                        one, other = _sums(tensor, *starts)
                        plain, weighted = plain + one, weighted + other
                    row += piece.whole[0]
            found[name] = _Place(whole, (_wrapped(plain), _wrapped(weighted)))
    return found


def _wrapped(number: int) -> int:
    """A sum in 64 bits."""
    return (number + (1 << 63)) % (1 << 64) - (1 << 63)


def _weights(model: Decoder) -> Iterator[tuple[str, torch.Tensor]]:
    for name in ("embedding", "norm", "lm_head", "lm_head_bias", "project_in", "project_out", "positions"):
        value = dequantized(getattr(model, name))
        if isinstance(value, torch.Tensor) and value.numel():
            yield name, value
    yield from {**model.tensors, **model.token_tables}.items()
    for index, layer in enumerate(model.layers):
        for name, value in {**layer.more, **layer.recurrent}.items():
            yield f"{index}.{name}", value
        for part, prefix in ((layer, f"{index}."), (layer.experts, f"{index}.experts.")):
            for name, value in _tensors(part):
                yield prefix + name, value


def _tensors(part: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """The fields of a dataclass that are tensors with numbers, and the tensors of packed experts; none of None."""
    for field in fields(part) if part is not None else ():
        value = dequantized(getattr(part, field.name))
        if isinstance(value, Mxfp4Matrices):
            yield f"{field.name}.data", value.data
            yield f"{field.name}.scale", value.scale
        elif isinstance(value, PackedWeight):
            for expert in range(len(value.data)):
                yield f"{field.name}.{expert}", value.matrix(expert, torch.float32)
        elif isinstance(value, torch.Tensor) and value.numel():
            yield field.name, value


def dequantized(value: object) -> object:
    """A layer's field; the dequantized tensor of a quantized weight, which no other layout rounds otherwise."""
    if isinstance(value, PackedWeight) and len(value.shape) > 2:  # experts, which are too many for one tensor
        return value
    if isinstance(value, Weight) and not isinstance(value, torch.Tensor):
        return value.dequantized(torch.float32)
    return value


def _sums(tensor: torch.Tensor, *starts: int) -> tuple[int, int]:
    """The sum of a tensor's elements, read as integers, and the sum of each times its index.

    Both are 64 bits, wrapping. `starts` are the indices of the first element, where the tensor is a part of another.
    """
    whole = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.dtype.itemsize]
    rows = tensor.reshape(-1, tensor.shape[-1] if tensor.dim() else 1)
    top, left = (*starts, 0, 0)[:2] if tensor.dim() > 1 else (0, *starts, 0)[:2]
    plain = weighted = torch.zeros((), dtype=torch.int64, device=tensor.device)
    at_once = max(1, AT_A_TIME // rows.shape[1])
    columns = torch.arange(left, left + rows.shape[1], dtype=torch.int64, device=tensor.device) % PERIOD + 1
    for first in range(0, len(rows), at_once):
        part = rows[first : first + at_once].contiguous().view(whole).to(torch.int64)
        lines = torch.arange(top + first, top + first + len(part), dtype=torch.int64, device=tensor.device) % PERIOD + 1
        plain = plain + part.sum()
        weighted = weighted + ((part * columns).sum(1) * lines).sum()
    return int(plain), int(weighted)
