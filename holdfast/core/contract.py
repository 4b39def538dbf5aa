"""Contracts: the times that a request is promised, and whether an answer kept them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Literal

MAX_CONTRACT = 86_400.0
"""Largest time of a contract in seconds: a day."""

Term = Literal["ttft", "tbt", "complete"]
"""One of the times that a contract may name."""

TERMS: tuple[Term, ...] = ("ttft", "tbt", "complete")


@dataclass(frozen=True, slots=True)
class Contract:
    """Times that an accepted request is promised, in seconds. None: nothing is promised.

    Raises ValueError, naming the value and the limit, for a time that is not above 0 or longer than a day.
    """

    ttft: float | None = None
    """Time from arrival to the first token."""
    tbt: float | None = None
    """Longest time between two deliveries of tokens."""
    complete: float | None = None
    """Time from arrival to the last token."""

    def __post_init__(self) -> None:
        for term in TERMS:
            value: float | None = getattr(self, term)
            if value is not None and not (math.isfinite(value) and 0.0 < value <= MAX_CONTRACT):
                raise ValueError(
                    f"{term}_ms is {value * 1e3:g}; it must lie above 0 and be at most {MAX_CONTRACT * 1e3:.0f}"
                )

    def __bool__(self) -> bool:
        return any(getattr(self, term) is not None for term in TERMS)

    def broken(self, deliveries: Sequence[float]) -> Term | None:
        """The first term that an answer broke, or None.

        `deliveries` has the times at which tokens came, in seconds from arrival, in order. It must not be empty.
        """
        gaps = (later - earlier for earlier, later in pairwise(deliveries))
        return self.first_broken(deliveries[0], max(gaps, default=0.0), deliveries[-1])

    def first_broken(self, first: float, gap: float, last: float) -> Term | None:
        """The first term that an answer broke, or None.

        `first` and `last` are the times of its first and last token, in seconds from arrival, and `gap` is the longest
        time between two deliveries.
        """
        taken: dict[Term, float] = {"ttft": first, "tbt": gap, "complete": last}
        for term in TERMS:
            promised: float | None = getattr(self, term)
            if promised is not None and taken[term] > promised:
                return term
        return None

    def rest(self, last: float | None) -> Contract:
        """The contract that another engine must keep for an answer to go on there. Times still count from arrival.

        `last` is the time of the latest token, in seconds from arrival. None: no token has come. Once one has, the next
        token is due within the pace, so that is the time to the first token there.
        """
        if last is None:
            return self
        due = None if self.tbt is None else min(MAX_CONTRACT, last + self.tbt)
        return replace(self, ttft=due)

    def expired(self, now: float) -> bool:
        """Whether `now`, in seconds from arrival, is after a time at which a token was due that has not come."""
        return any(term is not None and now > term for term in (self.ttft, self.complete))


NO_CONTRACT = Contract()


@dataclass(frozen=True, slots=True)
class Refusal:
    """An engine's answer to a contract that it cannot keep."""

    reason: str
    """Why it cannot, in words."""
    retry_after: float
    """Seconds after which the engine expects that it could accept the contract. Infinite: never, at any load."""
    predicted: Contract = NO_CONTRACT
    """The times that the engine could promise now. None: it cannot say."""


class ContractRefused(ValueError):
    """A request whose contract cannot be kept. It is refused at its arrival."""

    def __init__(self, refusal: Refusal) -> None:
        super().__init__(refusal.reason)
        self.refusal = refusal
