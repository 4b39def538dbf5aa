"""The values that embeddings add to a result."""

from __future__ import annotations

from collections import abc
from dataclasses import dataclass

from holdfast.lm.types.result import PartResult


@dataclass(frozen=True, slots=True)
class VectorResult(PartResult):
    """The embeddings that a step gave."""

    vectors: tuple[bytes, ...] = ()
    """For each sampling segment, the hidden state [hidden] of its last token as float32 numbers.

    A segment whose request does not ask has empty bytes. Empty: no request of the step asks.
    """

    def of_accepted(self, last: abc.Sequence[int]) -> VectorResult:
        return VectorResult(tuple([self.vectors[place] for place in last]) if self.vectors else ())
