"""Which served steps with prefill work take longer than predicted: by prompts in the step and copies beside it.

    python benchmarks/mixed_steps.py --cache-gb 40 --host-gb 32 --rate 10 --seconds 25

A Llama-3-8B shape with random weights, one process, `--tbt-target 25`, prefix sharing and both tiers on. Poisson
arrivals as of code completion: prompts of about 2,000 tokens (lognormal), answers of 28. Steps without a stream are
left out.
"""

from __future__ import annotations

import argparse
import gc
import json
import random
from collections import defaultdict
from pathlib import Path
from typing import Any

from in_real_time import NAMES, StepRecord, WallClock, checkpoint_of
from invocation import provenance, settle

from holdfast.core.config import EngineConfig
from holdfast.engine.process.build import build
from holdfast.engine.profiles import CostProfile
from holdfast.lab.simulator.run import Clients
from holdfast.lab.workloads import Conversation, Turn, gamma_arrivals
from holdfast.lm.types import StepPlan


def requests(count: int, longest: int, seed: int) -> list[Conversation]:
    """Long prompts with short answers."""
    draw = random.Random(seed)
    lengths = [(draw.lognormvariate(7.2, 0.9), draw.expovariate(1 / 28)) for _ in range(count)]
    return [Conversation(0.0, (Turn(max(16, min(longest, int(p))), max(2, int(o))),)) for p, o in lengths]


def serve(args: argparse.Namespace) -> list[dict[str, Any]]:
    """The record of each step, with the spans of its segments and its predicted seconds."""
    config = EngineConfig(
        model=checkpoint_of("llama-3-8b"),
        load_format="random",
        max_sequences=128,
        max_model_len=8192,
        tbt_target=25.0,
        cache_gb=args.cache_gb,
        host_cache_gb=args.host_gb,
    )
    loop, info = build(config)
    settle(loop)
    cost = CostProfile.load(Path(info.profile_path)).cost
    record, spans, submit = StepRecord(loop), {}, loop.executor.submit

    def noted(plan: StepPlan) -> None:
        spans[plan.step] = [(segment.stop - segment.start, segment.stop) for segment in plan.segments]
        submit(plan)

    loop.executor.submit = noted  # type: ignore[method-assign]
    work = gamma_arrivals(requests(int(args.rate * args.seconds), 7000, args.seed), args.rate, args.seed)
    clients = Clients(work, loop, WallClock(), vocab_size=30_000, concurrency=None)
    gc.collect()
    gc.freeze()
    gc.disable()
    while clients.advance():
        pass
    loop.close()
    rows = [dict(zip(NAMES, row, strict=True)) for row in record.rows]
    return [row | {"spans": spans[row["step"]], "predicted": cost.step(spans[row["step"]])} for row in rows]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cache-gb", type=float, default=40.0)
    parser.add_argument("--host-gb", type=float, default=32.0)
    parser.add_argument("--rate", type=float, default=10.0)
    parser.add_argument("--seconds", type=float, default=25.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", type=Path, help="write every step there")
    args = parser.parse_args()
    kinds: dict[tuple[int, int], list[tuple[float, float]]] = defaultdict(list)
    rows = serve(args)
    for row in rows:
        prompts = sum(query > 1 for query, _ in row["spans"])
        if prompts and prompts < len(row["spans"]):
            copied = next(bound for bound in (0, 64, 128, 256, 1 << 30) if row["in"] + row["out"] <= bound)
            kinds[min(prompts, 3), copied].append((1e3 * row["seconds"], row["seconds"] / row["predicted"]))
    print(json.dumps(provenance()))
    print("prompts  blocks copied  steps   ms p50    p90    p99    max   over predicted p50    p90    p99")
    for (prompts, copied), found in sorted(kinds.items()):
        times, ratios = (sorted(column) for column in zip(*found, strict=True))

        def at(values: list[float], share: float) -> float:
            return values[min(len(values) - 1, int(share * len(values)))]

        bound = "none" if not copied else "more" if copied == 1 << 30 else f"up to {copied}"
        p50, p90, p99 = (f"{at(times, share):6.2f} " for share in (0.5, 0.9, 0.99))
        over = " ".join(f"{at(ratios, share):6.3f}" for share in (0.5, 0.9, 0.99))
        print(f"{prompts:7}  {bound:>13}  {len(found):5}   {p50}{p90}{p99}{times[-1]:6.2f}             {over}")
    if args.json:
        args.json.write_text(json.dumps(rows))


if __name__ == "__main__":
    main()
