"""LoRA adapters in PEFT's file format for any named linear layers of a model of Transformers."""

from __future__ import annotations

import hashlib
import math
import re
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open

from holdfast.files.regular import name_of_regular
from holdfast.lm.models.peft_files import DTYPES, WEIGHTS_FILE, UnsupportedAdapter, lora_config

_TENSOR = re.compile(r"base_model\.model\.([\w.]+)\.lora_([AB])\.weight")


class NamedPair(NamedTuple):
    """The change of one linear layer: y += scale · B A x."""

    a: torch.Tensor  # [rank, inputs]
    b: torch.Tensor  # [outputs, rank]
    scale: float

    def is_finite(self, dtype: torch.dtype) -> bool:
        """Whether A, and B times the scale, are finite as this dtype."""
        scaled = self.b.float() * self.scale
        return bool(self.a.to(dtype).isfinite().all()) and bool(scaled.to(dtype).isfinite().all())


@dataclass(frozen=True, eq=False)
class NamedWeights:
    """A LoRA adapter of named linear layers."""

    pairs: Mapping[str, NamedPair]
    """The pair of each changed layer, by its name in the model. Layers without a pair stay unchanged."""

    @property
    def rank(self) -> int:
        """The largest rank of any pair."""
        return max(len(pair.a) for pair in self.pairs.values())

    @property
    def modules(self) -> tuple[str, ...]:
        """The last part of the names of the changed layers, each once."""
        return tuple(dict.fromkeys(name.rpartition(".")[2] for name in self.pairs))

    def digest(self) -> str:
        """SHA-256 of all numbers, their places and scales, in hexadecimal. It does not depend on file or name."""
        digest = hashlib.sha256()
        for name, pair in sorted(self.pairs.items()):
            digest.update(f"{name}.{pair.a.dtype}.{pair.b.dtype}.{tuple(pair.a.shape)};".encode())
            digest.update(struct.pack("<d", pair.scale))
            for tensor in (pair.a, pair.b):
                digest.update(tensor.contiguous().view(torch.uint8).numpy().data)
        return digest.hexdigest()


def read_named(directory: Path, shapes: Mapping[str, tuple[int, int]], *, max_rank: int) -> NamedWeights:
    """Read the adapter of a directory for linear layers of these (outputs, inputs), to the host.

    Raises UnsupportedAdapter naming the misfit: options other than plain LoRA and rsLoRA, tensors of other layers or of
    other shapes, ranks above `max_rank`, or numbers that are not finite.
    """
    config = lora_config(directory)
    if config.get("use_dora"):
        raise UnsupportedAdapter("use_dora is true; on padded rows only LoRA and rsLoRA are supported")
    try:
        with name_of_regular(directory / WEIGHTS_FILE) as name:
            file: Any = safe_open(name, framework="pt")
    except FileNotFoundError:
        raise UnsupportedAdapter(f"the adapter has no {WEIGHTS_FILE}; only safetensors are read") from None
    except (SafetensorError, OSError) as error:
        raise UnsupportedAdapter(f"{WEIGHTS_FILE} cannot be read as safetensors: {str(error)[:100]}") from None
    tensors: dict[str, dict[str, str]] = {}
    for tensor in file.keys():  # noqa: SIM118  an open file is no mapping
        match = _TENSOR.fullmatch(tensor)
        if match is None or match[1] not in shapes:
            known = dict.fromkeys(name.rpartition(".")[2] for name in shapes)
            raise UnsupportedAdapter(
                f"tensor {tensor[:100]} is not of a supported module; supported are lora_A and lora_B of linear "
                f"layers that compute all tokens: {', '.join(known)}"
            )
        tensors.setdefault(match[1], {})[match[2]] = tensor
    if not tensors:
        raise UnsupportedAdapter(f"{WEIGHTS_FILE} holds no tensors")
    pairs = {name: _pair(file, config, name, found, shapes[name], max_rank) for name, found in sorted(tensors.items())}
    return NamedWeights(pairs)


def _pair(
    file: Any, config: Mapping[str, Any], name: str, found: Mapping[str, str], shape: tuple[int, int], max_rank: int
) -> NamedPair:
    """The pair of one layer. Refuses shapes and ranks that do not fit before it reads a tensor."""
    if missing := {"A", "B"} - found.keys():
        raise UnsupportedAdapter(f"{WEIGHTS_FILE} has no lora_{missing.pop()} of {name}")
    a, b = (tuple(file.get_slice(found[letter]).get_shape()) for letter in "AB")
    (outputs, inputs), rank = shape, a[0] if a else 0
    if (a, b) != ((rank, inputs), (outputs, rank)):
        raise UnsupportedAdapter(
            f"{name} has A of shape {a} and B of {b}; the base model takes (rank, {inputs}) and ({outputs}, rank)"
        )
    if not 1 <= rank <= max_rank:
        raise UnsupportedAdapter(f"{name} has rank {rank}; it must be from 1 to {max_rank}")
    listed = _patterned(config, "rank_pattern", "r", name)
    if listed is not None and listed != rank:
        raise UnsupportedAdapter(f"{name} has rank {rank} in {WEIGHTS_FILE}, and the config gives it {listed}")
    alpha = float(_patterned(config, "alpha_pattern", "lora_alpha", name))
    scale = alpha / math.sqrt(rank) if config.get("use_rslora") else alpha / rank
    return NamedPair(_finite(file, found["A"]), _finite(file, found["B"]), scale)


def _patterned(config: Mapping[str, Any], patterns: str, default: str, name: str) -> Any:
    """The value of a layer: from the first key of `patterns` that its name ends with, else `default`'s, or None."""
    for key, value in (config.get(patterns) or {}).items():
        plain = key.removeprefix("^")
        if name == plain or (not key.startswith("^") and name.endswith(f".{plain}")):
            return value
    return config.get(default)


def _finite(file: Any, name: str) -> torch.Tensor:
    kind = str(file.get_slice(name).get_dtype())
    if kind not in DTYPES:
        raise UnsupportedAdapter(f"tensor {name} is {kind}; supported are {', '.join(DTYPES)}")
    tensor: torch.Tensor = file.get_tensor(name)
    if not bool(torch.isfinite(tensor).all()):
        raise UnsupportedAdapter(f"tensor {name} holds NaN or infinite values: the adapter is damaged")
    return tensor
