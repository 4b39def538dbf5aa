"""Random histories of whole engines of hybrid models: real loop, scheduler, device and executor on a CPU."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
import torch

from tests.checkpoints import make
from tests.hybrid_engines import play


@pytest.mark.parametrize("family", ["Qwen3_5Text", "Qwen3Next"])
def test_answers_of_random_histories_are_those_of_transformers(family: str, tmp_path: Path) -> None:
    torch.set_num_threads(1)
    module, seen = make(tmp_path, family), Counter[str]()
    for seed in range(6):
        seen += play(seed, module, tmp_path, 50)
    assert seen["preemptions"] > 0 and seen["suspensions"] > 0
    assert seen["snapshot_hits"] > 50
    assert seen["snapshots_dropped"] > 20
    assert seen["snapshots_swapped_in"] > 0
    assert seen["ties"] < seen["tokens"] / 100
