"""Adapters of named linear layers: numbers that are not finite, in the file or in the engine's type, are refused."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from holdfast.lm.models.peft_files import CONFIG_FILE, WEIGHTS_FILE, UnsupportedAdapter
from holdfast.lm.models.peft_modules import read_named
from holdfast.lm.padded.lora import RowLora
from holdfast.lm.parts.adapters.rows import RowAdapterStore

SHAPES = {"h.0.down": (4, 3), "h.1.down": (4, 3)}
RANK = 2


def written(directory: Path, number: float, letter: str, alpha: float = RANK) -> Path:
    """An adapter in which one number of a tensor of the second layer is `number`."""
    tensors = {}
    for name, (outputs, inputs) in SHAPES.items():
        tensors[f"base_model.model.{name}.lora_A.weight"] = torch.ones(RANK, inputs)
        tensors[f"base_model.model.{name}.lora_B.weight"] = torch.ones(outputs, RANK)
    tensors[f"base_model.model.h.1.down.lora_{letter}.weight"][1, 1] = number
    save_file(tensors, directory / WEIGHTS_FILE)
    config = {"peft_type": "LORA", "r": RANK, "lora_alpha": alpha, "target_modules": ["down"]}
    (directory / CONFIG_FILE).write_text(json.dumps(config))
    return directory


@pytest.mark.parametrize("letter", ["A", "B"])
@pytest.mark.parametrize("number", [float("nan"), float("-inf")])
def test_numbers_that_are_not_finite_are_refused_by_their_tensor(tmp_path: Path, letter: str, number: float) -> None:
    with pytest.raises(UnsupportedAdapter, match=rf"h\.1\.down\.lora_{letter}\.weight holds NaN or infinite"):
        read_named(written(tmp_path, number, letter), SHAPES, max_rank=8)


@pytest.mark.parametrize(("number", "letter", "alpha"), [(7e4, "A", 2.0), (7e3, "B", 20.0)])
def test_numbers_beyond_the_engines_type_are_refused_by_their_layer(
    tmp_path: Path, number: float, letter: str, alpha: float
) -> None:
    slots: Any = SimpleNamespace(shapes=SHAPES, max_rank=8, dtype=torch.float16)
    slots.pack = lambda pairs: RowLora.pack(slots, pairs)
    store = RowAdapterStore(slots, 1 << 20)
    with pytest.raises(UnsupportedAdapter, match=r"the tensors of h\.1\.down, .* are infinite as float16"):
        store.read("a", written(tmp_path, number, letter, alpha))
    assert store.read("a", written(tmp_path, 6e4 / alpha, letter, alpha)).info.rank == RANK
