"""Engines of several ranks with hybrid models: random histories, and the end of a rank."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.checkpoints import make
from tests.hybrid_engines import play

LAYERS: dict[str, Any] = dict(num_hidden_layers=4, layer_types=["linear_attention", "full_attention"] * 2)
"""Two stages, each with attention and a recurrent layer."""


@pytest.mark.parametrize(("tp", "pp", "seeds"), [(2, 1, (0, 3)), (1, 2, (2, 9)), (2, 2, (3,))])
def test_answers_of_random_histories_on_several_ranks_are_those_of_transformers(
    tmp_path: Path, tp: int, pp: int, seeds: tuple[int, ...]
) -> None:
    torch.set_num_threads(1)
    module, seen = make(tmp_path, "Qwen3_5Text", **LAYERS), Counter[str]()
    for seed in seeds:
        seen += play(seed, module, tmp_path, 40, pairs=2, tp=tp, pp=pp)
    print(seen)
    assert seen["snapshot_hits"] > 80
