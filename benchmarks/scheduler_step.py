"""Time that the scheduler takes for one step of decodes: 256 sequences run, 1,000 requests wait.

Wall time includes interference by other processes, the thread's CPU time does not. `latency-target` is the default
scheduler with a latency target.
"""

import argparse
import gc
import statistics
import time

from holdfast.core.cost import CostModel
from holdfast.core.types import Request, SamplingParams
from holdfast.lm.memory.block_pool import BlockPool
from holdfast.lm.scheduler.builder import Policy
from holdfast.lm.scheduler.choice import NAMES, capacity_of, make_policy
from holdfast.lm.scheduler.policies import LatencyTarget
from holdfast.lm.scheduler.scheduler import Scheduler
from holdfast.lm.types import StepPlan, StepResult

COST = CostModel(
    model="invented",
    device="none",
    linear_tokens=(1, 256, 2048),
    linear_seconds=(0.004, 0.007, 0.041),
    attention_queries=(1, 2048),
    attention_contexts=(16, 16384),
    attention_seconds=((0.000001, 0.0001), (0.001, 0.01)),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--running", type=int, default=256)
    parser.add_argument("--waiting", type=int, default=1000)
    parser.add_argument("--block-size", type=int, default=16)
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--steps-in-flight", type=int, default=2)
    parser.add_argument(
        "--schedulers", nargs="+", choices=(*NAMES, "latency-target"), default=(*NAMES, "latency-target")
    )
    options = parser.parse_args()
    for name in options.schedulers:
        measure(name, options)


def measure(name: str, options: argparse.Namespace) -> None:
    """Time steps under one policy, and print what they took."""

    prompt, warm_up = 512, 64
    length = prompt + warm_up + options.steps + 2
    if name == "latency-target":
        policy: Policy = LatencyTarget(COST, target=0.02, tile=128, ceiling=2048)
    else:
        capacity = capacity_of(
            name, token_budget=2048, max_model_len=2 * length, max_sequences=options.running, limit=1 << 16
        )
        policy = make_policy(name, token_budget=2048, capacity=capacity)
    scheduler = Scheduler(
        policy,
        BlockPool(options.running * ((prompt + length) // options.block_size + 2), options.block_size),
        max_sequences=options.running,
        max_model_len=2 * length,
        headroom=0.0,
        sharing=True,
    )
    for index in range(options.running + options.waiting):
        tokens = tuple(range(index * prompt, (index + 1) * prompt))
        scheduler.add(Request(str(index), tokens, SamplingParams(max_tokens=length)))

    gc.enable()
    gc.collect()
    gc.freeze()
    gc.disable()  # as in the engine, which collects between steps
    plans: list[StepPlan] = []
    wall: dict[str, list[float]] = {"schedule": [], "update": [], "both": []}
    cpu: dict[str, list[float]] = {"schedule": [], "update": [], "both": []}
    while len(wall["both"]) < options.steps:
        while len(plans) < options.steps_in_flight:
            began = time.perf_counter(), time.thread_time()
            plan = scheduler.schedule(began[0])
            planned = time.perf_counter() - began[0], time.thread_time() - began[1]
            assert plan is not None
            plans.append(plan)
        plan = plans.pop(0)
        result = StepResult(plan.step, (1,) * plan.num_sampled, 0.0)
        began = time.perf_counter(), time.thread_time()
        scheduler.update(plan, result, began[0])
        updated = time.perf_counter() - began[0], time.thread_time() - began[1]
        if len(plan.segments) == plan.num_tokens == options.running:
            for times, schedule, update in zip((wall, cpu), planned, updated, strict=True):
                for part, seconds in (("schedule", schedule), ("update", update), ("both", schedule + update)):
                    times[part].append(seconds * 1e6)

    stats = scheduler.stats()
    print(f"{name}: {stats.running} running, {stats.waiting} waiting, {options.steps} steps, us")
    for part in wall:
        p99 = statistics.quantiles(cpu[part], n=100)[98]
        print(
            f"{part:>8}: best {min(wall[part]):4.0f}, median {statistics.median(wall[part]):4.0f}; CPU time: "
            f"best {min(cpu[part]):4.0f}, median {statistics.median(cpu[part]):4.0f}, p99 {p99:4.0f}",
            flush=True,
        )


if __name__ == "__main__":
    main()
