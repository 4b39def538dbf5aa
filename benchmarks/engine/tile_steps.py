"""Steps of one token more than whole tiles: Sarathi-Serve §4.3, where 257 tokens take up to 1.32 times as long as 256.

    python -m benchmarks.engine.tile_steps [--shapes llama-3-8b mistral-7b] [--rounds 6] [--json FILE] [--small]

A step computes one whole prompt of that length, through all layers, back to back as in service; times are the
device's. With CUDA graphs a step is padded to the next captured size, without them it has just its tokens. Sizes rise
in one round and fall in the next, and each visit's first steps are not counted; figures are medians. Weights are
random. `--small` runs the built-in model on a CPU, which has no graphs, and shows only that it works.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.lib.in_real_time import RealEngine, checkpoint_of
from benchmarks.lib.invocation import provenance
from holdfast.lab import workloads
from holdfast.lm.config import EngineConfig
from holdfast.lm.scheduler.policies import StallFree

STATED = 1.32
"""Time of 257 tokens over that of 256, as the paper states it."""
WHOLE = (128, 256, 512, 1024)
"""Numbers of tokens that are whole tiles. Each is compared with one token more."""
UNCOUNTED, COUNTED = 4, 8
"""Steps of a visit. After a rest, a GPU is faster for a while."""
BLOCKS_GB, LONGEST = 4.0, 2048
TARGET = 100.0
"""A target, in ms, that lets the engine start with an estimated profile. No step here is planned by it."""


def step_times(real: RealEngine, sizes: Sequence[int], rounds: int) -> dict[int, float]:
    """Median seconds of a step that computes one prompt, by the tokens of the prompt."""
    config = EngineConfig(max_model_len=LONGEST, max_sequences=UNCOUNTED + COUNTED, prefix_sharing=False)
    taken: dict[int, list[float]] = {size: [] for size in sizes}
    for number in range(rounds):
        for size in sizes if number % 2 == 0 else sizes[::-1]:
            prompts = workloads.fixed(UNCOUNTED + COUNTED, size, 1)
            _, steps = real.serve(config, prompts, make_policy=lambda _, size=size: StallFree(size))
            if any(step.segments != ((size, size),) for step in steps):
                raise RuntimeError(f"a step of {size} tokens was planned otherwise: {steps[0].segments}")
            taken[size] += [step.seconds for step in steps[UNCOUNTED:]]
    return {size: median(seconds) for size, seconds in taken.items()}


def compared(times: dict[int, float], whole: Sequence[int]) -> list[dict[str, float]]:
    """A row for each number of whole tiles: milliseconds, those of one token more, and their ratio."""
    return [
        {"tokens": size, "ms": 1e3 * times[size], "one_more_ms": 1e3 * times[size + 1],
         "ratio": times[size + 1] / times[size]}
        for size in whole
    ]  # fmt: skip


def measure(shape: str, *, graphs: bool, small: bool, rounds: int) -> dict[str, Any]:
    """The rows of one shape, with or without CUDA graphs."""
    began = time.monotonic()
    options: dict[str, Any] = dict(device="cpu", threads=1, cache_gb=0.1)
    if not small:
        options = dict(model=checkpoint_of(shape), load_format="random", device="cuda", cache_gb=BLOCKS_GB)
    options |= dict(max_model_len=LONGEST, max_sequences=UNCOUNTED + COUNTED, host_cache_gb=0.0, tbt_target=TARGET)
    whole = WHOLE[:2] if small else WHOLE
    config = EngineConfig(**options, cuda_graphs=graphs)
    real = RealEngine(config, measure=False)
    started = time.monotonic() - began
    rows = compared(step_times(real, [size for each in whole for size in (each, each + 1)], rounds), whole)
    real.close()
    return {"shape": shape, "graphs": graphs and not small, "started_s": round(started, 1), "rows": rows}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", default=["llama-3-8b", "mistral-7b"])
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--small", action="store_true", help="the built-in model on this CPU")
    args = parser.parse_args()
    shapes = ["holdfast-tiny"] if args.small else args.shapes
    found = []
    for shape in shapes:
        for graphs in (False,) if args.small else (True, False):
            found.append(measure(shape, graphs=graphs, small=args.small, rounds=args.rounds))
            told = ", ".join(
                f"{row['tokens']:.0f}: {row['ms']:.2f} ms, one more {row['one_more_ms']:.2f} ({row['ratio']:.3f})"
                for row in found[-1]["rows"]
            )
            print(f"{shape}, {'graphs' if found[-1]['graphs'] else 'no graphs'}: {told}", flush=True)
            if args.json:
                args.json.write_text(json.dumps(dict(about=provenance(), found=found), indent=1) + "\n")
    print(f"The paper: 257 tokens take up to {STATED} times as long as 256.")


if __name__ == "__main__":
    main()
