"""The changes that llama.cpp's converter makes to a checkpoint's tensors: names, the order of rows, stored functions.

The names and changes are those of `convert_hf_to_gguf.py` and its package `conversion`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

Config = Mapping[str, Any]
Order = np.ndarray[Any, np.dtype[np.int64]]

ENDINGS = {
    ".A_log": (".A_log", ""),
    ".D": (".D", ""),
    ".dt_bias": (".dt_proj", ".bias"),
    ".e_score_correction_bias": (".e_score_correction", ".bias"),
}
"""Endings of a checkpoint's names, each with the ending by which the package's map knows it, and the one in GGUF."""
OTHER_NAMES = (("model.layers.", "backbone.layers."), (".mixer.experts.", ".mlp.experts."))
"""Parts of names that the package's map does not have for all families, each with the part that it has instead."""
PAIRED = re.compile(r"\.(?:self_attn|mixer)\.([qk])_proj\.(weight|bias)$")
CONVOLUTION = re.compile(r"\.(conv\.conv|conv1d)\.weight$")
"""Names of tensors that a checkpoint stores with a dimension of 1 in the middle, and GGUF without it."""
FLAT = (".A_log", ".D", ".mamba.norm.weight", ".mixer.norm.weight")
"""Endings of tensors of one dimension, to which the converter adds another."""
SHARED_GATE = ".shared_expert_gate.weight"
"""The ending of a matrix of one row, which GGUF may store as a vector."""


@dataclass(frozen=True)
class HeadColumns:
    """Columns of a matrix that are stored in another order of heads."""

    heads: Order
    """For each head in the checkpoint's order, its number in the file's."""
    width: int
    """Number of columns of a head."""

    @property
    def columns(self) -> Order:
        """For each column in the checkpoint's order, its number in the file's."""
        return rows_of_heads(self.heads, self.width)


@dataclass(frozen=True, kw_only=True)
class Change:
    """The difference between a tensor in a checkpoint and the same one in a GGUF file. By default there is none."""

    rows: Order | None = None
    """For each row of the checkpoint's tensor, its number in the stored one."""
    columns: HeadColumns | None = None
    shift: float = 0.0
    """Number added to all stored numbers."""
    logarithm: bool = False
    """Whether -exp of each number is stored."""
    reshape: Callable[[tuple[int, ...]], tuple[int, ...]] | None = None
    """The checkpoint's shape, from the stored one."""


def flat(shape: tuple[int, ...]) -> tuple[int, ...]:
    return (int(np.prod(shape)),)


def squeezed(shape: tuple[int, ...]) -> tuple[int, ...]:
    """The shape with a dimension of 1 in the middle."""
    return (shape[0], 1, *shape[1:])


def one_row(shape: tuple[int, ...]) -> tuple[int, ...]:
    return (1, *flat(shape))


def rows_of_heads(heads: Order, width: int) -> Order:
    """The numbers of all rows of heads of `width` rows each, in this order of heads."""
    return (heads[:, None] * width + np.arange(width)).reshape(-1)


class Layout:
    """The form in which GGUF stores the tensors of one architecture. This one is that of most families."""

    shifted = False
    """Whether 1 is added to the weights of norms, because the model adds 1 to them."""

    def __init__(self, config: Config) -> None:
        """`config` is what `gguf_config.config_of` gives."""
        self._config = config

    def names(self, name: str) -> Iterator[tuple[str, str]]:
        """The names by which the package's map may know a tensor, each with the ending that the map leaves out."""
        ending = next((each for each in ENDINGS if name.endswith(each)), None)
        if ending is None:
            stem, _, last = name.rpartition(".")
            last = f".{last}"
        else:
            known, last = ENDINGS[ending]
            stem = name.removesuffix(ending) + known
        yield stem, last
        for usual, other in OTHER_NAMES:
            if usual in stem:
                yield stem.replace(usual, other, 1), last
        yield name, ""  # the map has some names with their endings, and the converter then adds none

    def change(self, name: str, shape: tuple[int, ...]) -> Change:
        """The change of a tensor, by its name in the checkpoint, with its shape [rows, ...] in the file."""
        if name.endswith(".A_log"):
            return Change(rows=self._rows(name, shape), logarithm=True, reshape=flat)
        reshape = squeezed if CONVOLUTION.search(name) else flat if name.endswith(FLAT) else None
        if name.endswith(SHARED_GATE):
            reshape = one_row
        shift = 1.0 if self._is_shifted(name) else 0.0
        return Change(rows=self._rows(name, shape), columns=self._columns(name), shift=shift, reshape=reshape)

    def _is_shifted(self, name: str) -> bool:
        return self.shifted and name.endswith("norm.weight")

    def _rows(self, name: str, shape: tuple[int, ...]) -> Order | None:
        """`Change.rows` of a tensor."""
        return None

    def _columns(self, name: str) -> HeadColumns | None:
        """`Change.columns` of a tensor."""
        return None


class Shifted(Layout):
    """Gemma's: 1 is added to the weights of norms."""

    shifted = True


class Paired(Layout):
    """Llama's: rows of queries and keys are stored in pairs (i, i + 1), as llama.cpp rotates them.

    The checkpoint's pairs are (i, i + half a head).
    """

    def _rows(self, name: str, shape: tuple[int, ...]) -> Order | None:
        match = PAIRED.search(name)
        if match is None:
            return None
        heads = int(self._config["num_attention_heads" if match[1] == "q" else "num_key_value_heads"])
        return np.arange(shape[0]).reshape(heads, -1, 2).swapaxes(1, 2).reshape(-1)


class GatedDelta(Shifted):
    """Qwen3-Next's: norms but for that of the recurrence have 1 added, and rates and time steps are one tensor."""

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self._keys, self._values = int(config["linear_num_key_heads"]), int(config["linear_num_value_heads"])
        self._width = int(config["linear_value_head_dim"])

    def names(self, name: str) -> Iterator[tuple[str, str]]:
        yield from super().names(name)
        if self._half(name) is not None:
            yield name.rpartition(".in_proj_")[0] + ".in_proj_ba", ".weight"

    def _is_shifted(self, name: str) -> bool:
        return super()._is_shifted(name) and not name.endswith("linear_attn.norm.weight")

    def _half(self, name: str) -> int | None:
        """The number of a tensor among the two that are stored together, rates before time steps; None: of others."""
        return next((at for at, each in enumerate("ba") if name.endswith(f".in_proj_{each}.weight")), None)

    def _rows(self, name: str, shape: tuple[int, ...]) -> Order | None:
        half = self._half(name)
        if half is None or shape[0] == self._values:
            return None
        # Each key head has the rates and then the time steps of its value heads.
        return np.arange(shape[0]).reshape(self._keys, 2, -1)[:, half].reshape(-1)


class TiledDelta(GatedDelta):
    """Qwen3.5's: value heads are stored in the order of their numbers within a key head, to be repeated by ggml.

    A checkpoint has all value heads of a key head together.
    """

    @property
    def _heads(self) -> Order:
        """For each value head in the checkpoint's order, its number in the file's."""
        return np.arange(self._values).reshape(-1, self._keys).swapaxes(0, 1).reshape(-1)

    def _rows(self, name: str, shape: tuple[int, ...]) -> Order | None:
        if name.endswith((".in_proj_b.weight", ".in_proj_a.weight", ".A_log", ".dt_bias")):
            return self._heads
        values = rows_of_heads(self._heads, self._width)
        if name.endswith(".in_proj_z.weight"):
            return values
        if name.endswith((".in_proj_qkv.weight", ".linear_attn.conv1d.weight")):
            before = shape[0] - len(values)
            order: Order = np.concatenate((np.arange(before), before + values))
            return order
        return None

    def _columns(self, name: str) -> HeadColumns | None:
        return HeadColumns(self._heads, self._width) if name.endswith(".linear_attn.out_proj.weight") else None


LAYOUTS: dict[str, Callable[[Config], Layout]] = {
    "llama": Paired,
    "granitehybrid": Paired,
    "nemotron_h": Paired,
    "nemotron_h_moe": Paired,
    "gemma2": Shifted,
    "gemma3": Shifted,
    "qwen3next": GatedDelta,
    "qwen35": TiledDelta,
    "qwen35moe": TiledDelta,
}
"""The layouts of GGUF's architectures. All others have the usual one."""


def layout_of(architecture: str, config: Config) -> Layout:
    """The layout of an architecture."""
    return LAYOUTS.get(architecture, Layout)(config)
