"""Speculation: whether and how far the decodes of a step verify drafted tokens, by what the cost model says of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf

from holdfast.core.cost import CostModel
from holdfast.lm.scheduler.builder import Policy, StepBuilder
from holdfast.lm.scheduler.drafts import Drafter, Matcher
from holdfast.lm.scheduler.entries import Entry
from holdfast.lm.types import StepPlan, StepResult

GAIN = 0.2
"""Weight of one token in the running rate of hits, and of one search in that of matches."""
MOST_RATE = 0.98
"""The rate of hits counts as at most this."""
COLD = 0.1
"""Below this rate, of matches times hits, no tokens are drafted for a sequence; now and then a guess shows whether it
has risen."""
LONGEST_PAUSE = 8
"""Tokens between two such guesses, at most. It doubles while they fail."""
GUESSED = 4
"""Tokens of such a guess."""
MARGIN = 1.05
"""Drafts must give this many times the tokens a second that steps without them give, as predictions err."""
NOTED = 1024
"""Tokens that are noted in one step, at most, so that the host keeps up: about half a millisecond."""
GAP = 5e-4
"""Seconds that the device is taken to wait for the host where a step is not planned ahead, before that was measured."""
WEIGHT = 0.1
"""Weight of one step in the running means of gaps and of measured over predicted times."""
MOST_GAP, MOST_RATIO = 0.02, 4.0
"""Limits of a single measurement."""


@dataclass(slots=True)
class Row:
    """What speculation knows of one sequence."""

    own: Matcher
    hits: float = 0.0
    """Running share of guesses that were right, of those whose predecessors were."""
    matches: float = 0.5
    """Running share of searches that gave a guess."""
    guess: tuple[int, ...] = ()
    """A guess that was not put into a step, only to see whether it comes true."""
    guess_at: int = 0
    """Position of its first token."""
    next_guess: int = 0
    """The next such guess is due when so many tokens are known."""
    pause: int = 1

    def count(self, hits: int, missed: bool) -> None:
        """Learn that so many guesses in a row were right, and whether the one behind them was wrong."""
        self.hits = 1 - (1 - self.hits) * (1 - GAIN) ** hits
        if missed:
            self.hits *= 1 - GAIN

    def searched(self, found: bool) -> None:
        """Learn whether a search gave a guess."""
        self.matches += GAIN * (found - self.matches)

    @property
    def chance(self) -> float:
        """The chance of a guess to be right, if those in front of it are; 0 for a cold sequence."""
        return min(self.hits, MOST_RATE) if self.hits * self.matches >= COLD else 0.0


class Speculation(Policy):
    """Lets the decodes of a policy's steps verify drafted tokens where that gives more tokens a second.

    A draft needs the last token of its sequence, so such a step can be planned only when the results of all steps
    before it are known. The device then waits for the host in between. So either all decodes wait for each other's
    tokens, or no draft is made and steps are planned ahead as ever; the better of the two is chosen for each step.

    The tokens a second of a step are its decodes, and for each guess the chance that it and those in front of it are
    right, over the predicted time of the step and of the wait. Chances come from how often guesses came true, for each
    sequence; while none are drafted, a guess is made now and then only to be compared with what comes.
    """

    def __init__(
        self,
        inner: Policy,
        drafter: Drafter,
        cost: CostModel,
        *,
        most: int,
        rows: int,
        target: float = inf,
    ) -> None:
        """`most` guesses for each sequence; `rows` is how many tokens a step can sample in all.

        A step with drafts is predicted to end within the `target`, in seconds.
        """
        self.inner, self._drafter = inner, drafter
        self._most, self._sampled, self._target = most, rows, target
        self._predictor = cost.predictor()
        self._rows: dict[Entry, Row] = {}
        self._noted = 0
        """Tokens noted in the step under construction."""
        self._ratio = self._drafts_ratio = 1.0
        """Measured over predicted time of steps of decodes alone: without drafts, and how that of drafts differs."""
        self._gaps = {False: 0.0, True: GAP}
        """Seconds between steps: of steps that are not planned ahead (True), and of the others."""
        self._planned: dict[int, tuple[list[Entry], dict[Entry, tuple[int, ...]], float]] = {}
        """Of each step in flight: who samples, who drafts what, and its predicted seconds if it has decodes alone."""
        self._last = (-1, 0.0, False)
        """Number of the last step, when it was planned, and whether nothing was in flight then."""
        self._seconds = inf
        """What the last step took of which the result is known."""
        self._drafts: dict[Entry, tuple[int, ...]] = {}
        """Of the step under construction."""

    @property
    def gap(self) -> float:
        """Seconds that the device waits for the host before a step that is not planned ahead, as measured."""
        return self._gaps[True]

    def plan(self, step: StepBuilder) -> None:
        self._noted = self._drafter.learn(NOTED)
        decoding = [entry for entry in step.running if entry.decoding]
        if step.in_flight and any(unknown(entry) for entry in decoding) and self._pays(decoding):
            return  # planned once their tokens are known
        self._measure_gap(step)
        self._drafts = {}
        step.after_decode = lambda: self._draft(step)
        self.inner.plan(step)
        if step.num_tokens:
            alone = step.num_tokens == len(step.sampling) + sum(map(len, self._drafts.values()))
            contexts = [entry.cache.planned for entry in step.sampling]
            seconds = self._predictor.drafted(step.num_tokens, contexts) if alone else 0.0
            self._planned[step.number] = step.sampling, self._drafts, seconds
            self._last = step.number, step.now, not step.in_flight

    def observe(self, plan: StepPlan, result: StepResult) -> None:
        self.inner.observe(plan, result)
        self._seconds = result.seconds
        if plan.step not in self._planned:
            return
        sampling, drafts, predicted = self._planned.pop(plan.step)
        if predicted and result.seconds:
            ratio = min(max(result.seconds / predicted, 1 / MOST_RATIO), MOST_RATIO)
            if drafts:
                self._drafts_ratio += WEIGHT * (ratio / self._ratio - self._drafts_ratio)
            else:
                self._ratio += WEIGHT * (ratio - self._ratio)
        if not drafts:
            return
        counts = result.counts if result.counts is not None else [1] * len(sampling)
        for entry, given in zip(sampling, counts, strict=True):
            guesses = drafts.get(entry, ())
            if guesses and given:
                self.tokens_drafted += len(guesses)
                self.drafts_accepted += given - 1
                if entry in self._rows:
                    self._rows[entry].count(given - 1, missed=given <= len(guesses))

    def ended(self, entry: Entry) -> None:
        self.inner.ended(entry)
        if self._rows.pop(entry, None) is not None:
            request = entry.sequence.request
            self._drafter.end(request.identity, entry.sequence.tokens[len(request.prompt) :])

    def _measure_gap(self, step: StepBuilder) -> None:
        """Learn how long the device waited before this step, if it follows the last one at once."""
        number, then, alone = self._last
        ahead = step.in_flight
        if number != step.number - 1 or alone is ahead or not step.running:
            return
        gap = step.now - then - self._seconds
        if gap < MOST_GAP + self._seconds:
            self._gaps[not ahead] += WEIGHT * (min(max(gap, 0.0), MOST_GAP) - self._gaps[not ahead])

    def _pays(self, decoding: Sequence[Entry]) -> bool:
        """Whether it is expected to pay to wait for the tokens of these decodes."""
        chances, each = [], self._each(len(decoding))
        for entry in decoding:
            row = self._look(entry)
            if chance := row.chance:
                chances.append((chance, self._room(entry, each), row.matches))
        if sum(match * chance / (1 - chance) for chance, _, match in chances) < (MARGIN - 1) * len(decoding):
            return False
        return bool(self._shares(chances, [entry.cache.planned + 1 for entry in decoding], inf))

    def _draft(self, step: StepBuilder) -> None:
        """Draft for those decodes of the step whose tokens are known, as far as it pays."""
        found: list[tuple[Entry, tuple[int, ...]]] = []
        chances: list[tuple[float, int, float]] = []
        each = self._each(len(step.sampling))
        for entry in step.sampling:
            if entry.sequence.in_flight > 1:  # the token that this step samples is one
                continue
            row = self._look(entry)
            if not row.chance or not self._catch_up(entry, row):
                continue
            guesses = self._drafter.propose(row.own, entry.sequence.request.identity, self._room(entry, each))
            row.searched(bool(guesses))
            row.guess, row.next_guess = (), len(entry.sequence.tokens) + LONGEST_PAUSE  # the step will show more
            if guesses:
                found.append((entry, guesses))
                chances.append((min(row.hits, MOST_RATE), len(guesses), 1.0))
        if not found:
            return
        contexts = [entry.cache.planned for entry in step.sampling]
        shares = self._shares(chances, contexts, min(step.budget, self._sampled - len(contexts)))
        wanted = {entry: guesses[:share] for (entry, guesses), share in zip(found, shares, strict=False) if share}
        if wanted:
            self._drafts = step.speculate(lambda entry: wanted.get(entry, ()))

    def _shares(self, chances: Sequence[tuple[float, int, float]], contexts: list[int], room: float) -> list[int]:
        """How many guesses of each sequence to verify; empty if it does not pay.

        Of each sequence: the chance of a guess, their number, and how likely there are any. `contexts` are those of all
        decodes of the step. At most `room` guesses in all. The guesses with the highest chance to be of use come first:
        that of the n-th of a sequence is the n-th power of its chance.
        """
        rows = len(contexts)
        attention = self._predictor.decodes(contexts)
        plain = self._ratio * (self._predictor.drafted(rows, []) + attention) + self._gaps[False]
        uses = [match * chance**place for chance, count, match in chances for place in range(1, count + 1)]
        best, share, gain, ratio = MARGIN * rows / plain, 0, 0.0, self._ratio * self._drafts_ratio
        order = sorted(uses, reverse=True)[: int(min(room, len(uses)))]
        every = 1 if len(order) <= 64 else 8
        for count, chance in enumerate(order, 1):
            gain += chance
            if count % every and count < len(order):
                continue
            seconds = ratio * (self._predictor.drafted(rows + count, []) + attention)
            if seconds > self._target:
                break
            if (rate := (rows + gain) / (seconds + self._gaps[True])) > best:
                best, share = rate, count
        if not share:
            return []
        least, left, shares = order[share - 1], share, []
        for chance, count, match in chances:
            taken = 0
            while taken < min(count, left) and match * chance ** (taken + 1) >= least:
                taken += 1
            shares.append(taken)
            left -= taken
        return shares

    def _each(self, rows: int) -> int:
        """Most guesses that are looked for each of so many sequences: twice what all could have."""
        return min(self._most, max(1, 2 * (self._sampled - rows) // max(1, rows)))

    def _room(self, entry: Entry, most: int) -> int:
        """Most guesses for a sequence: its last token is sampled, never guessed."""
        return max(0, min(most, entry.limit - len(entry.sequence.tokens) - 1))

    def _look(self, entry: Entry) -> Row:
        """What is known of a sequence. Compares its last guess with what came, and guesses anew where that is due."""
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
        """Make no guess for a while."""
        row.next_guess = known + row.pause
        row.pause = min(2 * row.pause, LONGEST_PAUSE)

    def _catch_up(self, entry: Entry, row: Row) -> bool:
        """Note the tokens of a sequence that are new. Whether all are noted: a step takes note of so many only."""
        own, tokens = row.own, entry.sequence.tokens
        if own.length < len(tokens):
            some = tokens[own.length : own.length + NOTED - self._noted]
            self._noted += len(some)
            own.extend(some)
        return own.length == len(tokens)


def unknown(entry: Entry) -> bool:
    """Whether a token of a decoding sequence is still to come."""
    return entry.sequence.in_flight > 0
