"""GrammarPart: gives the device the answers that follow a grammar, and appends forced tokens."""

from __future__ import annotations

from collections.abc import Sequence

from holdfast.lm.grammar.rows import Answer
from holdfast.lm.parts.grammars.values import GrammarPlan, GrammarResult
from holdfast.lm.parts.planning import Planning
from holdfast.lm.parts.sent_tokens import SentTokens
from holdfast.lm.scheduler.entries import RANK, Entry
from holdfast.lm.scheduler.part import Part, PartOutputs, PartStep
from holdfast.lm.types import PartPlan, StepPlan, StepResult

LEAST_FORCED = 2
"""Least number of forced tokens that are appended. Fewer are sampled one by one: a step of decodes alone is faster."""


class GrammarPart(Part):
    """If a grammar allows only one token, this and the tokens that it forces next are appended without a draw.

    The next steps compute these tokens with the decodes, like tokens of a prompt.
    """

    name = "grammars"

    def __init__(self) -> None:
        self.awake = False
        self._sent = SentTokens()
        self._forced: set[Entry] = set()
        """The running sequences that may lack positions of forced tokens."""

    def added(self, entry: Entry) -> None:
        if entry.sampling.grammar is not None:
            self._sent.add(entry)
            self.awake = True

    def ended(self, entry: Entry) -> None:
        self._sent.remove(entry)
        self.awake = bool(self._sent)

    def stopped(self, entry: Entry) -> None:
        self._forced.discard(entry)

    def decoded(self, step: PartStep) -> None:
        """Plan forced tokens, as far as the budget lasts."""
        self._forced = {entry for entry in self._forced if not entry.decoding}
        for entry in sorted(self._forced, key=RANK):
            # An earlier one of them may have preempted this one.
            if entry in self._forced and entry.next_step <= step.number and step.budget > 0:
                step.compute(entry)

    def finish(self, step: PartStep) -> PartPlan | None:
        answers = tuple([self._answer(entry) for entry in self._sent.due(step)])
        return GrammarPlan(answers) if answers else None

    def sampled(self, plan: StepPlan, result: StepResult, sampling: Sequence[Entry], outputs: PartOutputs) -> None:
        for forced in result.part(GrammarResult).forced:
            entry = sampling[forced.at]
            enough = len(forced.tokens) - entry.sequence.in_flight >= LEAST_FORCED
            if enough and entry.sampling.skips and outputs.extend(entry, forced.tokens):
                self._forced.add(entry)

    def _answer(self, entry: Entry) -> Answer:
        tokens, request = entry.sequence.tokens, entry.sequence.request
        start = request.answer_start
        return Answer(entry.row, start, tuple(tokens[start:]), request.identity.tenant)


def make_parts(planning: Planning) -> tuple[GrammarPart, ...]:
    """The part of a scheduler."""
    return (GrammarPart(),)
