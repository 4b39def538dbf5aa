"""The tensors of a GGUF file, dequantized or packed, by the names of a Hugging Face checkpoint."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch

from holdfast.lm.kernels.packed import COARSE, PackedWeight
from holdfast.lm.models.base import check_finite
from holdfast.lm.models.gguf_blocks import GROUP, FourBits, dequantized, four_bits, packed
from holdfast.lm.models.gguf_layouts import Change, layout_of
from holdfast.lm.models.gguf_reader import read_gguf

UNREAD = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")
"""Tensors whose numbers are in config.json."""
LAYER = re.compile(r"blk\.(\d+)\.")
NO_CHANGE = Change()
EXPERT = re.compile(r"(.*\.experts)\.(\d+)\.(.+)\.weight$")


class GgufFile:
    """The tensors of a model's GGUF files under Hugging Face's names, with the methods of an open safetensors file."""

    def __init__(
        self, paths: Sequence[Path], names: Iterable[str], config: Mapping[str, Any], device: torch.device
    ) -> None:
        """`names` are those that the model may ask for. `config` is what `gguf_config.config_of` gives.

        Numbers are dequantized on `device`.
        """
        self._device = device
        readers = [read_gguf(path) for path in paths]
        stored = {tensor.name: tensor for reader in readers for tensor in reader.tensors}
        architecture = str(readers[0].fields["general.architecture"].contents())
        layers, self._layout = config["num_hidden_layers"], layout_of(architecture, config)
        known = name_map(architecture, layers)
        self._tensors: dict[str, Place] = {}
        for name in names:
            place = self._place(name, known, stored)
            if place is not None:
                self._tensors[name] = place
        used = {place.tensor.name for place in self._tensors.values()}
        drafts = range(layers, layers + config.get("num_nextn_predict_layers", 0))
        left = (name for name in stored if name not in (*used, *UNREAD) and layer_of(name) not in drafts)
        self._tensors |= {name: Place(stored[name]) for name in left}

    def _place(self, name: str, known: Any, stored: Mapping[str, Any]) -> Place | None:
        """The place of a tensor in the file; None if the file has no such tensor.

        `known` is the package's map from Hugging Face's names to those of the file's architecture.
        """
        usual, expert = name, None
        if match := EXPERT.fullmatch(name):
            usual, expert = f"{match[1]}.{match[3]}.weight", int(match[2])
        for stem, ending in self._layout.names(usual):
            tensor = stored.get(f"{known.get_name(stem)}{ending}")
            if tensor is not None:
                return Place(tensor, expert, self._layout.change(usual, shape_of(tensor)))
        return None

    def keys(self) -> Iterable[str]:
        return self._tensors.keys()

    def get_slice(self, name: str) -> GgufSlice:
        return GgufSlice(self._tensors[name], self._device)

    def get_tensor(self, name: str) -> torch.Tensor:
        return self.get_slice(name)[...]


def name_map(architecture: str, layers: int) -> Any:
    """The package's map from Hugging Face's names to those of an architecture."""
    from gguf import MODEL_ARCH_NAMES, get_tensor_name_map

    kinds = {name: kind for kind, name in MODEL_ARCH_NAMES.items()}
    return get_tensor_name_map(kinds[architecture], layers)


def layer_of(name: str) -> int | None:
    """The number of the layer to which a stored tensor belongs, if to any."""
    match = LAYER.match(name)
    return None if match is None else int(match[1])


def shape_of(tensor: Any) -> tuple[int, ...]:
    """The shape of a stored tensor, as PyTorch has it."""
    return tuple(int(size) for size in reversed(tensor.shape))


@dataclass(frozen=True)
class Place:
    """The place of a checkpoint's tensor in a GGUF file."""

    tensor: Any
    """The reader's tensor."""
    expert: int | None = None
    """The number of the expert whose part of the tensor it is; None: it is all of the tensor."""
    change: Change = NO_CHANGE


class GgufSlice:
    """A stored tensor of which nothing is read yet."""

    def __init__(self, place: Place, device: torch.device) -> None:
        self._place, self._device, self._change = place, device, place.change
        self._tensor = place.tensor
        self._kind = self._tensor.tensor_type

    def get_shape(self) -> list[int]:
        shape = shape_of(self._tensor)[self._place.expert is not None :]
        if self._change.rows is not None:
            shape = (len(self._change.rows), *shape[1:])
        return [*(shape if self._change.reshape is None else self._change.reshape(shape))]

    def get_dtype(self) -> str:
        return "F32"

    @property
    def format(self) -> str:
        """The name of the format in which the numbers are stored."""
        return str(self._kind.name)

    def __getitem__(self, cut: Any) -> torch.Tensor:
        """The numbers of the slices `cut`, in float32."""
        cuts = cut if isinstance(cut, tuple) else (cut,)
        if self._change.reshape is not None or self._change.columns is not None or cuts[0] is ...:
            return self._numbers(self._stored()).reshape(self.get_shape())[cut]
        # The last dimension is in blocks of several numbers. All others are cut before anything is dequantized.
        data = self._stored(cuts[0]) if self._data.ndim > 1 else self._stored()
        before, last = cuts[: self._data.ndim - 1], cuts[self._data.ndim - 1 :]
        numbers = self._numbers(data[(slice(None), *before[1:])] if before else data)
        return numbers[(..., *last)] if last else numbers

    def four_bits(self, rows: range, columns: range) -> FourBits | None:
        """Some numbers as they are stored; None of other formats, and if the columns cut a group of inputs."""
        cut = columns.start % GROUP or len(columns) % GROUP
        if cut or self._change.shift or self._place.expert is not None:
            return None
        order = self._change.columns
        if order is not None and order.width % GROUP:
            return None
        found = four_bits(self._stored(slice(rows.start, rows.stop)), self._kind, self._device)
        if found is None:
            return None
        check_finite(self._tensor.name, found.scale, torch.float32)
        check_finite(self._tensor.name, found.low, torch.float32)
        if order is not None and not self._moves_blocks:
            heads = torch.from_numpy(order.heads).to(self._device)
            found = FourBits(*(in_order(each, heads) for each in found))
        groups = slice(columns.start // GROUP, columns.stop // GROUP)
        numbers, scale, low = found
        return FourBits(numbers[:, columns.start : columns.stop], scale[:, groups], low[:, groups])

    def packed(self, rows: range, columns: range) -> PackedWeight | None:
        """Some numbers in the form that kernels read; None of other formats, and if the columns cut a block."""
        block = COARSE if self.format == "Q6_K" else GROUP
        if columns.start % block or len(columns) % block or self._change.shift:
            return None
        if self._change.columns is not None and not self._moves_blocks:
            return None
        found = packed(self._stored(slice(rows.start, rows.stop)), self._kind, self._device)
        if found is None:
            return None
        inputs = found.shape[1]

        def cut(part: torch.Tensor | None) -> torch.Tensor | None:
            if part is None:
                return None
            check_finite(self._tensor.name, part.float(), torch.float32)
            width = part.shape[1]
            own = slice(columns.start * width // inputs, columns.stop * width // inputs)
            return part[:, own].contiguous()

        low, scale, coarse = map(cut, (found.low, found.scale, found.coarse))
        assert scale is not None
        return replace(found, data=cut_numbers(found, columns), scale=scale, low=low, coarse=coarse)

    @cached_property
    def _data(self) -> np.ndarray[Any, Any]:
        """The stored bytes of the tensor, or of one expert's part of it, in the order of the file."""
        data: np.ndarray[Any, Any] = self._tensor.data
        return data if self._place.expert is None else data[self._place.expert]

    @cached_property
    def _moves_blocks(self) -> bool:
        """Whether columns can be put into the checkpoint's order as they are stored: no block has two heads."""
        from gguf import GGML_QUANT_SIZES

        order = self._change.columns
        return order is not None and order.width % GGML_QUANT_SIZES[self._kind][0] == 0

    def _stored(self, rows: slice = slice(None)) -> np.ndarray[Any, Any]:
        """The stored bytes of some rows, in the checkpoint's order, and with `_moves_blocks` also of columns."""
        change = self._change
        data = self._data[rows if change.rows is None else change.rows[rows]]
        if change.columns is None or not self._moves_blocks:
            return data
        heads = data.reshape(len(data), len(change.columns.heads), -1)
        return heads[:, change.columns.heads].reshape(data.shape)

    def _numbers(self, data: np.ndarray[Any, Any]) -> torch.Tensor:
        """The checkpoint's numbers, from the bytes of `_stored`."""
        numbers, order = dequantized(data, self._kind, self._device), self._change.columns
        if order is not None and not self._moves_blocks:
            numbers = numbers[:, torch.from_numpy(order.columns).to(self._device)]
        if self._change.logarithm:
            return (-numbers).log()
        return numbers - self._change.shift if self._change.shift else numbers


def in_order(part: torch.Tensor, heads: torch.Tensor) -> torch.Tensor:
    """The columns [N, K] of heads in another order."""
    return part.view(len(part), len(heads), -1)[:, heads].flatten(1)


def cut_numbers(found: PackedWeight, columns: range) -> torch.Tensor:
    """The bytes of some columns of a packed tensor. A row of six bits is in two parts."""
    width, inputs = found.data.shape[1], found.shape[1]
    sizes = [width * 2 // 3, width // 3] if found.coarse is not None else [width]
    parts = []
    for part in torch.split(found.data, sizes, 1):
        size = part.shape[1]
        parts.append(part[:, columns.start * size // inputs : columns.stop * size // inputs])
    return torch.cat(parts, 1).contiguous()
