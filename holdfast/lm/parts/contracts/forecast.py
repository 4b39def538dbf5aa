"""Forecast: when accepted sequences get their tokens at the latest, by the cost model."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import inf
from typing import NamedTuple

from holdfast.core.cost import Predictor

CONTEXT_GRAIN = 128
"""Contexts are priced as the next multiple of this number of positions, so that few prices have to be computed."""
MOST_PRICES = 1 << 16
"""Most prices of chunks that are remembered."""
WINDOW = 4
"""A forecast counts decodes anew after this many steps, then after four times as many, and so on."""


class Stream(NamedTuple):
    """An accepted sequence as a forecast sees it. Times are in seconds on the scheduler's clock."""

    missing: int
    """Tokens of the prompt that no plan computes yet; 0: it decodes."""
    context: int
    """Positions of the prompt; for a stream that decodes, all positions that are planned."""
    remaining: int
    """Tokens of the answer that no plan samples yet."""
    due: float = inf
    """Time by which its first token must come."""
    tbt: float = inf
    """Longest time between two tokens, in seconds."""
    complete: float = inf
    """Time by which its last token must come."""


class Prices:
    """Predicted seconds of the pieces of a step, rounded up so that a smaller step never has a higher price."""

    def __init__(self, predictor: Predictor, *, tile: int, ceiling: int) -> None:
        """Steps are computed in whole tiles of `tile` tokens; a step has at most `ceiling` tokens."""
        self.tile, self.ceiling = tile, ceiling
        self._predictor = predictor
        self._chunks: dict[tuple[int, int], float] = {}

    def decodes(self, contexts: list[int]) -> float:
        """Seconds of the attention of decodes with these contexts."""
        return self._predictor.decodes(contexts) if contexts else 0.0

    def linear(self, rows: int, tokens: int) -> float:
        """Seconds of everything but attention in a step of `rows` decodes and `tokens` tokens of prompts."""
        predictor = self._predictor
        alone = max(predictor.mixed(rows, 0), predictor.drafted(rows, [])) if rows else 0.0
        whole = -(-(rows + tokens) // self.tile) * self.tile
        return max(alone, predictor.mixed(rows, whole - rows)) if tokens else alone

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
        prices, rows, held, attention = self._prices, self._rows, self.tokens, self._attention
        most = min(stop - start, prices.ceiling - rows - held)
        if most <= 0:
            return 0

        def fits(tokens: int) -> bool:
            seconds = prices.linear(rows, held + tokens) + attention + prices.chunk(start, start + tokens)
            return seconds <= limit

        low = most
        if not fits(most):
            low, high = 0, most - 1
            while low < high:
                middle = (low + high + 1) // 2
                low, high = (middle, high) if fits(middle) else (low, middle - 1)
        if low:
            self.tokens = held + low
            self._attention = attention + prices.chunk(start, start + low)
        return low


@dataclass(frozen=True, slots=True)
class Outlook:
    """The result of a forecast."""

    firsts: tuple[float, ...]
    """Latest time of the first token of each stream that lacks a part of its prompt, in their order.

    Shorter than their number if a step has no room for the next one.
    """
    decodes: bool
    """Whether every step has room for the decodes."""
    steps: int
    """Number of steps that the prompts take."""


class Forecast:
    """Follows the steps of accepted sequences alone, each as long as it may become.

    The streams that lack a part of their prompts are computed in their order, as far as each step has room next to its
    decodes. A step that others wait for is as long as the bound, whatever it holds. So the real steps are never later,
    as long as they hold no other work while a prompt of an accepted sequence is left: at the end of each step at least
    as many prompt tokens are computed. The number of decodes and their contexts are upper limits, too: they count from
    the first step in which a stream could decode.
    """

    def __init__(self, prices: Prices) -> None:
        self.prices = prices

    def follow(
        self, pending: Sequence[Stream], decoding: Sequence[Stream], *, start: float, bound: float, factor: float
    ) -> Outlook:
        """When the first tokens of the `pending` streams come, in their order, if steps begin at `start`.

        A step is predicted to take `factor` times its price, and takes at most `bound` seconds.
        """
        limit, at = bound / factor, start
        firsts: list[float] = []
        ended: list[int] = []
        index = step = edge = 0
        left = pending[0].missing if pending else 0
        rows, attention = 0, 0.0
        while index < len(pending):
            if step >= edge:
                edge = max(WINDOW, 4 * step)
                rows, attention = self.load(pending, decoding, ended, step, edge)
                if Room(self.prices, rows, attention).seconds > limit:
                    return Outlook(tuple(firsts), False, step)
            room, before = Room(self.prices, rows, attention), index
            while index < len(pending):
                stream = pending[index]
                left -= room.take(stream.context - left, stream.context, limit)
                if left:
                    break
                index += 1
                left = pending[index].missing if index < len(pending) else 0
            if not room.tokens:
                return Outlook(tuple(firsts), True, step)
            at += bound if index < len(pending) else room.seconds * factor
            firsts += [at] * (index - before)
            ended += [step] * (index - before)
            step += 1
            if index < len(pending) and at > pending[index].due:
                return Outlook(tuple(firsts), True, step)
        return Outlook(tuple(firsts), self._carries(pending, decoding, ended, step, limit), step)

    def load(
        self, pending: Sequence[Stream], decoding: Sequence[Stream], ended: Sequence[int], step: int, edge: int
    ) -> tuple[int, float]:
        """Most decodes in steps [step, edge), and seconds of their attention. `ended`: steps that end the prompts."""
        contexts = [
            stream.context + min(stream.remaining, edge) for stream in decoding if stream.remaining > step
        ]
        reach, total = self.prices.ceiling * edge, 0
        for index, stream in enumerate(pending):
            total += stream.missing
            if total > reach:
                break
            if index >= len(ended) or ended[index] + stream.remaining > step:
                contexts.append(stream.context + min(stream.remaining, edge))
        return len(contexts), self.prices.decodes(contexts)

    def _carries(
        self, pending: Sequence[Stream], decoding: Sequence[Stream], ended: Sequence[int], step: int, limit: float
    ) -> bool:
        """Whether the decodes alone end within `limit` seconds in every step from `step` on."""
        last = max(
            max((stream.remaining for stream in decoding), default=0),
            max((end + stream.remaining for end, stream in zip(ended, pending, strict=True)), default=0),
        )
        while step < last:
            edge = max(WINDOW, 4 * step)
            rows, attention = self.load(pending, decoding, ended, step, edge)
            if Room(self.prices, rows, attention).seconds > limit:
                return False
            step = edge
        return True


def allowed_pace(pending: Iterable[tuple[Stream, float]], decoding: Iterable[Stream], start: float) -> float:
    """Most seconds of each step in which all streams complete in time. `pending` has the times of first tokens."""
    waits = [
        (stream.complete - first) / (stream.remaining - 1) if stream.remaining > 1 else inf
        for stream, first in pending
        if stream.complete < inf
    ]
    waits += [
        (stream.complete - start) / stream.remaining if stream.remaining else inf
        for stream in decoding
        if stream.complete < inf
    ]
    return min(waits, default=inf)
