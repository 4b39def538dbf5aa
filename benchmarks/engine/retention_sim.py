"""Orders of eviction on loads of agents and people: the tokens that each has computed again, and that Bélády's has.

usage: python -m benchmarks.engine.retention_sim [LOAD ...] [--shares 0.25 0.45 0.7] [--policies NAME ...] [--hints]
                                                 [--seed N] [--seconds N] [--json FILE]

A LOAD is `agents`, `mixed`, `people`, `forks`, or one of those kept for checking, on which nothing was tuned: `office`,
`night` and a Mooncake trace (.jsonl). Memory is the engine's own `BlockPool` over one tier, with blocks of 512 tokens.
Its size is a share of the most state that all open sessions have at once. Turns begin and end at times that do not
depend on the policy, so that Bélády's order is well defined: it evicts the block whose next use is farthest away, which
gives the fewest misses where every block costs the same. `cost` weighs each block by its cost of computing again.
Nothing waits: time is that of the load, not of a device.

`--hints` has clients say how long they expect tools to take, wrong by a factor of about 1.3.
"""

from __future__ import annotations

import argparse
import json
import math
import random
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from heapq import heappop, heappush
from itertools import count
from pathlib import Path
from time import perf_counter

from benchmarks.lib.invocation import provenance
from holdfast.core.pause import MAX_PAUSE, Pause
from holdfast.lm.memory.block_pool import BlockPool
from holdfast.lm.memory.prefix_index import PrefixIndex
from holdfast.lm.memory.retention import EVICTIONS, Chunk, IdleOrder, RetentionRule, Untracked, Use, cost_by_position
from holdfast.lm.memory.turn_queue import make_turns
from holdfast.lm.memory.turns import Departure, Start

BLOCK = 512
"""Tokens in a block."""
PREFILL, DECODE = 40_000.0, 150.0
"""Tokens per second of prompts and of an answer, by which turns have their times."""
SYSTEM_BLOCKS = 4
"""Blocks with which all sessions of a tenant and a persona begin."""
NEVER = math.inf
HINT_ERROR = 0.25
"""Deviation of the logarithm of a hint from the true gap."""
POLICIES = ("belady", "pauses", "retention", "lru", "lru-conversation", "tail-first", "ttl", "hits")


@dataclass(frozen=True)
class Gap:
    """A log-normal gap, or none at all with probability `never`."""

    median: float
    sigma: float
    never: float = 0.0

    def draw(self, draw: random.Random) -> float:
        """Seconds; NEVER if the session ends."""
        return NEVER if draw.random() < self.never else self.median * math.exp(draw.gauss(0.0, self.sigma))


@dataclass(frozen=True)
class Persona:
    """A kind of session."""

    share: float
    """Weight among the personas of a load."""
    turns: float
    """Median number of turns."""
    first: float
    """Median tokens of the first prompt."""
    more: float
    """Median tokens that each turn adds."""
    pauses: dict[str, tuple[float, Gap]]
    """Weight and gap by kind of pause."""
    forks: float = 0.0
    """Probability that a turn hands work to sub-agents, each of which ends superseded."""
    retries: float = 0.0
    """Probability that an answer is regenerated: the old branch is superseded."""
    tenants: int = 1


TOOLS = {
    "tool:read": (5.0, Gap(0.3, 0.7)),
    "tool:search": (3.0, Gap(2.0, 0.6)),
    "tool:shell": (3.0, Gap(1.0, 1.4)),
    "tool:test": (1.5, Gap(25.0, 0.6)),
    "tool:build": (0.7, Gap(90.0, 0.4)),
    "person": (0.6, Gap(120.0, 1.1, never=0.35)),
}
CODER = Persona(1.0, turns=40, first=12_000, more=2_500, pauses=TOOLS)
CHATTER = Persona(1.0, turns=6, first=1_500, more=700, pauses={"person": (1.0, Gap(45.0, 1.2, never=0.15))})
BATCH = Persona(1.0, turns=1, first=6_000, more=500, pauses={"batch": (1.0, Gap(1.0, 0.1, never=1.0))})
OFFICE = {
    "tool:browse": (4.0, Gap(6.0, 1.0)),
    "tool:query": (2.0, Gap(0.15, 0.4)),
    "tool:render": (1.0, Gap(45.0, 0.2)),
    "approval": (0.4, Gap(900.0, 1.5, never=0.3)),
    "person": (1.0, Gap(60.0, 1.4, never=0.25)),
}
LOADS = {
    "agents": (CODER,),
    "people": (CHATTER,),
    "mixed": (CODER, replace(CHATTER, share=4.0), replace(BATCH, share=3.0)),
    "forks": (replace(CODER, forks=0.08, retries=0.05), replace(CHATTER, share=2.0)),
    "office": (
        Persona(1.0, turns=25, first=8_000, more=4_000, pauses=OFFICE, forks=0.05, retries=0.1, tenants=3),
        replace(CHATTER, share=2.0, turns=12, tenants=3),
    ),
    "night": (
        Persona(1.0, turns=60, first=20_000, more=1_500, pauses={"tool:exec": (1.0, Gap(8.0, 1.8, never=0.02))}),
        replace(BATCH, share=5.0, first=15_000),
        Persona(0.5, turns=10, first=3_000, more=6_000, pauses={"tool:crawl": (1.0, Gap(200.0, 0.8, never=0.05))}),
    ),
}
RATES = {"people": 3.0, "mixed": 1.0, "night": 0.6}
"""Sessions per second; others have 0.3."""


@dataclass
class Turn:
    """One sequence: it has its blocks from `start` to `end`, in seconds."""

    start: float
    end: float
    digests: list[bytes]
    tenant: str
    pause: Pause = field(default_factory=Pause)


class Session:
    """One session: its turns, those of its sub-agents, and its abandoned branches."""

    def __init__(self, name: str, start: float, persona: Persona, draw: random.Random, *, hints: bool) -> None:
        self._name, self._persona, self._draw, self._hints = name, persona, draw, hints
        self._tenant = f"tenant {draw.randrange(persona.tenants)}"
        self._numbers = count()
        self.turns: list[Turn] = []
        self._play(start)

    def _size(self, median: float) -> int:
        return max(1, round(median * math.exp(self._draw.gauss(0.0, 0.6))))

    def _extend(self, path: list[bytes], tokens: int) -> list[bytes]:
        """The blocks of a sequence of this many tokens that begins with those of `path`."""
        new = range(len(path), tokens // BLOCK)
        return path + [f"{self._name} {next(self._numbers)} {at}".encode() for at in new]

    def _add(self, start: float, end: float, path: list[bytes], pause: Pause) -> None:
        self.turns.append(Turn(start, end, path, self._tenant, pause))

    def _play(self, now: float) -> None:
        persona, draw = self._persona, self._draw
        tokens = self._size(persona.first)
        path = [f"system {self._tenant} {persona.first} {at}".encode() for at in range(SYSTEM_BLOCKS)]
        last = self._size(persona.turns)
        for turn in range(last):
            tokens += self._size(persona.more) if turn else 0
            answer = self._size(250)
            length = self._size(persona.more) / PREFILL + answer / DECODE
            tokens += answer
            if draw.random() < persona.retries:
                self._add(now, now + length, self._extend(path, tokens), Pause("person", superseded=True))
                now += length + draw.expovariate(0.2)
            path, end = self._extend(path, tokens), now + length
            if draw.random() < persona.forks:
                self._add(now, end, path, Pause("branch"))
                now = 0.1 + max(self._sub_agent(path, tokens, end) for _ in range(draw.randrange(1, 4)))
                continue
            kind = draw.choices([*persona.pauses], [weight for weight, _ in persona.pauses.values()])[0]
            gap = persona.pauses[kind][1].draw(draw) if turn + 1 < last else NEVER
            self._add(now, end, path, Pause(kind, expected=self._hint(kind, gap)))
            if gap == NEVER:
                return
            now = end + gap

    def _hint(self, kind: str, gap: float) -> float | None:
        if not (self._hints and kind.startswith("tool")):
            return None
        true = gap if gap < NEVER else self._persona.pauses[kind][1].median
        return min(MAX_PAUSE, true * math.exp(self._draw.gauss(0.0, HINT_ERROR)))

    def _sub_agent(self, path: list[bytes], tokens: int, now: float) -> float:
        """Add the turns of a sub-agent that begins with the parent's state. Returns when the last one ends."""
        turns, end = self._draw.randrange(1, 6), now
        for turn in range(turns):
            tokens += self._size(self._persona.more)
            path, end = self._extend(path, tokens), now + 0.3 + 300 / DECODE
            done = turn + 1 == turns
            self._add(now, end, path, Pause("branch" if done else "tool:read", superseded=done))
            now = end + Gap(0.3, 0.7).draw(self._draw)
        return end


def make_load(name: str, seconds: float, seed: int, hints: bool) -> list[Turn]:
    """The turns of a load by their start."""
    if name.endswith(".jsonl"):
        return read_mooncake(Path(name), seconds)
    draw, personas = random.Random(seed), LOADS[name]
    rate, now, turns = RATES.get(name, 0.3), 0.0, list[Turn]()
    for number in count():
        now += draw.expovariate(rate)
        if now > seconds:  # after the last arrival sessions only end: that is no load to measure
            break
        (persona,) = draw.choices(personas, [each.share for each in personas])
        turns += Session(f"{number}", now, persona, draw, hints=hints).turns
    return sorted((turn for turn in turns if turn.start < seconds), key=lambda turn: turn.start)


def read_mooncake(path: Path, seconds: float) -> list[Turn]:
    """The requests of a Mooncake trace. Nothing is known of their pauses."""
    turns = []
    for line in path.read_text().splitlines():
        row = json.loads(line)
        start = row["timestamp"] / 1000
        if start > seconds:
            break
        digests = [f"{each}".encode() for each in row["hash_ids"][: row["input_length"] // BLOCK]]
        if not digests:
            continue
        turns.append(Turn(start, start + row["input_length"] / PREFILL + row["output_length"] / DECODE, digests, ""))
    return sorted(turns, key=lambda turn: turn.start)


class Belady(Untracked):
    """Knows when every block is used next. For simulations alone: no engine can (Bélády 1966)."""

    def __init__(self, turns: Sequence[Turn]) -> None:
        self._starts = defaultdict[bytes, list[float]](list)
        for turn in turns:
            for digest in turn.digests:
                self._starts[digest].append(turn.start)
        self.digest_of: Callable[[int], bytes] = lambda block: b""

    def order(self, rule: RetentionRule, capacity: int) -> IdleOrder:
        """The order of the idle blocks of a tier."""
        return FarthestFirst(self)

    def next_use(self, block: int, now: float) -> float:
        """When this block is used next after `now`; NEVER if it is not."""
        starts = self._starts[self.digest_of(block)]
        at = bisect_right(starts, now)
        return starts[at] if at < len(starts) else NEVER


class FarthestFirst:
    """Idle blocks, the one that is needed last first."""

    def __init__(self, future: Belady) -> None:
        self._future = future
        self.blocks: dict[int, tuple[float, int, Use]] = {}
        self._heap: list[tuple[float, int, int]] = []
        self._numbers = count()

    def add_all(self, blocks: Iterable[int], indices: Iterable[int], use: Use) -> None:
        """Add blocks that were last used together."""
        for block in blocks:
            number = next(self._numbers)
            needed = self._future.next_use(block, use[0])
            self.blocks[block] = needed, number, use
            heappush(self._heap, (-needed, -number, block))

    def remove(self, blocks: Sequence[int]) -> list[int]:
        """Remove those of these blocks that are here. Returns the others."""
        return [block for block in blocks if self.blocks.pop(block, None) is None]

    def victims(self, now: float) -> FarthestFirst:
        """This order itself."""
        return self

    def pop(self, below: float = math.inf) -> Chunk | None:
        """Remove the block that is needed last."""
        while self._heap:
            _, number, block = heappop(self._heap)
            if block in self.blocks and self.blocks[block][1] == -number:
                return Chunk(0.0, [block], self.blocks.pop(block)[2])
        return None

    def among(self, start: int, stop: int, index: PrefixIndex) -> list[tuple[Use, int, bytes]]:
        """Raises NotImplementedError: only the tiers below the host ask for this, and the study has none of them."""
        raise NotImplementedError

    renew = last_use = take = move = among  # type: ignore[assignment]


@dataclass
class Outcome:
    """The work that a policy had done again."""

    tokens: int = 0
    cost: float = 0.0
    needed: int = 0
    """Tokens that had been computed before and were needed again."""
    refused: int = 0
    """Turns that found no room, because others held all of it. They are left out."""
    seconds: float = 0.0
    """Time of the memory's own work."""


class Replay:
    """A load on a pool of blocks, with one policy."""

    def __init__(self, turns: Sequence[Turn], policy: str, blocks: int) -> None:
        future = Belady(turns)
        eviction = EVICTIONS["retention" if policy == "belady" else policy]
        self._turns = turns
        self._rule = RetentionRule(
            eviction,
            cost=cost_by_position,
            chunk_blocks=1,
            block_size=BLOCK,
            turns=future if policy == "belady" else make_turns(policy),
        )
        self._pool = BlockPool(blocks, BLOCK, rule=self._rule)
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
            outcome.refused += 1
            return
        start = self._rule.turns.begin(digests, len(found), turn.start)
        for at, digest in enumerate(digests):
            outcome.needed += BLOCK * (digest in self._known)
            if digest in self._known and at not in found:
                outcome.tokens += BLOCK
                outcome.cost += self._rule.cost((at + 1) * BLOCK)
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


def describe(policy: str, share: float, each: Outcome, base: Outcome) -> str:
    """One line of the table. `base` is the outcome of the first policy."""
    return (
        f"  {share:.0%} {policy:17} {each.tokens / 1e6:8.2f}M again, {each.tokens / max(1, each.needed):6.1%} of needed"
        f"  x{each.tokens / max(1, base.tokens):.2f}  cost x{each.cost / max(1.0, base.cost):.2f}"
        f"  {each.refused} refused  {each.seconds:.1f} s"
    )


def main() -> None:
    """Print, for each load and size of memory, the tokens that each policy has computed again."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("loads", nargs="*", default=["agents", "mixed", "people", "forks"])
    parser.add_argument("--shares", type=float, nargs="+", default=[0.25, 0.45, 0.7])
    parser.add_argument("--policies", nargs="+", default=POLICIES)
    parser.add_argument("--hints", action="store_true")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=900.0, help="time in which sessions arrive")
    parser.add_argument("--json")
    options = parser.parse_args()
    results = []
    for load in options.loads:
        turns = make_load(load, options.seconds, options.seed, options.hints)
        most, tokens = most_state(turns), BLOCK * sum(len(turn.digests) for turn in turns)
        print(f"{load}: {len(turns)} turns, {tokens / 1e6:.0f}M tokens, state of {most * BLOCK / 1e6:.2f}M at most")
        for share in options.shares:
            outcomes = {name: Replay(turns, name, max(1, int(share * most))).run() for name in options.policies}
            base = next(iter(outcomes.values()))
            for policy, each in outcomes.items():
                print(describe(policy, share, each, base), flush=True)
                results.append({"load": load, "share": share, "policy": policy, **vars(each)})
    if options.json:
        Path(options.json).write_text(json.dumps({"provenance": provenance(), "results": results}, indent=1))


if __name__ == "__main__":
    main()
