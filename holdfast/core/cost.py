"""The cost model: predicts the time of a step from measurements. The only place where hardware enters policy.

The time of a step is the time of its linear layers, by token count, plus the time of each segment's attention, by query
length and context. Both are measured at powers of two and interpolated in between (Pensieve §4.3.1, Sarathi-Serve
§4.3). Times are in seconds. They are measured for each model and device.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields, replace
from itertools import chain, pairwise
from math import inf

HEAVY = 512
"""Smallest number of query tokens in a heavy step: one limited by arithmetic, with the highest power draw."""
SHARES_ROUNDED = 1e-6
"""Largest rounding error of the sum of the pipeline stages' shares, which should be 1."""


@dataclass(frozen=True, slots=True)
class Burst:
    """The extra speed of a device after light work: heavy steps run faster until the power limit slows them down.

    Raises ValueError for values out of range.
    """

    share: float = 1.0
    """Time of a boosted heavy step as a share of its steady time; above 0, and 1 for no boost."""
    seconds: float = 0.0
    """Seconds of boost after a full recovery."""

    def __post_init__(self) -> None:
        if not 0 < self.share <= 1:
            raise ValueError(f"share of a burst is {self.share}; it must lie above 0 and be at most 1")
        if not 0 <= self.seconds < inf:
            raise ValueError(f"seconds of a burst are {self.seconds}; they must be at least 0 and finite")


@dataclass(frozen=True, slots=True)
class LinkCost:
    """Time of messages between devices, measured by size.

    Raises ValueError if sizes are missing or do not ascend, if they differ from the times in number, or for a time
    below 0 or not finite.
    """

    sizes: tuple[int, ...]
    """Message sizes in bytes, ascending."""
    seconds: tuple[float, ...]

    def __post_init__(self) -> None:
        if not self.sizes or len(self.sizes) != len(self.seconds):
            raise ValueError(f"a link has {len(self.sizes)} sizes and {len(self.seconds)} times; give as many of each")
        if self.sizes[0] < 1 or any(first >= then for first, then in pairwise(self.sizes)):
            raise ValueError(f"sizes of a link's messages are {self.sizes}; they must be above 0 and ascend")
        if not all(0 <= seconds < inf for seconds in self.seconds):
            raise ValueError("a time of a link is below 0 or not finite")

    def send(self, size: float) -> float:
        """Seconds of a message of `size` bytes. Beyond the largest measured size, they are proportional to the size."""
        if size > self.sizes[-1]:
            return self.seconds[-1] * size / self.sizes[-1]
        return interpolate(self.sizes, self.seconds, size)


@dataclass(frozen=True, slots=True)
class CostModel:
    """Predicts the time of a step by interpolating between measured points.

    All points ascend. All times are for the whole model and for the device's steady pace.

    - `linear_seconds[i]`: time of everything but attention in a step of `linear_tokens[i]` query tokens.
    - `attention_seconds[i][j]`: time that a segment of `attention_queries[i]` query tokens adds if it ends at position
      `attention_contexts[j]`.
    - `decode_seconds[i]`: time of everything but attention in a step of only `decode_rows[i]` decodes. Executors may
      run
      such a step faster, as a captured graph. If it is empty, `linear_seconds` applies.
    - `decode_attention[i][j]`: time that each of `decode_rows[i]` decodes adds at a context of `attention_contexts[j]`,
      among decodes of other contexts. A few decodes leave part of a device idle, and decodes of unequal contexts share
      less work than equal ones. If it is empty, `attention_seconds` applies.
    - `burst`: extra speed of the first heavy steps after light work.
    - `deviation`: expected relative error of a prediction before any step was measured.
    - `stage_shares`: each pipeline stage's share of the time of a step. All other times are then sums over the stages,
      the time of a step that is alone in the pipeline. Empty: all stages take equal time.

    Raises ValueError if points are missing or do not ascend, if points and times differ in number, if a time or
    `deviation` is negative or not finite, or if the shares are not above 0 with a sum of 1.
    """

    model: str
    device: str
    linear_tokens: tuple[int, ...]
    linear_seconds: tuple[float, ...]
    attention_queries: tuple[int, ...]
    attention_contexts: tuple[int, ...]
    attention_seconds: tuple[tuple[float, ...], ...]
    decode_rows: tuple[int, ...] = ()
    decode_seconds: tuple[float, ...] = ()
    decode_attention: tuple[tuple[float, ...], ...] = ()
    burst: Burst = Burst()
    deviation: float = 0.02
    stage_shares: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        pairs = ((self.linear_tokens, self.linear_seconds), (self.decode_rows, self.decode_seconds))
        tables = [(self.attention_queries, self.attention_seconds)]
        if self.decode_attention:
            tables.append((self.decode_rows, self.decode_attention))
        if any(len(points) != len(times) for points, times in pairs) or any(
            [len(self.attention_contexts)] * len(rows) != [len(row) for row in table] for rows, table in tables
        ):
            raise ValueError(f"cost profile of {self.model} on {self.device}: points and times differ in number")
        points = (self.linear_tokens, self.attention_queries, self.attention_contexts)
        if not all(points) or any(
            first >= then for row in (*points, self.decode_rows) for first, then in pairwise(row)
        ):
            raise ValueError(f"cost profile of {self.model} on {self.device}: points are missing or do not ascend")
        times = chain(self.linear_seconds, self.decode_seconds, *self.attention_seconds, *self.decode_attention)
        if not 0 <= self.deviation < inf:
            raise ValueError(f"cost profile of {self.model} on {self.device}: deviation is {self.deviation}")
        if not all(0 <= seconds < inf for seconds in times):
            raise ValueError(f"cost profile of {self.model} on {self.device}: a time is below 0 or not finite")
        if self.stage_shares and (min(self.stage_shares) <= 0 or abs(sum(self.stage_shares) - 1) > SHARES_ROUNDED):
            raise ValueError(
                f"cost profile of {self.model} on {self.device}: the shares of its stages are {self.stage_shares}; "
                "each must be above 0, and their sum 1"
            )

    def shares(self, stages: int) -> tuple[float, ...]:
        """Each stage's share of a step's time. Raises ValueError if `stages` is not the number of `stage_shares`."""
        if self.stage_shares and len(self.stage_shares) != stages:
            raise ValueError(
                f"the pipeline has {stages} stages, and the cost profile of {self.model} on {self.device} has "
                f"{len(self.stage_shares)}"
            )
        return self.stage_shares or (1 / stages,) * stages

    def decode_only(self, rows: int) -> float:
        """Seconds of everything but attention in a step of only `rows` decodes.

        Beyond the last point the time grows as that of linear layers does, which are measured further. It cannot follow
        the slope between the last two points: that is the difference of two close times, and where both are padded to
        one size, there is none.
        """
        if not (self.decode_rows and rows):
            return self.linear(rows)
        most, last = self.decode_rows[-1], self.decode_seconds[-1]
        if rows <= most:
            return interpolate(self.decode_rows, self.decode_seconds, rows)
        between = [at for at in self.linear_tokens if most < at < rows]
        return last + max(0.0, *(self.linear(at) - self.linear(most) for at in (*between, rows)))

    def linear(self, tokens: int) -> float:
        """Seconds of everything but attention in a step of `tokens` query tokens; 0 for no tokens.

        Beyond the last point the time grows in proportion to the tokens. It cannot follow the slope between the last
        two points, because steps may be padded to one size, and those points are then level.
        """
        most = self.linear_tokens[-1]
        if tokens > most:
            return self.linear_seconds[-1] * tokens / most
        return interpolate(self.linear_tokens, self.linear_seconds, tokens) if tokens else 0.0

    def stair(self, tokens: int) -> tuple[int, int]:
        """The smallest and the largest measured step that takes as long as one of `tokens`, attention apart.

        Both are `tokens` where the time rises on both sides.
        """
        points = zip(self.linear_tokens, self.linear_seconds, strict=True)
        level = self.linear(tokens)
        same = [tokens, *(count for count, seconds in points if seconds == level)]
        return min(same), max(same)

    def attention(self, query: int, context: int) -> float:
        """Seconds that one segment's attention adds: `query` tokens that end at position `context`.

        A segment longer than any measured one is priced as the longest measured one with the same ratio of query to
        context, times the ratio of their (query, position) pairs. The last points cannot be extrapolated, because their
        segments are no longer than their context.
        """
        longest = self.attention_queries[-1]
        if query > longest:
            share = longest / query
            return self.attention(longest, round(context * share)) / share**2
        rows = [interpolate(self.attention_contexts, row, context) for row in self.attention_seconds]
        return interpolate(self.attention_queries, rows, query)

    def decode(self, rows: int, context: int) -> float:
        """Seconds that the attention of one decode at position `context` adds, if the step holds `rows` decodes.

        Among more decodes than were measured, it takes as long as among the most that were. The slope between the last
        two points would lead below 0, because decodes share a device better the more of them there are.
        """
        if not self.decode_attention:
            return self.attention(1, context)
        by_rows = [interpolate(self.attention_contexts, row, context) for row in self.decode_attention]
        return interpolate(self.decode_rows, by_rows, min(rows, self.decode_rows[-1]))

    def step(self, segments: Iterable[tuple[int, int]]) -> float:
        """Seconds of a step of (query, context) segments."""
        pairs = list(segments)
        tokens = sum(query for query, _ in pairs)
        decodes = [context for query, context in pairs if query == 1]
        rest = self.decode_only(tokens) if tokens == len(pairs) else self.linear(tokens)
        rest += sum(self.decode(len(decodes), context) for context in decodes)
        return rest + sum(self.attention(query, context) for query, context in pairs if query > 1)

    def slower(self, decodes: float, others: float) -> CostModel:
        """A copy in which steps of only decodes take `decodes` times as long, and all other steps `others` times."""

        def times(factor: float, row: tuple[float, ...]) -> tuple[float, ...]:
            return tuple(factor * seconds for seconds in row)

        return replace(
            self,
            linear_seconds=times(others, self.linear_seconds),
            attention_seconds=tuple(times(others, row) for row in self.attention_seconds),
            decode_seconds=times(decodes, self.decode_seconds),
            decode_attention=tuple(times(decodes, row) for row in self.decode_attention),
        )

    def predictor(self) -> Predictor:
        """A Predictor with the predictions of this model."""
        return Predictor(self)

    def recompute(self, chunk: int, position: int) -> float:
        """Seconds that computing `chunk` tokens up to `position` again adds to a full step: Cost(l) = attention + c.

        It differs from the Cost(l) of Pensieve §4.3.1 in the constant c. Here c is the chunk's share of the linear
        layers of a full step, because recomputed tokens run in one step with others. The paper seems to profile a chunk
        of 32 tokens alone (its Fig. 4), whose non-attention cost is higher. So position weighs more here than in the
        paper.
        """
        full = self.linear_tokens[-1]
        return self.attention(chunk, position) + self.linear(full) * chunk / full


@dataclass(frozen=True, slots=True)
class PaddedCost(CostModel):
    """The cost model of an unmodified model on padded rows: a step is several forwards, each with its own launch.

    The points are those of CostModel, measured on padded rows. `linear_seconds` is the time of a forward of one
    prompt's chunk. `decode_attention` is the time that each row adds to a batch of a given width, whatever the row's
    own length.
    """

    @classmethod
    def of(cls, cost: CostModel) -> PaddedCost:
        """A PaddedCost with the points of `cost`, which must be measured on padded rows."""
        return cls(**{each.name: getattr(cost, each.name) for each in fields(cost)})

    def forward(self, rows: int, query: int, context: int) -> float:
        """Seconds of a forward of `rows` rows, padded to `query` tokens each. The batch is then `context` wide."""
        if query == 1:
            return self.decode_only(rows) + rows * self.decode(rows, context)
        return self.linear(rows * query) + rows * self.attention(query, context)

    def step(self, segments: Iterable[tuple[int, int]]) -> float:
        """Seconds of a step of (query, context) segments: the decodes share one forward, each prompt has its own."""
        pairs = list(segments)
        decodes = [context for query, context in pairs if query == 1]
        seconds = self.forward(len(decodes), 1, max(decodes)) if decodes else 0.0
        return seconds + sum(self.forward(1, query, context) for query, context in pairs if query > 1)

    def predictor(self) -> PaddedPredictor:
        return PaddedPredictor(self)


class Predictor:
    """Computes a CostModel's predictions from remembered times, in microseconds for a step of hundreds of segments."""

    def __init__(self, cost: CostModel) -> None:
        self.cost = cost
        self._linear: dict[int, float] = {}
        self._decode_only: dict[int, float] = {}
        self._rows = cost.decode_rows if cost.decode_attention else (1,)
        self._decode: tuple[list[float], ...] = tuple([] for _ in self._rows)
        """For each entry of `_rows`, the seconds that one decode adds, by context. Filled in when first needed."""

    def linear(self, tokens: int) -> float:
        """Seconds of everything but attention in a step."""
        seconds = self._linear.get(tokens)
        if seconds is None:
            seconds = self._linear[tokens] = self.cost.linear(tokens)
        return seconds

    def mixed(self, decodes: int, tokens: int) -> float:
        """Seconds of everything but attention in a step of `decodes` decodes and `tokens` tokens of prompts."""
        return self.linear(decodes + tokens)

    def decodes(self, contexts: list[int]) -> float:
        """Seconds of the attention of a step's decodes. `contexts` has the length of each, with the new token."""
        rows, counts = len(contexts), self._rows
        right = bisect_right(counts, rows)
        if right in (0, len(counts)):
            return self._added(max(0, right - 1), contexts)
        left = right - 1
        share = (rows - counts[left]) / (counts[right] - counts[left])
        fewer = self._added(left, contexts)
        return fewer + share * (self._added(right, contexts) - fewer) if share else fewer

    def decode(self, rows: int, context: int) -> float:
        """Seconds that one decode's attention adds among `rows`, priced at the next larger measured number of rows."""
        return self._added(min(bisect_left(self._rows, rows), len(self._rows) - 1), [context])

    def _added(self, index: int, contexts: list[int]) -> float:
        """Seconds that decodes of these contexts add, each priced as one of `_rows[index]` decodes."""
        known = self._decode[index]
        try:
            return sum(map(known.__getitem__, contexts))
        except IndexError:
            self._extend(index, max(2 * len(known), 1 + max(contexts)))
            return sum(map(known.__getitem__, contexts))

    def _extend(self, index: int, length: int) -> None:
        """Fill in the time that a decode adds at every context below `length`, linearly between measured points."""
        cost, known, rows = self.cost, self._decode[index], self._rows[index]
        for stop in (*cost.attention_contexts, length):
            first, last = len(known), max(stop, len(known) + 1)
            start, end = cost.decode(rows, first), cost.decode(rows, last)
            slope = (end - start) / (last - first)
            known.extend(start + slope * step for step in range(min(last, length) - first))
            if len(known) >= length:
                return

    def chunk(self, start: int, stop: int) -> float:
        """Seconds of the attention of the segment [start, stop)."""
        return self.cost.attention(stop - start, stop)

    def segments(self, spans: Iterable[tuple[int, int]]) -> float:
        """Seconds of a step that computes these [start, stop) segments."""
        tokens, seconds, contexts = 0, 0.0, []
        for start, stop in spans:
            tokens += stop - start
            if stop - start == 1:
                contexts.append(stop)
            else:
                seconds += self.chunk(start, stop)
        rest = self._decodes_alone(tokens) if tokens == len(contexts) else self.linear(tokens)
        return rest + seconds + self.decodes(contexts)

    def drafted(self, tokens: int, contexts: list[int]) -> float:
        """Seconds of a step that decodes these contexts and verifies drafts: `tokens` in all, including drafted ones.

        It costs as much as a step of `tokens` decodes, but the tokens of one draft read their context only once.
        """
        seconds, rows = self._decodes_alone(tokens), self.cost.decode_rows
        if rows and tokens > rows[-1]:
            seconds = max(self._decodes_alone(rows[-1]), self.linear(tokens))
        return seconds + (self.decodes(contexts) if contexts else 0.0)

    def _decodes_alone(self, rows: int) -> float:
        seconds = self._decode_only.get(rows)
        if seconds is None:
            seconds = self._decode_only[rows] = self.cost.decode_only(rows)
        return seconds


class PaddedPredictor(Predictor):
    """Computes a PaddedCost's predictions from remembered times.

    Each chunk has its own forward; all decodes share one.
    """

    def mixed(self, decodes: int, tokens: int) -> float:
        """Seconds of everything but attention in the forward of `decodes` rows. `chunk` gives the time of prompts."""
        return self._decodes_alone(decodes) if decodes else 0.0

    def decodes(self, contexts: list[int]) -> float:
        """Seconds of the attention of a batch of rows, all as wide as the longest of these contexts."""
        return super().decodes([max(contexts)] * len(contexts)) if contexts else 0.0

    def chunk(self, start: int, stop: int) -> float:
        """Seconds of the forward that computes [start, stop) of one prompt."""
        return self.linear(stop - start) + self.cost.attention(stop - start, stop)

    def segments(self, spans: Iterable[tuple[int, int]]) -> float:
        """Seconds of a step with one forward for its decodes, and one for each other segment."""
        seconds, contexts = 0.0, []
        for start, stop in spans:
            if stop - start == 1:
                contexts.append(stop)
            else:
                seconds += self.chunk(start, stop)
        return seconds + self.mixed(len(contexts), 0) + self.decodes(contexts)


def interpolate(points: Sequence[int], values: Sequence[float], at: float) -> float:
    """Interpolate linearly between ascending points: constant below the first, extrapolated beyond the last.

    Beyond the last point values never fall: a larger size that took less time was measured with an error.
    """
    if at <= points[0] or len(points) == 1:
        return values[0]
    right = min(bisect_right(points, at), len(points) - 1)
    left = right - 1
    share = (at - points[left]) / (points[right] - points[left])
    value = values[left] + share * (values[right] - values[left])
    return value if at <= points[right] else max(values[right], value)
