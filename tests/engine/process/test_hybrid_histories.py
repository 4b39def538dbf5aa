"""Random histories of whole engines of hybrid models: real loop, scheduler, device and executor on a CPU."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
import torch

from tests.checkpoints import make
from tests.hybrid_engines import DiskHistory, play
from tests.long import then_long

SEEDS = (0, 9)
"""Histories with preemption, and with snapshots that go to the host and come back."""


@pytest.mark.parametrize("operations", then_long(1, [60, 100]))
def test_answers_of_random_histories_are_those_of_transformers(tmp_path: Path, operations: int) -> None:
    torch.set_num_threads(1)
    module, seen = make(tmp_path, "Qwen3_5Text"), Counter[str]()
    for seed in SEEDS:
        seen += play(seed, module, tmp_path, operations)
    assert seen["preemptions"] > 0 and seen["suspensions"] > 0
    assert seen["snapshot_hits"] > operations / 2
    assert seen["snapshots_dropped"] > operations
    assert seen["snapshots_swapped_in"] > operations / 5
    assert seen["ties"] < seen["tokens"] / 100


@pytest.mark.parametrize("seeds", then_long(1, [[4], [1, 4]]), ids=str)
def test_answers_are_those_of_transformers_over_a_disk_and_many_restarts(tmp_path: Path, seeds: list[int]) -> None:
    torch.set_num_threads(1)
    module, seen = make(tmp_path, "Qwen3_5Text"), Counter[str]()
    for seed in seeds:
        seen += play(seed, module, tmp_path, 60, DiskHistory)
    assert seen["restarts"] > 4
    assert seen["prefix_hits_on_disk"] > 0  # how many depends on the pace of the disk
    assert not seen["blocks_corrupt"]
    assert seen["ties"] <= seen["tokens"] / 100
