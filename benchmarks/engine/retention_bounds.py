"""Bounds for `retention_sim`: Bélády's order, the informed index, and the least that any policy recomputes.

**Offline.** Between two uses a block is either held, which takes a place for that time, or computed again. Choosing the
gaps to hold is packing intervals into a capacity that changes as running sequences come and go. Where all blocks cost
the same, giving up the block whose next use is farthest away, one at a time and only for want of a place, is optimal
(`optimum`; Bélády 1966). Where costs differ it is not. `Belady` is that order on the engine's pool, which evicts some
blocks ahead, so it may have a little more computed again.

**Online.** A policy knows the law of a gap, and that it has lasted until now, but not when it ends. Give each place a
price per second, which may change with time but not with chance. A policy that holds at most the capacity pays, with
the prices, at most what it recomputes plus the value of the capacity. Without the capacity each gap is a problem of its
own: hold it for the time h that minimises the expected sum of its price and of computing it again. For any prices

    recomputed  >=  sum over gaps of min_h E[price held until min(G, h) + cost if G > h] - value of the capacity

in expectation (Lagrangian relaxation; Whittle 1988). Prices may be fitted to the load: `fit_prices` climbs the bound.
Where a gap follows from other turns the bound lets the policy know it, which keeps the bound below.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from heapq import heappop, heappush
from itertools import count

import numpy as np
from numpy.typing import NDArray

from benchmarks.engine.retention_loads import NEVER, Law, Load, Turn
from holdfast.lm.memory.gaps import ANYTHING, Fixed, Kind, Pace, Rates
from holdfast.lm.memory.prefix_index import PrefixIndex
from holdfast.lm.memory.retention import Chunk, IdleOrder, RetentionRule, Untracked, Use
from holdfast.lm.memory.turn_queue import RankedTurns
from holdfast.lm.memory.turns import Departure, Start
from holdfast.lm.memory.turns import Turn as EndedTurn

Floats = NDArray[np.float64]


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
        """When this block is used next, from `now` on; NEVER if it is not."""
        starts = self._starts[self.digest_of(block)]
        at = bisect_left(starts, now)
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


class TrueGaps(Fixed):
    """Gaps whose law is known."""

    @property
    def worths(self) -> Sequence[float]:
        """The worth by the bin of the age."""
        return self.rates.worth


class TrueKind(Kind):
    """A kind of pause whose law is known."""

    def __init__(self, rates: Rates) -> None:
        super().__init__(ANYTHING)
        self._true = TrueGaps(rates)
        self.trust = self.pace_trust = -math.inf

    def stage(self, turns: int) -> TrueGaps:  # type: ignore[override]
        """The gaps: their law knows the number of turns."""
        return self._true

    def judge_pace(self, gap: float, pace: Pace, stage: object) -> Pace:
        """Learn nothing."""
        return pace


@cache
def true_kind(law: Law) -> TrueKind:
    """The kind of pause of this law."""
    return TrueKind(law.rates())


class Informed(RankedTurns):
    """The order by pauses, where the law of each gap is known instead of learned. For simulations alone."""

    def __init__(self, turns: Sequence[Turn]) -> None:
        super().__init__()
        self._laws = [turn.law for turn in turns]
        self._law: Law | None = None

    def left(
        self, digests: Sequence[bytes], departure: Departure, start: Start, call: int, now: float, *, prompt: int = 0
    ) -> int:
        """A sequence has ended, whose request is the number of its turn."""
        self._law = self._laws[int(departure.request)]
        return super().left(digests, departure, start, call, now, prompt=prompt)

    def _turn(
        self, departure: Departure, start: Start, now: float, *, length: int, prompt: int, prompt_end: bytes
    ) -> EndedTurn:
        law, self._law = self._law, None
        turn = super()._turn(departure, start, now, length=length, prompt=prompt, prompt_end=prompt_end)
        if law is None:
            return turn
        kind = true_kind(law)
        return EndedTurn(now, departure, kind, start, length=length, prompt=prompt, prompt_end=prompt_end)


@dataclass(frozen=True)
class Gaps:
    """The gaps of blocks that were freed together and have one cost and one next use."""

    begins: Floats
    """When each gap begins, in seconds."""
    needed: Floats
    """When the blocks are needed again; NEVER if they are not."""
    cost: Floats
    """Cost of computing one of the blocks again."""
    blocks: Floats
    """Number of blocks."""
    law: NDArray[np.int64]
    """Number of the law of each gap; -1: it is known when the gap ends."""
    laws: Sequence[Law]

    def known(self) -> Gaps:
        """These gaps for one who knows when each ends."""
        return replace(self, law=np.full_like(self.law, -1), laws=())


def rounded(cost: float) -> float:
    """A cost to the nearest eighth of an octave, so that few gaps differ."""
    return float(2.0 ** (round(8 * math.log2(cost)) / 8))


def gaps_of(load: Load, cost: Callable[[int], float], refused: Iterable[int]) -> tuple[Gaps, list[tuple[float, int]]]:
    """All gaps of a load in which these turns are refused, and the changes of the number of running blocks by time."""
    out, turns = {*refused}, load.turns
    events = sorted(
        (time, kind, at)
        for at, turn in enumerate(turns)
        if at not in out
        for time, kind in ((turn.end, 0), (turn.start, 1))
    )
    users, opened = Counter[bytes](), dict[bytes, tuple[float, int, float]]()
    groups, changes = Counter[tuple[float, float, float, int]](), Counter[float]()
    numbers, laws = dict[Law, int](), list[Law]()
    for time, starts, at in events:
        turn, change = turns[at], 0
        law = -1
        if turn.law is not None and not starts:
            law = numbers.setdefault(turn.law, len(numbers))
            laws += [turn.law] if law == len(laws) else []
        for place, digest in enumerate(turn.digests):
            users[digest] += 1 if starts else -1
            if starts and users[digest] == 1:
                change += 1
                if digest in opened:
                    began, of, each = opened.pop(digest)
                    groups[began, time, each, of] += 1
            elif not starts and not users[digest]:
                change -= 1
                opened[digest] = time, law if place >= turn.shared else -1, rounded(cost((place + 1) * load.block))
        changes[time] += change
    for began, of, each in opened.values():
        groups[began, NEVER, each, of] += 1
    begins, needed, costs, of_law = (np.array(column) for column in zip(*groups, strict=True))
    return Gaps(begins, needed, costs, np.array([*groups.values()], float), of_law.astype(np.int64), laws), [
        *changes.items()
    ]


def optimum(gaps: Gaps, changes: Sequence[tuple[float, int]], capacity: int) -> float:
    """The fewest blocks that anybody must have computed again, who knows all gaps."""
    begun = sorted(range(len(gaps.begins)), key=lambda at: gaps.begins[at])
    held, ending, idle = list[tuple[float, int]](), list[tuple[float, int]](), Counter[int]()
    number, room, total, dropped = 0, float(capacity), 0.0, 0.0
    for time, change in changes:
        room -= change
        while number < len(begun) and gaps.begins[begun[number]] <= time:
            at = begun[number]
            number += 1
            idle[at] = int(gaps.blocks[at])
            total += gaps.blocks[at]
            heappush(held, (-gaps.needed[at], at))
            heappush(ending, (gaps.needed[at], at))
        while ending and ending[0][0] <= time:
            total -= idle.pop(heappop(ending)[1], 0)
        while total > room:
            needed, at = held[0]
            excess = min(idle[at], total - room)
            idle[at] -= int(excess)
            total -= excess
            dropped += excess * (needed > -NEVER)
            if not idle[at]:
                heappop(held)
                idle.pop(at, None)
    return dropped


def seconds_between(edges: Floats, begins: Floats, ends: Floats, weights: Floats) -> Floats:
    """Weighted seconds of intervals within each of the windows that have these edges."""
    times = np.concatenate((begins, np.minimum(ends, edges[-1])))
    order = np.argsort(times, kind="stable")
    times, weights = times[order], np.concatenate((weights, -weights))[order]
    here = np.cumsum(weights)
    until = np.concatenate(([0.0], np.cumsum(here[:-1] * np.diff(times))))
    at = np.searchsorted(times, edges, side="right") - 1
    total = np.where(at >= 0, until[at] + here[at] * (edges - times[at]), 0.0)
    return np.diff(total)


HOLDS = np.concatenate(([0.0], np.geomspace(0.02, 3600.0, 96)))
"""Seconds after which a gap may be given up."""


class OnlineBound:
    """The lower bound by prices that are constant within each of `windows` equal windows of time."""

    def __init__(
        self, load: Load, gaps: Gaps, changes: Sequence[tuple[float, int]], capacity: int, windows: int
    ) -> None:
        self._gaps, self._end = gaps, load.seconds
        self.edges = np.linspace(0.0, load.seconds, windows + 1)
        self._free = self._free_seconds(changes, capacity)
        self._needed = np.where(gaps.needed < load.seconds, gaps.needed, NEVER)
        # Nobody counts what is needed after the end, and a policy may know that.
        below = np.array([[law.below(hold) for hold in HOLDS] for law in gaps.laws] or [[0.0] * len(HOLDS)])
        left = np.interp(load.seconds - gaps.begins, HOLDS, np.arange(len(HOLDS)))
        whole = np.minimum(left.astype(int), len(HOLDS) - 2)
        start, stop = below[gaps.law, whole], below[gaps.law, whole + 1]
        self._below = np.minimum(below[gaps.law], (start + (left - whole) * (stop - start))[:, None])
        self._stops = np.minimum(gaps.begins[:, None] + HOLDS, load.seconds)
        self._known = gaps.law < 0

    def _free_seconds(self, changes: Sequence[tuple[float, int]], capacity: int) -> Floats:
        """Block seconds of idle places within each window."""
        times, change = (np.array(column, float) for column in zip(*changes, strict=True))
        running = seconds_between(self.edges, times, np.full_like(times, np.inf), change)
        return capacity * np.diff(self.edges) - running

    def at(self, prices: Floats) -> tuple[float, Floats]:
        """The bound at these prices per block and second, and its gradient."""
        gaps = self._gaps
        paid = np.concatenate(([0.0], np.cumsum(prices * np.diff(self.edges))))
        begun = np.interp(gaps.begins, self.edges, paid)
        until = np.interp(np.minimum(self._needed, self._end), self.edges, paid) - begun
        hold = np.where((self._needed < NEVER) & (until < gaps.cost), self._needed, gaps.begins)
        if not self._known.all():
            hold = np.where(self._known, hold, np.minimum(self._needed, self._best_stop(paid)))
        hold = np.minimum(hold, self._end)
        missed = (self._needed < NEVER) & (hold < self._needed)
        price = np.interp(hold, self.edges, paid) - begun
        value = float(((gaps.cost * missed + price) * gaps.blocks).sum() - prices @ self._free)
        held = seconds_between(self.edges, gaps.begins, hold, gaps.blocks)
        return value, held - self._free

    def _best_stop(self, paid: Floats) -> Floats:
        """When to give up each gap."""
        prices = np.diff(np.interp(self._stops, self.edges, paid), axis=1)
        lasts = 1.0 - (self._below[:, 1:] + self._below[:, :-1]) / 2
        expected = np.concatenate((np.zeros((len(prices), 1)), np.cumsum(prices * lasts, axis=1)), axis=1)
        best = np.argmax(self._gaps.cost[:, None] * self._below - expected, axis=1)
        return self._stops[np.arange(len(best)), best]


def fit_prices(bounds: Sequence[OnlineBound], steps: int = 150) -> Floats:
    """Prices at which the sum of these bounds is high: subgradient ascent by the logarithm of the prices."""
    windows = len(bounds[0].edges) - 1
    scale = np.full(windows, 1e-3)
    best, value_of_best, velocity = scale.copy(), -math.inf, np.zeros(windows)
    for step in range(steps):
        found = [bound.at(scale) for bound in bounds]
        value = sum(value for value, _ in found)
        if value > value_of_best:
            best, value_of_best = scale.copy(), value
        gradient = sum((gradient for _, gradient in found), np.zeros(windows))
        room = sum((np.abs(bound._free) for bound in bounds), np.zeros(windows)) + 1.0
        velocity = np.clip(gradient / room, -1.0, 1.0)
        scale = np.clip(scale * np.exp(velocity / (1.0 + step / 15.0)), 1e-9, 1e3)
    return best
