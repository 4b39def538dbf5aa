"""Time to choose what is given up among idle conversations, by retention value and by the other orders."""

import argparse
import gc
import random
import statistics
import time
from functools import partial

from holdfast.lm.memory.retention import EVICTIONS, Retention, RetentionRule, cost_by_position


def fill(rule: RetentionRule, conversations: int, draw: random.Random) -> tuple[Retention, int]:
    """Idle conversations of 1 to 8 chunks (one in a hundred of up to 1,000), let go one after the other."""
    retention, block = Retention(rule), 0
    for number in range(conversations):
        chunks = draw.randint(200, 1000) if number % 100 == 0 else draw.randint(1, 8)
        count = chunks * rule.chunk_blocks
        retention.add_all(range(block, block + count), range(count), (number / 100, number))
        block += count
    return retention, block


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--conversations", type=int, default=100_000)
    parser.add_argument("--chunks", type=int, default=100, help="chunks of one choice")
    parser.add_argument("--choices", type=int, default=100)
    options = parser.parse_args()
    print(f"{options.conversations:,} idle conversations; {options.choices} choices of {options.chunks} chunks each")
    for name, eviction in EVICTIONS.items():
        rule = RetentionRule(eviction, cost=partial(cost_by_position, balance=16384))
        gc.disable()
        retention, blocks = fill(rule, options.conversations, random.Random(0))
        now, taken = options.conversations / 100, []
        for _ in range(options.choices):
            now += 0.05
            before = time.perf_counter()
            victims = retention.victims(now)
            for _ in range(options.chunks):
                assert victims.pop() is not None
            taken.append((time.perf_counter() - before) * 1e3)
        median, p95 = statistics.median(taken), statistics.quantiles(taken, n=20)[18]
        print(f"{name:>17}: {blocks:,} blocks, median {median:.3f} ms a choice, p95 {p95:.3f} ms")
        del retention
        gc.enable()
        gc.collect()


if __name__ == "__main__":
    main()
