"""Graphs that a busy engine captures between two steps: how many, how long streams wait for it, and what it gives.

    python -m benchmarks.engine.busy_captures --shape llama-3-8b --streams 100 --targets 0 25 50 --seconds 10

An engine with random weights serves `--streams` requests at a time without a pause: each that ends is followed by
another one at once. First it captures nothing, as a server without a pause did before. Then each target follows, in
milliseconds, 0 for none: what was captured stays, so begin with the tightest one. One line of JSON a phase: times
between two tokens of streams, tokens per second, graphs left at its end, and its pauses: their number, what was
expected of each, and what it took.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, cast

from benchmarks.lib.in_real_time import checkpoint_of
from benchmarks.lib.invocation import add_engine_options, provenance
from holdfast.core.config import BUILTIN_MODEL
from holdfast.core.types import Request, SamplingParams
from holdfast.engine.process.build import build, may_pause
from holdfast.engine.profiles import CostProfile
from holdfast.lab.metrics import percentile
from holdfast.lab.simulator.run import engine_shape
from holdfast.lm.choice import make_scheduler
from holdfast.lm.config import EngineConfig
from holdfast.lm.execution.executor import PagedExecutor
from holdfast.loop.loop import Loop


class Pauses:
    """Calls `prepare` of an executor between steps, and notes how long each call was expected to take, and took."""

    def __init__(self, executor: PagedExecutor) -> None:
        self._executor = executor
        self.took: list[tuple[float, float]] = []

    def prepare(self) -> bool:
        expected, began = self._executor.due, time.perf_counter()
        did = self._executor.prepare()
        self.took.append((expected, time.perf_counter() - began))
        return did


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", help="a known shape, with random weights; default: the built-in model")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    parser.add_argument("--streams", type=int, default=100)
    parser.add_argument("--targets", type=float, nargs="*", default=[25.0, 50.0, 0.0])
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--seed", type=int, default=0)
    add_engine_options(parser)
    args = parser.parse_args()
    common: dict[str, Any] = dict(
        model=checkpoint_of(args.shape) if args.shape else BUILTIN_MODEL,
        device=args.device,
        prefix_sharing=False,
        max_sequences=args.streams,
    )
    common |= dict(load_format="random") if args.shape else {}
    common |= dict(args.set)
    began = time.monotonic()
    loop, info = build(EngineConfig(**common, tbt_target=50.0))
    executor = cast(PagedExecutor, loop.executor)
    profile = CostProfile.load(Path(info.profile_path))
    about = dict(started_s=round(time.monotonic() - began, 1), graphs_left=left_of(executor))
    print(json.dumps(provenance() | about), flush=True)
    step = 0
    for target, captures in [(args.targets[0], False), *[(target, True) for target in args.targets]]:
        config = EngineConfig(**common, **(dict(tbt_target=target) if target else {}))
        shape = replace(engine_shape(config, profile), num_blocks=info.num_blocks, vocab_size=info.vocab_size)
        scheduler = make_scheduler(config, shape, profile.cost)
        scheduler._steps, pauses = step, Pauses(executor)
        gap = partial(may_pause, executor, scheduler, time.monotonic) if captures else (lambda: False)
        phase = Loop(scheduler, executor, 2, time.monotonic, prepare=pauses.prepare, gap=gap)
        found = run(phase, args.streams, args.seconds, random.Random(args.seed), info.vocab_size)
        step = scheduler._steps
        took = [seconds for _, seconds in pauses.took]
        over = [seconds / expected for expected, seconds in pauses.took if expected]
        waits = dict(
            pauses=len(took),
            pauses_ms=[round(1e3 * each, 1) for each in (min(took), max(took))] if took else [],
            pauses_s=round(sum(took), 2),
            took_over_expected_most=round(max(over, default=0.0), 2),
        )
        about = dict(target_ms=target, captures=captures, graphs_left=left_of(executor))
        print(json.dumps(about | found | waits), flush=True)
    executor.close()


def left_of(executor: PagedExecutor) -> int:
    """Number of graphs that are not captured yet."""
    return sum(len(graphs.left) for graphs in executor.memory.graphs)


def run(loop: Loop, streams: int, seconds: float, choose: random.Random, vocabulary: int) -> dict[str, Any]:
    """Keep this many requests in progress for some time, then end them. Returns what streams saw."""
    last: dict[str, float] = {}
    gaps: list[float] = []
    tokens, number, end = 0, 0, time.monotonic() + seconds
    while time.monotonic() < end:
        while len(loop.planner.entries) < streams:  # type: ignore[attr-defined]
            prompt = [choose.randrange(vocabulary) for _ in range(choose.randint(30, 400))]
            params = SamplingParams(max_tokens=choose.randint(20, 300), ignore_eos=True, temperature=0.0)
            loop.add(Request(str(number), tuple(prompt), params))
            number += 1
        outputs, now = loop.step() or (), time.monotonic()
        for output in outputs:
            tokens += len(output.tokens)
            if output.request_id in last:
                gaps.append(now - last[output.request_id])
            last[output.request_id] = now
    loop.planner.abort_all()  # type: ignore[attr-defined]
    while loop.has_work():
        loop.step()
    gaps.sort()
    ms = {f"p{share}": round(1e3 * percentile(gaps, share / 100), 2) for share in (50, 99, 99.9, 100)}
    return dict(gaps_ms=ms, tokens_per_s=round(tokens / seconds))


if __name__ == "__main__":
    main()
