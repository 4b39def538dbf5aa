"""Conversations with ShareGPT's lengths and think times, and what engines keep between their turns.

Processes of clients import this module; it imports neither torch nor an engine.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Sequence
from typing import Any

MODES: dict[str, dict[str, Any]] = {
    "stateless": dict(prefix_sharing=False, host_cache_gb=0.0),
    "device": dict(prefix_sharing=True, host_cache_gb=0.0),
    "tiers": dict(prefix_sharing=True),
}


def workload(rate: float, seconds: float, think: float, seed: int) -> Iterator[dict[str, Any]]:
    """Conversations with the ShareGPT figures of Pensieve (§6.1) that arrive by a Poisson process.

    A seed gives the draws of the peer's generator of such files: turns {"input_tokens", "output_tokens",
    "think_s"} after each "arrival_s".
    """
    choose, now = random.Random(seed), 0.0

    def length(mean: float, sigma: float, low: int, high: int) -> int:
        return max(low, min(high, round(choose.lognormvariate(math.log(mean) - sigma * sigma / 2, sigma))))

    while (now := now + choose.expovariate(rate)) <= seconds:
        count = min(40, 1 + int(math.log(1 - choose.random()) / math.log(1 - 1 / 5.56)))
        yield {
            "arrival_s": round(now, 4),
            "turns": [
                {
                    "input_tokens": length(37.77, 1.0, 4, 2048),
                    "output_tokens": length(204.58, 0.8, 4, 1024),
                    "think_s": round(choose.expovariate(1 / think), 4) if turn else 0.0,
                }
                for turn in range(count)
            ],
        }


def even_workload(
    rate: float, seconds: float, think: float, seed: int, shape: Sequence[int]
) -> Iterator[dict[str, Any]]:
    """Conversations that arrive by a Poisson process, all of one shape: number of turns, tokens in and out of each."""
    choose, now, (count, given, answered) = random.Random(seed), 0.0, shape
    while (now := now + choose.expovariate(rate)) <= seconds:
        pauses = [0.0, *(round(choose.expovariate(1 / think), 4) for _ in range(count - 1))]
        turns = [{"input_tokens": given, "output_tokens": answered, "think_s": pause} for pause in pauses]
        yield {"arrival_s": round(now, 4), "turns": turns}


def draw(rng: random.Random, count: int, vocabulary: int) -> tuple[int, ...]:
    """Token ids away from the special ones. With a full vocabulary they equal those that the peer's driver draws."""
    return tuple(rng.randrange(10, min(100000, vocabulary)) for _ in range(count))


def shortened(conversations: Sequence[dict[str, Any]], divisor: float) -> list[dict[str, Any]]:
    """These conversations with fewer tokens per turn."""
    return [
        conversation
        | {
            "turns": [
                turn | {key: max(2, round(turn[key] / divisor)) for key in ("input_tokens", "output_tokens")}
                for turn in conversation["turns"]
            ]
        }
        for conversation in conversations
    ]
