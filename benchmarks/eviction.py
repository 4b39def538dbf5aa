"""What each eviction order computes again, on conversations with think time: the scheduler alone, on a modelled clock.

Every line runs the same conversations through the same scheduler; steps take the time that a model of linear layers and
attention gives (by default of an 8B model on one H200). After Pensieve, figures 10 and 14; `--opt` takes the set-up of
its §6.1 and §6.6: OPT-13B on one A100, conversations as ShareGPT's in number and lengths of turns, 60 s of thought.
"""

import argparse
import heapq
import itertools
import math
import random
import statistics
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from holdfast.core.types import Request, SamplingParams
from holdfast.lm.memory.block_pool import BlockPool
from holdfast.lm.memory.retention import EVICTIONS, RetentionRule
from holdfast.lm.scheduler.policies import StallFree
from holdfast.lm.scheduler.scheduler import Scheduler
from holdfast.lm.types import StepPlan, StepResult

BASE, TOKEN, PAIR = 5e-3, 28e-6, 1.7e-9
"""Seconds of a step, of each of its tokens, and of each pair of a query and a position that it attends to."""
DECODE = 0.0
"""Seconds of each position that a decode attends to, beside the pair."""
CHUNK, BLOCK = 32, 16

OPT = dict(
    # 13e9 weights of 2 bytes over 1.5 TB/s, 2 operations each at 156 TFLOP/s; in attention 4 operations by 5,120
    # dimensions by 40 layers; 819,200 bytes of keys and values a position, of which 40 GB and 200 GB hold so many.
    base=17.3e-3, token=0.167e-3, pair=5.3e-9, decode=0.55e-6, device=48_828, host=244_140, think=60.0, sharegpt=True,
)  # fmt: skip


@dataclass
class Conversation:
    """What a user will say and be answered, drawn before the run, and how far it is."""

    number: int
    turns: list[tuple[int, int, float]]
    tokens: list[int] = field(default_factory=list)
    asked_at: float = 0.0


def conversations(options: argparse.Namespace) -> Iterator[tuple[float, Conversation]]:
    """Arrivals; turns of (new tokens, answered tokens, seconds of thought after them)."""
    if options.sharegpt:
        yield from sharegpt(options)
        return
    draw, now = random.Random(options.seed), 0.0
    for number in range(options.conversations):
        now += draw.expovariate(options.rate)
        document = int(draw.lognormvariate(math.log(options.document), 0.7)) if options.document else 0
        count = min(40, 1 + int(draw.expovariate(1 / options.turns)))
        yield (
            now,
            Conversation(
                number,
                [
                    (
                        max(4, int(draw.lognormvariate(3.8, 1.0))) + (0 if turn else min(document, 12_000)),
                        max(4, int(draw.gammavariate(2.0, options.answer / 2))),
                        draw.expovariate(1 / options.think),
                    )
                    for turn in range(count)
                ],
            ),
        )


def sharegpt(options: argparse.Namespace) -> Iterator[tuple[float, Conversation]]:
    """Conversations with the means of ShareGPT (Pensieve, Table 2) and the spread of `multiturn.py`'s."""
    draw, now = random.Random(options.seed), 0.0

    def length(mean: float, sigma: float, most: int) -> int:
        return max(4, min(most, round(draw.lognormvariate(math.log(mean) - sigma * sigma / 2, sigma))))

    for number in range(options.conversations):
        now += draw.expovariate(options.rate)
        count = min(40, 1 + int(math.log(1 - draw.random()) / math.log(1 - 1 / 5.56)))
        turns = [
            (length(37.77, 1.0, 2048), length(204.58, 0.8, 1024), draw.expovariate(1 / options.think))
            for _ in range(count)
        ]
        yield now, Conversation(number, turns)


def seconds(plan: StepPlan, options: argparse.Namespace) -> float:
    """What a step takes."""
    pairs = sum((segment.stop - segment.start) * (segment.start + segment.stop) / 2 for segment in plan.segments)
    decoded = sum(segment.stop for segment in plan.segments if segment.stop - segment.start == 1)
    tokens = plan.num_tokens
    # Few tokens take as long as the weights take to be read, many as long as their operations.
    linear = max(options.base, options.token * tokens) if options.decode else options.base + options.token * tokens
    return float(linear + options.pair * pairs + options.decode * decoded)


def play(options: argparse.Namespace, eviction: str, device: int, host: int, stateful: bool) -> dict[str, Any]:
    """All conversations under one order, on the modelled clock; its figures."""
    token, pair = options.token, options.pair
    rule = RetentionRule(EVICTIONS[eviction], lambda at: CHUNK * (token + pair * at), CHUNK // BLOCK, BLOCK)
    scheduler = Scheduler(
        StallFree(2048),
        BlockPool(device // BLOCK, BLOCK, rule=rule, host_blocks=host // BLOCK),
        max_sequences=256,
        max_model_len=device,
        sharing=stateful,
    )
    events: list[tuple[float, int, Conversation]] = []
    order = itertools.count()
    for at, conversation in conversations(options):
        heapq.heappush(events, (at, next(order), conversation))
    alive: dict[str, Conversation] = {}
    now, needed, generated, requests, again_seconds, latencies = 0.0, 0, 0, 0, 0.0, []
    fresh: dict[str, int] = {}
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
            fresh[request.id] = len(request.prompt) - said
        plan = scheduler.schedule(now)
        if plan is None:
            now = max(now, events[0][0])
            continue
        now += seconds(plan, options)
        for segment in plan.segments:
            old = min(segment.stop, fresh[segment.sequence_id])  # what an earlier turn had computed
            if segment.start < old:
                again_seconds += (old - segment.start) * (token + pair * (segment.start + old) / 2)
        result = StepResult(plan.step, (1,) * sum(1 for _ in plan.sampled()), 0.0, plan.step, plan.step)
        for output in scheduler.update(plan, result, now):
            conversation = alive[output.request_id]
            conversation.tokens += output.tokens
            generated += 1
            if output.finish_reason is not None:
                _, answered, thought = conversation.turns.pop(0)
                latencies.append((now - conversation.asked_at) / answered * 1e3)
                requests += 1
                del alive[output.request_id]
                if conversation.turns and len(conversation.tokens) < min(device // 4, 14_000):
                    heapq.heappush(events, (now + thought, next(order), conversation))
    stats = scheduler.stats()
    on_device = stats.prefix_hits - stats.prefix_hits_on_host
    return dict(
        again=stats.tokens_computed - needed,
        again_seconds=round(again_seconds, 2),
        hits=round(stats.prefix_hits / stats.prefix_queries, 4),
        host_hits=round(stats.prefix_hits_on_host / max(1, stats.prefix_queries - on_device), 4),
        norm_latency_ms_p50=round(statistics.median(latencies), 2),
        norm_latency_ms_mean=round(statistics.mean(latencies), 2),
        norm_latency_ms_p90=round(statistics.quantiles(latencies, n=10)[8], 2),
        req_s=round(requests / now, 3),
        tokens_s=round(generated / now, 1),
        preempted=stats.preemptions,
        blocks_swapped_in=stats.blocks_swapped_in,
        mean_prompt=round(stats.prefix_queries / max(1, requests)),
    )


def run(options: argparse.Namespace, name: str, eviction: str, device: int, host: int, stateful: bool) -> None:
    """All conversations under one order; prints a line."""
    row = play(options, eviction, device, host, stateful)
    print(
        f"{name:>26}: {row['again']:>9,} again ({row['again_seconds']:5.1f} s), hits {row['hits']:5.1%}, "
        f"normalized latency p50 {row['norm_latency_ms_p50']:5.1f} ms, p90 {row['norm_latency_ms_p90']:6.1f} ms, "
        f"{row['tokens_s']:5.0f} tokens/s, {row['preempted']} preempted"
    )


def options_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__)

    class Preset(argparse.Action):
        def __call__(self, parser: Any, namespace: argparse.Namespace, *_: Any, **__: Any) -> None:
            vars(namespace).update(OPT)

    parser.add_argument("--opt", action=Preset, nargs=0, help="Pensieve's set-up; give what should differ after it")
    parser.add_argument("--conversations", type=int, default=150)
    parser.add_argument("--rate", type=float, default=4.0, help="new conversations a second")
    parser.add_argument("--turns", type=float, default=8.0, help="mean turns of a conversation")
    parser.add_argument("--answer", type=float, default=120.0, help="mean tokens of an answer")
    parser.add_argument("--think", type=float, default=30.0, help="mean seconds between turns")
    parser.add_argument("--device", type=int, default=32_000, help="tokens that the device holds")
    parser.add_argument("--host", type=int, default=48_000, help="tokens that the host tier holds")
    parser.add_argument("--document", type=float, default=0.0, help="median tokens that a first prompt brings besides")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--base", type=float, default=BASE, help="seconds of a step")
    parser.add_argument("--token", type=float, default=TOKEN, help="seconds of each token")
    parser.add_argument("--pair", type=float, default=PAIR, help="seconds of each position that a token attends to")
    parser.add_argument("--decode", type=float, default=DECODE, help="those of each that a decode attends to, besides")
    parser.add_argument("--sharegpt", action="store_true", help="conversations as ShareGPT's, whatever else is said")
    return parser


def main() -> None:
    options = options_parser().parse_args()
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
