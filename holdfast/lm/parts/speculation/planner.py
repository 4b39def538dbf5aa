"""Speculation: how many drafted tokens the decodes of a step verify, by the predictions of the cost model."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import inf
from typing import NamedTuple

from holdfast.core.cost import CostModel
from holdfast.lm.parts.speculation.drafts import Drafter, Matcher
from holdfast.lm.parts.speculation.verification import Verification, draftable
from holdfast.lm.scheduler.entries import Entry
from holdfast.lm.scheduler.part import PartStep
from holdfast.lm.types import PartPlan, StepPlan, StepResult

GAIN = 0.2
"""Weight of one token in the running rate of hits, and of one search in the running rate of matches."""
MOST_RATE = 0.98
"""Upper limit of the rate of hits."""
COLD = 0.1
"""Rate of matches times hits below which no tokens are drafted for a sequence.

Now and then a test guess, which is not put into a step, shows whether the rate has risen.
"""
LONGEST_PAUSE = 8
"""Most tokens between two test guesses. The pause doubles while they fail."""
GUESSED = 4
"""Number of tokens of a test guess."""
MARGIN = 1.1
"""Drafts must give this many times the tokens per second of steps without them, because predictions err."""
NOTED = 1024
"""Most tokens that are noted in one step, so that the host keeps up: about half a millisecond."""
GAP, GAP_OF_ROW = 7e-4, 3e-5
"""Seconds that the device waits for the host before a step that is not planned ahead, and seconds added by each decode.

Used until the wait was measured.
"""
PATIENCE = 512
"""Number of steps without drafts after which disappointment with drafts has faded by two thirds."""
PRIOR = 10
"""Number of steps for which predictions of a new batch size weigh as much as measurements."""
WEIGHT = 0.1
"""Weight of one step in the running means of gaps and of measured over predicted times."""
MOST_GAP, MOST_RATIO = 0.02, 4.0
"""Upper limits of a single measurement."""


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
        self.hits = 1 - (1 - self.hits) * (1 - GAIN) ** hits
        if missed:
            self.hits *= 1 - GAIN

    def searched(self, found: bool) -> None:
        """Learn whether a search gave a guess."""
        self.matches += GAIN * (found - self.matches)

    @property
    def chance(self) -> float:
        """Chance that a guess is right if the earlier ones are; 0 for a cold sequence."""
        return min(self.hits, MOST_RATE) if self.hits * self.matches >= COLD else 0.0


class Planned(NamedTuple):
    """The last step that was planned."""

    number: int
    at: float
    """Time of planning in seconds."""
    waited: bool
    """Whether nothing was in flight then."""
    rows: int = 0
    """Number of sequences that it samples for."""
    promise: float = 0.0
    """Predicted tokens per second, if the step waited so that tokens could be drafted; else 0."""


@dataclass(slots=True)
class Account:
    """Results of steps with drafts, for batches of one size."""

    gap: float
    """Seconds that the device waits for the host before a step with drafts."""
    given: float = 0.0
    """Number of tokens that these steps gave, weighted towards the latest."""
    promised: float = 0.0
    """Number of tokens that these steps were predicted to give in the time that they took."""

    @property
    def trust(self) -> float:
        """The measured share of the predicted tokens per second; at most 1."""
        return min(1.0, self.given / self.promised) if self.promised else 1.0

    def settle(self, given: float, promised: float) -> None:
        """Note the tokens that one step gave, and the predicted number."""
        if not self.promised:
            self.given = self.promised = PRIOR * promised
        self.given += given - self.given / PRIOR / 2
        self.promised += promised - self.promised / PRIOR / 2

    def forget(self) -> None:
        """Trust predictions a little more, because a step passed without drafts."""
        self.given += (self.promised - self.given) / PATIENCE


class SpeculationPart(Verification):
    """Lets decodes verify drafted tokens if that gives more tokens per second.

    A draft needs the last token of its sequence, so a step with drafts can be planned only when the results of all
    earlier steps are known. The device then waits for the host in between. So either all decodes wait for each other's
    tokens, or no draft is made and steps are planned ahead as usual. The better of the two is chosen for each step.

    The tokens per second of a step are its expected tokens over the predicted time of the step and of the wait.
    Expected tokens are the decodes, and for each guess the chance that it and all earlier ones are right. Chances come
    from how often guesses came true, for each sequence. While none are drafted, test guesses are made now and then.
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
        """`most` guesses for each sequence; `rows` is the number of tokens that a step can sample in all.

        A step with drafts is predicted to end within the `target`, in seconds. With several `stages`, decodes wait
        only for tokens of their own last step, while steps of other decodes are on the other stages.
        """
        super().__init__()
        self.tokens_drafted = self.drafts_accepted = 0
        """Number of drafted tokens that steps have verified so far, and number of right ones among them."""
        self._drafter = drafter
        self._most, self._sampled, self._target, self._stages = most, rows, target, stages
        self._predictor = cost.predictor()
        self._rows: dict[Entry, Row] = {}
        self._noted = 0
        """Tokens noted in the step under construction."""
        self._ratio = self._drafts_ratio = 1.0
        """Measured over predicted time of steps of decodes without drafts; the further ratio of those with drafts."""
        self._accounts: dict[int, Account] = {}
        """Account of each batch size, by the power of two that the number of decodes is below."""
        self._idle = 0.0
        """Seconds that the device waits for the host before a step that was planned ahead."""
        self._promise = 0.0
        """Predicted tokens per second of the step that waits so that drafts can be made; 0: no step waits."""
        self._promised = 0.0
        """`_promise` as it stood when the step under construction began."""
        self._planned: dict[int, tuple[Sequence[Entry], dict[Entry, tuple[int, ...]], float]] = {}
        """For each step in flight: the sampling sequences, the drafts, and the predicted seconds if it only decodes."""
        self._last = Planned(-1, 0.0, waited=False)
        self._seconds, self._given = inf, 0
        """Seconds of the last step whose result is known, and the number of tokens that it gave."""
        self._apart = 0.0
        """Further seconds that the device spent on work of other parts after that step."""

    def account(self, rows: int) -> Account:
        """The account of steps with drafts that have about this many decodes."""
        size = rows.bit_length()
        if size not in self._accounts:
            self._accounts[size] = Account(GAP + GAP_OF_ROW * rows)
        return self._accounts[size]

    def begin(self, step: PartStep) -> None:
        super().begin(step)
        self._noted = self._drafter.index(NOTED)
        decoding = [entry for entry in step.running if entry.decoding]
        only = len(decoding) == len(step.running) and self._stages == 1
        if self._stages > 1:
            decoding = [entry for entry in decoding if entry.next_step <= step.number]
        in_flight = step.in_flight and any(unknown(entry) for entry in decoding)
        in_flight = in_flight and step.bound == inf  # a bounded step must not wait for the host
        if in_flight and (self._pays(decoding) or (only and self._too_few(decoding, step.number))):
            step.postpone()  # it is planned once their tokens are known
            return
        self._measure(step)
        self._promised, self._promise = self._promise, 0.0

    def decoded(self, step: PartStep) -> None:
        super().decoded(step)
        if self._drafts:
            step.limit_draws(self._sampled - len(step.sampling) - sum(map(len, self._drafts.values())))

    def finish(self, step: PartStep) -> PartPlan | None:
        if step.num_tokens:
            alone = step.num_tokens == len(step.sampling) + sum(map(len, self._drafts.values()))
            contexts = [entry.cache.planned for entry in step.sampling]
            seconds = self._predictor.drafted(step.num_tokens, contexts) if alone else 0.0
            self._planned[step.number] = step.sampling, self._drafts, seconds
            rows = len(step.sampling)
            promise = self._promised if alone else 0.0
            self._last = Planned(step.number, step.now, not step.in_flight, rows, promise)
        return super().finish(step)

    def apply(self, plan: StepPlan, result: StepResult, now: float) -> Iterable[Entry]:
        self._learn(plan, result)
        return super().apply(plan, result, now)

    def stats(self) -> Mapping[str, float]:
        return {"tokens_drafted": self.tokens_drafted, "drafts_accepted": self.drafts_accepted}

    def _learn(self, plan: StepPlan, result: StepResult) -> None:
        """Learn from the result of a step how long steps take, and which guesses were right."""
        self._seconds, self._given, self._apart = result.seconds, len(result.tokens), result.seconds_apart
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
        if self._rows.pop(entry, None) is not None:
            request = entry.sequence.request
            self._drafter.end(request.identity, entry.sequence.tokens[request.answer_start :])

    def _measure(self, step: PartStep) -> None:
        """Learn from the time since the last step was planned, if this one follows it at once."""
        last, waited = self._last, not step.in_flight
        if last.number != step.number - 1 or last.waited is not waited or not step.running:
            return
        cycle = step.now - last.at - self._apart
        gap = cycle - self._seconds
        if gap >= MOST_GAP + self._seconds:
            return
        gap = min(max(gap, 0.0), MOST_GAP)
        if not waited:
            self._idle += WEIGHT * (gap - self._idle)
            return
        account = self.account(last.rows)
        account.gap += WEIGHT * (gap - account.gap)
        if last.promise:
            account.settle(self._given, last.promise * cycle)

    def _pays(self, decoding: Sequence[Entry]) -> bool:
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
        _, self._promise = self._shares(chances, contexts, self._sampled - rows)
        if not self._promise:
            self.account(rows).forget()
        return self._promise > 0

    def _too_few(self, decoding: Sequence[Entry], number: int) -> bool:
        """Whether all decodes had better wait, because drafts in flight leave too few that can be planned now.

        A step of these few alone takes nearly as long as a step of all, which would be planned after it.
        """
        rows, free = len(decoding), sum(entry.next_step <= number for entry in decoding)
        if free == rows:  # there are no such drafts
            return False
        contexts = [entry.cache.planned + 1 for entry in decoding]
        whole = self._ratio * self._predictor.drafted(rows, contexts)
        alone = self._ratio * self._predictor.drafted(free, contexts[:free]) if free else 0.0
        return rows / (whole + self.account(rows).gap) > (rows + free) / (whole + alone + self._idle)

    def draft(self, step: PartStep) -> Mapping[Entry, Sequence[int]]:
        """The drafts for those decodes of the step whose tokens are known, as far as they pay.

        If the device has waited for these tokens, it did so whether or not there are drafts now. If it waits only
        because too few decodes were free, drafts must beat steps that are planned ahead.
        """
        found: list[tuple[Entry, tuple[int, ...]]] = []
        chances: list[tuple[float, int, float]] = []
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
                chances.append((min(row.hits, MOST_RATE), len(guesses), 1.0))
        if not found:
            return {}
        contexts = [entry.cache.planned for entry in step.sampling]
        room = min(step.budget, self._sampled - len(contexts))
        shares, _ = self._shares(chances, contexts, room, waited=self._promised > 0)
        return {entry: guesses[:share] for (entry, guesses), share in zip(found, shares, strict=False) if share}

    def _shares(
        self, chances: Sequence[tuple[float, int, float]], contexts: list[int], room: int, *, waited: bool = False
    ) -> tuple[list[int], float]:
        """How many guesses of each sequence to verify, and predicted tokens per second; none and 0 if it does not pay.

        `chances` has for each sequence the chance of a guess, the number of guesses, and the chance that there are any.
        `contexts` are those of all decodes of the step. There are at most `room` guesses in all. The guesses with the
        highest chance of use come first: the chance of a sequence's n-th guess is the n-th power of its chance. They
        must beat a step that was planned ahead; or, if the device has `waited` anyway, one that was not.
        """
        rows = len(contexts)
        attention = self._predictor.decodes(contexts)
        uses = [match * chance**place for chance, count, match in chances for place in range(1, count + 1)]
        account, ratio = self.account(rows), self._ratio * self._drafts_ratio
        plain = self._ratio * (self._predictor.drafted(rows, []) + attention)
        best = rows / (plain + account.gap) if waited else MARGIN * rows / (plain + self._idle) / account.trust
        share, gain = 0, 0.0
        order = sorted(uses, reverse=True)[: max(0, room)]
        every = 1 if len(order) <= 64 else 8
        for count, chance in enumerate(order, 1):
            gain += chance
            if count % every and count < len(order):
                continue
            seconds = ratio * (self._predictor.drafted(rows + count, []) + attention)
            if seconds > self._target:
                break
            if (rate := (rows + gain) / (seconds + account.gap)) > best:
                best, share = rate, count
        if not share:
            return [], 0.0
        return shares_of(chances, order[share - 1], share), best

    def _each(self, rows: int) -> int:
        """Most guesses to look for in each of `rows` sequences: twice the number for which there is room in all."""
        return min(self._most, max(1, 2 * (self._sampled - rows) // max(1, rows)))

    def _room(self, entry: Entry, most: int) -> int:
        """Most guesses for a sequence: its last token is sampled, never guessed."""
        return max(0, min(most, entry.limit - len(entry.sequence.tokens) - 1))

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


def unknown(entry: Entry) -> bool:
    """Whether a token of a decoding sequence is still to come."""
    return entry.sequence.in_flight > 0


def shares_of(chances: Sequence[tuple[float, int, float]], least: float, share: int) -> list[int]:
    """How many guesses of each sequence are among the `share` likeliest, of which the last has the chance `least`.

    `chances` is that of `SpeculationPart._shares`. Guesses of earlier sequences go first among those with the
    chance `least`.
    """
    places = [[match * chance**place for place in range(1, count + 1)] for chance, count, match in chances]
    shares = [sum(use > least for use in uses) for uses in places]
    left = share - sum(shares)
    for number, uses in enumerate(places):
        taken = min(left, uses.count(least))
        shares[number] += taken
        left -= taken
    return shares
