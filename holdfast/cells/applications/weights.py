"""The weights of the built-in applications: one safetensors file each, stored as float16, used as float32."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from holdfast.files.regular import name_of_regular

Weights = Mapping[str, Tensor]

DIRECTORY = Path(__file__).parent / "trained"


def read_weights(name: str, directory: Path = DIRECTORY) -> tuple[dict[str, Tensor], list[str]]:
    """The tensors of an application, as float32, and its words. Raises FileNotFoundError if there is no such file."""
    path = directory / f"{name}.safetensors"
    with name_of_regular(path) as opened, safe_open(opened, framework="pt") as file:
        tensors = {key: file.get_tensor(key).float() for key in file.keys()}  # noqa: SIM118
        return tensors, json.loads(file.metadata().get("words", "[]"))


def write_weights(name: str, tensors: Weights, words: list[str], directory: Path = DIRECTORY) -> Path:
    """Store an application's tensors as float16, and its words in the same file. Returns the file's path."""
    path = directory / f"{name}.safetensors"
    directory.mkdir(parents=True, exist_ok=True)
    stored = {key: tensor.detach().to(torch.float16).contiguous() for key, tensor in tensors.items()}
    save_file(stored, path, metadata={"words": json.dumps(words, ensure_ascii=False)})
    return path
