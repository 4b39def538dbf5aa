"""All systems of the comparison answer alike, and its ratios are those of the figures."""

from __future__ import annotations

import argparse
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from benchmarks.lib.cells.processes import Processes, SplitEngine
from benchmarks.papers.cells_serve import (
    Bench,
    CudnnEngine,
    DeviceBench,
    compare,
    crossing,
    peak_of,
    ratios,
    row_of,
    serve,
)


def options(**changed: Any) -> argparse.Namespace:
    plain = dict(
        device=["cpu"], only=["lstm"], seconds=0.2, patience=5.0, hidden=8, vocabulary=50, dtype="float32",
        tree_sizes=[16], clients=20, max_tasks=5, seed=1, roles=["ours", "baseline", "outside"], shared=True,
        alone=False,
    )  # fmt: skip
    return argparse.Namespace(**plain | changed)


@pytest.mark.parametrize("name", ["lstm", "equal-lstm", "seq2seq", "tree", "equal-tree"])
def test_every_system_answers_a_sample_alike(name: str) -> None:
    run = options(only=[name])
    (model,) = Bench(run).models()
    assert len(model.systems) >= 2
    assert compare(model, run) == {system.name: 1.0 for system in model.systems}


def test_two_workers_answer_like_one() -> None:
    run = options(only=["seq2seq"], device=["cpu", "cpu"])
    (model,) = Bench(run).models()
    assert set(compare(model, run).values()) == {1.0}


@pytest.mark.long
def test_two_processes_answer_like_one(tmp_path: Path) -> None:
    run = options(only=["seq2seq", "tree"], out=tmp_path, threads=1, tf32=False)
    processes = Processes([partial(DeviceBench, run)] * 2)
    try:
        for here, split in zip(Bench(run).models(), Bench(run, processes).models(), strict=True):
            assert [system.name for system in split.systems] == [system.name for system in here.systems]
            assert compare(split, run) == {system.name: 1.0 for system in here.systems}
            one, two = (
                serve(model.systems[0].engine(), here.samples[:40], seconds=30.0, arrivals=np.zeros(40), keep=True)
                for model in (here, split)
            )
            assert len(two.results) == 40
            for request, results in one.results.items():
                assert {name: each.tolist() for name, each in results.items()} == {
                    name: each.tolist() for name, each in two.results[request].items()
                }
        engine = split.systems[0].engine()
        assert isinstance(engine, SplitEngine)
        engine.watch("perf_counter")
        assert peak_of(split.systems[0], split, run, engine) > 10
        seconds, ended = engine.times()
        assert ended > 2 and {"deal", "receive", "unfold", "schedule", "update"} <= set(seconds)
    finally:
        processes.close()


@pytest.mark.parametrize("width", [None, 10])
def test_torchs_lstm_over_whole_batches_gives_the_same_labels(width: int | None) -> None:
    bench = Bench(options())
    (model,) = bench.models()
    w = bench.weights
    given = {"x": w.lstm.w[:, :8], "h": w.lstm.w[:, 8:], "w": w.lstm.w, "b": w.lstm.b, "embedding": w.embedding}
    given |= {"label_w": w.label.w, "label_b": w.label.b}
    engine = CudnnEngine(given, "cpu", 16, width)
    some, arrivals = model.samples[:40], np.zeros(40)
    ours = serve(model.systems[0].engine(), some, seconds=30.0, arrivals=arrivals, keep=True).results
    theirs = serve(engine, some, seconds=30.0, arrivals=arrivals, keep=True).results
    assert {key: int(each["label"][-1]) for key, each in ours.items()} == {
        key: int(each["label"][-1]) for key, each in theirs.items()
    }
    assert len(theirs) == 40


def test_a_rate_and_a_peak_are_measured() -> None:
    torch.set_num_threads(1)
    run = options()
    (model,) = Bench(run).models()
    row = row_of(model.systems[0], model, 100.0, run)
    assert row["answered"] == 1.0
    assert 0 < row["p50_ms"] <= row["p90_ms"] <= row["p99_ms"]
    assert len(row["queuing_ms"]) == len(row["computation_ms"]) == 101
    assert peak_of(model.systems[0], model, run) > 10


def system(name: str, role: str, peak: float, *p90: float | None) -> dict[str, Any]:
    rows = [dict(rate=rate, p90_ms=at) for rate, at in zip((10.0, 50.0, 90.0), p90, strict=True)]
    return dict(system=name, role=role, peak=peak, rows=rows)


def test_ratios_take_the_best_baseline_of_each_figure() -> None:
    ours = system("ours", "ours", 150.0, 2.0, 4.0, 6.0)
    peaked, quick = system("a", "baseline", 100.0, 20.0, 40.0, None), system("b", "baseline", 60.0, 5.0, 16.0, None)
    assert ratios([ours, peaked, quick]) == (
        "Peak 1.50 times that of the best other, a. p90 at 50/s: 4.0 ms, the lowest other 16.0 ms (-75%)."
    )


def test_ratios_count_systems_with_a_faster_cell_as_baselines() -> None:
    ours = system("ours", "ours", 150.0, 2.0, 4.0, 6.0)
    same, outside = system("a", "baseline", 100.0, 20.0, 40.0, None), system("cuDNN", "outside", 120.0, 3.0, 5.0, 9.0)
    assert ratios([ours, same, outside]) == (
        "Peak 1.25 times that of the best other, cuDNN, 1.50 times that of the best of the same cell, a. "
        "p90 at 50/s: 4.0 ms, the lowest other 5.0 ms (-20%)."
    )


def test_the_crossing_with_an_outside_system_is_named() -> None:
    ours = system("ours", "ours", 100.0, 2.0, 4.0, None)
    outside = system("cuDNN", "outside", 200.0, 3.0, 5.0, 9.0)
    assert crossing(ours, outside) == ("cuDNN: peak 0.50 times its own; its p90 is lower at 90/s, ours at 10, 50/s.")
    assert "lower at all 3 rates" in crossing(system("ours", "ours", 1.0, 1.0, 1.0, 1.0), outside)
