"""How long a trace holds up a step: CPU time of its two calls a step, by the number of conversations in the cache.

    python -m benchmarks.engine.trace_cost --conversations 1000 4096

The planner and the loop are the engine's; the device is simulated. Each conversation has one turn of --prompt tokens in
and --output out, and its blocks stay in the cache. Counted are the steps of the second half. CPU time of the loop's
thread, so other programs hardly matter.
"""

from __future__ import annotations

import argparse
import random
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from holdfast.core.cost import CostModel
from holdfast.core.types import Request, SamplingParams
from holdfast.engine.process.trace import Trace
from holdfast.engine.profiles import CostProfile
from holdfast.lab.metrics import percentile
from holdfast.lab.simulator.executor import VirtualClock
from holdfast.lab.simulator.run import VOCAB_SIZE, make_loop
from holdfast.lm.config import EngineConfig
from holdfast.lm.types import StepPlan, StepResult

ROWS = 128
COST = CostModel(
    model="any", device="any", linear_tokens=(1,), linear_seconds=(0.01,), attention_queries=(1,),
    attention_contexts=(1,), attention_seconds=((0.0,),),
)  # fmt: skip


class TimedTrace(Trace):
    """A trace that notes the CPU time of its calls."""

    def __init__(self, path: Path, planner: object) -> None:
        self.plans: list[float] = []
        """Seconds of each call before a step is submitted."""
        self.ends: list[float] = []
        """Seconds of each call before the tokens of a step are sent."""
        super().__init__(path, time.monotonic, planner=planner)  # type: ignore[arg-type]

    def planned(self, plan: StepPlan) -> None:
        began = time.thread_time()
        super().planned(plan)
        self.plans.append(time.thread_time() - began)

    def ended(self, result: StepResult) -> None:
        began = time.thread_time()
        super().ended(result)
        self.ends.append(time.thread_time() - began)


def traced(conversations: int, prompt: int, output: int, path: Path) -> TimedTrace:
    """The trace of an engine that has served this many conversations."""
    size = prompt + output
    profile = CostProfile(
        cost=COST, dtype="bfloat16", cache_tokens=2 * conversations * (size + 16), max_model_len=2 * size,
        token_budget=2048, tile=64,
    )  # fmt: skip
    traces: list[TimedTrace] = []

    def watch(planner: object, *_: object) -> Sequence[TimedTrace]:
        traces.append(TimedTrace(path, planner))
        return traces

    loop, *_ = make_loop(EngineConfig(max_sequences=ROWS), profile, VirtualClock(), watch=watch)
    choose = random.Random(0)
    params = SamplingParams(temperature=0.0, max_tokens=output, ignore_eos=True)
    for number in range(conversations):
        loop.add(Request(str(number), tuple(choose.choices(range(VOCAB_SIZE), k=prompt)), params))
    while loop.has_work():
        loop.step()
    loop.close()
    return traces[0]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--conversations", type=int, nargs="+", default=[1000, 4096])
    parser.add_argument("--prompt", type=int, default=128, help="tokens")
    parser.add_argument("--output", type=int, default=64, help="tokens")
    args = parser.parse_args()
    print("| conversations | steps | planned: median, P99, longest, ms | ended: median, P99, longest, ms |")
    print("|---" * 4 + "|")
    for conversations in args.conversations:
        with tempfile.TemporaryDirectory() as scratch:
            trace = traced(conversations, args.prompt, args.output, Path(scratch) / "trace.json")
        cells = []
        for seconds in (trace.plans, trace.ends):
            later = sorted(seconds[len(seconds) // 2 :])
            figures = percentile(later, 0.5), percentile(later, 0.99), later[-1]
            cells.append(", ".join(f"{1e3 * each:.2f}" for each in figures))
        print(f"| {conversations} | {len(trace.plans) // 2} | {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
