"""Verification: decodes that compute drafted tokens, too, and give those of them that the model would draw."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Mapping, Sequence

from holdfast.lm.scheduler.entries import Entry
from holdfast.lm.scheduler.part import Part, PartStep
from holdfast.lm.types import PartPlan, StepPlan, StepResult


class Verification(Part):
    """A part that extends decodes by drafts. Its subclasses choose the drafts.

    A decode with a draft of n tokens gives between 0 and n + 1 tokens, and its sequence sits out every step until they
    are known. Its row may have drawn further tokens after the accepted ones, so the host gives the next decode its
    token.
    """

    def __init__(self) -> None:
        self._drafts: dict[Entry, tuple[int, ...]] = {}
        """The drafts of the step under construction."""
        self._verifying: dict[int, Iterable[Entry]] = {}
        """By the number of a plan in flight, the sequences that have a draft in it."""
        self._verified: set[Entry] = set()
        """The running sequences whose last token is not the one that their row drew last."""

    @abstractmethod
    def draft(self, step: PartStep) -> Mapping[Entry, Sequence[int]]:
        """The guessed next tokens of some of the decodes planned so far."""

    def begin(self, step: PartStep) -> None:
        self._drafts = {}

    def decoded(self, step: PartStep) -> None:
        """Extend the decodes by drafts, as far as budget, free blocks and limits allow."""
        if self._verified:
            for decode in step.decodes:
                if decode.entry in self._verified:
                    self._verified.remove(decode.entry)
                    step.give(decode, decode.entry.sequence.tokens[-1])
        if drafts := self.draft(step):
            for decode in step.decodes:
                guesses = drafts.get(decode.entry, ())
                if guesses and (added := step.extend(decode, guesses)):
                    self._drafts[decode.entry] = added

    def finish(self, step: PartStep) -> PartPlan | None:
        if self._drafts:
            self._verifying[step.number] = self._drafts
        return None

    def apply(self, plan: StepPlan, result: StepResult, now: float) -> Iterable[Entry]:
        entries = self._verifying.pop(plan.step, ())
        self._verified.update([entry for entry in entries if not entry.sequence.ended])
        return ()

    def stopped(self, entry: Entry) -> None:
        self._verified.discard(entry)


def draftable(entry: Entry) -> bool:
    """Whether guesses of a sequence can be verified. Under a grammar each place would need a mask of its own."""
    return entry.sampling.grammar is None
