"""Orders of eviction on loads of agents and people: what each has computed again, and what no policy can avoid.

usage: python -m benchmarks.engine.retention_sim [LOAD ...] [--shares 0.25 0.45 0.7] [--policies NAME ...] [--hints]
                                                 [--prices flat] [--windows N] [--seed N] [--seconds N] [--json FILE]

A LOAD is `agents`, `mixed`, `people`, `forks`, `paced`; `lab:` and a load of `holdfast.lab.workloads` (`lab:agents`,
`lab:agents-short`, `lab:chat`, `lab:mixed`, `lab:multi-turn`, `lab:vllm`); or one kept for checking, on which
nothing was tuned: `office`, `night`, a Mooncake trace (.jsonl). Memory is the engine's own `BlockPool` over one tier.
Its size is a share of the most state that all open sessions have at once. Turns begin and end at times that do not
depend on the policy, so that every bound is well defined. Nothing waits: time is that of the load, not of a device.

`--prices flat` counts each token once, and has the orders do so; else blocks weigh their cost of computing again.
`belady` evicts the block whose next use is farthest away. `informed` is `pauses` with the true law of each gap in place
of what it learns. `offline` and `online` are lower bounds (`retention_bounds`): on what is computed again by a policy
that knows everything, and by one that knows the laws alone, on the mean over loads of this kind. The prices of `online`
come from two other seeds, so that they know nothing of this load's chances.

`--hints` has clients say how long they expect tools to take, wrong by a factor of about 1.3.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from pathlib import Path
from time import perf_counter

from benchmarks.engine.retention_bounds import Belady, Gaps, Informed, OnlineBound, fit_prices, gaps_of, optimum
from benchmarks.engine.retention_loads import Load, Turn, make_load
from benchmarks.lib.invocation import provenance
from holdfast.lm.memory.block_pool import BlockPool
from holdfast.lm.memory.retention import EVICTIONS, RetentionRule, Turns, cost_by_position
from holdfast.lm.memory.turn_queue import make_turns
from holdfast.lm.memory.turns import Departure, Start

POLICIES = ("belady", "informed", "pauses", "retention", "lru", "lru-conversation", "tail-first", "ttl", "hits")
BOUNDS = ("offline", "online")
COSTS: dict[str, Callable[[int], float]] = {"position": cost_by_position, "flat": lambda position: 1.0}
"""Cost of computing a token again by its position, by the name of `--prices`."""
FINE = 2000
"""Windows of the offline bound where blocks differ in cost."""
WINDOWS = 12
"""Windows of equal length in each of which the bound has one price."""


@dataclass
class Outcome:
    """The work that a policy had done again."""

    tokens: int = 0
    cost: float = 0.0
    """Blocks computed again, each times its cost of a token."""
    needed: int = 0
    """Tokens that had been computed before and were needed again."""
    refused: list[int] = field(default_factory=list)
    """Numbers of the turns that found no room, because others held all of it. They are left out."""
    seconds: float = 0.0
    """Time of the memory's own work."""


class Replay:
    """A load on a pool of blocks, with one policy."""

    def __init__(self, load: Load, policy: str, blocks: int, cost: Callable[[int], float]) -> None:
        future = Belady(load.turns)
        self._turns, self._block = load.turns, load.block
        known: dict[str, Callable[[], Turns]] = {"belady": lambda: future, "informed": lambda: Informed(load.turns)}
        self._rule = RetentionRule(
            EVICTIONS[{"belady": "retention", "informed": "pauses"}.get(policy, policy)],
            cost=cost,
            chunk_blocks=1,
            block_size=load.block,
            turns=known.get(policy, lambda: make_turns(policy))(),
        )
        self._pool = BlockPool(blocks, load.block, rule=self._rule)
        future.digest_of = self._pool._index.digests.__getitem__
        self._known = set[bytes]()
        self._running: list[tuple[float, int, Turn, list[int], Start]] = []
        self.outcome = Outcome()

    def run(self) -> Outcome:
        """Play all turns."""
        began = perf_counter()
        for number, turn in enumerate(self._turns):
            while self._running and self._running[0][0] <= turn.start:
                self._finish(*heappop(self._running))
            self._start(number, turn)
        self.outcome.seconds = perf_counter() - began
        return self.outcome

    def _start(self, number: int, turn: Turn) -> None:
        pool, digests, outcome = self._pool, turn.digests, self.outcome
        found = {at: block for at, block in enumerate(pool.find_all(digests)) if block is not None}
        if len(digests) - len(found) + pool.pinned_by(found.values()) > pool.available:
            outcome.refused.append(number)
            return
        start = self._rule.turns.begin(digests, len(found), turn.start)
        for at, digest in enumerate(digests):
            outcome.needed += self._block * (digest in self._known)
            if digest in self._known and at not in found:
                outcome.tokens += self._block
                outcome.cost += self._rule.cost((at + 1) * self._block)
        pool.share(found.values())
        fresh = pool.allocate(len(digests) - len(found), turn.start)
        for at, digest in enumerate(digests):
            if at not in found:
                found[at] = fresh.pop()
                pool.cache_block(found[at], digest, at)
        self._known.update(digests)
        heappush(self._running, (turn.end, number, turn, [found[at] for at in range(len(digests))], start))

    def _finish(self, now: float, number: int, turn: Turn, blocks: list[int], start: Start) -> None:
        """The sequence ends, as `SequenceCache.end` has it."""
        pool, departure = self._pool, Departure(f"{number}", turn.tenant, turn.pause)
        shared = self._rule.turns.left(turn.digests, departure, start, pool.uses + 1, now)
        for part in (blocks[shared:], blocks[:shared]) if shared else (blocks,):
            pool.free(reversed(part) if self._rule.eviction.trailing_first else part, now)


def most_state(turns: Sequence[Turn]) -> int:
    """The most blocks that all sessions which are still to continue have at once."""
    first, last = dict[bytes, float](), dict[bytes, float]()
    for turn in turns:
        for digest in turn.digests:
            first.setdefault(digest, turn.start)
            last[digest] = max(last.get(digest, 0.0), turn.end)
    changes = sorted([(at, 1) for at in first.values()] + [(at, -1) for at in last.values()])
    most = here = 0
    for _, change in changes:
        here += change
        most = max(most, here)
    return most


class Bounds:
    """Lower bounds on the cost that any policy has computed again."""

    def __init__(self, load: Load, others: Sequence[Load], cost: Callable[[int], float], windows: int) -> None:
        """`others` are loads of the same kind, from which prices are taken."""
        self._load, self._others, self._cost, self._windows = load, others, cost, windows

    def of(self, share: float, refused: Sequence[int]) -> dict[str, float]:
        """The bounds for a memory of this share of the state, where these turns are refused."""
        load = self._load
        gaps, changes = gaps_of(load, self._cost, refused)
        blocks = max(1, int(share * most_state(load.turns)))
        found = {"offline": self._offline(gaps, changes, blocks)}
        if self._others:
            prices = fit_prices([self._online(each, share) for each in self._others])
            found["online"] = OnlineBound(load, gaps, changes, blocks, self._windows).at(prices)[0]
        return found

    def _offline(self, gaps: Gaps, changes: Sequence[tuple[float, int]], blocks: int) -> float:
        """The optimum where all blocks cost the same, and otherwise a bound below it."""
        if self._cost is COSTS["flat"]:
            return optimum(gaps, changes, blocks)
        known = OnlineBound(self._load, gaps.known(), changes, blocks, FINE)
        return known.at(fit_prices([known]))[0]

    def _online(self, load: Load, share: float) -> OnlineBound:
        blocks = max(1, int(share * most_state(load.turns)))
        refused = Replay(load, "lru", blocks, self._cost).run().refused
        gaps, changes = gaps_of(load, self._cost, refused)
        return OnlineBound(load, gaps, changes, blocks, self._windows)


def describe(policy: str, share: float, each: Outcome, base: Outcome) -> str:
    """One line of the table. `base` is the outcome of the first policy."""
    return (
        f"  {share:.0%} {policy:17} {each.tokens / 1e6:8.2f}M again, {each.tokens / max(1, each.needed):6.1%} of needed"
        f"  x{each.tokens / max(1, base.tokens):.2f}  cost x{each.cost / max(1.0, base.cost):.2f}"
        f"  {len(each.refused)} refused  {each.seconds:.1f} s"
    )


def study(load: Load, others: Sequence[Load], options: argparse.Namespace) -> list[dict[str, object]]:
    """Print and return the outcomes of all policies at all sizes of memory."""
    cost, most, results = COSTS[options.prices], most_state(load.turns), []
    for share in options.shares:
        blocks = max(1, int(share * most))
        outcomes = {name: Replay(load, name, blocks, cost).run() for name in options.policies}
        base = next(iter(outcomes.values()))
        each: dict[str, object]
        for policy, outcome in outcomes.items():
            print(describe(policy, share, outcome, base), flush=True)
            each = {"load": load.name, "share": share, "policy": policy, **vars(outcome)}
            results.append({**each, "refused": len(outcome.refused)})
        if options.windows:
            for name, value in Bounds(load, others, cost, options.windows).of(share, base.refused).items():
                print(f"  {share:.0%} {name:17} at least{'':40} cost x{value / max(1.0, base.cost):.2f}", flush=True)
                results.append({"load": load.name, "share": share, "policy": name, "cost": value})
    return results


def main() -> None:
    """Print, for each load and size of memory, the tokens that each policy has computed again."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("loads", nargs="*", default=["agents", "mixed", "people", "forks"])
    parser.add_argument("--shares", type=float, nargs="+", default=[0.25, 0.45, 0.7])
    parser.add_argument("--policies", nargs="+", default=POLICIES)
    parser.add_argument("--prices", choices=COSTS, default="position")
    parser.add_argument("--windows", type=int, default=WINDOWS, help="windows of the bounds' prices; 0: no bounds")
    parser.add_argument("--hints", action="store_true")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=900.0, help="time in which sessions arrive")
    parser.add_argument("--json")
    options = parser.parse_args()
    results = []
    for name in options.loads:
        load = make_load(name, options.seconds, options.seed, hints=options.hints)
        is_drawn = options.windows and not name.endswith(".jsonl")
        others = [make_load(name, options.seconds, options.seed + more) for more in (1001, 1002)] if is_drawn else []
        tokens = load.block * sum(len(turn.digests) for turn in load.turns)
        most = load.block * most_state(load.turns)
        print(f"{name}: {len(load.turns)} turns, {tokens / 1e6:.0f}M tokens, state of {most / 1e6:.2f}M at most")
        results += study(load, others, options)
    if options.json:
        Path(options.json).write_text(json.dumps({"provenance": provenance(), "results": results}, indent=1))


if __name__ == "__main__":
    main()
