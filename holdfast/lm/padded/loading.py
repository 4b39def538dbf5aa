"""Load a checkpoint as Transformers' own module, as it is: for the padded executor."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class UnmodifiedModel:
    """A module of Transformers, or of a checkpoint's own code, with its weights on the device. In eval mode."""

    module: Any
    """The `PreTrainedModel`. Nothing of it is replaced, neither its parameters nor its attention."""
    architecture: str
    vocab_size: int
    max_model_len: int
    """Longest sequence in tokens."""
    eos_token_ids: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    weight_bytes: int
    is_encoder_decoder: bool = False
    pad_token_id: int = 0
    """The id of placeholders. They are masked, so any id of the vocabulary is right."""


def load_unmodified(
    directory: Path,
    *,
    device: torch.device,
    dtype: str = "auto",
    max_model_len: int | None = None,
    load_format: Literal["auto", "random"] = "auto",
    trust_remote_code: bool = False,
    module: Any = None,
) -> UnmodifiedModel:
    """The model of a Hugging Face checkpoint directory. The options are those of `models.loader.load`.

    `module` is one that `models.hf` has loaded from this directory and then refused, so that weights are read once. A
    checkpoint's own code runs only with `trust_remote_code`; the log then names the directory. Weights come from
    safetensors files alone and must be finite. Raises UnsupportedCheckpoint with the reason, by name for
    architectures that cannot generate (XLNet, Reformer without `is_decoder`).
    """
    raise NotImplementedError
