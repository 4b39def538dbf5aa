"""StreamLimit: whether a latency target leaves time for one more stream next to those that run."""

from __future__ import annotations

from collections.abc import Callable, Collection
from math import ceil

from holdfast.core.cost import Predictor
from holdfast.core.types import BATCH_CLASS
from holdfast.lm.scheduler.builder import StepBuilder
from holdfast.lm.scheduler.entries import Entry

FIRST_GUESS = 1024.0
"""Assumed mean length of answers in tokens before any has ended."""
GAIN = 1 / 32
"""Weight of one answer in the mean length of answers."""
LOOKS = 4
"""Number of later moments at which a limit looks, besides now: evenly spread until the last stream is expected to end.
"""
AGAIN = 4
"""Number of steps after which a refused sequence is looked at again, though no other has ended."""


class StreamLimit:
    """Says which requests have to wait, because every stream would be late if they joined.

    A step must have time for a token of each stream, and, while a prompt is computed, for the last tile of it. Streams
    become more expensive as their contexts grow, and end. So the limit looks at some moments ahead: with the streams
    that are expected to run then, each with the context that it will have. An answer is expected to become as long as
    the latest ones were on average. One that has become as long is expected to go on for half as much. None becomes
    longer than its own limit.

    Batch requests do not count, because they decode only in time that is left.
    """

    def __init__(self, predictor: Predictor, *, tile: int, stages: int = 1, padded: bool = False) -> None:
        """`tile` in tokens. In a pipeline of several `stages`, a step has its share of the streams.

        `padded`: each row costs as much as the longest.
        """
        self._predictor, self._tile, self._stages, self._padded = predictor, tile, stages, padded
        self.mean_answer = FIRST_GUESS
        """Mean length of answers in tokens; of the latest 32, roughly."""
        self._steps: tuple[int, ...] = ()
        """Number of tokens from now until each moment that is looked at; empty until a step asks."""
        self._counts: list[int] = []
        """Number of streams at each moment."""
        self._contexts: list[int] = []
        """Sum of the streams' contexts at each moment; on padded rows the longest context."""
        self._longest = 0
        """Length of the longest prompt that is being computed."""
        self._refused: Entry | None = None
        """The sequence that was refused last."""
        self._refused_beside = 0
        """Number of sequences that ran then."""
        self._refused_until = 0
        """Number of the step that looks at it again."""

    def ended(self, entry: Entry) -> None:
        """Learn from a stream that has ended."""
        sequence = entry.sequence
        generated = len(sequence.tokens) - len(sequence.request.prompt)
        if generated > 0 and sequence.request.priority < BATCH_CLASS:
            self.mean_answer += GAIN * (generated - self.mean_answer)

    def begin(self) -> None:
        """Begin a step: forget the streams of the last one."""
        self._steps = ()

    def allows(self, entry: Entry, step: StepBuilder, fits: Callable[[float], bool]) -> bool:
        """Whether a waiting sequence may join the streams of a step. It counts as one of them from then on.

        `fits` says whether a step of these predicted seconds meets the target. The first stream always may, and so
        may one that is late even if it is alone: waiting would not help it.
        """
        if entry.sequence.request.priority >= BATCH_CLASS:
            return True
        running = len(step.running) + len(step.swapping_in)
        if entry is self._refused and running >= self._refused_beside and step.number < self._refused_until:
            return False
        if not self._steps:
            self._count([*step.resident], entry)
        length = entry.sequence.length
        prompt = max(self._longest, length)
        if (
            self._counts[0]
            and not self._fits_beside(entry, prompt, fits)
            and fits(self._seconds(1, length + 1, length))
        ):
            self._refused, self._refused_beside, self._refused_until = entry, running, step.number + AGAIN
            return False
        self._add(entry)
        self._longest = prompt
        return True

    def _count(self, entries: Collection[Entry], first: Entry) -> None:
        """Count these sequences at each moment, until they and the `first` that may join have ended."""
        self._longest = 0
        last = max(self._left(entry) for entry in (first, *entries)) - 1
        self._steps = tuple(ceil(max(0.0, last) * look / LOOKS) for look in range(LOOKS + 1))
        self._counts, self._contexts = [0] * len(self._steps), [0] * len(self._steps)
        for entry in entries:
            if entry.sequence.request.priority < BATCH_CLASS:
                self._add(entry)
            if not entry.decoding:
                self._longest = max(self._longest, entry.sequence.length)

    def _fits_beside(self, entry: Entry, prompt: int, fits: Callable[[float], bool]) -> bool:
        """Whether a step at each moment meets the target with this sequence as one more stream.

        `prompt` is the length of the longest prompt that is computed meanwhile.
        """
        length, left = entry.sequence.length, self._left(entry)
        for index, steps in enumerate(self._steps):
            if index and steps >= left:
                return True
            count, context = self._counts[index] + 1, length + steps + 1
            of_all = self._contexts[index]
            of_each = max(of_all, context) if self._padded else (of_all + context) // count
            # A step computes a tile of a prompt at least, so no prompt takes more steps than it has tiles.
            if not fits(self._seconds(count, of_each, prompt if steps * self._tile < prompt else 0)):
                return False
        return True

    def _left(self, entry: Entry) -> float:
        """Number of tokens that a sequence is expected to get from now on."""
        sequence, mean = entry.sequence, self.mean_answer
        expected = max(mean - (sequence.length - len(sequence.request.prompt)), mean / 2)
        return min(expected, entry.limit - sequence.length)

    def _add(self, entry: Entry) -> None:
        length, left = entry.sequence.length, self._left(entry)
        for index, steps in enumerate(self._steps):
            if index and steps >= left:
                return
            self._counts[index] += 1
            context = length + steps + 1
            of_all = self._contexts[index]
            self._contexts[index] = max(of_all, context) if self._padded else of_all + context

    def _seconds(self, streams: int, context: int, prompt: int) -> float:
        """Predicted seconds of a step with its share of these streams, and with the last tile of such a prompt."""
        predictor, rows = self._predictor, ceil(streams / self._stages)
        tile = min(self._tile, prompt)
        seconds = predictor.mixed(rows, tile) + (predictor.chunk(prompt - tile, prompt) if tile else 0.0)
        return seconds + predictor.decodes([context] * rows)
