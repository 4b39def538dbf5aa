"""Gaps: how long pauses take, learned by kind, and what it is worth to hold a state while one lasts.

A gap is the time from the end of a turn to the request that needs its state again. Ages of idle states and gaps are
counted in bins that grow by a constant factor, from a millisecond to a day.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Sequence
from functools import cached_property
from itertools import accumulate, pairwise
from operator import add, mul
from typing import NamedTuple, Protocol

BINS_PER_DOUBLING = 3
SHORTEST = 1e-3
"""End of the first bin in seconds."""
LONGEST = 86_400.0
"""A state that nobody needed for this many seconds is counted as never needed again."""
EDGES = (
    0.0,
    *(
        SHORTEST * 2 ** (number / BINS_PER_DOUBLING)
        for number in range(math.ceil(BINS_PER_DOUBLING * math.log2(LONGEST / SHORTEST)) + 1)
    ),
)
"""Where each bin begins, in seconds. The last bin has no end."""
BINS = len(EDGES)
NONE_OPEN = (0.0,) * BINS
"""Weight of open gaps in each bin where none count."""
WIDTHS = (*(end - start for start, end in pairwise(EDGES)), EDGES[-1])
"""Width of each bin in seconds. The last one counts as wide as all before it."""
PRIOR_WEIGHT = 0.5
"""A kind's chance of a return within a bin is that of its own observations, and of this many of its parent kind."""
PRIOR_POWER = 0.5
"""Before anything is learned, half of all gaps that have lasted t end before 4 t: the rate of return is 0.5 / t."""
MOST_CERTAIN = 1.0 - 1e-9
"""Largest chance of a return within a bin."""
HALF_LIFE = 7200.0
"""Seconds after which an observation counts half as much as a new one."""
RESCALED = 2.0**40
"""Weight of a new observation at which all counts are divided by it, so that they stay finite."""
REFRESHED = 0.05
"""Share of a kind's observations that may change before its rates are computed again."""
MAX_KINDS = 64
"""Largest number of kinds of one tenant that are learned at a time."""
MAX_TENANTS = 1024
"""Largest number of tenants whose gaps are known. The one that was idle for longest is forgotten first."""


def bin_of(age: float) -> int:
    """The bin of an age or gap in seconds, or in units of another scale."""
    return max(0, bisect_right(EDGES, age) - 1)


class Rates:
    """The chance that a state is needed again, by how long it has been idle: a rate for each bin.

    Within a bin the rate is constant, so gaps have an exponential distribution piece by piece.
    """

    def __init__(self, chances: Sequence[float]) -> None:
        """`chances` has, for each bin, the probability that a gap which lasts to its start ends within it; below 1."""
        self.chances = tuple(chances)

    # The rest is computed when it is first asked for: most rates serve only as the chances of a parent kind.

    @cached_property
    def _rates(self) -> list[float]:
        return [-math.log1p(-chance) / width for chance, width in zip(self.chances, WIDTHS, strict=True)]

    @cached_property
    def _survival(self) -> list[float]:
        """Probability that a gap lasts to the start of each bin."""
        return [1.0, *accumulate((1.0 - chance for chance in self.chances[:-1]), mul)]

    @cached_property
    def worth(self) -> tuple[float, ...]:
        """For each bin, the worth of holding a state that has been idle until its start, per unit of cost and second.

        The worth is the largest ratio, over all times to give up at, of the probability that the state is needed by
        then to the time for which it is expected to be held: max over h of P(G < t + h | G > t) / E[min(G - t, h) |
        G > t]. This is Gittins' index of a job that pays when it ends (Gittins, Glazebrook and Weber, "Multi-armed
        Bandit Allocation Indices", 2011, §2 and §3). If memory costs some price per second, holding a state pays
        exactly while cost times worth is above that price. The state of least cost times worth is therefore the one
        to evict. With a rate of return of a / t the worth is a / t: then the order is Pensieve's cost over idle time.
        """
        return tuple(self._worth())

    def _worth(self) -> list[float]:
        """Merge each bin with the bins after it while that raises the ratio. O(bins)."""
        merged: list[tuple[float, float, float]] = []  # probability of a return, expected time, chance to last
        worth = []
        for chance, rate, width in zip(reversed(self.chances), reversed(self._rates), reversed(WIDTHS), strict=True):
            needed, held, lasts = chance, chance / rate if rate else width, 1.0 - chance
            while merged and merged[-1][0] * held > needed * merged[-1][1]:
                later_needed, later_held, later_lasts = merged.pop()
                needed, held, lasts = needed + lasts * later_needed, held + lasts * later_held, lasts * later_lasts
            merged.append((needed, held, lasts))
            worth.append(needed / held)
        return worth[::-1]

    def survival(self, age: float) -> float:
        """Probability that a gap lasts longer than `age` seconds."""
        at = bin_of(age)
        return self._survival[at] * math.exp(-self._rates[at] * (age - EDGES[at]))

    def needed_within(self, idle: float, wait: float) -> float:
        """Probability that a state which has been idle for `idle` seconds is needed within the next `wait` seconds."""
        return 1.0 - self.survival(idle + wait) / self.survival(idle)

    def expected_wait(self, idle: float, horizon: float) -> float:
        """Expected seconds until a state that has been idle for `idle` is needed, or given up after `horizon`."""
        total, start, end = 0.0, idle, idle + horizon
        for at in range(bin_of(idle), BINS):
            stop = min(end, EDGES[at + 1]) if at + 1 < BINS else end
            rate, length = self._rates[at], stop - start
            mean = -math.expm1(-rate * length) / rate if rate * length > 1e-12 else length
            total += self.survival(start) * mean
            if stop == end:
                break
            start = stop
        return total / self.survival(idle)

    def density(self, gap: float) -> float:
        """Probability density of a gap of this length, per second: the mean over its bin."""
        at = bin_of(gap)
        return self._survival[at] * self.chances[at] / WIDTHS[at]

    def quantile(self, share: float) -> float:
        """The end of the bin within which this share of the gaps of at most LONGEST have ended."""
        last = self._survival[-1]
        for at in range(1, BINS):
            if 1.0 - self._survival[at] >= share * (1.0 - last):
                return min(EDGES[at], LONGEST)
        return LONGEST


class Learner(Protocol):
    """A learner of gaps, which has rates."""

    @property
    def rates(self) -> Rates:
        """The rates as known now."""
        ...

    @property
    def ended(self) -> Rates:
        """The rates of the gaps that have ended."""
        ...

    def begin(self, time: float) -> None:
        """A gap begins at `time`. It is open."""
        ...

    def last(self, time: float, at: int, to: int) -> None:
        """The open gap that began at `time` has lasted from bin `at` to bin `to`."""
        ...

    def end(self, time: float, at: int, to: int) -> None:
        """The open gap that began at `time` and was in bin `at` has ended in bin `to`: its state is needed."""
        ...

    def withdraw(self, time: float, at: int) -> None:
        """Forget the open gap that began at `time` and is in bin `at`."""
        ...


class Unchanged:
    """A learner that learns nothing."""

    def begin(self, time: float) -> None:
        """Do nothing: nothing is learned."""

    def last(self, time: float, at: int, to: int) -> None:
        """Do nothing: nothing is learned."""

    def end(self, time: float, at: int, to: int) -> None:
        """Do nothing: nothing is learned."""

    def withdraw(self, time: float, at: int) -> None:
        """Do nothing: nothing is learned."""


class Fixed(Unchanged):
    """Rates that are given, not learned."""

    def __init__(self, rates: Rates) -> None:
        self.rates = self.ended = rates


class Shown(Unchanged):
    """The rates of a learner, for others to begin with. They do not teach it."""

    def __init__(self, learner: Learner) -> None:
        self._learner = learner

    @property
    def rates(self) -> Rates:
        """The rates of the learner as known now."""
        return self._learner.rates

    @property
    def ended(self) -> Rates:
        """The rates of the learner's gaps that have ended."""
        return self._learner.ended


def _unknown_rates() -> Rates:
    starts = (SHORTEST / 2, *EDGES[1:])
    ends = (*EDGES[1:], 2 * EDGES[-1])
    return Rates([1.0 - (start / end) ** PRIOR_POWER for start, end in zip(starts, ends, strict=True)])


def _hinted_rates() -> Rates:
    """The rates of gaps in units of the expected ones: 9 of 10 come, log-normal about 1 with a deviation of 0.5."""
    below = [0.9 * (0.5 + 0.5 * math.erf(math.log(edge) / 0.5 / math.sqrt(2))) if edge else 0.0 for edge in EDGES]
    ends = (*below[1:], below[-1] + 1e-3)
    return Rates([min(0.99, (end - start) / (1.0 - start) + 1e-4) for start, end in zip(below, ends, strict=True)])


UNKNOWN = Fixed(_unknown_rates())
"""Gaps of which nothing is known."""
HINTED = Fixed(_hinted_rates())
"""Gaps of clients who say what they expect, in units of that, before anything is learned of them."""


NEARBY = 0.25
"""Share of each observation that counts in each of the two bins next to its own."""


def spread(counts: Sequence[float]) -> list[float]:
    """The counts of all bins, half of each spread over the bins next to its own. The sum stays."""
    before, after = (counts[0], *counts[:-1]), (*counts[1:], counts[-1])
    here = 1.0 - 2 * NEARBY
    return [NEARBY * (low + high) + here * count for low, count, high in zip(before, counts, after, strict=True)]


class GapHistogram:
    """Counts of gaps by bin, the recent ones more than the old, and the rates that follow.

    A gap that has not ended counts as one that has lasted until now (the life table's estimate of survival, Kaplan and
    Meier 1958). So states that nobody ever needs again lower the rates as soon as they outlast the others, and no time
    has to be chosen after which a gap is given up. A chance without observations is that of the parent kind.

    With few gaps a bin's chance is mostly accident, and the index picks the best of all bins. So half of each
    observation counts in the bins next to its own (a kernel estimate; Silverman 1986, §2.4).
    """

    def __init__(self, parent: Learner, prior_weight: float = PRIOR_WEIGHT) -> None:
        """`prior_weight` is the number of observations, in each bin, for which the rates of `parent` count."""
        self._parent = parent
        self._prior_weight = prior_weight
        self._ended = [0.0] * BINS
        """Weight of the gaps that ended in each bin."""
        self._open = [0.0] * BINS
        """Weight of the gaps that have lasted to each bin and have not ended."""
        self._base = 0.0
        """Time in seconds at which a gap begins that has weight 1."""
        self._latest = 0.0
        """Time at which the latest gap began."""
        self._total = 0.0
        """Weight of all gaps."""
        self._changed = math.inf
        """Weight of what has changed since the rates were computed."""
        self._rates = parent.rates
        self._ended_changed = math.inf
        """Weight of the gaps that have ended since `ended` was computed."""
        self._ended_rates = parent.ended

    def _weight(self, time: float) -> float:
        return float(2.0 ** ((time - self._base) / HALF_LIFE))

    def begin(self, time: float) -> None:
        """A gap begins at `time`, in seconds. It is open. Times must not decrease by more than a few days."""
        self._latest = max(self._latest, time)
        weight = self._weight(time)
        if weight > RESCALED:
            self._base = time
            self._ended = [count / weight for count in self._ended]
            self._open = [count / weight for count in self._open]
            self._changed /= weight
            self._ended_changed /= weight
            self._total /= weight
            weight = 1.0
        self._open[0] += weight
        self._total += weight
        self._changed += weight
        self._parent.begin(time)

    def last(self, time: float, at: int, to: int) -> None:
        """The open gap that began at `time` has lasted from bin `at` to bin `to`."""
        weight = self._weight(time)
        self._open[at] -= weight
        self._open[to] += weight
        self._changed += weight / BINS_PER_DOUBLING
        self._parent.last(time, at, to)

    def end(self, time: float, at: int, to: int) -> None:
        """The open gap that began at `time` and was in bin `at` has ended in bin `to`: its state is needed."""
        weight = self._weight(time)
        self._open[at] -= weight
        self._ended[to] += weight
        self._changed += weight
        self._ended_changed += weight
        self._parent.end(time, at, to)

    def withdraw(self, time: float, at: int) -> None:
        """Forget the open gap that began at `time` and is in bin `at`."""
        weight = self._weight(time)
        self._open[at] -= weight
        self._total -= weight
        self._changed += weight
        self._parent.withdraw(time, at)

    @property
    def rates(self) -> Rates:
        """The rates by what was observed, a twentieth of which may be newer. O(1) amortised."""
        if self._changed > REFRESHED * self._total:
            self._rates = self._compute()
            self._changed = 0.0
        return self._rates

    @property
    def ended(self) -> Rates:
        """The rates of the gaps that have ended, a twentieth of which may be newer. O(1) amortised.

        By these a turn that never comes makes those that come no later.
        """
        if self._ended_changed > REFRESHED * sum(self._ended):
            self._ended_rates = self._chances(self._ended, NONE_OPEN, self._parent.ended)
            self._ended_changed = 0.0
        return self._ended_rates

    @property
    def worths(self) -> Sequence[float]:
        """The worth of holding a state by the bin of its age (`Rates.worth`). A new object once they have changed."""
        return self.rates.worth

    def _compute(self) -> Rates:
        """The rates of all gaps, with the open ones."""
        return self._chances(spread(self._ended), self._open, self._parent.rates)

    def _chances(self, counts: Sequence[float], open_gaps: Sequence[float], parent: Rates) -> Rates:
        """The chance of each bin: those that ended in it, of those that reached it; half of the open ones count."""
        prior = self._prior_weight * self._weight(self._latest)
        ended = counts[::-1]
        still = [weight if weight > 0.0 else 0.0 for weight in reversed(open_gaps)]
        columns = zip(ended, still, reversed(parent.chances), accumulate(map(add, ended, still)), strict=True)
        chances = [
            min((end + prior * given) / (reached - lasting / 2 + prior), MOST_CERTAIN)
            for end, lasting, given, reached in columns
        ]
        return Rates(chances[::-1])


TRUST = 3.0
"""How much a client's hints are believed before any was checked, in nats. Above 0 they are used."""
TRUST_KEPT = 0.9
"""Share of the trust that stays at each outcome."""
MOST_SURPRISE = 5.0
"""Most that one outcome changes the trust, in nats."""


STAGE_EDGES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128)
"""Numbers of turns at which a conversation is at its next stage."""
STAGE_PRIOR = 8.0
"""Number of observations in each bin for which a kind counts in the rates of one of its stages."""
PACE_PRIOR = 1.0
"""Number of a conversation's gaps for which it counts that its pace is that of all others."""
PACE_TRUST = 3.0
"""Trust in conversations' paces, in nats, from which on they are used."""
PACE_TRUST_KEPT = 0.98
"""Share of the trust in conversations' paces that stays at each outcome."""
MOST_PACE = 3.0
"""Most that one gap differs from the typical one of its kind, as a logarithm."""
TYPICAL_KEPT = 0.95
"""Share of the typical gap of a kind that stays at each gap, from the twentieth on."""


class Pace(NamedTuple):
    """By how much the gaps of a conversation are longer than those of their kinds."""

    total: float = 0.0
    """Sum of the logarithms of its gaps, each over the typical one of its kind."""
    seen: int = 0
    """Number of its gaps."""

    @property
    def factor(self) -> float:
        """The factor, by gaps so far."""
        return math.exp(self.total / (self.seen + PACE_PRIOR))

    def after(self, logarithm: float) -> Pace:
        """The pace after one more gap, `logarithm` of whose length over the typical one this is."""
        return Pace(self.total + max(-MOST_PACE, min(MOST_PACE, logarithm)), self.seen + 1)


NO_PACE = Pace()
"""The pace of a conversation of which nothing is known."""


class Known(Protocol):
    """Knowledge of a kind of pause."""

    @property
    def gaps(self) -> Learner:
        """Gaps in seconds."""
        ...

    @property
    def ratios(self) -> Learner:
        """Gaps in units of what the client expected."""
        ...

    @property
    def trust(self) -> float:
        """How much hints are believed, in nats."""
        ...

    def judge(self, gap: float, expected: float) -> None:
        """A gap that was expected to last for `expected` seconds has ended."""
        ...


class Anything:
    """Knowledge of pauses of which nothing was learned."""

    gaps: Learner = UNKNOWN
    ratios: Learner = HINTED
    trust = TRUST

    def judge(self, gap: float, expected: float) -> None:
        """Do nothing: nothing is learned."""


ANYTHING = Anything()


class Kind:
    """Knowledge of one kind of pause: its gaps, and how true the hints are that clients give with it.

    It begins with what is known of its parent kind, and the parent kind learns from it. So a client does not win trust
    back by another name for its pauses.
    """

    def __init__(self, parent: Known = ANYTHING) -> None:
        self._parent = parent
        self.gaps = GapHistogram(parent.gaps)
        self.ratios = GapHistogram(parent.ratios)
        """Gaps in units of what the client expected."""
        self.trust = parent.trust
        """How much hints are believed, in nats."""
        self.paced = GapHistogram(Shown(self.gaps))
        """Gaps in units of their conversation's pace."""
        self.pace_trust = 0.0
        """How much better than without it gaps are predicted by their conversation's pace, in nats."""
        self._stages: dict[int, GapHistogram] = {}
        self._typical, self._seen = 0.0, 0

    def stage(self, turns: int) -> GapHistogram:
        """The gaps after turns before which their conversation had about this many others. They teach `gaps`, too."""
        number = bisect_right(STAGE_EDGES, turns)
        if number not in self._stages:
            self._stages[number] = GapHistogram(self.gaps, STAGE_PRIOR)
        return self._stages[number]

    @property
    def believes_paces(self) -> bool:
        """Whether conversations' paces have predicted the gaps of this kind better than their stages did."""
        return self.pace_trust > PACE_TRUST

    def judge_pace(self, gap: float, pace: Pace, stage: GapHistogram) -> Pace:
        """Compare how probable a gap was by its conversation's pace and without. Returns the pace after it."""
        factor = pace.factor
        paced = max(self.paced.rates.density(gap / factor) / factor, 1e-300)
        surprise = math.log(paced / max(stage.rates.density(gap), 1e-300)) if pace.seen else 0.0
        self.pace_trust = PACE_TRUST_KEPT * self.pace_trust + min(max(surprise, -MOST_SURPRISE), MOST_SURPRISE)
        self._seen += 1
        logarithm = math.log(gap)
        self._typical += (logarithm - self._typical) * max(1.0 - TYPICAL_KEPT, 1.0 / self._seen)
        return pace.after(logarithm - self._typical)

    @property
    def beliefs(self) -> tuple[bool, bool]:
        """Whether hints are believed, and whether paces are. Forecasts of this kind's gaps go by both."""
        return self.believes_hints, self.believes_paces

    @property
    def believes_hints(self) -> bool:
        """Whether hints have predicted the gaps of this kind better than the gaps before them did."""
        return self.trust > 0.0

    def judge(self, gap: float, expected: float) -> None:
        """Compare how probable a gap was by its hint and without it. Recent outcomes count most."""
        hinted = max(self.ratios.rates.density(gap / expected) / expected, 1e-300)
        surprise = math.log(hinted / max(self.gaps.rates.density(gap), 1e-300))
        self.trust = TRUST_KEPT * self.trust + min(max(surprise, -MOST_SURPRISE), MOST_SURPRISE)
        self._parent.judge(gap, expected)


class Kinds:
    """The kinds of pauses of all tenants. Each tenant has its own, so nobody's gaps change what is known of others.

    A kind begins with the rates of its parent kind (`tool` for `tool:search`), that with the rates of all pauses of the
    tenant, and these with UNKNOWN.
    """

    def __init__(self) -> None:
        self._tenants: OrderedDict[str, OrderedDict[str, Kind]] = OrderedDict()

    def __len__(self) -> int:
        """Number of kinds of all tenants."""
        return sum(map(len, self._tenants.values()))

    def find(self, tenant: str, kind: str) -> Kind:
        """The kind of this name, a new one if the tenant has none. The one used longest ago makes room for it."""
        if tenant not in self._tenants and len(self._tenants) >= MAX_TENANTS:
            self._tenants.popitem(last=False)
        kinds = self._tenants.get(tenant)
        if kinds is None:
            kinds = self._tenants[tenant] = OrderedDict({"": Kind()})
        self._tenants.move_to_end(tenant)
        kinds.move_to_end("")
        if kind not in kinds:
            parent, colon, _ = kind.partition(":")
            above = self.find(tenant, parent if colon else "")
            if len(kinds) >= MAX_KINDS:
                kinds.popitem(last=False)
            kinds[kind] = Kind(above)
        kinds.move_to_end(kind)
        return kinds[kind]
