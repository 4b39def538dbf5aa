"""Time that the scheduler takes for one step of decodes: 256 sequences run, 1,000 requests wait."""

import argparse
import gc
import statistics
import time

from holdfast.core.cost import CostModel
from holdfast.core.types import Request, SamplingParams, StepResult
from holdfast.memory.blocks import BlockPool, StateIdentity
from holdfast.scheduler.base import Scheduler
from holdfast.scheduler.choice import NAMES, capacity_of, make_policy
from holdfast.scheduler.paced import PacedStallFree
from holdfast.scheduler.step import Policy

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
    parser.add_argument("--scheduler", choices=(*NAMES, "paced"), default="stall-free")
    options = parser.parse_args()

    prompt, warm_up = 512, 64
    length = prompt + warm_up + options.steps + 2
    if options.scheduler == "paced":
        policy: Policy = PacedStallFree(COST, target=0.02, tile=128, ceiling=2048)
    else:
        capacity = capacity_of(
            options.scheduler, token_budget=2048, max_model_len=2 * length, max_sequences=options.running
        )
        policy = make_policy(options.scheduler, token_budget=2048, capacity=capacity)
    scheduler = Scheduler(
        policy,
        BlockPool(options.running * ((prompt + length) // options.block_size + 2), options.block_size),
        max_sequences=options.running,
        max_model_len=2 * length,
        headroom=0.0,
        sharing=StateIdentity("benchmark"),
    )
    for index in range(options.running + options.waiting):
        tokens = tuple(range(index * prompt, (index + 1) * prompt))
        scheduler.add(Request(str(index), tokens, SamplingParams(max_tokens=length)))

    gc.collect()
    gc.freeze()
    gc.disable()  # as in the engine, which collects between steps
    plans, planning, updating = [], [], []
    while len(updating) < options.steps:
        while len(plans) < options.steps_in_flight:
            before = time.perf_counter()
            plan = scheduler.schedule(before)
            planned = time.perf_counter() - before
            assert plan is not None
            plans.append(plan)
        plan = plans.pop(0)
        result = StepResult(plan.step, (1,) * plan.num_sampled, 0.0)
        before = time.perf_counter()
        scheduler.update(plan, result, before)
        updated = time.perf_counter() - before
        if len(plan.segments) == plan.num_tokens == options.running:
            planning.append(planned * 1e6)
            updating.append(updated * 1e6)

    stats = scheduler.stats()
    print(f"{options.scheduler}: {stats.running} running, {stats.waiting} waiting, {options.steps} steps")
    whole = [sum(pair) for pair in zip(planning, updating, strict=True)]
    for name, times in (("schedule", planning), ("update", updating), ("both", whole)):
        best, p50, p99 = min(times), statistics.median(times), statistics.quantiles(times, n=100)[98]
        print(f"{name:>8}: best {best:6.0f} us, median {p50:6.0f} us, p99 {p99:6.0f} us")


if __name__ == "__main__":
    main()
