"""Error of the simulator: one workload with its arrivals through the simulator and the real engine.

Run: python -m benchmarks.engine.simulator_accuracy --device cpu [--model DIR] [--requests 60]
     python -m benchmarks.engine.simulator_accuracy --device cuda [--shape llama-3-8b] [--seconds 25] [--profile FILE]
     either with --set tp=2 or --set pp=2, or any engine option

The device is measured first, unless a profile is given; `--schedulers` without names stops there. Requests arrive by a
Poisson process at `--load` times the profile's capacity: on a CPU with 32 to 256 prompt tokens and 8 to 48 generated
ones, on CUDA with the lengths of `--dataset`. Both run in one process on the same schedulers; leave the machine alone
meanwhile. Each real step is also compared with the cost model: measured over predicted by kind of step, and the loop's
time beyond the device. A second table scales the cost model by the pace of the real steps in the same half second:
this separates a machine whose pace changes from a simulator that queues wrongly.
"""

from __future__ import annotations

import argparse
import json
import platform
import random
import statistics
from collections import defaultdict
from collections.abc import Callable
from datetime import date
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from benchmarks.lib.in_real_time import RealEngine, Stepped, checkpoint_of, predicted
from benchmarks.lib.invocation import add_engine_options, command
from holdfast.core.config import BUILTIN_MODEL
from holdfast.core.cost import CostModel
from holdfast.engine.profiles import CostProfile
from holdfast.lab import workloads
from holdfast.lab.metrics import percentile, summary
from holdfast.lab.simulator.deployment import Pipeline
from holdfast.lab.simulator.devices import look_up
from holdfast.lab.simulator.run import simulate
from holdfast.lab.simulator.shapes import MODELS
from holdfast.lab.workloads import DATASETS, Conversation, Turn, Workload
from holdfast.lm.config import EngineConfig

SHOWN = [f"{which}_{name}_ms" for name in ("ttft", "itl", "e2el") for which in ("mean", "median", "p99")]
PACE_SECONDS = 0.5
"""Seconds over which the second table averages the machine's pace."""
CLOSED = 32
"""Number of open conversations in the run that measures the device's capacity."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--model", default=BUILTIN_MODEL, help="a checkpoint's directory, without --shape")
    parser.add_argument("--shape", help="a known shape, with random weights")
    parser.add_argument("--profile", type=Path, help="a measured profile; default: measured first")
    parser.add_argument("--keep-profile", type=Path, help="write the profile there")
    parser.add_argument("--dataset", default="openchat_sharegpt4", choices=DATASETS)
    parser.add_argument("--requests", type=int, help="default: as many as arrive in --seconds")
    parser.add_argument("--seconds", type=float, default=25.0)
    parser.add_argument("--load", type=float, default=0.6)
    parser.add_argument("--schedulers", nargs="*", default=["stall-free", "prefill-first", "orca"])
    parser.add_argument("--repeat", type=int, default=1, help="real runs of each scheduler")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--steps-in-flight", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    add_engine_options(parser)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--steps", type=Path, help="write each real step there, for looking into")
    args = parser.parse_args()

    common = settings(args)
    profile = CostProfile.load(args.profile) if args.profile else None
    engine = RealEngine(EngineConfig(**common, scheduler="prefill-first"), profile=profile)
    profile = engine.profile
    if args.keep_profile:
        profile.save(args.keep_profile.absolute())
    if not args.schedulers:
        engine.close()
        return
    common.pop("model"), common.pop("device"), common.pop("load_format", None)
    pipeline = Pipeline.measured(profile)
    full = capacity(args, profile, common)
    count = args.requests or max(20, round(args.load * full * args.seconds))
    rate = args.load * full
    workload = workloads.gamma_arrivals(requests(args, count), rate, args.seed)
    engine.serve(EngineConfig(**common), workloads.fixed(8, 200, 16))
    about = dict(
        date=str(date.today()),
        command=command(),
        model=engine.info.model,
        device=engine.info.memory.device,
        layout=dict(tp=engine.info.tp, pp=engine.info.pp, stage_shares=profile.cost.stage_shares),
        torch=torch.__version__,
        python=platform.python_version(),
        requests=count,
        rate=round(rate, 3),
        capacity=round(full, 3),
    )
    print(json.dumps(about), flush=True)
    results, all_steps = [], []
    for scheduler in args.schedulers:
        config = EngineConfig(**common, scheduler=scheduler)
        simulated = summary(simulate(config, profile, workload, pipeline=pipeline).records)
        for _ in range(args.repeat):
            records, steps = engine.serve(config, workload)
            result = compare(scheduler, summary(records), simulated, profile.cost, steps)
            pace = pace_of(profile.cost, steps, workload)
            again = simulate(config, profile, workload, pace=pace, pipeline=pipeline)
            result |= at_pace(result["real"], summary(again.records))
            results.append(result)
            all_steps.append([scheduler, steps])
            print("\n".join(shown(results[-1])), flush=True)
            if args.json:
                args.json.write_text(json.dumps(dict(about=about, results=results), indent=1) + "\n")
    print("\n".join(table(results)))
    print(
        "\n".join(
            ["\nwith the cost model at the pace of each half second of the run:\n", *table(results, "off_at_pace")]
        )
    )
    if args.steps:
        args.steps.write_text(json.dumps(all_steps, separators=(",", ":")))
    engine.close()


def settings(args: argparse.Namespace) -> dict[str, Any]:
    """The engine's options."""
    common: dict[str, Any] = dict(
        model=checkpoint_of(args.shape) if args.shape else args.model,
        device=args.device,
        prefix_sharing=False,
        steps_in_flight=args.steps_in_flight,
    )
    if args.shape:
        common["load_format"] = "random"
    if args.device == "cpu":
        common |= dict(threads=args.threads, cache_gb=0.5, max_sequences=CLOSED, max_model_len=512)
        return common | dict(args.set)
    shape = look_up("model shape", MODELS, args.shape) if args.shape else None
    longest = min(DATASETS[args.dataset].limit, shape.max_model_len) if shape else None
    return common | dict(max_sequences=128, max_model_len=longest) | dict(args.set)


def requests(args: argparse.Namespace, count: int) -> Workload:
    """Requests that all arrive at once."""
    if args.device == "cuda":
        return workloads.sample_dataset(args.dataset, count, args.seed)
    choose = random.Random(args.seed)
    return [Conversation(0.0, (Turn(choose.randint(32, 256), choose.randint(8, 48)),)) for _ in range(count)]


def capacity(args: argparse.Namespace, profile: CostProfile, common: dict[str, Any]) -> float:
    """Requests per second by the profile with a constant number in progress."""
    workload = requests(args, 8 * CLOSED)
    pipeline = Pipeline.measured(profile)
    outcome = simulate(
        EngineConfig(**common), profile, workload, concurrency=common["max_sequences"], pipeline=pipeline
    )
    return len(workload) / outcome.seconds


def compare(
    scheduler: str, real: dict[str, Any], simulated: dict[str, Any], cost: CostModel, steps: list[Stepped]
) -> dict[str, Any]:
    """One run: figures of both, and the steps by kind."""
    off = {name: simulated[name] / real[name] - 1 for name in SHOWN}
    return dict(
        scheduler=scheduler,
        real={name: round(real[name], 3) for name in SHOWN},
        simulated={name: round(simulated[name], 3) for name in SHOWN},
        off={name: round(value, 4) for name, value in off.items()},
        steps=by_kind(cost, steps),
        between=between(steps),
    )


def pace_of(cost: CostModel, steps: list[Stepped], workload: Workload) -> Callable[[float], float]:
    """Function from a time in seconds of the workload to the measured/predicted ratio of the steps around it."""
    start = steps[0].planned - min(conversation.arrival for conversation in workload)
    real: dict[int, float] = defaultdict(float)
    expected: dict[int, float] = defaultdict(float)
    for step, seconds in zip(steps, predicted(cost, steps), strict=True):
        about = int((step.ended - step.seconds - start) / PACE_SECONDS)
        real[about] += step.seconds
        expected[about] += seconds
    whole = sum(real.values()) / sum(expected.values())
    pace = {about: real[about] / expected[about] for about in real}
    return lambda now: pace.get(int(now / PACE_SECONDS), whole)


def at_pace(real: dict[str, Any], simulated: dict[str, Any]) -> dict[str, Any]:
    """The simulator's error if its steps run at the pace of the real ones at that moment."""
    return dict(off_at_pace={name: round(simulated[name] / real[name] - 1, 4) for name in SHOWN})


def kind(step: Stepped) -> str:
    """Kind of a step: decodes by count, others by tokens, rounded up to a power of two."""
    tokens = sum(query for query, _ in step.segments)
    size = 1 << (tokens - 1).bit_length()
    return f"decodes {size}" if tokens == len(step.segments) else f"mixed {size}"


def by_kind(cost: CostModel, steps: list[Stepped]) -> dict[str, dict[str, float]]:
    """For each kind of step: number, mean time, and measured/predicted ratio."""
    kinds: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for step, expected in zip(steps, predicted(cost, steps), strict=True):
        kinds[kind(step)].append((step.seconds, expected))
        kinds["all"].append((step.seconds, expected))
    return {
        name: dict(
            count=len(pairs),
            ms=round(1e3 * statistics.mean(seconds for seconds, _ in pairs), 3),
            over=round(sum(seconds for seconds, _ in pairs) / sum(expected for _, expected in pairs), 3),
            p5=round(percentile(sorted(seconds / expected for seconds, expected in pairs), 0.05), 3),
            p95=round(percentile(sorted(seconds / expected for seconds, expected in pairs), 0.95), 3),
        )
        for name, pairs in sorted(kinds.items(), key=lambda item: (item[0].split()[0], len(item[0]), item[0]))
    }


def between(steps: list[Stepped]) -> dict[str, float]:
    """Milliseconds of a step beyond the device if the next one was submitted in time, and the host's parts."""
    after = [
        after.ended - before.ended - after.seconds
        for before, after in pairwise(steps)
        if after.submitted < before.ended
    ]
    late = [
        after.ended - before.ended - after.seconds
        for before, after in pairwise(steps)
        if after.submitted >= before.ended
    ]
    submit = [step.submitted - step.planned for step in steps]
    shown = dict(ahead=after, late=late, submit=submit)
    return {
        f"{name}_{which}": round(1e3 * value, 4)
        for name, values in shown.items()
        if values
        for which, value in (("mean", statistics.mean(values)), ("p95", percentile(sorted(values), 0.95)))
    } | {"steps": len(steps), "late_steps": len(late)}


def shown(result: dict[str, Any]) -> list[str]:
    """A run as readable text."""
    lines = [f"{'':14}" + "".join(f"{name.removesuffix('_ms'):>13}" for name in SHOWN)]
    for who in ("real", "simulated"):
        lines.append(f"{who + ', ms':14}" + "".join(f"{result[who][name]:13.2f}" for name in SHOWN))
    lines.append(f"{result['scheduler']:14}" + "".join(f"{result['off'][name]:13.1%}" for name in SHOWN))
    for name, row in result["steps"].items():
        lines.append(
            f"  {name:14} {row['count']:6} of {row['ms']:8.3f} ms, {row['over']:.3f} ({row['p5']} to {row['p95']})"
        )
    return [*lines, f"  {result['between']}"]


def table(results: list[dict[str, Any]], which: str = "off") -> list[str]:
    """The table of the documentation."""
    lines = ["| | TTFT mean, p50, p99 | TBT mean, p50, p99 | end to end mean, p50, p99 |", "|---|---|---|---|"]
    for result in results:
        off = [f"{result[which][name]:+.1%}" for name in SHOWN]
        cells = [", ".join(off[first : first + 3]) for first in (0, 3, 6)]
        lines.append(f"| {result['scheduler']} | {' | '.join(cells)} |")
    return lines


if __name__ == "__main__":
    main()
