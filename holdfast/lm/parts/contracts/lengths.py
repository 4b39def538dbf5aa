"""AnswerLengths: how long answers are, learned from those that ended, by tenant and length of the prompt."""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from math import log2, sqrt

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
LEAST_POOLED = 8.0
"""Least weight of all answers from which survival functions are estimated. Their error counts in every sum."""
PRIOR = 8.0
"""Weight of the answers of the next wider class that a class counts in each bin next to its own."""
MOST_CLASSES = 1024
"""Most classes that are remembered. The class used longest ago is forgotten first."""

EDGES = tuple(int(2 ** (index / BINS_PER_OCTAVE)) for index in range(NUM_BINS))
"""Largest length of each bin, in tokens."""


def bin_of(length: int) -> int:
    """The first bin whose edge is at least this length."""
    return BINS[length] if length < len(BINS) else find_bin(length)


def find_bin(length: int) -> int:
    """The first bin whose edge is at least this length, searched for."""
    guess = max(0, int(BINS_PER_OCTAVE * log2(max(1, length))) - 1)
    while guess < NUM_BINS - 1 and EDGES[guess] < length:
        guess += 1
    return guess


BINS = tuple(map(find_bin, range(1 << 13)))
"""The bins of all short lengths."""


def cell_of(step: int) -> int:
    """The cell of GRID that a step lies in: the first 4 steps, the next 4, the next 8, and so on."""
    return max(0, step.bit_length() - 2)


GRID = tuple(4 << cell >> 1 if cell else 0 for cell in range(20))
"""First step of each cell; the last one begins after a million steps."""


class Survival:
    """How likely answers of a class go on, estimated at one time."""

    def __init__(self, shares: Sequence[float], weights: Sequence[float]) -> None:
        """For each bin, the share of all answers that reach it, and the weight of those that this is known from."""
        self._shares, self._weights = shares, weights
        self._chances: dict[int, tuple[tuple[float, float], ...]] = {}

    def chance(self, so_far: int, steps: int) -> float:
        """Probability that an answer of more than `so_far` tokens has more than `so_far + steps`."""
        return self._shares[bin_of(so_far + steps + 1)] / self._shares[bin_of(so_far + 1)]

    def most_chance(self, length: int) -> float:
        """Probability that an answer has more than `length` tokens, and the standard error of this estimate.

        The error is common to all answers of a class, so it does not become less in a sum over many.
        """
        share = self.chance(0, length)
        return min(1.0, share + sqrt(share * (1 - share) / self._weights[0]))

    def chances(self, first: int) -> tuple[tuple[float, float], ...]:
        """For each cell of GRID, the probability p that an answer that has reached bin `first` goes on for as long.

        Each is given with p (1 - p).
        """
        known = self._chances.get(first)
        if known is None:
            shares, after = self._shares, EDGES[first - 1] + 1 if first else 1
            chances = [shares[bin_of(after + steps)] / shares[first] for steps in GRID]
            known = self._chances[first] = tuple([(chance, chance * (1 - chance)) for chance in chances])
        return known

    def hazard(self, first: int) -> float:
        """Share of the answers that reach bin `first` that end in it; 0 in the last bin."""
        return 1 - self._shares[first + 1] / self._shares[first] if first + 1 < NUM_BINS else 0.0

    def weight_above(self, first: int) -> float:
        """Weight of the known answers that reached bin `first`."""
        return self._weights[first]


CERTAIN = Survival((1.0,) * NUM_BINS, (1.0,) * NUM_BINS)
"""The survival of answers of which nothing is known: each is as long as it is allowed to be."""


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
        self._open = [0] * NUM_BINS
        """Number of answers that go on, by the first bin that they may end in."""
        self._survival: Survival | None = None
        """The survival function of the latest `see`; None: it was not asked for yet."""

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

    def see(self, lengths: Iterable[int]) -> None:
        """Base the survival function on all that is known now. `lengths`: tokens so far of answers that go on.

        An answer that goes on was at risk of ending at each of its tokens. Without it, the answers that end first would
        make all look short.
        """
        self._open = [0] * NUM_BINS
        for length in lengths:
            self._open[bin_of(length + 1)] += 1
        self._survival = None

    def survival(self, wider: Survival | None = None) -> Survival:
        """The survival function, estimated when it is first asked for after `see`.

        `wider` is that of the next wider class. It knows more of the longest answers than a class of few.
        """
        if self._survival is None:
            self._survival = self._estimate() if wider is None else self._estimate_within(wider)
        return self._survival

    def _estimate_within(self, wider: Survival) -> Survival:
        """The survival function of these answers, and of PRIOR ones in each bin that end as in a wider class."""
        shares, weights, left, newest = [], [], 1.0, self._newest
        at_risk = self._total + newest * sum(self._open)
        trust = PRIOR / (PRIOR + at_risk / newest)
        for index, (ended, cut, going) in enumerate(zip(self._ended, self._cut, self._open, strict=True)):
            at_risk -= newest * going
            shares.append(left)
            weights.append(max(1.0, at_risk / newest + trust * wider.weight_above(index)))
            others = PRIOR * newest
            ending = others * wider.hazard(index)
            left *= 1 - (ended + ending) / (max(ended, at_risk) + others)
            at_risk -= ended + cut
        return Survival(tuple(shares), tuple(weights))

    def _estimate(self) -> Survival:
        """The survival function. Beyond the longest answers that are known, it stays as it is."""
        shares, weights, left, newest = [], [], 1.0, self._newest
        at_risk = self._total + newest * sum(self._open)
        for ended, cut, going in zip(self._ended, self._cut, self._open, strict=True):
            at_risk -= newest * going
            shares.append(left)
            weights.append(max(1.0, at_risk / newest))
            if at_risk >= LEAST_TAIL * newest:
                left *= 1 - ended / (at_risk + newest)  # one more may be longer than all of them
            at_risk -= ended + cut
        return Survival(tuple(shares), tuple(weights))

    def quantile(self, share: float, above: int = 0) -> int | None:
        """A length that an answer of more than `above` tokens stays within, with this probability.

        None if too few answers were that long to say.
        """
        first = bin_of(above + 1)
        at_risk = sum(self._ended[first:]) + sum(self._cut[first:]) + self._newest * sum(self._open[first:])
        left = 1.0
        for index in range(first, NUM_BINS - 1):
            at_risk -= self._newest * self._open[index]
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
        """`confidence` is the probability with which an answer is at most as long as `longest` says.

        With 1, nothing is learned: every answer may be as long as it is allowed to be.
        """
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
        for lengths in self._known(tenant, prompt, LEAST):
            if (length := lengths.quantile(self._confidence, above)) is not None:
                return min(most, max(length, above + 1))
        return most

    def survival(self, tenant: str, prompt: int) -> Survival:
        """How likely such answers go on, by the narrowest class that has any; CERTAIN if too few are known in all."""
        if self._confidence == 1 or self._all.weight < LEAST_POOLED:
            return CERTAIN
        survival = self._all.survival()
        for name in reversed(self._names(tenant, prompt)):
            if name in self._classes:
                survival = self._classes[name].survival(survival)
        return survival

    def see(self, going: Iterable[tuple[str, int, int]]) -> None:
        """Base survival functions on what is known now. `going`: tenant, prompt and tokens so far of open answers."""
        everyone: list[int] = []
        own = defaultdict[tuple[str, int], list[int]](list)
        for tenant, prompt, length in going:
            everyone.append(length)
            for name in self._names(tenant, prompt):
                own[name].append(length)
        self._all.see(everyone)
        for name, lengths in self._classes.items():
            lengths.see(own[name])

    def _known(self, tenant: str, prompt: int, least: float) -> Iterator[Lengths]:
        """The classes of an answer that have answers of this weight, the narrowest first."""
        own = [self._classes[name] for name in self._names(tenant, prompt) if name in self._classes]
        if self._confidence < 1:
            yield from (lengths for lengths in (*own, self._all) if lengths.weight >= least)

    @staticmethod
    def _names(tenant: str, prompt: int) -> Sequence[tuple[str, int]]:
        """The classes of an answer, the narrowest first."""
        return (tenant, prompt.bit_length()), (tenant, -1)
