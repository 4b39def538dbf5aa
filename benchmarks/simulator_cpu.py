"""The simulator beside the real engine: one workload through both, by several schedulers, and how far they differ.

Run: python benchmarks/simulator_cpu.py [--model DIR] [--requests 60] [--load 0.6] [--schedulers stall-free orca …]

The device is measured first. Requests of 32 to 256 prompt tokens and 8 to 48 generated ones arrive by a Poisson process
at `load` of what the profile says the device can do. The machine should be idle otherwise: what else runs slows the
real engine and is unknown to the simulator.
"""

from __future__ import annotations

import argparse
import gc
import random
import time
from pathlib import Path

from holdfast.bench import workloads
from holdfast.bench.records import Record, summary
from holdfast.bench.workloads import Conversation, Turn, Workload
from holdfast.core.config import BUILTIN_MODEL, EngineConfig
from holdfast.engine.process import build
from holdfast.engine.profiles import Profile
from holdfast.simulator.run import Clients, simulate

SHOWN = [f"{which}_{name}_ms" for name in ("ttft", "itl", "e2el") for which in ("mean", "median", "p99")]


class WallClock:
    """Real seconds from now on."""

    def __init__(self) -> None:
        self._start = time.monotonic()

    def __call__(self) -> float:
        return time.monotonic() - self._start

    def advance_to(self, moment: float) -> None:
        time.sleep(max(0.0, moment - self()))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=BUILTIN_MODEL)
    parser.add_argument("--requests", type=int, default=60)
    parser.add_argument("--load", type=float, default=0.6)
    parser.add_argument("--schedulers", nargs="+", default=["stall-free", "prefill-first", "orca"])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()

    common = {"model": args.model, "device": "cpu", "threads": args.threads, "cache_gb": 0.5, "max_sequences": 32}
    _, info = build(EngineConfig(**common), measure=True)
    profile = Profile.load(Path(info.profile))
    rate = args.load * capacity(profile, requests(args, 1.0))
    workload = requests(args, rate)
    print(f"{info.model} on {info.device}, {args.requests} requests, {rate:.2f} a second ({args.load:.0%} load)")
    print(f"{'':14}" + "".join(f"{name.removesuffix('_ms'):>13}" for name in SHOWN))
    for scheduler in args.schedulers:
        config = EngineConfig(**common, scheduler=scheduler, max_model_len=512)
        real, simulated = summary(really(config, workload)), summary(simulate(config, profile, workload).records)
        for name, figures in (("real, ms", real), ("simulated, ms", simulated)):
            print(f"{name:14}" + "".join(f"{figures[shown]:13.2f}" for shown in SHOWN))
        off = "".join(f"{simulated[shown] / real[shown] - 1:13.1%}" for shown in SHOWN)
        print(f"{scheduler:14}{off}\n", flush=True)


def requests(args: argparse.Namespace, rate: float) -> Workload:
    """The workload at this rate."""
    choose = random.Random(args.seed)
    turns = [Turn(choose.randint(32, 256), choose.randint(8, 48)) for _ in range(args.requests)]
    return workloads.poisson([Conversation(0.0, (turn,)) for turn in turns], rate, args.seed)


def capacity(profile: Profile, workload: Workload) -> float:
    """Requests a second that the profile gives when all of them are there at once."""
    config = EngineConfig(max_sequences=32, max_model_len=512)
    return len(workload) / simulate(config, profile, workload, concurrency=32).seconds


def really(config: EngineConfig, workload: Workload) -> list[Record]:
    """The workload through the real engine, in this process and in real time."""
    loop, info = build(config)
    warm = Clients(workload[:4], loop, WallClock(), vocab_size=info.vocab_size, concurrency=4)
    while warm.advance():
        pass
    gc.collect()
    gc.freeze()
    clients = Clients(workload, loop, WallClock(), vocab_size=info.vocab_size)
    while clients.advance():
        pass
    loop.close()
    return clients.records


if __name__ == "__main__":
    main()
