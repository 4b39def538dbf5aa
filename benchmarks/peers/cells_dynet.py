"""Cellular batching against DyNet's autobatching on a CPU: TreeLSTM, the same trees, weights and Poisson arrivals.

Run: python3.11 -m venv DYNET && DYNET/bin/pip install dynet38 "numpy<2"
     python -m benchmarks.peers.cells_dynet --dynet-python DYNET/bin/python --hidden 512 128 --threads 1 2 --out DIR

DyNet runs in a process of its own (dynet_trees.py) with whole batches of up to --most trees, which its autobatching
merges by a --strategy. The two settings that answer most trees per second when all wait are chosen, and the better of
both counts. Ours runs as `holdfast serve` does: two rounds in flight, which share --max-tasks. DyNet 2.2 computes on
one thread, so with two threads two such processes share the requests; ours then has two workers, with one thread each.
Both sides count all of a request: building its graph, merging or planning, computing, reading its label.

First both answer the same trees, and their labels are compared. Then, for each p90 of --limits, the highest rate is
sought, within 4%, at which the p90 stays below and the second half of a run is answered as it comes.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.lib.cells.simulation import Served, highest
from benchmarks.lib.cells.workloads import poisson_arrivals
from benchmarks.lib.invocation import provenance
from benchmarks.papers.cells_serve import Bench, Sample, System, serve

FILLING = 0.25
Serve = Callable[[Sequence[Sample], np.ndarray, float], tuple[Served, list[Any]]]
"""Function from trees, arrivals and seconds to the times of requests, and their labels."""


class DyNet:
    """Processes that serve trees with DyNet; requests go to them in turn."""

    def __init__(self, python: Path, weights: Path, processes: int, strategy: int, most: int) -> None:
        self.most = most
        script = Path(__file__).with_name("dynet_trees.py")
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": ""}
        self._processes = [
            subprocess.Popen(
                [str(python), str(script)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                text=True,
                env=environment,
            )
            for _ in range(processes)
        ]
        for process in self._processes:
            self._send(process, {"weights": str(weights), "strategy": strategy})
        for process in self._processes:
            self._receive(process)

    def __call__(self, samples: Sequence[Sample], arrivals: np.ndarray, seconds: float) -> tuple[Served, list[Any]]:
        count = len(self._processes)
        trees = [
            dict(tokens=each.tokens.tolist(), left=each.tree.left, right=each.tree.right)
            for each in samples[: len(arrivals)]
            if each.tree is not None
        ]
        for at, process in enumerate(self._processes):
            mine = [trees[number % len(trees)] for number in range(at, min(len(trees), len(arrivals)), count)]
            given = dict(trees=mine, arrivals=arrivals[at::count].tolist(), most=self.most, until=seconds)
            self._send(process, given)
        finished, labels = np.full(len(arrivals), np.inf), [None] * len(arrivals)
        for at, process in enumerate(self._processes):
            made = self._receive(process)
            finished[at::count] = [np.inf if each is None else each for each in made["finished"]]
            labels[at::count] = made["labels"]
        return Served(arrivals, arrivals, finished), labels

    def close(self) -> None:
        for process in self._processes:
            assert process.stdin is not None
            process.stdin.close()
            process.wait(timeout=30)

    def _send(self, process: subprocess.Popen[str], given: dict[str, Any]) -> None:
        assert process.stdin is not None
        process.stdin.write(json.dumps(given) + "\n")
        process.stdin.flush()

    def _receive(self, process: subprocess.Popen[str]) -> dict[str, Any]:
        assert process.stdout is not None
        line = process.stdout.readline()
        if not line:
            raise SystemExit(f"DyNet's process ended with {process.wait()}; does {process.args[0]} have dynet38?")  # type: ignore[index]
        found: dict[str, Any] = json.loads(line)
        return found


def ours(system: System, workers: int) -> Serve:
    def run(samples: Sequence[Sample], arrivals: np.ndarray, seconds: float) -> tuple[Served, list[Any]]:
        given = [samples[at % len(samples)] for at in range(len(arrivals))]
        probe = serve(system.engine(), given, seconds=seconds, arrivals=arrivals, workers=workers, keep=True)
        labels: list[Any] = [None] * len(arrivals)
        for request, results in probe.results.items():
            labels[int(request)] = int(results["label"][-1])
        finished = np.full(len(arrivals), np.inf)
        finished[: len(probe.served.finished)] = probe.served.finished
        return Served(arrivals, arrivals, finished), labels

    return run


def capacity(side: Serve, samples: Sequence[Sample], limit: float, guess: float, run: argparse.Namespace) -> dict[str, Any]:  # fmt: skip # noqa: E501
    """The highest rate whose p90 is within `limit` seconds."""
    probes: list[dict[str, float]] = []

    def sustained(rate: float) -> bool:
        arrivals = poisson_arrivals(max(50, int(rate * run.seconds)), rate, run.seed)
        served, _ = side(samples, arrivals, float(arrivals[-1]) + 2 * limit)
        p90, answered = served.after(FILLING).p(90), served.answered(0.5)
        probes.append(dict(rate=round(rate, 1), p90_ms=round(p90 * 1e3, 2), answered=round(answered, 3)))
        return p90 <= limit and answered >= 0.95

    low = guess * 0.8
    while not sustained(low):
        low *= 0.6
        if low < 1:
            return dict(rate=0.0, probes=probes)
    return dict(rate=round(highest(sustained, low, guess * 1.1, near=1.04), 1), probes=probes)


def best_settings(
    samples: Sequence[Sample], weights: Path, threads: int, run: argparse.Namespace
) -> list[tuple[int, int]]:
    """The two pairs of --strategy and --most with which DyNet answers most trees per second when all wait."""
    rates: dict[tuple[int, int], float] = {}
    waiting = np.zeros(256 * threads)
    for strategy in run.strategy:
        dynet = DyNet(run.dynet_python, weights, threads, strategy, 1)
        try:
            for most in run.most * 2:
                dynet.most = most
                served, _ = dynet(samples, waiting, 60.0)
                rate = len(waiting) / float(served.finished.max())
                rates[strategy, most] = max(rate, rates.get((strategy, most), 0.0))
        finally:
            dynet.close()
    print("  DyNet, all waiting: " + ", ".join(f"{pair}: {rate:.0f}/s" for pair, rate in rates.items()), flush=True)
    return sorted(rates, key=lambda pair: rates[pair], reverse=True)[:2]


def measure(hidden: int, threads: int, run: argparse.Namespace, scratch: Path) -> dict[str, Any]:
    """Both sides at one size and number of threads."""
    torch.set_num_threads(1)
    options = argparse.Namespace(
        hidden=hidden,
        vocabulary=2000,
        seed=run.seed,
        dtype="float32",
        device=["cpu"] * threads,
        max_tasks=run.max_tasks,
        tree_sizes=[run.largest],
        clients=None,
    )
    bench = Bench(options)
    samples = bench.trees()
    system = bench.cellular_trees(run.largest)
    w = bench.weights
    path = scratch / f"weights-{hidden}.npz"
    tree = {name: getattr(w.tree, name).numpy() for name in ("leaf_w", "leaf_b", "w", "b")}
    np.savez(path, embedding=w.embedding.numpy(), label_w=w.label.w.numpy(), label_b=w.label.b.numpy(), **tree)
    our = ours(system, threads)
    settings = best_settings(samples, path, threads, run)
    dynets = [DyNet(run.dynet_python, path, threads, strategy, most) for strategy, most in settings]
    try:
        some = np.zeros(64)
        _, labels = our(samples, some, 60.0)
        _, theirs = dynets[0](samples, some, 60.0)
        equal = float(np.mean([one == other for one, other in zip(labels, theirs, strict=True)]))
        print(f"hidden {hidden}, {threads} threads: {equal:.1%} of 64 labels equal", flush=True)
        rows = []
        guess = {"ours": run.guess, "dynet": run.guess}
        for limit in run.limits:
            row: dict[str, Any] = dict(limit_ms=limit)
            found = capacity(our, samples, limit / 1e3, guess["ours"], run)
            guess["ours"], row["ours"] = max(found["rate"], 2.0), found
            best: dict[str, Any] = dict(rate=-1.0)
            for dynet, (strategy, most) in zip(dynets, settings, strict=True):
                found = capacity(dynet, samples, limit / 1e3, guess["dynet"], run)
                found |= dict(strategy=strategy, most=most)
                best = max(best, found, key=lambda each: each["rate"])
            guess["dynet"], row["dynet"] = max(best["rate"], 2.0), best
            row["ratio"] = round(row["ours"]["rate"] / best["rate"], 3) if best["rate"] else None
            print(
                f"  p90 {limit:g} ms: ours {row['ours']['rate']}/s, DyNet {best['rate']}/s, {row['ratio']}", flush=True
            )
            rows.append(row)
    finally:
        for dynet in dynets:
            dynet.close()
    return dict(hidden=hidden, threads=threads, equal=equal, rows=rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dynet-python", type=Path, required=True, help="a Python that can import dynet")
    parser.add_argument("--hidden", nargs="+", type=int, default=[512, 128])
    parser.add_argument("--threads", nargs="+", type=int, default=[1, 2])
    parser.add_argument("--limits", nargs="+", type=float, default=[100.0, 250.0], help="p90 in milliseconds")
    parser.add_argument(
        "--most", nargs="+", type=int, default=[16, 64, 256], help="most trees of DyNet's batches; the best counts"
    )
    parser.add_argument("--largest", type=int, default=256, help="most cells of our tasks")
    parser.add_argument("--max-tasks", type=int, default=5)
    parser.add_argument("--strategy", nargs="+", type=int, default=[1, 2, 3], help="DyNet's autobatch numbers")
    parser.add_argument("--seconds", type=float, default=3.0, help="of arrivals of one run")
    parser.add_argument("--guess", type=float, default=300.0, help="a rate to begin with")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path, required=True)
    run = parser.parse_args()
    run.out.mkdir(parents=True, exist_ok=True)
    path = run.out / "cells-dynet.json"
    every = json.loads(path.read_text()) if path.exists() else {}
    with tempfile.TemporaryDirectory() as scratch:
        for hidden in run.hidden:
            for threads in run.threads:
                started = time.perf_counter()
                made = measure(hidden, threads, run, Path(scratch))
                made["seconds"] = round(time.perf_counter() - started)
                options = {key: value for key, value in vars(run).items() if key not in ("out", "dynet_python")}
                every[f"hidden {hidden}, threads {threads}"] = provenance() | dict(options=options, **made)
                path.write_text(json.dumps(every, indent=1) + "\n")


if __name__ == "__main__":
    main()
