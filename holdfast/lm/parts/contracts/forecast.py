"""Forecast: when accepted sequences get their tokens at the latest, by the cost model."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from math import ceil, inf
from typing import NamedTuple

from holdfast.core.cost import Predictor
from holdfast.lm.parts.contracts.lengths import CERTAIN, GRID, Survival, cell_of
from holdfast.lm.parts.contracts.pool import EMPTY, Answer, Pool, Sums

CONTEXT_GRAIN = 128
"""Contexts are priced as the next multiple of this number of positions, so that few prices have to be computed."""
MOST_PRICES = 1 << 16
"""Most prices of chunks that are remembered."""


class Prompt(NamedTuple):
    """An accepted sequence that lacks a part of its prompt. Times are in seconds on the scheduler's clock."""

    missing: int
    """Tokens of the prompt that no plan computes yet."""
    context: int
    """Positions of the prompt."""
    remaining: int
    """Tokens of the answer that are still expected at the most. They must come in time."""
    due: float = inf
    """Time by which its first token must come."""
    complete: float = inf
    """Time by which its last token must come."""
    copying: float = 0.0
    """Predicted seconds in which its state is copied from the host. Nothing of it is computed before."""
    pauses: int = 0
    """Most steps that leave its tokens out although there is room for them."""
    joining: int = 0
    """Most further steps that do so before it joins others, because they were planned before its copies ended."""
    has_row: bool = True
    """Whether it has a row already."""
    survival: Survival = CERTAIN
    """How likely its answer goes on."""
    so_far: int = 0
    """Tokens of the answer so far."""
    allowed: int = 0
    """Most tokens that the answer may still get, if that is more than `remaining`."""

    @property
    def most(self) -> int:
        """Most steps in which it decodes."""
        return max(self.remaining, self.allowed)

    def without(self, start: float) -> Prompt:
        """This prompt less the times that are over by `start`."""
        return self._replace(
            due=self.due if self.due > start else inf, complete=self.complete if self.complete > start else inf
        )

    def after(self, steps: int, seconds: float) -> Prompt:
        """This prompt if its blocks take `steps` more steps and `seconds` of copies to become free."""
        return self._replace(pauses=self.pauses + steps, copying=self.copying + seconds) if steps else self

    def waits(self, elapsed: float, bound: float) -> int:
        """Number of steps that may compute none of it, if each takes `bound` seconds.

        `elapsed` is the time since the start of the forecast.
        """
        return self.pauses + self.joining + max(0, ceil((self.copying - elapsed) / bound))


class Prices:
    """Predicted seconds of the pieces of a step, rounded up so that a smaller step never has a higher price."""

    def __init__(self, predictor: Predictor, *, tile: int, ceiling: int) -> None:
        """Steps are computed in whole tiles of `tile` tokens; a step has at most `ceiling` tokens."""
        self.tile, self.ceiling = tile, ceiling
        self._predictor = predictor
        self._chunks: dict[tuple[int, int], float] = {}
        self._curves: dict[int, Sequence[float]] = {}
        self._lines: dict[int, tuple[float, float]] = {}

    def decodes(self, contexts: list[int]) -> float:
        """Seconds of the attention of decodes with these contexts."""
        return self._predictor.decodes(contexts) if contexts else 0.0

    def most_decodes(self, rows: int, positions: int) -> float:
        """An upper limit of the seconds of the attention of `rows` decodes whose contexts are `positions` in all."""
        line = self._lines.get(rows)
        if line is None:
            line = self._lines[rows] = self._line(rows)
        return rows * line[0] + positions * line[1]

    def _line(self, rows: int) -> tuple[float, float]:
        """The line a + b · context that no price of a decode among `rows` lies above."""
        cost = self._predictor.cost
        points = sorted({1, *cost.attention_contexts, 2 * cost.attention_contexts[-1]})
        prices = [cost.decode(rows, point) for point in points]
        slope = max(
            (prices[-1] - price) / (points[-1] - point) for price, point in zip(prices[:-1], points, strict=False)
        )
        return max(price - slope * point for price, point in zip(prices, points, strict=True)), slope

    def linear(self, rows: int, tokens: int) -> float:
        """Seconds of everything but attention in a step of `rows` decodes and `tokens` tokens of prompts."""
        return self.curve(rows)[-(-(rows + tokens) // self.tile)] if tokens else self._alone(rows)

    def curve(self, rows: int) -> Sequence[float]:
        """Seconds of everything but attention in a step of `rows` decodes and prompts, by its number of whole tiles.

        They rise with the number, which reaches two tiles beyond the largest step.
        """
        curve = self._curves.get(rows)
        if curve is None:
            tile, mixed = self.tile, self._predictor.mixed
            whole = range(rows // tile + 1, -(-max(rows, self.ceiling) // tile) + 3)
            prices = [self._alone(rows)] * whole.start + [mixed(rows, tiles * tile - rows) for tiles in whole]
            curve = self._curves[rows] = list(accumulate(prices, max))
        return curve

    def _alone(self, rows: int) -> float:
        """Seconds of everything but attention in a step of this many decodes alone."""
        predictor = self._predictor
        return max(predictor.mixed(rows, 0), predictor.drafted(rows, [])) if rows else 0.0

    def chunk(self, start: int, stop: int) -> float:
        """Seconds of the attention of the chunk [start, stop) of a prompt."""
        query = -(-(stop - start) // self.tile) * self.tile
        key = query, max(query, -(-stop // CONTEXT_GRAIN) * CONTEXT_GRAIN)
        seconds = self._chunks.get(key)
        if seconds is None:
            if len(self._chunks) >= MOST_PRICES:
                self._chunks.clear()
            # A chunk of one token is priced as a decode.
            seconds = self._predictor.chunk(key[1] - query, key[1])
            self._chunks[key] = max(seconds, self._predictor.decode(1, key[1])) if stop - start == 1 else seconds
        return self._chunks[key]


class Room:
    """A step under construction: its decodes, and as many tokens of prompts as fit into a time."""

    __slots__ = ("_attention", "_prices", "_rows", "tokens")

    def __init__(self, prices: Prices, rows: int, attention: float) -> None:
        """The step has `rows` decodes, whose attention takes `attention` seconds."""
        self._prices, self._rows, self._attention = prices, rows, attention
        self.tokens = 0
        """Tokens of prompts."""

    @property
    def seconds(self) -> float:
        """Predicted seconds of the step."""
        return self._prices.linear(self._rows, self.tokens) + self._attention

    def with_decodes(self, rows: int, attention: float) -> float:
        """Predicted seconds of the step with this many more decodes, whose attention takes `attention` seconds."""
        return self._prices.linear(self._rows + rows, self.tokens) + self._attention + attention

    def decode(self, rows: int, attention: float) -> None:
        """Add decodes, whose attention takes `attention` seconds."""
        self._rows += rows
        self._attention += attention

    def take(self, start: int, stop: int, limit: float) -> int:
        """Add as many tokens of the chunk [start, stop) as let the step end within `limit` seconds; returns them."""
        prices, held, attention = self._prices, self.tokens, self._attention
        filled, tile = self._rows + held, prices.tile
        most = min(stop - start, prices.ceiling - filled)
        if most <= 0:
            return 0
        curve = prices.curve(self._rows)

        def fits(tokens: int) -> bool:
            return curve[-(-(filled + tokens) // tile)] + attention + prices.chunk(start, start + tokens) <= limit

        low = most if fits(most) else self._most_tiles(fits, most, bisect_right(curve, limit - attention) - 1)
        full = -(-(filled + low) // tile)
        if low < most and curve[full + 1] + attention + (prices.chunk(start, start + low) if low else 0.0) <= limit:
            # Prices rise only where a tile of the step or of the chunk, or a grain of contexts, is full.
            ends = (low - low % tile + tile, low + CONTEXT_GRAIN - (start + low) % CONTEXT_GRAIN)
            low = max((tokens for tokens in ends if tokens <= most and fits(tokens)), default=low)
        if low:
            self.tokens = held + low
            self._attention = attention + prices.chunk(start, start + low)
        return low

    def _most_tiles(self, fits: Callable[[int], bool], most: int, tiles: int) -> int:
        """The most tokens below `most` with which the step is of at most `tiles` whole tiles and fits; 0 if none do."""
        tile, filled = self._prices.tile, self._rows + self.tokens
        low, high = filled // tile, min(tiles, (filled + most - 1) // tile)
        middle = high  # chunks of short contexts cost little, so that mostly the step's tiles decide
        while low < high:
            low, high = (middle, high) if fits(middle * tile - filled) else (low, middle - 1)
            middle = (low + high + 1) // 2
        return max(0, low * tile - filled)


class Decodes:
    """The accepted sequences that decode: how many are left at the most after a number of steps, and their contexts."""

    def __init__(self, pairs: Iterable[tuple[int, int]] = (), pool: Pool = EMPTY) -> None:
        """`pairs` has the number of tokens that each may still be given, and the positions that it has now.

        The sequences of `pool` are in no pair: their lengths are learned.
        """
        self.pool = pool
        ordered = sorted(pairs)
        self._remaining = [remaining for remaining, _ in ordered]
        # Sums over all from the index on.
        self._tokens = sums_from(self._remaining)
        self._positions = sums_from([positions for _, positions in ordered])

    @property
    def steps(self) -> int:
        """Number of steps until the last of them has ended."""
        return max(self._remaining[-1] if self._remaining else 0, self.pool.steps)

    @property
    def count(self) -> int:
        """Number of the sequences."""
        return len(self._remaining) + self.pool.count

    @property
    def ends(self) -> Sequence[int]:
        """Number of steps of each that is in no pool, in ascending order."""
        return self._remaining

    def load(self, step: int, edge: int) -> tuple[int, int]:
        """Most decodes in steps [step, edge) without the pool, and most positions of their contexts in all."""
        remaining = self._remaining
        first, longer = bisect_right(remaining, step), bisect_right(remaining, edge)
        ending = self._tokens[first] - self._tokens[longer]
        return len(remaining) - first, self._positions[first] + ending + edge * (len(remaining) - longer)


def sums_from(numbers: Sequence[int]) -> list[int]:
    """For each index, and the one after the last, the sum of the numbers from there on."""
    return [*accumulate(reversed(numbers), initial=0)][::-1]


class Timeline:
    """The time at which each step ends, by the number of steps from now. It is linear between its points."""

    def __init__(self, start: float) -> None:
        """The first step begins at `start`."""
        self._steps, self._times = [0], [start]

    @property
    def end(self) -> float:
        """Time at which the last known step ends."""
        return self._times[-1]

    @property
    def steps(self) -> int:
        """Number of steps that are known."""
        return self._steps[-1]

    def extend(self, steps: int, seconds: float) -> None:
        """Add this many steps, of `seconds` each."""
        if steps:
            self._steps.append(self._steps[-1] + steps)
            self._times.append(self._times[-1] + steps * seconds)

    def before(self, time: float) -> int:
        """Number of steps that have ended by a time, of those that are known."""
        right = bisect_right(self._times, time)
        if right == len(self._times):
            return self._steps[-1]
        if not right:
            return 0
        left = right - 1
        share = (time - self._times[left]) / (self._times[right] - self._times[left])
        return self._steps[left] + int(share * (self._steps[right] - self._steps[left]))

    def after(self, steps: int) -> float:
        """Time at which this many steps have ended. They must be known."""
        right = bisect_left(self._steps, steps)
        if self._steps[right] == steps:
            return self._times[right]
        left = right - 1
        share = (steps - self._steps[left]) / (self._steps[right] - self._steps[left])
        return self._times[left] + share * (self._times[right] - self._times[left])


class Later:
    """The accepted sequences once all prompts are computed: those that decode now, and those that will."""

    def __init__(self, decodes: Decodes, prompts: Iterable[tuple[Prompt, int]]) -> None:
        """Each of the `prompts` is given with the step that ends it."""
        pairs, answers, shift = [], [], 0
        for prompt, end in prompts:
            if prompt.survival is CERTAIN:
                pairs.append((end + prompt.most, prompt.context))
            else:
                answers.append(Answer(prompt.survival, prompt.so_far, prompt.most, prompt.context))
                shift = max(shift, end)
        self._now, self._shift = decodes, shift
        self._new = Decodes(pairs, Pool(answers, others=decodes.pool.count))
        self.steps = max(decodes.steps, self._new.ends[-1] if pairs else 0, self._new.pool.steps + shift)
        """Number of steps until the last of them has ended."""

    @property
    def ends(self) -> Sequence[int]:
        """Number of steps of each whose length is certain, in ascending order."""
        return sorted([*self._now.ends, *self._new.ends])

    def sums(self, step: int) -> Sums:
        """The sums over those whose lengths are learned. All prompts count as if they ended in the last one's step."""
        return self._now.pool.at(step).plus(self._new.pool.at(max(0, step - self._shift)))

    def load(self, step: int, edge: int, margin: float) -> tuple[int, int]:
        """Most decodes in steps [step, edge), and most positions of their contexts in all."""
        rows, positions = self._now.load(step, edge)
        more, further = self._new.load(step, edge)
        unsure, wide = self.sums(step).upper(margin, edge)
        return rows + more + min(unsure, self._now.pool.count + self._new.pool.count), positions + further + wide


@dataclass(frozen=True, slots=True)
class Outlook:
    """The result of a forecast."""

    firsts: tuple[float, ...]
    """Latest time of the first token of each prompt, in their order.

    Shorter than their number if a step has no room for the next one, or if it would come too late.
    """
    decodes: bool
    """Whether every step has room for the decodes."""
    ended: tuple[int, ...] = ()
    """Number of steps before the one that gives the first token of each prompt."""
    backlog: int = 0
    """Number of steps until all prompts are computed."""
    timeline: Timeline = field(default_factory=lambda: Timeline(0.0))
    """When steps end, for as many steps as any sequence takes, if every step has room for the decodes."""


class Forecast:
    """Follows the steps of accepted sequences alone.

    The prompts are computed in their order, as far as each step has room next to its decodes. A step that leaves a part
    of a prompt is as long as the bound, whatever it holds. Later steps have decodes alone, and are as long as these
    take. So at the end of each real step at least as many prompt tokens are computed, if it holds no other work while a
    prompt of an accepted sequence is left. The number of decodes and their contexts are upper limits, too: they count
    from the first step in which a sequence could decode.

    A first token comes after few steps, each of which may be as slow as any. So it counts as that late. The times by
    which answers complete are those of many steps, which take as long as steps usually do.
    """

    def __init__(
        self,
        prices: Prices,
        *,
        max_sequences: int = 1 << 20,
        in_flight: int = 1,
        margin: float = 0.0,
        usual: Callable[[], float] = lambda: inf,
    ) -> None:
        """At most `max_sequences` run, in up to `in_flight` steps at once.

        Sums over sequences of unknown lengths count as their mean and `margin` standard deviations. Many steps take at
        most `usual` times the sum of their prices.
        """
        self.prices = prices
        self._max_sequences, self.margin, self._usual = max_sequences, margin, usual
        self.in_flight = in_flight
        """Steps from a sequence's last one to the first that can use its row: its result has to come first."""

    def follow(
        self, prompts: Sequence[Prompt], decodes: Decodes, *, start: float, bound: float, factor: float
    ) -> Outlook:
        """When the first tokens of the `prompts` come, in their order, if steps begin at `start`.

        A step is predicted to take `factor` times its price, and takes at most `bound` seconds.
        """
        limit, at = bound / factor, start
        firsts: list[float] = []
        ended: list[int] = []
        index = step = edge = 0
        begun = -1
        left = prompts[0].missing if prompts else 0
        rows, attention = 0, 0.0
        while index < len(prompts):
            if index > begun:
                begun, first = index, prompts[index]
                alone = not index and not decodes.steps  # then a step waits for its copies alone
                waits = first.pauses if alone else first.waits(at - start, bound)
                at, step = at + waits * bound + (first.copying if alone else 0.0), step + waits
            if step >= edge:
                edge = next_edge(step)
                rows, attention = self.load(prompts, decodes, ended, step, edge)
                if self.prices.linear(rows, 0) + attention > limit:
                    return Outlook(tuple(firsts), False)
            room, before = Room(self.prices, rows, attention), index
            while index < len(prompts):
                prompt = prompts[index]
                left -= room.take(prompt.context - left, prompt.context, limit)
                if left:
                    break
                index += 1
                left = prompts[index].missing if index < len(prompts) else 0
                if left and prompts[index].waits(at - start, bound):
                    break
                begun = index
            at += bound if index < len(prompts) else room.seconds * factor
            firsts += [at] * (index - before)
            ended += [step] * (index - before)
            step += 1
            if index < len(prompts) and (at > prompts[index].due or not room.tokens):
                return Outlook(tuple(firsts), True)
        timeline, usual = Timeline(start), min(1.0, self._usual() / factor)
        if step:
            timeline.extend(step - 1, usual * bound)
            timeline.extend(1, usual * (at - start) - (timeline.end - start))
        late = self._blocked(prompts, decodes)
        if late and not self._wait_for_rows(prompts, decodes, ended, late):
            return Outlook(tuple(firsts[: late[0]]), True)
        later = Later(decodes, zip(prompts, ended, strict=True))
        carried = self._carries(later, timeline, limit, usual * factor)
        if carried:
            for index in late:
                firsts[index] = timeline.after(ended[index] + 1)
        return Outlook(tuple(firsts), carried, tuple(ended), step, timeline)

    def _blocked(self, prompts: Sequence[Prompt], decodes: Decodes) -> Sequence[int]:
        """Indices of the prompts that have to wait until another sequence gives up its row."""
        waiting = [index for index, prompt in enumerate(prompts) if not prompt.has_row]
        held = decodes.count + len(prompts) - len(waiting)
        return waiting[max(0, self._max_sequences - held) :]

    def _wait_for_rows(
        self, prompts: Sequence[Prompt], decodes: Decodes, ended: list[int], late: Sequence[int]
    ) -> bool:
        """Let the prompts `late` end as many steps later as rows are free for them; False if there are none in time.

        A timeline holds the work of all prompts before that, so no step ends later because they are computed later.
        """
        apart = set(late)
        others = [(prompt, ended[index]) for index, prompt in enumerate(prompts) if index not in apart]
        later, cell, rows = Later(decodes, others), 0, self._max_sequences
        ends = later.ends
        unsure, _ = later.sums(0).upper(self.margin, 0)
        for number, index in enumerate(late, 1):
            while (step := self._free_within(cell, ends, rows - number - unsure)) is None:
                cell += 1
                if cell == len(GRID):
                    return False
                unsure, _ = later.sums(GRID[cell]).upper(self.margin, 0)
            ended[index] += step + self.in_flight
        return True

    def _free_within(self, cell: int, ends: Sequence[int], most: int) -> int | None:
        """First step of a cell of GRID in which `most` sequences or fewer go on; None: not in this one.

        `ends` has the numbers of steps that they take.
        """
        if most < 0:
            return None
        step = ends[-most - 1] if most < len(ends) else 0
        return max(GRID[cell], step) if step < next_edge(GRID[cell]) else None

    def load(
        self, prompts: Sequence[Prompt], decodes: Decodes, ended: Sequence[int], step: int, edge: int
    ) -> tuple[int, float]:
        """Most decodes in steps [step, edge), and seconds of their attention. `ended`: steps that end the prompts."""
        rows, positions = decodes.load(step, edge)
        reach, total = self.prices.ceiling * edge, 0
        for index, prompt in enumerate(prompts):
            total += prompt.missing
            if total > reach:
                break
            if index >= len(ended) or ended[index] + prompt.most > step:
                rows += 1
                positions += prompt.context + min(prompt.most, edge)
        if decodes.pool.count:
            unsure, wide = decodes.pool.at(step).upper(self.margin, edge)
            rows, positions = rows + min(unsure, decodes.pool.count), positions + wide
        return self._price(rows, positions)

    def _price(self, rows: int, positions: int) -> tuple[int, float]:
        """The rows that there are for this many decodes, and seconds of the attention of decodes in them."""
        rows = min(rows, self._max_sequences)
        return rows, self.prices.most_decodes(rows, positions) if rows else 0.0

    def _carries(self, later: Later, timeline: Timeline, limit: float, times: float) -> bool:
        """Add the steps of decodes alone to a timeline, each of which takes `times` its price.

        Returns whether no price is above `limit` seconds.
        """
        while timeline.steps < later.steps:
            step = timeline.steps
            edge = next_edge(step)
            rows, attention = self._price(*later.load(step, edge, self.margin))
            seconds = self.prices.linear(rows, 0) + attention
            if seconds > limit:
                return False
            timeline.extend(edge - step, seconds * times)
        return True


def next_edge(step: int) -> int:
    """The first step after this one at which a forecast counts decodes anew."""
    return 4 << cell_of(step)
