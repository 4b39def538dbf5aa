"""Random histories of whole engines of hybrid models: real loop, scheduler, device and executor on a CPU."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import torch

from tests.checkpoints import make
from tests.hybrid_engines import DiskHistory, play

SEEDS = (0, 9)
"""Histories with preemption, and with snapshots that go to the host and come back."""


def test_answers_of_random_histories_are_those_of_transformers(tmp_path: Path) -> None:
    torch.set_num_threads(1)
    module, seen = make(tmp_path, "Qwen3_5Text"), Counter[str]()
    for seed in SEEDS:
        seen += play(seed, module, tmp_path, 100)
    assert seen["preemptions"] > 2 and seen["suspensions"] > 2
    assert seen["snapshot_hits"] > 80
    assert seen["snapshots_dropped"] > 100
    assert seen["snapshots_swapped_in"] > 20
    assert seen["ties"] < seen["tokens"] / 100


def test_answers_are_those_of_transformers_over_a_disk_and_many_restarts(tmp_path: Path) -> None:
    torch.set_num_threads(1)
    module, seen = make(tmp_path, "Qwen3_5Text"), Counter[str]()
    for seed in (1, 4):
        seen += play(seed, module, tmp_path, 60, DiskHistory)
    assert seen["restarts"] > 4
    assert seen["prefix_hits_on_disk"] > 50
    assert not seen["blocks_corrupt"]
    assert seen["ties"] <= seen["tokens"] / 100
