"""Engines of two GPUs, or of two ranks that share one. Each part of benchmarks/engine/many_gpus.py is a process."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

ROOT = Path(__file__).parents[2]
SCRIPT = ("-m", "benchmarks.engine.many_gpus")

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.slow,
    pytest.mark.skipif(torch.cuda.device_count() == 0, reason="needs a GPU"),
]


def results_of(part: str, *options: str) -> list[dict[str, Any]]:
    """The output lines of a part that ended well."""
    command = [sys.executable, *SCRIPT, "--seconds", "200", "--parts", part, *options]
    output = subprocess.run(command, capture_output=True, text=True, check=True, timeout=250, cwd=ROOT).stdout
    lines = [json.loads(line) for line in output.splitlines() if line.startswith("{")]
    assert lines and lines[-1]["status"] == 0, output[-3000:]
    return lines


def test_two_gpus_exchange_rows_and_draw_the_tokens_of_whole_rows() -> None:
    lines = results_of("group")
    assert [line["wrong"] for line in lines if line["kind"] == "group"] == [[]]


@pytest.mark.parametrize(
    ("layout", "family"),
    [
        ("tp2", "llama"),
        ("pp2", "llama"),
        ("tp2", "olmo2"),
        ("tp2", "delta-nets"),
        ("pp2", "delta-nets"),
        ("tp2", "mamba"),
    ],
)
def test_random_histories_on_two_gpus_give_the_tokens_of_one(layout: str, family: str) -> None:
    lines = results_of("small", "--layouts-small", layout, "--family", family)
    histories = [line for line in lines if line["kind"] == "tokens"]
    assert {line["layout"] for line in histories} == {"one", layout}
    gaps = [line["gap"] for line in lines if line["kind"] == "gap"]
    # Steps of other sizes round differently, so the argmax differs if two tokens are equally likely.
    assert sum(len(line["wrong_from"]) for line in histories) == len(gaps) <= len(histories)
    # One GPU holds two such tokens in either order, depending on the step.
    nearest = 1e-4 if family in ("llama", "olmo2") else 1e-3  # states add up what all steps before have rounded
    assert all(abs(gap) < nearest for gap in gaps), gaps
    assert all(line["suspended"] and line["swapped_in"] for line in histories)


@pytest.mark.parametrize("layout", ["tp2", "pp2"])
def test_conversations_move_between_engines_of_two_gpus_and_come_back_from_the_disk(layout: str) -> None:
    [moved] = [line for line in results_of("moved", "--layouts-small", layout) if line["kind"] == "moved"]
    assert moved["wrong"] == []
    assert moved["turns"] == 6 and moved["on_disk"] > 0


@pytest.mark.parametrize("layout", ["tp2", "pp2"])
def test_adapters_drafts_and_tuning_on_two_gpus_give_the_tokens_and_losses_of_one(layout: str) -> None:
    command = [sys.executable, "-m", "benchmarks.engine.parts_on_ranks", "--layouts", layout]
    ended = subprocess.run(command, capture_output=True, text=True, check=False, timeout=400, cwd=ROOT)
    lines = [json.loads(line) for line in ended.stdout.splitlines() if line.startswith("{")]
    assert ended.returncode == 0, (lines[-1:], ended.stderr[-3000:])
    assert lines[-1]["wrong"] == [] and lines[-1]["drafts_accepted"] > 10


@pytest.mark.parametrize("layout", [("--ranks", "2"), ("--stages", "2")], ids=["tp2", "pp2"])
def test_a_deterministic_engine_of_two_gpus_gives_the_bits_that_one_gives_to_a_request_alone(
    layout: tuple[str, str],
) -> None:
    given = ["--shape", "dense", *layout, "--requests", "60", "--distinct", "10", "--output", "12"]
    shared = ["--set", "devices=0,0"] if torch.cuda.device_count() == 1 else []
    command = [sys.executable, "-m", "benchmarks.engine.same_bits", *given, *shared]
    ended = subprocess.run(command, capture_output=True, text=True, check=False, timeout=400, cwd=ROOT)
    assert ended.returncode == 0, ended.stdout[-2000:] + ended.stderr[-3000:]
    assert ended.stdout.splitlines()[-1] == "60 answers had the bits that they have alone"


def test_a_killed_rank_ends_the_engine_within_a_second_and_leaves_no_memory_taken() -> None:
    lines = results_of("killed")
    [killed] = [line for line in lines if line["kind"] == "killed"]
    assert killed["raised_after"] < 1.0
    assert "was killed by SIGKILL" in killed["error"]
    assert max(map(int, lines[-1]["megabytes_left"])) < 1000


@pytest.mark.parametrize("layout", ["tp2", "pp2"])
def test_a_bfloat16_model_is_served_by_two_gpus(layout: str) -> None:
    if layout == "tp2" and torch.cuda.device_count() == 1:
        pytest.skip("two processes take turns of milliseconds on one GPU, and each sum of a step waits for one")
    lines = results_of("served", "--shape", "0.6b", "--layouts", layout)
    assert [line["rows"] for line in lines if line["kind"] == "decode"] == [1, 32, 128]
