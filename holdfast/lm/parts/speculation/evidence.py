"""Evidence of a draft head: the time of its passes, and how often its guesses were right."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from statistics import median

from holdfast.lm.parts.speculation.drafting import MOST_RATE, PATIENCE, after

HOPE = 0.7
"""Chance of a guess as long as none was verified, and after long without any."""
HEAD_GAIN, TRIAL_GAIN = 0.06, 0.3
"""Weight of one guess in a sequence's running rate of hits, and least weight of one that was a trial.

One head makes all guesses, so the rate changes slowly, and noise must not end what pays. A trial asks for news.
"""
FIRST, LEAST_WEIGHT = 8, 0.02
"""Number of guesses that HOPE counts for in the rates of all sequences, and least weight of one guess in them."""
SHORT, LONG = 64, 1024
"""Least and most tokens without drafts after which half of a disappointment has faded. Drafts that fail double them."""
LATEST = 7
"""Number of latest passes of which the median counts. A few may wait for the driver, which says nothing of others."""
BESIDES = 0.5
"""Time of a head's work besides passes in a step, as a share of a pass."""
STALL = 4.0
"""Time of a pass over the predicted one from which on the next step guesses only one token."""
EXPLORE = 0.005
"""Share of the time without guesses that trials of guesses may take."""


@dataclass(slots=True)
class HeadRow:
    """Record of one sequence."""

    hits: float
    """Running share of right guesses, among guesses whose predecessors were right."""
    known: int
    """Number of known tokens when a guess was verified last."""
    patience: int = SHORT
    """Tokens without drafts after which half of the way to HOPE is made up."""
    verified: int = 0
    """Number of steps that verified guesses."""

    def chance(self, known: int) -> float:
        """Chance that a guess is right if the earlier ones are. It goes to HOPE with the tokens since the last one."""
        age = max(0, known - self.known)
        return min(self.hits + (HOPE - self.hits) * age / (age + self.patience), MOST_RATE)

    def learned(self, known: int, hits: int, *, missed: bool, trial: bool = False) -> HeadRow:
        """The record once the first `hits` guesses after `known` tokens were right, and the next one wrong if `missed`.

        The fewer guesses it has seen, and the longer ago that was, the more these weigh; most, if they were a `trial`.
        """
        age = max(0, known - self.known)
        gain = max(HEAD_GAIN, 1 / (FIRST + self.verified), 0.5 * age / (age + self.patience))
        rate = after(self.chance(known), hits, missed=missed, gain=max(gain, TRIAL_GAIN) if trial else gain)
        patience = max(SHORT, self.patience // 2) if hits else min(LONG, self.patience * 2)
        return HeadRow(rate, known + hits + 1, patience, self.verified + 1)


@dataclass(slots=True)
class Rates:
    """How often guesses are right, for all sequences together."""

    places: int
    """Most guesses of a sequence in a step."""
    mean: float = HOPE
    """Running rate of guesses whose predecessors were right."""
    _verified: int = 0
    _hits: list[float] = field(default_factory=list)
    _tries: list[float] = field(default_factory=list)
    """For each place of a guess, numbers of right ones and of all, weighted towards the latest."""

    def __post_init__(self) -> None:
        self._hits, self._tries = [0.0] * self.places, [0.0] * self.places

    def learn(self, hits: int, *, missed: bool) -> None:
        """Learn that a sequence's first `hits` guesses were right, and whether the next one was wrong."""
        self._verified += 1
        weight = max(LEAST_WEIGHT, 1 / (FIRST + self._verified))
        self.mean = after(self.mean, hits, missed=missed, gain=weight)
        for place in range(min(hits + missed, self.places)):
            self._hits[place] += (place < hits) - LEAST_WEIGHT * self._hits[place]
            self._tries[place] += 1 - LEAST_WEIGHT * self._tries[place]

    def forget(self) -> None:
        """Hope a little more, because a step passed without guesses."""
        self.mean += (HOPE - self.mean) / PATIENCE
        for numbers in (self._hits, self._tries):
            numbers[:] = [each - each / PATIENCE for each in numbers]

    def chances(self, chance: float, count: int) -> Iterator[float]:
        """The chances of `count` guesses of a sequence whose guesses have this chance on average."""
        factor = chance / max(self.mean, 1e-3)
        hoped = FIRST * self.mean
        for hits, tries in zip(self._hits[:count], self._tries[:count], strict=False):
            yield min(MOST_RATE, factor * (hits + hoped) / (tries + FIRST))


@dataclass(slots=True)
class PassTimes:
    """Times of passes, for batches of one size."""

    spare: float | None = None
    """Seconds that trials may take now; None before the first one, which may take any."""
    latest: deque[float] = field(default_factory=lambda: deque(maxlen=LATEST))
    """Seconds of the latest passes."""
    _trying: bool = False
    """Whether the next measurement is that of a trial."""
    _tried: bool = False
    """Whether a trial was measured."""

    def seconds(self, expected: float) -> float:
        """Predicted seconds of a pass: the `expected` ones unless most of the latest took another time.

        Once a trial was measured, only measurements count.
        """
        missing = 0 if self._tried else LATEST - len(self.latest)
        return median([*self.latest, *[expected] * missing])

    def measured(self, seconds: float, passes: int) -> None:
        """Note a head's seconds in a step with this many passes. After a trial, those before it do not count."""
        if self._trying:
            self.latest.clear()
            self._trying, self._tried = False, True
        self.latest.append(seconds / (passes + BESIDES))

    def stalls(self, expected: float) -> bool:
        """Whether no pass was measured yet, or the latest one took much longer than the predicted time."""
        return not self.latest or self.latest[-1] > STALL * self.seconds(expected)

    def may_try(self, seconds: float) -> bool:
        """Whether a trial may take this many seconds."""
        return self.spare is None or self.spare >= seconds

    def tried(self) -> None:
        """Note that a trial begins."""
        self.spare, self._trying = 0.0, True

    def earn(self, seconds: float, most: float) -> None:
        """Note a step without guesses. Trials may take a share of its time, and never more than `most` in all."""
        if self.spare is not None:
            self.spare = min(self.spare + EXPLORE * seconds, most)
