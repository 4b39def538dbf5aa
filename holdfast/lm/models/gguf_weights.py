"""The tensors of a GGUF file, dequantized or packed, by the names of a Hugging Face checkpoint."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch

from holdfast.files.regular import name_of_regular
from holdfast.lm.kernels.packed import COARSE, PackedWeight
from holdfast.lm.models.base import DamagedCheckpoint, UnsupportedCheckpoint, check_finite
from holdfast.lm.models.gguf_blocks import GROUP, FourBits, dequantized, four_bits, packed

GGUF_FILE = "gguf.json"
"""The file that names the GGUF file of a checkpoint whose directory holds no weights."""
UNREAD = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")
"""Tensors whose numbers are in config.json."""
PERMUTED = re.compile(r"\.self_attn\.([qk])_proj\.(weight|bias)$")
CONVOLUTION = re.compile(r"\.conv\.conv\.weight$")
"""Names of tensors that a checkpoint stores with a dimension of 1 in the middle, and GGUF without it."""
EXPERT = re.compile(r"(.*\.experts)\.(\d+)\.(.+)\.weight$")


def read_gguf(path: Path) -> Any:
    """A `gguf.GGUFReader` of one file. Raises UnsupportedCheckpoint and DamagedCheckpoint."""
    try:
        from gguf import GGUFReader
    except ImportError:
        raise UnsupportedCheckpoint("GGUF files need the package gguf: pip install 'holdfast[gguf]'") from None
    try:
        with name_of_regular(path) as name:
            return GGUFReader(name)
    except OSError as error:
        raise DamagedCheckpoint(f"{path.name} cannot be read: {error.strerror or error}") from None
    except Exception as error:  # a cut or hostile header raises many kinds
        raise DamagedCheckpoint(f"{path.name} cannot be read as GGUF: {type(error).__name__}: {error}") from None


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
        self._config = config
        self._architecture = str(readers[0].fields["general.architecture"].contents())
        self._tensors: dict[str, tuple[Any, int | None]] = {}
        found = self._names(config["num_hidden_layers"])
        for name in names:
            usual, expert = name, None
            if match := EXPERT.fullmatch(name):
                usual, expert = f"{match[1]}.{match[3]}.weight", int(match[2])
            stem, _, ending = usual.rpartition(".")
            own = f"{found.get_name(stem)}.{ending}"
            if own in stored:
                self._tensors[name] = stored[own], expert
        used = {tensor.name for tensor, _ in self._tensors.values()}
        self._tensors |= {name: (tensor, None) for name, tensor in stored.items() if name not in (*used, *UNREAD)}

    def _names(self, layers: int) -> Any:
        """The package's map from Hugging Face's names to those of the file's architecture."""
        from gguf import MODEL_ARCH_NAMES, get_tensor_name_map

        kinds = {name: kind for kind, name in MODEL_ARCH_NAMES.items()}
        return get_tensor_name_map(kinds[self._architecture], layers)

    def keys(self) -> Iterable[str]:
        return self._tensors.keys()

    def get_slice(self, name: str) -> GgufSlice:
        tensor, expert = self._tensors[name]
        shift = 1.0 if self._is_shifted(name) else 0.0
        squeezed = CONVOLUTION.search(name) is not None
        return GgufSlice(tensor, expert, self._device, heads=self._heads(name), shift=shift, squeezed=squeezed)

    def get_tensor(self, name: str) -> torch.Tensor:
        return self.get_slice(name)[...]

    def _heads(self, name: str) -> int:
        """Number of heads whose rows are stored in pairs (i, i + 1), as llama.cpp rotates them; 0: in the usual order.

        The usual pairs are (i, i + half a head).
        """
        match = PERMUTED.search(name) if self._architecture == "llama" else None
        if match is None:
            return 0
        return int(self._config["num_attention_heads" if match[1] == "q" else "num_key_value_heads"])

    def _is_shifted(self, name: str) -> bool:
        """Whether 1 was added to a weight that the model adds 1 to."""
        return self._architecture.startswith("gemma") and name.endswith("norm.weight")


class GgufSlice:
    """A stored tensor of which nothing is read yet."""

    def __init__(
        self,
        tensor: Any,
        expert: int | None,
        device: torch.device,
        *,
        heads: int = 0,
        shift: float = 0.0,
        squeezed: bool = False,
    ) -> None:
        """`tensor` is the reader's, or one expert's part of it. `shift` is subtracted from its numbers.

        With `heads`, rows are stored in the order of `GgufFile._heads`. `squeezed`: a matrix that a checkpoint stores
        with a dimension of 1 in the middle.
        """
        self._squeezed = squeezed
        self._tensor, self._expert, self._device = tensor, expert, device
        self._heads, self._shift = heads, shift

    def get_shape(self) -> list[int]:
        shape = self._shape[1:] if self._expert is not None else self._shape
        return [shape[0], 1, *shape[1:]] if self._squeezed else shape

    def get_dtype(self) -> str:
        return "F32"

    @property
    def format(self) -> str:
        """The name of the format in which the numbers are stored."""
        return str(self._tensor.tensor_type.name)

    @cached_property
    def _shape(self) -> list[int]:
        return [int(size) for size in reversed(self._tensor.shape)]

    def __getitem__(self, cut: Any) -> torch.Tensor:
        """The numbers of the slices `cut`, in float32."""
        data = self._tensor.data if self._expert is None else self._tensor.data[self._expert]
        cuts = cut if isinstance(cut, tuple) else (cut,)
        if self._squeezed:
            return self._numbers(data)[:, None][cut]
        if self._heads or cuts[0] is ...:
            return self._settled(self._numbers(data))[cut]
        # The last dimension is in blocks of several numbers. All others are cut before anything is dequantized.
        before, last = cuts[: data.ndim - 1], cuts[data.ndim - 1 :]
        numbers = self._settled(self._numbers(data[before]))
        return numbers[(..., *last)] if last else numbers

    def four_bits(self, rows: range, columns: range) -> FourBits | None:
        """Some numbers as they are stored; None of other formats, and if the columns cut a group of inputs."""
        cut = columns.start % GROUP or len(columns) % GROUP
        if cut or self._shift or self._expert is not None:
            return None
        found = four_bits(self._tensor.data, self._tensor.tensor_type, self._device)
        if found is None:
            return None
        check_finite(self._tensor.name, found.scale, torch.float32)
        check_finite(self._tensor.name, found.low, torch.float32)
        row, groups = slice(rows.start, rows.stop), slice(columns.start // GROUP, columns.stop // GROUP)
        numbers, scale, low = map(self._settled, found)
        return FourBits(numbers[row, columns.start : columns.stop], scale[row, groups], low[row, groups])

    def packed(self, rows: range, columns: range) -> PackedWeight | None:
        """Some numbers in the form that kernels read; None of other formats, and if the columns cut a block."""
        block = COARSE if self._tensor.tensor_type.name == "Q6_K" else GROUP
        if columns.start % block or len(columns) % block or self._shift:
            return None
        data = self._tensor.data if self._expert is None else self._tensor.data[self._expert]
        data = data if self._heads else data[rows.start : rows.stop]
        found = packed(data, self._tensor.tensor_type, self._device)
        if found is None:
            return None
        inputs, row = found.shape[1], slice(rows.start, rows.stop) if self._heads else slice(None)

        def cut(part: torch.Tensor | None) -> torch.Tensor | None:
            if part is None:
                return None
            check_finite(self._tensor.name, part.float(), torch.float32)
            width = part.shape[1]
            own = slice(columns.start * width // inputs, columns.stop * width // inputs)
            return self._settled(part)[row, own].contiguous()

        low, scale, coarse = map(cut, (found.low, found.scale, found.coarse))
        assert scale is not None
        data = self._cut_numbers(found, row, columns)
        return replace(found, data=data, scale=scale, low=low, coarse=coarse)

    def _cut_numbers(self, found: PackedWeight, row: slice, columns: range) -> torch.Tensor:
        """The bytes of rows and columns of a packed tensor. A row of six bits is in two parts."""
        width, inputs = found.data.shape[1], found.shape[1]
        sizes = [width * 2 // 3, width // 3] if found.coarse is not None else [width]
        parts = []
        for part in torch.split(self._settled(found.data), sizes, 1):
            size = part.shape[1]
            parts.append(part[row, columns.start * size // inputs : columns.stop * size // inputs])
        return torch.cat(parts, 1).contiguous()

    def _numbers(self, data: np.ndarray[Any, Any]) -> torch.Tensor:
        return dequantized(data, self._tensor.tensor_type, self._device)

    def _settled(self, numbers: torch.Tensor) -> torch.Tensor:
        if self._shift:
            return numbers - self._shift
        if self._heads:
            pairs = numbers.view(self._heads, numbers.shape[0] // self._heads // 2, 2, *numbers.shape[1:])
            return pairs.transpose(1, 2).reshape(numbers.shape)
        return numbers
