"""Draft heads of random weights, in the format of published checkpoints."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from holdfast.lm.models.decoder import Decoder
from holdfast.lm.models.draft_head import read_head, spec_of


def write_head(
    directory: Path, target: Decoder, guesses: tuple[int, ...] = (), *, change: Any = None, **settings: Any
) -> Path:
    """Write a head for this target, which guesses only these tokens if any are given. `change` edits the tensors."""
    spec = target.decoder
    config = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "num_hidden_layers": 1,
        "hidden_size": spec.hidden_size,
        "intermediate_size": 40,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "vocab_size": spec.vocab_size,
        "draft_vocab_size": len(guesses) or spec.vocab_size,
        "eagle_aux_hidden_state_layer_ids": [0, spec.num_layers - 1],
        **settings,
    }
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config))
    head = spec_of(config, target)
    made = torch.Generator().manual_seed(0)
    tensors = {
        name: torch.ones(shape) if len(shape) == 1 else torch.randn(shape, generator=made) * 0.3
        for name, shape in (head.shapes | {"lm_head.weight": head.shared_shapes["lm_head.weight"]}).items()
    }
    if guesses:
        tensors["d2t"] = torch.tensor(guesses) - torch.arange(len(guesses))
        tensors["t2d"] = torch.isin(torch.arange(spec.vocab_size), torch.tensor(guesses))
    if change is not None:
        change(tensors)
    save_file(tensors, directory / "model.safetensors")
    return directory


def make_head(directory: Path, target: Decoder, guesses: tuple[int, ...] = (), **settings: Any) -> Any:
    """A head of `write_head`, read for its target."""
    return read_head(write_head(directory, target, guesses, **settings), target)
