"""Speculation: drafts from text that occurred before."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import inf

from holdfast.core.cost import CostModel
from holdfast.lm.parts.speculation.drafting import GAIN, MARGIN, MOST_RATE, DraftingPart, after, falling
from holdfast.lm.parts.speculation.drafts import Drafter, Matcher
from holdfast.lm.parts.speculation.verification import draftable
from holdfast.lm.scheduler.entries import Entry
from holdfast.lm.scheduler.part import PartStep

COLD = 0.1
"""Rate of matches times hits below which no tokens are drafted for a sequence.

Now and then a test guess, which is not put into a step, shows whether the rate has risen.
"""
LONGEST_PAUSE = 8
"""Most tokens between two test guesses. The pause doubles while they fail."""
GUESSED = 4
"""Number of tokens of a test guess."""
NOTED = 1024
"""Most tokens that are noted in one step, so that the host keeps up: about half a millisecond."""


@dataclass(slots=True)
class Row:
    """Speculation's record of one sequence."""

    own: Matcher
    hits: float = 0.0
    """Running share of right guesses, among guesses whose predecessors were right."""
    matches: float = 0.5
    """Running share of searches that gave a guess."""
    guess: tuple[int, ...] = ()
    """A test guess: it is not put into a step, only compared with the tokens that come."""
    guess_at: int = 0
    """Position of the first token of `guess`."""
    next_guess: int = 0
    """Number of known tokens at which the next test guess is due."""
    pause: int = 1

    def count(self, hits: int, missed: bool) -> None:
        """Learn that `hits` guesses in a row were right, and whether the next one was wrong."""
        self.hits = after(self.hits, hits, missed=missed)

    def searched(self, found: bool) -> None:
        """Learn whether a search gave a guess."""
        self.matches += GAIN * (found - self.matches)

    @property
    def chance(self) -> float:
        """Chance that a guess is right if the earlier ones are; 0 for a cold sequence."""
        return min(self.hits, MOST_RATE) if self.hits * self.matches >= COLD else 0.0


class SpeculationPart(DraftingPart):
    """Lets decodes verify what followed the same tokens before.

    The chance of a guess comes from how often guesses came true, for each sequence. While none are drafted, test
    guesses are made now and then.
    """

    name = "speculation"

    def __init__(
        self,
        drafter: Drafter,
        cost: CostModel,
        *,
        most: int,
        rows: int,
        target: float = inf,
        stages: int = 1,
    ) -> None:
        """The arguments after `drafter` are those of `DraftingPart`."""
        super().__init__(cost, most=most, rows=rows, target=target, stages=stages)
        self._drafter = drafter
        self._rows: dict[Entry, Row] = {}
        self._noted = 0
        """Tokens noted in the step under construction."""

    def begin(self, step: PartStep) -> None:
        self._noted = self._drafter.index(NOTED)
        super().begin(step)

    def verified(self, entry: Entry, hits: int, *, missed: bool) -> None:
        if entry in self._rows:
            self._rows[entry].count(hits, missed)

    def ended(self, entry: Entry) -> None:
        if self._rows.pop(entry, None) is not None:
            request = entry.sequence.request
            self._drafter.end(request.identity, entry.sequence.tokens[request.answer_start :])

    def pays(self, decoding: Sequence[Entry]) -> bool:
        """Whether waiting for the tokens of these decodes is expected to pay."""
        rows = len(decoding)
        chances, each = [], self._each(rows)
        for entry in decoding:
            if not draftable(entry):
                continue
            row = self._watched(entry)
            if chance := row.chance:
                chances.append((chance, self._room(entry, each), row.matches))
        if sum(match * chance / (1 - chance) for chance, _, match in chances) < (MARGIN - 1) * rows:
            return False
        contexts = [entry.cache.planned + 1 for entry in decoding]
        uses = [falling([chance] * count, match) for chance, count, match in chances]
        _, self._promise = self._shares(uses, contexts, self._sampled - rows)
        if not self._promise:
            self.account(rows).forget()
        return self._promise > 0

    def draft(self, step: PartStep) -> Mapping[Entry, Sequence[int]]:
        """The drafts for those decodes of the step whose tokens are known, as far as they pay.

        If the device has waited for these tokens, it did so whether or not there are drafts now. If it waits only
        because too few decodes were free, drafts must beat steps that are planned ahead.
        """
        found: list[tuple[Entry, tuple[int, ...]]] = []
        uses: list[list[float]] = []
        each = self._each(len(step.sampling))
        for entry in step.sampling:
            if entry.sequence.in_flight > 1 or not draftable(entry):  # the token that this step samples is one
                continue
            row = self._watched(entry)
            if not row.chance or not self._catch_up(entry, row):
                continue
            guesses = self._drafter.propose(row.own, entry.sequence.request.identity, self._room(entry, each))
            row.searched(bool(guesses))
            row.guess, row.next_guess = (), len(entry.sequence.tokens) + LONGEST_PAUSE  # the step will show more
            if guesses:
                found.append((entry, guesses))
                uses.append(falling([min(row.hits, MOST_RATE)] * len(guesses)))
        if not found:
            return {}
        contexts = [entry.cache.planned for entry in step.sampling]
        room = min(step.budget, self._sampled - len(contexts))
        shares, _ = self._shares(uses, contexts, room, waited=self._promised > 0)
        return {entry: guesses[:share] for (entry, guesses), share in zip(found, shares, strict=False) if share}

    def _watched(self, entry: Entry) -> Row:
        """The record of a sequence. Compares its last test guess with the new tokens, and makes a new one when due."""
        tokens, row = entry.sequence.tokens, self._rows.get(entry)
        known = len(tokens)
        if row is None:
            row = self._rows[entry] = Row(self._drafter.begin(entry.limit), next_guess=known)
        if known < row.next_guess:
            return row
        if row.guess:
            came = tokens[row.guess_at : row.guess_at + len(row.guess)]
            hits = next((at for at, (one, other) in enumerate(zip(came, row.guess, strict=False)) if one != other), -1)
            row.count(len(came) if hits < 0 else hits, missed=hits >= 0)
            row.guess = ()
            if not hits:
                self._pause(row, known)
                return row
            row.pause = 1
        if not self._catch_up(entry, row):
            return row
        guess = self._drafter.propose(row.own, entry.sequence.request.identity, GUESSED)
        row.searched(bool(guess))
        if guess:
            row.guess, row.guess_at, row.next_guess = guess, known, known + len(guess)
        else:
            self._pause(row, known)
        return row

    @staticmethod
    def _pause(row: Row, known: int) -> None:
        """Make no test guess for a while."""
        row.next_guess = known + row.pause
        row.pause = min(2 * row.pause, LONGEST_PAUSE)

    def _catch_up(self, entry: Entry, row: Row) -> bool:
        """Note the new tokens of a sequence, as far as the step's limit allows. Returns whether all are noted."""
        own, tokens = row.own, entry.sequence.tokens
        if own.length < len(tokens):
            some = tokens[own.length : own.length + NOTED - self._noted]
            self._noted += len(some)
            own.extend(some)
        return own.length == len(tokens)
