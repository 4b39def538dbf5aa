"""The CostModel: the one place where hardware enters policy. Times in seconds, measured per model and device.

A step costs its linear layers by token count, plus its attention segment by segment by query length and context.
Both are measured at powers of two and interpolated between them (Pensieve §4.3.1, Sarathi-Serve §4.3).
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, pairwise
from math import inf
from typing import Any

HEAVY = 512
"""Query tokens from which on a step is arithmetic above all, and takes the most power."""


@dataclass(frozen=True, slots=True)
class Burst:
    """How a device computes behind lighter work: it has power in hand, and is faster until its limit holds it back.

    Raises ValueError for what cannot be.
    """

    share: float = 1.0
    """Of the time that a heavy step takes behind others like it, what it takes then."""
    seconds: float = 0.0
    """For so long, from a full reserve."""

    def __post_init__(self) -> None:
        if not 0 < self.share <= 1:
            raise ValueError(f"share of a burst is {self.share}; it must lie above 0 and be at most 1")
        if not 0 <= self.seconds < inf:
            raise ValueError(f"seconds of a burst are {self.seconds}; they must be at least 0 and finite")


@dataclass(frozen=True, slots=True)
class CostModel:
    """Predicts the time of a step from measured points.

    `linear_tokens` (ascending) and `linear_seconds` belong together; `attention_seconds[i][j]` is the time that a
    segment of `attention_queries[i]` query tokens adds at a context of `attention_contexts[j]` positions (all layers).
    `decode_seconds` are the same of a step of `decode_rows` decodes and nothing else, for which an executor may have a
    shorter way (a captured graph); where they were not measured it is like any other step. `decode_attention[i][j]` is
    what each of `decode_rows[i]` decodes adds at `attention_contexts[j]`, among others of other lengths: few of them
    leave a device part idle, and unlike ones share less work than a segment among its equals. All of it is the pace
    that holds; `burst` says how much faster the first heavy steps behind lighter ones are.
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

    def decode_only(self, rows: int) -> float:
        """Time of everything but attention in a step of `rows` decodes alone."""
        return (
            interpolate(self.decode_rows, self.decode_seconds, rows) if self.decode_rows and rows else self.linear(rows)
        )

    def linear(self, tokens: int) -> float:
        """Time of everything in a step but attention, for `tokens` query tokens in all; 0 for none.

        Past the last point it grows in proportion: the last points may be level, as steps are padded to the same size.
        """
        most = self.linear_tokens[-1]
        if tokens > most:
            return self.linear_seconds[-1] * tokens / most
        return interpolate(self.linear_tokens, self.linear_seconds, tokens) if tokens else 0.0

    def attention(self, query: int, context: int) -> float:
        """Time that one segment's attention adds: `query` tokens that end at position `context`.

        A segment longer than any that was measured takes as much more as it has more pairs of query and position: the
        last points say nothing of it, as they hold segments that are cut to their context.
        """
        longest = self.attention_queries[-1]
        if query > longest:
            share = longest / query
            return self.attention(longest, round(context * share)) / share**2
        rows = [interpolate(self.attention_contexts, row, context) for row in self.attention_seconds]
        return interpolate(self.attention_queries, rows, query)

    def decode(self, rows: int, context: int) -> float:
        """Time that the attention of each of `rows` decodes adds that end at position `context`."""
        if not self.decode_attention:
            return self.attention(1, context)
        by_rows = [interpolate(self.attention_contexts, row, context) for row in self.decode_attention]
        return interpolate(self.decode_rows, by_rows, rows)

    def step(self, segments: Iterable[tuple[int, int]]) -> float:
        """Time of a step of (query, context) segments."""
        pairs = list(segments)
        tokens = sum(query for query, _ in pairs)
        decodes = [context for query, context in pairs if query == 1]
        rest = self.decode_only(tokens) if tokens == len(pairs) else self.linear(tokens)
        rest += sum(self.decode(len(decodes), context) for context in decodes)
        return rest + sum(self.attention(query, context) for query, context in pairs if query > 1)

    def slower(self, decodes: float, others: float) -> CostModel:
        """The same with steps of decodes alone `decodes` times as long, and all others `others` times."""

        def times(factor: float, row: tuple[float, ...]) -> tuple[float, ...]:
            return tuple(factor * seconds for seconds in row)

        return replace(
            self,
            linear_seconds=times(others, self.linear_seconds),
            attention_seconds=tuple(times(others, row) for row in self.attention_seconds),
            decode_seconds=times(decodes, self.decode_seconds),
            decode_attention=tuple(times(decodes, row) for row in self.decode_attention),
        )

    def recompute(self, chunk: int, position: int) -> float:
        """Time that computing `chunk` tokens that end at `position` again adds to a full step: Pensieve's Cost(l)."""
        full = self.linear_tokens[-1]
        return self.attention(chunk, position) + self.linear(full) * chunk / full

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> CostModel:
        """Read back what `dataclasses.asdict` gave.

        Raises ValueError for points that are missing, do not ascend or do not belong together, and for times that
        cannot be.
        """
        model = cls(
            model=str(data["model"]),
            device=str(data["device"]),
            linear_tokens=tuple(data["linear_tokens"]),
            linear_seconds=tuple(data["linear_seconds"]),
            attention_queries=tuple(data["attention_queries"]),
            attention_contexts=tuple(data["attention_contexts"]),
            attention_seconds=tuple(tuple(row) for row in data["attention_seconds"]),
            decode_rows=tuple(data.get("decode_rows", ())),
            decode_seconds=tuple(data.get("decode_seconds", ())),
            decode_attention=tuple(tuple(row) for row in data.get("decode_attention", ())),
            burst=Burst(**data.get("burst", {})),
        )
        pairs = ((model.linear_tokens, model.linear_seconds), (model.decode_rows, model.decode_seconds))
        tables = [(model.attention_queries, model.attention_seconds)]
        if model.decode_attention:
            tables.append((model.decode_rows, model.decode_attention))
        if any(len(points) != len(times) for points, times in pairs) or any(
            [len(model.attention_contexts)] * len(rows) != [len(row) for row in table] for rows, table in tables
        ):
            raise ValueError(f"cost profile of {model.model} on {model.device}: points and times differ in number")
        points = (model.linear_tokens, model.attention_queries, model.attention_contexts)
        if not all(points) or any(
            first >= then for row in (*points, model.decode_rows) for first, then in pairwise(row)
        ):
            raise ValueError(f"cost profile of {model.model} on {model.device}: points are missing or do not ascend")
        times = chain(model.linear_seconds, model.decode_seconds, *model.attention_seconds, *model.decode_attention)
        if not all(0 <= seconds < inf for seconds in times):
            raise ValueError(f"cost profile of {model.model} on {model.device}: a time is below 0 or not finite")
        return model


class Reserve:
    """What a device has in hand of its burst: heavy steps use it up, and all other time gives as much of it back."""

    def __init__(self, burst: Burst) -> None:
        self._burst = burst
        self._left = burst.seconds

    def step(self, tokens: int, seconds: float, idle: float = 0.0) -> float:
        """Seconds of the next step, of so many query tokens: in the long run it takes `seconds`.

        It comes `idle` seconds behind the one before it.
        """
        burst = self._burst
        if not burst.seconds:
            return seconds
        left = min(burst.seconds, self._left + idle)
        if tokens < HEAVY:
            self._left = min(burst.seconds, left + seconds)
            return seconds
        fast = min(left, burst.share * seconds)
        self._left = left - fast
        return fast + seconds - fast / burst.share


class Predictor:
    """A CostModel that remembers: predicts steps of hundreds of segments in microseconds."""

    def __init__(self, cost: CostModel) -> None:
        self.cost = cost
        self._linear: dict[int, float] = {}
        self._decode_only: dict[int, float] = {}
        self._rows = cost.decode_rows if cost.decode_attention else (1,)
        self._decode: tuple[list[float], ...] = tuple([] for _ in self._rows)
        """By number of decodes, as in `_rows`, what each adds at a context."""

    def linear(self, tokens: int) -> float:
        """Seconds of everything in a step but attention."""
        seconds = self._linear.get(tokens)
        if seconds is None:
            seconds = self._linear[tokens] = self.cost.linear(tokens)
        return seconds

    def decodes(self, contexts: list[int]) -> float:
        """Seconds of the attention of decodes, one for each context (positions, the new one included)."""
        rows, counts = len(contexts), self._rows
        right = min(bisect_right(counts, rows), len(counts) - 1)
        if rows <= counts[0] or not right:
            return self._added(0, contexts)
        left = right - 1
        share = (rows - counts[left]) / (counts[right] - counts[left])
        fewer = self._added(left, contexts)
        return fewer + share * (self._added(right, contexts) - fewer) if share else fewer

    def _added(self, index: int, contexts: list[int]) -> float:
        """What decodes of these contexts add if they were as many as `_rows[index]`."""
        known = self._decode[index]
        try:
            return sum(map(known.__getitem__, contexts))
        except IndexError:
            self._extend(index, max(2 * len(known), 1 + max(contexts)))
            return sum(map(known.__getitem__, contexts))

    def _extend(self, index: int, length: int) -> None:
        """Know what a decode adds at all contexts below `length`, by straight lines from point to point."""
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
        """Seconds of a step that computes these [start, stop)."""
        tokens, seconds, contexts = 0, 0.0, []
        for start, stop in spans:
            tokens += stop - start
            if stop - start == 1:
                contexts.append(stop)
            else:
                seconds += self.chunk(start, stop)
        rest = self._decodes_alone(tokens) if tokens == len(contexts) else self.linear(tokens)
        return rest + seconds + self.decodes(contexts)

    def _decodes_alone(self, rows: int) -> float:
        seconds = self._decode_only.get(rows)
        if seconds is None:
            seconds = self._decode_only[rows] = self.cost.decode_only(rows)
        return seconds


def interpolate(points: Sequence[int], values: Sequence[float], at: float) -> float:
    """Piecewise linear through (points, values), points ascending; held below the first, extended past the last."""
    if at <= points[0] or len(points) == 1:
        return values[0]
    right = min(bisect_right(points, at), len(points) - 1)
    left = right - 1
    share = (at - points[left]) / (points[right] - points[left])
    return values[left] + share * (values[right] - values[left])
