"""Rows with a grammar: the answer of each so far, the tokens that it samples, and those that must follow."""

from __future__ import annotations

from typing import NamedTuple

from holdfast.lm.types.sampling import Sampling


class Answer(NamedTuple):
    """The answer so far of a sequence with a grammar."""

    row: int
    start: int
    """Number of tokens of its prompt."""
    tokens: tuple[int, ...]
    tenant: str = ""
    """Tenant of the sequence. The time that its grammar takes counts for this tenant."""


class ConstrainedRow(NamedTuple):
    """A sampled row whose token a grammar restricts."""

    at: int
    """Index among the step's sampled rows. A segment with a draft has several of them."""
    row: int
    """Row of the executor."""
    start: int
    """Start of the segment; the fields below are of the same segment."""
    stop: int
    tokens: tuple[int, ...]
    sampling: Sampling
    place: int
    """Index of the segment among those that sample, in plan order."""


class Forced(NamedTuple):
    """Tokens that must follow a sampled one, because its sequence's grammar allows no other."""

    at: int
    """Index of the sampling segment, in plan order."""
    tokens: tuple[int, ...]
