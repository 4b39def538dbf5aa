"""What each eviction order computes again, on conversations with think time: the scheduler alone, on a modelled clock.

Every line runs the same conversations through the same scheduler; steps take the time that a model of linear layers and
attention gives (by default of an 8B model on one H200). After Pensieve, figures 10 and 14.
"""

import argparse
import heapq
import itertools
import random
import statistics
from collections.abc import Iterator
from dataclasses import dataclass, field

from holdfast.core.types import Request, SamplingParams, StepPlan, StepResult
from holdfast.memory.blocks import BlockPool, StateIdentity
from holdfast.memory.retention import EVICTIONS, RetentionRule
from holdfast.scheduler.base import Scheduler
from holdfast.scheduler.policies import StallFree

BASE, TOKEN, PAIR = 5e-3, 28e-6, 1.7e-9
"""Seconds of a step, of each of its tokens, and of each pair of a query and a position that it attends to."""
CHUNK, BLOCK = 32, 16


@dataclass
class Conversation:
    """What a user will say and be answered, drawn before the run, and how far it is."""

    number: int
    turns: list[tuple[int, int, float]]
    tokens: list[int] = field(default_factory=list)
    asked_at: float = 0.0


def conversations(options: argparse.Namespace) -> Iterator[tuple[float, Conversation]]:
    """Arrivals; turns of (new tokens, answered tokens, seconds of thought after them)."""
    draw, now = random.Random(options.seed), 0.0
    for number in range(options.conversations):
        now += draw.expovariate(options.rate)
        count = min(40, 1 + int(draw.expovariate(1 / options.turns)))
        yield (
            now,
            Conversation(
                number,
                [
                    (
                        max(4, int(draw.lognormvariate(3.8, 1.0))),
                        max(4, int(draw.gammavariate(2.0, options.answer / 2))),
                        draw.expovariate(1 / options.think),
                    )
                    for _ in range(count)
                ],
            ),
        )


def seconds(plan: StepPlan) -> float:
    """What a step takes."""
    pairs = sum((segment.stop - segment.start) * (segment.start + segment.stop) / 2 for segment in plan.segments)
    return BASE + TOKEN * plan.num_tokens + PAIR * pairs


def run(options: argparse.Namespace, name: str, eviction: str, device: int, host: int, stateful: bool) -> None:
    """All conversations under one order; prints a line."""
    rule = RetentionRule(EVICTIONS[eviction], lambda at: CHUNK * (TOKEN + PAIR * at), CHUNK // BLOCK, BLOCK)
    scheduler = Scheduler(
        StallFree(2048),
        BlockPool(device // BLOCK, BLOCK, rule=rule, host_blocks=host // BLOCK),
        max_sequences=256,
        max_model_len=device,
        sharing=StateIdentity("benchmark") if stateful else None,
    )
    events: list[tuple[float, int, Conversation]] = []
    order = itertools.count()
    for at, conversation in conversations(options):
        heapq.heappush(events, (at, next(order), conversation))
    alive: dict[str, Conversation] = {}
    now, needed, generated, latencies = 0.0, 0, 0, []
    while events or scheduler.has_work():
        while events and events[0][0] <= now:
            at, _, conversation = heapq.heappop(events)
            said, answered, _ = conversation.turns[0]
            base = (conversation.number + 1) << 16
            conversation.tokens += range(base + len(conversation.tokens), base + len(conversation.tokens) + said)
            conversation.asked_at = at
            alive[str(conversation.number)] = conversation
            request = Request(
                str(conversation.number),
                tuple(conversation.tokens),
                SamplingParams(max_tokens=answered, ignore_eos=True),
                arrival=at,
            )
            scheduler.add(request)
            needed += said + answered - 1
        plan = scheduler.schedule(now)
        if plan is None:
            now = max(now, events[0][0])
            continue
        now += seconds(plan)
        result = StepResult(plan.step, (1,) * sum(1 for _ in plan.sampled()), 0.0, plan.step)
        for output in scheduler.update(plan, result, now):
            conversation = alive[output.request_id]
            conversation.tokens += output.tokens
            generated += 1
            if output.finish_reason is not None:
                _, answered, thought = conversation.turns.pop(0)
                latencies.append((now - conversation.asked_at) / answered * 1e3)
                del alive[output.request_id]
                if conversation.turns and len(conversation.tokens) < device // 4:
                    heapq.heappush(events, (now + thought, next(order), conversation))
    stats = scheduler.stats()
    again = stats.tokens_computed - needed
    p90 = statistics.quantiles(latencies, n=10)[8]
    print(
        f"{name:>26}: {again:>9,} tokens computed again, hits {stats.prefix_hits / stats.prefix_queries:5.1%}, "
        f"normalized latency p50 {statistics.median(latencies):5.1f} ms, p90 {p90:6.1f} ms, "
        f"{generated / now:5.0f} tokens/s, {stats.preemptions} preempted"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--conversations", type=int, default=150)
    parser.add_argument("--rate", type=float, default=4.0, help="new conversations a second")
    parser.add_argument("--turns", type=float, default=8.0, help="mean turns of a conversation")
    parser.add_argument("--answer", type=float, default=120.0, help="mean tokens of an answer")
    parser.add_argument("--think", type=float, default=30.0, help="mean seconds between turns")
    parser.add_argument("--device", type=int, default=32_000, help="tokens that the device holds")
    parser.add_argument("--host", type=int, default=48_000, help="tokens that the host tier holds")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    print(
        f"{options.conversations} conversations at {options.rate}/s, think time {options.think} s; "
        f"{options.device:,} tokens on the device, {options.host:,} on the host"
    )
    run(options, "stateless", "lru", options.device, 0, stateful=False)
    run(options, "device alone, retention", "retention", options.device, 0, stateful=True)
    for eviction in EVICTIONS:
        run(options, f"both tiers, {eviction}", eviction, options.device, options.host, stateful=True)


if __name__ == "__main__":
    main()
