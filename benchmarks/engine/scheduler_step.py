"""Python time of scheduling: a step of decodes (256 sequences run, 1,000 wait), or a choice of chunks to evict.

Run: python -m benchmarks.engine.scheduler_step [steps] [--schedulers stall-free latency-target ...]
     python -m benchmarks.engine.scheduler_step evictions [--conversations 100000]
     python -m benchmarks.engine.scheduler_step contracts [--running 270] [--queued 100]

Wall time includes other work of the machine; the thread's CPU time does not. `latency-target` is stall-free with a
target. `evictions` times each eviction order over idle conversations. `contracts` times the decision on a contract at
its arrival, next to accepted ones that decode and `--queued` ones that wait for their rows. Every fourth contract is
too hasty and is refused.
"""

import argparse
import gc
import random
import statistics
import time
from dataclasses import replace
from functools import partial

from holdfast.core.config import PACKED_SCHEDULERS
from holdfast.core.contract import Contract, ContractRefused
from holdfast.core.cost import CostModel
from holdfast.core.pause import Pause
from holdfast.core.types import Identity, Request, SamplingParams
from holdfast.lab.simulator.executor import SimulatedExecutor, StepTimes, VirtualClock
from holdfast.lm.choice import capacity_of, make_policy, make_scheduler
from holdfast.lm.config import EngineConfig
from holdfast.lm.memory.block_pool import BlockPool
from holdfast.lm.memory.retention import EVICTIONS, RetentionRule, cost_by_position
from holdfast.lm.memory.turn_queue import make_turns
from holdfast.lm.memory.turns import NEW, Departure, Start
from holdfast.lm.parts.grammars.planner import GrammarPart
from holdfast.lm.parts.penalties.planner import PenaltyPart
from holdfast.lm.parts.prompts.planner import PromptPart
from holdfast.lm.parts.vectors.planner import VectorPart
from holdfast.lm.scheduler.builder import Policy
from holdfast.lm.scheduler.paged import PagedKind
from holdfast.lm.scheduler.policies import LatencyTarget
from holdfast.lm.scheduler.scheduler import Scheduler
from holdfast.lm.types import EngineShape, StepPlan, StepResult
from holdfast.loop.loop import Loop

COST = CostModel(
    model="invented",
    device="none",
    linear_tokens=(1, 256, 2048),
    linear_seconds=(0.004, 0.007, 0.041),
    attention_queries=(1, 2048),
    attention_contexts=(16, 16384),
    attention_seconds=((0.000001, 0.0001), (0.001, 0.01)),
)

POLICIES = (*PACKED_SCHEDULERS, "latency-target")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="?", choices=("steps", "evictions", "contracts"), default="steps")
    parser.add_argument("--running", type=int, default=256)
    parser.add_argument("--waiting", type=int, default=1000)
    parser.add_argument("--block-size", type=int, default=16)
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--steps-in-flight", type=int, default=2)
    parser.add_argument("--schedulers", nargs="+", choices=POLICIES, default=POLICIES)
    parser.add_argument("--conversations", type=int, default=100_000, help="of evictions: idle ones")
    parser.add_argument("--arrivals", type=int, default=300, help="of contracts: decisions that are timed")
    parser.add_argument("--queued", type=int, default=0, help="of contracts: accepted ones that wait for a row")
    parser.add_argument("--chunks", type=int, default=100, help="of evictions: chunks of one choice")
    parser.add_argument("--turns", type=int, default=5, help="of evictions: turns before each choice")
    parser.add_argument("--choices", type=int, default=100, help="of evictions")
    options = parser.parse_args()
    if options.what == "evictions":
        evictions(options)
        return
    if options.what == "contracts":
        for known in (True, False):
            contracts(options, known=known)
        return
    for name in options.schedulers:
        measure(name, options)


def measure(name: str, options: argparse.Namespace) -> None:
    """Time steps under one policy, and print the times."""
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
        PagedKind(BlockPool(options.running * ((prompt + length) // options.block_size + 2), options.block_size)),
        (PromptPart(), VectorPart(), PenaltyPart(), GrammarPart()),
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


class IdleConversations:
    """Idle conversations of 1 to 8 chunks (one in a hundred of up to 1,000), released one after the other."""

    def __init__(self, rule: RetentionRule, conversations: int) -> None:
        self.draw, self.rule = random.Random(0), rule
        self.order, self.blocks = rule.order(1 << 24), list[range]()
        self._calls = 0
        for number in range(conversations):
            chunks = self.draw.randint(200, 1000) if number % 100 == 0 else self.draw.randint(1, 8)
            start = self.blocks[-1].stop if self.blocks else 0
            self.blocks.append(range(start, start + chunks * rule.chunk_blocks))
            self._leave(number, NEW, number / 100)

    def _leave(self, number: int, start: Start, now: float) -> None:
        self._calls += 2
        kind = ("person", "tool:shell", "tool:read")[number % 3]
        digests = [b"%d" % number] * len(self.blocks[number])
        self.rule.turns.left(digests, Departure(pause=Pause(kind)), start, self._calls, now)
        self.order.add_all(self.blocks[number], range(len(self.blocks[number])), (now, self._calls))

    def turn(self, now: float) -> None:
        """A conversation goes on, and ends again at once."""
        number = self.draw.randrange(len(self.blocks))
        digests = [b"%d" % number] * len(self.blocks[number])
        start = self.rule.turns.begin(digests, len(digests), now)
        self.order.remove(self.blocks[number])
        self._leave(number, start, now)

    def evict(self, chunks: int, now: float) -> None:
        """Choose this many chunks."""
        victims = self.order.victims(now)
        for _ in range(chunks):
            assert victims.pop() is not None


def evictions(options: argparse.Namespace) -> None:
    """Time choices of chunks to evict, by order."""
    print(f"{options.conversations:,} idle conversations; {options.choices} choices of {options.chunks} chunks each")
    for name, eviction in EVICTIONS.items():
        rule = RetentionRule(eviction, cost=partial(cost_by_position, balance=16384), turns=make_turns(name))
        gc.disable()
        idle = IdleConversations(rule, options.conversations)
        now, taken, turns = options.conversations / 100, list[float](), list[float]()
        for _ in range(options.choices):
            now += 0.05
            times = [time.thread_time()]
            for _ in range(options.turns):
                idle.turn(now)
            times.append(time.thread_time())
            idle.evict(options.chunks, now)
            times.append(time.thread_time())
            turns.append((times[1] - times[0]) * 1e3)
            taken.append((times[2] - times[1]) * 1e3)
        each, p95 = (sum(taken) / options.choices, statistics.quantiles(taken, n=20)[18])
        print(
            f"{name:>17}: {idle.blocks[-1].stop:,} blocks, {each:.3f} ms a choice, p95 {p95:.3f} ms; "
            f"{sum(turns) / options.choices / options.turns:.3f} ms a turn"
        )
        del idle
        gc.enable()
        gc.collect()


def contracts(options: argparse.Namespace, *, known: bool) -> None:
    """Time decisions on contracts, by whether lengths of answers are `known` ahead or learned."""
    clock, draw = VirtualClock(), random.Random(0)
    rows = options.running if options.queued else options.running + 32
    config = EngineConfig(model="invented", max_sequences=rows)
    shape = EngineShape(
        model="invented", precision="bfloat16", num_blocks=1 << 16, token_budget=2048, max_step_tokens=2048,
        max_model_len=8192, vocab_size=1 << 20, tile=128,
    )  # fmt: skip
    scheduler = make_scheduler(config, shape, replace(COST, deviation=0.0))
    loop = Loop(scheduler, SimulatedExecutor(StepTimes(COST), clock), config.steps_in_flight, clock)
    stop = () if known else (options.running,)
    identity = Identity("invented", dtype="bfloat16")
    count = 0

    def ask(contract: Contract, most: int) -> tuple[bool, float]:
        """Whether a request is accepted, and the ms that this took."""
        nonlocal count
        count += 1
        prompt = tuple((97 * count + place) % 9973 for place in range(draw.randrange(64, 1024)))
        params = SamplingParams(temperature=0.0, max_tokens=most, ignore_eos=True, stop_token_ids=stop)
        request = Request(str(count), prompt, params, arrival=clock.now, identity=identity, contract=contract)
        before, accepted = time.thread_time(), True
        try:
            loop.add(request)
        except ContractRefused:
            accepted = False
        return accepted, (time.thread_time() - before) * 1e3

    def fill() -> None:
        while scheduler.stats().running < options.running:
            if scheduler.stats().waiting < 8:
                ask(Contract(complete=3600.0), draw.randrange(200, 2000))
            loop.step()
        while scheduler.stats().waiting < options.queued:
            ask(Contract(complete=3600.0), draw.randrange(200, 2000))

    # Answers that were cut are learned from, too.
    for _ in range(64):
        ask(Contract(complete=3600.0), draw.randrange(50, 500))
    while loop.has_work():
        loop.step()
    fill()
    gc.collect()
    gc.freeze()
    gc.disable()  # as in the engine, which collects between steps
    taken: dict[bool, list[float]] = {True: [], False: []}
    for number in range(options.arrivals):
        contract = Contract(ttft=600.0, tbt=1.0) if number % 2 else Contract(complete=900.0)
        if number % 4 == 3:
            contract = Contract(ttft=0.02)
        accepted, took = ask(contract, draw.randrange(200, 2000))
        taken[accepted].append(took)
        loop.step()
        while scheduler.stats().running > options.running:
            loop.step()
        fill()
    gc.enable()
    stats = scheduler.stats()
    named = f"{stats.running} running, {stats.waiting} waiting, lengths {'known' if known else 'learned'}"
    for accepted, times in taken.items():
        if len(times) > 1:
            median, p99 = statistics.median(times), statistics.quantiles(times, n=100)[98]
            print(
                f"{named}: {len(times)} {'accepted' if accepted else 'refused'}: best {min(times):.2f} ms, "
                f"median {median:.2f} ms, p99 {p99:.2f} ms a decision",
                flush=True,
            )


if __name__ == "__main__":
    main()
