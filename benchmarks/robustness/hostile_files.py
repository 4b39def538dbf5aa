"""Files that an attacker could leave for `holdfast serve`: adapters and directories that must not end or stall it."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from neighbour import post
from safetensors.torch import load_file, save_file

from holdfast.lm.models.adapted import adapted_modules
from holdfast.lm.models.loader import decoder_spec
from holdfast.lm.models.peft_files import (
    CONFIG_FILE,
    WEIGHTS_FILE,
    AdapterWeights,
    LoraPair,
    write_peft,
)

LOAD = "/v1/load_lora_adapter"
CONFIGS: dict[str, dict[str, Any]] = {
    "alpha-1e308": {"lora_alpha": 1e308},
    "alpha-1e40": {"lora_alpha": 1e40},
    "alpha-of-400-digits": {"lora_alpha": 10**400},
    "alpha-minus-1e308": {"lora_alpha": -1e308},
    "alpha-infinite": {"lora_alpha": float("inf")},
    "alpha-text": {"lora_alpha": "16"},
    "alpha-nan": {"lora_alpha": float("nan")},
    "alpha-pattern": {"alpha_pattern": {"q_proj": -1e308}},
    "alpha-pattern-text": {"alpha_pattern": {"q_proj": "1e308"}},
    "alpha-rooted": {"lora_alpha": 1e308, "use_rslora": True},
    "rank-0": {"r": 0},
    "rank-negative": {"r": -4},
    "rank-huge": {"r": 10**18},
    "rank-text": {"r": "4"},
    "rank-pattern-negative": {"rank_pattern": {"q_proj": -1}},
    "rank-pattern-huge": {"rank_pattern": {"q_proj": 10**18}},
    "rank-of-another": {"rank_pattern": {"q_proj": 64}},
    "rooted-text": {"use_rslora": "false"},
    "dropout-nan": {"lora_dropout": float("nan")},
}
"""For each adapter, the wrong entries of its adapter_config.json. All others are right."""
NUMBERS = {"tensor-nan": float("nan"), "tensor-infinite": float("inf"), "tensor-3e38": 3e38}
"""For each adapter, a number in all places of its tensors."""
PIPES = {"pipe-config": CONFIG_FILE, "pipe-weights": WEIGHTS_FILE}
"""For each adapter, the file that is a named pipe. Nobody writes to it."""


def loads(names: Iterator[str] | dict[str, Any]) -> bytes:
    """Requests that load these adapters, one after the other."""
    return b"".join(post(LOAD, {"lora_name": name, "lora_path": name}) for name in names)


def write_adapters(root: Path, model: Path) -> None:
    """Write every hostile adapter of a model below a directory, each in its own."""
    base = decoder_spec(model)
    outputs, inputs = adapted_modules(base).shapes()["q"]
    a, b = torch.full((4, inputs), 0.01), torch.full((outputs, 4), 0.01)
    right = AdapterWeights({(layer, "q"): LoraPair(a.clone(), b.clone(), 2.0) for layer in range(base.num_layers)})
    for name in ("right", *CONFIGS, *NUMBERS, *PIPES):
        write_peft(root / name, right, base_model="base")
    changeless = {key: LoraPair(torch.full_like(a, 3e38), torch.zeros_like(b), 1.0) for key in right.pairs}
    write_peft(root / "nan-answers", AdapterWeights(changeless), base_model="base")
    for name, changes in CONFIGS.items():
        path = root / name / CONFIG_FILE
        path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))
    for name, number in NUMBERS.items():
        path = root / name / WEIGHTS_FILE
        save_file({key: torch.full_like(tensor, number) for key, tensor in load_file(path).items()}, path)
    for name, file in PIPES.items():
        (root / name / file).unlink()
        os.mkfifo(root / name / file)


def starts(directory: Path, model: Path) -> Iterator[tuple[str, list[str], str, Callable[[], bool]]]:
    """Starts that must be refused: a name, options of serve, words of the reason, and a check that nothing changed."""
    victim = directory / "victim"
    victim.write_text("mine")
    tier = ["--disk-cache-gb", "0.01", "--host-cache-gb", "0.01", "--disk-cache-dir"]

    def unchanged() -> bool:
        return victim.read_text() == "mine" and not any((directory / "elsewhere").iterdir())

    (directory / "elsewhere").mkdir()
    (directory / "linked").symlink_to(directory / "elsewhere")
    yield "a link as disk tier", [*tier, str(directory / "linked")], "it is a symbolic link", unchanged
    for name, mode in (("lock-linked", 0o700), ("lock-pipe", 0o700), ("open", 0o777)):
        (directory / name).mkdir()
        (directory / name).chmod(mode)
    (directory / "lock-linked" / "lock").symlink_to(victim)
    yield "a linked lock of the disk tier", [*tier, str(directory / "lock-linked")], "it is a symbolic link", unchanged
    os.mkfifo(directory / "lock-pipe" / "lock")
    yield "a pipe as lock of the disk tier", [*tier, str(directory / "lock-pipe")], "it is a named pipe", unchanged
    yield "a disk tier that others write to", [*tier, str(directory / "open")], "others may write to it", unchanged
    write_adapters(directory / "adapters", model)
    for name, words in (("alpha-1e308", "is scaled by"), ("pipe-weights", "it is a named pipe")):
        yield f"adapter {name}", ["--adapter", f"x={directory / 'adapters' / name}"], words, unchanged
    shutil.copytree(model, directory / "piped")
    (directory / "piped" / "model.safetensors").unlink()
    os.mkfifo(directory / "piped" / "model.safetensors")
    yield "a pipe as weights of the model", [str(directory / "piped")], "it is a named pipe", unchanged
