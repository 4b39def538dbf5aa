"""AnswerLengths: how long answers are, learned from those that ended, by tenant and length of the prompt."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from math import log2

BINS_PER_OCTAVE = 8
"""Bins of answers' lengths for each doubling: the upper edge of a bin is at most 9% above its lengths."""
NUM_BINS = 20 * BINS_PER_OCTAVE + 1
"""Bins for answers of up to a million tokens. The last one has all longer ones."""
HALF_LIFE = 512
"""Number of answers after which an older one counts half."""
LEAST = 32.0
"""Least weight of the answers that a quantile is read from. With fewer, those of a wider class are used."""
LEAST_TAIL = 2.0
"""Least weight of the answers that are at least as long as a quantile."""
MOST_CLASSES = 1024
"""Most classes that are remembered. The class used longest ago is forgotten first."""

EDGES = tuple(int(2 ** (index / BINS_PER_OCTAVE)) for index in range(NUM_BINS))
"""Largest length of each bin, in tokens."""


def bin_of(length: int) -> int:
    """The first bin whose edge is at least this length."""
    guess = max(0, int(BINS_PER_OCTAVE * log2(max(1, length))) - 1)
    while guess < NUM_BINS - 1 and EDGES[guess] < length:
        guess += 1
    return guess


class Lengths:
    """The lengths of a class of answers: a histogram that forgets.

    Answers that were cut by their maximum are counted apart, since they would have been longer. The survival function
    is estimated from both (Kaplan and Meier, Nonparametric Estimation from Incomplete Observations, 1958).
    """

    def __init__(self) -> None:
        self._ended = [0.0] * NUM_BINS
        """Weight of the answers that ended by themselves, by bin."""
        self._cut = [0.0] * NUM_BINS
        """Weight of the answers that were cut, by bin."""
        self._newest = 1.0
        """Weight of the next answer. It grows, so that older ones count less."""
        self._total = 0.0

    @property
    def weight(self) -> float:
        """Weight of all answers, if the newest one has weight 1."""
        return self._total / self._newest

    def add(self, length: int, *, cut: bool) -> None:
        """Learn from an answer of this many tokens; `cut`: its maximum ended it."""
        (self._cut if cut else self._ended)[bin_of(length)] += self._newest
        self._total += self._newest
        self._newest *= 2 ** (1 / HALF_LIFE)
        if self._newest > 1e12:
            self._ended = [weight / self._newest for weight in self._ended]
            self._cut = [weight / self._newest for weight in self._cut]
            self._total, self._newest = self._total / self._newest, 1.0

    def quantile(self, share: float, above: int = 0) -> int | None:
        """A length that an answer of more than `above` tokens stays within, with this probability.

        None if too few answers were that long to say.
        """
        first = bin_of(above + 1)
        at_risk = sum(self._ended[first:]) + sum(self._cut[first:])
        left = 1.0
        for index in range(first, NUM_BINS - 1):
            if at_risk < LEAST_TAIL * self._newest:
                return None
            left *= 1 - self._ended[index] / at_risk
            at_risk -= self._ended[index] + self._cut[index]
            if left <= 1 - share:
                return EDGES[index]
        return None


class AnswerLengths:
    """The lengths of answers by tenant and by the prompt's length, to a power of two.

    A quantile is read from the narrowest class with enough answers: tenant and prompt's length, tenant, all.
    """

    def __init__(self, confidence: float) -> None:
        """`confidence` is the probability with which an answer is at most as long as `longest` says."""
        self._confidence = confidence
        self._classes: OrderedDict[tuple[str, int], Lengths] = OrderedDict()
        self._all = Lengths()

    def add(self, tenant: str, prompt: int, length: int, *, cut: bool) -> None:
        """Learn from an answer of `length` tokens to a prompt of `prompt` tokens; `cut`: its maximum ended it."""
        self._all.add(length, cut=cut)
        for name in self._names(tenant, prompt):
            if name not in self._classes:
                self._classes[name] = Lengths()
            self._classes[name].add(length, cut=cut)
            self._classes.move_to_end(name)
        while len(self._classes) > MOST_CLASSES:
            self._classes.popitem(last=False)

    def longest(self, tenant: str, prompt: int, most: int, above: int = 0) -> int:
        """A length that an answer of more than `above` tokens stays within, with the confidence; at most `most`."""
        known = [self._classes[name] for name in self._names(tenant, prompt) if name in self._classes]
        for lengths in (*known, self._all):
            if lengths.weight >= LEAST and (length := lengths.quantile(self._confidence, above)) is not None:
                return min(most, max(length, above + 1))
        return most

    @staticmethod
    def _names(tenant: str, prompt: int) -> Sequence[tuple[str, int]]:
        """The classes of an answer, the narrowest first."""
        return (tenant, prompt.bit_length()), (tenant, -1)
